"""The base install has no torch: what needs none works, and the rest says how to install it."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = "import sys; sys.modules['torch'] = None\n"  # an import of it fails as if it were not installed
WORKS = (
    ["--help"],
    ["presets"],
    ["cost", "gpt2"],
    ["trace", "tiny-llama"],
    ["positions", "curves", "--out", "curves.png"],
    ["exercises", "--out", "exercises"],
    ["check", "exercises/numpy/01_softmax.py"],
    ["scaling", "plan", "--from", "chinchilla", "--flops", "1e20"],
    ["doctor", "--quick"],
)
NEEDS = (
    ["generate", "x", "y"],
    ["train", "--data", "x"],
    ["eval", "x", "y"],
    ["inspect", "tiny-gpt", "x"],
    ["lab", "scores"],
)
LIBRARY = """
import numpy as np
import clearhead
from clearhead.configs import BytesConfig
from clearhead.tokenize import make
assert make(BytesConfig(), []).encode("hi")
config = clearhead.preset("tiny-llama")
rng = np.random.default_rng(0)
weights = {name: rng.normal(size=shape) for name, shape in config.weights().items()}
clearhead.reference.run(config, weights, np.array([[1, 2, 3]]))
try:
    clearhead.build(config)
except ModuleNotFoundError as error:
    assert "pip install torch" in str(error), error
else:
    raise AssertionError
assert not any(name.startswith("torch.") for name in sys.modules)
"""


def run_without_torch(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"{BLOCK}sys.argv = ['clearhead', *{arguments!r}]\nfrom clearhead.cli.main import main\nmain()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)


def test_what_needs_no_torch_works_without_it(tmp_path: Path) -> None:
    for arguments in WORKS:
        result = run_without_torch(arguments, tmp_path)
        assert "Traceback" not in result.stderr, (arguments, result.stderr)
        assert "needs PyTorch" not in result.stderr, arguments
    library = subprocess.run([sys.executable, "-c", BLOCK + LIBRARY], capture_output=True, text=True, check=False)
    assert library.returncode == 0, library.stderr


def test_what_needs_torch_names_the_line_to_type(tmp_path: Path) -> None:
    for arguments in NEEDS:
        result = run_without_torch(arguments, tmp_path)
        assert result.returncode == 1, (arguments, result.stderr)
        assert "https://download.pytorch.org/whl/cpu" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.proof
def test_a_fresh_environment_without_torch(tmp_path: Path) -> None:
    """The package with its declared dependencies alone."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", ROOT]
    subprocess.run(install, check=True)
    assert subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode
    for arguments in WORKS:
        done = subprocess.run(
            [python, "-m", "clearhead", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert "Traceback" not in done.stderr, (arguments, done.stderr)
