"""Built-in pairs: dates in many languages and in ISO form, from the locale data of Babel."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any

import numpy as np

from clearhead.extras import install_command

from .corpus import DataError
from .hashing import derive_keys, mix
from .pairs import Pair, Pairs
from .split import exact_share, is_validation

LANGUAGES = (
    "en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "nb", "fi", "et", "lv", "lt", "pl", "cs", "sk", "sl", "hr",
    "hu", "ro", "bg", "el", "tr", "ru", "uk", "ca", "eu", "gl", "ga", "sq", "is", "id", "ms", "vi", "sw", "zh", "ja",
    "ko", "ka",
)  # fmt: skip
READ, WRITTEN = ("medium", "long", "full"), ("medium", "long")  # the full style has the weekday, which ISO form lacks
FIRST, DAYS = date(1900, 1, 1), 73_049  # to 31 December 2099
COUNT = 60_000  # pairs to train on
HELD_OUT = 2_000

Form = tuple[str, str]  # language and style


def dates(share: float = 0.1, seed: int = 0) -> tuple[Pairs, Pairs]:
    """Pairs for training, and pairs for validation on other days.

    Half of them read a date ("12 mars 2019" to "2019-03-12"), half write one ("fr long 2019-03-12" to "12 mars 2019").
    Only unambiguous styles are used: the month has a name, or the year comes first.
    """
    try:
        from babel.dates import format_date
    except ImportError:
        raise DataError(
            f"the built-in dates need Babel: {install_command('translate')}; or give your own pairs with --data"
        ) from None
    read, write = ([(language, style) for language in LANGUAGES for style in styles] for styles in (READ, WRITTEN))
    read, write = ([form for form in forms if is_unambiguous(*form)] for forms in (read, write))
    exact = exact_share(share)
    held_out = np.array([is_validation(day, exact, seed) for day in range(DAYS)])

    def draw_pairs(days: np.ndarray, count: int) -> Iterator[Pair]:
        numbers = derive_keys(seed, np.arange(count))
        for i, (number, other) in enumerate(zip(numbers.tolist(), mix(numbers).tolist(), strict=True)):
            day = FIRST + timedelta(days=int(days[number % len(days)]))
            forms = write if i % 2 else read
            language, style = forms[other % len(forms)]
            text, iso = format_date(day, style, locale=language), day.isoformat()
            yield (f"{language} {style} {iso}", text) if i % 2 else (text, iso)

    found = [
        list(draw_pairs(np.flatnonzero(held_out == held), count)) for held, count in ((False, COUNT), (True, HELD_OUT))
    ]
    summary = f"dates of two centuries in {len(LANGUAGES)} languages"
    return Pairs(lambda: iter(found[0]), summary), Pairs(lambda: iter(found[1]), summary)


def is_unambiguous(language: str, style: str) -> bool:
    """Whether month and day cannot be confused: the month has a name, or the year comes first."""
    from babel import Locale

    formats: Any = Locale.parse(language).date_formats
    pattern = str(formats[style].pattern)
    return "MMM" in pattern or pattern.lstrip("'").startswith("y")
