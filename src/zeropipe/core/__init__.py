"""What a schedule is. Imports nothing but the standard library, and numba in jit.py, when an input is large."""
