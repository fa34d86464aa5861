"""`clearhead eval`: how well a model foresees a text, or translates."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import beam_options, json_option, load_model, load_writer, print_json, translated, weights_option

if TYPE_CHECKING:
    from clearhead.models.model import Model


@click.command("eval")
@click.argument("model")
@click.argument("files", nargs=-1)
@click.option("--context", type=int, default=None, help="Tokens read at once.  [default: the model's own, or 1024]")
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    default=None,
    help="Tokens from one window to the next.  [default: half of it]",
)
@click.option(
    "--pairs",
    multiple=True,
    metavar="PATH",
    help="Sources and their translations, which are scored: a .tsv, or two files, each with a --pairs.",
)
@click.option("--language", default=None, help="Of the translations, for tokens.  [default: the file's ending, or en]")
@beam_options
@weights_option
@json_option
def command(
    model: str,
    files: tuple[str, ...],
    context: int | None,
    stride: int | None,
    pairs: tuple[str, ...],
    language: str | None,
    beam: int,
    length_penalty: float,
    batch: int,
    weights: str | None,
    as_json: bool,
) -> None:
    """Print the perplexity of MODEL on the text of each of FILES, and its bits per byte.

    A long text is read in windows of the context; each token is counted once, in the first window that holds it.
    Bits per byte compares models of different tokenizers; perplexity is per token and does not.

    With --pairs, MODEL is an encoder–decoder that translates the sources; BLEU and chrF are printed with sacreBLEU's
    signatures and, because papers differ, BLEU of lower-cased tokens too.

    \b
    clearhead eval runs/mine held_out.txt --stride 128 --json
    clearhead eval runs/translate --pairs test.en.gz --pairs test.de.gz
    """
    if not files and not pairs:
        raise click.UsageError("give FILES, or --pairs")
    loaded = (load_model if pairs else load_writer)(model, weights)
    told: dict[str, Any] = {"model": model}
    if files:
        told["files"] = perplexities(loaded, files, context, stride)
    if pairs:
        told["pairs"] = scored(loaded, pairs, language or language_of(pairs), beam, length_penalty, batch)
    if as_json:
        print_json(told)
        return
    for file, one in told.get("files", {}).items():
        click.echo(
            f"{file}: perplexity {one['perplexity']:.4g}, {one['bits_per_byte']:.4f} bits per byte "
            f"({one['tokens']:,} tokens, {one['bytes']:,} bytes; context {one['context']}, stride {one['stride']})"
        )
    if pairs:
        click.echo(f"{told['pairs']['sentences']:,} sentences, {told['pairs']['exact']:.1%} as they were wanted")
        for one in told["pairs"]["scores"]:
            click.echo(f"{one['name']} {one['score']:.2f}  {one['signature']}")


def perplexities(
    model: Model, files: tuple[str, ...], context: int | None, stride: int | None
) -> dict[str, dict[str, Any]]:
    from clearhead.measure.perplexity import perplexity_of

    found = {}
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
        one = perplexity_of(model, text, context=context, stride=stride)
        sums = {"loss": one.loss, "perplexity": one.perplexity, "bits_per_byte": one.bits_per_byte}
        found[file] = asdict(one) | sums
    return found


def scored(
    model: Model, paths: tuple[str, ...], language: str, beam: int, length_penalty: float, batch: int
) -> dict[str, Any]:
    """The sources translated, and the scores of that."""
    from clearhead.data.pairs import pairs
    from clearhead.measure.bleu import scores

    lines = [(source.strip(), target.strip()) for source, target in pairs(paths).read()]
    if not any(map(all, lines)):
        raise ValueError(f"there are no pairs in {', '.join(paths)}")
    found = translated(model, [source for source, _ in lines], beam, length_penalty, batch)
    known = [(best.text, target) for (source, target), (best,) in zip(lines, found, strict=True) if source or target]
    written, wanted = ([pair[side] for pair in known] for side in (0, 1))
    return {
        "sentences": len(known),
        "beam": beam,
        "length_penalty": length_penalty,
        "exact": sum(one == other for one, other in known) / len(known),
        "scores": [asdict(score) for score in scores(written, wanted, language)],
    }


def language_of(paths: tuple[str, ...]) -> str:
    """`test.de.gz` is German: the last file's ending, where it is a language's two letters."""
    ending = Path(paths[-1].removesuffix(".gz")).suffix[1:]
    return ending if len(ending) == 2 and ending.isalpha() else "en"
