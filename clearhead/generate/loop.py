"""The one decode loop: any model with a state, one token at a time for every row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.models.assemble import EncoderDecoder, Model

Choose = Callable[[Float[Tensor, "B V"]], Int[Tensor, "B"]]


def greedy(logits: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
    """The likeliest token."""
    return logits.argmax(dim=-1)


def sampler(temperature: float = 1.0, rng: torch.Generator | None = None) -> Choose:
    """Draws from softmax(logits/temperature)."""
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, but must be above 0; to take the likeliest token use greedy")

    def choose(logits: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
        return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=rng).squeeze(1)

    return choose


@torch.inference_mode()
def decode(
    model: Model,
    prompt: Int[Tensor, "B T"],
    *,
    steps: int,
    source: Int[Tensor, "B S"] | None = None,
    readable: Bool[Tensor, "B T"] | None = None,
    source_readable: Bool[Tensor, "B S"] | None = None,
    choose: Choose = greedy,
) -> Iterator[Int[Tensor, "B"]]:
    """Yields `steps` times the next token of every row. Prompts of different length are padded, `readable` False there.

    The prompt is read in one pass; after that each pass reads one token per row and the state that the model keeps.
    """
    if prompt.shape[1] == 0:
        raise ValueError("the prompt is empty; start it with the model's start token")
    length = prompt.shape[1] + steps
    if isinstance(model, EncoderDecoder):
        if source is None:
            raise ValueError("an encoder–decoder writes a target for a source; the source is missing")
        state = model.init_state(model.encode(source, readable=source_readable), length, readable=source_readable)
    else:
        state = model.init_state(len(prompt), length)
    # the logits of a row's last real token
    last = torch.full((len(prompt),), prompt.shape[1] - 1, device=prompt.device)
    if readable is not None:
        last = (torch.arange(prompt.shape[1], device=prompt.device) * readable).argmax(dim=1)
    advance = model.decode if isinstance(model, EncoderDecoder) else model
    logits = advance(prompt, state=state, readable=readable)[torch.arange(len(prompt)), last]
    for step in range(steps):
        tokens = choose(logits)
        yield tokens
        if step + 1 < steps:
            logits = advance(tokens[:, None], state=state)[:, -1]
