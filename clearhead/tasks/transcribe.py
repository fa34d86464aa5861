"""Speech to text with Whisper: sound in windows of 30 seconds, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.configs import AudioEmbeddingConfig, LearnedConfig
from clearhead.configs.base import nearest
from clearhead.data.audio import HOP, RATE, log_mel, read_audio
from clearhead.generate.defaults import read_configs
from clearhead.models.model import EncoderDecoder, Model
from clearhead.tokenize import Tokenizer

TICK = 0.02  # seconds from one timestamp token to the next
SILENT, UNSURE = 0.6, -1.0  # a window is silent if <|nospeech|> is likelier and the mean log-probability is lower
Task = Literal["transcribe", "translate"]


@dataclass(frozen=True)
class Segment:
    """The words spoken from `start` to `end`, in seconds."""

    start: float
    end: float
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Transcript:
    """The text of a sound, its language, and its segments."""

    text: str
    language: str | None  # None if the model knows one only
    segments: list[Segment]


@dataclass(frozen=True)
class Speech:
    """A Whisper model, its tokenizer and its special tokens."""

    model: EncoderDecoder
    tokenizer: Tokenizer
    start: int
    end: int
    untimed: int  # <|notimestamps|>; the timestamps follow it
    silence: int | None
    languages: dict[str, int]  # empty if the model knows one only
    suppressed: tuple[int, ...]  # never written
    suppressed_first: tuple[int, ...]  # not written first
    latest_start: int  # ticks until the first timestamp, at most

    @classmethod
    def of(cls, model: Model, tokenizer: Tokenizer | None = None) -> Speech:
        if not isinstance(model, EncoderDecoder) or not isinstance(model.config.source, AudioEmbeddingConfig):
            raise ValueError("this model reads no sound, so it cannot transcribe; load a Whisper model")
        found = tokenizer or model.tokenizer
        if found is None:
            raise ValueError("the model has no tokenizer; pass tokenizer=")
        configs = read_configs(model.origin)
        settings: dict[str, Any] = configs["config.json"] | configs["generation_config.json"]
        marks = found.inner.get_vocab(with_added_tokens=True)
        wanted = {name: marks.get(f"<|{name}|>") for name in ("startoftranscript", "endoftext", "notimestamps")}
        if missing := [name for name, id in wanted.items() if id is None]:
            raise ValueError(f"the tokenizer has no token <|{missing[0]}|>, so it is not one of Whisper")
        named = {
            code[1]: id for name, id in marks.items() if (code := re.fullmatch(r"<\|([a-z]{2,3})\|>", name)) is not None
        }
        several = settings.get("is_multilingual", marks.get("<|transcribe|>") is not None)
        return cls(
            model,
            found,
            start=marks["<|startoftranscript|>"],
            end=marks["<|endoftext|>"],
            untimed=marks["<|notimestamps|>"],
            silence=marks.get("<|nospeech|>", marks.get("<|nocaptions|>")),
            languages=named if several else {},
            suppressed=tuple(settings.get("suppress_tokens") or ()),
            suppressed_first=tuple(settings.get("begin_suppress_tokens") or ()),
            latest_start=settings.get("max_initial_timestamp_index") or 50,
        )

    @property
    def frames(self) -> int:
        """Frames of 10 ms in a window."""
        source = self.model.config.source
        assert isinstance(source, AudioEmbeddingConfig)
        return source.frames

    @property
    def longest(self) -> int:
        """The most tokens that the decoder reads."""
        target = self.model.config.target
        assert target is not None
        assert isinstance(target.position, LearnedConfig)
        return target.position.length

    def find_language(self, language: str) -> int:
        if not self.languages:
            raise ValueError(f"a language was given ({language}), but this model knows English only")
        if language not in self.languages:
            known = ", ".join(sorted(self.languages))
            raise ValueError(
                f"the language {language!r} is not known{nearest(language, self.languages)}; known: {known}"
            )
        return self.languages[language]

    def spectrogram(self, samples: Float[np.ndarray, " N"]) -> Float[Tensor, "Mels Frames"]:
        """The spectrogram of a whole sound, and of at least one window."""
        source: Any = self.model.config.source
        return torch.from_numpy(log_mel(samples, source.mels, max(self.frames, len(samples) // HOP)))

    def encode(self, spectrogram: Float[Tensor, "Mels Frames"]) -> Float[Tensor, "B S D"]:
        """The encoder's output for a window that starts with the first frame."""
        weight, window = next(self.model.parameters()), spectrogram[:, : self.frames]
        window = F.pad(window, (0, self.frames - window.shape[1]))
        return self.model.encode(window[None].to(weight.device, weight.dtype))

    def next_scores(self, memory: Float[Tensor, "1 S D"], prompt: list[int]) -> Float[Tensor, " V"]:
        """The logits after a prompt."""
        state = self.model.init_state(memory, len(prompt))
        return self.model.next_logits(torch.tensor([prompt], device=memory.device), state)[0].float()

    def hear_language(self, memory: Float[Tensor, "1 S D"]) -> str:
        """The likeliest language of a window."""
        scores = self.next_scores(memory, [self.start])
        return max(self.languages, key=lambda code: float(scores[self.languages[code]]))

    def write(self, memory: Float[Tensor, "1 S D"], prompt: list[int], timed: bool) -> tuple[list[int], float]:
        """The likeliest tokens, one after the other, without the end token; and their mean log-probability."""
        state = self.model.init_state(memory, self.longest)
        given, total = torch.tensor([prompt], device=memory.device), 0.0
        written: list[int] = []
        most = self.longest - len(prompt)
        while len(written) < most:
            scores = self.model.next_logits(given, state)[0].float()
            scores[list(self.suppressed)] = -torch.inf
            if not written:
                scores[list(self.suppressed_first)] = -torch.inf
            if timed:
                scores = self.order_timestamps(scores, written)
            logprobs = scores.log_softmax(0)
            token = int(logprobs.argmax())
            total += float(logprobs[token])
            if token == self.end:
                break
            written.append(token)
            given = torch.tensor([[token]], device=memory.device)
        return written, total / (len(written) + 1)

    def order_timestamps(self, scores: Float[Tensor, " V"], written: list[int]) -> Float[Tensor, " V"]:
        """Forbid tokens that would break the order of timestamps  (Radford et al. 2022, 2.3).

        Text is between two timestamps. They never go back, and the first one comes first. If all timestamps together
        are likelier than the likeliest other token, it is a timestamp.
        """
        first = self.untimed + 1
        scores[self.untimed] = -torch.inf
        timed = [token >= first for token in written[-2:]]
        if timed[-1:] == [True]:
            if timed[0]:  # two in a row, or the first token of all: text follows
                scores[first:] = -torch.inf
            else:  # the end of a text: another timestamp or the end token follows
                scores[: self.end] = -torch.inf
        stamps = [token for token in written if token >= first]
        if stamps:
            scores[first : stamps[-1] + (timed != [False, True])] = -torch.inf
        if not written:
            scores[:first] = -torch.inf
            scores[first + self.latest_start + 1 :] = -torch.inf
        logprobs = scores.log_softmax(0)
        if logprobs[first:].logsumexp(0) > logprobs[:first].max():
            scores[:first] = -torch.inf
        return scores

    def split_segments(self, tokens: list[int], at: float, seconds: float) -> tuple[list[Segment], float]:
        """The segments of a window that starts `at` some second, and how many seconds of it were transcribed.

        Two timestamps in a row separate segments. If text without an end follows the last such pair, it is dropped, and
        the next window starts at the pair.
        """
        first, heard = self.untimed + 1, seconds
        stamps = [token >= first for token in tokens]
        pairs = [i for i in range(1, len(tokens)) if stamps[i - 1] and stamps[i]]
        if pairs and stamps[-2:] != [False, True]:
            tokens = tokens[: pairs[-1]]
            heard = (tokens[-1] - first) * TICK
        found: list[Segment] = []
        for begin, end in pairwise([0, *pairs, len(tokens)]):
            times = [(token - first) * TICK for token in tokens[begin:end] if token >= first]
            words = [token for token in tokens[begin:end] if token < first]
            start, stop = times[0] if times else 0.0, times[-1] if len(times) > 1 else seconds
            if words:
                found.append(self.segment(at + min(start, seconds), at + min(stop, seconds), words))
        return found, heard

    def segment(self, start: float, end: float, tokens: list[int]) -> Segment:
        return Segment(round(start, 2), round(end, 2), self.tokenizer.decode(tokens).strip(), tokens)


def transcribe(
    model: Model,
    sound: str | Path | np.ndarray,
    *,
    language: str | None = None,
    task: Task = "transcribe",
    timestamps: bool = False,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[Segment], object] = lambda segment: None,
) -> Transcript:
    """The text of a sound.

    sound       a file, or samples at 16 kHz
    language    a code such as "en"; default: what the first window sounds like
    task        "translate" writes English, whatever the language
    timestamps  find when each segment was spoken; longer sound than one window always has them
    progress    called with each segment when it is ready
    """
    speech = Speech.of(model, tokenizer)
    code = None if language is None else speech.find_language(language)
    samples = sound.astype(np.float32) if isinstance(sound, np.ndarray) else read_audio(Path(sound))
    if task == "translate" and not speech.languages:
        raise ValueError("this model knows English only, so it cannot translate")
    segments, spectrogram = [], speech.spectrogram(samples)
    with torch.inference_mode():
        if speech.languages and code is None:
            language = speech.hear_language(speech.encode(spectrogram))
            code = speech.languages[language]
        for segment in segments_of(speech, spectrogram, len(samples) // HOP, code, task, timestamps):
            segments.append(segment)
            progress(segment)
    text = " ".join(segment.text for segment in segments if segment.text)
    return Transcript(text, language, segments)


def segments_of(
    speech: Speech,
    spectrogram: Float[Tensor, "Mels Frames"],
    frames: int,
    language: int | None,
    task: Task,
    timestamps: bool,
) -> Iterator[Segment]:
    """The segments of a sound, window by window. A window starts where the segments of the one before it end."""
    timed, marks = timestamps or frames > speech.frames, speech.tokenizer.inner.get_vocab(with_added_tokens=True)
    prompt = [speech.start]
    if language is not None:
        prompt += [language, marks[f"<|{task}|>"]]
    prompt += [] if timed else [speech.untimed]
    place = 0
    while place < frames:
        memory = speech.encode(spectrogram[:, place:])
        tokens, mean = speech.write(memory, prompt, timed)
        seconds = min(speech.frames, frames - place) * HOP / RATE
        found, heard = speech.split_segments(tokens, place * HOP / RATE, seconds)
        if not is_silent(speech, memory, mean):
            yield from found
        place += max(1, round(heard * RATE / HOP))


def is_silent(speech: Speech, memory: Float[Tensor, "1 S D"], mean: float) -> bool:
    """Whether a window has no speech: the model says so, and is unsure of what it wrote."""
    if speech.silence is None or mean > UNSURE:
        return False
    return float(speech.next_scores(memory, [speech.start]).softmax(0)[speech.silence]) > SILENT
