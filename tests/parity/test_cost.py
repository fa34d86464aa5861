"""The cost model against the published totals, the real modules, torch's own FLOP counter and its saved tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import clearhead
from clearhead.configs import Causal, DualChunkConfig, SequenceModelConfig, Window
from clearhead.measure.cost import cost
from clearhead.models.presets import PRESETS, preset

PUBLISHED = {
    "gpt1": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "bert-base": 109_482_240,
    "bert-base-mlm": 109_514_298,
    "bert-large": 335_141_888,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2-lite": 15_706_484_224,
    "mamba-130m": 129_135_360,
    "deepseek-v3": 671_026_419_200,
    "albert-base": 11_683_584,
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b": 999_885_952,
}
TINY = [name for name in PRESETS if name.startswith("tiny")]


def inputs(name: str, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    if name == "tiny-vit":
        return (torch.randn(batch, 1, 16, 16),)
    tokens = torch.randint(0, 101, (batch, length))
    return (torch.randint(0, 101, (batch, length + 2)), tokens) if name == "tiny-transformer" else (tokens,)


def sizes(name: str, batch: int, length: int) -> dict[str, Any]:
    if name == "tiny-vit":
        return {"batch": batch}
    return {"batch": batch, "length": length} | ({"source_length": length + 2} if name == "tiny-transformer" else {})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    assert cost(preset(name)).parameters.total == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_weights_are_those_of_the_real_modules(name: str) -> None:
    """Of a deep stack two repeats: more are more of the same, and `test_published_totals` counts them all."""
    config = preset(name)
    if isinstance(config, SequenceModelConfig) and config.stack.repeats > 2:
        config = config.with_value("stack.repeats", 2)
    with torch.device("meta"):  # every preset fits there
        model = clearhead.build(config)
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == config.weights()
    assert sum(weight.numel() for weight in model.state_dict().values()) == cost(config).parameters.total


@pytest.mark.parametrize("name", TINY)
def test_flops_are_what_torch_counts(name: str) -> None:
    """On the written-out path: torch's counter sees no FLOPs in the fused CPU kernel."""
    model = clearhead.build(preset(name)).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs(name, 3, 11), fused=False)
    assert cost(preset(name), **sizes(name, 3, 11)).flops.forward == counter.get_total_flops()


@pytest.mark.parametrize("length", [11, 600])
def test_flops_of_dual_chunks_are_what_torch_counts(length: int) -> None:
    """Three kinds of queries: as many tables of scores for a short text, tiles for a longer one."""
    rotary = DualChunkConfig(chunk=100, length=200)
    config = preset("tiny-llama").with_value("stack.pattern.0.mixer.rotary", rotary.to_dict())
    model, whole = clearhead.build(config).eval(), cost(preset("tiny-llama"), length=length).flops.forward
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs("tiny-llama", 1, length))
    counted = cost(config, length=length).flops.forward
    assert counted == counter.get_total_flops()
    assert counted > whole if length == 11 else counted < whole


@pytest.mark.parametrize(
    "name", ["tiny-gpt", "tiny-llama", "tiny-mistral", "tiny-mixtral", "tiny-deepseek", "tiny-lstm", "tiny-mamba"]
)
def test_decoding_flops_are_what_torch_counts(name: str) -> None:
    model = clearhead.build(preset(name)).eval()
    (tokens,) = inputs(name, 2, 23)
    state = model.init_state(2, 23)
    with torch.no_grad():
        model(tokens[:, :-1], state=state)
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, -1:], state=state, fused=False)
    assert cost(preset(name), batch=2, length=23).flops.decode == counter.get_total_flops()


@pytest.mark.parametrize(
    "name", ["tiny-gpt", "tiny-llama", "tiny-bert", "tiny-vit", "tiny-transformer", "tiny-lstm", "tiny-mamba"]
)
def test_activation_memory_is_what_autograd_saves(name: str) -> None:
    """Within a tenth: statistics of norms, log-sums of attention and token ids are not counted."""
    model = clearhead.build(preset(name)).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    keep = []  # so that no address is used twice
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (keep.append(t), pack(t))[1], lambda t: t):
        out = model(*inputs(name, 8, 48))
        torch.nn.functional.cross_entropy(out.flatten(0, -2), torch.zeros(out.numel() // out.shape[-1]).long())
    predicted = cost(preset(name), **sizes(name, 8, 48)).memory.activations
    assert predicted == pytest.approx(sum(saved.values()), rel=0.1)


@pytest.mark.parametrize(
    "name", ["tiny-gpt", "tiny-llama", "tiny-mistral", "tiny-deepseek", "tiny-transformer", "tiny-lstm", "tiny-mamba"]
)
def test_cache_memory_is_what_the_state_holds(name: str) -> None:
    model = clearhead.build(preset(name))
    if name == "tiny-transformer":
        state = model.init_state(torch.zeros(3, 19, 32), 17)
        predicted = cost(preset(name), batch=3, length=17, source_length=19)
    else:
        state = model.init_state(3, 17)
        predicted = cost(preset(name), batch=3, length=17)
    held = [t for block in state.blocks for part in (block.mixer, block.cross) for t in vars(part or object).values()]
    assert sum(t.nbytes for t in held if isinstance(t, torch.Tensor)) == predicted.memory.kv_cache


def test_one_block_of_the_textbook() -> None:
    n, d = 512, 768
    assert cost(preset("gpt2"), length=n).flops.block == 24 * n * d**2 + 4 * n**2 * d == 8_053_063_680


def test_feed_forward_has_8d2_weights_and_attention_4d2_and_4d_biases() -> None:
    d, bill = 768, cost(preset("gpt2"))
    assert bill.parameters.by_part["ffn"] == 12 * (8 * d**2 + 5 * d)
    assert bill.parameters.by_part["attention"] == 12 * (4 * d**2 + 4 * d)


def test_cache_of_grouped_latent_and_windowed_attention() -> None:
    """Per token and layer: 2·G·K for grouped heads, L + N for a latent; a window bounds the length."""
    grouped, latent, window = (cost(preset(name), length=8192, dtype="bfloat16").memory for name in (
        "llama-3-8b", "deepseek-v2-lite", "mistral-7b"
    ))  # fmt: skip
    assert grouped.kv_cache == 8192 * 32 * 2 * 8 * 128 * 2
    assert latent.kv_cache == 8192 * 27 * (512 + 64) * 2
    assert window.kv_cache == 4096 * 32 * 2 * 8 * 128 * 2


def test_experts_active_and_total() -> None:
    bill = cost(preset("mixtral-8x7b"))
    expert = 3 * 4096 * 14336
    assert bill.parameters.total - bill.parameters.active == 32 * 6 * expert
    assert bill.parameters.active == 12_879_925_248  # Mistral AI says 12.9B


def test_attention_passes_the_rest_only_beyond_6d() -> None:
    """4·n²·d > 24·n·d² exactly when n > 6·d."""
    d = 32
    config = preset("tiny-llama").with_value("stack.pattern.0.ffn", {"kind": "FeedForward", "hidden": 4 * d})
    config = config.with_value("stack.pattern.0.mixer.kv_heads", None)
    for n, quadratic_wins in ((6 * d - 1, False), (6 * d + 1, True)):
        steps = [s for s in clearhead.trace(config, length=n).steps if s.name.startswith("stack.blocks.0.")]
        quadratic = sum(s.flops for s in steps if s.order == "n²·d")
        assert (quadratic > sum(s.flops for s in steps) - quadratic) == quadratic_wins


def test_bad_sizes_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="length is 2000, but this model has 1024 learned positions"):
        cost(preset("gpt2"), length=2000)
    with pytest.raises(ValueError, match="an image gives this model 197 positions"):
        cost(preset("vit-b16"), length=10)
    with pytest.raises(ValueError, match="batch is 0"):
        cost(preset("gpt2"), batch=0)
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        cost(preset("gpt2"), dtype="float8")


def test_windows_that_bound_nothing_cost_like_none() -> None:
    config = preset("tiny-llama").with_value("stack.pattern.0.mixer.mask", (Causal() & Window(64)).to_dict())
    assert cost(config, length=17) == cost(preset("tiny-llama"), length=17)
    assert math.isclose(cost(config, length=64).memory.kv_cache, cost(config, length=128).memory.kv_cache)
