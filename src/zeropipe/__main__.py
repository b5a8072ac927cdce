"""`python -m zeropipe`, and so `torchrun -m zeropipe run ...`."""

from zeropipe.cli import main

if __name__ == "__main__":
    main()
