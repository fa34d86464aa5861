"""`clearhead.check` on objects, `clearhead check` as typed, and the exercises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.cells import cell_len

import clearhead
from clearhead.checker.exercises import starters

from .judge import Judge
from .snippets import snippets

WRONG = next(s for s in snippets() if s.title == "no scale" and s.engine == "numpy").text
FRAGILE = next(s for s in snippets() if s.title == "NaN on empty rows").text
RIGHT = next(s for s in snippets() if s.title == "softmax over the last axis").text
PLAIN = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "COLUMNS", "LC_ALL", "LANG")}


def typed(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clearhead", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env=PLAIN | {"PYTHONUTF8": "1"} | environment
    )


def saved(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def naive_softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def unscaled(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def test_a_function() -> None:
    report = clearhead.check(naive_softmax, lang="en")
    assert [diagnostic.key for diagnostic in report.diagnostics] == ["softmax-unstable"]
    assert not report.ok
    assert "Subtract the row's maximum" in str(report)
    assert clearhead.check(clearhead.reference.softmax).ok


def test_a_torch_function_by_its_arguments() -> None:
    report = clearhead.check(unscaled)
    assert report.parts[0].part == "attention"
    assert [diagnostic.key for diagnostic in report.diagnostics] == ["no-scale"]


def test_a_class_and_an_object_of_the_library() -> None:
    assert clearhead.check(torch.nn.LayerNorm).ok
    assert clearhead.check(torch.nn.RMSNorm(6, eps=1e-6)).ok


def test_our_own_functions_are_right() -> None:
    for function, part in (
        (clearhead.reference.attention, "attention"),
        (clearhead.functional.attention, "attention"),
        (clearhead.reference.layer_norm, "layer_norm"),
        (clearhead.reference.causal_mask, "causal_mask"),
        (clearhead.reference.sinusoidal_positions, "sinusoidal"),
    ):
        report = clearhead.check(function, part)
        assert [f.key for f in report.diagnostics if f.severity != "note"] == [], function


def test_the_name_stays_the_function() -> None:
    from clearhead.checker import check as module

    assert callable(clearhead.check)
    assert module.check is clearhead.check


def test_the_smallest_example_is_right_itself(judge: Judge) -> None:
    """Expected is what the definition gives on the shown input, got is what the code gives."""
    report = judge.check(WRONG)
    example = report["parts"][0]["diagnostics"][0]["example"]
    q, k, v = (np.array(example["inputs"][name]) for name in "qkv")
    assert q.size + k.size + v.size <= 8
    assert np.allclose(clearhead.reference.attention(q, k, v), example["expected"])
    assert not np.allclose(example["expected"], example["got"])


def test_exit_codes_and_json(tmp_path: Path) -> None:
    assert typed("check", saved(tmp_path, RIGHT)).returncode == 0
    wrong = typed("check", saved(tmp_path, WRONG), "--json")
    assert wrong.returncode == 1
    data = json.loads(wrong.stdout)
    assert data["parts"][0]["diagnostics"][0]["key"] == "no-scale"
    assert data["parts"][0]["diagnostics"][0]["page"] == "docs/learn/attention.md#why-1d_k"
    assert typed("check", "nowhere.py").returncode == 2
    assert typed("check", saved(tmp_path, RIGHT), "--as", "sofmax").returncode == 2
    assert "did you mean 'softmax'" in typed("check", saved(tmp_path, RIGHT), "--as", "sofmax").stderr


def test_fragile_can_be_allowed(tmp_path: Path) -> None:
    path = saved(tmp_path, FRAGILE)
    assert typed("check", path).returncode == 4
    assert typed("check", path, "--strict").returncode == 1
    assert typed("check", path, "--allow", "fragile").returncode == 0


def test_a_name_and_a_hint(tmp_path: Path) -> None:
    path = saved(tmp_path, RIGHT.replace("def softmax", "def mystery"))
    found = typed("check", f"{path}:mystery", "--json")
    assert json.loads(found.stdout)["parts"][0]["part"] == "softmax"
    hinted = typed("check", f"{path}:mystery", "--as", "softmax", "--json")
    assert json.loads(hinted.stdout)["ok"]


@pytest.mark.parametrize(
    ("lang", "word"), [("en", "wrong: The scores are not divided"), ("zh", "错误: 分数没有除以 √d_k")]
)
def test_reads_well_at_80_columns_in_both_languages(tmp_path: Path, lang: str, word: str) -> None:
    text = typed("check", saved(tmp_path, WRONG), "--lang", lang, "--explain", COLUMNS="80").stdout
    assert word in text
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert not any(line.endswith(" ") for line in text.splitlines())
    by_locale = typed("check", saved(tmp_path, WRONG), LC_ALL="zh_CN.UTF-8" if lang == "zh" else "C.UTF-8").stdout
    assert word in by_locale


def test_watch_checks_again_on_save(tmp_path: Path) -> None:
    path = saved(tmp_path, WRONG)
    command = [sys.executable, "-m", "clearhead", "check", path, "--watch", "--lang", "en"]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=PLAIN)
    assert watching.stdout is not None
    try:
        lines = iter(watching.stdout.readline, "")
        assert any("0 of 1 parts are right" in line for line in lines)
        saved(tmp_path, RIGHT)
        os.utime(path, ns=(0, 1))
        assert any("Everything is right" in line for line in lines)
    finally:
        watching.kill()
        watching.communicate()


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_starters_are_not_written_yet(engine: str, judge: Judge) -> None:
    texts = starters(engine)
    assert len(texts) >= 17
    for name, text in texts.items():
        report = judge.check(text)
        keys = [diagnostic["key"] for part in report["parts"] for diagnostic in part["diagnostics"]]
        assert keys == ["not-written"], name
        assert not report["ok"]


def test_exercises_are_written_and_lead_on(tmp_path: Path) -> None:
    done = typed("exercises", "--out", str(tmp_path / "mine"), "--engine", "numpy", "--lang", "en")
    assert done.returncode == 0
    first = tmp_path / "mine" / "01_softmax.py"
    assert "Not written yet" in typed("check", str(first), "--lang", "en").stdout
    first.write_text(RIGHT, encoding="utf-8")
    after = typed("check", str(first), "--lang", "en").stdout.replace("\n", "")
    assert "02_attention.py" in after
    typed("exercises", "--out", str(tmp_path / "mine"), "--engine", "numpy")
    assert first.read_text(encoding="utf-8") == RIGHT


SOLVED = {
    "heat_map": """
LEVELS = " .:-=+*#%@"
def heat_map(weights):
    return "\\n".join("".join(LEVELS[min(int(10 * w), 9)] for w in row) for row in weights)
""",
    "block_flops": "def block_flops(n, d, d_ff):\n    return 8 * n * d * d + 4 * n * n * d + 4 * n * d * d_ff\n",
    "position_likeness": "def position_likeness(table):\n    return table @ table.T\n",
}


@pytest.mark.parametrize("name", SOLVED)
def test_solved_exercises_pass(name: str, judge: Judge) -> None:
    assert judge.check("import numpy as np\n" + SOLVED[name])["ok"]


def test_half_the_flops_are_named(judge: Judge) -> None:
    report = judge.check("def block_flops(n, d, d_ff):\n    return 4 * n * d * d + 2 * n * n * d + 2 * n * d * d_ff\n")
    assert report["parts"][0]["diagnostics"][0]["key"] == "flops-multiply-add"


def multi_head(mask: str, kept: str = "") -> str:
    return f"""
import torch
from torch import nn

class CausalSelfAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.h = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        {kept}

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (y.reshape(B, T, self.h, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill({mask} == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))
"""


@pytest.mark.parametrize(
    ("mask", "kept", "notes"),
    [
        ("torch.tril(torch.ones(T, T))", "", ["device"]),
        ("torch.tril(torch.ones(T, T, device=x.device))", "", []),
        ("self.tril[:T, :T]", "self.tril = torch.tril(torch.ones(50, 50))", ["device"]),
        ("self.tril[:T, :T]", "self.register_buffer('tril', torch.tril(torch.ones(50, 50)))", []),
    ],
)
def test_what_stays_on_the_cpu_is_a_note(judge: Judge, mask: str, kept: str, notes: list[str]) -> None:
    report = judge.check(multi_head(mask, kept))
    diagnostics = report["parts"][0]["diagnostics"]
    assert report["ok"]
    assert [diagnostic["key"] for diagnostic in diagnostics] == notes
    assert all(
        diagnostic["severity"] == "note" and "device=x.device" in diagnostic["advice"] for diagnostic in diagnostics
    )
    assert all("masked_fill" in diagnostic["values"]["code"] for diagnostic in diagnostics)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("class LearnedPositions(nn.Module):\n"
         "    def __init__(self, d_model, max_len):\n"
         "        super().__init__()\n"
         "        self.table = nn.Embedding(max_len, d_model)\n"
         "    def forward(self, x):\n"
         "        return x + self.table(torch.arange(x.shape[1]{device}))\n", 8),
        ("def rope(x):\n"
         "    T, d = x.shape[-2:]\n"
         "    angles = torch.outer(torch.arange(T{device}), 10000 ** (-torch.arange(0, d, 2{device}) / d))\n"
         "    a, b = x.chunk(2, -1)\n"
         "    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)\n", 7),
    ],
)  # fmt: skip
def test_the_line_that_needs_a_device(judge: Judge, code: str, line: int) -> None:
    """The operation at which CPU and other device meet; an index for a table counts, as on a GPU."""
    for device, lines in (("", [line]), (", device=x.device", [])):
        report = judge.check("import torch\nfrom torch import nn\n" + code.format(device=device))
        found = [f for part in report["parts"] for f in part["diagnostics"]]
        assert report["ok"]
        assert [diagnostic["values"]["line"] for diagnostic in found if diagnostic["key"] == "device"] == lines


CLEAN = """
import torch
def attention(q, k, v, mask):
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    weights = torch.where(mask.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    {extra}
    return weights @ v
"""


def test_nan_in_hidden_places_is_a_note(tmp_path: Path, judge: Judge) -> None:
    report = judge.check(CLEAN.format(extra=""))
    assert report["ok"]
    assert [diagnostic["key"] for diagnostic in report["parts"][0]["diagnostics"]] == ["nan-leaks"]
    clean = judge.check(CLEAN.format(extra="v = torch.where(v.isnan(), 0.0, v)"))
    assert [diagnostic["key"] for diagnostic in clean["parts"][0]["diagnostics"]] == []
    path = saved(tmp_path, CLEAN.format(extra=""))
    plain, explained = (typed("check", path, "--lang", "en", *more) for more in ((), ("--explain",)))
    assert plain.returncode == explained.returncode == 0
    assert "NaN" not in plain.stdout
    assert "note: NaN in a hidden key" in explained.stdout


@pytest.mark.parametrize("title", ["a mask that nobody gives", "mask not passed on", "values not normed"])
def test_a_block_shows_an_example(judge: Judge, title: str) -> None:
    snippet = next(s for s in snippets() if s.title == title)
    report = judge.check(snippet.text)
    found = [f for part in report["parts"] for f in part["diagnostics"] if f["key"] == snippet.key]
    example = found[0]["example"]
    assert example["expected"] != example["got"]
    assert np.size(example["expected"]) <= 4


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_line_ends_in_a_space(tmp_path: Path, lang: str) -> None:
    path = saved(tmp_path, next(s for s in snippets() if s.title == "mask after softmax").text)
    for columns in ("80", "50"):
        text = typed("check", path, "--lang", lang, "--explain", COLUMNS=columns).stdout
        assert max(cell_len(line) for line in text.splitlines()) <= int(columns)
        assert not [line for line in text.splitlines() if line != line.rstrip()]
