"""What we save, `transformers` loads with equal logits; what it does not have, we load again bit by bit.

Tiny random models, weights large enough (std 0.2) that a wrong name or layout shows; float32, 1e-4.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from clearhead.configs import (  # noqa: E402
    AttentionConfig,
    Causal,
    ClassHeadConfig,
    ConfigError,
    GatedFeedForwardConfig,
    LinearScaling,
    Llama3Scaling,
    MambaConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    MoEConfig,
    NTKScaling,
    PoolerConfig,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    Window,
    YarnScaling,
    dumps,
    loads,
)
from clearhead.models import folder as checkpoint_folder  # noqa: E402
from clearhead.models.bert import bert  # noqa: E402
from clearhead.models.convert import FAMILIES, CheckpointError, family, to_hf  # noqa: E402
from clearhead.models.convert.differences import differences  # noqa: E402
from clearhead.models.gpt import gpt  # noqa: E402
from clearhead.models.llama import decoder, llama, mixtral  # noqa: E402
from clearhead.models.load import load  # noqa: E402
from clearhead.models.mamba import mamba  # noqa: E402
from clearhead.models.model import EncoderDecoder, Model, build  # noqa: E402
from clearhead.models.presets import PRESETS, preset  # noqa: E402
from clearhead.models.save import save  # noqa: E402
from clearhead.models.vit import vit  # noqa: E402
from clearhead.typed_json import JSONError  # noqa: E402

from . import families  # noqa: E402
from .test_transformers import DECODERS, ENCODERS, ids, randomise  # noqa: E402

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
V = 61
GPT = gpt(dim=28, layers=3, heads=7, vocabulary=V, length=32)
GPT1 = gpt(dim=28, layers=3, heads=7, vocabulary=V, length=32, placement="post")
LLAMA = llama(dim=36, layers=3, heads=6, kv_heads=2, hidden=41, vocabulary=V)
BERT = bert(dim=28, layers=3, heads=7, hidden=41, vocabulary=V, length=32)
VIT = vit(dim=28, layers=3, heads=7, hidden=41, image=15, patch=5, channels=2, head=ClassHeadConfig(classes=11))
MIXTRAL = mixtral(dim=36, layers=2, heads=6, kv_heads=2, hidden=44, vocabulary=V, experts=5)
DEEPSEEK = preset("tiny-deepseek")
YARN = YarnScaling(factor=4, length=16, rotation=1.1)
MARIAN = {
    "architectures": ["MarianMTModel"],
    "model_type": "marian",
    "d_model": 28,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 7,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 41,
    "decoder_ffn_dim": 37,
    "vocab_size": V,
    "activation_function": "swish",
    "scale_embedding": True,
}


def changed(config: Any, **changes: Any) -> Any:
    """A copy with other fields in every mixer, or at a path from the top, with `__` for its dots."""
    for name, value in changes.items():
        path = name.replace("__", ".")
        top = "" if path.split(".")[0] in ("stack", "head") else "stack.pattern.0.mixer."
        config = config.with_value(top + path, value)
    return config


QWEN = decoder(
    dim=36,
    layers=3,
    mixer=AttentionConfig(
        heads=6, kv_heads=3, head_dim=8, mask=Causal(), rotary=RotaryConfig(theta=1e6), qk_norm=RMSNormConfig(eps=1e-6)
    ),
    ffn=GatedFeedForwardConfig(hidden=41),
    vocabulary=V,
    eps=1e-6,
    tied=True,
)

OURS: dict[str, tuple[str, ModelConfig]] = {
    "gpt2": ("gpt2", GPT),
    "gpt2, wide, untied, silu": (
        "gpt2",
        changed(GPT, stack__pattern__0__ffn__hidden=31, stack__pattern__0__ffn__activation="silu", head__tied=False),
    ),
    "gpt2 without a head": ("gpt2", changed(GPT, head=None)),
    "gpt1": ("openai-gpt", GPT1),
    "llama": ("llama", LLAMA),
    "llama tied, biased, wide heads": (
        "llama",
        changed(LLAMA, head_dim=8, qkv_bias=True, out_bias=True, stack__pattern__0__ffn__bias=True, head__tied=True),
    ),
    "llama without a head": ("llama", changed(LLAMA, head=None)),
    "llama, linear": ("llama", changed(LLAMA, rotary__scaling=LinearScaling(factor=3))),
    "llama, ntk": ("llama", changed(LLAMA, rotary__scaling=NTKScaling(factor=3))),
    "llama, llama3": ("llama", changed(LLAMA, rotary__scaling=Llama3Scaling(factor=8, length=16))),
    "llama, yarn": ("llama", changed(LLAMA, rotary__scaling=YARN)),
    "llama, yarn, plain": ("llama", changed(LLAMA, rotary__scaling=YarnScaling(factor=4, length=16, whole=False))),
    "mistral": ("mistral", changed(LLAMA, mask=Window(5) & Causal(), head_dim=8)),
    "mistral, odd heads": ("mistral", changed(LLAMA, head_dim=8, heads=8)),
    "qwen2": ("qwen2", changed(LLAMA, qkv_bias=True)),
    "qwen2, wide heads": ("qwen2", changed(LLAMA, qkv_bias=True, head_dim=8)),
    "qwen3": ("qwen3", QWEN),
    "qwen3, biased": ("qwen3", changed(QWEN, qkv_bias=True, out_bias=True)),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral, window": ("mixtral", changed(MIXTRAL, mask=Causal() & Window(5))),
    "bert": ("bert", BERT),
    "bert, masked": ("bert", changed(BERT, head=MaskedLMHeadConfig(vocabulary=V))),
    "bert, classes": ("bert", changed(BERT, head=ClassHeadConfig(classes=5, pool=PoolerConfig()))),
    "bert without a pooler": ("electra", changed(BERT, head=None)),
    "vit": ("vit", VIT),
    "vit, pooled": ("vit", changed(VIT, head=PoolerConfig(), qkv_bias=False)),
    "mamba": ("mamba", mamba(dim=28, layers=3, vocabulary=V)),
    "mamba, biased, untied": (
        "mamba",
        mamba(dim=28, layers=2, vocabulary=V, tied=False, mixer=MambaConfig(inner=84, state_dim=5, bias=True)),
    ),
    "mamba without a head": ("mamba", changed(mamba(dim=28, layers=2, vocabulary=V), head=None)),
    "deepseek": ("deepseek_v2", DEEPSEEK),
    "deepseek v3": ("deepseek_v3", preset("tiny-deepseek-v3")),
    "gemma": ("gemma", preset("tiny-gemma")),
    "gemma 3": ("gemma3_text", preset("tiny-gemma-3")),
    "albert": ("albert", preset("tiny-albert")),
    "albert, masked": (
        "albert",
        changed(preset("tiny-albert"), head=MaskedLMHeadConfig(vocabulary=101, width=12, activation="gelu_tanh")),
    ),
    "albert, classes": (
        "albert",
        changed(preset("tiny-albert"), head=ClassHeadConfig(classes=5, pool=PoolerConfig())),
    ),
    "marian": ("marian", family(MARIAN).config(MARIAN)),
}
YARNED = changed(DEEPSEEK, rotary__scaling=YARN, magnitude=1.0980235836)
OURS["deepseek, yarn"] = ("deepseek_v2", changed(YARNED, stack__first__0__mixer=YARNED.stack.pattern[0].mixer))

NOBODYS: dict[str, ModelConfig] = {
    "gpt2 with qk-norm": changed(GPT, qk_norm=RMSNormConfig()),
    "gpt2 with relu2 and rotary": changed(GPT, rotary=RotaryConfig(dim=2), stack__pattern__0__ffn__activation="relu2"),
    "sandwich": changed(LLAMA, stack__pattern__0__placement="sandwich"),
    "interleaved rotary": changed(LLAMA, rotary__layout="interleaved"),
    "one bias of two": changed(LLAMA, out_bias=True),
    "experts of plain layers": changed(
        GPT, stack__pattern__0__ffn=MoEConfig(expert=GPT.stack.pattern[0].ffn, experts=3, active=2)
    ),
    "the Transformer of 2017": preset("tiny-transformer"),
    "mamba of an odd width": mamba(dim=28, layers=2, vocabulary=V, mixer=MambaConfig(inner=30)),
    "an LSTM": preset("tiny-lstm"),
}


def random_model(config: ModelConfig) -> Model:
    model = randomise(build(config))
    assert isinstance(model, Model)
    return model


def run(model: Any, ours: bool) -> torch.Tensor:
    """What either side says of the same input: logits, pooled or hidden states."""
    config = model.config
    with torch.no_grad():
        if isinstance(model, EncoderDecoder):
            return model(ids(3, 11), ids(3, 7))
        if not ours and config.model_type == "marian":
            return model(ids(3, 11), decoder_input_ids=ids(3, 7)).logits
        image = config.to_dict()["embedding"]["kind"] == "PatchEmbedding" if ours else config.model_type == "vit"
        images = torch.randn(3, 2, 15, 15, generator=torch.Generator().manual_seed(1))
        out = model(images if image else ids(3, 13))
    if ours:
        return out
    for name in ("logits", "pooler_output", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    raise AssertionError(f"nothing to compare in {out}")


def in_transformers(folder: Path) -> Any:
    """Their model of the folder; everything must have been there, and nothing else."""
    hf = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, hf["architectures"][0])
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert auto_class(hf).from_pretrained(folder).__class__ is kind
    return model.eval()


def auto_class(hf: dict[str, Any]) -> Any:
    name = hf["architectures"][0]
    for ending, auto in {
        "ForCausalLM": "AutoModelForCausalLM",
        "LMHeadModel": "AutoModelForCausalLM",
        "ForMaskedLM": "AutoModelForMaskedLM",
        "ForSequenceClassification": "AutoModelForSequenceClassification",
        "ForImageClassification": "AutoModelForImageClassification",
        "MTModel": "AutoModelForSeq2SeqLM",
    }.items():
        if name.endswith(ending):
            return getattr(transformers, auto)
    return transformers.AutoModel


@pytest.mark.parametrize("name", OURS)
def test_transformers_loads_what_we_save(name: str, tmp_path: Path) -> None:
    kind, config = OURS[name]
    ours = random_model(config)
    ours.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind
    theirs = in_transformers(tmp_path)
    torch.testing.assert_close(run(theirs, ours=False), run(ours, ours=True), **TOLERANCE)
    again = load(tmp_path)
    assert again.config == config
    assert_same_weights(again, ours)


@pytest.mark.parametrize("name", DECODERS)
def test_a_model_of_transformers_survives_us(name: str, tmp_path: Path) -> None:
    theirs = randomise(DECODERS[name](transformers))
    theirs.save_pretrained(tmp_path / "theirs")
    load(tmp_path / "theirs").save(tmp_path / "ours")
    again = in_transformers(tmp_path / "ours")
    torch.testing.assert_close(run(again, ours=False), run(theirs, ours=False), **TOLERANCE)
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == (
        load_file(tmp_path / "theirs" / "model.safetensors").keys()
    )


def assert_same_weights(one: Model, other: Model) -> None:
    mine, yours = one.state_dict(), other.state_dict()
    assert mine.keys() == yours.keys()
    for name in mine:
        assert torch.equal(mine[name], yours[name]), name


@pytest.mark.parametrize("name", NOBODYS)
def test_an_architecture_nobody_has_keeps_our_names(name: str, tmp_path: Path) -> None:
    config = NOBODYS[name]
    model = random_model(config)
    model.save(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    assert hf == {"model_type": "clearhead", "architectures": [config.kind()], "dtype": "float32"}
    assert load_file(tmp_path / "model.safetensors").keys() == config.weights().keys()
    again = load(tmp_path)
    assert again.config == config
    assert_same_weights(again, model)


# ---- recognising a family from the config alone


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt1", "openai-gpt"),
        ("gpt2", "gpt2"),
        ("bert-base", "bert"),
        ("bert-base-mlm", "bert"),
        ("vit-b16", "vit"),
        ("llama-2-7b", "llama"),
        ("mistral-7b", "mistral"),
        ("mixtral-8x7b", "mixtral"),
        ("albert-base", "albert"),
        ("gemma-2b", "gemma"),
        ("gemma-3-1b", "gemma3_text"),
        ("deepseek-v2-lite", "deepseek_v2"),
        ("mamba-130m", "mamba"),
        ("deepseek-v3", "deepseek_v3"),
    ],
)
def test_presets_are_recognised(name: str, kind: str) -> None:
    """Two of the many equal blocks, at full width; no weight is allocated on either side."""
    config = preset(name)
    assert isinstance(config, SequenceModelConfig)
    config = config.with_value("stack.repeats", 2)
    hf = to_hf(config)
    assert hf is not None
    assert hf["model_type"] == kind
    theirs = transformers.AutoConfig.for_model(**{k: v for k, v in hf.items() if k != "architectures"})
    with torch.device("meta"):
        model = getattr(transformers, hf["architectures"][0])(theirs)
    count = sum(torch.Size(shape).numel() for shape in config.weights().values())
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert sum(weight.numel() for weight in [*model.parameters(), *biases]) == count


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("tiny-")])
def test_only_the_paper_of_2017_and_the_lstm_are_nobodys(name: str) -> None:
    assert (to_hf(preset(name)) is None) == (name in ("tiny-transformer", "tiny-lstm"))


def test_llama_3_is_written_as_meta_writes_it() -> None:
    hf = to_hf(preset("llama-3-8b"))
    assert hf is not None
    published = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    }
    assert {name: hf[name] for name in published} == published
    assert hf["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}


@pytest.mark.parametrize("name", OURS)
def test_a_config_survives_theirs(name: str) -> None:
    _, config = OURS[name]
    hf = to_hf(config)
    assert hf is not None
    assert json.loads(json.dumps(hf)) == hf
    assert not differences(family(hf).config(hf), config)


@pytest.mark.parametrize(
    ("config", "places"),
    [
        (GPT, {"embedding.dropout": 0.1, "stack.pattern.0.mixer.dropout": 0.2, "stack.pattern.0.dropout": 0.3}),
        (GPT1, {"embedding.dropout": 0.1, "stack.pattern.0.mixer.dropout": 0.2, "stack.pattern.0.dropout": 0.3}),
        (LLAMA, {"stack.pattern.0.mixer.dropout": 0.2}),
        (BERT, {"embedding.dropout": 0.1, "stack.pattern.0.mixer.dropout": 0.2, "stack.pattern.0.dropout": 0.1}),
        (VIT, {"embedding.dropout": 0.1, "stack.pattern.0.mixer.dropout": 0.2, "stack.pattern.0.dropout": 0.1}),
        (DEEPSEEK, {"stack.first.0.mixer.dropout": 0.2, "stack.pattern.0.mixer.dropout": 0.2}),
        (
            OURS["marian"][1],
            {
                "source.dropout": 0.1,
                **{f"{side}.pattern.0.dropout": 0.1 for side in ("encoder", "decoder")},
                **{f"{side}.pattern.0.mixer.dropout": 0.2 for side in ("encoder", "decoder")},
                "decoder.pattern.0.cross.dropout": 0.2,
            },
        ),
    ],
    ids=["gpt2", "gpt1", "llama", "bert", "vit", "deepseek", "marian"],
)
def test_dropout_survives_where_the_family_has_the_place(config: Any, places: dict[str, float]) -> None:
    for path, share in places.items():
        config = config.with_value(path, share)
    hf = to_hf(config)
    assert hf is not None
    assert family(hf).config(hf).resolve() == config.resolve()


def test_dropout_that_a_family_has_no_place_for_is_kept_in_ours(tmp_path: Path) -> None:
    config = LLAMA.with_value("stack.pattern.0.dropout", 0.1).with_value("embedding.dropout", 0.2)
    random_model(config).save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    assert load(tmp_path).config == config


def test_equal_configs_differ_nowhere_and_others_say_where() -> None:
    twice = LLAMA.with_value("stack.pattern", LLAMA.stack.pattern * 3).with_value("stack.repeats", 1)
    assert not differences(LLAMA, changed(twice, head_dim=6, kv_heads=2, value_dim=6))
    assert differences(LLAMA, changed(LLAMA, rotary__theta=5.0)) == [
        f"stack.blocks.{i}.mixer.rotary.theta is 10000.0 and 5.0" for i in range(3)
    ]
    assert differences(LLAMA, LLAMA.with_value("stack.repeats", 2)) == ["stack.blocks is 3 parts and 2 parts"]
    assert differences(LLAMA, changed(LLAMA, head=None)) == ["head is LMHead and None"]


# ---- files


def test_the_folder(tmp_path: Path) -> None:
    save(random_model(LLAMA), tmp_path / "new" / "mine", extra={"max_position_embeddings": 77, "eos_token_id": 3})
    folder = tmp_path / "new" / "mine"
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "clearhead.json",
        "config.json",
        "model.safetensors",
    }
    assert loads((folder / "clearhead.json").read_text()) == LLAMA
    hf = json.loads((folder / "config.json").read_text())
    assert (hf["dtype"], hf["max_position_embeddings"], hf["eos_token_id"]) == ("float32", 77, 3)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert "LlamaForCausalLM" in card
    (folder / "README.md").write_text("mine")
    save(random_model(LLAMA), folder, force=True)
    assert (folder / "README.md").read_text() == "mine"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_precision_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_model(GPT).to(dtype)
    assert isinstance(model, Model)
    save(model, tmp_path)
    assert_same_weights(load(tmp_path), model)
    assert in_transformers(tmp_path).dtype == dtype


@pytest.mark.parametrize("asked", [None, "bfloat16"])
def test_mixed_types_become_one(asked: str | None, tmp_path: Path) -> None:
    """As an adapter that was merged leaves them behind."""
    save(random_model(LLAMA).to(torch.float16), tmp_path)
    retensor(tmp_path, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}))
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | {"dtype": asked}))
    loaded = load(tmp_path)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16 if asked else torch.float16}
    assert len(loaded.generate([1], max_new_tokens=2)[0].tokens) == 2


@pytest.mark.parametrize("kind", ["BertForPreTraining", "BertForMaskedLM"])
def test_bert_as_it_was_published(kind: str, tmp_path: Path) -> None:
    """With a pooler and the sentence head beside the head that is read, and norms called as TensorFlow did."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    theirs = transformers.BertForPreTraining(transformers.BertConfig(vocab_size=40, **sizes)).eval()
    theirs.save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | {"architectures": [kind]}))

    def as_first(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)

    retensor(tmp_path, as_first)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        wanted = theirs(tokens).prediction_logits
        torch.testing.assert_close(load(tmp_path)(tokens), wanted, atol=1e-4, rtol=1e-4)


class Words:
    """As much of a tokenizer as `save` asks for."""

    end = 7

    def __init__(self, text: str = "{}", fails: bool = False) -> None:
        self.text, self.fails = text, fails

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(self.text)
        if self.fails:
            raise OSError("no space left")


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    save(random_model(LLAMA), tmp_path, tokenizer=Words())
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 7
    before = contents(tmp_path)
    with pytest.raises(OSError, match="no space left"):
        save(random_model(LLAMA), tmp_path, tokenizer=Words("half", fails=True), force=True)
    assert contents(tmp_path) == before


def test_many_shards_and_back_to_one(tmp_path: Path) -> None:
    first, second = random_model(MIXTRAL), random_model(MIXTRAL)
    with torch.no_grad():
        for weight in second.parameters():
            weight.add_(0.1)
    save(first, tmp_path, shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert all((tmp_path / shard).stat().st_size < 25_000 for shard in shards)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in first.state_dict().values())
    assert_same_weights(load(tmp_path), first)
    torch.testing.assert_close(run(in_transformers(tmp_path), ours=False), run(first, ours=True), **TOLERANCE)
    save(second, tmp_path, shard_bytes=40_000, force=True)  # fewer: none of the first may stay
    assert_same_weights(load(tmp_path), second)
    assert len([*tmp_path.glob("*.safetensors")]) == len(
        set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())
    )
    save(first, tmp_path, force=True)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    assert_same_weights(load(tmp_path), first)
    save(second, tmp_path, shard_bytes=40_000, force=True)
    assert_same_weights(load(tmp_path), second)


def test_a_loaded_model_is_saved_onto_its_own_file(tmp_path: Path) -> None:
    save(random_model(LLAMA), tmp_path)
    loaded = load(tmp_path)
    before = {name: weight.clone() for name, weight in loaded.state_dict().items()}
    save(loaded, tmp_path, force=True)
    for model in (loaded, load(tmp_path)):
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_weights_are_mapped_not_read(tmp_path: Path) -> None:
    save(random_model(LLAMA), tmp_path)
    mapped = [line for line in mappings(load(tmp_path)) if str(tmp_path) in line]
    assert mapped


def mappings(model: Model) -> list[str]:
    """Which files this process has mapped while the model lives."""
    path = Path("/proc/self/maps")
    if not path.exists():
        pytest.skip("needs /proc")
    return path.read_text().splitlines()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_failed_save_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(random_model(LLAMA), tmp_path)
    before = contents(tmp_path)

    def half(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_folder, "write_safetensors", half)
    with pytest.raises(OSError, match="no space left"):
        save(random_model(GPT), tmp_path, force=True)
    assert contents(tmp_path) == before


def test_a_killed_save_leaves_the_old_files_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    save(random_model(GPT), tmp_path)
    before = contents(tmp_path)
    program = """
import os, signal, sys
from clearhead import build, load
from clearhead.models import folder
model = load(sys.argv[1])
def half(tensors, path):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
folder.write_safetensors = half
model.save(sys.argv[1], force=True)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    after = contents(tmp_path)
    (unfinished,) = (name for name in after if name.startswith(".model.safetensors."))
    assert after.pop(unfinished) == b"half"
    assert {name: data for name, data in after.items() if not name.endswith(".part")} == before
    assert_same_weights(load(tmp_path), random_model(GPT))
    save(random_model(GPT), tmp_path, force=True)
    assert contents(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_bare_name_is_found_in_the_local_hub_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    model = random_model(GPT)
    cache = tmp_path / "home" / "hub" / "models--gpt2"
    model.save(cache / "snapshots" / "0123abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abc")
    program = "import clearhead; print(clearhead.load('gpt2').origin.name)"
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0123abc", done.stderr


# ---- errors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good folder, to be spoilt."""
    save(random_model(LLAMA), tmp_path / "run")
    return tmp_path / "run"


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in data.items() if value is not ...}))


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def sharded(folder: Path) -> None:
    save(random_model(LLAMA), folder, shard_bytes=20_000, force=True)
    (folder / sorted(path.name for path in folder.glob("model-*"))[1]).unlink()


def escaping(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def own_without_config(folder: Path) -> None:
    edit(folder / "config.json", model_type="clearhead")
    (folder / "clearhead.json").unlink()


def foreign(folder: Path, **changes: Any) -> None:
    """As if it had come from elsewhere."""
    (folder / "clearhead.json").unlink()
    edit(folder / "config.json", **changes)


REMOTE = {"AutoModelForCausalLM": "modeling_foo.FooForCausalLM"}
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (no_config, r"config\.json is missing, so .*run is not a checkpoint folder"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json: it holds \[\], but must be an object"),
    "broken clearhead.json": (lambda f: (f / "clearhead.json").write_text("{"), r"clearhead\.json is not JSON"),
    "a part only": (
        lambda f: (f / "clearhead.json").write_text(dumps(LLAMA.stack)),
        r"clearhead\.json describes a Stack, not a whole model",
    ),
    "own without config": (own_without_config, r"clearhead\.json is missing, and this config\.json alone does not"),
    "two configs": (
        lambda f: edit(f / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
        r"describe different models: stack\.blocks\.0\.mixer\.rotary\.theta is 10000\.0 and 5\.0 and 2 more; to use",
    ),
    "unknown model_type": (
        lambda f: foreign(f, model_type="lama"),
        "the model_type 'lama' is not supported; supported: albert, .*bert, .*gpt2, .*, vit.*--family NAME",
    ),
    "unknown architecture": (
        lambda f: foreign(f, architectures=["LlamaForTokenClassification"]),
        "the architecture 'LlamaForTokenClassification' is not supported; did you mean .* Known: LlamaForCausalLM",
    ),
    "no size": (lambda f: foreign(f, hidden_size=...), r"config\.json of a llama lacks 'hidden_size'"),
    "remote code": (
        lambda f: foreign(f, model_type="foo", auto_map=REMOTE),
        "needs trust_remote_code.*never does.*a supported family",
    ),
    "remote code of a known name": (
        lambda f: foreign(f, architectures=["FooForCausalLM"], auto_map=REMOTE),
        "needs trust_remote_code",
    ),
    "quantised": (lambda f: foreign(f, quantization_config={"quant_method": "gptq"}), "is quantised by gptq"),
    "pickles": (pickled, r"only as pickles \(pytorch_model\.bin\); convert them: clearhead convert .*run OUT"),
    "pickles left on the Hub": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin.index.json"),
        r"only as pickles \(pytorch_model\.bin\.index\.json\); convert them: clearhead convert",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        r"run: model\.safetensors is missing$",
    ),
    "a shard missing": (sharded, r"run: model-00002-of-0000\d\.safetensors is missing$"),
    "an index that points out": (
        escaping,
        r"weight_map names \"\.\./elsewhere\.safetensors\", which is not a file there",
    ),
    "an empty index": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors.index.json").write_text("{}")),
        "without the field 'weight_map'",
    ),
    "cut": (cut, r"model\.safetensors is damaged"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), r"model\.safetensors is damaged"),
    "noise": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 1000), r"model\.safetensors is damaged"),
    "a tensor missing": (
        lambda f: retensor(f, lambda t: t.pop("model.norm.weight")),
        r"run: missing 1 tensor: norm\.weight",
    ),
    "a tensor too many": (
        lambda f: retensor(f, lambda t: t.update(extra=torch.zeros(1))),
        "run: unknown 1 tensor: extra",
    ),
    "both": (
        lambda f: retensor(f, lambda t: t.update(extra=t.pop("model.norm.weight"))),
        r"missing 1 tensor: norm\.weight; unknown 1 tensor: extra",
    ),
    "a misshapen tensor": (
        lambda f: retensor(f, lambda t: t.update({"model.norm.weight": torch.zeros(35)})),
        r"misshapen 1 tensor: norm\.weight gives stack\.final_norm\.weight as \(35,\), not \(36,\)",
    ),
    "parts that do not fit": (
        lambda f: retensor(f, lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(36, 35)})),
        "misshapen 1 tensor: .* cannot be joined to stack.blocks.0.mixer.qkv.weight",
    ),
    "whole numbers": (
        lambda f: retensor(f, lambda t: t.update({"model.norm.weight": torch.zeros(36, dtype=torch.int8)})),
        r"unsupported 1 tensor: stack\.final_norm\.weight is int8; weights must be one of float64, float32, bfloat16",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_folder_is_one_clear_sentence(name: str, folder: Path) -> None:
    spoil, sentence = SPOILT[name]
    spoil(folder)
    with pytest.raises((CheckpointError, ConfigError, JSONError), match=sentence) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere; give a checkpoint folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is not a folder"):
        load(tmp_path / "file")
    with pytest.raises(CheckpointError, match="file is a file, not a folder"):
        save(random_model(GPT), tmp_path / "file")


def test_remote_code_that_is_not_needed_is_not_refused(folder: Path) -> None:
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    assert load(folder).config == LLAMA


def test_an_alias_of_a_tied_table_is_no_surplus(tmp_path: Path) -> None:
    save(random_model(changed(LLAMA, head__tied=True)), tmp_path)
    retensor(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load(tmp_path).config.head.tied


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model = random_model(LLAMA)
    with pytest.raises(CheckpointError, match=r"extra would change the model: stack\.dim is 36 and 72"):
        save(model, tmp_path, extra={"hidden_size": 72})
    with pytest.raises(ValueError, match="shard_bytes is 0, but must be positive"):
        save(model, tmp_path, shard_bytes=0)
    model.stack.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"no longer matches its config: unknown 2 tensors: stack\.ad"):
        save(model, tmp_path)
    with torch.device("meta"):
        empty = build(LLAMA)
    with pytest.raises(CheckpointError, match="on the meta device"):
        save(empty, tmp_path)
    assert not list(tmp_path.iterdir())


REFUSED = {
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "bert": {"add_cross_attention": True},
    "vit": {"pooler_act": "relu"},
    "deepseek": {"mlp_bias": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_do_not_read_is_refused_not_ignored(name: str) -> None:
    hf = to_hf(OURS[name][1])
    assert hf is not None
    with pytest.raises(ConfigError, match=r"not supported.* yet"):
        family(hf).config(hf | REFUSED[name])


def test_every_family_is_tested() -> None:
    with torch.device("meta"):
        theirs = [make(transformers).config.model_type for make in DECODERS.values()]
        theirs += [make(transformers, "Model").config.model_type for make in ENCODERS.values()]
    tiny = families.DECODERS | families.ENCODERS | families.TRANSLATORS | families.WHISPER
    theirs += [getattr(transformers, families.config_class(name, head)).model_type for name, head, _ in tiny.values()]
    assert {*theirs, *(kind for kind, _ in OURS.values())} == FAMILIES.keys()
