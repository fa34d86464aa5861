"""Whole models in NumPy, from the same config and the same named weights as the PyTorch engine.

Every part is a function `(config, x, here) -> x`, in the file named like its config; `here` says where in the model it
stands: its weights, the positions of queries and keys, and what is written down on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.configs import Config, EncoderDecoderConfig, Mask, ModelConfig, SequenceModelConfig
from clearhead.configs.masks import check_causal

PARTS: dict[type[Config], Callable[..., np.ndarray]] = {}


def runs(config: type[Config]) -> Callable[[Callable[..., np.ndarray]], Callable[..., np.ndarray]]:
    """Function decorator: this is what that config computes."""

    def register(part: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        PARTS[config] = part
        return part

    return register


@dataclass
class DecodeState:
    """What decoding remembers: the keys and values of every layer, and where and how real they are."""

    kept: dict[str, np.ndarray] = field(default_factory=dict)
    positions: Int[np.ndarray, "B S"] | None = None
    readable: Bool[np.ndarray, "B S"] | None = None

    def remember(self, name: str, new: np.ndarray, axis: int) -> np.ndarray:
        """All that came under this name, the newest last."""
        self.kept[name] = np.concatenate((self.kept[name], new), axis) if name in self.kept else new
        return self.kept[name]


@dataclass(frozen=True)
class Here:
    """A place in the model."""

    weights: Mapping[str, np.ndarray]
    positions: Int[np.ndarray, "B T"]  # of the queries
    key_positions: Int[np.ndarray, "B S"]
    readable: Bool[np.ndarray, "B S"]  # False where a key is padding
    documents: Int[np.ndarray, "B T"] | None = None  # only tokens of one document read each other
    key_documents: Int[np.ndarray, "B S"] | None = None  # None: the same as the queries'
    source: Float[np.ndarray, "B S D"] | None = None  # what cross-attention reads
    cross: Here | None = None  # how it is read
    state: DecodeState | None = None
    record: dict[str, np.ndarray] | None = None
    path: str = ""

    def named(self, name: str) -> str:
        return ".".join(part for part in (self.path, name) if part)

    def at(self, name: str) -> Here:
        path = self.named(name)
        return replace(self, path=path, cross=None if self.cross is None else replace(self.cross, path=path))

    def __getitem__(self, name: str) -> np.ndarray:
        """The weight of that name."""
        return self.weights[self.named(name)]

    def get(self, name: str) -> np.ndarray | None:
        """The weight of that name, if the part has one: a bias."""
        return self.weights.get(self.named(name))

    def note(self, name: str, value: np.ndarray) -> np.ndarray:
        """Write an intermediate value down, under the name that `trace` and the taps have for it."""
        if self.record is not None:
            self.record[self.named(name)] = value
        return value

    def remember(self, name: str, new: np.ndarray, axis: int) -> np.ndarray:
        return new if self.state is None else self.state.remember(self.named(name), new, axis)

    def recall(self, name: str, start: np.ndarray) -> np.ndarray:
        """What a recurrence has come to: what was kept under this name last, or its start."""
        return start if self.state is None else self.state.kept.get(self.named(name), start)

    def keep(self, name: str, value: np.ndarray) -> None:
        if self.state is not None:
            self.state.kept[self.named(name)] = value

    def lanes(self) -> Iterator[tuple[int, Int[np.ndarray, "W"]]]:
        """The texts that a recurrence goes through: of each row, the places of each document's real tokens."""
        batch, length = self.positions.shape
        documents = np.zeros((batch, length), int) if self.documents is None else self.documents
        readable = self.readable[:, self.readable.shape[1] - length :]
        for row in range(batch):
            for document in np.unique(documents[row][readable[row]]):
                yield row, np.flatnonzero(readable[row] & (documents[row] == document))

    def run(self, name: str, config: Config | None, x: np.ndarray, **more: Any) -> np.ndarray:
        """The child `name`; one that is absent is the identity."""
        return x if config is None else part(config)(config, x, self.at(name), **more)

    def allowed(self, mask: Mask) -> Bool[np.ndarray, "B 1 T S"]:
        """Who may read whom: the mask, padding and documents together."""
        allowed = mask(self.positions[:, None, :, None], self.key_positions[:, None, None, :])
        allowed = allowed & self.readable[:, None, None, :]
        if self.documents is not None:
            keys = self.documents if self.key_documents is None else self.key_documents
            allowed = allowed & (self.documents[:, None, :, None] == keys[:, None, None, :])
        return allowed


def part(config: Config) -> Callable[..., np.ndarray]:
    """The function that computes what `config` describes."""
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
    source_readable: Bool[np.ndarray, "B S"] | None = None,
    state: DecodeState | None = None,
    record: dict[str, np.ndarray] | None = None,
) -> np.ndarray:
    """What the model says of `inputs`: token ids, images, or a source whose `target` is being written.

    `weights` holds an array for every name in `config.weights()`. With a `DecodeState`, the tokens continue those
    before. `record` is filled with every intermediate value.
    """
    check_weights(config, weights)
    if state is not None:
        for block in (config.decoder if isinstance(config, EncoderDecoderConfig) else config.stack).blocks:
            check_causal(block.mixer.mask)
    if isinstance(config, EncoderDecoderConfig):
        if target is None:
            raise ValueError("an encoder–decoder takes a source and a target; the target is missing")
        return encoder_decoder(config, weights, inputs, target, source_readable, readable, state, record)
    if target is not None:
        raise ValueError("a target was given, but this model has no decoder of its own")
    length = config.embedding.positions(inputs.shape[1])
    here = place(weights, len(inputs), length, readable, state, record)
    here = replace(here, documents=documents)
    return sequence_model(config, inputs, segments, here)


def sequence_model(
    config: SequenceModelConfig, inputs: np.ndarray, segments: np.ndarray | None, here: Here
) -> np.ndarray:
    """embedding -> stack -> head."""
    x = here.note("embedding", here.run("embedding", config.embedding, inputs, segments=segments))
    x = here.run("stack", config.stack, x)
    return here.run("head", config.head, x, table=here.weights.get("embedding.tokens.weight"))


def encoder_decoder(
    config: EncoderDecoderConfig,
    weights: Mapping[str, np.ndarray],
    source: Int[np.ndarray, "B S"],
    target: Int[np.ndarray, "B T"],
    source_readable: Bool[np.ndarray, "B S"] | None,
    readable: Bool[np.ndarray, "B T"] | None,
    state: DecodeState | None,
    record: dict[str, np.ndarray] | None,
) -> np.ndarray:
    """source -> encoder; target -> decoder, which reads the encoder's output -> head."""
    reader = place(weights, len(source), source.shape[1], source_readable, None, record)
    if state is not None and "memory" in state.kept:
        memory = state.kept["memory"]
    else:
        x = reader.note("source", reader.run("source", config.source, source))
        memory = reader.run("encoder", config.encoder, x)
    if state is not None:
        state.kept["memory"] = memory
    writer = place(weights, len(target), target.shape[1], readable, state, record)
    cross = replace(
        writer, key_positions=reader.positions, readable=reader.readable, source=memory, state=None, cross=None
    )
    writer = replace(writer, cross=cross)
    table = "source" if config.target is None else "target"
    embedded = replace(writer, weights=renamed(weights, table, "target"))
    x = embedded.note("target", embedded.run("target", config.target or config.source, target))
    x = writer.run("decoder", config.decoder, x)
    return writer.run("head", config.head, x, table=weights[f"{table}.tokens.weight"])


def renamed(weights: Mapping[str, np.ndarray], old: str, new: str) -> Mapping[str, np.ndarray]:
    """One part's weights under another part's name: a table that source and target share."""
    shared = {new + name.removeprefix(old): w for name, w in weights.items() if name.startswith(f"{old}.")}
    return {**weights, **shared}


def place(
    weights: Mapping[str, np.ndarray],
    batch: int,
    length: int,
    readable: Bool[np.ndarray, "B T"] | None,
    state: DecodeState | None,
    record: dict[str, np.ndarray] | None,
) -> Here:
    """Where the new tokens stand: after what the state holds, counting real tokens only."""
    readable = np.ones((batch, length), bool) if readable is None else readable
    positions = np.where(readable, readable.cumsum(1) - 1, 0)
    if state is None:
        return Here(weights, positions, positions, readable, record=record)
    if state.positions is not None and state.readable is not None:
        positions = np.where(readable, positions + state.readable.sum(1, keepdims=True), 0)
        state.positions = np.concatenate((state.positions, positions), 1)
        state.readable = np.concatenate((state.readable, readable), 1)
    else:
        state.positions, state.readable = positions, readable
    return Here(weights, positions, state.positions, state.readable, state=state, record=record)


def check_weights(config: ModelConfig, weights: Mapping[str, np.ndarray]) -> None:
    wanted = config.weights()
    missing = [name for name in wanted if name not in weights]
    wrong = [n for n, shape in wanted.items() if n in weights and weights[n].shape != shape]
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, such as {missing[0]}")
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{len(wrong)} weights are misshapen, such as {name}: {weights[name].shape}, not {wanted[name]}"
        )
