"""How gradients reach the first layer: pre- and post-norm, with and without residuals, in training too.

Taps remove the residual: the branch output replaces the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import isfinite, log
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    FeedForwardConfig,
    LayerNormConfig,
    LearnedConfig,
    LMHeadConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.configs.train import AdamWConfig, CosineConfig
from clearhead.models.initialise import RESIDUAL_OUTPUTS
from clearhead.models.model import SequenceModel, build
from clearhead.nn.tap import Taps
from clearhead.training.optimizer import NamedOptimizers, make_optimizer

from .result import Progress, Result, Rows, no_progress, require, tidy
from .training_loop import train_steps

Placement = Literal["pre", "post"]
STARTS = ("plain", "scaled")
BETA1, BETA2 = 0.9, 0.999
LEARNED = 0.9  # a loss below this fraction of ln V (guessing) counts as learned
COLUMNS = (
    "when", "start", "depth", "norm", "residual", "warm-up", "loss", "‖∂‖ first block", "‖∂‖ last block",
    "first / last", "√v̂", "|m̂|/√v̂",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    dim: int = 64
    heads: int = 4
    length: int = 32
    batch: int = 8
    vocabulary: int = 64


def make_model(size: Size, depth: int, placement: Placement, seed: int, scaled: bool = False) -> SequenceModel:
    """scaled: initialize branch outputs smaller by √(number of branches), as this package does; else as in 2017."""
    norm = LayerNormConfig()
    mixer = AttentionConfig(heads=size.heads, mask=Causal())
    block = BlockConfig(mixer=mixer, ffn=FeedForwardConfig(), norm=norm, placement=placement)
    torch.manual_seed(seed)
    model = build(
        SequenceModelConfig(
            embedding=TokenEmbeddingConfig(vocabulary=size.vocabulary, position=LearnedConfig(length=size.length)),
            stack=StackConfig(
                dim=size.dim, pattern=(block,), repeats=depth, final_norm=norm if placement == "pre" else None
            ),
            head=LMHeadConfig(vocabulary=size.vocabulary),
        )
    )
    assert isinstance(model, SequenceModel), "a sequence config builds a sequence model"
    if not scaled:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(RESIDUAL_OUTPUTS):
                    parameter.mul_((2 * depth) ** 0.5)
    return model


def random_text(size: Size, generator: torch.Generator) -> Int[Tensor, "B T"]:
    """Random text in which a token determines the next one 80 % of the time."""
    follows = torch.randperm(size.vocabulary, generator=torch.Generator().manual_seed(0))
    rows = [torch.randint(0, size.vocabulary, (size.batch,), generator=generator)]
    for _ in range(size.length):
        chance = torch.rand(size.batch, generator=generator) < 0.2
        drawn = torch.randint(0, size.vocabulary, (size.batch,), generator=generator)
        rows.append(torch.where(chance, drawn, follows[rows[-1]]))
    return torch.stack(rows, 1)


def loss_of(model: SequenceModel, tokens: Int[Tensor, "B T"], taps: Taps | None = None) -> Float[Tensor, ""]:
    logits = model(tokens[:, :-1], taps=taps)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def remove_residual() -> Taps:
    """Taps that turn x + f(x) into f(x)."""
    branch: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        branch[:] = [value]
        return value

    return Taps(replace={"*_residual.inside": keep, "*_residual": lambda _: branch[0]})


def block_gradient_norms(model: SequenceModel) -> list[float]:
    """The norm of the gradient of each block's weights."""
    squares = [
        sum(float(p.grad.square().sum()) for p in b.parameters() if p.grad is not None) for b in model.stack.blocks
    ]
    return [square**0.5 for square in squares]


def gradients(
    *,
    depths: Sequence[int] = (6, 12, 24, 48),
    dim: int = 64,
    heads: int = 4,
    length: int = 32,
    batch: int = 8,
    train_depth: int = 12,
    steps: int = 120,
    lr: float = 3e-3,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Result:
    """Measure gradient norms per block, at initialization for every depth and during training for one."""
    require(1, depths=depths, dim=dim, heads=heads, length=length, batch=batch, train_depth=train_depth)
    require(4, steps=steps)
    require(1e-12, lr=lr)
    size = Size(dim, heads, length, batch)
    generator = torch.Generator().manual_seed(seed)
    tokens = random_text(size, generator)
    rows: Rows = []
    layers: dict[str, list[float]] = {}
    placements: tuple[Placement, ...] = ("pre", "post")
    kinds = [
        (start, residual) for start in STARTS for residual in ("on", "off") if (start, residual) != ("scaled", "off")
    ]
    for depth, placement, (start, residual) in product(sorted(depths), placements, kinds):
        progress(f"{depth} blocks, {placement}-norm, residual {residual}, {start}")
        model = make_model(size, depth, placement, seed, start == "scaled")
        loss = loss_of(model, tokens, None if residual == "on" else remove_residual())
        loss.backward()
        norms = block_gradient_norms(model)
        name = f"{placement}, scaled start" if start == "scaled" else f"{placement}, residual {residual}"
        layers[name] = norms  # keep the deepest
        rows.append(
            ("start", start, depth, placement, residual, None, loss.item(), *first_last_ratio(norms), None, None)
        )
    runs = {}
    plans: list[tuple[Placement, str, int]] = [(p, "on", warm) for p in placements for warm in (0, steps // 3)]
    for placement, residual, warm in [*plans, ("pre", "off", steps // 3)]:
        name = f"{placement}, {f'warm-up {warm}' if warm else 'no warm-up'}{', no residual' * (residual == 'off')}"
        progress(name)
        model = make_model(size, train_depth, placement, seed)
        runs[name] = run = train_and_record(model, residual == "on", size, steps, warm, lr, seed)
        last = run[-1]
        numbers = (last.loss, *first_last_ratio(last.norms), last.root, last.update)
        rows.append(("end", "plain", train_depth, placement, residual, warm, *numbers))
    parts = gradient_terms(make_model(size, max(depths), "pre", seed).double().eval(), tokens)
    return Result(
        name="gradients",
        claim="Residuals carry gradients to the first layer; post-norm spoils that with depth, so it needs warm-up.",
        found=summarize(rows, runs, parts, steps, log(size.vocabulary)),
        columns=COLUMNS,
        rows=rows,
        draw=lambda picture, theme: draw(picture, layers, runs, parts, max(depths)),
        size=(15, 8),
        more={
            "block_gradient_norms": layers,
            "training": {name: [moment.to_dict() for moment in run] for name, run in runs.items()},
            "split": {"identity": parts.identity, "corrections": parts.corrections, "error": parts.error},
        },
    )


def first_last_ratio(norms: list[float]) -> tuple[float, float, float]:
    return norms[0], norms[-1], norms[0] / max(norms[-1], 1e-300)


@dataclass(frozen=True)
class TrainingStep:
    """One training step, with the statistics of Adam's moments."""

    step: int
    loss: float
    norms: list[float]
    root: float  # √ of the mean of v̂
    update: float  # mean of |m̂|/√v̂

    def to_dict(self) -> dict[str, Any]:
        numbers = {"step": self.step, "loss": self.loss, "second_moment_root": self.root, "update": self.update}
        return numbers | {"block_gradient_norms": self.norms}


def train_and_record(
    model: SequenceModel, residual: bool, size: Size, steps: int, warm: int, lr: float, seed: int
) -> list[TrainingStep]:
    generator = torch.Generator().manual_seed(seed + 1)
    optimizer = make_optimizer(AdamWConfig(lr=lr, beta1=BETA1, beta2=BETA2, weight_decay=0.0), model)
    schedule = CosineConfig(warmup=warm, floor=1.0)  # up, then level
    out = []
    for step, loss in train_steps(
        model,
        lambda: loss_of(model, random_text(size, generator), None if residual else remove_residual()),
        steps=steps,
        schedule=schedule,
        optimizer=optimizer,
        clip=None,
    ):
        out.append(TrainingStep(step, loss, block_gradient_norms(model), *adam_moments(optimizer, step)))
    return out


def adam_moments(optimizer: NamedOptimizers, step: int) -> tuple[float, float]:
    state = optimizer.tensors()
    second = torch.cat([v.flatten() for name, v in state.items() if name.endswith("exp_avg_sq")]) / (1 - BETA2**step)
    first = torch.cat([v.flatten() for name, v in state.items() if name.endswith("exp_avg")]) / (1 - BETA1**step)
    moved = second > 0
    return float(second.mean().sqrt()), float((first[moved].abs() / second[moved].sqrt()).mean())


@dataclass(frozen=True)
class GradientTerms:
    """∂L/∂x₀ as a sum: the identity term ∂L/∂x_L (residuals only) + one correction per branch."""

    identity: float  # norms
    corrections: list[float]  # from the first branch to the last
    total: float
    error: float  # of the sum against ∂L/∂x₀, relative


def gradient_terms(model: SequenceModel, tokens: Int[Tensor, "B T"]) -> GradientTerms:
    """Compute each correction on its own, as the branch's vector–Jacobian product."""
    taps = Taps(read=["embedding.norm", "*_residual.inside", "*_residual.after"])
    loss = loss_of(model, tokens, taps)
    streams = [value for name, value in taps.values.items() if not name.endswith("inside")]
    branches = [value for name, value in taps.values.items() if name.endswith("inside")]
    slopes = torch.autograd.grad(loss, streams, retain_graph=True)
    parts = [
        torch.autograd.grad(branch, x, grad_outputs=slope, retain_graph=True)[0]
        for branch, (x, _), slope in zip(branches, pairwise(streams), slopes[1:], strict=True)
    ]
    total = slopes[-1]
    for part in reversed(parts):
        total = total + part
    return GradientTerms(
        identity=float(slopes[-1].norm()),
        corrections=[float(part.norm()) for part in parts],
        total=float(slopes[0].norm()),
        error=float((total - slopes[0]).norm() / slopes[0].norm()),
    )


def summarize(
    rows: Rows, runs: dict[str, list[TrainingStep]], parts: GradientTerms, steps: int, guessing: float
) -> str:
    deepest = max(row[2] for row in rows if row[0] == "start")
    ratio = {row[1:2] + row[3:5]: row[9] for row in rows if row[0] == "start" and row[2] == deepest}
    first = next(iter(runs.values()))
    *_, cold, warm, cut = (run[-1] for run in runs.values())  # post-norm without and with warm-up; no residual
    losses = ", ".join(f"{name} {run[-1].loss:.2f}" for name, run in runs.items())
    return (
        f"At {deepest} blocks and the start, the first block's gradient is {ratio['plain', 'pre', 'on']:.2g} times the "
        f"last's in pre-norm and {ratio['plain', 'post', 'on']:.2g} times in post-norm; with scaled initialization "
        f"{ratio['scaled', 'pre', 'on']:.2g} and "
        f"{ratio['scaled', 'post', 'on']:.2g}; without residuals {ratio['plain', 'pre', 'off']:.2g} and "
        f"{ratio['plain', 'post', 'off']:.2g}"
        f"{describe_evenness(ratio['plain', 'pre', 'off'], ratio['plain', 'post', 'off'])}. "
        f"After {steps} steps the losses "
        f"are {losses}, and without residuals the first block's gradient is {first_last_ratio(cut.norms)[2]:.0e} "
        f"of the last's. "
        f"{describe_warmup(cold.loss, warm.loss, guessing)} Adam's first update is {first[0].update:.2f} of the "
        f"learning rate for every weight, whatever its gradient; the last is {first[-1].update:.2f}. "
        f"∂L/∂x₀ is the identity term, of norm "
        f"{parts.identity:.3g}, plus {len(parts.corrections)} corrections "
        f"(relative error of the sum: {parts.error:.0e})."
    )


def describe_warmup(cold: float, warm: float, guessing: float) -> str:
    """Say whether post-norm needed warm-up, from its losses without and with it."""
    if isfinite(warm) and not isfinite(cold):
        return "Without warm-up, post-norm diverges."
    if cold - warm > 0.1:
        return f"Without warm-up, the loss of post-norm is {cold - warm:.2f} higher."
    if cold < LEARNED * guessing:
        return "Post-norm did not need warm-up here."
    return f"Whether post-norm needs warm-up is open: it learned nothing either way (guessing costs {guessing:.2f})."


def describe_evenness(*ratios: float) -> str:
    """Explain even gradients without residuals, if they are even."""
    return ", since the norms compensate" if all(0.1 < ratio < 10 for ratio in ratios) else ""


def draw(
    picture: Any, layers: dict[str, list[float]], runs: dict[str, list[TrainingStep]], parts: GradientTerms, depth: int
) -> None:
    (start, end, loss), (adam, terms, spare) = picture.subplots(2, 3)
    spare.set_axis_off()
    lines = ("-", "--", "-.", ":", (0, (1, 1)), (0, (5, 1)))
    for (name, norms), line in zip(layers.items(), lines, strict=True):
        start.semilogy(range(1, len(norms) + 1), [max(n, 1e-300) for n in norms], linestyle=line, label=name)
    start.set(xlabel="block", ylabel="gradient norm of its weights", title=f"at the start, {depth} blocks")
    for (name, run), line in zip(runs.items(), lines, strict=False):
        steps, norms = [moment.step for moment in run], run[-1].norms
        end.semilogy(range(1, len(norms) + 1), [max(n, 1e-300) for n in norms], linestyle=line, label=name)
        loss.plot(steps, [moment.loss for moment in run], linestyle=line, label=name, linewidth=1.2)
        adam.semilogy(steps, [moment.root for moment in run], linestyle=line, label=name, linewidth=1.2)
    end.set(xlabel="block", ylabel="gradient norm of its weights", title=f"after {steps[-1]} steps")
    loss.set(xlabel="step", ylabel="loss (nats per token)", title=f"in training, {len(norms)} blocks")
    adam.set(xlabel="step", ylabel="√ of the mean of v̂", title="Adam's second moment")
    places = range(len(parts.corrections))
    terms.bar(places, parts.corrections, label="through a branch last")
    terms.axhline(parts.identity, linestyle="--", color="gray", label="identity: through no branch")
    terms.axhline(parts.total, linestyle=":", color="gray", label="their sum, ∂L/∂x₀")
    terms.set(xlabel="branch, from the first (attention, feed-forward, …)", ylabel="norm")
    terms.set_title(f"∂L/∂x₀ in pieces, pre-norm, {depth} blocks")
    tidy(start, end, loss, adam, terms)
