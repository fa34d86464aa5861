"""Every diagnostic by its key: its severity, and the page that explains it.

wrong      the numbers differ from the definition
fragile    right on ordinary inputs; fails on empty rows, in float16, at odd sizes …
unchecked  the code could not be checked; no verdict on it
note       worth knowing, but not a mistake
"""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    severity: str
    page: str


SOFTMAX = "docs/learn/attention.md#softmax"
SCALED = "docs/learn/attention.md#scaled-dot-product-attention"
SCALE = "docs/learn/attention.md#why-1d_k"
MASK = "docs/learn/attention.md#masks-true-means-may-attend"
CAUSAL = "docs/learn/attention.md#causal"
HEADS = "docs/learn/attention.md#many-heads"
CROSS = "docs/learn/attention.md#cross-attention"
GROUPS = "docs/learn/attention.md#grouped-queries"
MIXERS = "docs/learn/mixers.md"
PADDING = "docs/learn/masks.md#padding-and-documents"
SINES = "docs/learn/positions.md#sinusoidal"
LEARNED = "docs/learn/positions.md#learned"
ROPE = "docs/learn/positions.md#rotary-rope"
NONE = "docs/learn/positions.md#none"
NORMS = "docs/learn/blocks.md#norms"
PLACES = "docs/learn/blocks.md#where-the-norm-stands"
FFN = "docs/learn/blocks.md#feed-forward-layers"
DROPOUT = "docs/learn/blocks.md#dropout"
MODELS = "docs/reference/models.md#building-one"
CACHE = "docs/use/decoding.md#pieces-equal-one-pass"
GRADIENT = "docs/learn/numpy_training.md#checking-a-gradient"
COST = "docs/understand/cost.md#one-block-by-hand"
CHECKER = "docs/learn/checker.md"

BY_PAGE: dict[tuple[str, str], str] = {
    (
        "wrong",
        SOFTMAX,
    ): "softmax-unstable softmax-global-max softmax-axis softmax-everything not-normalised log-softmax "
    "sigmoid normalised-by-sum softmax-negative divided-by-max divided-by-exp-max axis-ignored "
    "keepdims-missing shape-limited softmax-queries "
    "softmax-heads softmax-batch softmax-all no-softmax softmax-twice",
    ("wrong", SCALE): "no-scale scale-dv scale-dmodel scale-heads scale-no-root scale-multiplied scale-constant "
    "scale-twice scale-after-softmax scale-length",
    ("wrong", SCALED): "mixes-keys weights-transposed queries-only keys-only scores-from-values value weights-returned "
    "wrong-in-batch wrong-shape value-at-extremes",
    ("fragile", SCALED): "value-width odd-sizes needs-contiguous half-fails half-differs dtype-changed",
    (
        "wrong",
        MASK,
    ): "mask-ignored mask-inverted mask-inverted-beside mask-after-softmax mask-inverted-after mask-to-zero "
    "mask-to-one mask-to-minus-one mask-added-as-number mask-subtracted-as-number mask-positive mask-additive-sign "
    "mask-value mask-raises mask-partly-read",
    ("fragile", MASK): "fill-too-small empty-row-nan empty-row-raises half-mask",
    ("note", MASK): "empty-row-mean nan-leaks",
    ("wrong", CAUSAL): "causal-transposed causal-inverted causal-strict causal-one-ahead causal-missing causal-value "
    "causal-allows-all causal-hides-all future-leak",
    ("wrong", PADDING): "padding-masks-queries padding-off-by-one padding-value",
    (
        "wrong",
        HEADS,
    ): "split-no-transpose merge-no-transpose split-and-merge-no-transpose attends-over-heads heads-summed "
    "heads-averaged out-unused out-transposed one-head four-as-three attends-over-batch batch-mixed positions-mixed "
    "values-from-queries values-from-keys",
    ("wrong", CROSS): "cross-length cross-value memory-ignored",
    ("fragile", GROUPS): "groups-interleaved",
    ("wrong", SINES): "pe-off-by-one pe-exponent pe-swapped pe-only-sine pe-only-cosine pe-base pe-degrees pe-scaled "
    "pe-replaces pe-not-added pe-trained",
    ("wrong", LEARNED): "pe-same-everywhere pe-over-batch",
    ("fragile", LEARNED): "pe-too-short",
    (
        "wrong",
        ROPE,
    ): "rope-on-values rope-on-queries-only rope-on-keys-only rope-off-by-one rope-exponent rope-base "
    "rope-mixed-layout rope-no-minus rope-not-turned rope-only-cosine rope-wrong-axis rope-changes-length "
    "rope-positions-ignored rope-cat-for-stack",
    ("fragile", ROPE): "rope-direction",
    ("wrong", NORMS): "eps-outside unbiased unbiased-eps-outside unbiased-no-eps no-root gamma-unused beta-unused "
    "gamma-beta-unused gamma-beta-missing gamma-added gamma-after-beta not-centred is-rms not-divided "
    "norm-over-positions norm-over-batch norm-over-everything norm-over-both norm-as-batch-norm rms-sum rms-centred "
    "rms-by-deviation rms-of-mean rms-multiplied norm-start",
    ("fragile", NORMS): "no-eps",
    ("wrong", PLACES): "residual-missing residual-from-normed residual-doubled residual-from-start norm-missing "
    "norm-of-input norm-twice norm-mixed norm-shared self-inputs-differ order-swapped block-value residual-inside",
    ("note", PLACES): "norm-on-branch",
    ("fragile", PLACES): "final-norm-missing",
    (
        "wrong",
        FFN,
    ): "ffn-no-activation ffn-activation-last ffn-activation-both ffn-activation-first ffn-softmax ffn-sigmoid "
    "ffn-mixes-positions bias-unused glu-sigmoid glu-both glu-after glu-sum glu-no-activation glu-gate-unused "
    "glu-gate-missing glu-activation",
    ("wrong", DROPOUT): "dropout-in-eval dropout-scale dropout-on-residual not-deterministic",
    ("wrong", MODELS): "unregistered layers-shared weight-unused no-attention encoder-one-way loss-value loss-summed "
    "prefix-changes final-norm-early",
    ("fragile", MODELS): "length-fails",
    ("fragile", NONE): "no-positions",
    ("wrong", CACHE): "cache-differs",
    ("wrong", GRADIENT): "gradient-cut gradient-fails gradient-wrong",
    ("wrong", COST): "flops-multiply-add flops-no-scores flops-no-out flops-no-ffn",
    ("wrong", CHECKER): "inputs-changed raises heat-map-transposed no-return undefined-name",
    ("note", f"{CHECKER}#what-it-looks-for"): "device device-changed",
    ("unchecked", CHECKER): "not-written nothing-found",
    (
        "unchecked",
        f"{CHECKER}#not-checked",
    ): "cannot-call cannot-construct cannot-run not-understood beyond-definition needs-module "
    "needs-line not-defined timeout crash memory ended-process",
}
# pages for keys that apply to any part
BY_PART = {
    "softmax": SOFTMAX,
    "attention": SCALED,
    "causal_mask": CAUSAL,
    "padding_mask": PADDING,
    "multi_head": HEADS,
    "mixer": MIXERS,
    "sinusoidal": SINES,
    "position_likeness": SINES,
    "learned": LEARNED,
    "rotary": ROPE,
    "layer_norm": NORMS,
    "rms_norm": NORMS,
    "feed_forward": FFN,
    "swiglu": FFN,
    "encoder_block": PLACES,
    "decoder_block": PLACES,
    "flops": COST,
    "encoder": MODELS,
    "lm": MODELS,
}
ANY_PART = ("value", "wrong-shape", "raises", "value-at-extremes", "odd-sizes")
MISTAKES = {key: Mistake(severity, page) for (severity, page), keys in BY_PAGE.items() for key in keys.split()}
