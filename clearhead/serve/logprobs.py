"""Log-probabilities in the shapes of the OpenAI API, and the text of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.generate.job import TokenScore
from clearhead.tokenize import Tokenizer


class TokenTexts:
    """The text of each token as it reads inside a text; the name of a special token. Remembers what it has decoded."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer, self.known = tokenizer, {}  # type: tuple[Tokenizer | None, dict[int, str]]
        self.anchor = [] if tokenizer is None or tokenizer.alphabet else tokenizer.encode("a")[-1:]
        self.before = "" if tokenizer is None else tokenizer.decode(self.anchor)

    def __getitem__(self, token: int) -> str:
        if token not in self.known:
            self.known[token] = self.decode(token)
        return self.known[token]

    def decode(self, token: int) -> str:
        if self.tokenizer is None:
            return str(token)
        whole = self.tokenizer.decode([*self.anchor, token])
        text = whole[len(self.before) :] if whole.startswith(self.before) else self.tokenizer.decode([token])
        return text or self.tokenizer.name(token) or ""


def completion_logprobs(texts: TokenTexts, scores: Sequence[TokenScore], offset: int) -> dict[str, Any]:
    """The `logprobs` of a completion choice; `offset` is where its first token begins in the text."""
    tokens = [texts[score.token] for score in scores]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [top_logprobs(texts, score) for score in scores],
        "text_offset": offsets,
    }


def top_logprobs(texts: TokenTexts, score: TokenScore) -> dict[str, float] | None:
    """The alternatives by text. Of two tokens with the same text, the more likely one is listed."""
    if score.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in score.top:
        found.setdefault(texts[token], logprob)
    return found


def chat_logprobs(texts: TokenTexts, scores: Sequence[TokenScore]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = texts[token]
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(score.token, score.logprob) | {"top_logprobs": [entry(*other) for other in score.top]} for score in scores
    ]
    return {"content": content, "refusal": None}
