"""`clearhead …` and `python -m clearhead …`. Commands are imported when they are called, so `--help` stays quick."""

from __future__ import annotations

import re
import signal
import sys
from importlib import import_module

import click

from clearhead import __version__

COMMANDS = {
    "presets": "List the architectures that have a name, or print one as clearhead.json.",
    "trace": "Show every step of a model with its shapes, parameters and FLOPs.",
    "cost": "Count parameters, FLOPs and memory without allocating anything.",
    "inspect": "Look into a model: attention maps, what heads do, logit lens, ablation, patching.",
    "compare": "Measure how mixers and models grow with the length, side by side.",
    "positions": "Draw how positions are told apart: sinusoids, rotary and its stretching, ALiBi.",
    "lab": "Put claims about the Transformer to the test: experiments with tables and figures.",
    "check": "Check attention, norms, masks and models that you wrote, and name what is wrong.",
    "exercises": "Write starter files for every part, in the order a learner needs them.",
    "recipes": "List the training runs that have a name, or print one as recipe.json.",
    "train": "Train a model on your text, from a recipe.",
    "runs": "List the runs of a folder.",
    "plot": "Draw the loss curves of runs.",
    "scaling": "Fit scaling laws to runs, plan a budget by them, or train the runs.",
    "generate": "Write on from prompts with a trained model.",
    "translate": "Translate line by line with an encoder–decoder.",
    "chat": "Converse with a trained model.",
    "quantize": "Write a model in fewer bits, and say what that costs on a text.",
    "eval": "Measure how well a model foresees a text, or translates: perplexity, BLEU.",
    "embed": "Print vectors of texts.",
    "fill-mask": "Fill in masked words.",
    "classify": "Classify texts or images.",
    "export": "Write a model for another program: transformers, llama.cpp, onnxruntime.",
    "doctor": "Look at this machine: versions, speed, and which precisions really work.",
    "completion": "Print the completion script for a shell.",
}


class LazyGroup(click.Group):
    """Knows its commands by name and help; imports `clearhead.cli.<name>` for the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return import_module(f"clearhead.cli.{name.replace('-', '_')}").command if name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

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
    """The Transformer, built, trained, run, seen into and measured."""


def main() -> None:
    """Run the command line; bad input ends in one sentence on stderr and exit code 1, bad usage in exit code 2."""
    try:
        code = cli(prog_name="clearhead", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        click.echo("clearhead: interrupted", err=True)
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        sys.stderr.close()
        code = 1
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        sentence = told(error)
        if sentence is None:
            raise
        click.echo(f"clearhead: {sentence}", err=True)
        code = 1
    sys.exit(code)


def told(error: Exception) -> str | None:
    """What was wrong with the input, or with the machine for it; nothing where the fault is ours."""
    if isinstance(error, MemoryError) or re.search("not enough memory|out of memory|allocate memory", str(error)):
        asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
        return f"there is not enough memory{f' for {asked[1]} more' if asked else ''}; ask for less at once"
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror.lower() if error.filename is None else f"{error.filename}: {error.strerror.lower()}"
    return str(error) if isinstance(error, ValueError | OSError) else None
