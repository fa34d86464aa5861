"""Low-precision weights: rounding, storage and multiplication."""
