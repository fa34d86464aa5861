"""Dates in many languages and their ISO form: pairs that need no file, from the calendars that Babel knows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any

import numpy as np

from .corpus import DataError
from .hashing import keys, mix
from .pairs import Pair, Pairs
from .split import exact_share, is_validation

LANGUAGES = (
    "en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "nb", "fi", "et", "lv", "lt", "pl", "cs", "sk", "sl", "hr",
    "hu", "ro", "bg", "el", "tr", "ru", "uk", "ca", "eu", "gl", "ga", "sq", "is", "id", "ms", "vi", "sw", "zh", "ja",
    "ko", "ka",
)  # fmt: skip
READ, WRITTEN = ("medium", "long", "full"), ("medium", "long")  # a full date has its weekday, which ISO's does not say
FIRST, DAYS = date(1900, 1, 1), 73_049  # to 31 December 2099
COUNT = 60_000  # pairs to train on
HELD_OUT = 2_000

Form = tuple[str, str]  # language and style


def dates(share: float = 0.1, seed: int = 0) -> tuple[Pairs, Pairs]:
    """Dates to be read, "12 mars 2019" to "2019-03-12", and as many to be written, "fr long 2019-03-12" to
    "12 mars 2019": pairs to train on, and pairs of days that are in none of these.

    Of each language those styles are taken that have one reading: with a named month, or year first.
    """
    try:
        from babel.dates import format_date
    except ImportError:
        raise DataError(
            "the built-in dates need Babel: pip install 'clearhead[translate]', or give pairs of your own by --data"
        ) from None
    read, write = ([(language, style) for language in LANGUAGES for style in styles] for styles in (READ, WRITTEN))
    read, write = ([form for form in forms if one_reading(*form)] for forms in (read, write))
    exact = exact_share(share)
    held_out = np.array([is_validation(day, exact, seed) for day in range(DAYS)])

    def drawn(days: np.ndarray, count: int) -> Iterator[Pair]:
        numbers = keys(seed, np.arange(count))
        for i, (number, other) in enumerate(zip(numbers.tolist(), mix(numbers).tolist(), strict=True)):
            day = FIRST + timedelta(days=int(days[number % len(days)]))
            forms = write if i % 2 else read
            language, style = forms[other % len(forms)]
            text, iso = format_date(day, style, locale=language), day.isoformat()
            yield (f"{language} {style} {iso}", text) if i % 2 else (text, iso)

    made = [list(drawn(np.flatnonzero(held_out == held), count)) for held, count in ((False, COUNT), (True, HELD_OUT))]
    summary = f"dates of two centuries in {len(LANGUAGES)} languages"
    return Pairs(lambda: iter(made[0]), summary), Pairs(lambda: iter(made[1]), summary)


def one_reading(language: str, style: str) -> bool:
    """Whether no reader can take the month for the day: the month has a name, or the year comes first."""
    from babel import Locale

    formats: Any = Locale.parse(language).date_formats
    pattern = str(formats[style].pattern)
    return "MMM" in pattern or pattern.lstrip("'").startswith("y")
