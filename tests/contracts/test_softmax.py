"""Softmax in both engines: by hand, against scipy and torch, and at the edges of the number line."""

import numpy as np
import pytest
import scipy.special
import torch

import clearhead.functional as functional

from .adapters import ENGINES, close, normal

pytestmark = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
INF = np.inf


def test_by_hand(engine):
    close(engine("softmax", np.log(np.array([1.0, 2.0, 5.0]))), [1 / 8, 2 / 8, 5 / 8])


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_equals_scipy_and_torch_on_any_axis(engine, axis):
    x = normal(3, 5, 7)
    close(engine("softmax", x, axis=axis), scipy.special.softmax(x, axis))
    close(engine("softmax", x, axis=axis), torch.softmax(torch.from_numpy(x), axis).numpy())


@pytest.mark.parametrize("size", [1e4, 1e30, 1e300])
def test_huge_entries(engine, size):
    close(engine("softmax", np.array([size, -size, size, 0.0])), [0.5, 0, 0.5, 0])
    d_x = engine.gradients("softmax", np.arange(4.0), np.array([size, -size, size, 0.0]))[0]
    close(d_x, [0.5 * (0 - 1), 0, 0.5 * (2 - 1), 0])


def test_shift_changes_nothing(engine):
    x = normal(5, 7)
    close(engine("softmax", x + 1e4), engine("softmax", x), 1e-11)


def test_minus_infinity_takes_no_part(engine):
    close(engine("softmax", np.array([0.0, -INF, 0.0])), [0.5, 0, 0.5])
    close(engine.gradients("softmax", np.array([1.0, 5.0, 3.0]), np.array([0.0, -INF, 0.0]))[0], [-0.5, 0, 0.5])


def test_a_row_of_minus_infinity_is_zeros_forward_and_backward(engine):
    x = np.array([[-INF, -INF], [0.0, 0.0]])
    close(engine("softmax", x), [[0, 0], [0.5, 0.5]])
    close(engine.gradients("softmax", np.array([[1.0, 2.0], [1.0, 2.0]]), x)[0], [[0, 0], [-0.25, 0.25]])


def test_nan_stays_nan_in_its_own_row(engine):
    out = engine("softmax", np.array([[0.0, np.nan, -INF], [0.0, 0.0, 0.0]]))
    assert np.isnan(out[0]).all()
    close(out[1], [1 / 3] * 3)


def test_float16_is_computed_in_float32(engine):
    x = np.zeros((2, 4099), np.float16)  # the sum of 4099 ones is not a float16
    x[1] = 60000
    out = engine("softmax", x)
    assert out.dtype == np.float16
    close(out, np.full(x.shape, np.float16(1 / 4099)), 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_type_is_kept(engine, dtype):
    out = engine("softmax", normal(3, 5).astype(dtype))
    assert out.dtype == dtype
    close(out, scipy.special.softmax(normal(3, 5), -1), 1e-3 if dtype == np.float16 else 1e-6)


def test_bfloat16(engine):
    if engine.name == "torch":
        out = functional.softmax(torch.tensor([1e30, -1e30, 1e30], dtype=torch.bfloat16))
        assert out.dtype == torch.bfloat16
        assert out.tolist() == [0.5, 0, 0.5]
    else:
        assert not hasattr(np, "bfloat16")  # NumPy has no such type


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint8])
def test_integers_become_floats(engine, dtype):
    out = engine("softmax", np.array([3, 3, 3], dtype))
    assert out.dtype.kind == "f"
    close(out, [1 / 3] * 3, 1e-6)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0,)])
def test_empty(engine, shape):
    assert engine("softmax", np.zeros(shape)).shape == shape
    assert engine.gradients("softmax", np.zeros(shape), np.zeros(shape))[0].shape == shape
