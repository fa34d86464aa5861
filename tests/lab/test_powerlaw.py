"""Zipf-distributed skills: sums and slopes against SciPy's zeta and the derivation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import zeta
from scipy.stats import poisson

from clearhead.inspect.plotting import figure
from clearhead.lab.powerlaw import expected_loss, fit_slope, powerlaw, tail_loss, zipf_frequencies


def test_sums_are_those_of_the_zeta_function() -> None:
    use = zipf_frequencies(2_000_000, 0.8)
    assert use.sum() == pytest.approx(1)
    assert use[0] == pytest.approx(1 / zeta(1.8), rel=1e-4)
    assert tail_loss(use, 50) == pytest.approx(zeta(1.8, 51) / zeta(1.8), rel=1e-3)


def test_what_data_leaves_unknown_is_a_poisson_tail() -> None:
    use = zipf_frequencies(300, 0.5)
    wanted = (use * poisson.cdf(3, use * 1000)).sum()
    assert expected_loss(use, 1000, 4) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_the_slopes_are_those_derived(alpha: float) -> None:
    found = powerlaw(alpha=alpha, tests=60_000, seed=1)
    for name, exponent in {"N": -alpha, "D": -alpha / (1 + alpha)}.items():
        assert found.more["derived"][name] == pytest.approx(exponent)
        assert found.more["slopes"][name]["exponent"] == pytest.approx(exponent, abs=0.05)
    for measured, theory in ((1, 2), (3, 4)):
        for row in found.rows[3:]:
            assert row[measured] == pytest.approx(row[theory], abs=0.01)
    assert np.isfinite(found.column("loss at D")).all()


def test_a_slope_is_of_losses_that_were_seen_or_is_not_told() -> None:
    """Sizes that failed no test have no place on logarithmic paper: they neither steepen a slope nor make one up."""
    found = fit_slope([(16, 2e-3), (64, 2e-3 / 16), (256, 0.0), (1024, 0.0)], 1)
    assert found is not None
    assert found.exponent == pytest.approx(-2)
    found = powerlaw(alpha=8.0, skills=1024, largest=1024, tests=500)
    assert set(found.column("loss at N")) == {0.0}
    assert found.more["slopes"]["N"] is None
    assert "are undetermined in this range in N" in found.found
    with figure(10, 4) as picture:
        found.draw(picture, "light")
        assert picture.axes[0].get_title() == "size: slope undetermined in this range"
