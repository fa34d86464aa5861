"""Speculative decoding: a small model proposes several tokens, and the model checks them all in one pass.

The engine (`engine.py`: `propose`, `choose`) draws the model's token at each place with the random number of that
place, and the draft's proposal for it with the same number. A proposal that equals the model's token saves a pass; at
the first that differs, the rest is dropped. So the text is the one that the model writes alone, sampled or not. The
rule of Leviathan et al. (2023), min(1, p/q), accepts somewhat more samples, but writes another text.
"""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.configs import LMHeadConfig
from clearhead.models.model import EncoderDecoder, Model


@dataclass(frozen=True)
class Draft:
    """A smaller model with the same vocabulary, and how many tokens it proposes at a time."""

    model: Model
    count: int = 4

    def check(self, model: Model) -> None:
        if isinstance(model, EncoderDecoder) or isinstance(self.model, EncoderDecoder):
            raise ValueError("a draft model works only with language models, not with encoder–decoders; drop --draft")
        mine, theirs = self.model.config.head, model.config.head
        if not isinstance(mine, LMHeadConfig) or not isinstance(theirs, LMHeadConfig):
            raise ValueError("the draft model has no language-model head; name a smaller language model with --draft")
        if mine.vocabulary != theirs.vocabulary:
            raise ValueError(
                f"the draft's vocabulary has {mine.vocabulary:,} tokens and the model's {theirs.vocabulary:,}; "
                "use a draft model with the same tokenizer"
            )
        for name, one in (("draft", self.model), ("model", model)):
            if not one.init_state(1, 1).can_rewind:
                raise ValueError(
                    f"the {name} has a recurrent mixer, which cannot take back a token; use an attention model"
                )
        if self.count < 1:
            raise ValueError(f"the draft proposes {self.count} tokens at a time, but must propose at least 1")
