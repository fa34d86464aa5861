"""Zipf-distributed skills: sums and slopes against SciPy's zeta and the derivation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import zeta
from scipy.stats import poisson

from clearhead.lab.powerlaw import expected, powerlaw, tail, zipf


def test_sums_are_those_of_the_zeta_function() -> None:
    use = zipf(2_000_000, 0.8)
    assert use.sum() == pytest.approx(1)
    assert use[0] == pytest.approx(1 / zeta(1.8), rel=1e-4)
    assert tail(use, 50) == pytest.approx(zeta(1.8, 51) / zeta(1.8), rel=1e-3)


def test_what_data_leaves_unknown_is_a_poisson_tail() -> None:
    use = zipf(300, 0.5)
    wanted = (use * poisson.cdf(3, use * 1000)).sum()
    assert expected(use, 1000, 4) == pytest.approx(wanted, rel=1e-10)


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
