"""Whisper: the features, every hidden state, the logits and the tokens of `transformers`; sound in several forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from click.testing import CliRunner

transformers = pytest.importorskip("transformers")

import clearhead  # noqa: E402
from clearhead.cli.main import cli  # noqa: E402
from clearhead.data.audio import RATE, log_mel, read_audio, read_wav, resample  # noqa: E402
from clearhead.data.corpus import DataError  # noqa: E402
from clearhead.models.model import EncoderDecoder  # noqa: E402
from clearhead.nn.tap import Taps  # noqa: E402
from clearhead.tasks.transcribe import Speech, transcribe  # noqa: E402
from clearhead.tokenize import Tokenizer  # noqa: E402

from .families import WHISPER  # noqa: E402
from .test_families import check_counts, check_saved, in_numpy, make  # noqa: E402
from .test_transformers import TOLERANCE, block_outputs, ids  # noqa: E402


def test_whisper_equals_transformers(tmp_path: Path) -> None:
    theirs = make(*WHISPER["whisper"], tmp_path)
    ours = clearhead.load(tmp_path)
    assert isinstance(ours, EncoderDecoder)
    sound, target = torch.randn(3, 9, 46, generator=torch.Generator().manual_seed(1)), ids(3, 9)
    taps = Taps(read=["encoder.*", "decoder.*"])
    with torch.no_grad():
        expected = theirs(sound, decoder_input_ids=target, output_hidden_states=True)
        logits, written_out = ours(sound, target, taps=taps), ours(sound, target, fused=False)
        state = ours.init_state(ours.encode(sound), 9)
        pieces = torch.cat([ours.decode(piece, state) for piece in target.split((4, 1, 4), dim=1)], dim=1)
        again = check_saved(ours, theirs, tmp_path / "again")(sound, decoder_input_ids=target).logits
    hidden = {"encoder": expected.encoder_hidden_states[1:], "decoder": expected.decoder_hidden_states[1:]}
    for side, wanted in hidden.items():
        for got, want in zip(block_outputs(taps, side), wanted, strict=True):
            torch.testing.assert_close(got, want, **TOLERANCE)
    for got in (logits, written_out, pieces, again, torch.tensor(in_numpy(ours, sound, target))):
        torch.testing.assert_close(got, expected.logits, **TOLERANCE)
    check_counts(ours, sound, ids(2, 7))


# ---- sound


@pytest.mark.parametrize("mels", [80, 128])
def test_features_equal_transformers(mels: int) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=mels, chunk_length=2)
    times = np.arange(RATE) / RATE
    sound = np.sin(2 * np.pi * 440 * times) * times + 0.01 * np.random.default_rng(0).standard_normal(RATE)
    expected = extractor(sound.astype(np.float32), sampling_rate=RATE, return_tensors="np").input_features[0]
    got = log_mel(sound.astype(np.float32), mels, 200)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_resampling_equals_scipy(rate: int) -> None:
    signal = pytest.importorskip("scipy.signal")
    sound = np.random.default_rng(0).standard_normal(rate // 5 + 3)
    shared = np.gcd(rate, RATE)
    expected = signal.resample_poly(sound, RATE // shared, rate // shared)
    np.testing.assert_allclose(resample(sound, rate), expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "width"), [("PCM_U8", 1), ("PCM_16", 2), ("PCM_24", 3), ("PCM_32", 4)])
def test_a_wav_file_is_read_with_and_without_soundfile(kind: str, width: int, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    sound = np.random.default_rng(0).uniform(-0.9, 0.9, (500, 2))
    soundfile.write(tmp_path / "a.wav", sound, RATE, subtype=kind)
    channels, rate = read_wav(tmp_path / "a.wav")
    assert rate == RATE
    np.testing.assert_allclose(channels, sound, atol=2.0 ** (1 - 8 * width) + 1e-6)
    np.testing.assert_allclose(read_audio(tmp_path / "a.wav"), channels.mean(axis=1), atol=1e-6)
    soundfile.write(tmp_path / "a.flac", sound, RATE)
    np.testing.assert_allclose(read_audio(tmp_path / "a.flac"), sound.mean(axis=1), atol=1e-4)


def test_a_file_without_sound_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_text("words")
    for read in (read_audio, read_wav):
        with pytest.raises(DataError, match=r"a\.wav"):
            read(tmp_path / "a.wav")
    with pytest.raises(DataError, match=r"there is no sound file .*b\.wav"):
        read_audio(tmp_path / "b.wav")


# ---- text

MARKS = ["endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "nospeech", "notimestamps"]


def speaking(folder: Path) -> Any:
    """A tiny model of `transformers` with Whisper's special tokens, saved with a tokenizer."""
    words = [f"w{i}" for i in range(61 - len(MARKS) - 24)]
    names = [*words, *(f"<|{mark}|>" for mark in MARKS), *(f"<|{tick * 0.02:.2f}|>" for tick in range(24))]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, names[0]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(names[len(words) :])
    theirs = make(*WHISPER["whisper"], folder)
    ids = {name: i for i, name in enumerate(names)}
    settings: dict[str, Any] = {
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in ("en", "de")},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "is_multilingual": True,
        "suppress_tokens": [3, ids["<|nospeech|>"]],
        "begin_suppress_tokens": [5, ids["<|endoftext|>"]],
        "max_initial_timestamp_index": 7,
        "max_length": 30,
    }
    for name, value in settings.items():
        setattr(theirs.generation_config, name, value)
    theirs.save_pretrained(folder)
    Tokenizer(inner, {}).save(folder)
    return theirs


@pytest.mark.parametrize("timestamps", [False, True])
def test_tokens_equal_transformers(timestamps: bool, tmp_path: Path) -> None:
    """Greedy decoding. With timestamps the sound has two windows and a half, which start where a segment ended."""
    theirs = speaking(tmp_path)
    model = clearhead.load(tmp_path)
    speech = Speech.of(model)
    extractor = transformers.WhisperFeatureExtractor(feature_size=9, chunk_length=0.46)
    for seed in range(3):
        length = round(RATE * (1.15 if timestamps else 0.46))
        sound = np.random.default_rng(seed).standard_normal(length).astype(np.float32) * 0.1
        features = extractor(
            sound, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest"
        ).input_features
        wanted = theirs.generate(features, language="de", task="translate", return_timestamps=timestamps)[0].tolist()
        found = transcribe(model, sound, language="de", task="translate", timestamps=timestamps)
        texts = [token for segment in found.segments for token in segment.tokens]
        assert len(texts) > 3
        assert texts == [token for token in wanted if token <= speech.untimed and token != speech.end]
        with torch.inference_mode():
            heard = speech.languages[speech.hear_language(speech.encode(speech.spectrogram(sound)))]
        assert heard == int(theirs.detect_language(features[:, :, :46])[0])


def test_segments_are_cut_at_timestamps(tmp_path: Path) -> None:
    speaking(tmp_path)
    speech = Speech.of(clearhead.load(tmp_path))
    first = speech.untimed + 1
    spans = lambda tokens: [(s.start, s.end, s.tokens) for s in speech.split_segments(tokens, 10.0, 0.46)[0]]
    both = [(10.02, 10.1, [4]), (10.1, 10.2, [6])]
    assert spans([first + 1, 4, first + 5, first + 5, 6, first + 10]) == both
    assert (
        speech.split_segments([first + 1, 4, first + 5, first + 5, 6, first + 10], 10.0, 0.46)[1] == 0.46
    )  # one ends the window
    assert speech.split_segments([first + 1, 4, first + 5, first + 5, 6], 10.0, 0.46)[1] == pytest.approx(
        0.1
    )  # 6 has no end
    assert speech.split_segments([first + 1, 4, first + 5, first + 5], 10.0, 0.46)[1] == pytest.approx(0.1)
    assert spans([4, 6]) == [(10.0, 10.46, [4, 6])]


def test_the_command_prints_what_is_said(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    speaking(tmp_path / "model")
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).standard_normal(4000) * 0.1, 8000)
    command = ["transcribe", str(tmp_path / "model"), str(tmp_path / "a.wav")]
    plain = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert plain.exit_code == 0
    data = json.loads(CliRunner().invoke(cli, [*command, "--json"]).output)
    assert data["files"][0]["text"] == plain.output.strip()
    assert data["files"][0]["language"] in ("en", "de")
    assert "→" in CliRunner().invoke(cli, [*command, "--timestamps"]).output
    wrong = CliRunner().invoke(cli, [*command, "--language", "em"])
    assert isinstance(wrong.exception, ValueError)
    assert "the language 'em' is not known" in str(wrong.exception)
