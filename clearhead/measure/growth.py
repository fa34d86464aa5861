"""How mixers grow: time, memory and FLOPs of forward, backward and decoding against the length, measured side by side.

A contestant is a whole model. Those made of a mixer alone share width, layers and vocabulary, and their feed-forward
layers are widened until they have the parameters, or take the FLOPs, of the first.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.configs import (
    AttentionConfig,
    Blockwise,
    Causal,
    FavorConfig,
    FeedForwardConfig,
    Full,
    Global,
    LinearAttentionConfig,
    LinformerConfig,
    LSTMConfig,
    MambaConfig,
    Mask,
    MixerConfig,
    RotaryConfig,
    Scattered,
    SequenceModelConfig,
    TokenEmbeddingConfig,
    Window,
)
from clearhead.models.device import choose_device
from clearhead.models.initialise import initialise
from clearhead.models.llama import decoder
from clearhead.models.model import SequenceModel
from clearhead.nn.build import build_part
from clearhead.nn.cache import DecodeState
from clearhead.nn.context import Context

from .cost import cost

CPU = torch.device("cpu")
PASSES = ("forward", "backward", "decode")
DECODED = 8  # tokens; the median of their times is reported
ERROR_LENGTH = 4096  # up to which the error against full attention is measured
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t that 95 % lie within, for 1 to 10 degrees of freedom; beyond, 1.96 is near enough."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the models that are built around each mixer."""

    dim: int = 256
    layers: int = 2
    heads: int = 4
    vocabulary: int = 256
    causal: bool = True  # for the mixers that can be causal


@dataclass(frozen=True)
class Contestant:
    """Something to measure. It makes a model for each length, because some mixers are built for one length only."""

    name: str
    make: Callable[[int], SequenceModelConfig]
    fused: bool = True  # False: attention in plain operations, with the whole matrix of scores
    fixed: bool = False  # a model that is measured as it is


@dataclass(frozen=True)
class Measured:
    """One contestant at one length: seconds and bytes of each pass, None if it has no such pass.

    The bytes of decoding include the decode state.
    """

    length: int
    parameters: int
    flops: int  # of the forward pass, as `cost` counts them
    seconds: dict[str, float | None]
    peak: dict[str, int | None]
    error: float | None  # relative error of the first mixer against full attention with the same weights


@dataclass(frozen=True)
class Growth:
    """y ~ n^exponent, with the margin of a 95 % confidence interval."""

    exponent: float
    margin: float | None  # None: two points lie on every line


@dataclass(frozen=True)
class Comparison:
    name: str
    measured: list[Measured]

    def growth(self, what: str, which: str) -> Growth | None:
        """Fit how `seconds` or `peak` of one pass grows with the length; None with fewer than two lengths."""
        found = {m.length: getattr(m, what)[which] for m in self.measured}
        points = {length: value for length, value in found.items() if value}
        return fit(list(points), list(points.values())) if len(points) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        growth = {what: {which: self.growth(what, which) for which in PASSES} for what in ("seconds", "peak")}
        shown = {what: {k: v and asdict(v) for k, v in by_pass.items()} for what, by_pass in growth.items()}
        return {"name": self.name, "measured": [asdict(m) for m in self.measured], "growth": shown}


def mixers(size: ModelSize) -> dict[str, Callable[[int], MixerConfig]]:
    """The named mixers, as functions of the length. `full` and `flash` differ only in how they are run."""
    order: Mask = Causal() if size.causal else Full()

    def attention(mask: Mask) -> MixerConfig:
        allowed = order if mask == Full() else order & mask if size.causal else mask
        return AttentionConfig(heads=size.heads, mask=allowed, rotary=RotaryConfig())

    def bigbird(length: int) -> MixerConfig:
        blocks = -(-length // 64)
        return attention(Blockwise(64, Window(2) | Global(1) | Scattered(min(3, blocks), among=blocks)))

    return {
        "full": lambda n: attention(Full()),
        "flash": lambda n: attention(Full()),
        "window": lambda n: attention(Window(257)),
        "longformer": lambda n: attention(Window(257) | Global(1)),
        "bigbird": bigbird,
        "linformer": lambda n: LinformerConfig(heads=size.heads, length=n, rows=128, shared=True),
        "linear": lambda n: LinearAttentionConfig(heads=size.heads, mask=order),
        "performer": lambda n: LinearAttentionConfig(heads=size.heads, mask=order, kernel=FavorConfig(features=256)),
        "mamba": lambda n: MambaConfig(),
        "lstm": lambda n: LSTMConfig(),
    }


def of_mixer(name: str, mixer: Callable[[int], MixerConfig], size: ModelSize, *, fused: bool = True) -> Contestant:
    """A decoder around a mixer."""

    def make(length: int) -> SequenceModelConfig:
        ffn = FeedForwardConfig(hidden=4 * size.dim, bias=False)
        return decoder(dim=size.dim, layers=size.layers, mixer=mixer(length), ffn=ffn, vocabulary=size.vocabulary)

    return Contestant(name, make, fused=fused)


def compare(
    contestants: Sequence[Contestant],
    lengths: Sequence[int],
    *,
    batch: int = 1,
    rounds: int = 3,
    equal: str | None = "parameters",
    device: str = "auto",
    say: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """Measure every contestant at every length.

    equal   match models built from mixers to the first, at each length: "parameters", "compute", or None
    device  where they run: "auto" (a GPU if there is one), "cpu", "cuda" or "mps"
    """
    if equal not in ("parameters", "compute", None):
        raise ValueError(f"equal is {equal!r}, but must be 'parameters', 'compute' or None")
    lengths, place = sorted(lengths), choose_device(device)
    planned = [configs(contestants, length, equal) for length in lengths]  # raises before anything is measured
    found = []
    for which, contestant in enumerate(contestants):
        measured = []
        measure(planned[0][which], lengths[0], batch, 1, contestant.fused, place)  # warm up
        for length, models in zip(lengths, planned, strict=True):
            say(f"{contestant.name}, {length:,} tokens")
            measured.append(measure(models[which], length, batch, rounds, contestant.fused, place))
        found.append(Comparison(contestant.name, measured))
    return found


def configs(contestants: Sequence[Contestant], length: int, equal: str | None) -> list[SequenceModelConfig]:
    """The config of each contestant for a length. Those built from mixers are matched to the first in size or cost."""
    first, *others = (one.make(length) for one in contestants)
    if equal is not None:
        others = [
            config if one.fixed else match_size(config, first, equal, length, one.name)
            for one, config in zip(contestants[1:], others, strict=True)
        ]
    made = [first, *others]
    for config in made:
        cost(config, length=length)  # raises if the model cannot read this length
    return made


def match_size(
    config: SequenceModelConfig, like: SequenceModelConfig, equal: str, length: int, name: str
) -> SequenceModelConfig:
    """Change the width of the feed-forward layers until the config is as large, or as costly, as `like`."""

    def amount(config: SequenceModelConfig) -> int:
        return parameters(config) if equal == "parameters" else cost(config, length=length).flops.forward

    def of_width(hidden: int) -> SequenceModelConfig:
        return config.with_value("stack.pattern.0.ffn.hidden", hidden)

    wanted, low, high = amount(like), 1, config.stack.dim
    if amount(of_width(low)) > wanted:
        raise ValueError(
            f"{name} has more {equal} than the first even with hardly any feed-forward layer; use --equal no"
        )
    while amount(of_width(high)) < wanted:
        high *= 2
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if amount(of_width(middle)) <= wanted else (low, middle - 1)
    return of_width(low)


def parameters(config: SequenceModelConfig) -> int:
    return sum(math.prod(shape) for shape in config.weights().values())


def measure(
    config: SequenceModelConfig, length: int, batch: int, rounds: int, fused: bool, device: torch.device = CPU
) -> Measured:
    assert isinstance(config.embedding, TokenEmbeddingConfig)
    torch.manual_seed(0)
    model = SequenceModel(config)
    initialise(model)
    model.to(device)
    tokens = torch.randint(0, config.embedding.vocabulary, (batch, length)).to(device)
    seconds: dict[str, float | None] = dict.fromkeys(PASSES)
    peak: dict[str, int | None] = dict.fromkeys(PASSES)
    predicted = cost(config, batch=batch, length=length)
    for name, run in {"forward": forward, "backward": backward}.items():
        peak[name] = peak_memory(partial(run, model, tokens, fused), device)  # which also warms up
        seconds[name] = statistics.median(run(model, tokens, fused) for _ in range(rounds))
    if config.stack.causal:
        grown = peak_memory(partial(seconds_per_token, model, prefill(model, tokens), tokens, fused), device)
        peak["decode"] = None if grown is None else predicted.memory.kv_cache + grown
        seconds["decode"] = statistics.median(
            seconds_per_token(model, prefill(model, tokens), tokens, fused) for _ in range(rounds)
        )
    error = error_of(config.stack.blocks[0].mixer, config.stack.dim, length) if length <= ERROR_LENGTH else None
    return Measured(length, parameters(config), predicted.flops.forward, seconds, peak, error)


@torch.inference_mode()
def forward(model: SequenceModel, tokens: Tensor, fused: bool) -> float:
    """Seconds of a pass over the text."""
    start = read_clock(tokens.device)
    model(tokens, fused=fused)
    return read_clock(tokens.device) - start


def backward(model: SequenceModel, tokens: Tensor, fused: bool) -> float:
    """Seconds of the backward pass alone."""
    loss = model(tokens, fused=fused).float().square().mean()
    start = read_clock(tokens.device)
    loss.backward()
    taken = read_clock(tokens.device) - start
    model.zero_grad(set_to_none=True)
    return taken


@torch.inference_mode()
def prefill(model: SequenceModel, tokens: Tensor) -> DecodeState:
    """The decode state after all but the last few tokens."""
    state = model.init_state(*tokens.shape)
    model(tokens[:, :-DECODED], state=state)
    return state


@torch.inference_mode()
def seconds_per_token(model: SequenceModel, state: DecodeState, tokens: Tensor, fused: bool) -> float:
    """Seconds per token for decoding the last few tokens."""
    taken = []
    for token in tokens[:, -DECODED:].split(1, dim=1):
        start = read_clock(tokens.device)
        model(token, state=state, fused=fused)
        taken.append(read_clock(tokens.device) - start)
    return statistics.median(taken)


def read_clock(device: torch.device) -> float:
    """Seconds on the clock when the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def error_of(mixer: MixerConfig, dim: int, length: int) -> float | None:
    """|y − y_full| / |y_full| on random input: the mixer against full attention with the same weights.

    None if the mixer has no such weights.
    """
    if "qkv.weight" not in mixer.weights(dim):
        return None
    alike = {f.name: getattr(mixer, f.name) for f in fields(AttentionConfig) if hasattr(mixer, f.name)}
    attention = AttentionConfig(**alike | {"mask": Causal() if mixer.mask.causal else Full()})
    one, other = (build_part(part, dim).eval() for part in (mixer, attention))
    weights = one.state_dict()
    other.load_state_dict({name: weights[name] for name in other.state_dict()})
    x, positions = torch.randn(1, length, dim), torch.arange(length)[None]
    with torch.inference_mode():
        y, full = (part(x, Context(positions, positions, aligned=True)) for part in (one, other))
    return float((y - full).norm() / full.norm())


def fit(lengths: Sequence[int], values: Sequence[float]) -> Growth:
    """The slope of log value against log length, by least squares, and the margin of a 95 % interval."""
    x, y = [math.log(length) for length in lengths], [math.log(value) for value in values]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    free = len(x) - 2
    if not free:
        return Growth(slope, None)
    left = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    t = T_95[free - 1] if free <= len(T_95) else 1.96
    return Growth(slope, t * math.sqrt(left / free / spread))


def peak_memory(run: Callable[[], object], device: torch.device = CPU) -> int | None:
    """The most bytes by which the process, or its memory on a GPU, grew during `run`; None if they are not reported."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        run()
        return None
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system first, or `run` would use it without growing
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    except OSError:
        run()
        return None
    before = resident("VmRSS")
    run()
    return max(resident("VmHWM") - before, 0)


def resident(field: str) -> int:
    lines: Iterator[str] = iter(Path("/proc/self/status").read_text().splitlines())
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
