"""What a user's mistake meets in production, where no annotation is checked: one clear sentence, in both engines."""

import numpy as np
import pytest

from .adapters import ENGINES, as_in_production, normal

pytestmark = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
Q, K, V = normal(3, 5, 7), normal(3, 11, 7), normal(3, 11, 13)
either = pytest.mark.parametrize("function", ["attention", "flash_attention"])


def refuses(engine, function, *arguments, says, error=ValueError, **options):
    with as_in_production(), pytest.raises(error) as raised:
        engine(function, *arguments, **options)
    for words in says:
        assert words in str(raised.value), str(raised.value)
    assert "\n" not in str(raised.value)


@either
@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        (normal(5, 2), K, V),
        (Q, K, V[:, :-1]),
        (Q, normal(2, 11, 7), V),
        (Q[0, 0], K, V),
        (Q[..., :0], K[..., :0], V),
    ],
)
def test_shapes_that_do_not_fit(engine, function, q, k, v):
    refuses(engine, function, q, k, v, says=[f"q {q.shape}", f"k {k.shape}", f"v {v.shape}"])


@either
@pytest.mark.parametrize("shape", [(5, 10), (11, 5), (4, 5, 11), (2, 11)])
def test_a_mask_that_does_not_fit(engine, function, shape):
    refuses(engine, function, Q, K, V, mask=np.ones(shape, bool), says=[f"mask {shape}", "(…, T, S)"])


def test_a_bias_that_does_not_fit(engine):
    refuses(engine, "attention", Q, K, V, bias=np.ones((11, 5)), says=["bias (11, 5)"])


def test_one_query_is_not_repeated_to_fit_a_mask(engine):
    refuses(engine, "attention", Q[:, :1], K, V, mask=np.ones((5, 11), bool), says=["mask (5, 11)"])


@either
@pytest.mark.parametrize("dtype", [float, int, np.float32])
def test_a_mask_of_numbers(engine, function, dtype):
    refuses(
        engine,
        function,
        *(Q, K, V),
        mask=np.ones((5, 11), dtype),
        error=TypeError,
        says=["boolean", "True = may attend", "bias="],
    )


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 7.0])
def test_dropout_is_a_probability(engine, dropout):
    refuses(engine, "attention", Q, K, V, dropout=dropout, says=[str(dropout)])


def test_dropout_needs_a_generator_in_numpy(engine):
    if engine.name == "numpy":
        refuses(engine, "attention", Q, K, V, dropout=0.5, says=["rng="])
    else:
        assert engine("attention", Q, K, V, dropout=0.5).shape == (3, 5, 13)  # torch has a global generator


def test_block_is_at_least_one(engine):
    refuses(engine, "flash_attention", Q, K, V, block=0, says=["block", "0"])


def test_tokens_outside_the_vocabulary(engine):
    refuses(engine, "embedding", np.array([0, 5]), np.zeros((5, 3)), error=IndexError, says=["out"])
    refuses(engine, "embedding", np.array([-1]), np.zeros((5, 3)), error=IndexError, says=["out"])


def test_rotary(engine):
    refuses(engine, "rotate", normal(5, 3), np.arange(5), says=["even", "(5, 3)"])
    refuses(engine, "rotate", normal(5, 4), np.arange(3), says=["(3,)", "(5,)"])
    refuses(engine, "rotate", normal(5, 4), np.zeros((2, 5), int), says=["(2, 5)", "(5,)"])
    refuses(engine, "rotate", normal(5, 4), np.arange(5), frequencies=np.ones(4), says=["2 pairs", "(4,)"])
    refuses(engine, "rotate", normal(5, 4), np.arange(5), layout="neox", says=["halves", "interleaved", "neox"])


def test_names_of_variants(engine):
    refuses(engine, "gelu", Q, approximate="fast", says=["tanh", "fast"])
    refuses(engine, "sinusoidal_positions", 3, 4, layout="half", says=["halves", "'half'"])
    refuses(engine, "feed_forward", Q, normal(3, 7), normal(7, 3), activation="swish", says=["silu", "swish"])
    refuses(engine, "gated_feed_forward", Q, *[normal(3, 7)] * 2, normal(7, 3), activation="glu", says=["silu", "glu"])
    refuses(engine, "alibi_bias", 0, 3, 3, says=["head"])


@pytest.mark.parametrize("target", [-1, -100, 7, 1000])
def test_a_target_that_is_no_class(engine, target):
    refuses(engine, "cross_entropy", normal(3, 7), np.array([0, target, 1]), says=[f"target {target}", "7"])
    refuses(engine, "cross_entropy", normal(2, 7), np.array([-5, target]), ignore_index=-5, says=[f"target {target}"])


def test_targets_and_smoothing(engine):
    refuses(engine, "cross_entropy", normal(3, 7), np.zeros((3, 1), int), says=["(3, 1)", "(3, 7)"])
    refuses(engine, "cross_entropy", normal(3, 7), np.zeros(3, int), label_smoothing=1.5, says=["1.5"])
