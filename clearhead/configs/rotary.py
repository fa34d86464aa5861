"""Rotary positions (Su et al. 2021): q and k are turned by an angle proportional to their position.

The frequencies are computed here, once, in float64, for both engines; scaling a model to a longer context is a
change of these frequencies and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from .base import Config, ConfigError
from .masks import Band, Blockwise, Mask


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Config):
    """Positions divided by `factor`  (Chen et al. 2023).

    >>> RotaryConfig(theta=100.0, scaling=LinearScaling(factor=4)).frequencies(8).round(3)
    array([0.25 , 0.079, 0.025, 0.008])
    """

    factor: float

    def check(self) -> None:
        self.require_positive("factor")

    def scale(self, frequencies: np.ndarray, theta: float, length: int) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class NTKScaling(Config):
    """θ becomes θ·factor^(d/(d−2)): the slowest frequency is divided by `factor`, the fastest stays.

    >>> RotaryConfig(theta=100.0, scaling=NTKScaling(factor=4)).frequencies(8).round(3)
    array([1.   , 0.199, 0.04 , 0.008])
    """

    factor: float

    def check(self) -> None:
        self.require_positive("factor")

    def scale(self, frequencies: np.ndarray, theta: float, length: int) -> np.ndarray:
        return ntk_frequencies(frequencies, theta, self.factor)


@dataclass(frozen=True, kw_only=True)
class DynamicScaling(Config):
    """NTK scaling by as much as the text needs: none up to `length` tokens, and more with every token after them.

    >>> RotaryConfig(scaling=DynamicScaling(factor=4, length=256)).varies
    True
    """

    factor: float
    length: int  # the context the model was trained at

    def check(self) -> None:
        self.require_positive("factor", "length")

    def scale(self, frequencies: np.ndarray, theta: float, length: int) -> np.ndarray:
        needed = self.factor * max(length, self.length) / self.length - (self.factor - 1)
        return ntk_frequencies(frequencies, theta, needed)


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling(Config):
    """Each frequency divided by a factor of its own, from one list up to `length` tokens, from another past them.

    Ding et al. 2024 (Phi-3).

    >>> RotaryConfig(scaling=LongRopeScaling(short=(1.0, 1.0), long=(1.0, 4.0), length=256)).varies
    True
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    length: int  # the context the model was trained at
    rotation: float = 1.0  # q and k are multiplied by it

    def check(self) -> None:
        self.require_positive("length", "rotation")
        if len(self.short) != len(self.long):
            raise ConfigError(f"LongRopeScaling has {len(self.short)} short factors, but {len(self.long)} long ones")
        if odd := [factor for factor in self.short + self.long if not 0 < factor < math.inf]:
            raise ConfigError(f"LongRopeScaling has the factor {odd[0]}, but factors must be positive and finite")

    def scale(self, frequencies: np.ndarray, theta: float, length: int) -> np.ndarray:
        if len(self.short) != len(frequencies):
            raise ConfigError(
                f"LongRopeScaling has {len(self.short)} factors, but {len(frequencies)} pairs of dimensions turn"
            )
        return frequencies / np.array(self.long if length > self.length else self.short)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Config):
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between  (Llama 3.1).

    >>> RotaryConfig(theta=100.0, scaling=Llama3Scaling(factor=4, length=256)).frequencies(8).round(3)
    array([1.   , 0.316, 0.1  , 0.01 ])
    """

    factor: float
    length: int  # the context the model was trained at
    slow: float = 1.0  # wavelengths above length/slow are divided
    fast: float = 4.0  # wavelengths below length/fast are kept

    def check(self) -> None:
        self.require_positive("factor", "length", "slow")
        if self.fast <= self.slow:
            raise ConfigError(f"Llama3Scaling.fast is {self.fast}, but must be above slow, {self.slow}")

    def scale(self, frequencies: np.ndarray, theta: float, length: int) -> np.ndarray:
        turns = self.length * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.slow) / (self.fast - self.slow), 0, 1)
        return frequencies * kept + frequencies / self.factor * (1 - kept)


@dataclass(frozen=True, kw_only=True)
class YarnScaling(Config):
    """Frequencies divided by a ramp over dimensions, and the scores sharpened  (Peng et al. 2023).

    >>> RotaryConfig(theta=100.0, scaling=YarnScaling(factor=4, length=256)).frequencies(8).round(3)
    array([1.   , 0.257, 0.062, 0.014])
    """

    factor: float
    length: int  # the context the model was trained at
    fast: float = 32.0  # dimensions that turn more often than this over `length` are kept
    slow: float = 1.0  # those that turn less often are divided
    rotation: float | None = None  # q and k are multiplied by it; None: the paper's 0.1·ln(factor) + 1
    whole: bool = True  # the ramp starts and ends at whole dimensions

    def check(self) -> None:
        self.require_positive("factor", "length", "slow", "rotation")
        if self.fast <= self.slow:
            raise ConfigError(f"YarnScaling.fast is {self.fast}, but must be above slow, {self.slow}")

    def scale(self, frequencies: np.ndarray, theta: float, length: int) -> np.ndarray:
        dim = 2 * len(frequencies)

        def dimension(turns: float) -> float:
            """The dimension that makes so many turns over the trained context."""
            return dim * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(self.fast), dimension(self.slow)
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        divided = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return frequencies / self.factor * divided + frequencies * (1 - divided)


ScalingConfig = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling | DynamicScaling | LongRopeScaling


def ntk_frequencies(frequencies: np.ndarray, theta: float, factor: float) -> np.ndarray:
    """Frequencies for θ·factor^(d/(d−2))."""
    dim = 2 * len(frequencies)
    return frequencies if dim == 2 else (theta * factor ** (dim / (dim - 2))) ** (-np.arange(0, dim, 2) / dim)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """0.1·weight·ln(factor) + 1, YaRN's correction of the softmax temperature (Peng et al. 2023, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(Config):
    """Turns pairs of dimensions of q and k; the score then depends on the distance i − j only.

    >>> RotaryConfig(theta=100.0).frequencies(8).round(3)
    array([1.   , 0.316, 0.1  , 0.032])
    """

    theta: float = 10000.0
    layout: Literal["halves", "interleaved"] = "halves"  # which dimensions make a pair: (i, i + K/2) or (2i, 2i + 1)
    dim: int | None = None  # how many leading dimensions turn; None: all
    scaling: ScalingConfig | None = None

    def check(self) -> None:
        self.require_positive("theta")
        if isinstance(self.scaling, YarnScaling) and self.theta <= 1:
            raise ConfigError(f"Rotary.theta is {self.theta}, but must be above 1 for YaRN: later pairs turn slower")
        if self.dim is not None and (self.dim <= 0 or self.dim % 2):
            raise ConfigError(f"Rotary.dim is {self.dim}, but must be even and positive: dimensions turn in pairs")

    @property
    def varies(self) -> bool:
        """Whether the frequencies depend on the length of the text."""
        return isinstance(self.scaling, DynamicScaling | LongRopeScaling)

    def width(self, head_dim: int) -> int:
        """How many dimensions of a head turn."""
        width = head_dim if self.dim is None else self.dim
        if width > head_dim or width % 2:
            raise ConfigError(f"rotary turns pairs of dimensions, so a head of {head_dim} cannot turn {width}")
        return width

    def frequencies(self, head_dim: int, length: int = 0) -> np.ndarray:
        """Radians per position for each pair in a text of `length` tokens: θ^(−2i/d), then scaled."""
        width = self.width(head_dim)
        frequencies = self.theta ** (-np.arange(0, width, 2) / width)
        return frequencies if self.scaling is None else self.scaling.scale(frequencies, self.theta, length)

    def resolve(self, head_dim: int) -> RotaryConfig:
        """The same rotation with every default written out; NTK scaling is nothing but another θ."""
        width = self.width(head_dim)
        scaling, theta = self.scaling, self.theta
        if isinstance(scaling, NTKScaling):
            theta, scaling = theta if width == 2 else theta * scaling.factor ** (width / (width - 2)), None
        elif isinstance(scaling, YarnScaling):
            scaling = replace(scaling, rotation=self.magnitude)
        return replace(self, theta=theta, scaling=scaling, dim=None if width == head_dim else width)

    @property
    def formulas(self) -> tuple[str, str]:
        """What becomes of queries and of keys."""
        return "turned by position", "turned by position"

    def queries(self, mask: Mask) -> dict[str, Mask]:
        """The queries that attention needs, by name, and which keys each of them reads."""
        return {"query_rotated": mask}

    @property
    def magnitude(self) -> float:
        """What the turned q and k are multiplied by."""
        if isinstance(self.scaling, LongRopeScaling):
            return self.scaling.rotation
        if not isinstance(self.scaling, YarnScaling):
            return 1.0
        return yarn_magnitude(self.scaling.factor) if self.scaling.rotation is None else self.scaling.rotation


@dataclass(frozen=True, kw_only=True)
class DualChunkConfig(Config):
    """Rotary positions that never pass those the model was trained at, however long the text  (An et al. 2024).

    The text is cut into chunks. A key of position j is turned as j mod chunk. A query of position i is turned as i mod
    chunk for keys of its own chunk, as min(i mod chunk + chunk, length − 1) for those of the chunk before, and as
    length − 1 for all older ones: near distances are exact, far ones only far.

    >>> AttentionConfig(heads=4, mask=Causal(), rotary=DualChunkConfig(chunk=64, length=128)).rotary.chunk
    64
    """

    chunk: int
    length: int  # the context the model was trained at
    rotary: RotaryConfig = RotaryConfig()

    def check(self) -> None:
        self.require_positive("chunk")
        if self.rotary.varies:
            kind = type(self.rotary.scaling).__name__
            raise ConfigError(
                f"DualChunk needs frequencies that do not depend on the length of the text, but has {kind}"
            )
        if self.chunk >= self.length:
            raise ConfigError(f"DualChunk.chunk is {self.chunk}, but must be below length={self.length}")

    def width(self, head_dim: int) -> int:
        """How many dimensions of a head turn."""
        return self.rotary.width(head_dim)

    def resolve(self, head_dim: int) -> DualChunkConfig:
        return self

    @property
    def formulas(self) -> tuple[str, str]:
        """What becomes of queries and of keys."""
        return "turned by position", "turned by position"

    def queries(self, mask: Mask) -> dict[str, Mask]:
        """The queries that attention needs, by name, and which keys each of them reads."""
        apart = {"query_rotated": Band(0, 0), "query_previous": Band(1, 1), "query_older": Band(2)}
        return {name: mask & Blockwise(self.chunk, band) for name, band in apart.items()}

    def places(self, positions: Any) -> dict[str, Any]:
        """The position that each kind of query is rotated by."""
        place = positions % self.chunk
        last = place * 0 + self.length - 1
        return {
            "query_rotated": place,
            "query_previous": (place + self.chunk).clip(max=self.length - 1),
            "query_older": last,
        }


@dataclass(frozen=True, kw_only=True)
class QueryScaleConfig(Config):
    """In place of a rotation: query i is multiplied by 1 + strength·ln(1 + ⌊(i + 1)/every⌋)  (Llama 4).

    A softmax over more keys is flatter. Longer queries keep it sharp in a layer that knows no positions.

    >>> QueryScaleConfig(every=4).formulas[0]
    'times 1 + 0.1·ln(1 + ⌊(i + 1)/4⌋)'
    """

    every: int = 8192
    strength: float = 0.1

    def check(self) -> None:
        self.require_positive("every", "strength")

    @property
    def varies(self) -> bool:
        return False

    def width(self, head_dim: int) -> int:
        """How many dimensions of a head change."""
        return head_dim

    def resolve(self, head_dim: int) -> QueryScaleConfig:
        return self

    @property
    def formulas(self) -> tuple[str, str]:
        return f"times 1 + {self.strength:g}·ln(1 + ⌊(i + 1)/{self.every}⌋)", "unchanged"

    def queries(self, mask: Mask) -> dict[str, Mask]:
        """The queries that attention needs, by name, and which keys each of them reads."""
        return {"query_rotated": mask}
