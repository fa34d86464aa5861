"""Taps: every name is listed, a name that is none raises, and a model describes itself."""

from __future__ import annotations

import pytest
import torch

import clearhead
from clearhead import Taps
from clearhead.configs import ConfigError
from tests.contracts.adapters import as_in_production


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-mixtral", "tiny-mamba"])
def test_a_model_lists_its_taps_with_shapes(name: str) -> None:
    model = clearhead.build(name)
    found = model.taps(batch=2, length=5)
    taps = Taps(read=list(found))
    with torch.no_grad():
        model(torch.zeros(2, 5, dtype=torch.long), taps=taps, fused=False)
    assert {path: tuple(value.shape) for path, value in taps.values.items()} == found
    assert any(path.endswith("ffn.pre_activation") or "experts.pre_activation" in path for path in found) or (
        name == "tiny-mamba"
    )


def test_one_string_is_one_pattern() -> None:
    taps = Taps(read="stack.blocks.*.mixer.weights")
    clearhead.build("tiny-llama")(torch.zeros(1, 3, dtype=torch.long), taps=taps)
    assert list(taps.values) == [f"stack.blocks.{i}.mixer.weights" for i in range(len(taps.values))]


@pytest.mark.parametrize(
    "options",
    [
        {"read": "stack.blocks.0.mixer.wieghts"},
        {"read": ["stack.blocks.0.mixer.weights", "stack.blocks.9.mixer.weights"]},
        {"replace": {"stack.blocks.0.mixer.wieghts": torch.zeros_like}},
        {"on_attention": {"stack.blocks.0.mixr": print}},
    ],
)
def test_a_name_that_matches_nothing_raises_with_the_nearest(options: dict[str, object]) -> None:
    model, tokens = clearhead.build("tiny-llama"), torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"no .* matches '.*'; the nearest names are .*stack\.blocks\.0\.mixer"):
        model(tokens, taps=Taps(**options))
    model(tokens, taps=Taps(**options, strict=False))


def test_the_inner_values_of_experts_can_be_replaced() -> None:
    model, tokens = clearhead.build("tiny-mixtral"), torch.zeros(1, 3, dtype=torch.long)
    plain = model(tokens)
    without = model(tokens, taps=Taps(replace={"stack.blocks.*.ffn.experts.up": torch.zeros_like}))
    assert not torch.allclose(plain, without)


def test_names_are_models_and_other_types_are_one_sentence() -> None:
    assert clearhead.build("tiny-gpt").config == clearhead.preset("tiny-gpt")
    with pytest.raises(ConfigError, match=r"there is no preset 'tiny-lama'.*tiny-llama"):
        clearhead.build("tiny-lama")
    with as_in_production(), pytest.raises(ConfigError, match=r"\{\} does not describe a whole model; give a preset's"):
        clearhead.build({})


def test_a_model_prints_its_layers_and_parameters() -> None:
    model = clearhead.build("tiny-llama")
    shown = repr(model)
    assert shown.startswith(f"SequenceModel: {sum(p.numel() for p in model.parameters()):,} parameters\n")
    assert "stack.blocks.0–" in shown
    assert len(shown.splitlines()) < 10
