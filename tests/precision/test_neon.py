"""The kernels compiled for ARM and run in an emulator: NEON is correct, wherever the tests run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from clearhead.kernels.build import FLAGS, SOURCE

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
CHECK = Path(__file__).with_name("check_kernels.c")


def test_neon_products_and_attention_equal_plain_loops(tmp_path: Path) -> None:
    for program in (COMPILER, EMULATOR):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    made = tmp_path / "check"
    # the vectorizer of GCC 12 for ARM fails on the plain loops of the check
    flags = (*FLAGS, "-static", "-fno-tree-vectorize", f"-I{SOURCE.parent}")
    subprocess.run([COMPILER, *flags, str(CHECK), "-lm", "-o", str(made)], check=True)
    done = subprocess.run([EMULATOR, str(made)], capture_output=True, text=True, check=True)
    errors = {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}
    assert errors.pop("width") == 16
    assert set(errors) == {"float32", "bfloat16", "float16", "int8", "int4", "attention", "attention_float16"}
    assert max(errors.values()) < 1e-6, errors
