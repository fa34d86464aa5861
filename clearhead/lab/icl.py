"""In-context learning of linear regression: what a trained model does with examples, beside gradient descent, ridge
and least squares; and weights by which linear attention *is* a step of gradient descent (von Oswald et al. 2023).

The construction. An example is a token (key: x, query: x, target: y), the question is (0, x, 0). A layer of undivided
linear attention adds to each target

    −(η/N)·Σ_i (x · x_i)·y_i  =  −x · (W₁ − W₀),     W₁ = W₀ − η·∇L(W₀),     L = Σ_i (y_i − W·x_i)²/2N

and so leaves residuals: of the examples what is yet to learn, of the question minus the prediction. The same layer
again is the next step.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    DotConfig,
    FeedForwardConfig,
    LayerNormConfig,
    LinearAttentionConfig,
    SharedStackConfig,
    StackConfig,
)
from clearhead.models.assemble import initialise
from clearhead.nn.build import build_part
from clearhead.nn.context import Context

from .hand import SILENT, Fields, clear
from .learn import learn
from .result import Result, Rows, Say, quiet, require, tidy

TESTED = 2048  # prompts on which errors are measured
RATES = torch.logspace(-2, 0.5, 41)  # η that gradient descent may choose from


def positions(length: int) -> Context:
    at = torch.arange(length)[None]
    return Context(at, at, aligned=True)


def descent(width: int, steps: int, examples: int, rate: float, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A stack of linear attention whose every layer is one step of gradient descent over `examples` examples."""
    at = Fields(key=width, query=width, target=1)
    block = BlockConfig(
        mixer=LinearAttentionConfig(heads=1, head_dim=width, value_dim=1, kernel=DotConfig()), norm=SILENT
    )
    stack = build_part(SharedStackConfig(dim=at.dim, pattern=(block,), repeats=steps), at.dim).to(dtype)
    clear(stack)
    mixer = stack.layers()[0].mixer
    with torch.no_grad():
        query, key, value = mixer.qkv.weight.split((width, width, 1))
        query[:, at["query"]] = key[:, at["key"]] = torch.eye(width, dtype=dtype)
        value[:, at["target"]] = 1
        mixer.out.weight[at["target"]] = -rate / examples
    return stack


@torch.inference_mode()
def predicted(
    stack: nn.Module, x: Float[Tensor, "B N W"], y: Float[Tensor, "B N"], question: Float[Tensor, "B W"]
) -> Float[Tensor, "B"]:
    """What the construction says of a question."""
    examples = torch.cat((x, x, y[..., None]), -1)
    asked = torch.cat((torch.zeros_like(question), question, torch.zeros_like(question[:, :1])), -1)
    tokens = torch.cat((examples, asked[:, None]), 1)
    return -stack(tokens, positions(tokens.shape[1]))[:, -1, -1]


def descended(x: Float[Tensor, "B N W"], y: Float[Tensor, "B N"], steps: int, rate: float) -> Float[Tensor, "B W"]:
    """Weights after steps of gradient descent from 0, written out."""
    weights = x.new_zeros(x.shape[0], x.shape[2])
    for _ in range(steps):
        residual = y - (x @ weights[..., None])[..., 0]
        weights = weights + rate / x.shape[1] * (residual[:, None] @ x)[:, 0]
    return weights


class Learner(nn.Module):
    """Numbers in, a number out, around a stack: a token is (x, y), or (x, 0) for a question, which comes before it."""

    def __init__(self, stack: StackConfig, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(width + 2, stack.dim)
        self.stack = build_part(stack, stack.dim)
        self.answer = nn.Linear(stack.dim, 1)
        initialise(self)

    def forward(self, x: Float[Tensor, "B N W"], y: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        """For each x what the model says of it, from the examples before it."""
        asked = torch.cat((x, torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])), -1)
        told = torch.cat((x, y[..., None], torch.ones_like(x[..., :1])), -1)
        tokens = torch.stack((asked, told), 2).flatten(1, 2)
        return self.answer(self.stack(self.read(tokens), positions(tokens.shape[1])))[:, ::2, 0]


def icl(
    *,
    width: int = 5,
    examples: int = 12,
    noise: float = 0.3,
    steps: int = 2000,
    batch: int = 64,
    dim: int = 64,
    layers: int = 3,
    descents: int = 5,
    seed: int = 0,
    say: Say = quiet,
) -> Result:
    """Train a Transformer and one layer of linear attention on random regressions, and compare."""
    require(1, width=width, examples=examples, steps=steps, batch=batch, dim=dim, layers=layers, descents=descents)
    require(0, noise=noise)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)

    def draw_prompts(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, examples + 1, width, generator=generator)
        weights = torch.randn(count, width, 1, generator=generator)
        return x, (x @ weights)[..., 0] + noise * torch.randn(count, examples + 1, generator=generator)

    attention = BlockConfig(mixer=AttentionConfig(heads=4, mask=Causal()), ffn=FeedForwardConfig())
    linear = BlockConfig(
        mixer=LinearAttentionConfig(heads=4, mask=Causal(), kernel=DotConfig()), norm=LayerNormConfig()
    )
    trained = {
        f"Transformer of {layers}": StackConfig(
            dim=dim, pattern=(attention,), repeats=layers, final_norm=LayerNormConfig()
        ),
        "one linear layer": StackConfig(dim=dim, pattern=(linear,), repeats=1),
    }
    test = draw_prompts(TESTED)
    errors = {}
    for name, config in trained.items():
        model = Learner(config, width)

        def loss_of(model: nn.Module = model) -> Tensor:
            x, y = draw_prompts(batch)
            return (model(x, y) - y).square().mean()

        for step, loss in learn(model, loss_of, steps=steps, lr=2e-3):
            if step % 50 == 0:
                say(f"{name}: step {step} of {steps}, error {loss:.3f}")
        with torch.inference_mode():
            errors[name] = (model(*test) - test[1]).square().mean(0).tolist()
    errors |= baselines(*test, noise, descents)
    columns = tuple(errors)
    rows: Rows = [(n, *(errors[name][n] for name in columns)) for n in range(examples + 1)]
    proof = construction(width, examples, descents, seed)
    return Result(
        name="icl",
        claim="Attention learns from examples in the prompt by gradient descent; a linear layer is one step of it.",
        found=found(rows, columns, proof, descents, noise, width),
        columns=("examples", *columns),
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows, columns, noise),
        more={"construction": proof, "noise_floor": noise**2},
        size=(9, 5.2),
    )


def baselines(
    x: Float[Tensor, "B N W"], y: Float[Tensor, "B N"], noise: float, descents: int
) -> dict[str, list[float]]:
    """The mean squared error of each method by the number of examples; gradient descent with its best rate for each."""
    methods: dict[str, list[float]] = {name: [] for name in ("1 step", f"{descents} steps", "ridge", "least squares")}
    for n in range(x.shape[1]):
        seen, told, asked, wanted = x[:, :n], y[:, :n], x[:, n], y[:, n]

        def error(weights: Tensor, asked: Tensor = asked, wanted: Tensor = wanted) -> float:
            return float(((asked * weights).sum(-1) - wanted).square().mean())

        if n == 0:
            for found in methods.values():
                found.append(error(torch.zeros_like(asked)))
            continue
        for name, steps in (("1 step", 1), (f"{descents} steps", descents)):
            methods[name].append(min(error(descended(seen, told, steps, float(rate))) for rate in RATES))
        methods["ridge"].append(error(ridge(seen, told, max(noise**2, 1e-6))))
        methods["least squares"].append(error((torch.linalg.pinv(seen) @ told[..., None])[..., 0]))
    return methods


def ridge(x: Float[Tensor, "B N W"], y: Float[Tensor, "B N"], penalty: float) -> Float[Tensor, "B W"]:
    """(XᵀX + λI)⁻¹Xᵀy: for normal weights and noise of variance λ, the best that can be done."""
    gram = x.mT @ x + penalty * torch.eye(x.shape[2], dtype=x.dtype)
    return torch.linalg.solve(gram, (x.mT @ y[..., None])[..., 0])


def construction(width: int, examples: int, descents: int, seed: int) -> dict[str, float]:
    """How far the hand-set layers are from gradient descent written out, at most over prompts."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(64, n, width, generator=generator, dtype=torch.float64) for n in (examples + 1, 1))
    y = (x * w).sum(-1)
    far = {}
    for dtype in (torch.float64, torch.float32):
        for steps in (1, descents):
            stack = descent(width, steps, examples, 0.3, dtype)
            ours = predicted(stack, x[:, :-1].to(dtype), y[:, :-1].to(dtype), x[:, -1].to(dtype))
            theirs = (descended(x[:, :-1], y[:, :-1], steps, 0.3) * x[:, -1]).sum(-1)
            far[f"{steps} in {str(dtype).removeprefix('torch.')}"] = float((ours - theirs).abs().max())
    return far


def found(
    rows: Rows, columns: tuple[str, ...], proof: dict[str, float], descents: int, noise: float, width: int
) -> str:
    last, half = rows[-1], rows[len(rows) // 2]
    end, middle = (dict(zip(columns, row[1:], strict=True)) for row in (last, half))
    deep, shallow = columns[:2]
    wide = max(value for name, value in proof.items() if name.endswith("64"))
    side = "below" if middle[deep] < middle[f"{descents} steps"] else "above"
    told = ", ".join(f"{name} {end[name]:.3f}" for name in sorted(end, key=lambda name: end[name]))
    return (
        f"The hand-set layers are gradient descent: {descents} of them are {descents} steps, off by at most "
        f"{wide:.0e} in float64 and {max(proof.values()):.0e} in float32. Trained, after {last[0]} examples of {width} "
        f"numbers the errors are {told}; noise alone is {noise**2:.3f}. One trained linear layer has "
        f"{end[shallow]:.3f} where the best single step has {end['1 step']:.3f}; the Transformer has "
        f"{end[deep] / end['ridge']:.2f} times the error of ridge, and at {half[0]} examples "
        f"{middle[deep] / middle['ridge']:.2f} times, {side} what {descents} steps come to."
    )


def draw(picture: Any, rows: Rows, columns: tuple[str, ...], noise: float) -> None:
    axis = picture.subplots()
    n = [row[0] for row in rows]
    styles = ("o-", "s-", "--", "-.", ":", (0, (5, 1)))
    for at, (name, style) in enumerate(zip(columns, styles, strict=True), 1):
        line: dict[str, Any] = {"linestyle": style} if isinstance(style, tuple) else {}
        form = () if isinstance(style, tuple) else (style,)
        axis.plot(n, [row[at] for row in rows], *form, label=name, linewidth=1.6, markersize=4.5, **line)
    axis.axhline(max(noise**2, 1e-6), color="gray", linewidth=0.8)
    axis.text(0, max(noise**2, 1e-6) * 1.06, "noise", fontsize=8, color="gray")
    axis.set(xlabel="examples in the prompt", ylabel="mean squared error of the next answer", yscale="log")
    axis.set_title("Learning a linear regression from the prompt")
    axis.set_ylim(top=3 * rows[0][1])  # least squares has no mean where there are as many examples as numbers
    tidy(axis)
