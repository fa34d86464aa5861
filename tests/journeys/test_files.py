"""No writer replaces what somebody else wrote, and files are complete or absent."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import clearhead
from clearhead.cli.main import cli
from clearhead.cli.options import print_json
from clearhead.configs import BytesConfig
from clearhead.data import DataError, Document, build
from clearhead.files import TargetError, check_target, open_own, stage_file, write_atomically
from clearhead.tokenize import make


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    clearhead.build(clearhead.preset("tiny-llama")).save(tmp_path / "model")
    return tmp_path / "model"


def test_export_refuses_a_file_that_exists(model: Path, tmp_path: Path) -> None:
    weights = (model / "model.safetensors").read_bytes()
    (tmp_path / "thesis.txt").write_text("ten years")
    for target in (model / "model.safetensors", tmp_path / "thesis.txt"):
        for form in ("gguf", "onnx"):
            result = run("export", model, "--to", form, target)
            assert isinstance(result.exception, ValueError)
            assert "exists; add --force" in str(result.exception)
    assert (model / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "thesis.txt").read_text() == "ten years"


def test_export_with_force_replaces_the_file_and_nothing_else(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_text("old")
    (tmp_path / "m.gguf.part").write_text("mine")
    result = run("export", model, "--to", "gguf", tmp_path / "m.gguf", "--force")
    assert result.exception is None, result.exception
    assert (tmp_path / "m.gguf").read_bytes()[:4] == b"GGUF"
    assert (tmp_path / "m.gguf.part").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "m.gguf.part", "model"]


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "clearhead.json", "config.json"])
def test_save_refuses_a_folder_that_holds_a_model(name: str, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / name).write_text("half a download")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match="force=True"):
        clearhead.load(model).save(folder)
    assert isinstance(run("export", model, "--to", "hf", folder).exception, ValueError)
    assert (folder / name).read_text() == "half a download"
    clearhead.load(model).save(folder, force=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert clearhead.load(folder).config == clearhead.load(model).config


@pytest.mark.parametrize(
    "arguments",
    [
        ("positions", "curves", "--out"),
        ("lab", "scores", "--draws", "64", "--out"),
        ("inspect", "tiny-gpt", "5 3", "--ids", "--out"),
    ],
)
def test_pictures_refuse_a_file_that_exists(arguments: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "thesis.svg"
    path.write_text("mine")
    result = run(*arguments, path)
    assert result.exit_code == 2
    assert "exists; add --force" in result.output
    assert path.read_text() == "mine"
    assert run(*arguments, path, "--force").exit_code == 0
    assert "<svg" in path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.svg"]


def test_saving_from_python_refuses_a_file_that_exists(tmp_path: Path) -> None:
    inspection = clearhead.build("tiny-gpt").inspect(torch.tensor([[5, 3]]))
    for result in (inspection, inspection.norms()):
        path = tmp_path / "thesis.csv"
        path.write_text("mine")
        with pytest.raises(TargetError, match="force=True"):
            result.save(path)
        assert path.read_text() == "mine"
        result.save(path, force=True)
        assert path.read_text() != "mine"


def test_shards_are_not_written_over_other_files(tmp_path: Path) -> None:
    (tmp_path / "documents.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match="no index"):
        build([Document("a", (("a text", True),))], make(BytesConfig(), []), tmp_path)
    assert (tmp_path / "documents.bin").read_bytes() == b"mine"


def test_a_staged_file_is_renamed_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with stage_file(path) as part:
        part.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~current_umask()
    with pytest.raises(ZeroDivisionError), stage_file(path) as part:
        part.write_text(str(1 / 0))
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(TargetError, match="exists"):
        check_target(tmp_path / "link")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(TargetError, match="not a regular file"):
        open_own(tmp_path / ".lock", "wb")
    assert (tmp_path / "mine").read_text() == "mine"


def test_an_error_of_the_disk_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, stage_file(tmp_path / "outer.txt"), stage_file(tmp_path / "a.txt"):
        raise OSError(28, "No space left on device", "the file it copies")
    assert caught.value.filename == str(tmp_path / "a.txt")
    full = pytest.raises(OSError, match=r"outer\.txt could not be written: Not enough free space")
    with full, stage_file(tmp_path / "outer.txt"):
        raise OSError("Not enough free space to write 40 bytes")
    assert not list(tmp_path.iterdir())


def test_weights_with_nan_are_one_sentence(tmp_path: Path) -> None:
    sizes = {"embedding.vocabulary": 257, "head.vocabulary": 257}
    broken = clearhead.build(clearhead.preset("tiny-llama").with_values(sizes))
    with torch.no_grad():
        broken.get_parameter("stack.blocks.1.mixer.out.weight")[0, 0] = float("nan")
    broken.save(tmp_path / "nan", tokenizer=make(BytesConfig(), []))
    (tmp_path / "text").write_text("a text of some words")
    for line in (
        ("eval", tmp_path / "nan", tmp_path / "text"),
        ("export", tmp_path / "nan", "--to", "hf", tmp_path / "out"),
        ("quantize", tmp_path / "nan", tmp_path / "out"),
        ("embed", tmp_path / "nan", "a text"),
    ):
        error = run(*line).exception
        assert isinstance(error, ValueError), (line, error)
        assert "layer 1's weights contain NaN" in str(error), line
    assert not (tmp_path / "out").exists()


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "losses": [1.0, float("inf")]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "losses": [1.0, None]}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_generating_after_a_fork_works() -> None:
    code = """
import os, torch, clearhead
torch.set_num_threads(2)
model = clearhead.build(clearhead.preset("tiny-llama")).eval()
product = torch.randn(512, 512)
(product @ product).sum()  # starts the threads
before = [one.tokens for one in model.generate([[1, 2, 3]], max_new_tokens=4, temperature=0)]
child = os.fork()
if child == 0:
    after = [one.tokens for one in model.generate([[1, 2, 3]], max_new_tokens=4, temperature=0)]
    (product @ product).sum()
    os._exit(0 if after == before else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=300, env=environment, check=False)
    assert done.returncode == 0
