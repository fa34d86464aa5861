"""Whole models in NumPy, from the same config and the same named weights as the PyTorch engine.

Every part is a function `(config, x, context) -> x` in the file named like its config. The context says where in the
model the part is: its weights, the positions of queries and keys, and where intermediate values are recorded.

    logits = run(config, weights, tokens)                  weights: name -> array, as `config.weights()` lists them
    record = {}; run(config, weights, tokens, record=record)      record["stack.blocks.0.mixer.weights"]: B H T S

How a model runs, top down. `run` makes a `Context` and calls `sequence_model` or `encoder_decoder`. Those call
`context.run(name, config, x)` for each child, which looks up the function of the child's config and passes a context
whose path is one name longer. A part never knows where it is in the model, only its own weights' names:

    run                              path ""
      embedding                      embedding                      reads embedding.tokens.weight
      stack                          stack
        block 0                      stack.blocks.0
          mixer                      stack.blocks.0.mixer           reads stack.blocks.0.mixer.qkv.weight
          ffn                        stack.blocks.0.ffn
      head                           head

The same names are the PyTorch engine's `state_dict`, the rows of `clearhead trace`, and the keys of `record`. So a
value can be compared between the engines by its name, and a checkpoint works in both.

Training and decoding are the same code. In training the T tokens of a row are all new, and the keys are those T tokens.
In decoding one token is new, and the keys are the cache:

    call                                     new tokens T     keys S     positions
    run(…, tokens[:, :7])                    7                7          0 … 6
    run(…, tokens[:, :7], state=state)       7                7          0 … 6      the prefill
    run(…, tokens[:, 7:8], state=state)      1                8          7          one step
    run(…, tokens[:, 8:10], state=state)     2                10         8, 9       several at once, as in speculation

Every mask is a function of positions, so none of these is a special case.

Two kinds of rows that are not plain text. Padding fills short rows of a batch: `readable` is False there, nobody reads
it, and it has no position. Packing puts several short texts into one row to waste nothing: `documents` numbers them,
and a token reads its own number only.

    row              The cat sat · · | A dog
    readable          ▪   ▪   ▪  . .   ▪  ▪
    documents         0   0   0  0 0   1  1

Nothing is kept on a part. Positions, masks and the KV cache travel in the context; the caller owns the `DecodeState`.
Two requests can run with the same weights at the same time.

Where two implementations part. Run both with a record of their values, and compare name by name in the order in which
the names were recorded. The first name that differs is the step that is wrong: all earlier ones agree, and all later
ones inherit the error. Comparing logits alone says that something is wrong, and not where.

    embedding.tokens                     equal
    stack.blocks.0.mixer.query           equal
    stack.blocks.0.mixer.query_rotated   differs by 0.8      so: the rotation, not the projection
    …                                    differs

Why NumPy at all. Every operation is one that can be checked by hand, and the whole engine fits into a reader's head: no
autograd, no devices, no kernels. It is slow; that is the price of a definition that shares no code with what it checks.

A part of your own takes three steps: a config, a function `(config, x, context) -> x` under `@runs(YourConfig)`, and
weights by name. It may then stand wherever its kind may stand, and `run`, `record` and decoding work without a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.configs import (
    BorrowedEmbeddingConfig,
    Config,
    DistanceVectorsConfig,
    EncoderDecoderConfig,
    Mask,
    ModelConfig,
    RelativeBiasConfig,
    SequenceModelConfig,
)
from clearhead.configs.masks import check_causal

PARTS: dict[type[Config], Callable[..., np.ndarray]] = {}
"""The function of each kind of config, filled in by `runs`."""


def runs(config: type[Config]) -> Callable[[Callable[..., np.ndarray]], Callable[..., np.ndarray]]:
    """Function decorator: register this function as what that config computes.

        @runs(LSTMConfig)
        def lstm_part(config, x, context): …

    The function's file is named like the config's, so `part` can import it when a model first needs it.
    """

    def register(part: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        PARTS[config] = part
        return part

    return register


@dataclass
class DecodeState:
    """What decoding remembers between calls of `run`: every layer's KV cache or recurrent state.

    Pass the same state again, and the new tokens continue those before:

        state = DecodeState()
        for token in tokens.T:
            logits = run(config, weights, token[:, None], state=state)

    Attention layers append keys and values, so the state grows with the text. Recurrent layers overwrite a state of
    fixed size. Either way the result equals that of one pass over the whole text, which the tests check piece by piece.

    >>> config, rng = clearhead.preset("tiny-gpt"), np.random.default_rng(0)
    >>> weights = {name: rng.standard_normal(shape) * 0.02 for name, shape in config.weights().items()}
    >>> state = DecodeState()
    >>> _ = run(config, weights, np.array([[1, 2, 3]]), state=state)
    >>> run(config, weights, np.array([[4]]), state=state).shape  # one more token
    (1, 1, 101)
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)  # by path, such as stack.blocks.0.mixer.key
    positions: Int[np.ndarray, "B S"] | None = None  # of all tokens so far
    readable: Bool[np.ndarray, "B S"] | None = None  # False where one was padding

    def append(self, name: str, new: np.ndarray, axis: int) -> np.ndarray:
        """Append to the cache of this name, and return all of it, oldest first.

        A copy of the whole cache for each token is O(n²) in all. A serving engine allocates pages beforehand; here the
        plain form is easier to read.
        Keys have the shape B G S K and are joined along axis 2. Position and padding of each key are kept once for the
        whole model, not in every layer.
        """
        self.values[name] = np.concatenate((self.values[name], new), axis) if name in self.values else new
        return self.values[name]


@dataclass(frozen=True)
class Context:
    """What a part knows besides x: its weights, who may read whom, and where to record values.

    `context["qkv.weight"]` is the part's own weight of that name, wherever in the model the part is.

        positions       where the T new tokens stand in their text; the queries
        key_positions   where the S keys stand: the same, the cache in decoding, or the source in cross-attention
        readable        False at padding, which nobody may read
        documents       several texts may share a row; a token reads its own text only

    Masks are functions of positions, so all of this is decided in one place: `attention_mask`.

    It is frozen. A part that needs another context for a child makes a copy with `replace`, so a change can never leak
    into a sibling that runs later.
    """

    weights: Mapping[str, np.ndarray]
    positions: Int[np.ndarray, "B T"]  # of the queries
    key_positions: Int[np.ndarray, "B S"]
    readable: Bool[np.ndarray, "B S"]  # False where a key is padding
    documents: Int[np.ndarray, "B T"] | None = None  # only tokens of the same document read each other
    key_documents: Int[np.ndarray, "B S"] | None = None  # None: the same as the queries'
    score_bias: tuple[RelativeBiasConfig, np.ndarray] | None = None  # and its table, added to every self-attention
    distances: tuple[DistanceVectorsConfig, np.ndarray] | None = None  # and their table, for disentangled attention
    source: Float[np.ndarray, "B S D"] | None = None  # what cross-attention reads
    cross: Context | None = None  # the context in which it reads
    state: DecodeState | None = None
    record: dict[str, np.ndarray] | None = None
    path: str = ""  # of this part, such as stack.blocks.0.mixer

    def path_of(self, name: str) -> str:
        """The full name of one of this part's weights or values: `mixer` + `qkv.weight` -> `mixer.qkv.weight`."""
        return ".".join(part for part in (self.path, name) if part)

    def at(self, name: str) -> Context:
        """The context of the child `name`: the same batch, one level deeper in the model.

        The cross-attention's context moves along, so that a decoder block finds its weights by the same path.
        """
        path = self.path_of(name)
        return replace(self, path=path, cross=None if self.cross is None else replace(self.cross, path=path))

    def __getitem__(self, name: str) -> np.ndarray:
        """This part's weight of that name."""
        return self.weights[self.path_of(name)]

    def get(self, name: str) -> np.ndarray | None:
        """This part's weight of that name, or None: a bias that the part may not have."""
        return self.weights.get(self.path_of(name))

    def tap(self, name: str, value: np.ndarray) -> np.ndarray:
        """Record an intermediate value under the name that `trace` and the PyTorch taps use, and return it.

        The NumPy engine only records. The PyTorch engine can also replace a value at the same name, as ablation and
        patching do.
        """
        if self.record is not None:
            self.record[self.path_of(name)] = value
        return value

    def append(self, name: str, new: np.ndarray, axis: int) -> np.ndarray:
        """Append to this layer's KV cache and return all of it; without a state, return `new`."""
        return new if self.state is None else self.state.append(self.path_of(name), new, axis)

    def load_state(self, name: str, start: np.ndarray) -> np.ndarray:
        """The recurrent state that the last call saved under this name, or `start` at the beginning of a text.

        A recurrence overwrites its state, so decoding cannot go back: undoing a token needs a copy from before it.
        """
        return start if self.state is None else self.state.values.get(self.path_of(name), start)

    def save_state(self, name: str, value: np.ndarray) -> None:
        """Save a recurrent state for the next call; without a state there is no next call, and nothing is saved."""
        if self.state is not None:
            self.state.values[self.path_of(name)] = value

    def sequences(self) -> Iterator[tuple[int, Int[np.ndarray, "W"]]]:
        """The sequences a recurrence runs through: (row, places of one document's real tokens in it).

        A recurrence must not carry its state from one document into the next, and must skip padding. So it runs along
        each document of each row separately. With a state, a row is one document that continues.

        Two rows, the first with padding in front, the second with two documents:

        >>> readable = np.array([[False, True, True], [True, True, True]])
        >>> documents = np.array([[0, 0, 0], [0, 0, 1]])
        >>> at = np.zeros((2, 3), int)
        >>> [(row, places.tolist()) for row, places in Context({}, at, at, readable, documents).sequences()]
        [(0, [1, 2]), (1, [0, 1]), (1, [2])]
        """
        batch, length = self.positions.shape
        documents = np.zeros((batch, length), int) if self.documents is None else self.documents
        readable = self.readable[:, self.readable.shape[1] - length :]
        for row in range(batch):
            for document in np.unique(documents[row][readable[row]]):
                yield row, np.flatnonzero(readable[row] & (documents[row] == document))

    def run(self, name: str, config: Config | None, x: np.ndarray, **more: Any) -> np.ndarray:
        """Run the child `name`. An absent child (config None) is the identity."""
        return x if config is None else part(config)(config, x, self.at(name), **more)

    def attention_mask(self, mask: Mask) -> Bool[np.ndarray, "B 1 T S"]:
        """True where query t may read key s: the mask allows it, s is no padding, and both are of one document.

        A mask is called with positions and not with indices, because the two differ in decoding (one query, many keys),
        with padding on the left, and in packed documents.

        Shapes: positions B T become B 1 T 1, key positions B S become B 1 1 S, and their comparison B 1 T S. The 1 is
        the axis of heads: all heads of a layer share a mask.
        """
        allowed = mask(self.positions[:, None, :, None], self.key_positions[:, None, None, :])
        allowed = allowed & self.readable[:, None, None, :]
        if self.documents is not None:
            keys = self.documents if self.key_documents is None else self.key_documents
            allowed = allowed & (self.documents[:, None, :, None] == keys[:, None, None, :])
        return allowed


def part(config: Config) -> Callable[..., np.ndarray]:
    """The function that computes what `config` describes. Its file is imported on first use.

    `clearhead.configs.lstm.LSTMConfig` is computed by `clearhead/reference/lstm.py`: the last word of the config's
    module is the name of the file. A part that is defined elsewhere registers itself when it is imported.
    """
    if type(config) not in PARTS:
        import_module(f"clearhead.reference.{type(config).__module__.rpartition('.')[2]}")
    return PARTS[type(config)]


def run(
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    inputs: np.ndarray,
    target: Int[np.ndarray, "B T"] | None = None,
    *,
    segments: Int[np.ndarray, "B T"] | None = None,
    readable: Bool[np.ndarray, "B T"] | None = None,
    documents: Int[np.ndarray, "B T"] | None = None,
    positions: Int[np.ndarray, "B T"] | None = None,
    source_readable: Bool[np.ndarray, "B S"] | None = None,
    state: DecodeState | None = None,
    record: dict[str, np.ndarray] | None = None,
) -> np.ndarray:
    """The model's output for `inputs`: token ids, images, or the source of an encoder–decoder.

    weights          an array for every name in `config.weights()`
    target           of an encoder–decoder: the target tokens so far
    segments         of BERT: 0 for the first sentence, 1 for the second
    readable         False where a token is padding
    documents        a number for each token; tokens of different documents do not read each other
    positions        of the tokens (default: 0, 1, 2 …, counting real tokens only, after what `state` holds)
    source_readable  of an encoder–decoder: False where a source token is padding
    state            a `DecodeState`: the tokens continue those before
    record           a dict that is filled with every intermediate value, by the names that `trace` prints

    The weights of a PyTorch model are `{name: w.numpy() for name, w in model.state_dict().items()}`. With random
    weights, one pass over three tokens gives the same logits as three steps that continue a state:

    >>> import clearhead
    >>> config, rng = clearhead.preset("tiny-gpt"), np.random.default_rng(0)
    >>> weights = {name: 0.1 * rng.normal(size=shape) for name, shape in config.weights().items()}
    >>> tokens, state = np.array([[1, 2, 3]]), DecodeState()
    >>> whole = run(config, weights, tokens)                                       # 1 3 V
    >>> steps = [run(config, weights, tokens[:, t : t + 1], state=state) for t in range(3)]
    >>> bool(np.allclose(np.concatenate(steps, 1), whole))
    True

    Every intermediate value by its name:

    >>> record: dict[str, np.ndarray] = {}
    >>> _ = run(config, weights, tokens, record=record)
    >>> rows = record["stack.blocks.0.mixer.weights"].sum(-1)                      # B H T: attention weights sum to 1
    >>> bool(np.allclose(rows, 1))
    True
    """
    check_weights(config, weights)
    if state is not None:
        # A layer that reads later tokens would change old outputs with each new token, so no cache can be right.
        for block in (config.decoder if isinstance(config, EncoderDecoderConfig) else config.stack).blocks:
            check_causal(block.mixer.mask)
    if isinstance(config, EncoderDecoderConfig):
        if target is None:
            raise ValueError("an encoder–decoder takes a source and a target; the target is missing")
        return encoder_decoder(config, weights, inputs, target, source_readable, readable, positions, state, record)
    if target is not None:
        raise ValueError("a target was given, but this model has no decoder of its own")
    length = config.embedding.positions(inputs.shape[1])
    context = make_context(weights, len(inputs), length, readable, positions, state, record)
    context = replace(context, documents=documents)
    return sequence_model(config, inputs, segments, context)


def sequence_model(
    config: SequenceModelConfig, inputs: np.ndarray, segments: np.ndarray | None, context: Context
) -> np.ndarray:
    """embedding -> stack -> head.

    tokens B T -> x B T D -> x B T D -> logits B T V. GPT, LLaMA, BERT, ViT and Mamba are all this function; they differ
    in the parts that their configs name. A tied head gets the embedding's table.

    The embedding is recorded under its own name, and the stack and the head record their results themselves.
    """
    x = context.tap("embedding", context.run("embedding", config.embedding, inputs, segments=segments))
    x = context.run("stack", config.stack, x)
    return context.run("head", config.head, x, table=context.weights.get("embedding.tokens.weight"))


def encoder_decoder(
    config: EncoderDecoderConfig,
    weights: Mapping[str, np.ndarray],
    source: Int[np.ndarray, "B S"] | Float[np.ndarray, "B Mels Frames"],
    target: Int[np.ndarray, "B T"],
    source_readable: Bool[np.ndarray, "B S"] | None,
    readable: Bool[np.ndarray, "B T"] | None,
    positions: Int[np.ndarray, "B T"] | None,
    state: DecodeState | None,
    record: dict[str, np.ndarray] | None,
) -> np.ndarray:
    """source -> encoder; target -> decoder, which reads the encoder's output by cross-attention -> head.

    The encoder runs once per source and reads in both directions. The decoder is causal in the target, and its
    cross-attention may read the whole source. In decoding, the encoder's output is kept in the state under "memory".

    Shapes: source B S -> memory B S D; target B T -> x B T D -> logits B T V. The target begins with a start token, so
    that the logits at position t score target token t.

    Two contexts are made. The reader's positions are those of the source; the writer's are those of the target, and its
    `cross` has the target's queries and the source's keys, without a causal mask and without a cache of its own.
    """
    length = config.source.positions(source.shape[1])
    reader = make_context(weights, len(source), length, source_readable, None, None, record)
    if state is not None and "memory" in state.values:  # the source is encoded once
        memory = state.values["memory"]
    else:
        x = reader.tap("source", reader.run("source", config.source, source))
        memory = reader.run("encoder", config.encoder, x)
    if state is not None:
        state.values["memory"] = memory
    writer = make_context(weights, len(target), target.shape[1], readable, positions, state, record)
    cross = replace(
        writer, key_positions=reader.positions, readable=reader.readable, source=memory, state=None, cross=None
    )
    writer = replace(writer, cross=cross)
    # Without an embedding or a table of its own, the target uses the source's.
    if config.target is None:
        weights = rename_weights(weights, "source", "target")
    elif isinstance(config.target, BorrowedEmbeddingConfig):
        weights = rename_weights(weights, "source.tokens", "target.tokens")
    embedded = replace(writer, weights=weights)
    x = embedded.tap("target", embedded.run("target", config.target or config.source, target))
    x = writer.run("decoder", config.decoder, x)
    return writer.run("head", config.head, x, table=weights["target.tokens.weight"])


def rename_weights(weights: Mapping[str, np.ndarray], old: str, new: str) -> Mapping[str, np.ndarray]:
    """One part's weights under another part's name as well, for parts that share their weights.

    >>> sorted(rename_weights({"source.tokens.weight": np.zeros(1)}, "source", "target"))
    ['source.tokens.weight', 'target.tokens.weight']
    """
    shared = {new + name.removeprefix(old): w for name, w in weights.items() if name.startswith(f"{old}.")}
    return {**weights, **shared}


def make_context(
    weights: Mapping[str, np.ndarray],
    batch: int,
    length: int,
    readable: Bool[np.ndarray, "B T"] | None,
    positions: Int[np.ndarray, "B T"] | None,
    state: DecodeState | None,
    record: dict[str, np.ndarray] | None,
) -> Context:
    """The context of a whole model: the new tokens come after what the state holds, and padding is not counted.

    Positions count real tokens: a row padded on the left by three starts at position 0 after them. The state's
    positions and padding are extended here, once per call, before any layer reads them.

    >>> readable = np.array([[False, False, True, True], [True, True, True, True]])
    >>> make_context({}, 2, 4, readable, None, None, None).positions
    array([[0, 0, 0, 1],
           [0, 1, 2, 3]])
    """
    for name, given in {"readable": readable, "positions": positions}.items():
        if given is not None and given.shape != (batch, length):
            raise ValueError(f"{name} is {given.shape}, but there are {batch} rows of {length} tokens")
    if readable is not None and readable.dtype != bool:
        raise ValueError(f"readable is {readable.dtype}, but must be boolean, True where a token is real")
    readable = np.ones((batch, length), bool) if readable is None else readable
    if positions is None:
        # Count the real tokens up to each token, after those of the state; padding gets 0, which nobody reads.
        before = 0 if state is None or state.readable is None else state.readable.sum(1, keepdims=True)
        positions = np.where(readable, readable.cumsum(1) - 1 + before, 0)
    if state is None:
        return Context(weights, positions, positions, readable, record=record)
    if state.positions is not None and state.readable is not None:
        state.positions = np.concatenate((state.positions, positions), 1)
        state.readable = np.concatenate((state.readable, readable), 1)
    else:
        state.positions, state.readable = positions, readable
    return Context(weights, positions, state.positions, state.readable, state=state, record=record)


def check_weights(config: ModelConfig, weights: Mapping[str, np.ndarray]) -> None:
    """Raise one clear sentence if weights are missing or have the wrong shape.

    Without this check a missing weight would fail in the middle of the model, with a name that says little. NumPy would
    even broadcast some wrong shapes.
    """
    wanted = config.weights()
    missing = [name for name in wanted if name not in weights]
    wrong = [n for n, shape in wanted.items() if n in weights and weights[n].shape != shape]
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{len(wrong)} weights have the wrong shape, such as {name}: {weights[name].shape}, not {wanted[name]}"
        )
