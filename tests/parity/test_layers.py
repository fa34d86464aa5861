"""The layers of `clearhead.nn` on their own, against those of `torch.nn` with the same weights."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import nn

B, T, S, D, H = 2, 7, 5, 12, 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same_attention(causal: bool = False) -> tuple[nn.MultiHeadAttention, torch.nn.MultiheadAttention]:
    torch.manual_seed(0)
    ours = nn.MultiHeadAttention(D, heads=H, causal=causal, bias=True).double()
    theirs = torch.nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        torch.nn.init.normal_(ours.qkv.bias)
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    return ours, theirs


@pytest.mark.parametrize("cross", [False, True])
def test_attention_and_its_weights_are_torchs(cross: bool) -> None:
    ours, theirs = same_attention()
    x, source = numbers(B, T, D), numbers(B, S, D, seed=1) if cross else None
    keys = x if source is None else source
    want, weights = theirs(x, keys, keys, average_attn_weights=False)
    torch.testing.assert_close(ours(x, source=source), want)
    out, found = ours(x, source=source, return_weights=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(found, weights)


def test_masks_of_every_shape_are_torchs() -> None:
    ours, theirs = same_attention()
    x = numbers(B, T, D)
    whole = torch.rand(B, H, T, T, generator=torch.Generator().manual_seed(3)) < 0.6
    whole[..., 0] = True
    for mask in (whole, whole[:, 0], whole[0, 0], whole[:, :1], whole[:1, 0, :1]):
        full = (mask if mask.dim() == 4 else mask[:, None] if mask.dim() == 3 else mask).expand(B, H, T, T)
        want, weights = theirs(x, x, x, attn_mask=~full.reshape(B * H, T, T), average_attn_weights=False)
        torch.testing.assert_close(ours(x, mask=mask), want)
        torch.testing.assert_close(ours(x, mask=mask, return_weights=True)[1], weights)


def test_causal_attention_and_gradients_are_torchs() -> None:
    ours, theirs = same_attention(causal=True)
    x = numbers(B, T, D).requires_grad_()
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    want = torch.autograd.grad(theirs(x, x, x, attn_mask=future)[0].square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(ours(x).square().sum(), x), want)


def test_a_query_that_may_read_nothing_gets_zeros() -> None:
    layer = nn.MultiHeadAttention(D, heads=H, kv_heads=2)
    out, weights = layer(torch.randn(B, T, D), mask=torch.zeros(T, T, dtype=torch.bool), return_weights=True)
    assert not out.any()
    assert not weights.any()


@pytest.mark.parametrize("first", [True, False])
def test_a_block_is_torchs_encoder_layer(first: bool) -> None:
    theirs = torch.nn.TransformerEncoderLayer(D, H, 20, 0.0, batch_first=True, norm_first=first, dtype=torch.float64)
    ours = nn.Block(
        D,
        mixer=nn.MultiHeadAttention(D, heads=H, bias=True),
        ffn=nn.FeedForward(D, 20, activation="relu"),
        norm="layer",
        placement="pre" if first else "post",
    ).double()
    norm = "before" if first else "after"
    names = {
        "mixer.qkv.weight": "self_attn.in_proj_weight",
        "mixer.qkv.bias": "self_attn.in_proj_bias",
        "mixer.out": "self_attn.out_proj",
        "ffn.up": "linear1",
        "ffn.down": "linear2",
        f"mixer_residual.{norm}": "norm1",
        f"ffn_residual.{norm}": "norm2",
    }
    weights = {}
    for key in ours.state_dict():
        old = next(ours for ours in names if key.startswith(ours))
        weights[key] = theirs.state_dict()[names[old] + key.removeprefix(old)]
    ours.load_state_dict(weights)
    x = numbers(B, T, D)
    torch.testing.assert_close(ours(x), theirs(x))


def test_norms_are_torchs() -> None:
    x = numbers(B, T, D) * 3 + 1
    torch.testing.assert_close(nn.LayerNorm(D).double()(x), torch.nn.LayerNorm(D, dtype=torch.float64)(x))
    torch.testing.assert_close(nn.RMSNorm(D).double()(x), torch.nn.RMSNorm(D, eps=1e-5, dtype=torch.float64)(x))


LAYERS = {
    "attention": lambda: nn.MultiHeadAttention(D, heads=H, kv_heads=2, head_dim=4, causal=True, rotary=True),
    "latent": lambda: nn.LatentAttention(D, heads=H, latent_dim=6, plain_dim=4, rope_dim=2),
    "linear": lambda: nn.LinearAttention(D, heads=H, causal=True),
    "performer": lambda: nn.LinearAttention(D, heads=H, causal=True, kernel="favor"),
    "mamba": lambda: nn.Mamba(D),
    "lstm": lambda: nn.LSTM(D),
    "conv": lambda: nn.ShortConv(D),
    "block": lambda: nn.Block(D, heads=H, causal=True),
    "mamba block": lambda: nn.Block(D, mixer=nn.Mamba(D), ffn=nn.MoE(D, experts=4, active=2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_alone_learns_and_does_not_read_ahead(name: str) -> None:
    layer = LAYERS[name]()
    x = torch.randn(B, T, D)
    out = layer(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    torch.testing.assert_close(layer(x[:, :4]), out[:, :4], atol=1e-5, rtol=1e-5)
    assert (layer(x + 1e-3 * torch.randn(B, T, D)) != out).any()


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"takes a float tensor of shape \[batch, length, dim\], not .* \(7, 12\)"):
        nn.Mamba(D)(torch.randn(T, D))
    with pytest.raises(TypeError, match=r"mask is torch.float32, but must be boolean"):
        nn.MultiHeadAttention(D, heads=H)(torch.randn(B, T, D), mask=torch.zeros(T, T))
    with pytest.raises(ValueError, match=r"either heads= .* or mixer="):
        nn.Block(D)
    with pytest.raises(clearhead.configs.ConfigError, match="heads"):
        nn.MultiHeadAttention(D, heads=0)


REFERENCE = (
    "attention embedding ffn flash gradients linear linear_attention loss lstm mamba moe norm positions rotary softmax"
)


@pytest.mark.parametrize(
    "module",
    [
        "nn.layers",
        "nn.weights",
        *(f"functional.{name}" for name in ("attention", "loss", "norm", "linear_attention", "gradients")),
        *(f"reference.{name}" for name in REFERENCE.split()),
    ],
)
def test_the_examples_of_docstrings_run(module: str) -> None:
    found = import_module(f"clearhead.{module}")
    names = {"torch": torch, "nn": torch.nn}
    failed, tried = doctest.testmod(found, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 0
    assert failed == 0
