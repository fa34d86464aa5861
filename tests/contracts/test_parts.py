"""Norms, feed-forwards, positions, rotary and loss in both engines: by hand, and against outsiders."""

import numpy as np
import pytest
import scipy.special
import torch
import torch.nn.functional as F

import clearhead.functional as functional

from .adapters import ENGINES, NUMPY, close, normal

engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
B, H, T, K, D, V = 2, 3, 5, 14, 11, 13


def torch_of(x):
    return torch.from_numpy(x)


# linear, embedding


@engines
def test_linear_weights_are_out_by_in(engine):
    close(engine("linear", np.array([1.0, 2.0]), np.array([[3.0, 4.0], [5.0, 6.0], [0.0, 1.0]])), [11.0, 17.0, 2.0])


@engines
def test_a_repeated_token_gathers_every_gradient(engine):
    d_out = np.array([[1.0, 2.0], [10.0, 20.0], [5.0, 5.0]])
    (d_weight,) = engine.gradients("embedding", d_out, np.array([1, 1, 0]), np.zeros((3, 2)))
    close(d_weight, [[5.0, 5.0], [11.0, 22.0], [0.0, 0.0]])


# norms


@engines
def test_layer_norm_by_hand(engine):
    x = np.array([1.0, 3.0])  # mean 2, biased variance 1
    close(engine("layer_norm", x, np.array([2.0, 2.0]), np.array([1.0, 1.0]), eps=0.0), [-1.0, 3.0])
    close(engine("layer_norm", x, np.ones(2), None, eps=3.0), [-0.5, 0.5])  # eps inside the root: √(1 + 3)


@engines
def test_rms_norm_by_hand(engine):
    x = np.array([3.0, 4.0, 0.0, 0.0])  # mean square 25/4
    close(engine("rms_norm", x, np.array([1.0, 1.0, 1.0, 5.0]), eps=0.0), [1.2, 1.6, 0, 0])
    close(engine("rms_norm", np.full(2, 1.0), np.ones(2), eps=3.0), [0.5, 0.5])


@engines
def test_norms_equal_torchs(engine):
    x, weight, bias = normal(B, T, D) * 3 + 2, normal(D), normal(D, seed=1)
    theirs = torch.nn.LayerNorm(D, eps=1e-5, dtype=torch.float64)
    theirs.weight.data, theirs.bias.data = torch_of(weight), torch_of(bias)
    close(engine("layer_norm", x, weight, bias), theirs(torch_of(x)).detach().numpy())
    theirs = torch.nn.RMSNorm(D, eps=1e-5, dtype=torch.float64)
    theirs.weight.data = torch_of(weight)
    close(engine("rms_norm", x, weight), theirs(torch_of(x)).detach().numpy())


@engines
def test_norms_of_float16_have_float32_statistics(engine):
    x = (normal(T, D) * 1e4).astype(np.float16)  # the square of 1e4 is not a float16
    weight = np.ones(D, np.float16)
    for found, exact in (
        (engine("rms_norm", x, weight), engine("rms_norm", x.astype(float), np.ones(D))),
        (engine("layer_norm", x, weight, weight), engine("layer_norm", x.astype(float), np.ones(D), np.ones(D))),
    ):
        assert found.dtype == np.float16
        close(found, exact, 2e-3)


def test_norms_of_bfloat16():
    x, weight = torch_of(normal(T, D) * 100).bfloat16(), torch.ones(D)  # float32 weights beside bfloat16 activations
    assert functional.layer_norm(x, weight, weight).dtype == torch.bfloat16
    close(functional.rms_norm(x, weight).double().numpy(), NUMPY("rms_norm", x.double().numpy(), np.ones(D)), 1e-2)


# activations


@engines
def test_activations_equal_outsiders(engine):
    x = np.linspace(-9, 9, 101)
    close(engine("relu", x), np.clip(x, 0, None))
    close(engine("relu2", x), np.clip(x, 0, None) ** 2)
    close(engine("gelu", x), x * scipy.special.ndtr(x))
    close(engine("gelu", x, approximate="tanh"), F.gelu(torch_of(x), approximate="tanh").numpy())
    close(engine("gelu_tanh", x), F.gelu(torch_of(x), approximate="tanh").numpy())
    close(engine("silu", x), x * scipy.special.expit(x))


@engines
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_activations_are_calm_far_out(engine, name, dtype):
    x = np.array([-1e4, 0.0, 1e4], dtype)
    out = engine(name, x)
    assert out.dtype == dtype
    close(out, [0, 0, x[2]])
    (d_x,) = engine.gradients(name, np.ones(3, dtype), x)
    assert d_x.dtype == dtype
    close(d_x, [0, 0 if name == "relu" else 0.5, 1])


@engines
def test_feed_forward_by_hand(engine):
    up, down = np.array([[1.0], [-1.0]]), np.array([[1.0, 10.0]])
    close(engine("feed_forward", np.array([[3.0], [-2.0]]), up, down), [[3.0], [20.0]])
    close(engine("feed_forward", np.array([[3.0]]), up, down, np.array([1.0, 5.0]), np.array([0.5])), [[24.5]])


@engines
def test_the_gate_is_the_one_with_the_activation(engine):
    gate, up, down = np.array([[-1.0]]), np.array([[2.0]]), np.array([[1.0]])
    x = np.array([[3.0]])
    close(engine("gated_feed_forward", x, gate, up, down, activation="relu"), [[0.0]])
    close(engine("gated_feed_forward", -x, gate, up, down, activation="relu"), [[3.0 * -6.0]])
    close(engine("swiglu", x, gate, up, down), [[-3 * scipy.special.expit(-3) * 6]])


# positions


@engines
def test_sinusoids_by_hand(engine):
    table = engine("sinusoidal_positions", 3, 4)
    close(table[0], [0, 1, 0, 1])
    close(table[2], [np.sin(2), np.cos(2), np.sin(0.02), np.cos(0.02)])
    close(engine("sinusoidal_positions", 3, 4, layout="halves")[2], [np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)])
    odd = engine("sinusoidal_positions", 3, 5)
    steps = 10000.0 ** (-np.array([0, 2, 4]) / 5)
    close(odd[1], [np.sin(1), np.cos(1), np.sin(steps[1]), np.cos(steps[1]), np.sin(steps[2])])
    halves = engine("sinusoidal_positions", 3, 5, layout="halves")
    close(halves[1], [np.sin(1), np.sin(steps[1]), np.sin(steps[2]), np.cos(1), np.cos(steps[1])])


@engines
def test_a_shift_of_positions_is_one_rotation_for_all(engine):
    table = engine("sinusoidal_positions", 101, 6)
    shift, *_ = np.linalg.lstsq(table[:-7], table[7:], rcond=None)
    close(table[:-7] @ shift, table[7:])
    close(shift @ shift.T, np.eye(6), 1e-6)


@engines
def test_alibi_slopes_of_the_paper_and_its_code(engine):
    close(-engine("alibi_bias", 8, 2, 2)[:, 1, 0], [2.0**-h for h in range(1, 9)])  # the paper's example
    close(-engine("alibi_bias", 16, 2, 2)[:2, 1, 0], [2**-0.5, 2**-1])
    # get_slopes(12) and get_slopes(3) of the authors' repository, by hand
    twelve = [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    close(-engine("alibi_bias", 12, 2, 2)[:, 1, 0], twelve)
    close(-engine("alibi_bias", 3, 2, 2)[:, 1, 0], [2**-4, 2**-8, 2**-2])


@engines
def test_alibi_counts_from_the_last_key(engine):
    close(engine("alibi_bias", 8, 2, 3)[0], [[-0.5, 0, -0.5], [-1, -0.5, 0]])
    close(engine("alibi_bias", 8, 3, 2)[0], [[-0.5, -1], [0, -0.5], [-0.5, 0]])


@engines
def test_causal_mask_by_hand(engine):
    assert engine("causal_mask", 3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert engine("causal_mask", 2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert engine("causal_mask", 3, 1).tolist() == [[False], [False], [True]]
    assert engine("causal_mask", 1, 5).all()
    assert engine("causal_mask", 3, 0).shape == (3, 0)


# rotary


@engines
def test_a_quarter_turn_by_hand(engine):
    quarter = np.array([np.pi / 2])
    x = np.array([[1.0, 2.0, 3.0, 4.0]])
    turned = engine("rotate", x, np.array([1]), frequencies=np.array([np.pi / 2, 0.0]))
    close(turned, [[-3.0, 2.0, 1.0, 4.0]])  # pairs (1, 3) and (2, 4): (a, b) becomes (−b, a)
    turned = engine("rotate", x, np.array([1]), frequencies=np.array([np.pi / 2, 0.0]), layout="interleaved")
    close(turned, [[-2.0, 1.0, 3.0, 4.0]])
    close(engine("rotate", np.array([[0.0, 1.0]]), quarter), [[-1.0, 0.0]])


@engines
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_only_the_distance_is_left_in_the_score(engine, layout):
    q, k = normal(1, K), normal(1, K, seed=1)

    def score(i, j):
        return engine("rotate", q, np.array([i]), layout=layout) @ engine("rotate", k, np.array([j]), layout=layout).T

    close(score(7, 3), score(1007, 1003), 1e-8)
    assert not np.allclose(score(7, 3), score(3, 7))


@engines
def test_halves_and_interleaved_are_one_up_to_order(engine):
    x, order = normal(B, H, T, K), np.arange(K).reshape(2, -1).T.ravel()  # 0, K/2, 1, K/2 + 1 …
    halves = engine("rotate", x, np.arange(T))
    close(engine("rotate", x[..., order], np.arange(T), layout="interleaved"), halves[..., order])


@engines
def test_positions_of_each_row(engine):
    x, positions = normal(B, H, T, K), np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    out = engine("rotate", x, positions[:, None])
    for row in range(B):
        close(out[row], engine("rotate", x[row], positions[row]))


@engines
def test_rotary_equals_the_complex_form(engine):
    x = normal(B, H, T, K)
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    turned = pairs * np.exp(1j * np.arange(T)[:, None] * 10000.0 ** (-np.arange(0, K, 2) / K))
    out = engine("rotate", x, np.arange(T), layout="interleaved")
    close(out[..., 0::2] + 1j * out[..., 1::2], turned)


@engines
def test_far_positions_are_exact_in_float32_and_float16(engine):
    x, far = normal(T, K), np.arange(T) + 10**6
    exact = engine("rotate", x, far)
    for dtype, tolerance in ((np.float32, 1e-6), (np.float16, 3e-3)):
        out = engine("rotate", x.astype(dtype), far)
        assert out.dtype == dtype
        close(out, exact, tolerance)


# loss


@engines
def test_cross_entropy_by_hand(engine):
    logits = np.log(np.array([[1.0, 3.0], [1.0, 1.0]]))
    close(engine("cross_entropy", logits, np.array([1, 0])), -(np.log(3 / 4) + np.log(1 / 2)) / 2)
    close(engine("cross_entropy", np.zeros((B, T, V)), np.zeros((B, T), int)), np.log(V))


@engines
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignored", [None, -100, 3])
def test_cross_entropy_equals_torchs(engine, smoothing, ignored):
    logits, targets = normal(B, T, V), np.random.default_rng(0).integers(0, V, (B, T))
    targets[0, :2] = 3 if ignored is None else ignored
    theirs = F.cross_entropy(
        torch_of(logits).flatten(0, 1),
        torch_of(targets).flatten(),
        label_smoothing=smoothing,
        ignore_index=-100 if ignored is None else ignored,
    )
    close(engine("cross_entropy", logits, targets, label_smoothing=smoothing, ignore_index=ignored), theirs.numpy())


@engines
def test_all_ignored_is_zero_and_so_is_its_gradient(engine):
    logits, targets = normal(T, V), np.full(T, -100)
    assert engine("cross_entropy", logits, targets, ignore_index=-100) == 0.0
    (d_logits,) = engine.gradients("cross_entropy", 1.0, logits, targets, ignore_index=-100)
    close(d_logits, np.zeros((T, V)), 0)
    assert engine("cross_entropy", np.zeros((0, V)), np.zeros(0, int)) == 0.0


@engines
def test_huge_and_hidden_logits(engine):
    logits, targets = np.array([[1e30, -1e30, 1e30], [0.0, -np.inf, 0.0]]), np.array([0, 2])
    close(engine("cross_entropy", logits, targets), np.log(2))
    (d_logits,) = engine.gradients("cross_entropy", 1.0, logits, targets)
    close(d_logits, [[-0.25, 0, 0.25], [0.25, 0, -0.25]])


@engines
def test_loss_of_float16_is_a_float32(engine):
    logits, targets = normal(T, V).astype(np.float16), np.zeros(T, int)
    loss = engine("cross_entropy", logits, targets)
    assert loss.dtype == np.float32
    close(loss, engine("cross_entropy", logits.astype(float), targets), 1e-6)
    assert engine.gradients("cross_entropy", 1.0, logits, targets)[0].dtype == np.float16
