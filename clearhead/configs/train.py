"""A whole training run as data: model, task, optimizer, schedule and sizes. Saved as `recipe.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clearhead import schedules

from .base import Config, ConfigError
from .data import BytePairConfig, TokenizerConfig
from .lora import LoRAConfig
from .models import EncoderDecoderConfig, SequenceModelConfig


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(Config):
    """AdamW (Loshchilov & Hutter 2019). Parameters with one dimension are not decayed.

    >>> clearhead.recipe("lm").with_value("optimizer", AdamWConfig(lr=0.002)).optimizer.lr
    0.002
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    embedding_lr: float | None = None  # None: lr
    head_lr: float | None = None  # None: lr

    def check(self) -> None:
        self.require_positive("lr", "eps", "embedding_lr", "head_lr")
        self.require_share("beta1", "beta2")


@dataclass(frozen=True, kw_only=True)
class MuonConfig(Config):
    """Muon (Jordan et al. 2024) for the matrices of blocks; AdamW (`rest`) for embeddings, head, norms and biases.

    >>> MuonConfig(lr=0.01, rest=AdamWConfig(lr=0.003)).rest.lr
    0.003
    """

    lr: float = 0.02
    momentum: float = 0.95
    iterations: int = 5  # Newton–Schulz iterations, at most 5
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
    """Linear warmup over `warmup` steps, then a cosine down to `floor` times the peak.

    >>> [round(CosineConfig(warmup=2).factor(step, 10), 2) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.55, 0.1]
    """

    warmup: int = 100
    floor: float = 0.1

    def factor(self, step: int, steps: int) -> float:
        return schedules.cosine(step, steps=steps, warmup=min(self.warmup, steps - 1), floor=self.floor)


@dataclass(frozen=True, kw_only=True)
class StableConfig(Config):
    """Warmup–stable–decay: linear warmup, constant, then linear decay over the last `decay` share of the run.

    >>> [round(StableConfig(warmup=2).factor(step, 10), 2) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.0]
    """

    warmup: int = 20
    decay: float = 0.4
    floor: float = 0.0

    def check(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"Stable.decay is {self.decay}, but must be a share from 0 to 1")

    def factor(self, step: int, steps: int) -> float:
        decay = round(self.decay * steps)
        warmup = min(self.warmup, steps - decay)
        if decay == 0:  # constant to the end, also if the run is too short to decay
            return min(1.0, step / max(warmup, 1))
        return schedules.warmup_stable_decay(step, steps=steps, warmup=warmup, decay=decay, floor=self.floor)


@dataclass(frozen=True, kw_only=True)
class NoamConfig(Config):
    """Linear warmup, then 1/√step (Vaswani et al. 2017, equation 3), scaled to a peak of 1.

    >>> [round(NoamConfig(warmup=4).factor(step, 10), 2) for step in (1, 4, 9)]
    [0.25, 1.0, 0.67]
    """

    warmup: int = 4000

    def check(self) -> None:
        self.require_positive("warmup")

    def factor(self, step: int, steps: int) -> float:
        return schedules.noam(step, 1, self.warmup) * self.warmup**0.5


ScheduleConfig = CosineConfig | StableConfig | NoamConfig


@dataclass(frozen=True, kw_only=True)
class NextTokenConfig(Config):
    """Text: predict every token from the tokens before it."""

    tokenizer: TokenizerConfig = BytePairConfig()
    context: int = 128  # tokens in a row
    apart: bool = True  # tokens do not attend to other documents

    def check(self) -> None:
        self.require_positive("context")


@dataclass(frozen=True, kw_only=True)
class MaskedTokensConfig(Config):
    """Text: predict a `share` of the tokens from all the others (Devlin et al. 2019, 3.1).

    Of these, 80 % become the mask token, 10 % a random token, and 10 % stay unchanged.
    """

    tokenizer: TokenizerConfig = BytePairConfig()
    context: int = 128
    apart: bool = True  # tokens do not attend to other documents
    share: float = 0.15

    def check(self) -> None:
        self.require_positive("context", "share")
        self.require_share("share")


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(Config):
    """Images: predict the class of each. Data: a folder for each class, or scikit-learn's handwritten digits."""

    shift: int = 0  # shift training images randomly by up to this many pixels
    flip: bool = False  # mirror half of the training images

    def check(self) -> None:
        if self.shift < 0:
            raise ConfigError(f"Images.shift is {self.shift}, but must be at least 0")


@dataclass(frozen=True, kw_only=True)
class PairsConfig(Config):
    """Pairs of texts: write the second from the first. The recipe's `batch` counts tokens of the longer side, padding
    included."""

    tokenizer: TokenizerConfig = BytePairConfig(vocabulary=8000, space=True)  # one for both sides
    length: int = 128  # tokens of either side; longer pairs are skipped
    judged: int = 2000  # held-out pairs to translate at an evaluation, at most

    def check(self) -> None:
        self.require_positive("length", "judged")


TaskConfig = NextTokenConfig | MaskedTokensConfig | ImagesConfig | PairsConfig


Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    """Everything about a run except its data. The same recipe, data and seed give the same weights.

    >>> config = clearhead.recipe("lm").with_values({"steps": 500, "task.context": 64})
    >>> config.steps, config.batch, config.task.context
    (500, 16, 64)
    """

    __repr__ = Config.__str__

    model: SequenceModelConfig | EncoderDecoderConfig  # its vocabulary or classes are set from the data
    task: TaskConfig = NextTokenConfig()
    start: str | None = None  # a checkpoint to start from; None: fresh weights
    adapter: LoRAConfig | None = None  # None: train every weight
    optimizer: OptimizerConfig = MuonConfig()
    schedule: ScheduleConfig = StableConfig()
    batch: int = 32
    steps: int = 1000
    accumulate: int = 1  # split each batch into this many parts, to save memory
    clip: float | None = 1.0  # largest norm of the gradient; None: no limit
    label_smoothing: float = 0.0
    precision: Precision = "float32"  # of matrix products; weights and sums stay in float32
    zero_out: bool = False  # residual branches and the head start at zero
    validation: float = 0.1  # share of the data to hold out
    evaluate_every: int = 250
    evaluate_targets: int = 65536  # held-out targets to score at an evaluation, at most about this many
    save_every: int = 250
    average: int = 1  # the trained model is the mean of this many last checkpoints
    patience: int | None = None  # end after this many evaluations without improvement; None: never
    seed: int = 1337
    extended_at: int | None = None  # step at which a run was given more steps and its rate rises again

    def check(self) -> None:
        self.require_positive("batch", "steps", "accumulate", "clip")
        self.require_positive("evaluate_every", "evaluate_targets", "save_every", "average", "patience")
        self.require_share("label_smoothing", "validation")
        if self.batch % self.accumulate:
            raise ConfigError(f"Recipe.batch={self.batch} is not a multiple of accumulate={self.accumulate}")
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"Recipe.seed is {self.seed}, but must fit in 64 bits")
        if self.adapter is not None and self.start is None:
            raise ConfigError("Recipe.adapter needs a checkpoint to adapt; name it in start (--from)")

    def rate_factor(self, step: int) -> float:
        """The learning rate of a step as a share of its peak.

        After `extended_at`, the rate rises again over the schedule's warmup instead of jumping.
        """
        factor = self.schedule.factor(step, self.steps)
        if self.extended_at is None or step <= self.extended_at:
            return factor
        return factor * min(1.0, (step - self.extended_at) / max(self.schedule.warmup, 1))
