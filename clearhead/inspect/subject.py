"""What is looked at: a model and one input for it, with the input's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.configs import BlockConfig, ParallelBlockConfig, PatchEmbeddingConfig
from clearhead.generate.complete import generate, own_tokenizer
from clearhead.generate.defaults import defaults
from clearhead.models.assemble import EncoderDecoder, Model, SequenceModel
from clearhead.nn.context import Context
from clearhead.nn.stack import Stack
from clearhead.nn.tap import Taps
from clearhead.tasks.classify import told
from clearhead.tasks.images import read_image
from clearhead.tokenize import Tokenizer


@dataclass(frozen=True)
class Subject:
    """A model and one row of input. Of an encoder–decoder the input is the target, and there is a source."""

    model: Model
    inputs: Tensor  # 1 T ids, or 1 Ch Y X pixels
    labels: list[str]  # one for each position
    source: Tensor | None = None
    source_labels: list[str] | None = None
    tokenizer: Tokenizer | None = None
    written: int = 0  # how many of the last tokens the model wrote itself
    image: UInt8[np.ndarray, "Y X 3"] | None = None  # as a person sees it
    name: str = "model"

    def run(self, taps: Taps | None = None, copies: int = 1) -> Tensor:
        """The model's answer to `copies` rows of the input."""
        device = next(self.model.parameters()).device
        inputs = self.inputs.to(device).expand(copies, *self.inputs.shape[1:])
        with torch.inference_mode():
            if isinstance(self.model, EncoderDecoder):
                assert self.source is not None, "an encoder–decoder's subject is made with a source"
                return self.model(self.source.to(device).expand(copies, -1), inputs, taps=taps)
            return self.model(inputs, taps=taps)

    @property
    def last(self) -> Stack:
        """The stack that the head reads."""
        return self.model.decoder if isinstance(self.model, EncoderDecoder) else self.model.stack

    @property
    def place(self) -> str:
        return "decoder" if isinstance(self.model, EncoderDecoder) else "stack"

    @property
    def blocks(self) -> Sequence[BlockConfig | ParallelBlockConfig]:
        return self.stacks()[self.place]

    def stacks(self) -> dict[str, Sequence[BlockConfig | ParallelBlockConfig]]:
        """The blocks of each stack, by its name in the model."""
        config = self.model.config
        if isinstance(self.model, EncoderDecoder):
            return {"encoder": config.encoder.blocks, "decoder": config.decoder.blocks}  # type: ignore[union-attr]
        return {"stack": config.stack.blocks}  # type: ignore[union-attr]

    def streams(self) -> Iterator[tuple[str, str]]:
        """What to call the residual stream after the embedding and after each block, and its tap."""
        yield "embedding", "target" if isinstance(self.model, EncoderDecoder) else "embedding"
        for i, block in enumerate(self.blocks):
            yield f"layer {i}", f"{self.place}.blocks.{i}.{output_of(block)}"

    def head(self, x: Float[Tensor, "B T D"]) -> Tensor:
        """What the model would say if x were the stack's last word: the final norm and the head."""
        self.check_says()
        at = torch.arange(x.shape[1], device=x.device)[None]
        own = isinstance(self.model, SequenceModel)
        embedding: Any = self.model.embedding if own else self.model.target or self.model.source
        with torch.inference_mode():
            return cast(Any, self.model.head)(self.last.final_norm(x), Context(at, at), embedding.table)

    @property
    def speaks(self) -> bool:
        """Whether there is an answer for every position, as language models give; else there is one in all."""
        head = self.model.config.head
        return head is not None and head.kind() in ("LMHead", "MaskedLMHead")

    @property
    def says(self) -> bool:
        """Whether it answers with words or classes at all."""
        head = self.model.config.head
        return self.speaks or (head is not None and head.kind() == "ClassHead")

    def check_says(self) -> None:
        if not self.says:
            raise ValueError(f"{self.name} has no head over words or classes, so there is nothing that it says")

    @property
    def answers(self) -> str:
        """What it says: the next token, of a masked language model the token that stands there, or a class."""
        head: Any = self.model.config.head
        return {"LMHead": "next token", "MaskedLMHead": "token", "ClassHead": "class"}[head.kind()]

    def asked(self, row: int) -> str:
        """Where it says that."""
        place = {"next token": "next, after ", "token": "in the place of "}.get(self.answers)
        return "class" if place is None else place + repr(self.labels[row])

    @property
    def classes(self) -> dict[str, str]:
        """The names of classes by their numbers, where the model's folder tells them."""
        return {} if self.model.origin is None else told(self.model.origin / "config.json").get("id2label") or {}

    def word(self, id: int) -> str:
        """A token's text, or a class's name; its number where there is none."""
        if not self.speaks:
            return self.classes.get(str(id), str(id))
        return pieces(self.tokenizer, [id, id])[1]  # the second of two has its space

    def token(self, text: str | int) -> int:
        """The id of a token or the number of a class, given by its text or its number."""
        self.check_says()
        id = text if isinstance(text, int) else self.token_of(text) if self.speaks else self.class_of(text)
        head: Any = self.model.config.head
        what, size = ("token", head.vocabulary) if self.speaks else ("class", head.classes)
        if not 0 <= id < size:
            raise ValueError(f"{what} {id} is nothing that {self.name} can say, which has 0 to {size - 1}")
        return id

    def token_of(self, text: str) -> int:
        if self.tokenizer is None:
            if text.isdigit():
                return int(text)
            raise ValueError(f"{self.name} has no tokenizer, so give the token {text!r} by its number")
        ids = self.tokenizer.encode_target(text)
        if len(ids) != 1:
            raise ValueError(
                f"{text!r} is {len(ids)} tokens ({' '.join(map(repr, pieces(self.tokenizer, ids)))}), not one"
            )
        return ids[0]

    def class_of(self, text: str) -> int:
        number = next((number for number, name in self.classes.items() if name == text), text)
        if not number.isdigit():
            known = f" among {', '.join(self.classes.values())}" if self.classes else "; give its number"
            raise ValueError(f"{self.name} has no class {text!r}{known}")
        return int(number)


def output_of(block: BlockConfig | ParallelBlockConfig) -> str:
    """The tap of what a block hands on."""
    if isinstance(block, ParallelBlockConfig):
        return "residual"
    branch = "ffn" if block.ffn is not None else "cross" if block.cross is not None else "mixer"
    return f"{branch}_residual.after"


def make_subject(
    model: Model,
    inputs: Any,
    target: Any = None,
    *,
    tokenizer: Tokenizer | None = None,
    labels: Sequence[str] | None = None,
    write: int = 0,
    name: str | None = None,
) -> Subject:
    """From a text, ids, a tensor or an image to something that can be looked at."""
    if write < 0:
        raise ValueError(f"write is {write}, but a model writes at least 0 tokens")
    name = name or ("model" if model.origin is None else model.origin.resolve().name)
    tokenizer = tokenizer or own_tokenizer(model)
    if isinstance(model, EncoderDecoder):
        return translation(model, inputs, target, tokenizer, write, name)
    if target is not None:
        raise ValueError(f"{name} has no decoder, so there is no target")
    if isinstance(model.config.embedding, PatchEmbeddingConfig):
        return picture(model, inputs, write, name)
    ids = as_ids(inputs, tokenizer, name)
    new = written(model, ids, tokenizer, write)
    read = pieces(tokenizer, [*ids, *new])
    if labels is not None and len(labels) != len(ids):
        raise ValueError(f"there are {len(labels)} labels for {len(ids)} tokens")
    read[: len(ids)] = read[: len(ids)] if labels is None else labels
    return Subject(model, torch.tensor([ids + new]), read, tokenizer=tokenizer, written=len(new), name=name)


def translation(
    model: EncoderDecoder, source: Any, target: Any, tokenizer: Tokenizer | None, write: int, name: str
) -> Subject:
    """The target is given, as a text or as ids from its beginning, or else written."""
    if (target is None) == (write == 0):
        raise ValueError(f"{name} is an encoder–decoder: give the target as far as it goes, or let it write one")
    given, by_ids = as_ids(source, tokenizer, name), target is not None and not isinstance(target, str)
    start = None if by_ids else defaults(model, tokenizer).start
    if start is None and not by_ids:
        raise ValueError(f"nothing says which token a target of {name} begins with; give its ids (--ids, --target)")
    new = written(model, given, tokenizer, write)
    if start is None:
        ids = as_ids(target, tokenizer, name)
    else:
        ids = [start, *(new if target is None else known(tokenizer, name).encode_target(target))]
    labels, sources = pieces(tokenizer, ids), pieces(tokenizer, given)
    return Subject(
        model, torch.tensor([ids]), labels, torch.tensor([given]), sources, tokenizer, written=len(new), name=name
    )


def written(model: Model, ids: list[int], tokenizer: Tokenizer | None, write: int) -> list[int]:
    """What the model writes, the likeliest token each time."""
    if write == 0:
        return []
    (found,) = generate(model, [ids], tokenizer=tokenizer, max_new_tokens=write, temperature=0.0, beams=1)
    return found.tokens


def as_ids(inputs: Any, tokenizer: Tokenizer | None, name: str) -> list[int]:
    if isinstance(inputs, str):
        inputs = known(tokenizer, name).prompt(inputs)
    ids = torch.as_tensor(inputs).long()
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1 or ids.shape[1] == 0:
        raise ValueError(f"one row of at least one token is looked at, not {tuple(ids.shape)}")
    return ids[0].tolist()


def known(tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, so a text cannot be read; give token ids")
    return tokenizer


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a special token's name; numbers where there is no tokenizer."""
    if tokenizer is None:
        return [str(id) for id in ids]
    out = []
    for n, id in enumerate(ids):
        before = list(ids[max(0, n - 3) : n])
        text = "" if id in tokenizer.specials else tokenizer.decode([*before, id])[len(tokenizer.decode(before)) :]
        out.append(text or str(tokenizer.name(id) or id).replace("▁", " "))
    return out


def picture(model: SequenceModel, image: Any, write: int, name: str) -> Subject:
    config = model.config.embedding
    assert isinstance(config, PatchEmbeddingConfig), "only models of patches come here"
    if write:
        raise ValueError(f"{name} reads images, so it writes no tokens")
    if isinstance(image, str | Path):
        said = {} if model.origin is None else told(model.origin / "preprocessor_config.json")
        image = read_image(Path(image), config, said)
    pixels = torch.as_tensor(np.asarray(image)).to(next(model.parameters()).dtype)
    pixels = pixels[None] if pixels.dim() == 3 else pixels
    if pixels.dim() != 4 or len(pixels) != 1:
        raise ValueError(
            f"one image of {config.channels} × {config.image} × {config.image} is looked at, not {tuple(pixels.shape)}"
        )
    side = config.image // config.patch
    labels = ["class", *(f"{y},{x}" for y in range(side) for x in range(side))]
    return Subject(model, pixels, labels, image=seen(pixels[0].float().numpy()), name=name)


def seen(pixels: Float[np.ndarray, "Ch Y X"]) -> UInt8[np.ndarray, "Y X 3"]:
    """Normalised numbers back as something to look at: their range stretched over black to white."""
    low, high = float(pixels.min()), float(pixels.max())
    shown = ((pixels - low) / ((high - low) or 1.0) * 255).astype(np.uint8).transpose(1, 2, 0)
    return np.ascontiguousarray(shown if shown.shape[2] == 3 else np.repeat(shown[..., :1], 3, axis=2))
