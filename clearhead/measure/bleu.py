"""Score translations against references: sacreBLEU's BLEU and chrF, and the tokenized BLEU of older papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from clearhead.extras import install_command

WORDS = {"zh": "zh", "ja": "char"}  # sacreBLEU's tokenizers for languages without spaces between words


@dataclass(frozen=True)
class TranslationScore:
    """A score, and the signature that says how it was computed."""

    name: str
    score: float
    signature: str


def scores(written: Sequence[str], wanted: Sequence[str], language: str = "en") -> list[TranslationScore]:
    """Return all scores: BLEU and chrF of the unchanged texts, and BLEU of their lower-cased tokens.

    language  the target language; selects the abbreviations of the Moses tokenizer and how sacreBLEU splits words
    """
    plain = bleu(written, wanted, tokenize=WORDS.get(language, "13a"))
    return [plain, chrf(written, wanted), tokenised_bleu(written, wanted, language)]


def bleu(written: Sequence[str], wanted: Sequence[str], **options: Any) -> TranslationScore:
    """Compute BLEU (Papineni et al. 2002) with sacreBLEU (Post 2018), which splits the texts into words itself."""
    return corpus_score(import_extra("sacrebleu").BLEU(**options), "BLEU", written, wanted)


def chrf(written: Sequence[str], wanted: Sequence[str]) -> TranslationScore:
    """Compute chrF2, the F-score of character n-grams (Popović 2015)."""
    return corpus_score(import_extra("sacrebleu").CHRF(), "chrF2", written, wanted)


def tokenised_bleu(written: Sequence[str], wanted: Sequence[str], language: str = "en") -> TranslationScore:
    """Compute BLEU after lower-casing, punctuation normalization and Moses tokenization, as Multi30k's authors do.

    On such tokens sacreBLEU equals `multi-bleu.perl`. Do not compare this score with BLEU of plain texts.
    """
    moses, both = Moses(language), (written, wanted)
    # force: do not warn that the text is already tokenized
    metric = import_extra("sacrebleu").BLEU(lowercase=True, tokenize="none", force=True)
    cut = [[moses(text) for text in texts] for texts in both]
    found = corpus_score(metric, "BLEU, lower-cased and tokenised", *cut)
    version = import_extra("sacremoses").__version__
    return TranslationScore(found.name, found.score, f"{found.signature}|norm|moses:{language}:{version}")


class Moses:
    """Lower-case a text, normalize its punctuation and tokenize it with Moses' rules."""

    def __init__(self, language: str) -> None:
        package = import_extra("sacremoses")
        self.normalizer, self.tokenizer = package.MosesPunctNormalizer(language), package.MosesTokenizer(language)

    def __call__(self, text: str) -> str:
        return self.tokenizer.tokenize(self.normalizer.normalize(text.lower()), return_str=True)


def corpus_score(metric: Any, name: str, written: Sequence[str], wanted: Sequence[str]) -> TranslationScore:
    if len(written) != len(wanted):
        raise ValueError(f"there are {len(written):,} translations of {len(wanted):,} texts")
    found = metric.corpus_score(list(written), [list(wanted)])
    return TranslationScore(name, found.score, str(metric.get_signature()))


def import_extra(package: str) -> Any:
    """Import a package of the extra `translate`."""
    try:
        return import_module(package)
    except ImportError:
        raise ValueError(f"scoring translations needs {package}: {install_command('translate')}") from None
