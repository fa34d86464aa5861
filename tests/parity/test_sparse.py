"""Longformer's and BigBird's layers as transformers has them, with tiny random weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.sparse import Drawn, bigbird
from clearhead.configs import AttentionConfig, Blockwise, LongformerConfig
from clearhead.configs.tiles import WASTE
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.context import Context
from clearhead.nn.longformer import Longformer

transformers = pytest.importorskip("transformers")


def copy_projections(theirs: torch.nn.Module, ours: torch.nn.Linear, suffix: str = "") -> None:
    parts = [getattr(theirs, name + suffix) for name in ("query", "key", "value")]
    with torch.no_grad():
        ours.weight.copy_(torch.cat([part.weight for part in parts]))
        ours.bias.copy_(torch.cat([part.bias for part in parts]))


def make_identity(layer: torch.nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.eye(len(layer.weight)))


@pytest.mark.parametrize("tokens", [0, 1, 3, 20])  # 20: so many that each text gets keys and values for them
@pytest.mark.parametrize("real", [64, 50], ids=["whole", "padded"])
def test_longformer_with_its_global_projections(tokens: int, real: int) -> None:
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    torch.manual_seed(0)
    dim, heads, length = 24, 3, 64
    config = transformers.LongformerConfig(
        hidden_size=dim, num_attention_heads=heads, attention_window=[16], attention_probs_dropout_prob=0.0
    )
    theirs = LongformerSelfAttention(config, layer_id=0).eval()
    ours = Longformer(LongformerConfig(heads=heads, window=9, tokens=tokens, qkv_bias=True), dim).eval()
    copy_projections(theirs, ours.qkv)
    make_identity(ours.out)
    x = torch.randn(2, length, dim)
    kind = torch.zeros(2, length).index_fill(1, torch.arange(tokens), 10000.0)  # 0 local, positive global
    kind[:, real:] = -10000.0
    with torch.no_grad():
        theirs.value_global.bias += 1
        copy_projections(theirs, ours.global_qkv, "_global")
        want = theirs(x, kind, kind < 0, kind > 0, tokens > 0)[0][:, :real]
        readable = torch.arange(length).expand(2, -1) < real
        positions = torch.where(readable, torch.arange(length), 0)
        context = Context(positions, positions, readable)
        got = [ours(x, ctx)[:, :real] for ctx in (context, Context(positions, positions, readable, fused=False))]
    for one in got:
        torch.testing.assert_close(one, want, atol=2e-6, rtol=1e-5)


def test_bigbird_under_the_pattern_that_transformers_drew() -> None:
    """Its random blocks are read out of its weights; the fast path then computes those blocks and hardly any others."""
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    torch.manual_seed(0)
    dim, length, block = 16, 768, 32
    config = transformers.BigBirdConfig(
        hidden_size=dim, num_attention_heads=1, block_size=block, num_random_blocks=3, max_position_embeddings=length
    )
    theirs = BigBirdBlockSparseAttention(config, seed=1).train()  # in eval mode it draws nothing
    x, real = torch.randn(1, length, dim), torch.ones(1, length)
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(real, block)
    with torch.no_grad():
        want, weights = theirs(x, band, rows, columns, blocked, blocked)
    side = length // block
    pattern = (weights[0, 0].unflatten(0, (side, block)).unflatten(2, (side, block)) > 0).any(3).any(1)
    assert pattern[2:-2].sum(1).tolist() == [3 + 2 + 3] * (side - 4), "window, two global blocks, three at random"
    blocks = np.arange(side)
    measured = bigbird(side)(blocks[:, None], blocks)
    assert measured.sum(1).tolist() == pattern.sum(1).tolist(), "the benchmark of ours reads as many"
    mask = Blockwise(block, Drawn(pattern.numpy().tobytes(), side))
    ours = MultiHeadAttention(AttentionConfig(heads=1, mask=mask, qkv_bias=True), dim).eval()
    copy_projections(theirs, ours.qkv)
    make_identity(ours.out)
    positions = torch.arange(length)[None]
    context = Context(positions, positions, aligned=True)
    plans = context.tiles((mask,))
    assert plans is not None
    assert sum(tile.area for tile in plans[0]) <= WASTE * int(pattern.sum()) * block**2
    with torch.no_grad():
        torch.testing.assert_close(ours(x, context), want.view(1, length, dim), atol=2e-6, rtol=1e-5)
