"""Schedules: the published formulas, their corners, and steps counted from 1."""

from math import cos, isclose, pi

import pytest

import clearhead.functional as functional
import clearhead.reference as reference
from clearhead.configs.train import StableConfig
from clearhead.schedules import cosine, noam, warmup_stable_decay


def test_both_engines_have_the_same_functions():
    for name in ("noam", "cosine", "warmup_stable_decay"):
        assert getattr(reference, name) is getattr(functional, name)


def test_noam_of_the_paper():
    # Transformer-base: dim 512, warmup 4000. The peak is 512^-0.5 · 4000^-0.5 = 6.99e-4.
    assert isclose(noam(4000, 512, 4000), 6.987712429686844e-4, rel_tol=1e-12)
    assert isclose(noam(1, 512, 4000), noam(4000, 512, 4000) / 4000)
    assert isclose(noam(16000, 512, 4000), noam(4000, 512, 4000) / 2)
    assert isclose(noam(7, 512, 4000, factor=2.0), 2 * noam(7, 512, 4000))
    assert max(range(1, 99), key=lambda step: noam(step, 11, 13)) == 13


@pytest.mark.parametrize("schedule", [cosine, lambda step, **sizes: warmup_stable_decay(step, decay=7, **sizes)])
def test_corners(schedule):
    sizes = {"steps": 31, "warmup": 5, "peak": 3.0, "floor": 0.5}
    assert isclose(schedule(1, **sizes), 3.0 / 5)
    assert isclose(schedule(4, **sizes), 3.0 * 4 / 5)
    assert schedule(5, **sizes) == 3.0
    assert isclose(schedule(31, **sizes), 0.5)
    assert isclose(schedule(1000, **sizes), 0.5)
    rates = [schedule(step, **sizes) for step in range(5, 32)]
    assert rates == sorted(rates, reverse=True)


def test_cosine_by_hand():
    assert isclose(cosine(18, steps=31, warmup=5, peak=3.0, floor=1.0), 2.0)  # half way
    assert isclose(cosine(1, steps=4), (1 + cos(pi / 4)) / 2)


def test_warmup_stable_decay_by_hand():
    rates = [warmup_stable_decay(step, steps=10, warmup=2, decay=4) for step in range(1, 11)]
    assert rates == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert warmup_stable_decay(2, steps=6, warmup=2, decay=4) == 1  # no flat part
    assert warmup_stable_decay(1, steps=6, decay=4) == 1


@pytest.mark.parametrize("step", [0, -1])
def test_there_is_no_step_zero(step):
    for call in (
        lambda: noam(step, 8, 10),
        lambda: cosine(step, steps=10),
        lambda: warmup_stable_decay(step, steps=10, decay=2),
    ):
        with pytest.raises(ValueError, match=f"counted from 1, so there is no step {step}"):
            call()


def test_sizes_that_make_no_schedule():
    with pytest.raises(ValueError, match="warmup=0"):
        noam(1, 8, 0)
    with pytest.raises(ValueError, match="warmup=10, steps=10"):
        cosine(1, steps=10, warmup=10)
    with pytest.raises(ValueError, match="warmup=5, decay=6, steps=10"):
        warmup_stable_decay(1, steps=10, warmup=5, decay=6)
    with pytest.raises(ValueError, match="decay=0"):
        warmup_stable_decay(1, steps=10, decay=0)


def test_a_run_that_does_not_come_down_stays_level():
    assert [StableConfig(warmup=2, decay=0.0).factor(step, 5) for step in range(1, 6)] == [0.5, 1, 1, 1, 1]
    assert StableConfig(warmup=20, decay=0.4).factor(1, 1) == 1  # 0.4 of one step is none
