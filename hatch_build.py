"""Compile the kernels into the wheel, for every x86-64 instruction set that they are written for."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=gnu11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fPIC")
INSTRUCTION_SETS = ("x86-64-v3", "x86-64-v4")


class PrebuildHook(BuildHookInterface):
    """Adds `clearhead/kernels/prebuilt/<instruction set>.so`; the library that fits is chosen at run time."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not os.environ.get("CLEARHEAD_PREBUILD") or platform.machine() not in ("x86_64", "AMD64"):
            return
        kernels, made = Path(self.root, "clearhead/kernels"), Path(self.root, "build/prebuilt")
        made.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        for name in INSTRUCTION_SETS:
            library = made / f"{name}.so"
            source = [str(kernels / "kernels.c"), "-lm", "-o", str(library)]
            subprocess.run([*compiler, *FLAGS, f"-march={name}", "-shared", *source], check=True)
            build_data["force_include"][str(library)] = f"clearhead/kernels/prebuilt/{name}.so"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{os.environ.get('CLEARHEAD_PLATFORM', 'manylinux_2_28_x86_64')}"
