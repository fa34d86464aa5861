"""Shapes and types of every annotated function are checked while tests run, and nowhere else."""

from jaxtyping import install_import_hook

install_import_hook("clearhead", "beartype.beartype")
