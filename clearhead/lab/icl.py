"""In-context learning of linear regression, compared with gradient descent, ridge and least squares; and hand-set
weights with which linear attention is exactly one step of gradient descent (von Oswald et al. 2023).

The construction. An example is a token (key: x, query: x, target: y), the question is (0, x, 0). A layer of undivided
linear attention adds to each target

    −(η/N)·Σ_i (x · x_i)·y_i  =  −x · (W₁ − W₀),     W₁ = W₀ − η·∇L(W₀),     L = Σ_i (y_i − W·x_i)²/2N

which leaves residuals in the targets: for an example the part not yet learned, for the question minus the prediction.
Applying the same layer again is the next step.
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
from clearhead.models.initialise import initialise
from clearhead.nn.build import build_part
from clearhead.nn.context import Context

from .manual_weights import IDENTITY_NORM, Fields, zero_weights
from .result import Progress, Result, Rows, no_progress, require, tidy
from .training_loop import train_steps

TESTED = 2048  # prompts on which errors are measured
RATES = torch.logspace(-2, 0.5, 41)  # learning rates η that gradient descent chooses from


def positions(length: int) -> Context:
    at = torch.arange(length)[None]
    return Context(at, at, aligned=True)


def descent_stack(width: int, steps: int, examples: int, rate: float, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A stack of linear attention in which each layer is one step of gradient descent over `examples` examples."""
    at = Fields(key=width, query=width, target=1)
    block = BlockConfig(
        mixer=LinearAttentionConfig(heads=1, head_dim=width, value_dim=1, kernel=DotConfig()), norm=IDENTITY_NORM
    )
    stack = build_part(SharedStackConfig(dim=at.dim, pattern=(block,), repeats=steps), at.dim).to(dtype)
    zero_weights(stack)
    mixer = stack.layers()[0].mixer
    with torch.no_grad():
        query, key, value = mixer.qkv.weight.split((width, width, 1))
        query[:, at["query"]] = key[:, at["key"]] = torch.eye(width, dtype=dtype)
        value[:, at["target"]] = 1
        mixer.out.weight[at["target"]] = -rate / examples
    return stack


@torch.inference_mode()
def predict(
    stack: nn.Module, x: Float[Tensor, "B N W"], y: Float[Tensor, "B N"], question: Float[Tensor, "B W"]
) -> Float[Tensor, "B"]:
    """The prediction of the hand-set layers for a question."""
    examples = torch.cat((x, x, y[..., None]), -1)
    questions = torch.cat((torch.zeros_like(question), question, torch.zeros_like(question[:, :1])), -1)
    tokens = torch.cat((examples, questions[:, None]), 1)
    return -stack(tokens, positions(tokens.shape[1]))[:, -1, -1]


def descend(x: Float[Tensor, "B N W"], y: Float[Tensor, "B N"], steps: int, rate: float) -> Float[Tensor, "B W"]:
    """Weights after plain gradient descent from 0."""
    weights = x.new_zeros(x.shape[0], x.shape[2])
    for _ in range(steps):
        residual = y - (x @ weights[..., None])[..., 0]
        weights = weights + rate / x.shape[1] * (residual[:, None] @ x)[:, 0]
    return weights


class Learner(nn.Module):
    """A stack over tokens (x, y); each example is preceded by its question (x, 0)."""

    def __init__(self, stack: StackConfig, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(width + 2, stack.dim)
        self.stack = build_part(stack, stack.dim)
        self.answer = nn.Linear(stack.dim, 1)
        initialise(self)

    def forward(self, x: Float[Tensor, "B N W"], y: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        """Predict y for each x from the examples before it."""
        questions = torch.cat((x, torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])), -1)
        answered = torch.cat((x, y[..., None], torch.ones_like(x[..., :1])), -1)
        tokens = torch.stack((questions, answered), 2).flatten(1, 2)
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
    progress: Progress = no_progress,
) -> Result:
    """Train a Transformer and one linear-attention layer on random regressions, and compare them with baselines."""
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

        for step, loss in train_steps(model, loss_of, steps=steps, lr=2e-3):
            if step % 50 == 0:
                progress(f"{name}: step {step} of {steps}, error {loss:.3f}")
        with torch.inference_mode():
            errors[name] = (model(*test) - test[1]).square().mean(0).tolist()
    errors |= baselines(*test, noise, descents)
    columns = tuple(errors)
    rows: Rows = [(n, *(errors[name][n] for name in columns)) for n in range(examples + 1)]
    proof = construction(width, examples, descents, seed)
    return Result(
        name="icl",
        claim="Attention learns from examples in the prompt by gradient descent; a linear layer is one step of it.",
        found=summarize(rows, columns, proof, descents, noise, width),
        columns=("examples", *columns),
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows, columns, noise),
        more={"construction": proof, "noise_floor": noise**2},
        size=(9, 5.2),
    )


def baselines(
    x: Float[Tensor, "B N W"], y: Float[Tensor, "B N"], noise: float, descents: int
) -> dict[str, list[float]]:
    """Mean squared error of each method by number of examples; gradient descent uses its best learning rate."""
    methods: dict[str, list[float]] = {name: [] for name in ("1 step", f"{descents} steps", "ridge", "least squares")}
    for n in range(x.shape[1]):
        seen, targets, questions, wanted = x[:, :n], y[:, :n], x[:, n], y[:, n]

        def error(weights: Tensor, questions: Tensor = questions, wanted: Tensor = wanted) -> float:
            return float(((questions * weights).sum(-1) - wanted).square().mean())

        if n == 0:
            for found in methods.values():
                found.append(error(torch.zeros_like(questions)))
            continue
        for name, steps in (("1 step", 1), (f"{descents} steps", descents)):
            methods[name].append(min(error(descend(seen, targets, steps, float(rate))) for rate in RATES))
        methods["ridge"].append(error(ridge(seen, targets, max(noise**2, 1e-6))))
        methods["least squares"].append(error((torch.linalg.pinv(seen) @ targets[..., None])[..., 0]))
    return methods


def ridge(x: Float[Tensor, "B N W"], y: Float[Tensor, "B N"], penalty: float) -> Float[Tensor, "B W"]:
    """(XᵀX + λI)⁻¹Xᵀy: optimal for normal weights and noise of variance λ."""
    gram = x.mT @ x + penalty * torch.eye(x.shape[2], dtype=x.dtype)
    return torch.linalg.solve(gram, (x.mT @ y[..., None])[..., 0])


def construction(width: int, examples: int, descents: int, seed: int) -> dict[str, float]:
    """Largest difference between the hand-set layers and plain gradient descent."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(64, n, width, generator=generator, dtype=torch.float64) for n in (examples + 1, 1))
    y = (x * w).sum(-1)
    far = {}
    for dtype in (torch.float64, torch.float32):
        for steps in (1, descents):
            stack = descent_stack(width, steps, examples, 0.3, dtype)
            ours = predict(stack, x[:, :-1].to(dtype), y[:, :-1].to(dtype), x[:, -1].to(dtype))
            theirs = (descend(x[:, :-1], y[:, :-1], steps, 0.3) * x[:, -1]).sum(-1)
            far[f"{steps} in {str(dtype).removeprefix('torch.')}"] = float((ours - theirs).abs().max())
    return far


def summarize(
    rows: Rows, columns: tuple[str, ...], proof: dict[str, float], descents: int, noise: float, width: int
) -> str:
    last, half = rows[-1], rows[len(rows) // 2]
    end, middle = (dict(zip(columns, row[1:], strict=True)) for row in (last, half))
    deep, shallow = columns[:2]
    wide = max(value for name, value in proof.items() if name.endswith("64"))
    side = "below" if middle[deep] < middle[f"{descents} steps"] else "above"
    errors = ", ".join(f"{name} {end[name]:.3f}" for name in sorted(end, key=lambda name: end[name]))
    return (
        f"The hand-set layers match gradient descent: {descents} layers are {descents} steps, with an error of at most "
        f"{wide:.0e} in float64 and {max(proof.values()):.0e} in float32. Trained, after {last[0]} examples of {width} "
        f"numbers the errors are {errors}; the noise floor is {noise**2:.3f}. One trained linear layer has "
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
    axis.set_ylim(top=3 * rows[0][1])  # with as many examples as numbers, the error of least squares has no finite mean
    tidy(axis)
