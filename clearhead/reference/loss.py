"""Cross-entropy: the loss of language models and classifiers.

    loss = −log p[target],   p = softmax(logits)

The loss is 0 if the model gives the target probability 1, and ln V for a uniform guess among V tokens. exp(loss) is
the perplexity: how many equally likely tokens would be as hard to guess.

Why this loss. Maximising the probability of a text is minimising the sum of −log p over its tokens, because logarithms
turn the product of probabilities into a sum. The same number is the length, in nats, of the text compressed with the
model's probabilities; divided by ln 2 and by the bytes of the text, it is bits per byte, which can be compared
between models with different tokenizers.

    p of the target    1      0.5     0.1     0.01    1/50,257 (guessing with GPT-2's vocabulary)
    loss               0      0.69    2.30    4.61    10.82

What an optimum looks like. If the next token is truly random with distribution p, the loss of a model that predicts q
is H(p) + KL(p‖q): the entropy of the text plus a penalty that is 0 only for q = p. So the loss of a language model does
not go to 0: Shannon (1951) estimated 0.6 to 1.3 bits per character for English. A training loss far below the
validation loss means that the model has memorised.

Reading a loss in nats per token, with GPT-2's vocabulary:

    loss      perplexity = e^loss      bits per token = loss/ln 2
    10.82     50,257                   15.6          guessing evenly: a fresh model
    6.91      1,000                    10.0
    4.61      100                      6.6
    3.12      22.6                     4.5           GPT-2 with 124M parameters on OpenWebText (nanoGPT's README)
    2.30      10                       3.3

Comparing losses between models needs the same tokens. A tokenizer with longer tokens has fewer of them and a larger
loss for each, so use bits per byte there.

A fresh model should start near ln V. A much larger first loss means that its logits are too large; a much smaller one
means that it can see the answer.

By hand, V = 3 and the logits (2, 1, 0). The exponentials are (7.39, 2.72, 1), their sum 11.11, so p = (0.665, 0.245,
0.090):

    target 0     loss −ln 0.665 = 0.41     gradient p − y = (−0.335, 0.245, 0.090)       a small correction
    target 2     loss −ln 0.090 = 2.41     gradient p − y = (0.665, 0.245, −0.910)       a large one

Mistakes that run without an error:

    softmax before this function      it is applied twice; the loss cannot fall below ln(1 + (V − 1)/e)
    targets not shifted by one        the model learns to copy its input, and the loss goes to 0
    padding not ignored               predicting padding is easy, so the loss looks better than it is
    a mean of means                   batches of 10 and 90 tokens with losses 2 and 4: (2 + 4)/2 = 3, but per token 3.8

The last one matters in gradient accumulation and on several devices: sum the losses, then divide by all counted tokens.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.reference.checks import check_gradient, check_ids
from clearhead.reference.softmax import narrow, softmax, widen

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: Float[np.ndarray, "... V"],
    targets: Int[np.ndarray, "..."],
    *,
    weight: Float[np.ndarray, "V"] | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Float[np.ndarray, "..."]:
    """−Σ_V w ∘ y · log softmax(logits) over the targets that are not ignored.

    Shapes: logits (…, V) and targets (…), one class for each row. A language model shifts its text by one: the targets
    of tokens[:, :-1] are tokens[:, 1:].

    y is one-hot at the target. With label smoothing ε it is (1 − ε)·one-hot + ε/V, which keeps logits from growing
    without bound (Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7). `weight` gives each class a
    weight w, as for unbalanced classes. `reduction`: "mean" divides by the number of counted targets, or by the sum of
    their weights, and is 0 if all are ignored; "sum" adds up; "none" returns one loss per target, 0 where ignored.

    A smoothed loss has a floor: with V = 4 and ε = 0.1, y = (0.925, 0.025, 0.025, 0.025), and its entropy, 0.349, is
    the best that any model can reach. So compare smoothed losses only with losses of the same ε.

    >>> print(cross_entropy(np.zeros((1, 4)), np.array([2])).round(3))      # log 4: four equally likely classes
    1.386

    Ignored targets: padding, the prompt in fine-tuning on answers, and unmasked tokens in BERT's training. They must
    not count in the divisor either, or short texts would weigh less.

    >>> logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    >>> print(cross_entropy(logits, np.array([0, -100]), ignore_index=-100).round(4))      # −log 0.5
    0.6931
    """
    check_targets(logits, targets, label_smoothing, ignore_index, weight, reduction)
    wide, counted, aim = _counted_rows(logits, targets, ignore_index)
    # log softmax without computing softmax first: log of a probability that underflowed to 0 would be −∞.
    top = wide.max(-1, keepdims=True, initial=-np.inf)
    log_p = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    # A row's loss is −(1 − ε)·w_c·log p_c − ε·mean(w ∘ log p): the part of the target c, then the part of all classes.
    w = _class_weights(weight, logits.shape[-1], wide.dtype)
    loss = -(1 - label_smoothing) * w[aim] * np.take_along_axis(log_p, aim[:, None], -1)[:, 0]
    if label_smoothing > 0:  # not 0 · Σ: a logit of −∞ off the target would make that NaN
        loss = loss - label_smoothing * (w * log_p).mean(-1)
    if reduction == "none":
        whole = np.zeros(targets.size, wide.dtype)
        whole[counted] = loss
        return whole.reshape(targets.shape)
    divisor = _divisor(w[aim]) if reduction == "mean" else 1
    return np.asarray(loss.sum() / divisor, wide.dtype)


def cross_entropy_backward(
    d_out: Any,
    logits: Float[np.ndarray, "... V"],
    targets: Int[np.ndarray, "..."],
    *,
    weight: Float[np.ndarray, "V"] | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Float[np.ndarray, "... V"]:
    """d_logits = d_out · (softmax(logits) − y) / count, and zero where the target is ignored.

    Derivation, for one row with logits z and target c: loss = −z_c + log Σ_j exp(z_j). The derivative of the first term
    is −1 at c and 0 elsewhere; that of the second is exp(z_i)/Σ exp(z_j) = p_i. Together p_i − y_i.

    This is the predicted distribution minus the target distribution. With class weights w, y becomes
    w ∘ y and softmax is multiplied by Σ w ∘ y, the derivative of −Σ w ∘ y · log softmax.

    The gradient's numbers are between −1 and 1 before the division, however wrong the model is. This is one reason why
    cross-entropy trains well: a confident mistake gives a strong gradient, and a right answer almost none.

    >>> cross_entropy_backward(1.0, np.zeros((1, 4)), np.array([2]))
    array([[ 0.25,  0.25, -0.75,  0.25]])
    """
    check_targets(logits, targets, label_smoothing, ignore_index, weight, reduction)
    check_gradient(d_out, *(targets.shape if reduction == "none" else ()))
    wide, counted, aim = _counted_rows(logits, targets, ignore_index)
    w = _class_weights(weight, logits.shape[-1], wide.dtype)
    # Build w ∘ y: every class gets its share of the smoothing, and the target gets the rest.
    aimed = np.tile(w * label_smoothing / logits.shape[-1], (len(aim), 1))  # w ∘ y
    aimed[np.arange(len(aim)), aim] += (1 - label_smoothing) * w[aim]
    difference = softmax(wide) * aimed.sum(-1, keepdims=True) - aimed
    per_row = np.asarray(d_out).reshape(-1)[counted, None] if reduction == "none" else d_out
    divisor = _divisor(w[aim]) if reduction == "mean" else 1
    d_logits = np.zeros((targets.size, logits.shape[-1]), wide.dtype)
    d_logits[counted] = per_row * difference / divisor
    return narrow(d_logits.reshape(logits.shape), logits)


def _counted_rows(
    logits: Float[np.ndarray, "... V"], targets: Int[np.ndarray, "..."], ignore_index: int | None
) -> tuple[Float[np.ndarray, "counted V"], Bool[np.ndarray, "rows"], Int[np.ndarray, "counted"]]:
    """The logits of targets that are not ignored, a boolean mask of these rows, and their targets.

    Ignored rows are removed first, so a NaN in a padded position cannot reach the sum: 0 · NaN is NaN.
    """
    flat = targets.reshape(-1)
    counted = np.full(flat.shape, True) if ignore_index is None else flat != ignore_index
    return widen(logits.reshape(-1, logits.shape[-1])[counted]), counted, flat[counted]


def _class_weights(weight: np.ndarray | None, classes: int, dtype: Any) -> Float[np.ndarray, "V"]:
    """The weight of each class; 1 by default.

    With weights n_total/(classes · n_class) every class has the same share in the loss, however rare it is.
    """
    return np.ones(classes, dtype) if weight is None else weight.astype(dtype)


def _divisor(weights: Float[np.ndarray, "counted"]) -> Any:
    """What a mean divides by: the sum of the counted targets' weights, or 1 if no target counts.

    A batch of padding alone then has the loss 0 and the gradient 0, and not 0/0.
    """
    return weights.sum() if weights.size else 1


def check_targets(
    logits: Any,
    targets: Any,
    label_smoothing: float,
    ignore_index: int | None,
    weight: Any = None,
    reduction: str = "mean",
) -> None:
    """Raise ValueError if the arguments do not fit together. Used by the NumPy and the PyTorch engine.

    A target outside the vocabulary is the usual sign of a tokenizer that does not belong to the model. Indexing would
    read another row, or crash a GPU kernel with an assertion that names no line.
    """
    check_ids(targets, "target")
    classes = logits.shape[-1]
    if tuple(logits.shape[:-1]) != tuple(targets.shape):
        raise ValueError(
            f"logits {tuple(logits.shape)} need targets {tuple(logits.shape[:-1])}, one class for each row, "
            f"not {tuple(targets.shape)}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, but must be a share between 0 and 1")
    if reduction not in REDUCTIONS:
        raise ValueError(f'reduction is {reduction!r}, but must be "mean", "sum" or "none"')
    if weight is not None and tuple(weight.shape) != (classes,):
        raise ValueError(f"weight is {tuple(weight.shape)}, but must have one number for each of {classes} classes")
    outside = (targets < 0) | (targets >= classes)
    if ignore_index is not None:
        outside = outside & (targets != ignore_index)
    if outside.any():
        raise ValueError(f"target {int(targets[outside][0])} is not one of {classes} classes, 0 to {classes - 1}")
