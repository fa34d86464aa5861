"""`clearhead doctor`: what it says is checked against what the machine says elsewhere."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from clearhead.cli.doctor import command
from clearhead.extras import install_command, torch_missing
from clearhead.measure import doctor, precision
from clearhead.measure.doctor import diagnose, examine
from clearhead.measure.precision import CHILD, PRECISIONS, REMEDY, Probe, precision_works, try_precision

posix = pytest.mark.skipif(os.name != "posix", reason="signals")


def python(code, *arguments, **settings):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=os.environ | settings, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def report():
    """One whole examination, as a user runs it."""
    run = python("from clearhead.cli.doctor import command; command()", "--json")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def quick():
    return examine(probe=False)


def test_versions_and_machine_are_those_of_this_process(report):
    machine = report["machine"]
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["numpy"] == np.__version__
    assert report["python"] == sys.version.split()[0]
    assert 1 <= machine["cores"] <= os.cpu_count()
    assert 1 <= report["threads"] <= os.cpu_count()
    assert machine["folder"] == os.getcwd()
    assert machine["disk_free"] > 0
    assert report["devices"][0]["name"] == "cpu"
    if hasattr(os, "sched_getaffinity"):
        assert machine["cores"] == len(os.sched_getaffinity(0))
    if sys.platform == "linux":
        assert machine["memory_total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 0 < machine["memory_available"] < machine["memory_total"]
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX2", "AVX512"):
        assert capability.lower() in machine["instructions"]


def test_speed_is_measured(report):
    assert 1e-4 < report["speed"]["gemm_tflops"] < 1e3
    assert 0.1 < report["speed"]["read_gbps"] < 1e5


def test_every_precision_is_tried(report):
    assert list(report["precisions"]) == list(PRECISIONS)
    assert report["precisions"]["float32"] == {
        "dtype": "float32",
        "works": True,
        "outcome": "works",
        "detail": "",
        "remedy": None,
    }
    assert report["ok"] is True


def test_bfloat16_fares_here_as_reported(report):
    code = "import torch; a = torch.ones(257, 257, dtype=torch.bfloat16); print((a @ a)[0, 0].item())"
    found, run = report["precisions"]["bfloat16"], python(code)
    assert found["works"] == (run.returncode == 0)
    if found["remedy"] is not None:
        name, value = found["remedy"].split("=")
        assert python(code, **{name: value}).returncode == 0
        assert any(found["remedy"] in finding["text"] for finding in report["findings"])


def test_what_to_install(report):
    uses = {use["package"]: use for use in report["uses"]}
    assert uses["transformers"]["install"] == "pip install transformers"
    assert uses["gguf"]["install"] == install_command("gguf")
    assert uses["pytest"]["version"] == pytest.__version__


def test_every_extra_is_listed(report):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    uses = [use for use in report["uses"] if use["extra"] is not None]
    assert {use["extra"] for use in uses} == set(extras) - {"bench", "dev"}
    for use in uses:
        assert use["package"] in {line.split(">")[0] for line in extras[use["extra"]]}


@posix
def test_the_compiler_is_the_one_that_the_kernels_take(monkeypatch, tmp_path):
    mine = tmp_path / "mycc"
    mine.touch(mode=0o755)
    monkeypatch.setenv("CC", f"{mine} -O1")
    assert doctor.kernel_source() == f"can be compiled by {mine}"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert doctor.kernel_source() is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.kernel_source() is None
    monkeypatch.setattr(doctor, "prebuilt_library", lambda: tmp_path / "x86-64-v3.so")
    assert doctor.kernel_source() == "prebuilt for x86-64-v3"


@posix
@pytest.mark.parametrize("name", ["SIGILL", "SIGSEGV", "SIGKILL"])
def test_a_child_that_dies_is_reported_by_its_signal(name):
    probe = try_precision("float32", code=f"import os, signal; os.kill(os.getpid(), signal.{name})")
    assert (probe.outcome, probe.detail, probe.works) == ("killed", name, False)


def test_a_child_that_hangs_is_stopped():
    probe = try_precision("float32", code="import time; time.sleep(600)", seconds=0.5)
    assert (probe.outcome, probe.detail) == ("timeout", "stopped after 0.5 s")


def test_a_child_that_fails_is_quoted():
    probe = try_precision("int8", code="raise RuntimeError('no kernel for ' + __import__('sys').argv[1])")
    assert (probe.outcome, probe.detail) == ("error", "RuntimeError: no kernel for int8")


def test_a_child_gets_its_settings_and_not_the_current_folder():
    code = "import os, sys; print('works' if os.environ['SETTING'] == '7' and '' not in sys.path else 'wrong: no')"
    assert try_precision("float32", {"SETTING": "7"}, code=code).works


@pytest.mark.parametrize(
    ("dtype", "place", "name"),
    [
        ("float16", "torch.nn.functional.linear", "product"),
        ("float32", "torch.nn.functional.scaled_dot_product_attention", "attention"),
        ("int8", "torch._int_mm", "product"),
    ],
)
def test_a_wrong_result_is_reported_as_wrong(dtype, place, name):
    fault = f"import torch\nright = {place}\n{place} = lambda *given: right(*given) + 1\n"
    probe = try_precision(dtype, code=fault + CHILD)
    assert (probe.outcome, probe.detail) == ("wrong", f"the {name} is off by 1")


@pytest.mark.parametrize(
    ("bare", "mended", "remedy"),
    [
        (("killed", "SIGILL"), "works", REMEDY),
        (("killed", "SIGILL"), "killed", None),
        (("killed", "SIGKILL"), "works", None),  # out of memory, say: no setting mends that
        (("works", ""), "works", None),
    ],
)
def test_the_remedy_is_offered_only_where_it_helps(monkeypatch, bare, mended, remedy):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    outcomes = {False: bare, True: (mended, "")}

    def tried(dtype, settings=None):
        outcome, detail = outcomes[settings is not None]
        return Probe(dtype=dtype, outcome=outcome, detail=detail)

    monkeypatch.setattr(precision, "try_precision", tried)
    probe = precision_works.__wrapped__("bfloat16")
    assert probe == Probe(dtype="bfloat16", outcome=bare[0], detail=bare[1], remedy=remedy)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="'bf16' is not one of float32, float16, bfloat16"):
        precision_works("bf16")


def test_findings_say_the_way_out(quick):
    def texts(report, broken=None):
        return [(finding.level, finding.text) for finding in diagnose(report, broken)]

    killed = Probe(dtype="bfloat16", outcome="killed", detail="SIGILL", remedy=REMEDY)
    assert texts(replace(quick, precisions=(killed,)))[0] == (
        "warning",
        f"bfloat16 kills the process (SIGILL) here: set {REMEDY} before torch is imported.",
    )
    wrong = Probe(dtype="float16", outcome="wrong", detail="the product is off by 3")
    assert texts(replace(quick, precisions=(wrong,)))[0] == (
        "warning",
        "float16 gives wrong results (the product is off by 3): use float32.",
    )
    assert texts(replace(quick, precisions=(replace(wrong, dtype="float32"),)))[0][0] == "error"
    assert texts(quick, "libtorch.so is missing")[0][0] == "error"
    assert texts(replace(quick, versions={"torch": None}))[0] == (
        "error",
        torch_missing("Everything but the NumPy engine"),
    )
    crowded = replace(quick, threads=quick.machine.cores + 1)
    assert any("OMP_NUM_THREADS=" in text for _, text in texts(crowded))
    bare = replace(quick, compile=replace(quick.compile, compiler=None))
    assert any("C++ compiler" in text for _, text in texts(bare))
    assert any("need a C compiler" in text for _, text in texts(replace(quick, kernels=None)))


def test_quick_starts_no_process_and_fits_80_columns(monkeypatch):
    def refused(*arguments, **options):
        raise AssertionError("--quick must not start a process")

    monkeypatch.setattr(precision, "try_precision", refused)
    monkeypatch.setattr(doctor, "best", refused)
    monkeypatch.setenv("COLUMNS", "80")
    run = CliRunner().invoke(command, ["--quick"])
    assert run.exit_code == 0, run.output
    assert torch.__version__ in run.stdout
    assert "not tried" in run.stdout
    assert "\x1b" not in run.output
    assert max(map(len, run.stdout.splitlines())) <= 80
    data = json.loads(CliRunner().invoke(command, ["--quick", "--json"]).stdout)
    assert (data["precisions"], data["speed"]) == ({}, None)


def test_the_exit_code_is_1_without_float32(monkeypatch, quick):
    broken = replace(quick, precisions=(Probe(dtype="float32", outcome="killed", detail="SIGILL"),))
    broken = replace(broken, findings=diagnose(broken, None))
    monkeypatch.setattr(doctor, "examine", lambda **options: broken)
    run = CliRunner().invoke(command, [])
    assert run.exit_code == 1
    assert "kills the process (SIGILL)" in run.stdout
    assert json.loads(CliRunner().invoke(command, ["--json"]).stdout)["ok"] is False


def test_help_loads_neither_torch_nor_rich():
    code = "import sys, clearhead.cli.doctor; print({'torch', 'rich', 'numpy'} & sys.modules.keys() or 'light')"
    assert python(code).stdout.strip() == "light"
