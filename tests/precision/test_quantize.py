"""Models in few bits: how far from float32 they are, that they survive the disk, and what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import clearhead
from clearhead.configs import PRECISIONS, BFloat16, Cache, ConfigError, Float16, Int4, Int8, Precision, precision
from clearhead.models.convert import CheckpointError
from clearhead.precision.matrix import Packed, pack
from clearhead.precision.rounding import round_int4, round_int8

FAMILIES = ["tiny-gpt", "tiny-llama", "tiny-mixtral", "tiny-deepseek", "tiny-bert", "tiny-transformer", "tiny-vit"]


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    return clearhead.build(clearhead.preset(name)).eval()


def run(model: Any) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.randint(0, 101, (2, 9))
    with torch.inference_mode():
        if hasattr(model, "encoder"):
            return model(tokens, tokens[:, :5])
        return model(torch.rand(2, 1, 16, 16) if "image" in str(model.config) else tokens)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm())


# ---- rounding


def test_int8_is_within_half_a_step_but_for_the_largest_of_a_group() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 64)
    codes, scales = round_int8(weight, 32)
    error = (weight.view(6, 2, 32) - codes.view(6, 2, 32) * scales.float()[..., None]).abs()
    step = scales.float()[..., None].abs()
    beyond = (error > 0.501 * step).sum(-1)
    assert beyond.max() == 1  # cut off where that brings the others nearer
    assert (error <= 2.5 * step).all()


def test_int8_is_nearer_than_that_of_llama_cpp() -> None:
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    weight, kind = torch.randn(200, 64), gguf.GGMLQuantizationType.Q8_0
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    assert distance(weight, pack(weight, Int8()).dense()) < 0.96 * distance(weight, theirs)


def test_int4_takes_the_nearest_entry_and_a_scale_that_cannot_be_bettered_by_much() -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 32)
    places, scales, table = round_int4(weight, 32)
    scale = scales.float()
    entries = scale[..., None] * table  # 20 1 16
    nearest = (weight[..., None] - entries).abs().argmin(-1)
    assert torch.equal(places.long(), nearest)
    best = torch.full((20,), torch.inf)
    for share in torch.linspace(0.6, 1.5, 400):  # by brute force
        tried = weight.abs().amax(1, keepdim=True) * share
        error = (weight[..., None] - (tried * table)[:, None]).abs().amin(-1).square().sum(1)
        best = torch.minimum(best, error)
    ours = (weight - scale * table[places.long()]).square().sum(1)
    assert (ours.sum() / best.sum()) < 1.03


def q4_0(weight: Tensor) -> Tensor:
    """llama.cpp's four bits: the largest number of each 32 becomes −8, the scale is a float16."""
    groups = weight.view(-1, 32)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    inverse = torch.where(largest == 0, 0, -8 / largest)
    codes = (groups * inverse + 8.5).floor().clamp(0, 15) - 8
    return (codes * (largest / -8).half().float()).view_as(weight)


def q8_0(weight: Tensor) -> Tensor:
    groups = weight.view(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 127
    return ((groups / scale).round() * scale.half().float()).view_as(weight)


def test_closer_to_the_weights_than_llama_cpp_at_the_same_width() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 768)
    assert distance(weight, pack(weight, Int4()).dense()) < 0.9 * distance(weight, q4_0(weight))
    assert distance(weight, pack(weight, Int8()).dense()) < 1.02 * distance(weight, q8_0(weight))
    stored = pack(weight, Int4()).state_dict()
    assert sum(stored[name].nbytes for name in ("values", "scales")) * 8 / weight.numel() == 4.5


def test_inputs_tell_which_errors_matter() -> None:
    """On inputs whose coordinates go together, rounding by moments halves the error of the output."""
    torch.manual_seed(0)
    weight, mix = torch.randn(40, 96), torch.randn(96, 96) @ torch.diag(torch.logspace(0, -2, 96))
    x, unseen = torch.randn(2000, 96) @ mix.T, torch.randn(500, 96) @ mix.T
    plain, aware = pack(weight, Int4()), pack(weight, Int4(), x.T @ x)
    exact = unseen @ weight.T
    assert distance(exact, unseen @ aware.dense().T) < 0.5 * distance(exact, unseen @ plain.dense().T)


def test_zeros_stay_zeros() -> None:
    for stored in (Int8(), Int4()):
        packed = pack(torch.zeros(3, 40), stored)
        assert torch.equal(packed.dense(), torch.zeros(3, 40))
        assert torch.equal(packed.linear(torch.ones(2, 40)), torch.zeros(2, 3))


# ---- whole models

FAR = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3, "int8": 4e-2, "int4": 0.6}


@pytest.mark.parametrize(
    ("name", "width"), [*((name, "int4") for name in FAMILIES), *(("tiny-llama", width) for width in FAR)]
)
def test_a_quantised_model_is_near_and_survives_the_disk(name: str, width: str, tmp_path: Path) -> None:
    model = tiny(name)
    before = copy.deepcopy(model.state_dict())
    quantised = clearhead.quantize(model, PRECISIONS[width])
    assert distance(run(model), run(quantised)) < FAR[width]
    assert all(torch.equal(weight, model.state_dict()[key]) for key, weight in before.items())
    assert any(isinstance(part, Packed) for part in quantised.modules())
    quantised.save(tmp_path / "model")
    again = clearhead.load(tmp_path / "model")
    assert again.precision == PRECISIONS[width]
    assert torch.equal(run(again), run(quantised))
    assert torch.equal(run(copy.deepcopy(quantised)), run(quantised))


def test_only_matrices_are_packed_and_the_rest_is_float32() -> None:
    quantised = clearhead.quantize(tiny("tiny-mixtral").bfloat16(), Int8())
    assert {weight.dtype for weight in quantised.parameters()} == {torch.float32}
    names = {name for name, _ in quantised.named_parameters()}
    assert "stack.blocks.0.ffn.router.weight" in names
    assert "stack.blocks.0.mixer.qkv.weight" not in names
    assert run(quantised).dtype == torch.float32


def test_a_text_brings_int4_nearer() -> None:
    model = tiny("tiny-llama")
    torch.manual_seed(3)
    tokens = torch.randint(0, 20, (8, 40))
    with torch.inference_mode():
        exact = model(tokens)
        plain = clearhead.quantize(model, Int4())(tokens)
        aware = clearhead.quantize(model, Int4(), tokens=tokens)(tokens)
    assert distance(exact, aware) < 0.9 * distance(exact, plain)


@pytest.mark.parametrize("stored", [Int4(), Int8(), BFloat16()], ids=str)
@pytest.mark.parametrize(("cache", "tolerance"), [("float32", 1e-5), ("float16", 2e-3)])
def test_decoding_in_pieces_equals_one_pass(stored: Precision, cache: Cache, tolerance: float) -> None:
    model = clearhead.quantize(tiny("tiny-llama"), replace(stored, cache=cache))
    tokens = torch.randint(0, 101, (3, 12))
    with torch.inference_mode():
        whole, state = model(tokens), model.init_state(3, 12)
        pieces = [model(part, state=state) for part in tokens.split([5, 1, 1, 3, 2], 1)]
    assert distance(whole, torch.cat(pieces, 1)) < tolerance


# ---- what is refused


@pytest.mark.parametrize("group", [0, -32, 1, 16, 48])
def test_a_group_is_a_power_of_two_from_32_up(group: int) -> None:
    for kind in (Int8, Int4):
        with pytest.raises(ConfigError, match=f"group is {group}, but must be a power of two"):
            kind(group=group)


def test_unknown_widths_and_things_that_are_no_matrix() -> None:
    with pytest.raises(ConfigError, match="no precision 'int7'; did you mean 'int"):
        precision("int7")
    with pytest.raises(ValueError, match=r"shape \(5,\) is no matrix"):
        pack(torch.ones(5), Int8())
    quantised = clearhead.quantize(tiny("tiny-llama"), Int8())
    with pytest.raises(ValueError, match="in Int8 already"):
        clearhead.quantize(quantised, Int4())
    with pytest.raises(ValueError, match="encoder–decoder cannot be calibrated"):
        clearhead.quantize(tiny("tiny-transformer"), Int4(), tokens=torch.zeros(1, 4, dtype=torch.long))


def test_a_damaged_folder_says_what_is_wrong(tmp_path: Path) -> None:
    clearhead.quantize(tiny("tiny-llama"), Float16()).save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "stack.blocks.1.mixer.qkv.weight.values"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=f"missing 1 tensor: {name}"):
        clearhead.load(tmp_path)
    save_file({**tensors, name: tensors[name].float()}, file)
    with pytest.raises(CheckpointError, match=r"misshapen 1 tensor: .* of torch.float32, not .* of torch.float16"):
        clearhead.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["precision"] = {"kind": "Causal"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not a precision"):
        clearhead.load(tmp_path)
