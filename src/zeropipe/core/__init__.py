"""What a schedule is. Needs nothing but the standard library (numba only to be fast on large inputs)."""
