"""What stands in attention's place, beside the packages that have it, and how its time grows with the length.

mambapy, performer-pytorch and linformer are needed for this file alone: `pip install .[bench]`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.configs import (
    BlockConfig,
    Causal,
    FavorConfig,
    Float32,
    Full,
    LinearAttentionConfig,
    LinformerConfig,
    MambaConfig,
    Mask,
    MixerConfig,
    RMSNormConfig,
    StackConfig,
)
from clearhead.kernels.accelerate import accelerate
from clearhead.kernels.malloc import keep_memory
from clearhead.models.initialise import initialise
from clearhead.models.quantize import replace_matrices
from clearhead.nn.build import build_part
from clearhead.nn.cache import StateAllocator
from clearhead.nn.context import Context

from .turns import report, take_turns

DIM, HEADS = 512, 8
FEATURES = int(DIM // HEADS * math.log(DIM // HEADS))  # what performer-pytorch takes by itself


def main() -> None:
    mamba_training()
    mamba_decoding()
    performers()
    linformers()
    growth()


def context(length: int) -> Context:
    positions = torch.arange(length)[None]
    return Context(positions, positions, aligned=True)


def step(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Forward and backward, the input's gradient with them."""
    run(x.requires_grad_()).sum().backward()
    x.grad = None


def mambas(layers: int = 4) -> tuple[Any, Any]:
    """Ours and mambapy's, d 512, state 16, with the same weights."""
    from mambapy.mamba import Mamba as Theirs
    from mambapy.mamba import MambaConfig as TheirConfig

    theirs = Theirs(TheirConfig(d_model=DIM, n_layers=layers))
    block = BlockConfig(mixer=MambaConfig(), norm=RMSNormConfig())
    ours = build_part(StackConfig(dim=DIM, pattern=(block,), repeats=layers), DIM)
    with torch.no_grad():
        for one, other in zip(ours.blocks, theirs.layers, strict=True):
            mixer, source = one.mixer, other.mixer
            one.mixer_residual.before.weight.copy_(other.norm.weight)
            mixer.input.weight.copy_(source.in_proj.weight)
            mixer.filter.copy_(source.conv1d.weight.squeeze(1).T)
            mixer.filter_bias.copy_(source.conv1d.bias)
            mixer.select.weight.copy_(source.x_proj.weight)
            mixer.step.load_state_dict(source.dt_proj.state_dict())
            mixer.decay.copy_(source.A_log.T)
            mixer.skip.copy_(source.D)
            mixer.out.weight.copy_(source.out_proj.weight)
    return ours, theirs


def mamba_training() -> None:
    ours, theirs = mambas()
    rates = {}
    for length in (512, 2048):
        x = torch.randn(1, length, DIM)
        with torch.no_grad():
            difference = (ours(x, context(length)) - theirs(x)).abs().max()
        seconds = take_turns(
            {
                "clearhead": lambda x=x, n=length: step(lambda y: ours(y, context(n)), x),
                "mambapy": lambda x=x: step(theirs, x),
            },
            rounds=3,
        )
        report(
            f"Mamba, 4 layers, d 512, training step of 1 × {length} (differ by {difference:.1e})", seconds, "clearhead"
        )
        rates[length] = {name: length / taken for name, taken in seconds.items()}
    for length, rate in rates.items():
        print(f"  {length} tokens: " + ", ".join(f"{name} {value:.0f} tokens/s" for name, value in rate.items()))


def mamba_decoding() -> None:
    ours, theirs = mambas()
    prepared = copy.deepcopy(ours)
    replace_matrices(prepared, Float32(), ours.state_dict(), {})  # as `clearhead.quantize` does to a whole model
    prepared = accelerate(prepared)
    x = torch.randn(1, 1, DIM)
    for past in (0, 4000):
        runs = {"clearhead, float32 kernels": stepping(prepared, x), "clearhead": stepping(ours, x)}
        caches = [(None, torch.zeros(1, 2 * DIM, 3)) for _ in theirs.layers]
        with torch.inference_mode():
            for run in runs.values():
                for _ in range(past):
                    run()
            difference = (runs["clearhead"]() - runs["clearhead, float32 kernels"]()).abs().max()
            seconds = take_turns({**runs, "mambapy": lambda c=caches: theirs.step(x[:, 0], c)}, rounds=201)
        title = f"Mamba, 4 layers, d 512, one token after {past:,} (ours differ by {difference:.1e})"
        report(title, seconds, "clearhead, float32 kernels")
        print("  " + ", ".join(f"{name} {1 / taken:.0f} tokens/s" for name, taken in seconds.items()))


def stepping(stack: Any, x: Tensor) -> Callable[[], Tensor]:
    """One more token, again and again."""
    state = stack.init_state(StateAllocator(1, 1, x.dtype, x.device))
    return lambda: stack(x, context(1), state)


def layer(mixer: MixerConfig) -> Callable[[Tensor], Tensor]:
    module = build_part(mixer, DIM)
    initialise(module)
    return lambda x: module(x, context(x.shape[1]))


def both_ways(title: str, ours: Callable[[Tensor], Tensor], name: str, theirs: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        forward = take_turns({"clearhead": lambda: ours(x), name: lambda: theirs(x)}, rounds=5)
    report(f"{title}: forward", forward, "clearhead")
    both = take_turns({"clearhead": lambda: step(ours, x), name: lambda: step(theirs, x)}, rounds=3)
    report(f"{title}: forward and backward", both, "clearhead")


def performers() -> None:
    from performer_pytorch import SelfAttention

    for mask, length in ((Causal(), 4096), (Full(), 8192)):
        theirs = SelfAttention(dim=DIM, heads=HEADS, causal=mask.causal).train()
        ours = layer(performer(mask))
        title = f"Performer{', causal' * mask.causal}, d 512, 8 heads, {FEATURES} features, n {length:,}"
        both_ways(title, ours, "performer-pytorch", theirs, torch.randn(1, length, DIM))


def performer(mask: Mask) -> LinearAttentionConfig:
    return LinearAttentionConfig(heads=HEADS, mask=mask, kernel=FavorConfig(features=FEATURES), out_bias=True)


def linformers() -> None:
    from linformer import LinformerSelfAttention

    length, rows = 8192, 256
    theirs = LinformerSelfAttention(DIM, length, k=rows, heads=HEADS)
    module = build_part(LinformerConfig(heads=HEADS, length=length, rows=rows, out_bias=True), DIM)
    with torch.no_grad():
        module.key_rows.weight.copy_(theirs.proj_k.T)
        module.value_rows.weight.copy_(theirs.proj_v.T)
        module.qkv.weight.copy_(torch.cat((theirs.to_q.weight, theirs.to_k.weight, theirs.to_v.weight)))
        module.out.load_state_dict(theirs.to_out.state_dict())
        x = torch.randn(1, length, DIM)
        difference = (module(x, context(length)) - theirs(x)).abs().max()
    title = f"Linformer, d 512, 8 heads, {rows} rows, n {length:,} (differ by {difference:.1e})"
    both_ways(title, lambda x: module(x, context(x.shape[1])), "linformer", theirs, x)


def growth() -> None:
    """The slope of log time over log length, from 2,048 to 32,768; memory is kept, as the trainer does."""
    keep_memory()
    lengths = [2048 * 2**i for i in range(5)]
    mixers: dict[str, MixerConfig] = {
        "Linformer": LinformerConfig(heads=HEADS, length=lengths[-1], rows=256),
        "Performer": performer(Full()),
        "Performer, causal": performer(Causal()),
        "Mamba": MambaConfig(),
    }
    for name, mixer in mixers.items():
        run = layer(mixer)
        inputs = {length: torch.randn(1, length, DIM) for length in lengths}
        contestants = {str(n): lambda x=x, run=run: step(run, x) for n, x in inputs.items()}
        seconds = take_turns(contestants, rounds=3)
        logs = torch.tensor([[math.log(int(n)), math.log(taken)] for n, taken in seconds.items()]).T
        centred = logs - logs.mean(1, keepdim=True)
        exponent = float((centred[0] * centred[1]).sum() / centred[0].square().sum())
        times = ", ".join(f"{taken:.3f}" for taken in seconds.values())
        print(f"{name}, one layer, d 512, forward and backward of 2k to 32k: {times} s, exponent {exponent:.2f}")


if __name__ == "__main__":
    main()
