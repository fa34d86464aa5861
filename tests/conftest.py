"""Shapes and types of every annotated function are checked while tests run, and nowhere else.

That takes more time than all else: `make test` has it done where parts are tested in every variant, and with
CLEARHEAD_SHAPES=unchecked leaves it out where whole models are trained, loaded and compared.
"""

import os

from jaxtyping import install_import_hook

if os.environ.get("CLEARHEAD_SHAPES") != "unchecked":
    # the numeric tower: a whole number is fine where a float is asked for, as in JSON
    install_import_hook("clearhead", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
