"""Attention alone: written out, fused, torch's own layer; grouped heads in decoding; memory by tiles."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import nn

from clearhead import functional
from clearhead.configs import AttentionConfig, Causal
from clearhead.nn.attention import MultiHeadAttention, fused_attention
from clearhead.nn.context import Context

from .turns import report, take_turns

PEAK = """
import numpy as np, sys
kind = sys.argv[1]
from benchmarks.turns import peak
if kind == "numpy":
    from clearhead import reference as engine
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16384, 64), dtype=np.float32)
    engine.flash_attention(q[:, :256], k[:, :256], v[:, :256])
else:
    import torch
    from clearhead import functional as engine
    q, k, v = torch.randn(3, 1, 16384, 64)
    engine.flash_attention(q[:, :256], k[:, :256], v[:, :256])
before = peak()
out = engine.flash_attention(q, k, v, causal=True)
print(f"{(peak() - before) / 2**20:.1f}")
"""


def main() -> None:
    layers()
    grouped_decoding()
    for kind in ("numpy", "torch"):
        peak = subprocess.run([sys.executable, "-c", PEAK, kind], capture_output=True, text=True, check=True).stdout
        print(f"flash_attention, {kind}, one head of 16,384 × 64, causal: peak extra memory {peak.strip()} MiB")


def layers() -> None:
    batch, length, dim, heads = 4, 512, 768, 12
    x = torch.randn(batch, length, dim)
    ours = MultiHeadAttention(AttentionConfig(heads=heads, mask=Causal(), qkv_bias=True, out_bias=True), dim).eval()
    theirs = nn.MultiheadAttention(dim, heads, batch_first=True).eval()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    positions = torch.arange(length)[None]
    blocked = ~functional.causal_mask(length)  # torch's layer wants True where it may not read

    def run(fused: bool) -> torch.Tensor:
        return ours(x, Context(positions, positions, aligned=True, fused=fused))

    def torch_layer() -> torch.Tensor:
        return theirs(x, x, x, attn_mask=blocked, is_causal=True, need_weights=False)[0]

    with torch.inference_mode():
        difference = (run(True) - torch_layer()).abs().max()
        seconds = take_turns(
            {
                "clearhead": lambda: run(True),
                "clearhead, written out": lambda: run(False),
                "nn.MultiheadAttention": torch_layer,
            }
        )
    report(
        f"causal layer, {batch} × {length}, d {dim}, {heads} heads (differ by {difference:.1e})", seconds, "clearhead"
    )


def grouped_decoding() -> None:
    q, k, v = torch.randn(1, 32, 1, 128), torch.randn(1, 8, 4096, 128), torch.randn(1, 8, 4096, 128)
    with torch.inference_mode():
        seconds = take_turns(
            {
                "clearhead, group folded into rows": lambda: fused_attention(q, k, v, None, False, None, None, 0.0),
                "SDPA with enable_gqa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                "SDPA over repeated keys": lambda: F.scaled_dot_product_attention(
                    q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
                ),
            },
            rounds=51,
        )
    report("one query, 32 heads on 8, 4,096 keys", seconds, "clearhead, group folded into rows")


if __name__ == "__main__":
    main()
