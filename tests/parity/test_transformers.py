"""Tiny random models of `transformers`, saved, loaded by us, and compared: every hidden state and the logits.

Weights are drawn large enough (std 0.2) that a wrong convention shows; float32, 1e-4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from clearhead.configs import ShortConvConfig  # noqa: E402
from clearhead.models.convert import family  # noqa: E402
from clearhead.models.load import load  # noqa: E402
from clearhead.models.model import EncoderDecoder, SequenceModel  # noqa: E402
from clearhead.nn.build import build_part  # noqa: E402
from clearhead.nn.context import Context  # noqa: E402
from clearhead.nn.tap import Taps  # noqa: E402

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
VOCABULARY, BATCH, LENGTH = 61, 3, 13

LLAMA = {
    "hidden_size": 36,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
GPT = {"n_embd": 28, "n_layer": 3, "n_head": 7, "vocab_size": VOCABULARY, "n_positions": 32}
BERT = {
    "hidden_size": 28,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 7,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
VIT = {
    "hidden_size": 28,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 7,
    "image_size": 15,
    "patch_size": 5,
    "num_channels": 2,
    "num_labels": 11,
}
ALBERT = {**BERT, "embedding_size": 10, "hidden_act": "gelu_new", "inner_group_num": 2}
DEEPSEEK = {
    "hidden_size": 40,
    "intermediate_size": 36,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "vocab_size": VOCABULARY,
    "n_routed_experts": 7,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 13,
    "n_group": None,
    "topk_group": None,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

NEOX = {
    "hidden_size": 28,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 7,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
PHI = {**NEOX, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": 0}

MAMBA = {
    "hidden_size": 28,
    "num_hidden_layers": 3,
    "state_size": 5,
    "conv_kernel": 3,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

DECODERS: dict[str, Any] = {
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(**GPT, bos_token_id=1, eos_token_id=2)),
    "gpt1": lambda t: t.OpenAIGPTLMHeadModel(t.OpenAIGPTConfig(**GPT)),
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
    "llama tied, biased": lambda t: t.LlamaForCausalLM(
        t.LlamaConfig(**LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "llama, linear rope": lambda t: t.LlamaForCausalLM(
        t.LlamaConfig(**LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0})
    ),
    "llama, llama3 rope": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA, rope_parameters=LLAMA3)),
    "llama, yarn rope": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA, rope_parameters=YARN)),
    "mistral": lambda t: t.MistralForCausalLM(t.MistralConfig(**LLAMA, sliding_window=5)),
    "qwen2": lambda t: t.Qwen2ForCausalLM(t.Qwen2Config(**{**LLAMA, "head_dim": 6})),
    "qwen3": lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**LLAMA)),
    "mixtral": lambda t: t.MixtralForCausalLM(
        t.MixtralConfig(**LLAMA, num_local_experts=5, num_experts_per_tok=2, sliding_window=None)
    ),
    "qwen2, some windows": lambda t: t.Qwen2ForCausalLM(
        t.Qwen2Config(**{**LLAMA, "head_dim": 6}, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    ),
    "qwen3, some windows": lambda t: t.Qwen3ForCausalLM(
        t.Qwen3Config(**LLAMA, use_sliding_window=True, sliding_window=5, max_window_layers=2)
    ),
    "qwen3_moe": lambda t: t.Qwen3MoeForCausalLM(
        t.Qwen3MoeConfig(**LLAMA, moe_intermediate_size=12, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True)
    ),
    "qwen3_moe, not normalised": lambda t: t.Qwen3MoeForCausalLM(
        t.Qwen3MoeConfig(**LLAMA, moe_intermediate_size=12, num_experts=5, num_experts_per_tok=3, norm_topk_prob=False)
    ),
    "phi3": lambda t: t.Phi3ForCausalLM(t.Phi3Config(**LLAMA, pad_token_id=0)),
    "phi3, partial, window": lambda t: t.Phi3ForCausalLM(
        t.Phi3Config(
            **LLAMA,
            pad_token_id=0,
            sliding_window=5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        )
    ),
    "olmo2": lambda t: t.Olmo2ForCausalLM(t.Olmo2Config(**{**LLAMA, "head_dim": 6})),
    "smollm3": lambda t: t.SmolLM3ForCausalLM(
        t.SmolLM3Config(**{**LLAMA, "head_dim": 6}, no_rope_layers=[1, 0, 1], pad_token_id=0)
    ),
    "stablelm": lambda t: t.StableLmForCausalLM(
        t.StableLmConfig(
            **{**LLAMA, "head_dim": 6},
            use_qkv_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4},
        )
    ),
    "gemma2": lambda t: t.Gemma2ForCausalLM(
        t.Gemma2Config(
            **LLAMA,
            sliding_window=5,
            query_pre_attn_scalar=5,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        )
    ),
    "gpt_neox": lambda t: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**NEOX, rotary_pct=0.5)),
    "gpt_neox, sequential, tied": lambda t: t.GPTNeoXForCausalLM(
        t.GPTNeoXConfig(**NEOX, use_parallel_residual=False, tie_word_embeddings=True, rotary_pct=1.0)
    ),
    "gptj": lambda t: t.GPTJForCausalLM(t.GPTJConfig(**GPT | {"n_embd": 42}, rotary_dim=4)),
    "phi": lambda t: t.PhiForCausalLM(t.PhiConfig(**PHI)),
    "cohere": lambda t: t.CohereForCausalLM(t.CohereConfig(**PHI, logit_scale=0.3)),
    "mamba": lambda t: t.MambaForCausalLM(t.MambaConfig(**MAMBA)),
    "mamba, biased, untied": lambda t: t.MambaForCausalLM(
        t.MambaConfig(
            **MAMBA, use_bias=True, use_conv_bias=False, tie_word_embeddings=False, time_step_rank=5, expand=3
        )
    ),
    "deepseek-v2": lambda t: t.DeepseekV2ForCausalLM(t.DeepseekV2Config(**DEEPSEEK, q_lora_rank=19)),
    "gemma": lambda t: t.GemmaForCausalLM(t.GemmaConfig(**LLAMA)),
    "gemma, biased, untied": lambda t: t.GemmaForCausalLM(
        t.GemmaConfig(**LLAMA, attention_bias=True, tie_word_embeddings=False)
    ),
    "gemma3": lambda t: t.Gemma3ForCausalLM(
        t.Gemma3TextConfig(
            **LLAMA, sliding_window=5, query_pre_attn_scalar=8, sliding_window_pattern=2, rope_parameters=GEMMA3
        )
    ),
    "deepseek-v3": lambda t: t.DeepseekV3ForCausalLM(
        t.DeepseekV3Config(**DEEPSEEK | GROUPS, q_lora_rank=19, num_mtp_layers=0)
    ),
    "deepseek-v3, yarn, halves": lambda t: t.DeepseekV3ForCausalLM(
        t.DeepseekV3Config(
            **DEEPSEEK | GROUPS,
            q_lora_rank=None,
            rope_parameters=YARN,
            rope_interleave=False,
            norm_topk_prob=False,
            num_mtp_layers=0,
        )
    ),
    "deepseek-v2-lite, yarn": lambda t: t.DeepseekV2ForCausalLM(
        t.DeepseekV2Config(**DEEPSEEK, q_lora_rank=None, rope_parameters=YARN)
    ),
}


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.2)
            if "norm" in name.lower() or "ln_" in name:
                parameter.add_(1.0 if name.endswith("weight") else 0.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    return model.eval()


def oracle(make: Any, folder: Path) -> Any:
    """An outsider's model with random weights, and ours loaded from what it saved."""
    theirs = randomise(make(transformers))
    theirs.save_pretrained(folder)
    return theirs


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def block_outputs(taps: Taps, stack: str = "stack") -> list[torch.Tensor]:
    """The outputs of the blocks, the last after the final norm, as `transformers` lists its hidden states."""
    found = {path: value for path, value in taps.values.items() if path.startswith(f"{stack}.")}
    ends = {
        path.split(".")[2]: value for path, value in found.items() if path.endswith(("_residual.after", ".residual"))
    }
    blocks = [ends[str(i)] for i in range(len(ends))]  # the last residual branch of each
    return [*blocks[:-1], taps.values[f"{stack}.final_norm"]]


OLDER = ("gpt", "mamba", "phi", "cohere", "stablelm", "qwen2, some", "qwen3, some", "smollm3")  # other fields, too
TURNED = [name for name in DECODERS if not name.startswith(OLDER)]


def without_type(rope: dict[str, Any]) -> dict[str, Any]:
    """transformers keeps the older word beside the newer."""
    return {key: without_type(x) if isinstance(x, dict) else x for key, x in rope.items() if key != "type"}


@pytest.mark.parametrize("name", TURNED)
def test_a_config_as_it_was_written_before_says_the_same(name: str) -> None:
    """Older fields: rotary positions at the top level, scaling by `type`, `torch_dtype`, no list of layers."""
    theirs = DECODERS[name](transformers).config
    new = theirs.to_dict()
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype", "layer_types")}
    old["torch_dtype"] = "float32"
    rope = new["rope_parameters"]
    word = "rope_type" if name == "gemma3" else "type"  # Gemma 3 came later
    if name == "gemma3":
        old["rope_local_base_freq"], rope = rope["sliding_attention"]["rope_theta"], rope["full_attention"]
        old["sliding_window_pattern"] = 2
    kind, old["rope_theta"] = rope["rope_type"], rope["rope_theta"]
    rest = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    old["rope_scaling"] = None if kind == "default" else {word: kind, **rest}
    read = without_type(type(theirs).from_dict(old).rope_parameters)
    assert read == theirs.rope_parameters, "transformers reads it otherwise"
    assert family(old).config(old) == family(new).config(new)


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = oracle(DECODERS[name], tmp_path)
    ours = load(tmp_path)
    assert isinstance(ours, SequenceModel)
    tokens = ids(BATCH, LENGTH)
    taps = Taps(read="stack.*")
    with torch.no_grad():
        expected = theirs(tokens, output_hidden_states=True)
        logits = ours(tokens, taps=taps)
        written_out = ours(tokens, fused=False)
    hidden = expected.hidden_states[1:]
    if theirs.config.model_type == "mamba":  # which lists no embedding, and the last block before and after its norm
        hidden = (*expected.hidden_states[:-2], expected.hidden_states[-1])
    for got, want in zip(block_outputs(taps), hidden, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    torch.testing.assert_close(logits, expected.logits, **TOLERANCE)
    torch.testing.assert_close(written_out, expected.logits, **TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "mixtral", "gemma3", "deepseek-v2"])
def test_padded_decoder_equals_transformers(name: str, side: str, tmp_path: Path) -> None:
    theirs = oracle(DECODERS[name], tmp_path)
    ours = load(tmp_path)
    tokens = ids(BATCH, LENGTH)
    readable = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    readable[1, : 4 if side == "left" else 0] = False
    readable[2, LENGTH - 7 if side == "right" else LENGTH :] = False
    positions = (readable.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=readable.long(), position_ids=positions).logits
        logits = ours(tokens, readable=readable)
    torch.testing.assert_close(logits[readable], expected[readable], **TOLERANCE)


@pytest.mark.parametrize("bias", [False, True])
def test_short_conv_equals_transformers(bias: bool) -> None:
    """LFM2's layer."""
    from transformers.models.lfm2.modeling_lfm2 import Lfm2Config, Lfm2ShortConv

    shape = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    torch.manual_seed(0)
    theirs = Lfm2ShortConv(Lfm2Config(**shape, conv_bias=bias, conv_L_cache=4, layer_types=["conv"]), layer_idx=0)
    ours = build_part(ShortConvConfig(conv=4, conv_bias=bias, bias=bias), 24)
    ours.input.load_state_dict(theirs.in_proj.state_dict())
    ours.out.load_state_dict(theirs.out_proj.state_dict())
    x, positions = torch.randn(BATCH, LENGTH, 24), torch.arange(LENGTH)[None]
    with torch.no_grad():
        ours.filter.copy_(theirs.conv.weight[:, 0].T)
        if bias:
            ours.filter_bias.copy_(theirs.conv.bias)
        torch.testing.assert_close(ours(x, Context(positions, positions)), theirs(x), **TOLERANCE)


NO_SEGMENTS = {name: value for name, value in BERT.items() if name != "type_vocab_size"}
ENCODERS = {
    "bert": lambda t, head, **more: getattr(t, f"Bert{head}")(t.BertConfig(**BERT, **more)),
    "albert": lambda t, head, **more: getattr(t, f"Albert{head}")(t.AlbertConfig(**ALBERT, **more)),
    "roberta": lambda t, head, **more: getattr(t, f"Roberta{head}")(t.RobertaConfig(**BERT, **more)),
    "xlm-roberta": lambda t, head, **more: getattr(t, f"XLMRoberta{head}")(t.XLMRobertaConfig(**BERT, **more)),
    "camembert": lambda t, head, **more: getattr(t, f"Camembert{head}")(t.CamembertConfig(**BERT, **more)),
    "electra": lambda t, head, **more: getattr(t, f"Electra{head}")(
        t.ElectraConfig(**BERT, embedding_size=10, hidden_act="gelu_new", **more)
    ),
    "electra, one width": lambda t, head, **more: getattr(t, f"Electra{head}")(
        t.ElectraConfig(**BERT, embedding_size=28, **more)
    ),
    "mpnet": lambda t, head, **more: getattr(t, f"MPNet{head}")(t.MPNetConfig(**NO_SEGMENTS, **more)),
    "distilbert": lambda t, head, **more: getattr(t, f"DistilBert{head}")(
        t.DistilBertConfig(
            dim=28, hidden_dim=41, n_layers=3, n_heads=7, vocab_size=VOCABULARY, max_position_embeddings=32, **more
        )
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_bert_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = oracle(lambda t: ENCODERS[name](t, "Model"), tmp_path)
    ours = load(tmp_path)
    tokens, segments = ids(BATCH, LENGTH), ids(BATCH, LENGTH) % 2
    readable = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    readable[1, 8:] = False
    taps = Taps(read=["stack.*"])
    kinds = ours.config.embedding.segments
    segments = None if kinds is None else segments % kinds
    more = {} if segments is None else {"token_type_ids": segments}
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=readable.long(), output_hidden_states=True, **more)
        out = ours(tokens, segments=segments, readable=readable, taps=taps)
    for got, want in zip(block_outputs(taps), expected.hidden_states[1:], strict=True):
        torch.testing.assert_close(got[readable], want[readable], **TOLERANCE)
    if "pooler_output" in expected:
        torch.testing.assert_close(out, expected.pooler_output, **TOLERANCE)
    else:
        torch.testing.assert_close(out[readable], expected.last_hidden_state[readable], **TOLERANCE)


@pytest.mark.parametrize(
    "head", ["ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
)
@pytest.mark.parametrize("name", ENCODERS)
def test_bert_heads_equal_transformers(name: str, head: str, tmp_path: Path) -> None:
    labels = 2 if head == "ForQuestionAnswering" else 5
    theirs = oracle(lambda t: ENCODERS[name](t, head, num_labels=labels), tmp_path)
    check_head(load(tmp_path), theirs, tmp_path / "again")


def check_head(ours: Any, theirs: Any, folder: Path, *, same: bool = True) -> None:
    """The logits are the same, and those of the model that `transformers` reads from what we save."""

    def logits(model: Any) -> torch.Tensor:
        out = model(tokens)
        return torch.stack((out.start_logits, out.end_logits), -1) if "start_logits" in out else out.logits

    tokens = ids(BATCH, LENGTH)
    with torch.no_grad():
        want = logits(theirs)
        torch.testing.assert_close(ours(tokens), want, **TOLERANCE)
    ours.save(folder)
    kind = type(theirs) if same else transformers.AutoModelForSequenceClassification
    again, loading = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.no_grad():
        torch.testing.assert_close(logits(again.eval()), want, **TOLERANCE)


UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("name", "head", "more"),
    [
        ("bert", "ForMaskedLM", UNTIED),
        ("roberta", "ForMaskedLM", UNTIED),
        ("bert", "LMHeadModel", {"is_decoder": True}),
        ("bert", "LMHeadModel", {"is_decoder": True, **UNTIED}),
        ("roberta", "ForCausalLM", {"is_decoder": True}),
        ("bert", "ForNextSentencePrediction", {}),
    ],
)
def test_rarer_berts_equal_transformers(name: str, head: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Untied, as a decoder, and next sentences, which are saved as a classifier of two classes."""
    theirs = oracle(lambda t: ENCODERS[name](t, head, **more), tmp_path)
    check_head(load(tmp_path), theirs, tmp_path / "again", same=head != "ForNextSentencePrediction")


@pytest.mark.parametrize(
    ("model", "config", "sizes"),
    [
        ("GPT2", "GPT2", GPT),
        ("Llama", "Llama", LLAMA),
        ("Gemma3Text", "Gemma3Text", LLAMA | {"query_pre_attn_scalar": 8}),
        ("DeepseekV3", "DeepseekV3", DEEPSEEK | GROUPS | {"num_mtp_layers": 0}),
    ],
)
def test_classes_of_the_last_token_equal_transformers(
    model: str, config: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    made = {**sizes, "num_labels": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    theirs = oracle(
        lambda t: getattr(t, f"{model}ForSequenceClassification")(getattr(t, f"{config}Config")(**made)), tmp_path
    )
    ours = load(tmp_path)
    tokens = ids(BATCH, LENGTH)
    tokens[1, 8:] = 0
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=(tokens != 0).long()).logits
        torch.testing.assert_close(ours(tokens, readable=tokens != 0), expected, **TOLERANCE)
    ours.save(tmp_path / "again")
    again, info = type(theirs).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values()), info
    again.config.pad_token_id = 0
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens, attention_mask=(tokens != 0).long()).logits, expected)


@pytest.mark.parametrize("head", ["ViTForImageClassification", "ViTModel"])
def test_vit_equals_transformers(head: str, tmp_path: Path) -> None:
    theirs = oracle(lambda t: getattr(t, head)(t.ViTConfig(**VIT)), tmp_path)
    ours = load(tmp_path)
    images = torch.randn(BATCH, 2, 15, 15, generator=torch.Generator().manual_seed(1))
    taps = Taps(read=["stack.*"])
    with torch.no_grad():
        expected = theirs(images, output_hidden_states=True)
        out = ours(images, taps=taps)
    for got, want in zip(block_outputs(taps)[:-1], expected.hidden_states[1:-1], strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    want = expected.logits if head == "ViTForImageClassification" else expected.pooler_output
    torch.testing.assert_close(out, want, **TOLERANCE)


@pytest.mark.parametrize("act", ["swish", "relu"])
def test_marian_equals_transformers(act: str, tmp_path: Path) -> None:
    config = {
        "d_model": 28,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 7,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 41,
        "decoder_ffn_dim": 37,
        "vocab_size": VOCABULARY,
        "pad_token_id": 60,
        "decoder_start_token_id": 60,
        "max_position_embeddings": 32,
        "activation_function": act,
        "scale_embedding": True,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    }

    def make(t: Any) -> Any:
        model = t.MarianMTModel(t.MarianConfig(**config))
        model.final_logits_bias = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2))
        return model

    theirs = randomise(make(transformers))
    with torch.no_grad():  # the sinusoids are not parameters that vary
        for side in (theirs.model.encoder, theirs.model.decoder):
            side.embed_positions.weight.copy_(side.embed_positions.create_weight())
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert isinstance(ours, EncoderDecoder)
    source, target = ids(BATCH, 11), ids(BATCH, 7)
    readable = torch.ones(BATCH, 11, dtype=torch.bool)
    readable[1, 6:] = False
    with torch.no_grad():
        expected = theirs(source, attention_mask=readable.long(), decoder_input_ids=target, output_hidden_states=True)
        taps = Taps(read=["encoder.*", "decoder.*"])
        logits = ours(source, target, source_readable=readable, taps=taps)
        memory = ours.encode(source, readable=readable)
        state = ours.init_state(memory, 7, readable=readable)
        pieces = torch.cat([ours.decode(piece, state) for piece in target.split((3, 1, 3), dim=1)], dim=1)
    for got, want in zip(block_outputs(taps, "encoder"), expected.encoder_hidden_states[1:], strict=True):
        torch.testing.assert_close(got[readable], want[readable], **TOLERANCE)
    for got, want in zip(block_outputs(taps, "decoder"), expected.decoder_hidden_states[1:], strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    torch.testing.assert_close(logits, expected.logits, **TOLERANCE)
    torch.testing.assert_close(pieces, expected.logits, **TOLERANCE)
