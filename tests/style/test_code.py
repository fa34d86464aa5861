"""Lint, types, the direction of imports, modules that load without torch, and tests that assert something."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.__main__ import NAMES as BENCHMARKS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "clearhead"
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}

# Nothing imports from a higher layer.
LAYERS = (
    {"shapes", "schedules", "extras", "files"},
    {"memory", "typed_json", "gguf_file", "units"},
    {"configs"},
    {"reference"},
    {"tokenize"},
    {"functional", "data"},
    {"kernels.build", "kernels.calls", "kernels.malloc"},
    {"precision"},
    {"nn"},
    {"kernels.decode", "kernels.accelerate"},
    {"models"},
    {"generate"},
    {"measure"},
    {"tasks"},
    {"inspect"},
    {"training", "optim"},
    {"lab", "scaling"},
    {"checker", "testing"},
    {"serve"},
    {"studio"},
    {"notebook"},
    {"cli"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
LIGHT = (
    "clearhead",
    "clearhead.configs",
    "clearhead.reference",
    "clearhead.tokenize",
    "clearhead.data",
    "clearhead.models.presets",
    "clearhead.models.convert",
    "clearhead.measure.trace",
    "clearhead.measure.cost",
    "clearhead.inspect.positions",
    "clearhead.scaling",
    "clearhead.cli.main",
    "clearhead.cli.doctor",
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, inside functions too, except for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{name}.{each.name}" if f"{name}.{each.name}" in MODULES else name for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("clearhead.")}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer_name(parts: Sequence[str]) -> str:
    """The package of a module, or the module itself where it has a layer of its own."""
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LEVEL else parts[0]


def test_ruff_is_content() -> None:
    for command in (("check",), ("format", "--check")):
        result = run(sys.executable, "-m", "ruff", *command, ".")
        assert result.returncode == 0, result.stdout + result.stderr


def test_types_check() -> None:
    result = run(sys.executable, "-m", "mypy")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_dependencies_point_one_way(path: Path) -> None:
    part = layer_name(path.relative_to(PACKAGE).with_suffix("").parts)
    if part in ("__init__", "__main__", "kernels"):
        return
    layers = {layer_name(name.split(".")[1:]) for name in imports(path)}
    above = {name for name in layers if LEVEL.get(name, -1) > LEVEL[part]}
    assert not above, f"{path} imports {above} from above"


def test_no_modules_import_each_other() -> None:
    """No cycle of imports, direct or through others. An import inside a function counts: it only hides the knot."""
    waiting = {module_name(path): imports(path) for path in PACKAGE.rglob("*.py")}
    while free := [name for name, needs in waiting.items() if not needs & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert not {name: needs & waiting.keys() for name, needs in waiting.items()}


def test_every_module_has_a_layer() -> None:
    names = {layer_name(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    assert names - set(LEVEL) <= {"__init__", "__main__", "kernels"}


TRAIN_TEXT = """
import sys
from clearhead.cli.main import cli
try:
    cli(["train", "chars", "--data", sys.argv[1], "--out", sys.argv[2], "--set", "steps=1", "--set", "batch=2"])
except SystemExit as stop:
    assert not stop.code
print(*sorted(name for name in sys.modules if name.startswith(("clearhead", "sacrebleu", "matplotlib"))))
"""


def test_training_on_plain_text_loads_no_other_task(tmp_path: Path) -> None:
    """`clearhead train` of a text needs no translation, no images, no attention maps and no BLEU."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 400, encoding="utf-8")
    result = run(sys.executable, "-c", TRAIN_TEXT, str(text), str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "clearhead.training.text" in loaded
    unneeded = ("clearhead.tasks", "clearhead.inspect", "clearhead.measure.bleu", "clearhead.training.pairs")
    unneeded += (
        "clearhead.training.images",
        "clearhead.data.images",
        "clearhead.data.pairs",
        "sacrebleu",
        "matplotlib",
    )
    assert not {name for name in loaded if name.startswith(unneeded)}


@pytest.mark.parametrize("module", LIGHT)
def test_loads_without_torch(module: str) -> None:
    result = run(
        sys.executable, "-c", f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_transformers_is_never_a_run_time_dependency() -> None:
    assert not [path for path in PACKAGE.rglob("*.py") if "import transformers" in path.read_text(encoding="utf-8")]


def test_nothing_is_pickled() -> None:
    """Pickles of other people are read in one file only, as tensors only."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"import pickle\b", text), path
        if path.name == "pickles.py":
            text = re.sub(r"torch\.load\([^()]*weights_only=True[^()]*\)", "", text)
        assert "torch.load(" not in text, path
        assert "torch.save(" not in text, path


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_asserts(path: Path) -> None:
    """An assert, a judge such as `raises` or `assert_close`, or a helper of this folder that holds one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    helpers = {
        p: ast.parse(p.read_text(encoding="utf-8"))
        for p in {path, *path.parent.glob("[!t_]*.py"), path.parent / "tools.py"}
        if p.exists()
    }
    judges = {"raises", "assert_close", "assert_allclose", "assert_array_equal", "fail", "gradcheck"}

    def asserts(node: ast.AST) -> bool:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assert):
                return True
            if isinstance(inner, ast.Call):
                name = inner.func.attr if isinstance(inner.func, ast.Attribute) else getattr(inner.func, "id", "")
                if name in judges:
                    return True
        return False

    for _ in range(3):  # a helper may call a helper
        for helper in helpers.values():
            judges |= {
                n.name
                for n in ast.walk(helper)
                if isinstance(n, ast.FunctionDef) and asserts(n) and not n.name.startswith("test")
            }
    tests = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    assert tests, f"{path} holds no test"
    assert not [test.name for test in tests if not asserts(test)]


@pytest.mark.parametrize("folder", ["configs", "nn", "reference"])
def test_a_part_has_one_name_in_every_engine(folder: str) -> None:
    """configs/x.py is computed by nn/x.py and reference/x.py."""
    parts = {
        "attention",
        "latent",
        "linear_attention",
        "linformer",
        "lstm",
        "mamba",
        "ffn",
        "moe",
        "norm",
        "rotary",
        "positions",
        "embedding",
        "heads",
        "stack",
    }
    assert parts <= {path.stem for path in (PACKAGE / folder).glob("*.py")}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_loads(name: str) -> None:
    """Peers are imported when they are measured, so all load without them."""
    assert callable(import_module(f"benchmarks.{name}").main)


def test_every_benchmark_has_a_name() -> None:
    folder = ROOT / "benchmarks"
    files = {path.stem for path in folder.glob("[!_]*.py") if "def main(" in path.read_text(encoding="utf-8")}
    assert files == set(BENCHMARKS)


@pytest.mark.parametrize("name", results.PAGES)
def test_speed_tables_are_those_of_the_result_files(name: str) -> None:
    """`python -m benchmarks.results` writes them again."""
    page, files = (results.DOCS / name).read_text(encoding="utf-8"), results.all_files()
    assert files
    assert results.fill_page(page, results.PAGES[name](files)) == page
