"""Copies are independent, weights are nobody else's, and a forward pass leaves nothing behind."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from clearhead.models.model import build
from clearhead.nn.tap import Taps

from .cases import CASES
from .tools import BATCH, LENGTH, close, ids, inputs_of, is_causal, model_of, once_each


@pytest.mark.parametrize("name", once_each(CASES))
def test_copies_are_equal_and_independent(name: str) -> None:
    model, inputs = model_of(name), inputs_of(CASES[name])
    with torch.no_grad():
        before = model(*inputs)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(*inputs), before)
            for parameter in twin.parameters():
                parameter.add_(1.0)
            assert not torch.equal(twin(*inputs), before)
            assert torch.equal(model(*inputs), before)


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_saved_once(name: str) -> None:
    state = model_of(name).state_dict(keep_vars=True)
    assert len({weight.untyped_storage().data_ptr() for weight in state.values()}) == len(state)
    model = model_of(name)
    biases = [buffer for key, buffer in model.named_buffers() if key.endswith("choice.bias")]  # no gradient moves them
    assert {id(weight) for weight in state.values()} == {id(weight) for weight in [*model.parameters(), *biases]}
    assert len(list(model.buffers())) == len(biases)


def belongings(model: nn.Module) -> dict[str, Any]:
    """Everything a module holds, by path; what is no module or parameter by its value."""
    return {
        f"{path}.{key}": id(value) if isinstance(value, torch.Tensor) else repr(value)
        for path, module in model.named_modules()
        for key, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items())
        if key not in ("_modules", "_parameters")
    }


@pytest.mark.parametrize("name", once_each(CASES))
def test_a_pass_leaves_nothing_behind(name: str) -> None:
    model, inputs = copy.deepcopy(model_of(name)), inputs_of(CASES[name])
    before = belongings(model)
    model.train()
    model.eval()
    model(*inputs, taps=Taps(read=["*"]))
    model(*inputs, fused=False)
    if is_causal(CASES[name]):
        model(*inputs, state=model.init_state(BATCH, LENGTH))
    assert belongings(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["mha; pre", "ffn: moe, shared", "translator; post"])
def test_inputs_are_not_changed(name: str) -> None:
    model, inputs = model_of(name), inputs_of(CASES[name])
    kept = [x.clone() for x in inputs]
    model(*inputs)
    assert all(torch.equal(x, old) for x, old in zip(inputs, kept, strict=True))


def test_two_states_of_one_model_are_independent() -> None:
    model, one, two = model_of("window; pre"), ids(2, 7), ids(2, 7, seed=5)
    with torch.no_grad():
        first, second = model.init_state(2, 7), model.init_state(2, 7)
        parts = [[], []]
        for a, b in zip(one.split(1, dim=1), two.split(1, dim=1), strict=True):
            parts[0].append(model(a, state=first))
            parts[1].append(model(b, state=second))
        close(torch.cat(parts[0], 1), model(one))
        close(torch.cat(parts[1], 1), model(two))


def test_a_state_is_copied_whole() -> None:
    """As a decoder does that tries two continuations."""
    model, tokens = model_of("hybrid"), ids(2, 12)
    with torch.no_grad():
        state = model.init_state(2, 12)
        model(tokens[:, :6], state=state)
        branch = copy.deepcopy(state)
        model(ids(2, 4, seed=7), state=branch)
        close(model(tokens[:, 6:], state=state), model(tokens)[:, 6:])


@pytest.mark.parametrize("name", ["mha; pre", "hybrid", "patches", "head: masked lm, untied", "translator, two tables"])
def test_weights_are_loaded_by_name(name: str) -> None:
    model, inputs = model_of(name), inputs_of(CASES[name])
    other = build(CASES[name]).double().eval()
    with torch.no_grad():
        assert not torch.allclose(other(*inputs), model(*inputs))
        other.load_state_dict(model.state_dict(), strict=True)
        assert torch.equal(other(*inputs), model(*inputs))
