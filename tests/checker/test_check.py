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
    assert [finding.key for finding in report.findings] == ["softmax-unstable"]
    assert not report.ok
    assert "Subtract the row's maximum" in str(report)
    assert clearhead.check(clearhead.reference.softmax).ok


def test_a_torch_function_by_its_arguments() -> None:
    report = clearhead.check(unscaled)
    assert report.parts[0].part == "attention"
    assert [finding.key for finding in report.findings] == ["no-scale"]


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
        assert [f.key for f in report.findings if f.severity != "note"] == [], function


def test_the_name_stays_the_function() -> None:
    from clearhead.checker import check as module

    assert callable(clearhead.check)
    assert module.check is clearhead.check


def test_the_smallest_example_is_right_itself(judge: Judge) -> None:
    """Expected is what the definition gives on the shown input, got is what the code gives."""
    report = judge.check(WRONG)
    example = report["parts"][0]["findings"][0]["example"]
    q, k, v = (np.array(example["inputs"][name]) for name in "qkv")
    assert q.size + k.size + v.size <= 8
    assert np.allclose(clearhead.reference.attention(q, k, v), example["expected"])
    assert not np.allclose(example["expected"], example["got"])


def test_exit_codes_and_json(tmp_path: Path) -> None:
    assert typed("check", saved(tmp_path, RIGHT)).returncode == 0
    wrong = typed("check", saved(tmp_path, WRONG), "--json")
    assert wrong.returncode == 1
    data = json.loads(wrong.stdout)
    assert data["parts"][0]["findings"][0]["key"] == "no-scale"
    assert data["parts"][0]["findings"][0]["page"] == "docs/attention.md#why-1d_k"
    assert typed("check", "nowhere.py").returncode == 2
    assert typed("check", saved(tmp_path, RIGHT), "--as", "sofmax").returncode == 2
    assert "did you mean 'softmax'" in typed("check", saved(tmp_path, RIGHT), "--as", "sofmax").stderr


def test_fragile_can_be_allowed(tmp_path: Path) -> None:
    path = saved(tmp_path, FRAGILE)
    assert typed("check", path).returncode == 1
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
        assert any("All of it is right" in line for line in lines)
    finally:
        watching.kill()
        watching.communicate()


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_starters_are_not_written_yet(engine: str, judge: Judge) -> None:
    texts = starters(engine)
    assert len(texts) >= 17
    for name, text in texts.items():
        report = judge.check(text)
        keys = [finding["key"] for part in report["parts"] for finding in part["findings"]]
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
    assert report["parts"][0]["findings"][0]["key"] == "flops-multiply-add"
