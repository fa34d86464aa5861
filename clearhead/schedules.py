"""Learning-rate schedules: pure functions of the step, counted from 1, so a resumed run needs no state."""

from math import cos, pi


def noam(step: int, dim: int, warmup: int, factor: float = 1.0) -> float:
    """factor · D^(−1/2) · min(step^(−1/2), step · warmup^(−3/2)): a linear rise, then an inverse square root.

    Vaswani et al. (2017), "Attention Is All You Need", equation 3. The peak is at step = warmup.

    >>> round(noam(4000, 512, 4000), 6)
    0.000699
    """
    _check_step(step)
    if dim < 1 or warmup < 1:
        raise ValueError(f"noam needs dim and warmup of at least 1, not dim={dim}, warmup={warmup}")
    return factor * dim**-0.5 * min(step**-0.5, step * warmup**-1.5)


def cosine(step: int, *, steps: int, warmup: int = 0, peak: float = 1.0, floor: float = 0.0) -> float:
    """Linear to peak at `warmup`, then half a cosine to floor at `steps`, and floor from there on.

    floor + (peak − floor) · (1 + cos(π · progress)) / 2.  Loshchilov & Hutter (2017), "SGDR", equation 5.

    >>> round(cosine(50, steps=100, warmup=0), 6)
    0.5
    """
    _check_step(step)
    if not 0 <= warmup < steps:
        raise ValueError(f"cosine needs 0 <= warmup < steps, not warmup={warmup}, steps={steps}")
    if step < warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / (steps - warmup))
    return floor + (peak - floor) * (1 + cos(pi * progress)) / 2


def warmup_stable_decay(
    step: int, *, steps: int, warmup: int = 0, decay: int, peak: float = 1.0, floor: float = 0.0
) -> float:
    """Linear to peak at `warmup`, flat, then linear to floor over the last `decay` steps, and floor from there on.

    Hu et al. (2024), "MiniCPM", section 4; the linear cooldown is Hägele et al. (2024), equation 1.

    >>> warmup_stable_decay(50, steps=100, warmup=10, decay=20)
    1.0
    """
    _check_step(step)
    if warmup < 0 or decay < 1 or warmup + decay > steps:
        raise ValueError(
            "warmup_stable_decay needs warmup >= 0, decay >= 1 and warmup + decay <= steps, "
            f"not warmup={warmup}, decay={decay}, steps={steps}"
        )
    if step < warmup:
        return peak * step / warmup
    remaining = min(1.0, max(0.0, (steps - step) / decay))
    return floor + (peak - floor) * remaining


def _check_step(step: int) -> None:
    if step < 1:
        raise ValueError(f"steps are counted from 1, so there is no step {step}")
