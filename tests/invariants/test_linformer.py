"""The Linformer: the order of its products, its rows, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import clearhead
from clearhead.configs import Causal, ConfigError, LinformerConfig
from clearhead.measure.cost import cost
from clearhead.nn.build import build_part
from clearhead.nn.context import Context

from .cases import MIXERS, block, sequence
from .tools import close, ids, randomise, sequence_model

NAMES = pytest.mark.parametrize("name", ["linformer", "linformer, shared"])


@NAMES
def test_keys_and_values_are_projected_along_the_length(name: str) -> None:
    """As the paper writes it, head by head: softmax(Q(E·K)ᵀ/√K)·(F·V)."""
    config, length, dim = MIXERS[name], 11, 20
    layer = build_part(config, dim).double()
    randomise(layer)
    x, at = torch.randn(2, length, dim).double(), torch.arange(length)[None]
    (key, value), heads = config.widths(dim), []
    e = layer.key_rows.weight[:, :length]
    f = e if config.shared else layer.value_rows.weight[:, :length]
    with torch.no_grad():
        q, k, v = F.linear(x, layer.qkv.weight).split(
            (config.heads * key, config.heads * key, config.heads * value), -1
        )
        for h in range(config.heads):
            part, vpart = slice(h * key, (h + 1) * key), slice(h * value, (h + 1) * value)
            scores = q[..., part] @ (e @ k[..., part]).mT / key**0.5
            heads.append(scores.softmax(-1) @ (f @ v[..., vpart]))
        want = layer.out(torch.cat(heads, -1))
        for aligned in (True, False):
            for fused in (True, False):
                close(layer(x, Context(at, at, aligned=aligned, fused=fused)), want)


@NAMES
def test_flops_are_what_torch_counts(name: str) -> None:
    config = sequence(block(MIXERS[name]), repeats=1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        clearhead.build(config)(ids(2, 13), fused=False)
    assert cost(config, batch=2, length=13).flops.forward == counter.get_total_flops()


def test_the_length_is_what_it_can_read_unless_one_is_given() -> None:
    assert cost(sequence(block(MIXERS["linformer, shared"]), repeats=1)).length == 17


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Linformer\.mask is Causal\(\), .*before any query reads them.*LinearAttention"
    ):
        LinformerConfig(heads=2, length=8, rows=4, mask=Causal())
    with pytest.raises(ConfigError, match=r"Linformer\.rows is 0, but must be positive"):
        LinformerConfig(heads=2, length=8, rows=0)
    with pytest.raises(ConfigError, match="length is 18, but this model's Linformer has 17 positions"):
        cost(sequence(block(MIXERS["linformer, shared"])), length=18)
    model = sequence_model("linformer, shared; pre")
    with pytest.raises(ValueError, match="position 17 is past the 17 positions of this Linformer"):
        model(ids(1, 18))
    with pytest.raises(ValueError, match="position 20 is past the 17 positions of this Linformer"):
        model(ids(1, 2), positions=torch.tensor([[3, 20]]))
