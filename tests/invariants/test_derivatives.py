"""Second derivatives, torch.func, half precision, NaN and empty inputs: right, or one clear sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

import clearhead
from clearhead import functional, reference
from clearhead.configs import Window
from clearhead.functional.blocked import sparse_attention
from clearhead.nn.weights import check_weights_finite, first_nan_weight
from tests.contracts.adapters import as_in_production

TINY = [
    "tiny-gpt",
    "tiny-llama",
    "tiny-mistral",
    "tiny-mixtral",
    "tiny-gemma",
    "tiny-deepseek",
    "tiny-mamba",
    "tiny-lstm",
]
tiny = pytest.mark.parametrize("name", TINY)


def normal(*shape: int, seed: int = 0) -> Tensor:
    drawn = torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape))
    return drawn.requires_grad_()


X, Q, V = normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(2, 3, 5)
FUNCTIONS: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "softmax": (functional.softmax, (X,)),
    "attention": (lambda q, k, v: functional.attention(q, k, v, causal=True, softcap=2.0), (X, Q, V)),
    "flash_attention": (lambda q, k, v: functional.flash_attention(q, k, v, causal=True), (X, Q, V)),
    "flash_attention, bias": (
        lambda q, k, v, bias: functional.flash_attention(q, k, v, bias=bias),
        (X, Q, V, normal(3, 3)),
    ),
    "layer_norm": (functional.layer_norm, (X, normal(4), normal(4, seed=1))),
    "rms_norm": (functional.rms_norm, (X, normal(4))),
    **{f"activation {name}": (act, (X,)) for name, act in functional.ACTIVATIONS.items()},
    "swiglu": (functional.swiglu, (X, normal(5, 4), normal(5, 4, seed=1), normal(4, 5))),
    "linear_attention": (lambda q, k, v: functional.linear_attention(q.exp(), k.exp(), v, True), (X, Q, V)),
    "gated_linear_attention": (
        lambda q, k, v, gate: functional.gated_linear_attention(q, k, v, gate.sigmoid()),
        (X, Q, V, normal(2, 3, 4, seed=2)),
    ),
    "delta_linear_attention": (functional.delta_linear_attention, (X, Q, V, normal(2, 3))),
    "lstm": (functional.lstm, (X, normal(12, 4), normal(12, 3), normal(12))),
    "selective_scan": (
        lambda x, step, decay, write, read: functional.selective_scan(x, step.exp(), -decay.exp(), write, read),
        (X, Q, normal(5, 4), normal(2, 3, 5, seed=1), V),
    ),
    "rotate": (lambda x: functional.rotate(x, torch.arange(3)), (X,)),
    "cross_entropy": (lambda x: functional.cross_entropy(x, torch.tensor([[0, 1, 3], [2, 2, 0]])), (X,)),
}
functions = pytest.mark.parametrize("name", FUNCTIONS)


@functions
def test_second_derivatives_are_those_of_finite_differences(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-5)


@functions
def test_torch_func_agrees_with_autograd(name: str) -> None:
    function, inputs = FUNCTIONS[name]

    def total(*given: Tensor) -> Tensor:
        return function(*given).square().sum()

    want = torch.autograd.grad(total(*inputs), inputs)
    for found, expected in zip(grad(total, tuple(range(len(inputs))))(*inputs), want, strict=True):
        torch.testing.assert_close(found, expected)
    slope = jvp(total, inputs, tuple(torch.ones_like(x) for x in inputs))[1]
    torch.testing.assert_close(slope, sum(w.sum() for w in want))


@pytest.mark.parametrize("name", ["softmax", "attention", "flash_attention", "rms_norm", "activation relu2", "rotate"])
def test_vmap_is_a_loop(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    shared = [x for x in inputs if x.dim() == 1]
    batched = [x for x in inputs if x.dim() == 3]
    found = vmap(lambda *given: function(*given, *shared))(*batched)
    want = torch.stack([function(*row, *shared) for row in zip(*batched, strict=True)])
    torch.testing.assert_close(found, want)


def test_attention_by_tiles_refuses_what_it_cannot_do() -> None:
    q = normal(1, 1, 600, 4)
    (slope,) = torch.autograd.grad(sparse_attention(q, q, q, Window(3)).sum(), q)
    assert slope.isfinite().all()
    with pytest.raises(RuntimeError, match=r"attention by tiles has no second derivative; pass fused=False"):
        torch.autograd.grad(sparse_attention(q, q, q, Window(3)).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"does not support torch\.func; pass fused=False"):
        grad(lambda q: sparse_attention(q, q, q, Window(3)).sum())(q)


def tokens_of(model: Any, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.embedding.vocabulary, shape, generator=generator)


@tiny
def test_the_gradient_of_the_gradients_norm_is_that_of_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    model = clearhead.build(clearhead.preset(name)).double()
    tokens, parameters = tokens_of(model, 2, 6), [p for p in model.parameters() if p.requires_grad]

    def penalty() -> Tensor:
        loss = functional.cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])
        slopes = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True, materialize_grads=True)
        return sum(slope.square().sum() for slope in slopes)

    found = torch.autograd.grad(penalty(), parameters, allow_unused=True, materialize_grads=True)
    along = [torch.randn_like(p) for p in parameters]
    got, ends = sum(float((a * b).sum()) for a, b in zip(found, along, strict=True)), []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, direction in zip(parameters, along, strict=True):
                parameter.add_(step * direction)
        ends.append(float(penalty().detach()))
    assert got == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3)


@tiny
def test_torch_func_of_a_model(name: str) -> None:
    model = clearhead.build(clearhead.preset(name)).double()
    tokens, weights = tokens_of(model, 2, 6), dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(model, weights, (tokens,)).square().mean()

    want = torch.autograd.grad(loss(weights), list(weights.values()), allow_unused=True, materialize_grads=True)
    for found, expected in zip(grad(loss)(weights).values(), want, strict=True):
        torch.testing.assert_close(found, expected)
    slope = jvp(loss, (weights,), ({key: torch.ones_like(w) for key, w in weights.items()},))[1]
    torch.testing.assert_close(slope, sum(w.sum() for w in want))
    if name not in ("tiny-mixtral", "tiny-deepseek"):  # which expert a token takes is no batched operation
        torch.testing.assert_close(vmap(lambda row: model(row[None])[0])(tokens), model(tokens))


@tiny
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_preset_trains_under_autocast(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = clearhead.build(clearhead.preset(name))
    tokens = tokens_of(model, 2, 9)
    with torch.autocast("cpu", dtype):
        logits = model(tokens)
    assert (logits.float() - model(tokens)).abs().mean() < 0.05  # the mean: rounding may send a token to another expert
    logits.float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@tiny
@pytest.mark.parametrize("length", [1, 3, 7, 9])
def test_nan_weights_give_nan_logits(name: str, length: int) -> None:
    model = clearhead.build(clearhead.preset(name))
    key = next(key for key, w in model.named_parameters() if "mixer" in key and w.dim() == 2 and len(w) > 8)
    assert first_nan_weight(model) is None
    with torch.no_grad():
        model.get_parameter(key)[0] = torch.nan
        for fused in (True, False):
            assert model(tokens_of(model, 2, length), fused=fused).isnan().any()
    assert model(tokens_of(model, 2, length)).isnan().any()
    assert first_nan_weight(model) == key
    with pytest.raises(ValueError, match=rf"layer 0's weights contain NaN \({key}\)"):
        check_weights_finite(model)


@tiny
@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0), (0, 0)])
def test_nothing_in_nothing_out(name: str, batch: int, length: int) -> None:
    config = clearhead.preset(name)
    model, tokens = clearhead.build(config), torch.zeros(batch, length, dtype=torch.long)
    shape = (batch, length, config.embedding.vocabulary)
    for fused in (True, False):
        assert model(tokens, fused=fused).shape == shape
    weights = {key: w.numpy() for key, w in model.state_dict().items()}
    assert reference.run(config, weights, tokens.numpy()).shape == shape


@tiny
def test_float_ids_are_refused(name: str) -> None:
    config = clearhead.preset(name)
    model = clearhead.build(config)
    with as_in_production(), pytest.raises(ValueError, match=r"token ids are torch\.float32"):
        model(torch.ones(1, 3))
    weights = {key: w.numpy() for key, w in model.state_dict().items()}
    with as_in_production(), pytest.raises(TypeError, match="token ids are float64, but must be integers"):
        reference.run(config, weights, np.ones((1, 3)))


@pytest.mark.parametrize("tokens", [5, 11])
def test_numpy_positions_are_torchs(tokens: int) -> None:
    config = clearhead.preset("tiny-llama")
    model = clearhead.build(config).double()
    given, positions = tokens_of(model, 2, tokens), torch.arange(tokens)[None].expand(2, -1) * 3 + 1
    weights = {key: w.numpy() for key, w in model.state_dict().items()}
    found = reference.run(config, weights, given.numpy(), positions=positions.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(found, model(given, positions=positions).numpy(), atol=1e-9)
    assert np.abs(found - reference.run(config, weights, given.numpy())).max() > 1e-3
