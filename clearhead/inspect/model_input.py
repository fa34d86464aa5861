"""A model and one input for it, with a label for each position."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.configs import AudioEmbeddingConfig, BlockConfig, ParallelBlockConfig, PatchEmbeddingConfig
from clearhead.data.audio import log_mel, read_audio
from clearhead.generate.complete import generate
from clearhead.generate.defaults import default_decoding
from clearhead.models.model import EncoderDecoder, Model, SequenceModel
from clearhead.nn.context import Context
from clearhead.nn.stack import Stack
from clearhead.nn.tap import Taps
from clearhead.tasks.classify import read_fields
from clearhead.tasks.images import read_image
from clearhead.tokenize import Tokenizer

BROKEN = "\ufffd"  # stands for bytes that are no character
SECONDS = 0.02  # from one position of a sound to the next
MOST_PARTS = 6  # tokens that one character may span


@dataclass(frozen=True)
class ModelInput:
    """A model and one row of input. For an encoder–decoder, `inputs` is the target and `source` the source."""

    model: Model
    inputs: Tensor  # 1 T ids, or 1 Ch Y X pixels
    labels: list[str]  # one per position
    source: Tensor | None = None
    source_labels: list[str] | None = None
    tokenizer: Tokenizer | None = None
    generated: int = 0  # how many of the last tokens the model generated
    image: UInt8[np.ndarray, "Y X 3"] | None = None  # 8-bit pixels for display
    name: str = "model"

    def run(self, taps: Taps | None = None, copies: int = 1) -> Tensor:
        """Return the model's output for `copies` identical rows of the input."""
        device = next(self.model.parameters()).device
        inputs = self.inputs.to(device).expand(copies, *self.inputs.shape[1:])
        with torch.inference_mode():
            if isinstance(self.model, EncoderDecoder):
                assert self.source is not None, "an encoder–decoder input always has a source"
                return self.model(self.source.to(device).expand(copies, *self.source.shape[1:]), inputs, taps=taps)
            return self.model(inputs, taps=taps)

    @property
    def final_stack(self) -> Stack:
        """The stack that the head reads."""
        return self.model.decoder if isinstance(self.model, EncoderDecoder) else self.model.stack

    @property
    def final_stack_name(self) -> str:
        return "decoder" if isinstance(self.model, EncoderDecoder) else "stack"

    @property
    def blocks(self) -> Sequence[BlockConfig | ParallelBlockConfig]:
        return self.stacks()[self.final_stack_name]

    def stacks(self) -> dict[str, Sequence[BlockConfig | ParallelBlockConfig]]:
        """The block configs of each stack, by the stack's name in the model."""
        config = self.model.config
        if isinstance(self.model, EncoderDecoder):
            return {"encoder": config.encoder.blocks, "decoder": config.decoder.blocks}  # type: ignore[union-attr]
        return {"stack": config.stack.blocks}  # type: ignore[union-attr]

    def residual_taps(self) -> Iterator[tuple[str, str]]:
        """Yield (name, tap path) of the residual stream after the embedding and after each block."""
        yield "embedding", "target" if isinstance(self.model, EncoderDecoder) else "embedding"
        for i, block in enumerate(self.blocks):
            yield f"layer {i}", f"{self.final_stack_name}.blocks.{i}.{block_output_tap(block)}"

    def head(self, x: Float[Tensor, "B T D"]) -> Tensor:
        """Apply the final norm and the head to `x`, as if `x` were the output of the last block."""
        self.check_predictions()
        at = torch.arange(x.shape[1], device=x.device)[None]
        with torch.inference_mode():
            return cast(Any, self.model.head)(self.final_stack.final_norm(x), Context(at, at), self.model.table)

    @property
    def predicts_tokens(self) -> bool:
        """Whether the head predicts a token at every position (a language model), not one class for the whole input."""
        head = self.model.config.head
        return head is not None and head.kind() in ("LMHead", "MaskedLMHead")

    @property
    def has_predictions(self) -> bool:
        """Whether the model has a head over tokens or classes."""
        head = self.model.config.head
        return self.predicts_tokens or (head is not None and head.kind() == "ClassHead")

    def check_predictions(self) -> None:
        if not self.has_predictions:
            raise ValueError(f"{self.name} has no head over tokens or classes, so it makes no predictions")

    @property
    def prediction_kind(self) -> str:
        """What the head predicts: the next token, the masked token at a position, or a class."""
        head: Any = self.model.config.head
        return {"LMHead": "next token", "MaskedLMHead": "token", "ClassHead": "class"}[head.kind()]

    def describe_position(self, row: int) -> str:
        """A heading for the predictions at position `row`."""
        place = {"next token": "next token after ", "token": "token in place of "}.get(self.prediction_kind)
        return "class" if place is None else place + repr(self.labels[row])

    @property
    def classes(self) -> dict[str, str]:
        """Class names by number, if the checkpoint's config.json has them."""
        return {} if self.model.origin is None else read_fields(self.model.origin / "config.json").get("id2label") or {}

    def token_text(self, id: int) -> str:
        """Text of a token or name of a class; its number if there is no tokenizer or name."""
        if not self.predicts_tokens:
            return self.classes.get(str(id), str(id))
        return token_labels(self.tokenizer, [id, id])[-1]  # the first of a text may lose its leading space

    def find_token(self, text: str | int) -> int:
        """Return the id of a token or class given by its text or number."""
        self.check_predictions()
        id = (
            text if isinstance(text, int) else self.parse_token(text) if self.predicts_tokens else self.find_class(text)
        )
        head: Any = self.model.config.head
        what, size = ("token", head.vocabulary) if self.predicts_tokens else ("class", head.classes)
        if not 0 <= id < size:
            raise ValueError(f"{what} {id} does not exist: {self.name} has {what} 0 to {size - 1}")
        return id

    def parse_token(self, text: str) -> int:
        if self.tokenizer is None:
            if text.isdigit():
                return int(text)
            raise ValueError(f"{self.name} has no tokenizer: give the token {text!r} as a number")
        ids = self.tokenizer.encode_target(text)
        bare = self.tokenizer.encode_target(text.removeprefix(" "))  # SentencePiece adds the space itself
        if len(ids) != 1 and len(bare) == 1 and self.token_text(bare[0]) == text:
            return bare[0]
        if len(ids) != 1:
            raise ValueError(
                f"{text!r} is {len(ids)} tokens "
                f"({' '.join(map(repr, token_labels(self.tokenizer, ids)))}), but must be exactly one"
            )
        return ids[0]

    def find_class(self, text: str) -> int:
        number = next((number for number, name in self.classes.items() if name == text), text)
        if not number.isdigit():
            known = f" among {', '.join(self.classes.values())}" if self.classes else "; give its number"
            raise ValueError(f"{self.name} has no class {text!r}{known}")
        return int(number)


def block_output_tap(block: BlockConfig | ParallelBlockConfig) -> str:
    """The tap of a block's output."""
    if isinstance(block, ParallelBlockConfig):
        return "residual"
    branch = "ffn" if block.ffn is not None else "cross" if block.cross is not None else "mixer"
    return f"{branch}_residual.after"


def make_model_input(
    model: Model,
    inputs: Any,
    target: Any = None,
    *,
    tokenizer: Tokenizer | None = None,
    labels: Sequence[str] | None = None,
    write: int = 0,
    name: str | None = None,
) -> ModelInput:
    """Tokenize a text, or take ids, a tensor or an image, and label every position."""
    if write < 0:
        raise ValueError(f"write is {write}, but must be at least 0")
    name = name or ("model" if model.origin is None else model.origin.resolve().name)
    tokenizer = tokenizer or model.tokenizer
    if isinstance(model, EncoderDecoder):
        return pair_input(model, inputs, target, tokenizer, write, name)
    if target is not None:
        raise ValueError(f"a target was given, but {name} has no decoder")
    if isinstance(model.config.embedding, PatchEmbeddingConfig):
        return image_input(model, inputs, write, name)
    ids = as_ids(inputs, tokenizer, name)
    new = generate_ids(model, ids, tokenizer, write)
    read = token_labels(tokenizer, [*ids, *new])
    if labels is not None and len(labels) != len(ids):
        raise ValueError(f"{len(labels)} labels were given for {len(ids)} tokens")
    read[: len(ids)] = read[: len(ids)] if labels is None else labels
    return ModelInput(model, torch.tensor([ids + new]), read, tokenizer=tokenizer, generated=len(new), name=name)


def pair_input(
    model: EncoderDecoder, source: Any, target: Any, tokenizer: Tokenizer | None, write: int, name: str
) -> ModelInput:
    """The input of an encoder–decoder. The target is given (text or ids), or generated if `write` > 0."""
    if (target is None) == (write == 0):
        raise ValueError(
            f"{name} is an encoder–decoder: give a target (--target), or let it generate one (--write N), not both"
        )
    by_ids = target is not None and not isinstance(target, str)
    start = None if by_ids else default_decoding(model, tokenizer).start
    if start is None and not by_ids:
        raise ValueError(f"{name} does not say which token starts a target; give the target as ids (--ids, --target)")
    if isinstance(model.config.source, AudioEmbeddingConfig):
        if write:
            raise ValueError(f"{name} reads sound: give the text as a target, such as `clearhead transcribe` writes it")
        read, new = sound_input(model.config.source, source), []
        sources = [f"{place * SECONDS:.2f}" for place in range(model.config.source.length)]
        read = read.to(next(model.parameters()).dtype)
    else:
        given = as_ids(source, tokenizer, name)
        read, new = torch.tensor([given]), generate_ids(model, given, tokenizer, write)
        sources = token_labels(tokenizer, given)
    if start is None:
        ids = as_ids(target, tokenizer, name)
    else:
        ids = [start, *(new if target is None else require_tokenizer(tokenizer, name).encode_target(target))]
    labels = token_labels(tokenizer, ids)
    return ModelInput(model, torch.tensor([ids]), labels, read, sources, tokenizer, generated=len(new), name=name)


def sound_input(config: AudioEmbeddingConfig, sound: Any) -> Float[Tensor, "1 Mels Frames"]:
    """The spectrogram of the first window of a sound file; a spectrogram stays as it is."""
    if isinstance(sound, str | Path):
        sound = log_mel(read_audio(Path(sound)), config.mels, config.frames)
    spectrogram = torch.as_tensor(np.asarray(sound))
    spectrogram = spectrogram[None] if spectrogram.dim() == 2 else spectrogram
    if tuple(spectrogram.shape) != (1, *config.input_shape(0)):
        wanted = (1, *config.input_shape(0))
        raise ValueError(f"the sound must be a spectrogram of {wanted}, but its shape is {tuple(spectrogram.shape)}")
    return spectrogram


def generate_ids(model: Model, ids: list[int], tokenizer: Tokenizer | None, write: int) -> list[int]:
    """Return up to `write` tokens generated greedily."""
    if write == 0:
        return []
    (found,) = generate(model, [ids], tokenizer=tokenizer, max_new_tokens=write, temperature=0.0, beams=1)
    return found.tokens


def as_ids(inputs: Any, tokenizer: Tokenizer | None, name: str) -> list[int]:
    if isinstance(inputs, str):
        inputs = require_tokenizer(tokenizer, name).prompt(inputs)
    ids = torch.as_tensor(inputs).long()
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1 or ids.shape[1] == 0:
        raise ValueError(f"the input must be one row of at least one token, but its shape is {tuple(ids.shape)}")
    return ids[0].tolist()


def require_tokenizer(tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer and cannot read a text: give token ids (--ids)")
    return tokenizer


def token_labels(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; the name of a special token; the number if there is no tokenizer.

    A character that spans several tokens labels each of them with its part, such as 从·1/3.
    """
    if tokenizer is None:
        return [str(id) for id in ids]
    out: list[str] = []
    while len(out) < len(ids):
        n = len(out)
        if ids[n] in tokenizer.specials:
            out.append(tokenizer.name(ids[n]) or str(ids[n]))
            continue
        before = list(ids[max(0, n - 3) : n])
        known = tokenizer.decode(before)
        for length in range(1, MOST_PARTS + 1):
            run = list(ids[n : n + length])
            text = tokenizer.decode([*before, *run])[len(known) :]
            if len(run) < length or BROKEN not in text:
                break
        if len(run) < length or BROKEN in text:  # the bytes never become a character
            out.append(raw_bytes(tokenizer, ids[n]))
        elif length == 1:
            out.append(text or raw_bytes(tokenizer, ids[n]))
        else:
            out += [f"{text}·{part}/{length}" for part in range(1, length + 1)]
    return out


def raw_bytes(tokenizer: Tokenizer, id: int) -> str:
    """A token that is no whole character, as hexadecimal bytes such as ⟨E4 BB⟩."""
    name = tokenizer.name(id) or str(id)
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return f"⟨{match[1].upper()}⟩"
    alphabet = byte_alphabet()
    if name and all(letter in alphabet for letter in name):
        return "⟨" + " ".join(f"{alphabet[letter]:02X}" for letter in name) + "⟩"
    return name.replace("▁", " ")


@cache
def byte_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers (GPT-2) write for bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def image_input(model: SequenceModel, image: Any, write: int, name: str) -> ModelInput:
    config = model.config.embedding
    assert isinstance(config, PatchEmbeddingConfig), "the caller checked for a patch embedding"
    if write:
        raise ValueError(f"{name} reads images and cannot generate tokens")
    if isinstance(image, str | Path):
        fields = {} if model.origin is None else read_fields(model.origin / "preprocessor_config.json")
        image = read_image(Path(image), config, fields)
    pixels = torch.as_tensor(np.asarray(image)).to(next(model.parameters()).dtype)
    pixels = pixels[None] if pixels.dim() == 3 else pixels
    if pixels.dim() != 4 or len(pixels) != 1:
        raise ValueError(
            f"the image must be {config.channels} × {config.image} × {config.image}, but its shape is "
            f"{tuple(pixels.shape)}"
        )
    side = config.image // config.patch
    labels = ["class", *(f"{y},{x}" for y in range(side) for x in range(side))]
    return ModelInput(model, pixels, labels, image=image_for_display(pixels[0].float().numpy()), name=name)


def image_for_display(pixels: Float[np.ndarray, "Ch Y X"]) -> UInt8[np.ndarray, "Y X 3"]:
    """Stretch normalized pixel values to 0…255 for display."""
    low, high = float(pixels.min()), float(pixels.max())
    shown = ((pixels - low) / ((high - low) or 1.0) * 255).astype(np.uint8).transpose(1, 2, 0)
    return np.ascontiguousarray(shown if shown.shape[2] == 3 else np.repeat(shown[..., :1], 3, axis=2))
