"""Mamba: a selective state-space model as a mixer (Gu & Dao 2023).

Letters: D width, I inner width (2·D by default), Z states per channel, J rank of Δ, O + 1 length of the filter. Padding
and documents are handled by `packing.py`: real tokens are moved to the front, and the state restarts at a document.

The state has Z·I numbers for each row, whatever the length, so decoding costs the same at every token. It cannot go
back: a token that was read cannot be taken out of h again (`can_rewind` is False).

The scan runs in float32 or wider whatever the model's precision. bfloat16 has no number between 0.996 and 1, so a decay
of 0.999 would become 1 and the state would never forget. `step`, `decay` and `skip` are few numbers and are never
quantized.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import MambaConfig
from clearhead.functional.mamba import scan_from, scan_written_out
from clearhead.functional.softmax import widen
from clearhead.precision.matrix import Linear

from .build import build_part, builds
from .cache import StateAllocator
from .context import Context
from .convolution import ConvState, convolve_rows
from .packing import DenseRows, dense_rows


@dataclass
class MambaState(ConvState):
    """The convolution's last inputs and h, the hidden state of the state-space model. Constant size."""

    ssm: Float[Tensor, "B Z I"]

    def select(self, rows: Int[Tensor, "B"]) -> None:
        """Row i becomes the old row `rows[i]`, in both parts of the state."""
        super().select(rows)
        self.ssm = self.ssm[rows]


@builds(MambaConfig)
class Mamba(nn.Module):
    """h_t = exp(Δ_t A)∘h_{t−1} + Δ_t·x_t ⊗ B_t,   y_t = C_t·h_t + D∘x_t, with Δ, B, C computed from x.

    x ─ input ─┬─ inner ─ conv ─ silu ─┬──────────────── scan ─ (+ skip∘conv) ─ (∘) ─ out
               │                       └─ select ─ step, write, read ─┘          │
               └─ gate ─ silu ───────────────────────────────────────────────────┘

    In the code Δ is `step`, A `decay`, B `write`, C `read` and D `skip`. A pass over a text scans it chunk by chunk;
    decoding continues from h and the last few inputs of the convolution.
    """

    def __init__(self, config: MambaConfig, dim: int) -> None:
        super().__init__()
        inner, self.rank = config.inner or 2 * dim, config.rank or -(-dim // 16)
        self.input = Linear(dim, 2 * inner, bias=config.bias)
        self.filter = nn.Parameter(torch.empty(config.conv, inner))
        self.filter_bias = nn.Parameter(torch.empty(inner)) if config.conv_bias else None
        self.select = Linear(inner, self.rank + 2 * config.state_dim, bias=False)
        self.normed = config.select_norm is not None
        self.step_norm, self.write_norm, self.read_norm = (
            build_part(config.select_norm, width) for width in (self.rank, config.state_dim, config.state_dim)
        )
        self.step = nn.Linear(self.rank, inner)
        self.decay = nn.Parameter(torch.empty(config.state_dim, inner))  # log(−A)
        self.skip = nn.Parameter(torch.empty(inner))
        self.out = Linear(inner, dim, bias=config.bias)

    def init_weights(self) -> None:
        """The authors' initialisation: A = −1 … −Z in every channel, and Δ between 0.001 and 0.1 (section 3.6).

        A token keeps exp(Δ·A) of the state: from 99.9 % (A = −1, Δ = 0.001) to 20 % (A = −16, Δ = 0.1).
        """
        with torch.no_grad():
            numbers = torch.arange(1, len(self.decay) + 1, device=self.decay.device)
            self.decay.copy_(numbers.log()[:, None].expand_as(self.decay))
            self.skip.fill_(1)
            nn.init.uniform_(self.filter, -(len(self.filter) ** -0.5), len(self.filter) ** -0.5)
            nn.init.uniform_(self.step.weight, -(self.rank**-0.5), self.rank**-0.5)
            wanted = torch.empty_like(self.step.bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            self.step.bias.copy_(wanted + torch.log(-torch.expm1(-wanted)))  # the inverse of softplus

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: MambaState | None = None
    ) -> Float[Tensor, "B T D"]:
        """The mixer's output, B T D.

        Taps, in order: input B T 2·I, conv B T I, select B T J+2·Z, its parts step_norm B T J, write_norm and read_norm
        B T Z, step B T I, scanned B T I, gated B T I, out B T D.
        """
        row = dense_rows(context, len(x))
        inner, gate = context.tap("input", self.input(x)).chunk(2, dim=-1)
        conv = context.tap(
            "conv", row.scatter(F.silu(convolve_rows(row.gather(inner), self.filter, self.filter_bias, row, state)))
        )
        select = context.tap("select", self.select(conv))
        ranked, write, read = select.split((self.rank, len(self.decay), len(self.decay)), dim=-1)
        if self.normed:
            ranked = context.tap("step_norm", self.step_norm(ranked))
            write = context.tap("write_norm", self.write_norm(write))
            read = context.tap("read_norm", self.read_norm(read))
        step = context.tap("step", F.softplus(self.step(ranked)))
        written_out = not context.fused or context.replaces("scanned")
        mixed = self.scan(conv, step, write, read, row, state, written_out)
        scanned = context.tap("scanned", torch.addcmul(mixed, conv, self.skip))
        gated = context.tap("gated", scanned * F.silu(gate))
        return context.tap("out", self.out(gated))

    def scan(
        self,
        conv: Float[Tensor, "B T I"],
        step: Float[Tensor, "B T I"],
        write: Float[Tensor, "B T Z"],
        read: Float[Tensor, "B T Z"],
        row: DenseRows,
        state: MambaState | None,
        written_out: bool,
    ) -> Float[Tensor, "B T I"]:
        """read·h of every token, in float32 or wider. Padding gets a step of 0, which leaves h unchanged."""
        conv, step, write, read = (row.gather(widen(part)) for part in (conv, step, write, read))
        if row.real is not None:
            step = step * row.real.unsqueeze(-1)
        decay = widen(self.decay).exp().neg()
        start = decay.new_zeros(len(conv), *decay.shape) if state is None else widen(state.ssm)
        continues = None if row.document is None else row.document == F.pad(row.document, (1, -1), value=-1)
        run = scan_written_out if written_out else scan_from
        with torch.autocast(conv.device.type, enabled=False):
            mixed, last = run(conv, step, decay, write, read, start, continues)
        if state is not None:
            state.ssm = last.detach()
        return row.scatter(mixed).to(self.decay.dtype)

    def init_state(self, allocator: StateAllocator) -> MambaState:
        """The convolution's last O inputs and h, Z × I; both 0, which is the state before any token."""
        reach, inner = len(self.filter) - 1, self.filter.shape[1]
        return MambaState(allocator.zeros(reach, inner), allocator.zeros(*self.decay.shape))
