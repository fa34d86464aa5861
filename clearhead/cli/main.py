"""`clearhead …` and `python -m clearhead …`. A command is imported when it is called, so `--help` stays quick."""

from __future__ import annotations

import re
import signal
import sys
from importlib import import_module

import click

from clearhead import __version__

GROUPS = {
    "Learn": {
        "exercises": "Write starter files for every part, in learning order.",
        "check": "Check code that you wrote, and explain its mistakes.",
        "trace": "Show every step of a model with shapes and FLOPs.",
        "positions": "Plot position encodings: sinusoidal, rotary, ALiBi.",
        "lab": "Run experiments that test claims about Transformers.",
    },
    "Train": {
        "train": "Train a model on your text, images or sentence pairs.",
        "recipes": "List the named training recipes, or print one as recipe.json.",
        "runs": "List the training runs in a folder.",
        "plot": "Plot the loss curves of runs.",
        "scaling": "Fit scaling laws, plan a budget, or train a sweep.",
    },
    "Use": {
        "generate": "Generate text from prompts.",
        "chat": "Chat with a model in the terminal.",
        "serve": "Serve models over HTTP with the OpenAI API.",
        "translate": "Translate text line by line with an encoder–decoder.",
        "transcribe": "Transcribe speech with a Whisper model.",
        "embed": "Compute embeddings of texts.",
        "classify": "Classify texts or images.",
        "fill-mask": "Predict masked words.",
        "quantize": "Store a model in fewer bits, and measure the loss.",
        "export": "Convert a model for transformers, llama.cpp or onnxruntime.",
        "convert": "Convert pickled weights (pytorch_model.bin) to safetensors.",
    },
    "Understand": {
        "studio": "Open the studio: look inside models in the browser.",
        "inspect": "Look inside a model: attention, lens, ablation, patching.",
        "eval": "Measure perplexity on a text, or BLEU of translations.",
        "compare": "Measure how time and memory grow with the length.",
        "cost": "Count parameters, FLOPs and memory without allocating anything.",
        "presets": "List the named architectures, or print one as clearhead.json.",
    },
    "Machine": {
        "doctor": "Check this machine: versions, speed, and which precisions work.",
        "completion": "Print the completion script for bash, zsh or fish.",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


class LazyGroup(click.Group):
    """A group that imports `clearhead.cli.<name>` only for the command that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return import_module(f"clearhead.cli.{name.replace('-', '_')}").command if name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from clearhead.configs.base import nearest

            ctx.fail(f"there is no command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="clearhead")
def cli() -> None:
    """Build, train, run, look inside and measure Transformers.

    \b
    clearhead train --data my_text.txt --out runs/mine
    clearhead generate runs/mine "Once upon a time"
    clearhead COMMAND --help        explains a command, with examples
    """


def main() -> None:
    """Run the command line. Bad input prints one sentence and exits with 1; wrong usage exits with 2."""
    try:
        code = cli(prog_name="clearhead", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        click.echo("clearhead: interrupted", err=True)
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has exited, as `head` does
        sys.stderr.close()
        code = 1
    except Exception as error:
        sentence = describe_error(error)
        if sentence is None:
            raise
        click.echo(f"clearhead: {sentence}", err=True)
        code = 1
    sys.exit(code)


def describe_error(error: Exception) -> str | None:
    """One sentence for an error of the input or of the machine; None if the fault is in Clearhead."""
    from clearhead.extras import torch_missing
    from clearhead.typed_json import escape_controls

    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "torch":
        return torch_missing("this command")
    if isinstance(error, MemoryError) or re.search("not enough memory|out of memory|allocate memory", str(error)):
        wanted = re.search(r"allocate ([\d.]+ \w+)", str(error))
        size = f" to allocate {wanted[1]}" if wanted else ""
        return f"there is not enough memory{size}; try a smaller batch, length or model"
    if isinstance(error, OSError) and error.strerror is not None:
        problem = error.strerror.lower()
        return problem if error.filename is None else escape_controls(f"{error.filename}: {problem}")
    return escape_controls(str(error)) if isinstance(error, ValueError | OSError) else None
