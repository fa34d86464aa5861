"""Serve models over HTTP with the OpenAI API, and from Python with `Engine`."""

from __future__ import annotations

from typing import Any

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from .engine import Engine

        return Engine
    raise AttributeError(f"module 'clearhead.serve' has no attribute {name!r}")
