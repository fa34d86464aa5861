"""Many files at once: folders and patterns, exit codes, CSV and JUnit, the summary of a class, the pytest plugin."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from clearhead.checker.batch import check_files, collect_files, count_mistakes, exit_code, to_csv, to_junit
from clearhead.testing import assert_right

from .test_check import typed

RIGHT = """
import numpy as np
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
"""
NAIVE = RIGHT.replace("x - x.max(-1, keepdims=True)", "x")
EXITS = "import sys\ndef softmax(x):\n    sys.exit(0)\n"
FRAGILE = """
import numpy as np
def layer_norm(x, gamma, beta):
    return gamma * (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) + beta
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = {"anna.py": RIGHT, "ben.py": NAIVE, "sub/carla.py": NAIVE, "dan.py": EXITS, ".hidden/x.py": NAIVE}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_files_are_found(folder: Path) -> None:
    names = [Path(file).name for file in collect_files([str(folder)])]
    assert names == ["anna.py", "ben.py", "dan.py", "carla.py"]
    assert [Path(f).name for f in collect_files([str(folder / "*n.py")])] == ["ben.py", "dan.py"]


def test_a_class_is_summed_up(folder: Path) -> None:
    reports = list(check_files(collect_files([str(folder)]), jobs=2))
    assert [report.verdict for report in reports] == ["right", "wrong", "unchecked", "wrong"]
    counts = {count.key: count.files for count in count_mistakes(reports)}
    assert counts == {"softmax-unstable": 2, "ended-process": 1}
    rows = list(csv.DictReader(to_csv(reports).splitlines()))
    assert [row["verdict"] for row in rows] == ["right", "wrong", "unchecked", "wrong"]
    suites = ElementTree.fromstring(to_junit(reports))
    assert [len(suites.findall(f".//{kind}")) for kind in ("testcase", "failure", "skipped")] == [4, 2, 1]
    assert exit_code(reports) == 1
    assert exit_code(reports[2:3]) == 3


def test_as_typed(folder: Path) -> None:
    done = typed("check", str(folder), "--lang", "en", "--csv", str(folder / "marks.csv"), "--only", "softmax")
    assert done.returncode == 1
    assert "4 files: 1 right, 2 wrong, 0 fragile, 1 not checked." in done.stdout
    assert (folder / "marks.csv").read_text(encoding="utf-8").startswith("file,name,part,verdict")
    again = typed("check", str(folder / "anna.py"), "--csv", str(folder / "marks.csv"))
    assert again.returncode != 0
    assert "--force" in again.stderr
    found = typed("check", str(folder / "anna.py"), str(folder / "ben.py"), "--json")
    assert [file["verdict"] for file in json.loads(found.stdout)["files"]] == ["right", "wrong"]


def test_exit_codes(folder: Path) -> None:
    (folder / "eve.py").write_text(FRAGILE, encoding="utf-8")
    codes = [typed("check", str(folder / f"{name}.py"), *more).returncode for name, more in (
        ("anna", ()), ("ben", ()), ("dan", ()), ("eve", ()), ("eve", ("--strict",)), ("eve", ("--allow", "fragile")),
        ("nobody", ()),
    )]  # fmt: skip
    assert codes == [0, 1, 3, 4, 1, 0, 2]
    assert typed("check", str(folder / "anna.py"), "--only", "attention").returncode == 3


def test_assert_right(folder: Path) -> None:
    assert_right(folder / "anna.py", "softmax")
    with pytest.raises(AssertionError, match="overflows"):
        assert_right(str(folder / "ben.py"), "softmax")
    with pytest.raises(AssertionError, match="defines no attention"):
        assert_right(folder / "anna.py", "attention")


def test_the_pytest_plugin(hand_in: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "clearhead.checker.pytest_plugin", str(hand_in)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=hand_in, env=environment)
    assert "1 failed, 1 passed" in done.stdout


@pytest.fixture
def hand_in(tmp_path: Path) -> Path:
    (tmp_path / "student.py").write_text(RIGHT, encoding="utf-8")
    (tmp_path / "other.py").write_text(NAIVE, encoding="utf-8")
    test = "def test_{0}(assert_right):\n    assert_right('{0}.py', 'softmax')\n"
    (tmp_path / "test_hand_in.py").write_text(test.format("student") + test.format("other"), encoding="utf-8")
    return tmp_path
