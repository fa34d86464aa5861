"""Mamba-2: a state-space model with heads as a mixer (Dao & Gu 2024).

Letters: D width, H heads of K channels (I = H·K), G groups of heads, Z states per channel, O + 1 length of the filter.
Padding and documents are handled by `packing.py`, as in `mamba.py`.

One decay for each head, where Mamba has one for each channel and state. So a chunk of tokens is a product of matrices,
(C Bᵀ ∘ decays) x, like linear attention with a mask that fades, and it runs at the speed of matrix products. Heads of a
group share B and C, as query heads of grouped-query attention share keys and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import Mamba2Config
from clearhead.functional.mamba2 import dual_scan, dual_scan_written_out
from clearhead.functional.softmax import widen
from clearhead.precision.matrix import Linear

from .build import build_part, builds
from .cache import StateAllocator
from .context import Context
from .convolution import ConvState, convolve_rows
from .packing import DenseRows, dense_rows


@dataclass
class Mamba2State(ConvState):
    """The convolution's last inputs and h, the hidden state of each head. Constant size."""

    ssm: Float[Tensor, "B H Z K"]

    def select(self, rows: Int[Tensor, "B"]) -> None:
        """Row i becomes the old row `rows[i]`, in both parts of the state."""
        super().select(rows)
        self.ssm = self.ssm[rows]


@builds(Mamba2Config)
class Mamba2(nn.Module):
    """h_t = exp(Δ_t A)·h_{t−1} + Δ_t·B_t ⊗ x_t,   y_t = C_t·h_t + D·x_t in each head, with Δ, B, C computed from x.

    x ─ input ─┬─ x, write, read ─ conv ─ silu ─ scan ─ (+ skip·x) ─ (∘) ─ norm ─ out
               ├─ step ──────────────────────────┘                    │
               └─ gate ─ silu ────────────────────────────────────────┘

    In the code Δ is `step`, A `decay`, B `write`, C `read` and D `skip`. A pass over a text runs chunks of it as matrix
    products; decoding continues from h and the last few inputs of the convolution.
    """

    def __init__(self, config: Mamba2Config, dim: int) -> None:
        super().__init__()
        self.config = config
        self.widths = (config.inner, config.convolved, config.heads)  # of the gate, of x, write and read, and of Δ
        self.input = Linear(dim, sum(self.widths), bias=config.bias)
        self.filter = nn.Parameter(torch.empty(config.conv, config.convolved))
        self.filter_bias = nn.Parameter(torch.empty(config.convolved)) if config.conv_bias else None
        self.step_bias = nn.Parameter(torch.empty(config.heads))
        self.decay = nn.Parameter(torch.empty(config.heads))  # log(−A)
        self.skip = nn.Parameter(torch.empty(config.heads))
        self.norm = build_part(config.norm, config.inner)
        self.out = Linear(config.inner, dim, bias=config.bias)

    def init_weights(self) -> None:
        """The authors' initialisation: A = −1 … −H, and Δ between 0.001 and 0.1.

        A token keeps exp(Δ·A) of the state. So the first head starts out remembering 10 to 1,000 tokens, and head H an
        H-th of that: a fresh model has memories of many lengths.
        """
        with torch.no_grad():
            self.decay.copy_(torch.arange(1, len(self.decay) + 1, device=self.decay.device).log())
            self.skip.fill_(1)
            nn.init.uniform_(self.filter, -(len(self.filter) ** -0.5), len(self.filter) ** -0.5)
            wanted = torch.empty_like(self.step_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            self.step_bias.copy_(wanted + torch.log(-torch.expm1(-wanted)))  # the inverse of softplus

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: Mamba2State | None = None
    ) -> Float[Tensor, "B T D"]:
        """The mixer's output, B T D.

        Taps, in order: input B T 2·I+2·G·Z+H, conv B T I+2·G·Z, step B T H, scanned, gated and norm B T I, out B T D.
        """
        row = dense_rows(context, len(x))
        gate, mixed, step = context.tap("input", self.input(x)).split(self.widths, dim=-1)
        mixed = convolve_rows(row.gather(mixed), self.filter, self.filter_bias, row, state)
        conv = context.tap("conv", row.scatter(F.silu(mixed)))
        step = context.tap("step", F.softplus(step + self.step_bias))
        written_out = not context.fused or context.replaces("scanned")
        scanned = context.tap("scanned", self.scan(conv, step, row, state, written_out))
        gated = context.tap("gated", scanned * F.silu(gate))
        return context.tap("out", self.out(context.tap("norm", self.norm(gated))))

    def scan(
        self,
        conv: Float[Tensor, "B T C"],
        step: Float[Tensor, "B T H"],
        row: DenseRows,
        state: Mamba2State | None,
        written_out: bool,
    ) -> Float[Tensor, "B T I"]:
        """read·h + skip·x of every token, in float32 or wider. Padding gets a step of 0, which leaves h unchanged."""
        c = self.config
        conv, step = row.gather(widen(conv)), row.gather(widen(step))
        if row.real is not None:
            step = step * row.real.unsqueeze(-1)
        shared = c.groups * c.state_dim
        x, write, read = conv.split((c.inner, shared, shared), dim=-1)
        x = x.unflatten(-1, (c.heads, c.head_dim))
        write, read = (
            part.unflatten(-1, (c.groups, -1)).repeat_interleave(c.heads // c.groups, dim=2) for part in (write, read)
        )
        decay = widen(self.decay).exp().neg()
        empty = decay.new_zeros(len(conv), c.heads, c.state_dim, c.head_dim)
        start = empty if state is None else widen(state.ssm)
        continues = None if row.document is None else row.document == F.pad(row.document, (1, -1), value=-1)
        run = dual_scan_written_out if written_out else dual_scan
        with torch.autocast(conv.device.type, enabled=False):
            mixed, last = run(x, step, decay, write, read, start, continues)
        if state is not None:
            state.ssm = last.detach()
        mixed = mixed + x * widen(self.skip).unsqueeze(-1)
        return row.scatter(mixed.flatten(-2)).to(self.decay.dtype)

    def init_state(self, allocator: StateAllocator) -> Mamba2State:
        """The convolution's last O inputs and h of every head; both 0, which is the state before any token."""
        c = self.config
        return Mamba2State(allocator.zeros(c.conv - 1, c.convolved), allocator.zeros(c.heads, c.state_dim, c.head_dim))
