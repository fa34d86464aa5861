"""Linear attention: scores that factor, so that sums over keys are made once and not for every query.

    softmax attention   out_i = Σ_j exp(q_i·k_j) v_j / Σ_j exp(q_i·k_j)              O(n²)
    linear attention    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)
                              = φ(q_i)·S / φ(q_i)·z      S = Σ_j φ(k_j) v_jᵀ,   z = Σ_j φ(k_j)          O(n)

S and z do not depend on the query, because the sum over j can be moved inside. In a causal model they grow token by
token, S_t = S_{t−1} + φ(k_t) v_tᵀ: linear attention is a recurrent network whose state is a matrix. The feature map φ
decides what the scores are: elu(x) + 1 (cheap), or random features that estimate exp(q·k) itself (Performer). Later
models drop the denominator z and let the state forget (gated) or overwrite (delta rule). Here every weight is written
out as the definition has it; the PyTorch engine uses the sums.

Where the O(n²) goes. For T queries and S keys, softmax attention needs T·S scores of W multiplications, and the same
again for the values. If the score is a plain dot product of features, Σ_j (φ(q)·φ(k_j)) v_j = φ(q)·(Σ_j φ(k_j) v_jᵀ):
the bracket is a W × U matrix that is computed once, and each query then costs W·U. For n = 32,768 and W = U = 64, that
is 512 times fewer multiplications.

What is lost. Softmax can give one key nearly all of the weight, because exp makes large scores much larger. elu(x) + 1
grows linearly, so the weights are flatter, and a state of W·U numbers can hold about W key–value pairs before they
interfere. The variants below answer that in different ways:

    φ = elu(x) + 1      cheap; weights are positive and flat
    Performer           φ estimates exp(q·k); better the more random features there are
    gated               S is multiplied by a gate before each write: old pairs fade
    delta rule          a write first removes what is stored under the same key

By hand, K = U = 1, features φ = identity on positive numbers, keys (1, 2), values (10, 20) and a query of 1:

    all pairs     (1·1·10 + 1·2·20)/(1·1 + 1·2) = 50/3 = 16.7
    with sums     S = 1·10 + 2·20 = 50,   z = 1 + 2 = 3,   1·S/(1·z) = 50/3

The second form has forgotten which key belonged to which value. That is all the saving and all the loss: a new query of
1 gets the same answer at once, and no query can ever read value 10 alone.

How much fits into the state. S = Σ k_j v_jᵀ returns Sᵀk_i = v_i |k_i|² + Σ_{j≠i} (k_i·k_j) v_j. With orthogonal keys of
length 1 the second term vanishes, so K pairs are stored exactly. With more than K pairs, keys overlap and every lookup
carries noise. Softmax attention has no such limit, because it keeps all pairs.

                      state           write a pair          read
    softmax           grows           append                O(n·K)
    linear            K·U, fixed      S += k vᵀ             O(K·U)
    gated             K·U, fixed      S = gate ∘ S + k vᵀ   O(K·U)
    delta rule        K·U, fixed      S += β k (v − Sᵀk)ᵀ   O(K·U), and a lookup before each write

The chunked form, derived. Split the text into chunks of c tokens. For a query in chunk n,

    Σ_{j ≤ t} (q·k_j) v_j = q·S_n + Σ_{j in chunk n, j ≤ t} (q·k_j) v_j        S_n: the sum over all earlier chunks

The first part is one product with a K × U matrix, the second is ordinary attention inside c tokens. The cost is
T·(K·U + c·(K + U)) instead of T²·(K + U), and a GPU sees matrix products of size c and not a loop over tokens.

A text in numbers: T = 32,768 tokens, K = U = 64 and chunks of c = 64. All pairs take T²·(K + U) = 137 billion
multiplications for each head; chunks take T·(4,096 + 8,192) = 0.4 billion, 341 times fewer.

The delta rule by hand, K = 2, U = 1, beta = 1 and keys k₁ = (1, 0), k₂ = (0.6, 0.8), both of length 1:

    write 10 under k₁      S = (10, 0)          read k₁: 10        read k₂: 6, because the keys overlap
    write 20 under k₂      error 20 − 6 = 14    S = (10 + 8.4, 11.2) = (18.4, 11.2)
    read                   k₂: 0.6·18.4 + 0.8·11.2 = 20            k₁: 18.4, no longer 10

The last write is always exact, and older ones are disturbed by as much as their keys overlap. A plain sum would give
k₂: 26 and k₁: 22, both wrong.

Mistakes that run without an error:

    features that may be negative      the denominator passes through 0, and single outputs explode
    sums in half precision             after some thousand tokens a new pair is too small to change S
    a gate after the write             the newest pair fades before it is read once
    padding not zeroed                 φ(0) = 1 for elu(x) + 1, so every padded key counts

Three forms of one computation: all pairs (this file), one step per token (decoding), and chunks with pairs inside a
chunk and a state between chunks (training). They agree up to rounding, which the tests check.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from clearhead.configs import DotConfig, EluConfig, FavorConfig, LinearAttentionConfig
from clearhead.reference.attention import merge_heads, split_heads, sum_to
from clearhead.reference.checks import check_gradient
from clearhead.reference.linear import linear
from clearhead.reference.positions import causal_mask
from clearhead.reference.run import Context, runs
from clearhead.reference.softmax import softmax

# --- Feature maps ----------------------------------------------------------------------------------------------------


def elu_features(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """φ(x) = elu(x) + 1: x + 1 above zero, eˣ below. Always positive, so that weights are.

    Katharopoulos et al. (2020), "Transformers are RNNs", equation 7.
    Why not ReLU: a feature that is exactly 0 for all keys gives a denominator of 0, and it gets no gradient to leave 0.

    >>> elu_features(np.array([-1.0, 0.0, 2.0])).round(3)
    array([0.368, 1.   , 3.   ])
    """
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def elu_features_backward(d_out: Float[np.ndarray, "..."], x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """d_out above zero, d_out · eˣ below.

    The slope is 1 on the right and falls to 0 on the left without a jump: exp(min(x, 0)) is both at once.

    >>> elu_features_backward(np.ones(3), np.array([-1.0, 0.0, 2.0])).round(3)
    array([0.368, 1.   , 1.   ])
    """
    check_gradient(d_out, *x.shape)
    return d_out * np.exp(np.minimum(x, 0))


def positive_features(
    x: Float[np.ndarray, "... K"], directions: Float[np.ndarray, "W K"]
) -> Float[np.ndarray, "... W"]:
    """φ(x) = exp(ω·x − |x|²/2)/√W for each of W directions ω.

    Over ω ~ N(0, I), E[φ(q)·φ(k)] = E[exp(ω·(q + k))]·exp(−(|q|² + |k|²)/2) = exp(q·k): an unbiased estimate of the
    softmax's exponential, whose error falls with W. All features are positive, so the estimate is stable where the
    true weight is near 0. Choromanski et al. (2021), "Rethinking Attention with Performers", lemma 1.

    With many features the estimate is close:

    >>> q, k = np.array([0.3, -0.2]), np.array([0.5, 0.4])
    >>> directions = random_directions(20_000, 2, seed=0)
    >>> estimate = positive_features(q, directions) @ positive_features(k, directions)
    >>> bool(abs(estimate - np.exp(q @ k)) < 0.02)
    True
    """
    exponent = x @ directions.T - 0.5 * (x * x).sum(-1, keepdims=True)
    return np.exp(exponent) / math.sqrt(len(directions))


def positive_features_backward(
    d_out: Float[np.ndarray, "... W"], x: Float[np.ndarray, "... K"], directions: Float[np.ndarray, "W K"]
) -> tuple[Float[np.ndarray, "... K"], Float[np.ndarray, "W K"]]:
    """With g = d_out ∘ φ(x), the gradient of the exponent: d_x = Σ_ω g·ω − x·Σ_ω g, d_ω = Σ g·x.

    From exponent = ω·x − |x|²/2: its derivative by x is ω − x, and by ω it is x. An exponential's derivative is itself,
    which is why φ(x) appears in g. The directions are not learned by default; their gradient is here so that they could
    be, and for the tests.

    >>> d_x, d_directions = positive_features_backward(np.ones((5, 4)), np.ones((5, 3)), np.eye(4, 3))
    >>> d_x.shape, d_directions.shape
    ((5, 3), (4, 3))
    """
    check_gradient(d_out, *x.shape[:-1], len(directions))
    g = d_out * positive_features(x, directions)
    flat, rows = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    return g @ directions - x * g.sum(-1, keepdims=True), flat.T @ rows


def random_directions(features: int, width: int, seed: int) -> Float[np.ndarray, "W K"]:
    """W directions, each normally distributed, orthogonal to each other in sets of K.

    A random rotation gives K orthogonal directions; their lengths are drawn separately, as those of normal vectors.
    Orthogonal directions repeat each other less, so the estimate has less variance than with independent ones
    (Choromanski et al. 2021, theorem 2).
    """
    rng = np.random.default_rng(seed)
    sets = []
    for _ in range(-(-features // width)):
        rotation, triangle = np.linalg.qr(rng.standard_normal((width, width)))
        sets.append(rotation * np.sign(np.diag(triangle)))  # without the signs, some rotations are more likely
    lengths = np.linalg.norm(rng.standard_normal((features, width)), axis=1, keepdims=True)
    return np.concatenate(sets)[:features] * lengths


# --- Linear attention ------------------------------------------------------------------------------------------------


def linear_attention(
    q: Float[np.ndarray, "... T W"],
    k: Float[np.ndarray, "... S W"],
    v: Float[np.ndarray, "... S U"],
    causal: bool = False,
) -> Float[np.ndarray, "... T U"]:
    """Σ_j (q·k_j) v_j / Σ_j q·k_j, where q and k are features already, and positive.

    causal: over the keys up to the query's own position; the last query reads the last key.
    Shapes: q … T W, k … S W, v … S U, out … T U. W is the number of features, which need not be the head's width K.

    With φ(q)·φ(k) equal for all keys the result is their mean:

    >>> linear_attention(np.ones((1, 2)), np.ones((3, 2)), np.array([[1.0], [2.0], [6.0]]))
    array([[3.]])
    """
    check_linear_attention(q, k, v)
    weights = _products(q, k, causal)
    total = weights.sum(-1, keepdims=True)
    return weights @ v / np.where(total == 0, 1, total)  # a query without keys gets zeros


def linear_attention_backward(
    d_out: Float[np.ndarray, "... T U"],
    q: Float[np.ndarray, "... T W"],
    k: Float[np.ndarray, "... S W"],
    v: Float[np.ndarray, "... S U"],
    causal: bool = False,
) -> tuple[Float[np.ndarray, "... T W"], Float[np.ndarray, "... S W"], Float[np.ndarray, "... S U"]]:
    """d_q, d_k, d_v. With a = q kᵀ the weights and p = a/Σa their shares, and by the quotient rule:

    d_v = pᵀ d_out       d_a = (d_out vᵀ − Σ_S d_out vᵀ ∘ p)/Σa       d_q = d_a k       d_k = d_aᵀ q

    A common factor of all weights of a row cancels in the shares, so d_a has no part along a: Σ_S d_a ∘ a = 0.

    It is the softmax's backward without the exponential: there d_scores = p ∘ (d_p − Σ d_p ∘ p), because the derivative
    of exp brings the factor a. A key with weight 0 still gets a gradient here, so it can be found again.

    >>> q, k, v = np.random.default_rng(0).random((3, 5, 8))
    >>> d_q, d_k, d_v = linear_attention_backward(np.ones((5, 8)), q, k, v, causal=True)
    >>> float(d_v.sum(0).round(6)[0])  # every row of weights sums to 1
    5.0
    """
    check_linear_attention(q, k, v)
    weights = _products(q, k, causal)
    check_gradient(d_out, *weights.shape[:-1], v.shape[-1])
    total = weights.sum(-1, keepdims=True)
    total = np.where(total == 0, 1, total)
    shares = weights / total
    d_shares = d_out @ v.swapaxes(-1, -2)
    d_weights = (d_shares - (d_shares * shares).sum(-1, keepdims=True)) / total
    if causal:
        d_weights = d_weights * causal_mask(*weights.shape[-2:])
    d_q, d_k, d_v = d_weights @ k, d_weights.swapaxes(-1, -2) @ q, shares.swapaxes(-1, -2) @ d_out
    return sum_to(d_q, q), sum_to(d_k, k), sum_to(d_v, v)


def _products(
    q: Float[np.ndarray, "... T W"], k: Float[np.ndarray, "... S W"], causal: bool
) -> Float[np.ndarray, "... T S"]:
    """q kᵀ, and 0 where a key is in the query's future.

    >>> _products(np.ones((2, 1)), np.ones((2, 1)), causal=True)
    array([[1., 0.],
           [1., 1.]])
    """
    weights = q @ k.swapaxes(-1, -2)
    return weights * causal_mask(*weights.shape[-2:]) if causal else weights


def check_linear_attention(q: Any, k: Any, v: Any) -> None:
    """Raise one clear sentence for shapes that do not fit, in either engine.

    q and k must have the same number of features W. Keys and values come in pairs, so both have S rows.
    """
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"linear attention takes q (…, T, W), k (…, S, W) and v (…, S, U), not q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )


# --- Linear attention that forgets -----------------------------------------------------------------------------------


def gated_linear_attention(
    q: Float[np.ndarray, "... T K"],
    k: Float[np.ndarray, "... T K"],
    v: Float[np.ndarray, "... T U"],
    gate: Float[np.ndarray, "... T K"],
) -> Float[np.ndarray, "... T U"]:
    """out_t = S_tᵀ q_t with S_t = gate_t ∘ S_{t−1} + k_t v_tᵀ, starting from S = 0.

    S (K × U) is a memory that maps keys to values; each row of it is multiplied by its gate, between 0 (forget) and 1
    (keep), before the new pair is added. gate = 1 is causal linear attention without the denominator; a constant gate
    per head is RetNet; gates computed from the input are GLA (Yang et al. 2024, "Gated Linear Attention Transformers",
    equation 3) and, one per head, Mamba-2.

    A gate of ½, and keys and queries of 1: the memory is a running sum that halves with every token.

    >>> ones = np.ones((3, 1))
    >>> gated_linear_attention(ones, ones, ones, 0.5 * ones)[:, 0]
    array([1.  , 1.5 , 1.75])
    """
    check_recurrent(q, k, v, gate=gate)
    return _read_states(q, _gated_states(k, v, gate))


def gated_linear_attention_backward(
    d_out: Float[np.ndarray, "... T U"],
    q: Float[np.ndarray, "... T K"],
    k: Float[np.ndarray, "... T K"],
    v: Float[np.ndarray, "... T U"],
    gate: Float[np.ndarray, "... T K"],
) -> tuple[
    Float[np.ndarray, "... T K"], Float[np.ndarray, "... T K"], Float[np.ndarray, "... T U"], Float[np.ndarray, "..."]
]:
    """d_q, d_k, d_v, d_gate, from the last token to the first: d_S_t = q_t d_out_tᵀ + gate_{t+1} ∘ d_S_{t+1}.

    The memory is read now, and what is left of it later. d_k = d_S v, d_v = d_Sᵀ k, d_gate = Σ_U d_S ∘ S_{t−1}.

    A gate is one number for each row of S, so its gradient is summed over U. Where a gate is 0 nothing flows further
    back: what was forgotten cannot be blamed.

    Cost: the loop keeps all T states of K·U numbers, as the forward pass does. Training code works in chunks, and keeps
    one state per chunk.

    >>> q, k, v = np.random.default_rng(0).random((3, 5, 8))
    >>> [d.shape for d in gated_linear_attention_backward(np.ones((5, 8)), q, k, v, np.full((5, 8), 0.9))]
    [(5, 8), (5, 8), (5, 8), (5, 8)]
    """
    check_recurrent(q, k, v, gate=gate)
    check_gradient(d_out, *v.shape)
    states = _gated_states(k, v, gate)
    before = _states_before(states)
    d_states = q[..., :, None] * d_out[..., None, :]  # … T K U
    for t in reversed(range(q.shape[-2] - 1)):
        d_states[..., t, :, :] += gate[..., t + 1, :, None] * d_states[..., t + 1, :, :]
    d_q = np.einsum("...tku,...tu->...tk", states, d_out)
    d_k = np.einsum("...tku,...tu->...tk", d_states, v)
    d_v = np.einsum("...tku,...tk->...tu", d_states, k)
    return d_q, d_k, d_v, (d_states * before).sum(-1)


def delta_linear_attention(
    q: Float[np.ndarray, "... T K"],
    k: Float[np.ndarray, "... T K"],
    v: Float[np.ndarray, "... T U"],
    beta: Float[np.ndarray, "... T"],
) -> Float[np.ndarray, "... T U"]:
    """out_t = S_tᵀ q_t with S_t = S_{t−1} + beta_t · k_t (v_t − S_{t−1}ᵀ k_t)ᵀ, starting from S = 0: the delta rule.

    The memory first looks up what it has stored under k_t, and then writes the difference to v_t, so a key that comes
    again is overwritten instead of added up. It is one step of gradient descent, with rate beta, on |Sᵀk − v|²/2.
    Keys should have length 1; then beta = 1 stores v exactly. Schlag et al. (2021), "Linear Transformers Are Secretly
    Fast Weight Programmers", equation 24; Yang et al. (2024), "Parallelizing Linear Transformers with the Delta Rule".

    The same key written twice: the second value replaces the first, where a sum would give 12.

    >>> one = np.ones((2, 1))
    >>> delta_linear_attention(one, one, np.array([[5.0], [7.0]]), np.ones(2))[:, 0]
    array([5., 7.])
    """
    check_recurrent(q, k, v, beta=beta)
    return _read_states(q, _delta_states(k, v, beta)[0])


def delta_linear_attention_backward(
    d_out: Float[np.ndarray, "... T U"],
    q: Float[np.ndarray, "... T K"],
    k: Float[np.ndarray, "... T K"],
    v: Float[np.ndarray, "... T U"],
    beta: Float[np.ndarray, "... T"],
) -> tuple[
    Float[np.ndarray, "... T K"], Float[np.ndarray, "... T K"], Float[np.ndarray, "... T U"], Float[np.ndarray, "... T"]
]:
    """d_q, d_k, d_v, d_beta, from the last token to the first.

    With e_t = v_t − S_{t−1}ᵀ k_t the error and D = d_S_t, what the memory after token t is owed:

        d_e = beta · Dᵀ k        d_v = d_e        d_beta = kᵀ D e        d_k = beta · D e − S_{t−1} d_e
        d_S_{t−1} = D − k d_eᵀ + q_{t−1} d_out_{t−1}ᵀ

    The middle term of the last line is the overwriting: with |k| = 1 and beta = 1, D − k(Dᵀk)ᵀ has nothing left along
    k. A later loss says nothing about what was stored under k before this token replaced it.

    >>> q, k, v = np.random.default_rng(0).random((3, 5, 8))
    >>> [d.shape for d in delta_linear_attention_backward(np.ones((5, 8)), q, k, v, np.full(5, 0.5))]
    [(5, 8), (5, 8), (5, 8), (5,)]
    """
    check_recurrent(q, k, v, beta=beta)
    check_gradient(d_out, *v.shape)
    states, errors = _delta_states(k, v, beta)
    before = _states_before(states)
    d_k, d_v, d_beta = np.zeros_like(k), np.zeros_like(v), np.zeros_like(beta)
    d_state = np.zeros_like(states[..., 0, :, :]) if states.shape[-3] else None
    for t in reversed(range(q.shape[-2])):
        key, error, rate = k[..., t, :, None], errors[..., t, None, :], beta[..., t, None, None]
        d_state = d_state + q[..., t, :, None] * d_out[..., t, None, :]  # K U
        d_error = rate * (d_state * key).sum(-2, keepdims=True)  # 1 U
        d_v[..., t, :] = d_error[..., 0, :]
        d_beta[..., t] = (d_state * key * error).sum((-2, -1))
        d_k[..., t, :] = (rate * d_state * error - before[..., t, :, :] * d_error).sum(-1)
        d_state = d_state - key * d_error
    return np.einsum("...tku,...tu->...tk", states, d_out), d_k, d_v, d_beta


def _gated_states(k: np.ndarray, v: np.ndarray, gate: np.ndarray) -> Float[np.ndarray, "... T K U"]:
    """S after every token: S ← gate ∘ S + k vᵀ.

    Unrolled, S_t = Σ_{j≤t} (gate_{j+1} ∘ … ∘ gate_t) ∘ k_j v_jᵀ: each pair has faded by all gates since it was written.
    """
    states = k[..., :, None] * v[..., None, :]
    for t in range(1, k.shape[-2]):
        states[..., t, :, :] += gate[..., t, :, None] * states[..., t - 1, :, :]
    return states


def _delta_states(k: np.ndarray, v: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, Float[np.ndarray, "... T U"]]:
    """S after every token, and the error v − Sᵀk of every token: S ← S + beta · k errorᵀ.

    With |k| = 1 and beta = 1: Sᵀk after the write is Sᵀk + (v − Sᵀk) = v, whatever was stored before. With beta < 1 it
    moves a part of the way, which averages values that are written under similar keys.
    """
    states = np.zeros((*k.shape, v.shape[-1]), np.result_type(k, v))
    errors = np.zeros_like(v)
    state = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]), states.dtype)
    for t in range(k.shape[-2]):
        errors[..., t, :] = v[..., t, :] - (state * k[..., t, :, None]).sum(-2)
        state = state + beta[..., t, None, None] * k[..., t, :, None] * errors[..., t, None, :]
        states[..., t, :, :] = state
    return states, errors


def _read_states(q: np.ndarray, states: Float[np.ndarray, "... T K U"]) -> Float[np.ndarray, "... T U"]:
    """Sᵀ q of every token: each reads the memory as it is after its own pair was written.

    So a token can read itself, as the diagonal of a causal mask allows. Shapes: (K U)ᵀ (K) = U for each token.
    """
    return np.einsum("...tku,...tk->...tu", states, q)


def _states_before(states: Float[np.ndarray, "... T K U"]) -> Float[np.ndarray, "... T K U"]:
    """S before every token: one place later, with zeros in front.

    The memory that token t corrects or gates is the one that token t − 1 left.
    """
    return np.concatenate((np.zeros_like(states[..., :1, :, :]), states[..., :-1, :, :]), -3)


def check_recurrent(q: Any, k: Any, v: Any, **more: Any) -> None:
    """Raise one clear sentence for shapes that do not fit, in either engine: a recurrence has no cross-attention."""
    lead = tuple(k.shape[:-1])
    shapes = {"q": (q, tuple(k.shape)), "v": (v, (*lead, v.shape[-1] if v.ndim else 0))}
    shapes |= {name: (x, tuple(k.shape) if name == "gate" else lead) for name, x in more.items()}
    for name, (x, wanted) in shapes.items():
        if tuple(x.shape) != wanted:
            raise ValueError(f"{name} is {tuple(x.shape)}, but with k {tuple(k.shape)} it must be {wanted}")


# --- The layer of a model --------------------------------------------------------------------------------------------


@runs(LinearAttentionConfig)
def linear_attention_part(
    config: LinearAttentionConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """x -> q, k, v -> features -> the weight φ(q)·φ(k_j) of every pair -> mixed values -> out.

    The layer is attention with another weight: projections, heads, masks and the output matrix are the same, so a
    trained softmax model can be converted by replacing this step and training a little.

    Here all pairs are computed and the state appends keys and values, because that is the definition. The PyTorch
    engine decodes with S and z alone. That the two agree, token by token, is one of the invariants.
    """
    K, U = config.widths(x.shape[-1])
    rows = config.heads * K
    qkv = context.tap("qkv", linear(x, context["qkv.weight"], context.get("qkv.bias")))
    q = context.tap("query", split_heads(qkv[..., :rows], K))
    k = context.tap("key", split_heads(qkv[..., rows : 2 * rows], K))
    v = context.tap("value", split_heads(qkv[..., 2 * rows :], U))
    q = context.tap("query_features", features(config.kernel, q))
    k = context.tap("key_features", features(config.kernel, k))
    k, v = context.append("key", k, 2), context.append("value", v, 2)
    readers = context.readable[:, context.readable.shape[1] - x.shape[1] :]
    allowed = context.attention_mask(config.mask) & readers[:, None, :, None]  # padding reads nothing
    weights = context.tap("weights", pair_weights(config.kernel, q, k, allowed))
    mixed = context.tap("mixed", weights @ v)
    return context.tap("out", linear(merge_heads(mixed, context), context["out.weight"], context.get("out.bias")))


def features(
    kernel: EluConfig | FavorConfig | DotConfig, x: Float[np.ndarray, "B H T K"]
) -> Float[np.ndarray, "B H T W"]:
    """φ(x) of the kernel; of the Performer's, its logarithm.

    The features exp(ω·x − |x|²/2) of a long vector leave the range of floats, so they are kept as exponents. The
    softmax of attention is of q·k/√K, so q and k are divided by √√K each. The constant 1/√W cancels in the shares.

    Why the logarithm: for |x| = 10, exp(−|x|²/2) is 2·10⁻²², and in float16 it is 0. As an exponent it is −50.
    """
    if isinstance(kernel, EluConfig):
        return elu_features(x)
    if isinstance(kernel, DotConfig):
        return x
    x = x * x.shape[-1] ** -0.25
    directions = random_directions(kernel.features, x.shape[-1], kernel.seed).astype(x.dtype)
    return x @ directions.T - 0.5 * (x * x).sum(-1, keepdims=True)


def pair_weights(
    kernel: EluConfig | FavorConfig | DotConfig,
    q: Float[np.ndarray, "B H T W"],
    k: Float[np.ndarray, "B H S W"],
    allowed: Bool[np.ndarray, "B 1 T S"],
) -> Float[np.ndarray, "B H T S"]:
    """φ(q)·φ(k) of every allowed pair, as shares of their sum; the dot kernel's as they are.

    The Performer's shares are softmax_j(log Σ_w exp(log φ_w(q) + log φ_w(k_j))). The inner sum is stabilised by the
    largest exponent of each pair, the outer one by the softmax, so no query loses all its keys however long q and k
    are.

    The dot kernel has no denominator: weights may be negative and need not sum to 1, so layers that use it normalise
    their output instead (RetNet, GLA).
    """
    if isinstance(kernel, FavorConfig):
        return softmax(np.where(allowed, log_products(q, k), -np.inf))
    weights = q @ k.swapaxes(-1, -2) * allowed
    if isinstance(kernel, DotConfig):
        return weights
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def log_products(q: Float[np.ndarray, "B H T W"], k: Float[np.ndarray, "B H S W"]) -> Float[np.ndarray, "B H T S"]:
    """log Σ_w exp(q_w + k_w) of every pair, one key at a time, so that only T × W sums exist at once.

    The largest exponent of each pair is taken out before exp, as in the softmax: log Σ exp(e) = top + log Σ exp(e −
    top).

    >>> log_products(np.full((1, 1, 1, 2), 1000.0), np.zeros((1, 1, 1, 2))).round(4)[0, 0]      # 1000 + log 2
    array([[1000.6931]])
    """
    out = np.empty((*q.shape[:-1], k.shape[-2]), q.dtype)
    for j in range(k.shape[-2]):
        exponents = q + k[..., j, None, :]
        top = exponents.max(-1, keepdims=True)
        out[..., j] = (top + np.log(np.exp(exponents - top).sum(-1, keepdims=True)))[..., 0]
    return out
