"""A small GPT, trained in NumPy alone: every forward and every backward is a function of `clearhead.reference`.

    python examples/numpy_lm.py

It learns the Zen of Python by heart, letter by letter, in a few seconds.

    tokens ─ embedding ─┬─ norm ─ attention ─(+)─┬─ norm ─ feed-forward ─(+)─ … ─ norm ─ embeddingᵀ ─ logits
                        └────────────────────┘   └───────────────────────┘
"""

import codecs
import contextlib
import io

import numpy as np

import clearhead.reference as ref

Weights = dict[str, np.ndarray]


def initial_weights(vocabulary: int, dim: int, hidden: int, layers: int, rng: np.random.Generator) -> Weights:
    """Normal, standard deviation 0.02; what writes into the stream is smaller by √(2 · layers), as in GPT-2."""
    weights = {"embedding": rng.normal(0, 0.02, (vocabulary, dim))}
    into_stream = 0.02 / np.sqrt(2 * layers)
    for layer in range(layers):
        weights |= {
            f"{layer}.attention_norm.weight": np.ones(dim),
            f"{layer}.attention_norm.bias": np.zeros(dim),
            f"{layer}.query": rng.normal(0, 0.02, (dim, dim)),
            f"{layer}.key": rng.normal(0, 0.02, (dim, dim)),
            f"{layer}.value": rng.normal(0, 0.02, (dim, dim)),
            f"{layer}.out": rng.normal(0, into_stream, (dim, dim)),
            f"{layer}.ffn_norm.weight": np.ones(dim),
            f"{layer}.ffn_norm.bias": np.zeros(dim),
            f"{layer}.up": rng.normal(0, 0.02, (hidden, dim)),
            f"{layer}.down": rng.normal(0, into_stream, (dim, hidden)),
            f"{layer}.up_bias": np.zeros(hidden),
            f"{layer}.down_bias": np.zeros(dim),
        }
    return weights | {"norm.weight": np.ones(dim), "norm.bias": np.zeros(dim)}


def split_heads(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:-1], heads, -1).swapaxes(-2, -3)  # B T D -> B H T K


def merge_heads(x: np.ndarray) -> np.ndarray:
    x = x.swapaxes(-2, -3)
    return x.reshape(*x.shape[:-2], -1)  # B H T K -> B T D


def attention_branch(x: np.ndarray, w: Weights, heads: int) -> tuple[np.ndarray, tuple]:
    """What attention adds to the stream, and what its backward will need."""
    normed = ref.layer_norm(x, w["attention_norm.weight"], w["attention_norm.bias"])
    q, k, v = (split_heads(ref.linear(normed, w[name]), heads) for name in ("query", "key", "value"))
    at = np.arange(x.shape[-2])
    turned_q, turned_k = ref.rotate(q, at), ref.rotate(k, at)
    mixed = merge_heads(ref.attention(turned_q, turned_k, v, causal=True))
    return ref.linear(mixed, w["out"]), (x, normed, q, k, v, turned_q, turned_k, mixed)


def attention_branch_backward(d_out: np.ndarray, w: Weights, heads: int, saved: tuple) -> tuple[np.ndarray, Weights]:
    """The same steps, last first."""
    x, normed, q, k, v, turned_q, turned_k, mixed = saved
    d = {}
    d_mixed, d["out"], _ = ref.linear_backward(d_out, mixed, w["out"])
    d_q, d_k, d_v, _ = ref.attention_backward(split_heads(d_mixed, heads), turned_q, turned_k, v, causal=True)
    at = np.arange(x.shape[-2])
    d_q, d_k = ref.rotate_backward(d_q, q, at), ref.rotate_backward(d_k, k, at)
    d_normed = np.zeros_like(normed)
    for name, d_head in (("query", d_q), ("key", d_k), ("value", d_v)):
        d_read, d[name], _ = ref.linear_backward(merge_heads(d_head), normed, w[name])
        d_normed += d_read  # read three times, so three gradients meet here
    norm = w["attention_norm.weight"], w["attention_norm.bias"]
    d_x, d["attention_norm.weight"], d["attention_norm.bias"] = ref.layer_norm_backward(d_normed, x, *norm)
    return d_x, d


FFN = ("up", "down", "up_bias", "down_bias")


def ffn_branch(x: np.ndarray, w: Weights) -> tuple[np.ndarray, tuple]:
    normed = ref.layer_norm(x, w["ffn_norm.weight"], w["ffn_norm.bias"])
    return ref.feed_forward(normed, *(w[name] for name in FFN), activation="gelu_tanh"), (x, normed)


def ffn_branch_backward(d_out: np.ndarray, w: Weights, saved: tuple) -> tuple[np.ndarray, Weights]:
    x, normed = saved
    inside = ref.feed_forward_backward(d_out, normed, *(w[name] for name in FFN), activation="gelu_tanh")
    d_normed, d = inside[0], dict(zip(FFN, inside[1:], strict=True))
    norm = w["ffn_norm.weight"], w["ffn_norm.bias"]
    d_x, d["ffn_norm.weight"], d["ffn_norm.bias"] = ref.layer_norm_backward(d_normed, x, *norm)
    return d_x, d


def layers_of(weights: Weights) -> list[Weights]:
    """The weights of each layer, under their names within it."""
    count = 1 + max(int(name.split(".")[0]) for name in weights if name[0].isdigit())
    start = [f"{layer}." for layer in range(count)]
    return [{name.removeprefix(s): w for name, w in weights.items() if name.startswith(s)} for s in start]


def forward(weights: Weights, tokens: np.ndarray, heads: int) -> tuple[np.ndarray, list]:
    """Logits B T V. The embedding is also the last matrix (Press & Wolf 2017)."""
    x = ref.embedding(tokens, weights["embedding"])
    saved: list = []
    for w in layers_of(weights):
        branch, for_attention = attention_branch(x, w, heads)
        x = x + branch
        branch, for_ffn = ffn_branch(x, w)
        x = x + branch
        saved.append((for_attention, for_ffn))
    normed = ref.layer_norm(x, weights["norm.weight"], weights["norm.bias"])
    return ref.linear(normed, weights["embedding"]), [*saved, (x, normed)]


def loss_and_gradients(
    weights: Weights, tokens: np.ndarray, targets: np.ndarray, heads: int
) -> tuple[np.ndarray, Weights]:
    logits, (*saved, (x, normed)) = forward(weights, tokens, heads)
    d_logits = ref.cross_entropy_backward(1.0, logits, targets)
    d: Weights = {}
    d_normed, d["embedding"], _ = ref.linear_backward(d_logits, normed, weights["embedding"])
    norm = weights["norm.weight"], weights["norm.bias"]
    d_x, d["norm.weight"], d["norm.bias"] = ref.layer_norm_backward(d_normed, x, *norm)
    for layer, w in reversed(list(enumerate(layers_of(weights)))):
        for_attention, for_ffn = saved[layer]
        d_branch, d_ffn = ffn_branch_backward(d_x, w, for_ffn)
        d_x = d_x + d_branch  # the gradient flows along the stream and through the branch
        d_branch, d_attention = attention_branch_backward(d_x, w, heads, for_attention)
        d_x = d_x + d_branch
        d |= {f"{layer}.{name}": gradient for name, gradient in (d_ffn | d_attention).items()}
    d["embedding"] = d["embedding"] + ref.embedding_backward(d_x, tokens, weights["embedding"])
    return ref.cross_entropy(logits, targets), d


class Adam:
    """Kingma & Ba (2015), algorithm 1: a step against the mean gradient, measured in its own standard deviations."""

    def __init__(self, weights: Weights, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-8) -> None:
        self.mean = {name: np.zeros_like(w) for name, w in weights.items()}
        self.square = {name: np.zeros_like(w) for name, w in weights.items()}
        self.betas, self.eps = betas, eps

    def step(self, weights: Weights, gradients: Weights, step: int, rate: float) -> None:
        first, second = self.betas
        for name, g in gradients.items():
            self.mean[name] += (1 - first) * (g - self.mean[name])
            self.square[name] += (1 - second) * (g * g - self.square[name])
            mean = self.mean[name] / (1 - first**step)  # both start at zero; this takes the start out again
            square = self.square[name] / (1 - second**step)
            weights[name] -= rate * mean / (np.sqrt(square) + self.eps)


def zen() -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


def continuation(weights: Weights, prompt: np.ndarray, count: int, heads: int, length: int) -> np.ndarray:
    """The likeliest next letter, `count` times."""
    tokens = prompt
    for _ in range(count):
        logits, _ = forward(weights, tokens[None, -length:], heads)
        tokens = np.append(tokens, logits[0, -1].argmax())
    return tokens


def main(steps: int = 300, seed: int = 0) -> list[float]:
    heads, length, batch = 4, 64, 8
    text = zen()
    letters = sorted(set(text))
    data = np.array([letters.index(letter) for letter in text])
    rng = np.random.default_rng(seed)
    weights = initial_weights(len(letters), dim=64, hidden=256, layers=2, rng=rng)
    weights = {name: w.astype(np.float32) for name, w in weights.items()}
    optimizer = Adam(weights)
    print(f"{len(text)} letters, {len(letters)} of them distinct; {sum(w.size for w in weights.values()):,} weights")
    losses = []
    for step in range(1, steps + 1):
        at = rng.integers(0, len(data) - length, batch)[:, None] + np.arange(length)
        loss, gradients = loss_and_gradients(weights, data[at], data[at + 1], heads)
        rate = ref.cosine(step, steps=steps + 1, warmup=min(20, steps), peak=5e-3)
        optimizer.step(weights, gradients, step, rate)
        losses.append(float(loss))
        if step == 1 or step % 50 == 0:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    prompt = data[text.index("Beautiful") :][:9]
    print("".join(letters[token] for token in continuation(weights, prompt, 120, heads, length)))
    return losses


if __name__ == "__main__":
    main()
