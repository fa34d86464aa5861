"""`clearhead eval`: perplexity on texts, and BLEU on translations."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    beam_options,
    device_option,
    json_option,
    load_model,
    load_writer,
    print_json,
    translate_texts,
    weights_option,
)

if TYPE_CHECKING:
    from clearhead.configs import LengthPenalty
    from clearhead.models.model import Model


@click.command("eval")
@click.argument("model")
@click.argument("files", nargs=-1)
@click.option("--context", type=int, default=None, help="Tokens per window.  [default: the model's context, or 1024]")
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    default=None,
    help="Tokens from one window to the next.  [default: half of --context]",
)
@click.option(
    "--pairs",
    multiple=True,
    metavar="PATH",
    help="Score translations of sentence pairs: a .tsv, or two files (give --pairs twice).",
)
@click.option(
    "--language",
    default=None,
    help="Language of the translations, for BLEU's tokenizer.  [default: from the file name, or en]",
)
@beam_options
@device_option
@weights_option
@json_option
def command(
    model: str,
    files: tuple[str, ...],
    context: int | None,
    stride: int | None,
    pairs: tuple[str, ...],
    language: str | None,
    beams: int,
    length_penalty: LengthPenalty,
    batch: int,
    weights: str | None,
    as_json: bool,
) -> None:
    """Print the perplexity and bits per byte of MODEL on each of FILES.

    A long text is read in overlapping windows; each token is scored once, in the first window that contains it.
    Bits per byte can be compared between models with different tokenizers; perplexity is per token and cannot.

    A .jsonl or a table is read as `clearhead train` reads it: of conversations, only the answers are scored.

    With --pairs, MODEL is an encoder–decoder that translates the sources. BLEU and chrF are printed with sacreBLEU's
    signatures, and BLEU of lower-cased tokens too, because papers differ.

    \b
    clearhead eval runs/mine held_out.txt --stride 128 --json
    clearhead eval runs/translate --pairs test.en.gz --pairs test.de.gz
    """
    if not files and not pairs:
        raise click.UsageError("give FILES, or --pairs")
    loaded = (load_model if pairs else load_writer)(model, weights)
    result: dict[str, Any] = {"model": model}
    if files:
        result["files"] = perplexities(loaded, files, context, stride)
    if pairs:
        result["pairs"] = score_pairs(loaded, pairs, language or language_of(pairs), beams, length_penalty, batch)
    if as_json:
        print_json(result)
        return
    for file, one in result.get("files", {}).items():
        click.echo(
            f"{file}: perplexity {one['perplexity']:.4g}, {one['bits_per_byte']:.4f} bits per byte "
            f"({one['tokens']:,} tokens, {one['bytes']:,} bytes; context {one['context']}, stride {one['stride']})"
        )
    if pairs:
        click.echo(f"{result['pairs']['sentences']:,} sentences, {result['pairs']['exact']:.1%} exact matches")
        for one in result["pairs"]["scores"]:
            click.echo(f"{one['name']} {one['score']:.2f}  {one['signature']}")


def perplexities(
    model: Model, files: tuple[str, ...], context: int | None, stride: int | None
) -> dict[str, dict[str, Any]]:
    from warnings import warn

    from clearhead.data.sources import decode_text, documents, open_file, suffix_of
    from clearhead.data.tables import SUFFIXES
    from clearhead.measure.perplexity import perplexity_of, perplexity_of_documents

    found = {}
    for file in files:
        path = Path(file)
        if suffix_of(path) in (".jsonl", *SUFFIXES):
            one = perplexity_of_documents(model, documents([path]), context=context, stride=stride)
        else:
            with open_file(path) as opened:
                text = "".join(decode_text(opened, file, warn))
            one = perplexity_of(model, text, context=context, stride=stride)
        sums = {"loss": one.loss, "perplexity": one.perplexity, "bits_per_byte": one.bits_per_byte}
        found[file] = asdict(one) | sums
    return found


def score_pairs(
    model: Model, paths: tuple[str, ...], language: str, beams: int, length_penalty: LengthPenalty, batch: int
) -> dict[str, Any]:
    """Translate the sources and score the translations."""
    from clearhead.data.pairs import pairs
    from clearhead.measure.bleu import scores

    lines = [(source.strip(), target.strip()) for source, target in pairs(paths).read()]
    if not any(map(all, lines)):
        raise ValueError(f"there are no pairs in {', '.join(paths)}")
    found = translate_texts(model, [source for source, _ in lines], beams, length_penalty, batch)
    known = [(best.text, target) for (source, target), (best,) in zip(lines, found, strict=True) if source or target]
    written, wanted = ([pair[side] for pair in known] for side in (0, 1))
    return {
        "sentences": len(known),
        "beams": beams,
        "length_penalty": length_penalty.to_dict(),
        "exact": sum(one == other for one, other in known) / len(known),
        "scores": [asdict(score) for score in scores(written, wanted, language)],
    }


def language_of(paths: tuple[str, ...]) -> str:
    """The language in the last file's name: `de` for `test.de.gz`; `en` if there is none."""
    ending = Path(paths[-1].removesuffix(".gz")).suffix[1:]
    return ending if len(ending) == 2 and ending.isalpha() else "en"
