"""Feed-forward networks, and the activations inside them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.functional.derivatives import plain_backward, plain_needed
from clearhead.functional.linear import linear
from clearhead.reference.ffn import check_activation


def relu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """max(x, 0).

    >>> relu(torch.tensor([-1.0, 0.0, 2.0])).round(decimals=3)
    tensor([0., 0., 2.])
    """
    return F.relu(x)


def relu2(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """max(x, 0)².

    >>> relu2(torch.tensor([-1.0, 0.0, 2.0])).round(decimals=3)
    tensor([0., 0., 4.])
    """
    return F.relu(x).square() if plain_needed(x) else SquaredReLU.apply(x)


class SquaredReLU(torch.autograd.Function):
    """The derivative is 2·max(x, 0), so one number per element is kept for the backward, not two."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        positive = F.relu(x)
        ctx.save_for_backward(x)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, d_y: Float[Tensor, "..."]) -> Float[Tensor, "..."] | None:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return plain_backward(lambda x: F.relu(x).square(), (x,), d_y)[0]
        return F.relu(x).mul_(d_y).mul_(2)


def gelu(x: Float[Tensor, "..."], approximate: str = "none") -> Float[Tensor, "..."]:
    """x Φ(x), exactly ("none") or by tanh, as GPT-2 does.

    >>> gelu(torch.tensor([-1.0, 0.0, 2.0])).round(decimals=3)
    tensor([-0.1590,  0.0000,  1.9540])
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate is {approximate!r}, but must be "none" or "tanh"')
    return F.gelu(x, approximate=approximate)


def gelu_tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`gelu(x, "tanh")` under a name of its own, so that configs can name it.

    >>> gelu_tanh(torch.tensor([-1.0, 0.0, 2.0])).round(decimals=3)
    tensor([-0.1590,  0.0000,  1.9550])
    """
    return F.gelu(x, approximate="tanh")


def silu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x / (1 + exp(−x)).

    >>> silu(torch.tensor([-1.0, 0.0, 2.0])).round(decimals=3)
    tensor([-0.2690,  0.0000,  1.7620])
    """
    return F.silu(x)


def gelu_quick(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x σ(1.702 x), as CLIP does.

    >>> gelu_quick(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1542,  0.0000,  0.8458])
    """
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": relu,
    "relu2": relu2,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
    "silu": silu,
}


def feed_forward(
    x: Float[Tensor, "... D"],
    up: Float[Tensor, "F D"],
    down: Float[Tensor, "D F"],
    up_bias: Float[Tensor, "F"] | None = None,
    down_bias: Float[Tensor, "D"] | None = None,
    activation: str = "relu",
) -> Float[Tensor, "... D"]:
    """down · activation(up · x).

    >>> x, up, down = torch.ones((2, 3)), torch.ones((8, 3)), torch.ones((3, 8))
    >>> feed_forward(x, up, down).shape
    torch.Size([2, 3])
    """
    check_activation(activation)
    return linear(ACTIVATIONS[activation](linear(x, up, up_bias)), down, down_bias)


def gated_feed_forward(
    x: Float[Tensor, "... D"],
    gate: Float[Tensor, "F D"],
    up: Float[Tensor, "F D"],
    down: Float[Tensor, "D F"],
    gate_bias: Float[Tensor, "F"] | None = None,
    up_bias: Float[Tensor, "F"] | None = None,
    down_bias: Float[Tensor, "D"] | None = None,
    activation: str = "silu",
) -> Float[Tensor, "... D"]:
    """down · (activation(gate · x) ∘ up · x).

    >>> x, gate, up, down = torch.ones((2, 3)), torch.ones((8, 3)), torch.ones((8, 3)), torch.ones((3, 8))
    >>> gated_feed_forward(x, gate, up, down).shape
    torch.Size([2, 3])
    """
    check_activation(activation)
    return linear(ACTIVATIONS[activation](linear(x, gate, gate_bias)) * linear(x, up, up_bias), down, down_bias)


def swiglu(
    x: Float[Tensor, "... D"], gate: Float[Tensor, "F D"], up: Float[Tensor, "F D"], down: Float[Tensor, "D F"]
) -> Float[Tensor, "... D"]:
    """down · (silu(gate · x) ∘ up · x), LLaMA's feed-forward.

    >>> x, gate, up, down = torch.ones((2, 3)), torch.ones((8, 3)), torch.ones((8, 3)), torch.ones((3, 8))
    >>> swiglu(x, gate, up, down).shape
    torch.Size([2, 3])
    """
    return gated_feed_forward(x, gate, up, down, activation="silu")
