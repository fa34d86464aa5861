"""Blocks of GGUF files stay as they are: the kernels, plain torch and the package gguf read the same numbers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from clearhead.configs import Blocks, Float16
from clearhead.gguf_file import GGUFError, open_gguf
from clearhead.kernels.build import kernels
from clearhead.models.llama import llama, mixtral
from clearhead.models.load import load
from clearhead.models.model import build
from clearhead.models.quantize import dequantize
from clearhead.precision.blocks import TYPES, BlockMatrix
from clearhead.precision.kquants import quantise_blocks
from clearhead.precision.matrix import FloatMatrix, JoinedMatrix, join_rows
from clearhead.typed_json import JSONError

gguf = pytest.importorskip("gguf")
from clearhead.models.gguf.read import gguf_config  # noqa: E402
from clearhead.models.gguf.write import save_gguf  # noqa: E402

ROWS, COLUMNS = 37, 768
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a block has float16 numbers; at its start if not listed."""


def random_blocks(name: str, rows: int = ROWS, seed: int = 0) -> np.ndarray:
    """Random codes with scales of a sane size."""
    draw, kind = np.random.default_rng(seed), TYPES[name]
    raw = draw.integers(0, 256, (rows, COLUMNS // kind.columns, kind.bytes), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        raw[..., at : at + 2] = (draw.standard_normal((*raw.shape[:2], 1)) / 50).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def package_says(raw: np.ndarray, name: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", TYPES)
def test_plain_torch_reads_what_the_package_reads(name: str) -> None:
    raw, kind = random_blocks(name), TYPES[name]
    got = kind.decode(torch.from_numpy(raw).view(-1, kind.bytes)).view(ROWS, COLUMNS)
    assert torch.equal(got, package_says(raw, name))


@pytest.mark.skipif(kernels() is None, reason="no compiler")
@pytest.mark.parametrize("name", TYPES)
def test_the_kernels_read_what_the_package_reads(name: str) -> None:
    raw = random_blocks(name)
    matrix, want = BlockMatrix(torch.from_numpy(raw), name), package_says(raw, name)
    assert torch.equal(matrix.dense(), want)
    assert torch.equal(matrix.look_up(torch.tensor([[3, 36], [0, 3]])), want[[3, 36, 0, 3]].view(2, 2, -1))
    x = torch.randn(7, COLUMNS, generator=torch.Generator().manual_seed(1))
    got = matrix.linear(x)
    scale = float((x.abs() @ want.abs().T).max())
    torch.testing.assert_close(got, x @ want.T, rtol=0, atol=1e-6 * scale)
    assert torch.equal(matrix.linear(x[:1]), got[:1])


def test_matrices_of_several_types_are_joined() -> None:
    kinds = ("Q4_K", "Q4_K", "Q6_K")
    raws = [random_blocks(name, rows, seed) for seed, (name, rows) in enumerate(zip(kinds, (32, 5, 9), strict=True))]
    parts = [BlockMatrix(torch.from_numpy(raw), name) for raw, name in zip(raws, kinds, strict=True)]
    want = torch.cat([package_says(raw, name) for raw, name in zip(raws, kinds, strict=True)])
    assert isinstance(join_rows(parts[:2]), BlockMatrix)
    joined = join_rows(parts)
    assert isinstance(joined, JoinedMatrix)
    assert joined.shape == (46, COLUMNS)
    assert torch.equal(joined.dense(), want)
    for rows in (slice(0, 32), slice(32, 46), slice(30, 40), slice(3, 4)):
        assert torch.equal(joined[rows].dense(), want[rows])
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))
    for few in (x[:1], x):
        torch.testing.assert_close(joined.linear(few), few @ want.T, rtol=1e-4, atol=1e-3)
    floats = FloatMatrix(torch.randn(4, COLUMNS), Float16())
    assert torch.equal(join_rows([floats, parts[0]]).dense()[:4], floats.dense())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A LLaMA and a Mixtral in q4_0."""
    folder, sizes = (
        tmp_path_factory.mktemp("blocks"),
        {"dim": 64, "layers": 2, "heads": 4, "hidden": 96, "vocabulary": 96},
    )
    torch.manual_seed(0)
    models = {"llama": llama(**sizes, kv_heads=2), "mixtral": mixtral(**sizes, kv_heads=2, experts=4)}
    for name, config in models.items():
        save_gguf(build(config), folder / f"{name}.gguf", None, "q4_0")
    return {name: folder / f"{name}.gguf" for name in models}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_quantised_file_stays_quantised(name: str, files: dict[str, Path]) -> None:
    model = load(files[name])
    assert model.precision == Blocks()
    stored = sum(t.nbytes for t in model.state_dict().values())
    assert stored < 1.05 * sum(tensor.data.nbytes for tensor in open_gguf(files[name]).tensors.values())
    plain, tokens = dequantize(model), torch.tensor([[1, 5, 17, 31, 8]])
    assert plain.precision is None
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
    ours, theirs = (each.generate([1, 5, 17], max_new_tokens=8, temperature=0)[0].tokens for each in (model, plain))
    assert ours == theirs


def test_experts_stay_mapped(files: dict[str, Path]) -> None:
    """All experts of a layer follow each other in the file, so they are a view of it."""
    table = dict(load(files["mixtral"]).named_buffers())
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list its mappings")
    spans = [line.split()[0].split("-") for line in maps.read_text().splitlines() if line.endswith("mixtral.gguf")]
    address = table["stack.blocks.1.ffn.experts.down.weight.values"].data_ptr()
    assert any(int(first, 16) <= address < int(last, 16) for first, last in spans)


def test_a_quantised_file_is_saved_for_others(files: dict[str, Path], tmp_path: Path) -> None:
    model = load(files["llama"])
    model.save(tmp_path / "folder")
    again = load(tmp_path / "folder")
    for name, weight in dequantize(model).state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_the_header_is_read_as_the_package_reads_it(files: dict[str, Path]) -> None:
    mine, theirs = open_gguf(files["mixtral"]), gguf.GGUFReader(files["mixtral"])
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert mine.fields.keys() == fields.keys()
    for name, value in fields.items():
        assert mine.fields[name] == (pytest.approx(value) if isinstance(value, float) else value)
    assert [tensor.name for tensor in theirs.tensors] == list(mine.tensors)
    for tensor in theirs.tensors:
        found = mine.tensors[tensor.name]
        assert found.kind == tensor.tensor_type.name
        assert found.shape == tuple(tensor.shape[::-1])
        np.testing.assert_array_equal(found.data, tensor.data)


def test_every_type_has_the_size_that_the_package_knows() -> None:
    from clearhead.gguf_file import TYPES as KNOWN

    assert {
        n: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES if (n := kind.value) in KNOWN
    } == KNOWN


def test_a_damaged_header_is_one_sentence(files: dict[str, Path], tmp_path: Path) -> None:
    """A file that is cut anywhere, or has a wrong byte anywhere in its header, is loaded or refused, never a crash."""
    whole, path = files["llama"].read_bytes(), tmp_path / "m.gguf"
    draw, refused = np.random.default_rng(0), []
    for _ in range(150):
        spoilt = bytearray(whole)
        if draw.integers(2):
            spoilt[draw.integers(2000)] = draw.integers(256)
        else:
            del spoilt[draw.integers(len(whole)) :]
        path.write_bytes(spoilt)
        try:
            open_gguf(path)
        except GGUFError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert all(str(path) in said for said in refused)


def test_an_absurd_number_of_layers_is_refused_at_once(files: dict[str, Path], tmp_path: Path) -> None:
    whole = bytearray(files["llama"].read_bytes())
    at = whole.index(b"llama.block_count") + len("llama.block_count") + 4  # after the name: the type, then the number
    whole[at : at + 4] = (12_255_234).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(whole)
    with pytest.raises(JSONError, match="num_hidden_layers is 12255234, but must be a whole number of at most 65536"):
        gguf_config(tmp_path / "m.gguf")


def test_a_split_model_is_read_from_its_first_file(files: dict[str, Path], tmp_path: Path) -> None:
    source = gguf.GGUFReader(files["llama"])
    names = [tensor.name for tensor in source.tensors]
    for i, part in enumerate((names[:5], names[5:]), 1):
        writer = gguf.GGUFWriter(str(tmp_path / f"m-{i:05}-of-00002.gguf"), "llama")
        for name, field in source.fields.items():
            if i == 1 and not name.startswith("GGUF.") and name != "general.architecture":
                writer.add_key_value(name, field.contents(), field.types[0])
        writer.add_uint16("split.count", 2)
        for tensor in source.tensors:
            if tensor.name in part:
                writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    whole, split = load(files["llama"]).state_dict(), load(tmp_path / "m-00001-of-00002.gguf").state_dict()
    assert whole.keys() == split.keys()
    assert all(torch.equal(whole[name], split[name]) for name in whole)
    with pytest.raises(GGUFError, match="give the first"):
        load(tmp_path / "m-00002-of-00002.gguf")
    os.remove(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(GGUFError, match="cannot read"):
        load(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize(("kind", "most"), [("Q4_K", 0.072), ("Q6_K", 0.0178)])
def test_k_blocks_are_rounded_well(kind: str, most: float) -> None:
    """llama.cpp's own rounding of these numbers has a relative error of 0.0717 and 0.0177."""
    weight = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(0)) / 50
    got = BlockMatrix(quantise_blocks(weight, kind), kind).dense()
    assert float((got - weight).norm() / weight.norm()) < most
    for odd in (torch.zeros(2, 256), torch.full((2, 256), 3.0), -torch.rand(2, 256), torch.eye(256) * 1e4):
        found = BlockMatrix(quantise_blocks(odd, kind), kind).dense()
        # half a step, 1/30, and the rounding of the scale and of the offset to six bits, 1/126 each
        assert float((found - odd).abs().max()) <= (1 / 30 + 2 / 126 + 0.01) * float(odd.abs().max())


def test_a_file_in_q4_k_m_has_the_types_of_llama_cpp(tmp_path: Path) -> None:
    """Sensitive matrices have six bits; rows that are not a multiple of 256 get smaller blocks."""
    torch.manual_seed(0)
    model = build(llama(dim=256, layers=8, heads=4, kv_heads=2, hidden=288, vocabulary=64))
    save_gguf(model, tmp_path / "m.gguf", None, "q4_k_m")
    kinds = {name: tensor.kind for name, tensor in open_gguf(tmp_path / "m.gguf").tensors.items()}
    assert kinds["token_embd.weight"] == "Q4_K"
    assert kinds["output.weight"] == "Q6_K"
    assert [kinds[f"blk.{i}.attn_v.weight"] for i in range(8)] == [
        {True: "Q6_K", False: "Q4_K"}[i in (0, 3, 6, 7)] for i in range(8)
    ]
    assert {kinds[f"blk.{i}.ffn_down.weight"] for i in range(8)} == {"Q5_0", "Q8_0"}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    again = dequantize(load(tmp_path / "m.gguf")).state_dict()
    for name, weight in model.state_dict().items():
        assert float((again[name] - weight).norm() / weight.norm()) < 0.08, name
