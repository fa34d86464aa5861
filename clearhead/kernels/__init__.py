"""The compiled kernels: C source, build and loading, and `accelerate(model)`, which decodes with them."""
