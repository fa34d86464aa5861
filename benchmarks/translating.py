"""Beam search of a transformer-base with random weights, beside transformers' Marian and CTranslate2, equal weights.

    python -m benchmarks translating          a few batches, in turns
    python -m benchmarks.translating 1000     so many sentences

Beam 4, batches of 32 sentences of about one length, a vocabulary of 16,000. With random weights hardly any text ends,
so every one is let grow to the same length. Needs `pip install 'clearhead[bench]'`.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clearhead
from clearhead.configs import Power
from clearhead.generate.complete import TextGenerator
from clearhead.kernels.accelerate import accelerate
from clearhead.tasks.translate import complete_all

from .results import add_times
from .turns import print_times, take_turns

THREADS, BEAM, BATCH, NEW = 2, 4, 32, 16
VOCABULARY, PAD = 16_000, 15_999
Run = Callable[[list[list[int]]], list[list[int]]]  # sources to the best translation of each


def main(sentences: int = 3 * BATCH, rounds: int = 3) -> None:
    torch.set_num_threads(THREADS)
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    lengths = np.sort(np.clip(rng.normal(14, 4, sentences).round(), 5, 40).astype(int))  # as Multi30k's are
    sources = [[*rng.integers(1, PAD, n).tolist(), 0] for n in lengths]
    parts = [sources[first : first + BATCH] for first in range(0, sentences, BATCH)]
    with tempfile.TemporaryDirectory() as folder:
        theirs = marian(Path(folder))
        contestants = {
            "clearhead": ours(Path(folder)),
            "transformers": of_transformers(theirs),
            "CTranslate2, one worker": of_ctranslate2(theirs, Path(folder) / "ct2", 1),
            "CTranslate2, a worker a core": of_ctranslate2(theirs, Path(folder) / "ct2", THREADS),
        }
        answers = {name: run(parts[0]) for name, run in contestants.items()}
        for name, found in answers.items():
            same = np.mean([one == other for one, other in zip(found, answers["clearhead"], strict=True)])
            print(f"{name}: {same:.0%} of the translations are ours")
        runs = {name: (lambda run=run: run(sources)) for name, run in contestants.items()}  # each cuts batches itself
        runs["transformers"] = lambda: [contestants["transformers"](part) for part in parts]
        seconds = take_turns(runs, rounds)
        print_times(f"{sentences} sentences, beam {BEAM}, {NEW} tokens each", seconds, ours="clearhead")
        for name in seconds:
            if name != "clearhead":
                add_times(f"beam search, {name}", {"clearhead": seconds["clearhead"], name: seconds[name]}, "clearhead")


def marian(folder: Path) -> Any:
    """A Marian model of transformer-base's shape, saved in `folder`."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, activation_function="relu",
        scale_embedding=True, normalize_before=False, static_position_embeddings=True, max_position_embeddings=512,
        pad_token_id=PAD, eos_token_id=0, decoder_start_token_id=PAD, forced_eos_token_id=None, init_std=0.1,
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    model.save_pretrained(folder)
    return model


def ours(folder: Path) -> Run:
    model = accelerate(clearhead.load(folder))
    task = TextGenerator.of(model, beams=BEAM, length_penalty=Power(0.0), max_new_tokens=NEW, banned=(PAD,))

    def run(sources: list[list[int]]) -> list[list[int]]:
        found = complete_all(task, list(enumerate(sources)), BATCH, workers=THREADS)
        return [found[i][0].tokens for i in range(len(sources))]

    return run


def of_transformers(model: Any) -> Run:
    def run(sources: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, sources))
        ids = torch.tensor([[*source, *[PAD] * (longest - len(source))] for source in sources])
        found = model.generate(
            ids, attention_mask=ids != PAD, num_beams=BEAM, max_new_tokens=NEW, length_penalty=0.0, do_sample=False,
            bad_words_ids=[[PAD]],
        )  # fmt: skip
        return [[token for token in row[1:].tolist() if token != PAD] for row in found]

    return run


def of_ctranslate2(model: Any, folder: Path, workers: int) -> Run:
    """`workers` translators at once, which share the threads."""
    import ctranslate2

    if not folder.exists():
        Specification(model).save_at(folder)
    translator = ctranslate2.Translator(
        str(folder),
        device="cpu",
        compute_type="float32",
        inter_threads=workers,
        intra_threads=max(1, THREADS // workers),
    )

    def run(sources: list[list[int]]) -> list[list[int]]:
        tokens = [[str(id) for id in source] for source in sources]
        found = translator.translate_batch(
            tokens, max_batch_size=BATCH, beam_size=BEAM, max_decoding_length=NEW, length_penalty=0.0,
            suppress_sequences=[[str(PAD)]],
        )  # fmt: skip
        return [[int(token) for token in one.hypotheses[0]] for one in found]

    return run


class Specification:
    """Marian's weights under CTranslate2's names."""

    def __init__(self, model: Any) -> None:
        from ctranslate2.specs import TransformerSpec

        config, self.weights = model.config, {name: p.detach().numpy() for name, p in model.state_dict().items()}
        self.spec = TransformerSpec.from_config(6, config.encoder_attention_heads, pre_norm=False)
        for side in ("encoder", "decoder"):
            spec = getattr(self.spec, side)
            spec.scale_embeddings = True
            table = spec.embeddings[0] if side == "encoder" else spec.embeddings
            table.weight = self.weights["model.shared.weight"]
            spec.position_encodings.encodings = self.weights[f"model.{side}.embed_positions.weight"]
            for i, layer in enumerate(spec.layer):
                self.layer(layer, f"model.{side}.layers.{i}", side)
        self.spec.decoder.projection.weight = self.weights["model.shared.weight"]
        self.spec.decoder.projection.bias = np.zeros(VOCABULARY, np.float32)

    def layer(self, spec: Any, name: str, side: str) -> None:
        self.attention(spec.self_attention, f"{name}.self_attn")
        self.norm(spec.self_attention.layer_norm, f"{name}.self_attn_layer_norm")
        if side == "decoder":
            self.attention(spec.attention, f"{name}.encoder_attn", crossing=True)
            self.norm(spec.attention.layer_norm, f"{name}.encoder_attn_layer_norm")
        self.linear(spec.ffn.linear_0, [f"{name}.fc1"])
        self.linear(spec.ffn.linear_1, [f"{name}.fc2"])
        self.norm(spec.ffn.layer_norm, f"{name}.final_layer_norm")

    def attention(self, spec: Any, name: str, crossing: bool = False) -> None:
        split = [["q_proj"], ["k_proj", "v_proj"]] if crossing else [["q_proj", "k_proj", "v_proj"]]
        for linear, names in zip(spec.linear, [*split, ["out_proj"]], strict=True):
            self.linear(linear, [f"{name}.{each}" for each in names])

    def linear(self, spec: Any, names: list[str]) -> None:
        spec.weight = np.concatenate([self.weights[f"{name}.weight"] for name in names])
        spec.bias = np.concatenate([self.weights[f"{name}.bias"] for name in names])

    def norm(self, spec: Any, name: str) -> None:
        spec.gamma, spec.beta = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]

    def save_at(self, folder: Path) -> None:
        words = [str(id) for id in range(VOCABULARY)]
        self.spec.register_source_vocabulary(words)
        self.spec.register_target_vocabulary(words)
        self.spec.config.eos_token, self.spec.config.bos_token = "0", str(PAD)
        self.spec.config.decoder_start_token, self.spec.config.unk_token = str(PAD), "1"
        self.spec.config.add_source_bos = self.spec.config.add_source_eos = False
        self.spec.validate()
        folder.mkdir()
        self.spec.save(str(folder))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
