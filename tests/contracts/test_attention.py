"""Attention and flash attention in both engines: by hand, against torch's, and at the edges."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead.functional as functional
import clearhead.reference as reference

from .adapters import ENGINES, NUMPY, TORCH, close, normal

B, H, T, S, K, U = 2, 3, 5, 7, 11, 13
engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
either = pytest.mark.parametrize("function", ["attention", "flash_attention"])
Q, KEYS, VALUES = normal(B, H, T, K), normal(B, H, S, K), normal(B, H, S, U)


def sdpa(q, k, v, **options):
    tensors = (torch.from_numpy(x) for x in (q, k, v))
    return F.scaled_dot_product_attention(*tensors, **options).numpy()


@engines
@either
def test_by_hand(engine, function):
    # Scores ln 3 and 0: the first key gets 3/4. Scale 1 so that nothing else is in the sum.
    q, k = np.array([[1.0]]), np.array([[np.log(3)], [0.0]])
    v = np.array([[8.0, 0.0], [0.0, 4.0]])
    close(engine(function, q, k, v, scale=1.0), [[6.0, 1.0]])


@engines
@either
def test_equal_scores_give_the_mean(engine, function):
    close(engine(function, np.zeros((T, K)), KEYS[0, 0], VALUES[0, 0]), np.tile(VALUES[0, 0].mean(0), (T, 1)))
    causal = engine(function, np.zeros((S, K)), KEYS[0, 0], VALUES[0, 0], causal=True)
    close(causal, VALUES[0, 0].cumsum(0) / np.arange(1, S + 1)[:, None])


@engines
@either
def test_equals_torch(engine, function):
    close(engine(function, Q, KEYS, VALUES), sdpa(Q, KEYS, VALUES))
    close(engine(function, Q, KEYS, VALUES, scale=0.3), sdpa(Q, KEYS, VALUES, scale=0.3))
    mask = normal(B, 1, T, S) > 0
    mask[..., 0] = True
    close(engine(function, Q, KEYS, VALUES, mask=mask), sdpa(Q, KEYS, VALUES, attn_mask=torch.from_numpy(mask)))
    square = normal(B, H, S, K)
    close(engine(function, square, KEYS, VALUES, causal=True), sdpa(square, KEYS, VALUES, is_causal=True))


@engines
def test_bias_equals_torchs_float_mask(engine):
    bias = normal(H, T, S)
    close(engine("attention", Q, KEYS, VALUES, bias=bias), sdpa(Q, KEYS, VALUES, attn_mask=torch.from_numpy(bias)))


@engines
def test_weights_are_rows_that_sum_to_one_and_make_the_output(engine):
    out, weights = engine("attention", Q, KEYS, VALUES, causal=True, return_weights=True)
    close(weights.sum(-1), np.ones((B, H, T)))
    close(weights @ VALUES, out)
    assert (weights[..., ~reference.causal_mask(T, S)] == 0).all()
    assert (weights[..., reference.causal_mask(T, S)] > 0).all()


@engines
@either
def test_the_last_query_sees_the_last_key_and_no_query_its_future(engine, function):
    whole = engine(function, normal(B, H, S, K), KEYS, VALUES, causal=True)
    tail = engine(function, normal(B, H, S, K)[:, :, 4:], KEYS, VALUES, causal=True)
    close(tail, whole[:, :, 4:])
    changed = KEYS.copy()
    changed[:, :, -1] += 5
    after = engine(function, normal(B, H, S, K), changed, VALUES, causal=True)
    close(after[:, :, :-1], whole[:, :, :-1], 0)
    assert not np.allclose(after[:, :, -1], whole[:, :, -1])


@engines
@either
def test_more_queries_than_keys_leave_the_first_with_nothing(engine, function):
    q, k, v = normal(S, K), normal(T, K), normal(T, U)
    out = engine(function, q, k, v, causal=True)
    close(out[: S - T], np.zeros((S - T, U)), 0)
    close(out[S - T], v[0])
    for d in engine.gradients(function, np.ones_like(out), q, k, v, causal=True):
        assert np.isfinite(d).all()


@engines
@either
def test_a_query_that_may_read_nothing_gets_zeros_and_finite_gradients(engine, function):
    mask = np.ones((T, S), bool)
    mask[2] = False
    out = engine(function, Q, KEYS, VALUES, mask=mask)
    close(out[:, :, 2], np.zeros((B, H, U)), 0)
    d_q, d_k, d_v = engine.gradients(function, np.ones_like(out), Q, KEYS, VALUES, mask=mask)
    close(d_q[:, :, 2], np.zeros((B, H, K)), 0)
    for d in (d_q, d_k, d_v):
        assert np.isfinite(d).all()
    for d in engine.gradients(function, np.ones_like(out), Q, KEYS, VALUES, mask=np.zeros((T, S), bool)):
        close(d, np.zeros_like(d), 0)


@engines
def test_a_bias_of_minus_infinity_hides_like_a_mask(engine):
    mask = normal(T, S) > 0
    mask[3] = False
    bias = np.where(mask, 0, -np.inf)
    close(engine("attention", Q, KEYS, VALUES, bias=bias), engine("attention", Q, KEYS, VALUES, mask=mask))
    found = engine.gradients("attention", np.ones((B, H, T, U)), Q, KEYS, VALUES, bias=bias)
    for d in found:
        assert np.isfinite(d).all()


@engines
@either
@pytest.mark.parametrize("size", [1e4, 1e30, 1e150])
def test_huge_scores_pick_one_key(engine, function, size):
    q, k = np.array([[size, 0.0]]), np.array([[-size, 0.0], [size, 0.0], [0.0, 0.0]])
    v = np.array([[1.0], [2.0], [3.0]])
    close(engine(function, q, k, v), [[2.0]])
    for d in engine.gradients(function, np.ones((1, 1)), q, k, v):
        assert np.isfinite(d).all()


@engines
@either
def test_float16_does_not_overflow_at_1e4(engine, function):
    q, k, v = (np.sign(x).astype(np.float16) for x in (Q, KEYS, VALUES))
    huge = engine(function, q * np.float16(1e4), k * np.float16(1e4), v)
    assert huge.dtype == np.float16
    wide = engine(function, np.sign(Q) * 1e4, np.sign(KEYS) * 1e4, np.sign(VALUES))
    close(huge, wide, 2e-3)


@engines
@either
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_type_is_kept(engine, function, dtype):
    arrays = [x.astype(dtype) for x in (Q, KEYS, VALUES)]
    out = engine(function, *arrays, causal=True)
    assert out.dtype == dtype
    close(out, engine(function, Q, KEYS, VALUES, causal=True), 5e-3 if dtype == np.float16 else 1e-5)
    for d, x in zip(engine.gradients(function, np.ones_like(out), *arrays), arrays, strict=True):
        assert d.dtype == dtype
        assert d.shape == x.shape


@either
def test_bfloat16(function):
    q, k, v = (torch.from_numpy(x).bfloat16() for x in (Q, KEYS, VALUES))
    out = getattr(functional, function)(q, k, v)
    assert out.dtype == torch.bfloat16
    close(out.double().numpy(), NUMPY(function, Q, KEYS, VALUES), 5e-2)


@engines
@either
def test_integers_and_mixed_types(engine, function):
    q, k = np.arange(6).reshape(2, 3), np.arange(9).reshape(3, 3)
    expected = engine("attention", q.astype(float), k.astype(float), VALUES[0, 0, :3])
    close(engine(function, q, k, VALUES[0, 0, :3]), expected)


@engines
@either
@pytest.mark.parametrize(("queries", "keys"), [(0, S), (T, 0), (0, 0), (1, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_lengths(engine, function, queries, keys, causal):
    q, k, v = Q[:, :, :queries], KEYS[:, :, :keys], VALUES[:, :, :keys]
    out = engine(function, q, k, v, causal=causal)
    close(out, np.zeros((B, H, queries, U)), 0)
    for d, x in zip(engine.gradients(function, np.ones_like(out), q, k, v, causal=causal), (q, k, v), strict=True):
        close(d, np.zeros_like(x), 0)
    mask = np.ones((queries, keys), bool)
    close(engine(function, q, k, v, causal=causal, mask=mask), out, 0)


@engines
@either
def test_an_empty_batch(engine, function):
    assert engine(function, Q[:0], KEYS[:0], VALUES[:0], causal=True).shape == (0, H, T, U)


@engines
@either
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": np.ones((S, S), bool)}])
def test_a_nan_that_may_be_read_stays_a_nan(engine, function, options):
    q, k, v = normal(S, K), KEYS[0, 0].copy(), VALUES[0, 0]
    q[3, 2] = np.nan
    out = engine(function, q, k, v, **options)
    np.testing.assert_array_equal(np.isnan(out).all(-1), np.arange(S) == 3)
    assert not np.isnan(np.delete(out, 3, 0)).any()
    k[0, 0] = np.nan
    assert np.isnan(engine(function, q, k, v, **options)).all()


@engines
@either
def test_a_nan_that_may_not_be_read_does_no_harm(engine, function):
    q, k = normal(S, K), KEYS[0, 0].copy()
    k[-1] = np.nan
    whole = engine(function, q, KEYS[0, 0], VALUES[0, 0], causal=True)
    out = engine(function, q, k, VALUES[0, 0], causal=True)
    close(out[:-1], whole[:-1])
    assert np.isnan(out[-1]).all()
    mask = np.arange(S) < S - 1
    close(
        engine(function, q, k, VALUES[0, 0], mask=mask),
        engine(function, q, KEYS[0, 0][:-1], VALUES[0, 0][:-1]),
    )


def test_tiles_wholly_in_the_future_are_skipped(monkeypatch):
    module, seen = sys.modules["clearhead.reference.flash"], []
    scores = module.Tiles.scores
    monkeypatch.setattr(module.Tiles, "scores", lambda *arguments: seen.append(arguments[1:]) or scores(*arguments))
    reference.flash_attention(normal(12, K), normal(12, K), normal(12, U), causal=True, block=4)
    assert len(seen) == 3 + 2 + 1
    seen.clear()
    reference.flash_attention(normal(12, K), normal(12, K), normal(12, U), block=4)
    assert len(seen) == 3 * 3


# Dropout


def test_dropout_in_numpy_equals_torch_with_the_same_weights_dropped():
    q, k, v, d_out = Q, KEYS[:, :1], VALUES[:, :1], normal(B, H, T, U)
    options = {"dropout": 0.3, "causal": True, "bias": normal(T, S)}
    kept = torch.from_numpy(np.random.default_rng(5).random((B, H, T, S)) >= 0.3).double() / 0.7
    leaves = [torch.from_numpy(x.copy()).requires_grad_() for x in (q, k, v, options["bias"])]
    scores = leaves[0] @ leaves[1].mT * K**-0.5 + leaves[3]
    scores = scores.masked_fill(~torch.from_numpy(reference.causal_mask(T, S)), -torch.inf)
    expected = (scores.softmax(-1) * kept) @ leaves[2]
    expected.backward(torch.from_numpy(d_out))
    close(NUMPY("attention", q, k, v, rng=NUMPY.generator(5), **options), expected.detach().numpy())
    found = NUMPY.gradients("attention", d_out, q, k, v, rng=NUMPY.generator(5), **options)
    for d, leaf in zip(found, leaves, strict=True):
        close(d, leaf.grad.numpy())


@engines
def test_dropout_keeps_the_mean_and_returns_the_weights_before_it(engine):
    q, k, v = np.zeros((401, K)), np.zeros((503, K)), np.ones((503, 1))
    out, weights = engine("attention", q, k, v, dropout=0.25, rng=engine.generator(0), return_weights=True)
    close(weights, np.full((401, 503), 1 / 503))
    assert abs(out.mean() - 1) < 5e-3
    assert 0.01 < out.std() < 0.05  # √(1/3 / 503) = 0.026
    again = engine("attention", q, k, v, dropout=0.25, rng=engine.generator(0))
    other = engine("attention", q, k, v, dropout=0.25, rng=engine.generator(1))
    close(again, out, 0)
    assert not np.array_equal(other, out)


def test_dropout_in_torch_differentiates_what_it_dropped():
    leaves = [torch.from_numpy(x.copy()).requires_grad_() for x in (Q[0, 0], KEYS[0, 0], VALUES[0, 0])]

    def drop(q, k, v):
        return functional.attention(q, k, v, dropout=0.4, rng=TORCH.generator(3))

    assert torch.autograd.gradcheck(drop, leaves)
    torch.manual_seed(0)
    first = functional.attention(*leaves, dropout=0.4)
    torch.manual_seed(0)
    assert torch.equal(functional.attention(*leaves, dropout=0.4), first)


# Shapes


sizes = st.integers(0, 4)
leads = st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans(), st.booleans()), max_size=3)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(lead=leads, T=sizes, S=sizes, K=st.integers(1, 4), U=sizes, causal=st.booleans(), block=st.integers(1, 3))
def test_any_broadcast_of_any_sizes(lead, T, S, K, U, causal, block):
    whole = tuple(size for size, *_ in lead)
    q, k, v = (
        normal(*(1 if repeated[i] else size for size, *repeated in lead), *tail)
        for i, tail in enumerate(((T, K), (S, K), (S, U)))
    )
    d_out = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    assert len(d_out) == len(whole)
    d_out = normal(*d_out, T, U, seed=1)
    expected = NUMPY("attention", q, k, v, causal=causal)
    gradients = NUMPY.gradients("attention", d_out, q, k, v, causal=causal)
    assert expected.shape == d_out.shape
    for engine, function, options in (
        (TORCH, "attention", {}),
        (NUMPY, "flash_attention", {"block": block}),
        (TORCH, "flash_attention", {"block": block}),
    ):
        close(engine(function, q, k, v, causal=causal, **options), expected)
        found = engine.gradients(function, d_out, q, k, v, causal=causal, **options)
        for d, d_expected in zip(found, gradients, strict=True):
            close(d, d_expected)
