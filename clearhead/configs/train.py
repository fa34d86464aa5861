"""A whole training run as data: model, task, optimizer, schedule and sizes. Saved as `recipe.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clearhead import schedules

from .adapter import LoRAConfig
from .base import Config, ConfigError
from .data import BytePairConfig, TokenizerConfig
from .models import EncoderDecoderConfig, SequenceModelConfig


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(Config):
    """Loshchilov & Hutter 2019. Weights of one dimension are not decayed."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    embedding_lr: float | None = None  # None: as lr
    head_lr: float | None = None

    def check(self) -> None:
        self.require_positive("lr", "eps", "embedding_lr", "head_lr")
        self.require_share("beta1", "beta2")


@dataclass(frozen=True, kw_only=True)
class MuonConfig(Config):
    """Momentum, each matrix of it made orthogonal (Jordan et al. 2024); AdamW for what is not a block's matrix."""

    lr: float = 0.02
    momentum: float = 0.95
    iterations: int = 5  # of the Newton–Schulz kind, at most 5
    weight_decay: float = 0.0
    rest: AdamWConfig = AdamWConfig(lr=0.01, beta1=0.8, eps=1e-10, weight_decay=0.0)

    def check(self) -> None:
        self.require_positive("lr")
        self.require_share("momentum")
        if not 1 <= self.iterations <= 5:
            raise ConfigError(f"Muon.iterations is {self.iterations}, but must be from 1 to 5")


OptimizerConfig = AdamWConfig | MuonConfig


@dataclass(frozen=True, kw_only=True)
class CosineConfig(Config):
    """Up over `warmup` steps, then down along a cosine to `floor` times the peak."""

    warmup: int = 100
    floor: float = 0.1

    def factor(self, step: int, steps: int) -> float:
        return schedules.cosine(step, steps=steps, warmup=min(self.warmup, steps - 1), floor=self.floor)


@dataclass(frozen=True, kw_only=True)
class StableConfig(Config):
    """Up over `warmup` steps, level, then down over the last `decay` share of the run: warmup, stable, decay."""

    warmup: int = 20
    decay: float = 0.4
    floor: float = 0.0

    def check(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"Stable.decay is {self.decay}, but must be a share from 0 to 1")

    def factor(self, step: int, steps: int) -> float:
        decay = round(self.decay * steps)
        warmup = min(self.warmup, steps - decay)
        if decay == 0:  # level to the end, as also where a run is too short to come down
            return min(1.0, step / max(warmup, 1))
        return schedules.warmup_stable_decay(step, steps=steps, warmup=warmup, decay=decay, floor=self.floor)


@dataclass(frozen=True, kw_only=True)
class NoamConfig(Config):
    """Up over `warmup` steps, then down as 1/√step (Vaswani et al. 2017, equation 3), its peak scaled to 1."""

    warmup: int = 4000

    def check(self) -> None:
        self.require_positive("warmup")

    def factor(self, step: int, steps: int) -> float:
        return schedules.noam(step, 1, self.warmup) * self.warmup**0.5


ScheduleConfig = CosineConfig | StableConfig | NoamConfig


@dataclass(frozen=True, kw_only=True)
class NextTokenConfig(Config):
    """Text: every token is to be foretold from those before it."""

    tokenizer: TokenizerConfig = BytePairConfig()
    context: int = 128
    apart: bool = True  # documents do not read each other

    def check(self) -> None:
        self.require_positive("context")


@dataclass(frozen=True, kw_only=True)
class MaskedTokensConfig(Config):
    """Text: a `share` of the tokens is to be told from all the others (Devlin et al. 2019, 3.1).

    Of these, 8 in 10 are hidden by the mask token, 1 in 10 is replaced by a random one, 1 in 10 stays as it is.
    """

    tokenizer: TokenizerConfig = BytePairConfig()
    context: int = 128
    apart: bool = True
    share: float = 0.15

    def check(self) -> None:
        self.require_positive("context", "share")
        self.require_share("share")


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(Config):
    """Pictures: the class of each is to be told. A folder for each class, or scikit-learn's handwritten digits."""

    shift: int = 0  # pixels by which a training picture may be moved, either way
    flip: bool = False  # half of the training pictures are mirrored

    def check(self) -> None:
        if self.shift < 0:
            raise ConfigError(f"Images.shift is {self.shift}, but must not be negative")


@dataclass(frozen=True, kw_only=True)
class PairsConfig(Config):
    """Pairs of texts: the second is to be written from the first. The recipe's `batch` counts tokens, padding and all,
    of the longer side."""

    tokenizer: TokenizerConfig = BytePairConfig(vocabulary=8000, space=True)  # one for both sides
    length: int = 128  # tokens of either side; pairs that are longer are left out
    judged: int = 2000  # held-out pairs, at most, that are translated at an evaluation

    def check(self) -> None:
        self.require_positive("length", "judged")


TaskConfig = NextTokenConfig | MaskedTokensConfig | ImagesConfig | PairsConfig


Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    """Everything that decides a run but the data: the same recipe, data and seed give the same weights."""

    model: SequenceModelConfig | EncoderDecoderConfig  # its vocabulary or classes become those of the data
    task: TaskConfig = NextTokenConfig()
    start: str | None = None  # a checkpoint whose weights are trained further; None: fresh weights
    adapter: LoRAConfig | None = None  # None: every weight learns
    optimizer: OptimizerConfig = MuonConfig()
    schedule: ScheduleConfig = StableConfig()
    batch: int = 32
    steps: int = 1000
    accumulate: int = 1  # a batch is read in this many parts
    clip: float | None = 1.0  # the largest norm that the gradient may have
    label_smoothing: float = 0.0
    precision: Precision = "float32"  # bfloat16: matrix products only; weights and sums stay in float32
    zero_out: bool = False  # what is added to the residual stream starts at zero, as does the head
    validation: float = 0.1
    evaluate_every: int = 250
    evaluate_targets: int = 65536  # of the validation part, at most about so many
    save_every: int = 250
    average: int = 1  # the trained model is the mean of the last so many checkpoints
    patience: int | None = None  # evaluations without a better one after which the run ends; None: it never gives up
    seed: int = 1337

    def check(self) -> None:
        self.require_positive("batch", "steps", "accumulate", "clip")
        self.require_positive("evaluate_every", "evaluate_targets", "save_every", "average", "patience")
        self.require_share("label_smoothing", "validation")
        if self.batch % self.accumulate:
            raise ConfigError(f"Recipe.batch={self.batch} is not a multiple of accumulate={self.accumulate}")
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"Recipe.seed is {self.seed}, but must be a number of 64 bits")
        if self.adapter is not None and self.start is None:
            raise ConfigError("Recipe.adapter needs a checkpoint to adapt: say which in start (--from)")
