"""The engine room: C kernels, how they are built and loaded, and the decode step that runs on them."""
