"""`clearhead generate`: how a model goes on from prompts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .options import decoding_options, json_option, length_penalty, load_model, print_json, read_text

if TYPE_CHECKING:
    from clearhead.configs import LengthPenalty
    from clearhead.generate.complete import Completion


@click.command("generate")
@click.argument("model")
@click.argument("prompts", nargs=-1)
@click.option("files", "--file", "-f", multiple=True, metavar="PATH", help="A prompt from a file; - for stdin.")
@click.option("--lines", is_flag=True, help="Every line of the files is a prompt of its own.")
@decoding_options
@click.option("--beams", type=int, default=None, help="Beam search of this width, instead of one token at a time.")
@click.option(
    "--length-penalty",
    type=length_penalty,
    default=None,
    metavar="RULE",
    help="What a beam's log-probability is divided by: power:1 (|y|^1) or wu:0.6.",
)
@click.option(
    "--early-stopping",
    type=click.Choice(["true", "false", "never"]),
    default=None,
    help="When a beam search ends: at as many texts as beams; when the rest looks worse; when it must be worse.",
)
@click.option("-n", "n", type=int, default=None, help="Texts for each prompt.")
@click.option("--batch", type=int, default=16, show_default=True, help="Prompts worked on together.")
@click.option("--echo", is_flag=True, help="Print the prompt too, before what goes on from it.")
@click.option("--logprobs", is_flag=True, help="With --json: the log-probability of every token.")
@json_option
def command(
    model: str,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    lines: bool,
    early_stopping: str | None,
    length_penalty: LengthPenalty | None,
    batch: int,
    echo: bool,
    logprobs: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Print how MODEL, a checkpoint folder, goes on from each of PROMPTS, and nothing else.

    Greedy, unless the checkpoint or an option says otherwise. Without a prompt it begins with the model's start token.
    A prompt that is - is read from standard input. An encoder–decoder writes a target for each prompt.

    \b
    clearhead generate runs/mine "To be" --max-new-tokens 50
    clearhead generate runs/mine "To be" --temperature 0.8 --top-p 0.95 --seed 1 -n 3
    clearhead generate runs/mine --file questions.txt --lines --beams 4 --json
    """
    wanted = gather(prompts, files, lines)
    options |= {"early_stopping": {"true": True, "false": False}.get(early_stopping or "", early_stopping)}
    options |= {"length_penalty": length_penalty, "stop": options["stop"] or None}
    loaded = load_model(model)
    from clearhead.generate.complete import Task, generate, stream

    task = Task.of(loaded, **options)
    if len(wanted) == 1 and task.config.n == task.config.beams == 1 and not as_json:
        click.echo(wanted[0] if echo else "", nl=False)
        for piece in stream(task, task.ids(wanted[0])):
            click.echo(piece, nl=False)
        click.echo()
        return
    found = generate(loaded, wanted, logprobs=logprobs, batch=batch, **options | {"seed": task.config.seed})
    if as_json:
        drawn = {"seed": task.config.seed} if task.config.draws else {}
        print_json({"model": model} | drawn | {"completions": [described(wanted, one) for one in found]})
    else:
        for one in found:
            click.echo((wanted[one.prompt] if echo else "") + one.text)


def gather(prompts: tuple[str, ...], files: tuple[str, ...], lines: bool) -> list[str]:
    """The prompts of the command line, then those of the files; an empty one where there is none."""
    if lines and not files:
        raise click.UsageError("--lines says how --file is read, and there is no --file")
    found = [read_text("-") if prompt == "-" else prompt for prompt in prompts]
    for file in files:
        text = read_text(file)
        found += text.splitlines() if lines else [text]
    return found or [""]


def described(prompts: list[str], one: Completion) -> dict[str, Any]:
    told = {name: value for name, value in asdict(one).items() if value is not None}
    return told | {"prompt": prompts[one.prompt]}
