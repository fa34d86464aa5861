"""The compiled kernels against plain PyTorch: every storage, odd sizes, few rows and many; and no compiler at all."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clearhead.configs import (
    PRECISIONS,
    AttentionConfig,
    BFloat16,
    BlockConfig,
    Causal,
    FeedForwardConfig,
    Float32,
    GatedFeedForwardConfig,
    Int4,
    Int8,
    LayerNormConfig,
    MambaConfig,
    Precision,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
    Window,
)
from clearhead.kernels import calls
from clearhead.kernels.accelerate import accelerate
from clearhead.kernels.build import (
    NEEDS,
    Matrix,
    NoKernels,
    check_owner,
    digest,
    kernels,
    library_path,
    load,
    processor_flags,
)
from clearhead.kernels.calls import kernels_on
from clearhead.kernels.decode import KernelAttention, KernelMamba
from clearhead.models.llama import decoder
from clearhead.models.model import SequenceModel, build
from clearhead.models.quantize import quantize
from clearhead.nn.cache import clamp_to
from clearhead.nn.context import Context
from clearhead.nn.pages import Pages
from clearhead.nn.stack import Block
from clearhead.precision import matrix, rounding
from clearhead.precision.matrix import Packed, pack

STORED = [*PRECISIONS.values(), Int8(group=64), Int4(group=256)]
SHAPES = [(1, 1), (3, 16), (5, 31), (17, 100), (16, 128), (37, 131), (50, 300)]


@pytest.fixture(autouse=True)
def compiled() -> None:
    if kernels() is None:
        pytest.skip("there is no C compiler")


def plainly(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The matrix as plain PyTorch unpacks it."""
    with monkeypatch.context() as patch:
        patch.setattr(matrix, "kernels", lambda: None)
        return packed.dense()


@pytest.mark.parametrize("precision", STORED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_those_of_the_unpacked_matrix(
    precision: Precision, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(sum(shape))
    packed, bias = pack(torch.randn(shape), precision), torch.randn(shape[0])
    dense = plainly(packed, monkeypatch)
    assert torch.equal(packed.dense(), dense)
    for many in (*range(1, 11), 16, 31, 32, 33, 70):
        x = torch.randn(many, shape[1])
        exact = (x.double() @ dense.double().T + bias).float()
        torch.testing.assert_close(packed.linear(x, bias), exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("precision", STORED, ids=str)
def test_any_leading_dimensions_and_layouts_of_the_input(precision: Precision) -> None:
    torch.manual_seed(0)
    packed = pack(torch.randn(7, 20), precision)
    x = torch.randn(20, 3, 2).permute(1, 2, 0)  # last dimension not contiguous
    torch.testing.assert_close(packed.linear(x), F.linear(x, packed.dense()), rtol=1e-5, atol=1e-5)
    assert packed.linear(torch.randn(2, 0, 20)).shape == (2, 0, 7)
    assert packed.linear(torch.randn(20)).shape == (7,)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    torch.manual_seed(0)
    packed, x, before = pack(torch.randn(600, 384), Int4()), torch.randn(3, 384), torch.get_num_threads()
    alone = packed.linear(x)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(packed.linear(x), alone)
    finally:
        torch.set_num_threads(before)


def test_special_numbers_pass_through() -> None:
    weight = torch.tensor([[1.0, torch.inf, torch.nan, 65504.0, 6e-8, -6e-5] + [0.0] * 26])
    for name in ("float32", "bfloat16", "float16"):
        packed = pack(weight, PRECISIONS[name])
        for column in range(6):
            x = F.one_hot(torch.tensor([column]), 32).float()[:, : column + 1]
            got = pack(weight[:, : column + 1], PRECISIONS[name]).linear(x)
            wanted = packed.dense()[:, : column + 1] @ x[0]
            torch.testing.assert_close(got[0], wanted, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("precision", STORED, ids=str)
def test_rows_of_a_table_and_slices(precision: Precision) -> None:
    torch.manual_seed(0)
    packed = pack(torch.randn(11, 37), precision)
    ids = torch.tensor([[3, 0, 10], [10, 3, 3]])
    assert torch.equal(packed.look_up(ids), packed.dense()[ids])
    x = torch.randn(2, 37)
    torch.testing.assert_close(packed[4:9].linear(x), packed.linear(x)[:, 4:9])
    several = pack(torch.randn(3, 5, 37), precision)
    torch.testing.assert_close(several[1].linear(x), F.linear(x, several.dense()[1]), rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_input() -> None:
    torch.manual_seed(0)
    packed, x = pack(torch.randn(5, 32), Int8()), torch.randn(2, 32, requires_grad=True)
    packed.linear(x).sum().backward()
    torch.testing.assert_close(x.grad, packed.dense().sum(0).expand(2, 32))


# ---- attention

ROTARIES = {
    "none": None,
    "halves": RotaryConfig(),
    "interleaved": RotaryConfig(layout="interleaved"),
    "a part of the width": RotaryConfig(dim=4),
}
HEADS = {"MHA": (4, 4, 8), "GQA": (4, 2, 20), "MQA": (3, 1, 16), "wide": (2, 2, 40), "usual": (2, 1, 64)}


def model_of(heads: int, kv_heads: int, width: int, rotary: RotaryConfig | None, mask: object) -> SequenceModel:
    mixer = AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=width, mask=mask, rotary=rotary)
    ffn = GatedFeedForwardConfig(hidden=48)
    model = build(decoder(dim=24, layers=2, mixer=mixer, ffn=ffn, vocabulary=31)).eval()
    assert isinstance(model, SequenceModel)
    return model


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(7)], ids=str)
def test_decoding_equals_the_plain_model(
    heads: tuple[int, int, int], rotary: RotaryConfig | None, mask: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    plain = model_of(*heads, rotary, mask)
    quick = quantize(plain, PRECISIONS["float32"])
    tokens = torch.randint(0, 31, (2, 100))
    used = []
    described = KernelAttention.read_cache
    monkeypatch.setattr(KernelAttention, "read_cache", lambda *given: used.append(1) or described(*given))
    with torch.inference_mode():
        whole = plain(tokens)
        state, at, pieces = quick.init_state(2, 100), 0, []
        for length in (70, 1, 1, 5, 1, 8, 14):  # the window's ring reads beside the cache where more than one comes
            pieces.append(quick(tokens[:, at : at + length], state=state))
            at += length
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-5)
    assert len(used) >= 2 * 3


BLOCKS = {
    "no biases": (AttentionConfig(heads=2, head_dim=34, rotary=RotaryConfig()), True),
    "biases": (
        AttentionConfig(heads=3, kv_heads=1, head_dim=32, rotary=RotaryConfig(), qkv_bias=True, out_bias=True),
        True,
    ),
    "keys of their own width": (AttentionConfig(heads=2, head_dim=48, value_dim=96), True),
    "a norm of queries": (AttentionConfig(heads=2, head_dim=128, qk_norm=RMSNormConfig()), False),
}


@pytest.mark.parametrize("precision", [Float32(), BFloat16(), Int8(), Int4(group=256)], ids=str)
@pytest.mark.parametrize(("mixer", "whole"), BLOCKS.values(), ids=BLOCKS)
def test_a_block_in_one_call_equals_its_parts_in_plain_pytorch(
    precision: Precision, mixer: AttentionConfig, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of texts of different lengths, one and eight of them; the cache in 32 bits, and rounded to 16."""
    torch.manual_seed(4)
    mixer = replace(mixer, mask=Causal())
    built = build(decoder(dim=70, layers=2, mixer=mixer, ffn=GatedFeedForwardConfig(hidden=90), vocabulary=31)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    tokens, lengths = torch.randint(0, 31, (8, 30)), torch.randint(3, 20, (8, 1))

    def run(model: SequenceModel, rows: int) -> torch.Tensor:
        state = model.init_state(rows, 32)
        model(tokens[:rows, :20], state=state, readable=torch.arange(20) < lengths[:rows])
        return torch.cat([model(tokens[:rows, at : at + 2], state=state) for at in range(20, 30, 2)], 1)

    lengths_seen: list[int] = []
    forward = KernelAttention.forward  # a block in one call does not use it

    def watch(*given: Any) -> torch.Tensor:
        lengths_seen.append(given[1].shape[1])
        return forward(*given)

    monkeypatch.setattr(KernelAttention, "forward", watch)
    for cache, tolerance in (("float32", 1e-4), ("float16", 5e-3)):
        model = quantize(built, replace(precision, cache=cache))
        for rows in (1, 8):
            with torch.inference_mode():
                lengths_seen.clear()
                quick = run(model, rows)
                assert lengths_seen.count(2) == (0 if whole else 2 * 5)
                with monkeypatch.context() as patch:
                    patch.setattr(calls, "kernels", lambda: None)
                    plain = run(model, rows)
            assert (quick - plain).norm() < tolerance * plain.norm()


def test_a_number_too_large_for_the_cache_becomes_the_largest() -> None:
    state = quantize(model_of(2, 2, 64, None, Causal()), PRECISIONS["int8"]).init_state(1, 4).blocks[0].mixer
    assert state.key.dtype == torch.float16
    kept = clamp_to(torch.tensor([1e6, -1e6, 1.0, torch.nan]), torch.float16)
    torch.testing.assert_close(kept.float(), torch.tensor([65504.0, -65504.0, 1.0, torch.nan]), equal_nan=True)


def test_types_of_the_process_and_of_the_rest_of_the_model_change_nothing() -> None:
    torch.manual_seed(5)
    model = quantize(model_of(2, 2, 64, RotaryConfig(), Causal()), Int8())
    tokens = torch.randint(0, 31, (2, 9))

    def run() -> torch.Tensor:
        with torch.inference_mode():
            state = model.init_state(2, 9)
            return torch.cat([model(part, state=state) for part in tokens.split([5, 1, 1, 2], 1)], 1).float()

    wanted = run()
    torch.set_default_dtype(torch.float16)
    try:
        assert torch.equal(run(), wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.half().stack.blocks[0].mixer.qkv.weight.scales.dtype == torch.bfloat16
    torch.testing.assert_close(run(), wanted, rtol=0.02, atol=0.02)  # gains of 1 are exact, sums are not
    assert torch.equal(model.float() and run(), wanted)


def test_kernels_are_not_for_what_autocast_computes() -> None:
    x = torch.ones(2, 16)
    assert kernels_on(x) is not None
    with torch.autocast("cpu", torch.float16):
        assert kernels_on(x) is None


@pytest.mark.parametrize("many", [1, 33, 200])
def test_a_gated_layer_and_a_norm_of_any_length_equal_plain_pytorch(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    quick = quantize(model_of(2, 2, 8, RotaryConfig(), Causal()), PRECISIONS["float32"])
    x = 3 * torch.randn(1, many, 24)
    block, context = quick.stack.blocks[0], Context(torch.arange(many)[None], torch.arange(many)[None])
    with torch.inference_mode():
        found = block.ffn(x, context), block.mixer_residual.before(x)
        monkeypatch.setattr(calls, "kernels", lambda: None)
        for mine, plain in zip(found, (block.ffn(x, context), block.mixer_residual.before(x)), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("many", [1, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dim", [32, 23])
def test_a_plain_layer_and_a_norm_after_the_sum_equal_plain_pytorch(
    many: int, bias: bool, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    ffn = FeedForwardConfig(hidden=2 * dim + 3, activation="relu", bias=bias)
    block = BlockConfig(mixer=AttentionConfig(heads=1), ffn=ffn, norm=LayerNormConfig(bias=bias), placement="post")
    stack = StackConfig(dim=dim, pattern=(block,), repeats=1)
    model = build(SequenceModelConfig(embedding=TokenEmbeddingConfig(vocabulary=5), stack=stack)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    plain, quick = deepcopy(model).stack.blocks[0], accelerate(model).stack.blocks[0]
    x, context = 2 * torch.randn(2, many, dim), Context(torch.arange(many)[None], torch.arange(many)[None])

    def run(block: Block) -> torch.Tensor:
        return block.ffn_residual(x, lambda h: block.ffn(h, context), context)

    asked: list[str] = []
    with torch.no_grad(), monkeypatch.context() as patch:
        torch.testing.assert_close(run(quick), run(plain), rtol=1e-5, atol=1e-5)
        patch.setattr("clearhead.kernels.calls.kernels", lambda: asked.append("asked for"))
        run(quick)
        assert len(asked) == 2, "the layer and the sum are for the kernels"
        x[0, 0, 0] = torch.nan
        patch.undo()
        assert torch.equal(run(quick).isnan(), run(plain).isnan())
    x[0, 0, 0] = 0.0
    for block in (plain, quick):
        run(block).square().mean().backward()
    for mine, theirs in zip(quick.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_position_before_the_first_is_refused() -> None:
    model = quantize(model_of(2, 2, 8, RotaryConfig(), Causal()), Int8())
    with pytest.raises(ValueError, match="position -1 is negative"):
        model(torch.tensor([[3]]), positions=torch.tensor([[-1]]), state=model.init_state(1, 4))


def test_a_copy_of_a_packed_matrix_reads_its_own_numbers() -> None:
    packed, x = pack(torch.randn(7, 32), Int8()), torch.randn(1, 32)
    before, other = packed.linear(x), deepcopy(packed)
    other.values.zero_()
    assert torch.equal(packed.linear(x), before)
    assert torch.equal(other.linear(x), torch.zeros(1, 7))


def test_rows_of_different_length_decode_like_each_alone() -> None:
    torch.manual_seed(2)
    plain = model_of(4, 2, 8, RotaryConfig(), Causal())
    quick = quantize(plain, PRECISIONS["float32"])
    tokens, lengths = torch.randint(0, 31, (3, 12)), (12, 5, 9)
    readable = torch.arange(12) < torch.tensor(lengths)[:, None]
    new = torch.randint(0, 31, (3, 2))
    with torch.inference_mode():
        state = quick.init_state(3, 14)
        quick(tokens, state=state, readable=readable)
        together = torch.cat([quick(new[:, i : i + 1], state=state) for i in range(2)], 1)
        for row, length in enumerate(lengths):
            alone = plain(torch.cat((tokens[row, :length], new[row]))[None])[:, -2:]
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)


STATE_SPACES = {
    "whole vectors": MambaConfig(inner=64),
    "no vector is whole, biases": MambaConfig(inner=37, state_dim=5, rank=3, conv=3, bias=True),
    "no bias of the filter": MambaConfig(inner=20, state_dim=1, conv=1, conv_bias=False),
    "many numbers": MambaConfig(inner=300, state_dim=16),
}


@pytest.mark.parametrize("mixer", STATE_SPACES.values(), ids=STATE_SPACES)
def test_a_state_space_decodes_like_the_plain_model(mixer: MambaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """After texts of different lengths, token by token and some at once; a row taken out goes on alone."""
    torch.manual_seed(3)
    plain = build(decoder(dim=24, layers=2, mixer=mixer, ffn=GatedFeedForwardConfig(hidden=16), vocabulary=31)).eval()
    assert isinstance(plain, SequenceModel)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.3 * torch.randn_like(parameter)  # decay rates on both sides of 1, and steps of any length
    quick = quantize(plain, PRECISIONS["float32"])
    tokens, readable = torch.randint(0, 31, (3, 20)), torch.arange(9) < torch.tensor([[9], [4], [7]])
    used, can = [], KernelMamba.can_step
    monkeypatch.setattr(KernelMamba, "can_step", lambda *given: used.append(can(*given)) or used[-1])

    def run(model: SequenceModel) -> torch.Tensor:
        state, at, pieces = model.init_state(3, 20), 9, []
        model(tokens[:, :9], state=state, readable=readable)
        for length in (1, 1, 3, 1, 1, 1):
            pieces.append(model(tokens[:, at : at + length], state=state))
            at += length
        state.select(torch.tensor([2]))
        return torch.cat([*(piece[2:] for piece in pieces), model(tokens[2:, at : at + 1], state=state)], 1)

    with torch.inference_mode():
        torch.testing.assert_close(run(quick), run(plain), rtol=1e-4, atol=2e-5)
    assert used.count(True) == 2 * 6


def test_a_nan_that_is_read_stays_and_one_that_is_hidden_does_not_spread() -> None:
    plain = model_of(2, 2, 8, None, Causal())
    quick = quantize(plain, PRECISIONS["float32"])
    tokens = torch.randint(0, 31, (2, 6))
    readable = torch.ones(2, 6, dtype=torch.bool)
    with torch.inference_mode():
        state = quick.init_state(2, 8)
        quick(tokens, state=state, readable=readable)
        state.blocks[0].mixer.value[0, 0, 3, 0] = torch.nan
        state.blocks[0].mixer.key[1, :, 7] = torch.nan  # a slot that is not filled yet
        logits = quick(tokens[:, :1], state=state)
    assert logits[0].isnan().any()
    assert not logits[1].isnan().any()


# ---- nothing is remembered between calls


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (accelerate, ("before.weight", "qkv.weight", "down.weight")),
        (lambda model: quantize(model, Int8()), ("before.weight", "weight.scales")),
    ],
    ids=["accelerate", "quantize"],
)
def test_tensors_assigned_after_a_decode_are_used(
    make: Callable[[SequenceModel], SequenceModel], parts: tuple[str, ...]
) -> None:
    torch.manual_seed(8)
    model = make(model_of(2, 2, 8, RotaryConfig(), Causal()))
    tokens = torch.randint(0, 31, (1, 8))

    def run() -> torch.Tensor:
        with torch.inference_mode():
            state = model.init_state(1, 12)
            model(tokens, state=state)
            return model(tokens[:, :1], state=state)

    before = run()
    for part in parts:
        changed = {name: 3.0 * x if part in name else x for name, x in model.state_dict().items()}
        assert any(part in name for name in changed)
        model.load_state_dict(changed, assign=True)
        after = run()
        assert not torch.allclose(before, after)
        before = after


def test_accelerate_leaves_the_model_as_it_is() -> None:
    plain = model_of(2, 2, 8, RotaryConfig(), Causal())
    kinds, strides = [type(m) for m in plain.modules()], [p.stride() for p in plain.parameters()]
    fast = accelerate(plain)
    assert [type(m) for m in plain.modules()] == kinds
    assert [p.stride() for p in plain.parameters()] == strides
    assert any(isinstance(m, KernelAttention) for m in fast.modules())
    assert list(fast.state_dict()) == list(plain.state_dict())
    tokens = torch.randint(0, 31, (1, 8))
    torch.testing.assert_close(fast(tokens), plain(tokens))


# ---- pages


@pytest.mark.parametrize("precision", [Float32(), *PRECISIONS.values()], ids=str)
def test_a_row_computes_the_same_bits_alone_and_in_company(precision: Precision) -> None:
    torch.manual_seed(9)
    packed, x = pack(torch.randn(83, 260), precision), torch.randn(32, 260)
    alone = torch.cat([packed.linear(row[None]) for row in x])
    for many in (2, 3, 5, 8, 31, 32):
        assert torch.equal(packed.linear(x[:many]), alone[:many])
    model = quantize(model_of(4, 2, 20, RotaryConfig(), Causal()), precision)
    tokens, lengths = torch.randint(0, 31, (7, 50)), torch.tensor([40, 3, 33, 32, 31, 1, 12])

    def decode(rows: list[int]) -> torch.Tensor:
        state = model.init_state(len(rows), 60)
        state.lengths = lengths[rows]
        for slots in state.slots:  # as if each row had been read before, alone
            slots.positions[:, :50] = torch.where(torch.arange(50) < lengths[rows][:, None], torch.arange(50), -1)
            slots.filled = int(lengths[rows].max())
            slots.pages.claim_run(0, 50)
        for part in state.blocks:
            generator = torch.Generator().manual_seed(1)
            key = torch.randn(7, 2, 64, 20, generator=generator)[rows]
            for row in range(len(rows)):
                for place, page in enumerate(part.mixer.slots.pages.table[row].tolist()):
                    part.mixer.key[page] = part.mixer.value[page] = key[row, :, 32 * place : 32 * place + 32]
        return torch.cat([model(tokens[rows, i : i + 1], state=state) for i in range(3)], 1)

    with torch.inference_mode():
        together = decode(list(range(7)))
        for row in range(7):
            assert torch.equal(decode([row])[0], together[row])


def test_a_row_without_a_token_stays_in_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(10)
    plain = model_of(4, 2, 8, RotaryConfig(), Causal())
    fast = quantize(plain, Float32())
    tokens = torch.randint(0, 31, (3, 40))
    readable = torch.tensor([[True], [False], [True]])
    fallbacks: list[int] = []
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda *given: fallbacks.append(1) or forward(*given))

    def run(model: SequenceModel) -> torch.Tensor:
        state = model.init_state(3, 44)
        model(tokens, state=state, readable=torch.arange(40) < torch.tensor([[40], [7], [33]]))
        fallbacks.clear()
        first = model(tokens[:, :1], state=state, readable=readable)
        return torch.cat((first[[0, 2]], model(tokens[:, :1], state=state)[[0, 2]]), 1)

    with torch.inference_mode():
        wanted = run(plain)
        torch.testing.assert_close(run(fast), wanted, rtol=1e-4, atol=1e-5)
    assert not fallbacks


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    pages = Pages(2, 70, torch.device("cpu"))
    pages.claim_run(0, 40)
    assert pages.copies is None
    pages.select(torch.tensor([0, 0, 1]))
    assert pages.count == 9
    assert pages.users[pages.table[0, :2]].tolist() == [2, 2]
    pages.claim(torch.tensor([0, 1, 2]), torch.tensor([40, 40, 64]))
    assert pages.copies is not None
    old, new = pages.copies
    assert old.tolist() == [int(pages.table[1, 1])]  # the second row keeps the page, the first has taken a copy
    assert new.tolist() == [int(pages.table[0, 1])]
    assert pages.table[0, 0] == pages.table[1, 0]
    assert pages.table[2, 2] >= 0
    used = pages.table[pages.table >= 0].unique()
    assert sorted([*used.tolist(), *pages.free]) == list(range(9))


# ---- the compiler and its cache

CHILD = """
import warnings
import torch
from clearhead.configs import Int4
from clearhead.precision.matrix import pack
torch.manual_seed(0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    packed, x = pack(torch.randn(9, 70), Int4()), torch.randn(2, 70)
    y = [packed.linear(x) for _ in range(3)]
print(len(caught), *(str(one.message) for one in caught), sep="|")
print(y[0].sum().item())
"""


def run_child(**settings: str) -> tuple[str, float, str]:
    """What a fresh process reports, the sum it computes, and its stderr."""
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    reported, value = done.stdout.splitlines()
    return reported, float(value), done.stderr


def expected_sum() -> float:
    torch.manual_seed(0)
    return pack(torch.randn(9, 70), Int4()).linear(torch.randn(2, 70)).sum().item()


def test_without_a_compiler_torch_computes_the_same_and_reports_it_once(tmp_path: Path) -> None:
    reported, value, _ = run_child(CLEARHEAD_CACHE=str(tmp_path), PATH="", CC="")
    assert reported.startswith("1|the compiled kernels are not available")
    assert "there is no C compiler (cc, gcc or clang); install one" in reported
    assert abs(value - expected_sum()) < 1e-4


def test_a_failing_compiler_is_reported_in_the_first_process_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"CLEARHEAD_CACHE": str(tmp_path), "CC": "false"}
    reported, value, _ = run_child(**settings)
    assert "false could not compile kernels.c: it gave no reason" in reported
    assert abs(value - expected_sum()) < 1e-4
    assert [path.suffix for path in tmp_path.iterdir()] == [".failed"]
    assert run_child(**settings)[0] == "0"
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NoKernels, match="CC is 'no-such-compiler', but there is no such program"):
        library_path()


@pytest.mark.parametrize(
    ("compiler", "march"),
    [
        ("clang", "x86-64-v3"),
        *(
            pytest.param(compiler, march, marks=pytest.mark.proof)
            for compiler, march in (
                ("gcc", "portable"),
                ("gcc", "x86-64-v3"),
                ("gcc", "x86-64-v4"),
                ("clang", "x86-64-v4"),
                ("clang", "portable"),
            )
        ),
    ],
)
def test_every_compiler_and_instruction_set_computes_the_same(compiler: str, march: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    if platform.machine() != "x86_64" or not NEEDS.get(march, set()) <= processor_flags():
        pytest.skip(f"this processor has no {march}")
    reported, value, stderr = run_child(CLEARHEAD_CACHE=str(tmp_path), CC=compiler, CLEARHEAD_MARCH=march)
    assert reported == "0"
    assert stderr.startswith("clearhead: compiling the kernels")
    assert abs(value - expected_sum()) < 1e-4
    assert run_child(CLEARHEAD_CACHE=str(tmp_path), CC=compiler, CLEARHEAD_MARCH=march)[2] == ""


def test_a_damaged_library_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    made = library_path()
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    whole, written = made.read_bytes(), made.stat().st_mtime_ns
    assert library_path() == made
    assert made.stat().st_mtime_ns == written
    made.write_bytes(whole[: len(whole) // 2])
    again = library_path()
    assert again.stem.startswith(made.stem.rpartition("-")[0])
    assert kernel_file_is_whole(again)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def kernel_file_is_whole(path: Path) -> bool:
    return path.stem.endswith(digest(path.read_bytes()))


def test_a_library_that_others_may_write_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    made = library_path()
    made.chmod(0o722)
    with pytest.raises(NoKernels, match="other users may write"):
        library_path()
    made.chmod(0o700)
    found = os.stat(tmp_path)
    stranger = os.stat_result((*found[:4], 4711, *found[5:]))
    monkeypatch.setattr(Path, "stat", lambda path, **_: stranger)
    with pytest.raises(NoKernels, match="belongs to another user; set CLEARHEAD_CACHE"):
        check_owner(tmp_path)


def test_a_library_with_other_structs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(ctypes.Structure):
        _fields_ = [*Matrix._fields_, ("more", ctypes.c_int64)]

    monkeypatch.setattr("clearhead.kernels.build.STRUCTS", (Longer,))
    with pytest.raises(NoKernels, match="was built with a Longer of 72 bytes, but it has 80"):
        load(library_path())


@pytest.mark.parametrize("group", [32, 64, 256])
def test_int4_is_rounded_as_in_torch(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(37, 512) * torch.rand(37, 1)
    weight[0] = 0
    weight[1, 7] = 40
    rounded = {}
    for name in ("kernels", "torch"):
        codes, scales, table = rounding.round_int4(weight, group)
        rounded[name] = (table[codes.long()].unflatten(1, (-1, group)) * scales.float()[..., None]).flatten(1)
        monkeypatch.setattr(rounding, "kernels_for", lambda weight: None)
    found, wanted = ((each - weight).norm() for each in rounded.values())
    assert float(found) == pytest.approx(float(wanted), rel=1e-3)
    assert float((rounded["kernels"] != rounded["torch"]).float().mean()) < 0.02  # sums in another order break ties
    assert float(rounded["kernels"][0].abs().max()) == 0
