"""`clearhead generate`: how a model goes on from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .options import (
    cache_option,
    decoding_options,
    file_options,
    gather,
    json_option,
    length_penalty,
    load_writer,
    print_json,
    some,
    weights_option,
)

if TYPE_CHECKING:
    from clearhead.configs import Cache, LengthPenalty
    from clearhead.generate.complete import Completion
    from clearhead.generate.row import Row


@click.command("generate")
@click.argument("model")
@click.argument("prompts", nargs=-1)
@file_options
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
@click.option("--batch", type=click.IntRange(min=1), default=16, show_default=True, help="Prompts worked on together.")
@click.option("--draft", default=None, metavar="MODEL", help="A smaller model of the same tokens that writes ahead.")
@click.option("--draft-tokens", type=int, default=4, show_default=True, help="How many tokens it writes ahead.")
@click.option("--echo", is_flag=True, help="Print the prompt too, before what goes on from it.")
@click.option("--logprobs", is_flag=True, help="With --json: the log-probability of every token.")
@weights_option
@cache_option
@json_option
def command(
    model: str,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    lines: bool,
    early_stopping: str | None,
    length_penalty: LengthPenalty | None,
    batch: int,
    draft: str | None,
    draft_tokens: int,
    echo: bool,
    logprobs: bool,
    weights: str | None,
    cache: Cache | None,
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
    wanted = some(wanted) if prompts or files else [""]
    options |= {"early_stopping": {"true": True, "false": False}.get(early_stopping or "", early_stopping)}
    options |= {"length_penalty": length_penalty, "stop": options["stop"] or None}
    loaded = load_writer(model, weights, cache)
    from clearhead.generate.complete import Task, generate, pieces
    from clearhead.generate.speculate import Draft

    ahead = None if draft is None else Draft(load_writer(draft), draft_tokens)
    task = Task.of(loaded, draft=ahead, **options)
    if len(wanted) == 1 and task.config.n == task.config.beams == 1 and not as_json:
        click.echo(wanted[0] if echo else "", nl=False)
        ids = task.ids(wanted[0])
        row = task.row(0, ids)
        for piece in pieces(task, ids, row):
            click.echo(piece, nl=False)
        click.echo()
        say_accepted([row])
        return
    options["seed"] = task.config.seed
    found = generate(loaded, wanted, draft=ahead, logprobs=logprobs, batch=batch, **options)
    say_accepted(found)
    if as_json:
        drawn = {"seed": task.config.seed} if task.config.draws else {}
        print_json({"model": model} | drawn | {"completions": [described(wanted, one) for one in found]})
    else:
        for one in found:
            click.echo((wanted[one.prompt] if echo else "") + one.text)


def say_accepted(written: Sequence[Completion | Row]) -> None:
    """With a draft, how much of what it proposed was kept."""
    drafted, accepted = (sum(getattr(one, name) or 0 for one in written) for name in ("drafted", "accepted"))
    if drafted:
        click.echo(f"draft: {accepted} of {drafted} tokens kept, {accepted / drafted:.0%}", err=True)


def described(prompts: list[str], one: Completion) -> dict[str, Any]:
    told = {name: value for name, value in asdict(one).items() if value is not None}
    return told | {"prompt": prompts[one.prompt]}
