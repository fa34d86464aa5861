"""Deny a process the network and writing outside one folder, with the Linux kernel's means and without root.

Both functions return True if the protection holds from now on, and False where the system does not offer it.
The network goes with a new user and network namespace, writing with Landlock.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
# system call numbers of Landlock, the same on all architectures (include/uapi/asm-generic/unistd.h)
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1
PR_SET_NO_NEW_PRIVS = 38
# write, remove and create files, directories and devices: bits 1, 4 … 12 of Landlock's ABI 1
WRITE_ACCESS = 1 << 1 | sum(1 << bit for bit in range(4, 13))


def block_network() -> bool:
    """Move this process into a network namespace without interfaces."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0)


def block_writes(folder: Path) -> bool:
    """Allow writing only beneath the folder, and to /dev/null."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    handled = struct.pack("=Q", WRITE_ACCESS)
    ruleset = libc.syscall(CREATE_RULESET, handled, len(handled), 0)
    if ruleset < 0:
        return False
    try:
        for place, access in ((folder, WRITE_ACCESS), (Path(os.devnull), 1 << 1)):
            opened = os.open(place, os.O_PATH)
            try:
                rule = struct.pack("=Qi", access, opened)
                if libc.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0):
                    return False
            finally:
                os.close(opened)
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            return False
        return bool(libc.syscall(RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)
