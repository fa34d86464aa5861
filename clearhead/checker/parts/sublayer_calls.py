"""Record the sublayer calls of a block, and call the sublayers again on other inputs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..engine import NumPy
from ..names import part_of

KINDS = {
    "multi_head": "attention",
    "attention": "attention",
    "feed_forward": "ffn",
    "swiglu": "ffn",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "encoder_block": "block",
    "decoder_block": "block",
}


@dataclass
class SublayerCall:
    """One call of a sublayer."""

    kind: str
    target: Any  # what was called
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    engine: NumPy
    owner: Any = None  # the module that was called
    known: dict[bytes, np.ndarray] = field(default_factory=dict)  # results of `rerun` by input

    @property
    def main(self) -> Any:
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    @property
    def adds(self) -> bool:
        """True for AddNorm(x, y): a norm of the sum of its two arguments."""
        return len(self.args) == 2 and getattr(self.args[0], "shape", 0) == getattr(self.args[1], "shape", 1)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        taken = self.engine.to_numpy(self.target(self.engine.to_native(x), self.engine.to_native(y)))
        assert taken is not None
        return taken

    def rerun(self, h: np.ndarray) -> np.ndarray:
        """Call the sublayer again with h in place of its first argument, wherever that was passed."""
        key = h.tobytes()
        if key not in self.known:
            self.known[key] = self.call_on(h)
        return self.known[key]

    def call_on(self, h: np.ndarray) -> np.ndarray:
        first = self.main
        new = self.engine.to_native(h)

        def swap(value: Any) -> Any:
            return new if value is first or same(value, first) else value

        result = self.target(*map(swap, self.args), **{n: swap(v) for n, v in self.kwargs.items()})
        taken = self.engine.to_numpy(result[0] if isinstance(result, tuple | list) else result)
        assert taken is not None
        return taken


def same(a: Any, b: Any) -> bool:
    if getattr(a, "shape", None) != getattr(b, "shape", ()) or getattr(a, "dtype", None) != getattr(b, "dtype", ()):
        return False
    return bool((a == b).all())


def kind_of(name: str, thing: Any) -> str | None:
    """Return the kind of a sublayer, by its class or else by its attribute name."""
    cls = type(thing).__name__
    if cls in ("Dropout", "ModuleList", "ModuleDict", "Identity", "Embedding"):
        return None
    if cls == "MultiheadAttention":
        return "attention"
    by_class = None if inspect.isfunction(thing) or inspect.ismethod(thing) else KINDS.get(part_of(cls) or "")
    if by_class or cls in ("Linear", "Tensor", "Parameter"):
        return by_class
    low = name.lower()
    if re.search(r"residual|connection|sublayer|drop|skip", low):
        return None  # it wraps a sublayer
    if re.search(r"norm|^ln|_ln|layernorm", low):
        return "norm"
    if re.search(r"attn|attention|mha|^sa$|heads", low):
        return "attention"
    return "ffn" if re.search(r"ff|mlp|feed", low) else None


@contextmanager
def record_calls(thing: Any, engine: NumPy, neighbours: Mapping[str, Any]) -> Iterator[list[SublayerCall]]:
    """Record the calls of the outermost sublayers while the block runs."""
    calls: list[SublayerCall] = []
    depth = [0]

    def around(kind: str, target: Callable[..., Any], owner: Any = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                result = target(*args, **kwargs)
            finally:
                depth[0] -= 1
            if depth[0] == 0 and (args or kwargs):
                calls.append(SublayerCall(kind, target, args, kwargs, result, engine, owner))
            return result

        return call

    undo: list[Callable[[], Any]] = []
    if hasattr(thing, "named_modules"):
        for name, module in thing.named_modules():
            kind = kind_of(name.split(".")[-1], module) if name else None
            if kind is not None:
                plain = module.forward
                module.forward = around(kind, plain, module)
                undo.append(partial(module.__dict__.pop, "forward", None))
    else:
        for name, value in list(vars(thing).items()) + [
            (n, m) for n, m in inspect.getmembers(thing, inspect.ismethod) if not n.startswith("_") and n != "forward"
        ]:
            kind = kind_of(name, value) if callable(value) or hasattr(value, "forward") else None
            if kind is not None:
                undo.append(wrap_attribute(thing, name, value, kind, around))
        for name, value in list(neighbours.items()):
            kind = KINDS.get(part_of(name) or "") if inspect.isfunction(value) else None
            if kind in ("norm", "attention", "ffn") and isinstance(neighbours, dict):
                neighbours[name] = around(kind, value)
                undo.append(partial(neighbours.__setitem__, name, value))
    try:
        yield calls
    finally:
        for back in undo:
            back()


def wrap_attribute(thing: Any, name: str, value: Any, kind: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a sublayer of a NumPy object by a wrapper that records its calls."""
    if inspect.ismethod(value) or inspect.isfunction(value):
        setattr(thing, name, around(kind, value))
        return lambda: delattr(thing, name) if inspect.ismethod(value) else setattr(thing, name, value)
    run = value.forward if hasattr(value, "forward") else value

    class RecordedSublayer:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return around(kind, run)(*args, **kwargs)

        forward = __call__

        def __getattr__(self, inner: str) -> Any:
            return getattr(value, inner)

    setattr(thing, name, RecordedSublayer())
    return lambda: setattr(thing, name, value)
