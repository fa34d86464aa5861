"""How near translations are to those that people made: the figures of sacreBLEU, and the one that older papers give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from clearhead.extras import install_command

WORDS = {"zh": "zh", "ja": "char"}  # how sacreBLEU splits what has no spaces between words


@dataclass(frozen=True)
class TranslationScore:
    """A figure, and the signature that says how it was taken."""

    name: str
    score: float
    signature: str


def scores(written: Sequence[str], wanted: Sequence[str], language: str = "en") -> list[TranslationScore]:
    """Every figure, each named: BLEU and chrF of the texts as they are, and BLEU of their lower-cased tokens.

    language  of the target: whose abbreviations Moses' tokenizer knows, and whether words have spaces between them
    """
    plain = bleu(written, wanted, tokenize=WORDS.get(language, "13a"))
    return [plain, chrf(written, wanted), tokenised_bleu(written, wanted, language)]


def bleu(written: Sequence[str], wanted: Sequence[str], **options: Any) -> TranslationScore:
    """BLEU (Papineni et al. 2002) as sacreBLEU takes it (Post 2018): of texts, which it splits into words itself."""
    return corpus_score(import_extra("sacrebleu").BLEU(**options), "BLEU", written, wanted)


def chrf(written: Sequence[str], wanted: Sequence[str]) -> TranslationScore:
    """chrF2: the F-score of character n-grams  (Popović 2015)."""
    return corpus_score(import_extra("sacrebleu").CHRF(), "chrF2", written, wanted)


def tokenised_bleu(written: Sequence[str], wanted: Sequence[str], language: str = "en") -> TranslationScore:
    """BLEU of both sides lower-cased, their punctuation made alike, and cut by Moses' rules, as Multi30k's authors do.

    Of such tokens sacreBLEU's count is that of `multi-bleu.perl`; it cannot be compared with BLEU of plain texts.
    """
    moses, both = Moses(language), (written, wanted)
    # force: it is right that the text is tokens already
    metric = import_extra("sacrebleu").BLEU(lowercase=True, tokenize="none", force=True)
    cut = [[moses(text) for text in texts] for texts in both]
    found = corpus_score(metric, "BLEU, lower-cased and tokenised", *cut)
    version = import_extra("sacremoses").__version__
    return TranslationScore(found.name, found.score, f"{found.signature}|norm|moses:{language}:{version}")


class Moses:
    """Moses' normalisation of punctuation and its tokenizer, of lower-cased text."""

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
    """A package of the extra `translate`."""
    try:
        return import_module(package)
    except ImportError:
        raise ValueError(f"scoring translations needs {package}: {install_command('translate')}") from None
