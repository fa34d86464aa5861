"""`clearhead generate`: generate text from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .options import (
    LENGTH_PENALTY,
    cache_option,
    decoding_options,
    device_option,
    echo_text,
    file_options,
    gather_texts,
    json_option,
    length_penalty,
    load_writer,
    print_json,
    require_texts,
    tokenizer_option,
    weights_option,
)

if TYPE_CHECKING:
    from clearhead.configs import Cache, LengthPenalty
    from clearhead.generate.complete import Completion, TextStream


@click.command("generate")
@click.argument("model")
@click.argument("prompts", nargs=-1)
@file_options
@decoding_options
@click.option("--beams", type=int, default=None, help="Beam search with this many beams.")
@click.option(
    "--length-penalty",
    type=length_penalty,
    default=None,
    metavar="RULE",
    help=f"With --beams: {LENGTH_PENALTY[0].lower()}{LENGTH_PENALTY[1:]}",
)
@click.option(
    "--early-stopping",
    type=click.Choice(["true", "false", "never"]),
    default=None,
    help="When a beam search stops: with enough texts (true), when the rest looks (false) or must be worse (never).",
)
@click.option("-n", "n", type=int, default=None, help="Number of texts per prompt.")
@click.option("--batch", type=click.IntRange(min=1), default=16, show_default=True, help="Prompts per batch.")
@click.option(
    "--draft",
    default=None,
    metavar="MODEL",
    help="A smaller model with the same tokenizer that proposes tokens (speculative decoding).",
)
@click.option(
    "--draft-tokens", type=int, default=4, show_default=True, help="How many tokens the draft proposes at a time."
)
@click.option("--json-schema", default=None, metavar="FILE", help="Write JSON that fits the JSON schema in FILE.")
@click.option("--regex", default=None, help="Write text that matches this regular expression.")
@click.option("--echo", is_flag=True, help="Print the prompt before its continuation.")
@click.option("--logprobs", is_flag=True, help="With --json, also print the log-probability of every token.")
@tokenizer_option
@device_option
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
    json_schema: str | None,
    regex: str | None,
    echo: bool,
    logprobs: bool,
    tokenizer: str | None,
    weights: str | None,
    cache: Cache | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text with MODEL (a checkpoint folder, a run or a GGUF file) after each of PROMPTS.

    Decoding is greedy by default, unless the checkpoint's generation_config.json asks for sampling. Without a prompt
    the text begins with the model's start token. The prompt - is read from standard input. For an encoder–decoder the
    prompt is the source. Only the generated text goes to standard output.

    \b
    clearhead generate runs/mine "To be" --max-new-tokens 50
    clearhead generate runs/mine "To be" --temperature 0.8 --top-p 0.95 --seed 1 -n 3
    clearhead generate runs/mine --file questions.txt --lines --beams 4 --json
    clearhead generate path/to/model "A cat as JSON:" --json-schema cat.schema.json
    """
    wanted = gather_texts(prompts, files, lines)
    wanted = require_texts(wanted) if prompts or files else [""]
    options |= {"early_stopping": {"true": True, "false": False}.get(early_stopping or "", early_stopping)}
    options |= {"length_penalty": length_penalty, "stop": options["stop"] or None}
    loaded = load_writer(model, weights, cache)
    from clearhead.generate.complete import TextGenerator, TextStream, generate
    from clearhead.generate.speculate import Draft
    from clearhead.tokenize import Tokenizer

    draft_model = None if draft is None else Draft(load_writer(draft), draft_tokens)
    given = None if tokenizer is None else Tokenizer.load(tokenizer)
    generator = TextGenerator.of(loaded, given, draft_model, **options)
    grammar = None
    if json_schema is not None or regex is not None:
        from clearhead.generate.grammar import read_grammar

        if generator.config.beams > 1:
            raise click.UsageError("--json-schema and --regex do not work with --beams; drop one of them")
        grammar = read_grammar(generator, json_schema, regex)
    single = len(wanted) == 1 and generator.config.n == generator.config.beams == 1
    if single and not as_json and grammar is None:
        echo_text(wanted[0] if echo else "", nl=False)
        pieces = TextStream(generator, generator.encode(wanted[0]))
        for piece in pieces:
            echo_text(piece, nl=False)
        click.echo()
        print_acceptance([pieces])
        return
    options |= {"seed": generator.config.seed, "logprobs": logprobs, "batch": batch, "grammar": grammar}
    found = generate(loaded, wanted, tokenizer=given, draft=draft_model, **options)
    print_acceptance(found)
    if as_json:
        seed = {"seed": generator.config.seed} if generator.config.sampling else {}
        print_json({"model": model} | seed | {"completions": [completion_json(wanted, one) for one in found]})
    else:
        for one in found:
            echo_text((wanted[one.prompt] if echo else "") + one.text)


def print_acceptance(rows: Sequence[Completion | TextStream]) -> None:
    """With a draft, print how many of its tokens were accepted."""
    drafted, accepted = (sum(getattr(one, name) or 0 for one in rows) for name in ("drafted", "accepted"))
    if drafted:
        click.echo(f"draft: {accepted} of {drafted} tokens accepted ({accepted / drafted:.0%})", err=True)


def completion_json(prompts: list[str], one: Completion) -> dict[str, Any]:
    """The fields of a completion that are set, with the text of its prompt."""
    fields = {name: value for name, value in asdict(one).items() if value is not None}
    return fields | {"prompt": prompts[one.prompt]}
