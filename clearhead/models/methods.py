"""`generate`, `stream`, `inspect` and `save` as methods of a model.

These functions live in higher layers, which import the model. To avoid an import cycle, a method imports its function
when it is called. The options are typed here, so editors can complete and check them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from clearhead.configs.decoding import DecodingOptions
from clearhead.tokenize import Tokenizer
from clearhead.tokenize.stored import stored_tokenizer

if TYPE_CHECKING:
    from clearhead.generate.complete import Completion
    from clearhead.generate.speculate import Draft
    from clearhead.inspect.inspection import Inspection

FUNCTIONS = {
    "generate": "clearhead.generate.complete",
    "stream": "clearhead.generate.complete",
    "inspect": "clearhead.inspect.inspection",
    "save": "clearhead.models.save",
}
"""The module that defines each function."""


class StreamOptions(DecodingOptions, total=False):
    """Options of `model.stream`."""

    tokenizer: Tokenizer | None
    draft: Draft | None


class GenerateOptions(StreamOptions, total=False):
    """Options of `model.generate`."""

    logprobs: bool
    batch: int


class InspectOptions(TypedDict, total=False):
    """Options of `model.inspect`."""

    tokenizer: Tokenizer | None
    labels: Sequence[str] | None
    layers: Sequence[int] | None
    heads: Sequence[int] | None
    rows: Sequence[int] | None
    write: int
    name: str | None


class SaveOptions(TypedDict, total=False):
    """Options of `model.save`."""

    tokenizer: Any
    shard_bytes: int
    extra: Mapping[str, Any] | None
    force: bool


class ModelMethods:
    """What every model can do besides computing logits."""

    origin: Path | None = None  # the folder or GGUF file it was loaded from, which holds its tokenizer and defaults

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the folder or GGUF file that the model was loaded from; None if there is none."""
        return stored_tokenizer(self.origin)

    def generate(self, prompts: str | Sequence[Any], **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Continue prompts, given as texts or token ids. An encoder–decoder generates a target for each source.

        See `clearhead.generate.complete.generate`.
        """
        return find_function("generate")(self, prompts, **options)

    def stream(self, prompt: str | Sequence[int], **options: Unpack[StreamOptions]) -> Iterator[str]:
        """Continue one prompt and yield the text piece by piece. See `clearhead.generate.complete.stream`."""
        return find_function("stream")(self, prompt, **options)

    @overload
    def inspect(
        self, inputs: list[str], target: None = None, **options: Unpack[InspectOptions]
    ) -> list[Inspection]: ...

    @overload
    def inspect(self, inputs: Any, target: Any = None, **options: Unpack[InspectOptions]) -> Inspection: ...

    def inspect(self, inputs: Any, target: Any = None, **options: Unpack[InspectOptions]) -> Any:
        """Run one input and return its `Inspection`, or a list of them for a list of texts.

        An `Inspection` has attention maps, the logit lens, ablation and patching. An encoder–decoder takes a source and
        a target. See `clearhead.inspect.inspection.inspect`.
        """
        return find_function("inspect")(self, inputs, target, **options)

    def save(self, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
        """Write a folder that `clearhead.load` can read. `transformers` can too, if it supports the architecture.

        See `clearhead.models.save.save`.
        """
        find_function("save")(self, folder, **options)


class TextMethods(ModelMethods):
    """Convert text to token ids and back with the model's own tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. By default, special tokens are added around it, as in `transformers`."""
        return self.need_tokenizer().prompt(text, around=add_special_tokens)

    def decode(self, ids: Iterable[Any], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, given as numbers or as a tensor of one dimension."""
        return self.need_tokenizer().decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens)

    def need_tokenizer(self) -> Tokenizer:
        if (tokenizer := self.tokenizer) is None:
            raise ValueError("the model has no tokenizer; load one with clearhead.tokenize.Tokenizer.load")
        return tokenizer


def find_function(name: str) -> Callable[..., Any]:
    return getattr(import_module(FUNCTIONS[name]), name)
