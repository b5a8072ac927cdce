"""Tests of the integrations run in virtual environments of their own: `make test-torchtitan`, and others."""

import os

# ranks run side by side: threads of their own would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
