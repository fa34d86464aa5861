"""Second derivatives, and torch.func, for functions whose first backward is written by hand.

A hand-written backward is fast because it computes in place, on buffers that autograd does not see. Differentiated
again it would silently give zeros. So each of these functions also has a plain version, in operations that autograd
knows, which is used

- in a backward with `create_graph=True`, for second derivatives: `plain_backward`;
- under `torch.func.grad`, `vmap`, `jvp` and forward-mode differentiation: `plain_needed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def plain_needed(*tensors: Tensor | None) -> bool:
    """Whether plain operations must be used: under torch.func transforms, or with forward-mode tangents."""
    if torch._C._are_functorch_transforms_active():
        return True
    return forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def plain_backward(plain: Callable[..., Tensor], inputs: Sequence[Tensor | None], d_out: Tensor) -> list[Tensor | None]:
    """The gradients of plain(*inputs) that can be differentiated again; None for inputs that need none.

    Each input is first replaced by a view of itself: where one input was computed from another, as Mamba's step from
    its x, only the direct path to the output is counted here. Autograd adds the other one itself.
    """
    with torch.enable_grad():
        own = [x.view_as(x) if x is not None and x.requires_grad else x for x in inputs]
        wanted = [x for x in own if x is not None and x.requires_grad]
        out = plain(*own)
        found = iter(
            torch.autograd.grad(out, wanted, d_out, create_graph=True, allow_unused=True, materialize_grads=True)
        )
    return [next(found) if x is not None and x.requires_grad else None for x in own]


def refuse_second_derivative(what: str, instead: str) -> None:
    """Called in a backward that has no plain version: raise if the gradient is to be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} has no second derivative; {instead}")
