"""Options and helpers that several commands share: finding a config, changing it, loading models, printing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.configs import Cache, LengthPenalty, ModelConfig
    from clearhead.generate.complete import Completion
    from clearhead.models.model import Model

F = TypeVar("F", bound=Callable[..., Any])
DEVICE = "clearhead.device"  # where a command keeps the value of --device


def model_argument(function: F) -> F:
    """MODEL and --set, which together name a config."""
    function = click.option(
        "changes",
        "--set",
        multiple=True,
        metavar="PATH=VALUE",
        help="Change a field of the config, such as stack.repeats=6. Can be repeated.",
    )(function)
    return click.argument("model")(function)


def input_options(function: F) -> F:
    """--batch, --length and --source-length."""
    for names, text in {
        ("--source-length",): "Source tokens per row, for an encoder–decoder.  [default: same as --length]",
        ("--length", "-l"): "Tokens per row.  [default: 512, or the model's context if shorter]",
    }.items():
        function = click.option(*names, type=int, default=None, help=text)(function)
    return click.option("--batch", "-b", type=int, default=1, show_default=True, help="Rows in the batch.")(function)


def file_options(function: F) -> F:
    """--file and --lines: texts from files."""
    function = click.option("--lines", is_flag=True, help="Treat every line of the files as one text.")(function)
    return click.option(
        "files",
        "--file",
        "-f",
        multiple=True,
        metavar="PATH",
        help="Read a text from a file; - is stdin. Can be repeated.",
    )(function)


def gather_texts(texts: tuple[str, ...], files: tuple[str, ...], lines: bool) -> list[str]:
    """The texts from the command line, then those from the files."""
    if lines and not files:
        raise click.UsageError("--lines needs --file")
    if [*texts, *files].count("-") > 1:
        raise click.UsageError("standard input can be read only once: use - one time")
    found = [read_text("-") if text == "-" else text for text in texts]
    for file in files:
        found += read_lines(file) if lines else [read_text(file)]
    return found


def require_texts(texts: list[str]) -> list[str]:
    """The texts; a usage error if there are none."""
    if not texts:
        raise click.UsageError("there is no text: give one, or a file with --file")
    return texts


def text_task(function: Callable[..., None]) -> Callable[..., None]:
    """MODEL, TEXTS, --file, --lines, --device and --json. The command gets MODEL, the loaded model and the texts."""

    @wraps(function)
    def run(model: str, texts: tuple[str, ...], files: tuple[str, ...], lines: bool, **options: Any) -> None:
        wanted = require_texts(gather_texts(texts, files, lines))
        function(model, load_model(model), wanted, **options)

    run = file_options(device_option(json_option(run)))
    return click.argument("model")(click.argument("texts", nargs=-1)(run))


def top_option(text: str) -> Callable[[F], F]:
    """--top: how many answers to print."""
    return click.option("--top", type=int, default=5, show_default=True, help=text)


def decoding_options(function: F) -> F:
    """Sampling options; those that are not given default to the checkpoint's settings."""
    for names, kind, text in (
        (("--seed",), int, "Random seed; the same seed gives the same text.  [default: a new one every time]"),
        (("--repetition-penalty",), float, "Values above 1 make tokens that already occurred less likely."),
        (("--min-p",), float, "Keep tokens with at least this fraction of the highest probability."),
        (("--top-p",), float, "Keep the most likely tokens with this total probability."),
        (("--top-k",), int, "Keep this many of the most likely tokens."),
        (("--temperature", "-t"), float, "Sample from softmax(logits/temperature); 0 is greedy."),
        (("--max-new-tokens", "-m"), int, "Maximum number of new tokens.  [default: 256]"),
    ):
        function = click.option(*names, type=kind, default=None, help=text)(function)
    return click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; can be repeated.")(
        function
    )


LENGTH_PENALTY = "Divide a beam's log-probability by |y|^α (power:α) or by ((5 + |y|)/6)^α (wu:α)."


def length_penalty(text: str) -> LengthPenalty:
    """`power:1`, `wu:0.6`, or a number, which is a power."""
    from clearhead.configs import Power, Wu

    kind, colon, alpha = text.partition(":")
    rules: dict[str, type[LengthPenalty]] = {"power": Power, "wu": Wu}
    try:
        rule, value = (rules[kind], float(alpha)) if colon else (Power, float(text))
    except (KeyError, ValueError):
        raise click.BadParameter(f"{text!r} is neither power:ALPHA nor wu:ALPHA") from None
    return rule(value)


def beam_options(function: F) -> F:
    """--beams, --length-penalty and --batch, for translation."""
    for name, kind, default, text, metavar in (
        ("--batch", int, 32, "Sentences translated together.", None),
        ("--length-penalty", length_penalty, "wu:0.6", LENGTH_PENALTY, "RULE"),
        ("--beams", int, 5, "Width of the beam search; 1 is greedy.", None),
    ):
        function = click.option(name, type=kind, default=default, show_default=True, help=text, metavar=metavar)(
            function
        )
    return function


def translate_texts(
    model: Model, texts: list[str], beams: int, length_penalty: LengthPenalty, batch: int, **options: Any
) -> list[list[Completion]]:
    """Translate the texts on all cores and show progress on a terminal."""
    import torch

    from clearhead.kernels.accelerate import accelerate
    from clearhead.tasks.translate import translate

    tell = progress()
    found = translate(
        accelerate(model),
        texts,
        beams=beams,
        length_penalty=length_penalty,
        batch=batch,
        workers=torch.get_num_threads(),
        progress=lambda done: tell(f"{done:,} of {len(texts):,} translated"),
        **options,
    )
    tell("")
    cut = [i for i, best in enumerate(found, 1) if best[0].reason == "length"]
    if cut:
        others = f" ({len(cut):,} in all)" if len(cut) > 1 else ""
        click.echo(
            f"clearhead: the translation of line {cut[0]}{others} reached the length limit and was cut off", err=True
        )
    return found


def device_option(function: F) -> F:
    """--device: where the model runs. `requested_device` returns its value, also to the functions that load models."""

    def remember(context: click.Context, parameter: click.Parameter, value: str) -> None:
        context.find_root().meta[DEVICE] = value

    return click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda", "mps"]),
        default="auto",
        show_default=True,
        expose_value=False,
        callback=remember,
        help="Where the model runs; auto is a GPU if there is one.",
    )(function)


def requested_device() -> str:
    """The value of --device; "auto" outside of a command."""
    context = click.get_current_context(silent=True)
    return "auto" if context is None else context.find_root().meta.get(DEVICE, "auto")


def tokenizer_option(function: F) -> F:
    """--tokenizer: a tokenizer from elsewhere."""
    text = "Folder, tokenizer.json or GGUF file with the tokenizer.  [default: the model's own]"
    return click.option("--tokenizer", default=None, metavar="PATH", help=text)(function)


def weights_option(function: F) -> F:
    """--weights: the precision of the weight matrices."""
    from clearhead.configs import PRECISIONS

    text = "Convert the weight matrices to this precision first.  [default: unchanged]"
    return click.option("--weights", type=click.Choice(list(PRECISIONS)), default=None, help=text)(function)


def cache_option(function: F) -> F:
    """--cache: the precision of keys and values."""
    text = "Precision of the KV cache.  [default: float16 if --weights has fewer than 32 bits]"
    return click.option("--cache", type=click.Choice(["float32", "float16"]), default=None, help=text)(function)


def read_model(path: str, **options: Any) -> Model:
    """The model in a checkpoint folder, in its own precision; warnings go to stderr. Options as of `load`."""
    import warnings

    from clearhead.models.convert import CheckpointError
    from clearhead.models.load import load
    from clearhead.models.presets import PRESETS

    warnings.showwarning = lambda message, *_: click.echo(f"clearhead: {message}", err=True)
    try:
        return load(path, **options)
    except CheckpointError as error:
        if path in PRESETS and not Path(path).exists():
            raise ValueError(f"{path} is a preset, which has no weights, and as a name on the Hub: {error}") from None
        raise


def read_finite_model(path: str, **options: Any) -> Model:
    """`read_model`, but weights with NaN are an error."""
    from clearhead.nn.weights import check_weights_finite

    model = read_model(path, **options)
    check_weights_finite(model)
    return model


def load_model(path: str, weights: str | None = None) -> Model:
    """The model in float32, or in `weights`. Products of 16-bit numbers are slow on many processors."""
    model = read_finite_model(path)
    return move_model(convert_precision(model if model.precision is not None else model.float(), weights))


def load_writer(path: str, weights: str | None = None, cache: Cache | None = None) -> Model:
    """The model for generating text: 16-bit weights stay as they are, because our kernels read them."""
    model = read_model(path)
    stored = str(next(model.parameters()).dtype).removeprefix("torch.")
    if model.precision is None and stored in ("bfloat16", "float16"):
        weights = weights or stored
    return move_model(convert_precision(model, weights, cache))


def move_model(model: Model) -> Model:
    """The model on the device that --device asks for."""
    from clearhead.models.device import place_model

    return place_model(model, requested_device())


def convert_precision(model: Model, weights: str | None, cache: Cache | None = None) -> Model:
    """The model with its matrices in `weights` and its KV cache in `cache`."""
    if weights is None and cache is None:
        return model
    from clearhead.configs import precision
    from clearhead.models.quantize import keep_cache_in, quantize

    if weights is not None or model.precision is None:
        model = quantize(model, precision(weights or "float32"))
    if cache is not None:
        keep_cache_in(model, cache)
    return model


def read_text(path: str) -> str:
    """The text of a file or of stdin, without the final line break."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return text.removesuffix("\n").removesuffix("\r")


def read_lines(path: str) -> list[str]:
    """The lines of a file, compressed or not, or of stdin; only a line feed ends a line."""
    from clearhead.data.pairs import lines
    from clearhead.data.sources import decode_lines

    return list(lines(Path(path)) if path != "-" else decode_lines(sys.stdin.buffer, "standard input"))


class Numbers(click.ParamType):
    """Positive numbers separated by commas."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float], words: str) -> None:
        self.kind, self.words = kind, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            found = tuple(self.kind(part) for part in value.split(",")) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not {self.words} separated by commas", param, ctx)
        if odd := [number for number in found if not 0 < number < float("inf")]:
            self.fail(f"{odd[0]} is not positive and finite", param, ctx)
        return found


WHOLES, FLOATS = Numbers(int, "whole numbers"), Numbers(float, "numbers")


class Picture(click.ParamType):
    """A file for a picture, or with `folders` a folder. It is checked before the work that it would show is done."""

    name = "picture"

    def __init__(self, folders: bool = False, also: tuple[str, ...] = ()) -> None:
        self.folders, self.also = folders, also

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from clearhead.inspect.plotting import check_file

        if Path(value).suffix or not self.folders:
            try:
                check_file(value, self.also)
                check_free(value)
            except ValueError as error:
                self.fail(str(error), param, ctx)
        return value


PICTURE, PICTURES = Picture(), Picture(folders=True)


def progress() -> Callable[[str], None]:
    """A function that shows a line of progress on stderr; it does nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: click.echo(f"\r\x1b[K{text} ", nl=False, err=True)


def remember_force(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta["force"] = value


force_option = click.option(
    "--force",
    is_flag=True,
    is_eager=True,  # before the options that name files, which are checked when they are parsed
    expose_value=False,
    callback=remember_force,
    help="Replace files that exist already.",
)


def check_free(path: str | Path) -> bool:
    """Refuse a file that exists, unless --force was given; return whether it was."""
    from clearhead.files import check_target

    force = click.get_current_context().meta.get("force", False)
    check_target(path, force)
    return force


theme_option = click.option(
    "--theme", type=click.Choice(["light", "dark"]), default="light", show_default=True, help="Colours of pictures."
)
json_option = click.option("as_json", "--json", is_flag=True, help="Print JSON.")


def find_config(model: str, changes: tuple[str, ...] = ()) -> ModelConfig:
    """The config named `model`: a preset, a clearhead.json, a config.json of a known family, a folder with one of them,
    a GGUF file, or a model on the Hub (only its config is downloaded)."""
    from clearhead.configs import EncoderDecoderConfig, SequenceModelConfig, read
    from clearhead.configs.base import nearest
    from clearhead.configs.lora import read_adapter
    from clearhead.models.convert import CheckpointError
    from clearhead.models.hub import find_checkpoint
    from clearhead.models.presets import PRESETS, preset

    named = model in PRESETS and not Path(model).exists()  # a preset needs no network
    try:
        path = Path(model) if named else find_checkpoint(model, ["config.json"])
    except CheckpointError as error:
        if "/" not in model and "did you mean" in nearest(model, PRESETS):
            preset(model)  # a mistyped preset: its error names the nearest one
        raise click.UsageError(str(error)) from None
    config: Any
    if (path / "adapter.json").exists():
        return find_config(read_adapter(path).base, changes)
    if path.is_dir():
        found = [path / name for name in ("clearhead.json", "config.json") if (path / name).exists()]
        if not found:
            raise click.UsageError(f"{model} holds neither clearhead.json nor config.json")
        path = found[0]
    if path.suffix == ".gguf" and path.is_file():
        from clearhead.models.gguf.read import gguf_config

        config = gguf_config(path)
    elif path.is_file():
        config = from_hugging_face(path) or read(path)
    elif path.suffix in (".json", ".gguf") or "/" in model:
        raise click.UsageError(f"there is no file or folder {model}")
    else:
        config = preset(model)
    config = apply_changes(config, changes)
    if not isinstance(config, SequenceModelConfig | EncoderDecoderConfig):
        raise click.UsageError(f"{model} describes a {config.kind()}, not a whole model")
    return config


def apply_changes(config: Any, changes: tuple[str, ...]) -> Any:
    """The config with every `--set PATH=VALUE` applied."""
    values = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise click.UsageError(f"--set takes PATH=VALUE, not {change!r}")
        values[name.strip()] = parse_value(value.strip())
    return config.with_values(values)


def from_hugging_face(path: Path) -> ModelConfig | None:
    from clearhead.models.convert import family
    from clearhead.models.convert.fields import check_hf
    from clearhead.models.convert.multimodal import text_half
    from clearhead.typed_json import read_json

    data = read_json(path, Any)
    if not isinstance(data, dict) or "model_type" not in data or "kind" in data:
        return None
    check_hf(data, str(path))
    half = text_half(data)
    return family(half).config(half)


def parse_value(value: str) -> Any:
    """A JSON value, or the text itself if it is not JSON."""
    from clearhead.typed_json import JSONError, decode_json

    try:
        return decode_json(value, "the value", Any)
    except JSONError:
        return value


def print_json(data: Any) -> None:
    """Print JSON; NaN and infinity, which JSON does not have, become null."""
    click.echo(json.dumps(replace_infinite(data), indent=2, ensure_ascii=False, allow_nan=False))


def replace_infinite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: replace_infinite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [replace_infinite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data


def echo_text(text: str, nl: bool = True) -> None:
    """Print text from a model or a file. A terminal gets control characters as escapes; a pipe gets the exact text."""
    from clearhead.typed_json import escape_controls

    click.echo(escape_controls(text) if sys.stdout.isatty() else text, nl=nl)


def console() -> Console:
    """Standard output without markup, so that a name such as `[bold]` is printed as it is. Respects NO_COLOR."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def check_free_folder(folder: str) -> bool:
    """Refuse a folder that holds a run, or without --force a model; return whether --force was given."""
    from clearhead.training.run import Run

    force = click.get_current_context().meta["force"]
    held = [name for name in Run(folder).find_results() if not force or name in ("recipe.json", "metrics.jsonl")]
    if held:
        way = "choose another folder" if force or held[0] == "recipe.json" else "choose another folder, or add --force"
        raise ValueError(f"{folder} holds {held[0]}, so there is a model or a run already; {way}")
    return force
