"""Shapes and types of every annotated function are checked while tests run, and nowhere else."""

from jaxtyping import install_import_hook

# the numeric tower: a whole number is fine where a float is asked for, as in JSON
install_import_hook("clearhead", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
