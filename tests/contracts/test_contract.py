"""One suite, two engines: the same names, signatures, numbers and gradients (float64, 1e-9)."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

import clearhead.functional as functional
import clearhead.reference as reference

from .adapters import ENGINES, NUMPY, TORCH, close, normal

B, G, R, H, T, S, K, U, D, F, V = 2, 3, 5, 7, 11, 13, 6, 17, 19, 23, 29
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))
IGNORED = np.where(np.arange(T) % 3 == 0, -100, TOKENS)
MASK = np.random.default_rng(1).random((T, S)) < 0.6
MASK[4] = False  # a query that may read nothing
QKV = normal(B, H, T, K), normal(B, H, S, K), normal(B, H, S, U)
GROUPED = normal(B, G, R, T, K), normal(B, G, 1, S, K), normal(B, G, 1, S, U)
LONGER = normal(B, S, K), normal(B, T, K), normal(B, T, U)  # more queries than keys
UP, DOWN, GATE = normal(F, D), normal(D, F), normal(F, D, seed=1)
X = normal(B, T, D)

DISTANCE = np.arange(S) - np.arange(T)[:, None]
CASES = {
    "softmax": ("softmax", (normal(B, T, S),), {}),
    "softmax of axis 1": ("softmax", (normal(B, T, S),), {"axis": 1}),
    "attention": ("attention", QKV, {}),
    "attention, causal": ("attention", QKV, {"causal": True}),
    "attention, causal, more queries than keys": ("attention", LONGER, {"causal": True}),
    "attention, mask": ("attention", QKV, {"mask": MASK}),
    "attention, mask of keys": ("attention", QKV, {"mask": MASK[0]}),
    "attention, mask and causal": ("attention", QKV, {"mask": MASK, "causal": True}),
    "attention, bias": ("attention", QKV, {"bias": normal(H, T, S)}),
    "attention, broadcast bias": ("attention", QKV, {"bias": normal(H, 1, S), "causal": True}),
    "attention, scale": ("attention", QKV, {"scale": 0.7}),
    "attention, everything": (
        "attention",
        GROUPED,
        {"mask": MASK, "bias": normal(R, T, S), "causal": True, "scale": 1.3},
    ),
    "attention, grouped queries": ("attention", GROUPED, {}),
    "attention, mask with more leading dimensions": ("attention", LONGER, {"mask": normal(R, 1, S, T) > 0}),
    "attention, no leading dimensions": ("attention", tuple(x[0, 0] for x in QKV), {}),
    "flash": ("flash_attention", QKV, {"block": 4}),
    "flash, square and causal": ("flash_attention", (QKV[0], normal(B, H, T, K, seed=3), X[:, None]), {"causal": True}),
    "flash, causal": ("flash_attention", QKV, {"causal": True, "block": 4}),
    "flash, causal, more queries than keys": ("flash_attention", LONGER, {"causal": True, "block": 1}),
    "flash, mask": ("flash_attention", QKV, {"mask": MASK, "block": 4}),
    "flash, mask of keys": ("flash_attention", QKV, {"mask": MASK[0], "block": 4}),
    "flash, mask by row of the batch": ("flash_attention", QKV, {"mask": normal(B, 1, 1, S) > 0, "block": 4}),
    "flash, mask, causal, scale": ("flash_attention", QKV, {"mask": MASK, "causal": True, "scale": 0.7, "block": 5}),
    "flash, grouped queries": ("flash_attention", GROUPED, {"mask": normal(B, 1, 1, T, S) > -1, "block": 7}),
    "flash, grouped queries, other masks": ("flash_attention", GROUPED, {"mask": normal(G, R, 1, S) > -1}),
    "flash, mask with more leading dimensions": ("flash_attention", LONGER, {"mask": normal(R, 1, S, T) > 0}),
    "flash, one query": ("flash_attention", (QKV[0][:, :, :1], *QKV[1:]), {"causal": True}),
    "flash, no leading dimensions": ("flash_attention", tuple(x[0, 0] for x in QKV), {"causal": True}),
    "attention, softcap": ("attention", QKV, {"softcap": 0.8, "bias": normal(H, T, S), "mask": MASK}),
    "attention, sinks": ("attention", QKV, {"sinks": normal(H, 1, 1), "causal": True}),
    "attention, bias, sinks": ("attention", QKV, {"bias": normal(H, T, S), "sinks": normal(H, T, 1), "softcap": 0.8}),
    "relative_bias": ("relative_bias", (DISTANCE, normal(H, 8), np.array([0, 1, 2, 4]), True), {}),
    "relative_bias, one side": ("relative_bias", (DISTANCE, normal(H, 4), np.array([0, 1, 2, 4]), False), {}),
    "flash, bias": ("flash_attention", QKV, {"bias": normal(H, T, S), "block": 4}),
    "flash, broadcast bias, causal": ("flash_attention", QKV, {"bias": normal(S), "causal": True, "block": 4}),
    "flash, softcap": ("flash_attention", QKV, {"softcap": 0.8, "mask": MASK, "block": 4}),
    "flash, causal, scale below zero": ("flash_attention", QKV, {"causal": True, "scale": -0.7}),
    "flash, square, causal, scale 0": ("flash_attention", (QKV[0], QKV[0], QKV[0]), {"causal": True, "scale": 0.0}),
    "flash, square, causal, scale below zero": (
        "flash_attention",
        (QKV[0], QKV[0], QKV[0]),
        {"causal": True, "scale": -0.7},
    ),
    "linear": ("linear", (X, UP, normal(F)), {}),
    "linear, no bias": ("linear", (X, UP), {}),
    "embedding": ("embedding", (TOKENS, normal(V, D)), {}),
    "layer_norm": ("layer_norm", (X * 3 + 5, normal(D), normal(D, seed=1)), {"eps": 0.1}),
    "layer_norm, no bias": ("layer_norm", (X, normal(D), None), {}),
    "rms_norm of one vector": ("rms_norm", (normal(D) * 3 + 5, normal(D, seed=1)), {}),
    "layer_norm of one vector": ("layer_norm", (normal(D), normal(D, seed=1), normal(D, seed=2)), {}),
    "rms_norm": ("rms_norm", (X * 3 + 5, normal(D)), {"eps": 0.1}),
    "relu": ("relu", (X,), {}),
    "relu2": ("relu2", (X,), {}),
    "gelu": ("gelu", (X * 3,), {}),
    "gelu by tanh": ("gelu", (X * 3,), {"approximate": "tanh"}),
    "gelu_tanh": ("gelu_tanh", (X * 3,), {}),
    "gelu_quick": ("gelu_quick", (X * 3,), {}),
    "silu": ("silu", (X * 3,), {}),
    **{
        f"feed_forward, {name}": ("feed_forward", (X, UP, DOWN, normal(F), normal(D)), {"activation": name})
        for name in reference.ACTIVATIONS
    },
    "feed_forward, no biases": ("feed_forward", (X, UP, DOWN), {}),
    **{
        f"gated, {name}": (
            "gated_feed_forward",
            (X, GATE, UP, DOWN, normal(F), normal(F, seed=1), normal(D)),
            {"activation": name},
        )
        for name in reference.ACTIVATIONS
    },
    "swiglu": ("swiglu", (X, GATE, UP, DOWN), {}),
    "elu_features": ("elu_features", (X * 3,), {}),
    "positive_features": ("positive_features", (QKV[0] / 3, normal(F, K)), {}),
    "linear_attention": ("linear_attention", (np.exp(QKV[0]), np.exp(QKV[1]), QKV[2]), {}),
    "linear_attention, causal": (
        "linear_attention",
        (np.exp(QKV[0]), np.exp(QKV[0] - 1), X[:, None]),
        {"causal": True},
    ),
    "linear_attention, no leading dimensions": (
        "linear_attention",
        (np.exp(normal(300, K)), np.exp(normal(300, K, seed=1)), normal(300, U)),
        {"causal": True},
    ),
    "linear_attention, causal, more keys than queries": (
        "linear_attention",
        (np.exp(QKV[0]), np.exp(QKV[1]), QKV[2]),
        {"causal": True},
    ),
    "gated_linear_attention": (
        "gated_linear_attention",
        (QKV[0], QKV[0] * 0.7, normal(B, H, T, U), 1 / (1 + np.exp(-normal(B, H, T, K, seed=3)))),
        {},
    ),
    "delta_linear_attention": (
        "delta_linear_attention",
        (QKV[0], QKV[0] * 0.3, normal(B, H, T, U), 1 / (1 + np.exp(-normal(B, H, T)))),
        {},
    ),
    "selective_scan": (
        "selective_scan",
        (X, np.exp(normal(B, T, D, seed=2) - 1), -np.exp(normal(K, D)), normal(B, T, K), normal(B, T, K, seed=1)),
        {},
    ),
    "selective_scan, no leading dimensions": (
        "selective_scan",
        (normal(150, D), np.exp(normal(150, D)), -np.exp(normal(K, D)), normal(150, K), normal(150, K, seed=1)),
        {},
    ),
    "lstm": ("lstm", (X, *(normal(4 * K, n, seed=4) for n in (D, K)), normal(4 * K)), {}),
    "lstm, no bias, any leading dimensions": ("lstm", (QKV[0], normal(4 * D, K), normal(4 * D, D)), {}),
    "rotate": ("rotate", (QKV[0], np.arange(T)), {}),
    "rotate, interleaved": ("rotate", (QKV[0], np.arange(T) * 1000), {"layout": "interleaved", "theta": 500.0}),
    "rotate, positions by row": ("rotate", (QKV[0], TOKENS[:, None]), {}),
    "rotate, frequencies": ("rotate", (QKV[0], np.arange(T)), {"frequencies": np.array([1.0, 0.5, 0.25])}),
    "rotate_by": ("rotate_by", (QKV[0], np.cos(normal(T, K // 2)), np.sin(normal(T, K // 2))), {}),
    "rotate_by, interleaved, by head": (
        "rotate_by",
        (QKV[0], np.cos(normal(H, 1, K // 2)), np.sin(normal(H, 1, K // 2))),
        {"layout": "interleaved"},
    ),
    "load_balancing_loss": ("load_balancing_loss", (1 / (1 + np.exp(-normal(B, T, V))), 3), {}),
    "cross_entropy": ("cross_entropy", (normal(B, T, V), TOKENS), {}),
    "cross_entropy, sum": ("cross_entropy", (normal(B, T, V), TOKENS), {"reduction": "sum"}),
    "cross_entropy, each": ("cross_entropy", (normal(B, T, V), IGNORED), {"reduction": "none", "ignore_index": -100}),
    "cross_entropy, class weights": (
        "cross_entropy",
        (normal(B, T, V), IGNORED),
        {"weight": np.exp(normal(V)), "ignore_index": -100, "label_smoothing": 0.2},
    ),
    "cross_entropy, one row": ("cross_entropy", (normal(V), np.array(3)), {}),
    "cross_entropy, smoothed": ("cross_entropy", (normal(B, T, V), TOKENS), {"label_smoothing": 0.1}),
    "cross_entropy, ignored": ("cross_entropy", (normal(B, T, V), IGNORED), {"ignore_index": -100}),
    "cross_entropy, both": (
        "cross_entropy",
        (normal(B, T, V), TOKENS),
        {"ignore_index": int(TOKENS[0, 0]), "label_smoothing": 0.3},
    ),
}
cases = pytest.mark.parametrize("case", CASES)
engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


@cases
def test_same_numbers(case):
    function, arguments, options = CASES[case]
    close(NUMPY(function, *arguments, **options), TORCH(function, *arguments, **options))


@cases
def test_same_gradients(case):
    function, arguments, options = CASES[case]
    d_out = normal(*NUMPY(function, *arguments, **options).shape, seed=9)
    ours = NUMPY.gradients(function, d_out, *arguments, **options)
    theirs = TORCH.gradients(function, d_out, *arguments, **options)
    assert len(ours) == len(theirs) > 0
    for d, expected in zip(ours, theirs, strict=True):
        close(d, expected)


@cases
@engines
def test_inputs_are_never_changed_and_may_lie_anyhow_in_memory(case, engine):
    function, arguments, options = CASES[case]
    expected = engine(function, *arguments, **options)
    strided = [np.copy(x, order="F") if isinstance(x, np.ndarray) else x for x in arguments]
    before = [np.copy(x) for x in strided]
    for x in (*strided, *options.values()):
        if isinstance(x, np.ndarray):
            x.setflags(write=False)  # a write by NumPy code raises; torch gets a copy of the same strides
    try:
        close(engine(function, *strided, **options), expected)
        if engine is NUMPY:
            engine.gradients(function, np.ones(expected.shape), *strided, **options)
    finally:
        for x in (*strided, *options.values()):
            if isinstance(x, np.ndarray):
                x.setflags(write=True)
    for x, was in zip(strided, before, strict=True):
        np.testing.assert_array_equal(x, was)


@cases
def test_torch_leaves_its_tensors_as_they_were(case):
    import torch

    function, arguments, options = CASES[case]
    tensors = [torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for x in arguments]
    named = {key: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    getattr(functional, function)(*tensors, **named)
    for x, was in zip((*tensors, *named.values()), (*arguments, *options.values()), strict=True):
        if isinstance(was, np.ndarray):
            np.testing.assert_array_equal(x.numpy(), was)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("causal_mask", (5,)),
        ("causal_mask", (3, 7)),
        ("causal_mask", (7, 3)),
        ("causal_mask", (0, 3)),
        ("sinusoidal_positions", (11, 8)),
        ("sinusoidal_positions", (11, 7)),
        ("sinusoidal_positions", (11, 7, 500.0, "halves")),
        ("sinusoidal_positions", (5, 1)),
        ("alibi_bias", (8, 5, 7)),
        ("alibi_bias", (13, 7, 5)),
        ("alibi_bias", (1, 3, 3)),
    ],
)
def test_same_constants(function, arguments):
    close(NUMPY(function, *arguments), TORCH(function, *arguments))


def test_same_names_and_the_same_signatures():
    whole_models = ("run", "DecodeState")
    names = [name for name in reference.__all__ if not name.endswith("_backward") and name not in whole_models]
    assert functional.__all__ == names
    assert list(functional.ACTIVATIONS) == list(reference.ACTIVATIONS)
    for name in functional.__all__:
        if name == "ACTIVATIONS":
            continue
        ours = inspect.signature(getattr(reference, name)).parameters.values()
        theirs = inspect.signature(getattr(functional, name)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs], name


def test_every_forward_with_a_gradient_has_its_backward_and_a_case_here():
    without = {"ACTIVATIONS", "causal_mask", "sinusoidal_positions", "alibi_bias", "noam", "cosine"}
    without |= {"warmup_stable_decay", "clip_gradients"}
    forwards = set(functional.__all__) - without
    assert {f"{name}_backward" for name in forwards} <= set(reference.__all__)
    assert {function for function, _, _ in CASES.values()} == forwards


def test_a_backward_takes_the_gradient_and_then_what_its_forward_took():
    for name in (name for name in reference.__all__ if name.endswith("_backward")):
        forward = inspect.signature(getattr(reference, name.removesuffix("_backward"))).parameters.values()
        first, *rest = inspect.signature(getattr(reference, name)).parameters.values()
        assert first.name == "d_out"
        assert [(p.name, p.kind, p.default) for p in rest] == [
            (p.name, p.kind, p.default) for p in forward if p.name != "return_weights"
        ], name


def test_the_reference_engine_does_not_import_torch():
    code = "import sys, clearhead.reference; print(sorted({'torch', 'scipy', 'beartype'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
