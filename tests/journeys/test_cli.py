"""The command line as a person types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from clearhead.configs import dumps, loads
from clearhead.models.presets import PRESETS, preset

PLAIN = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "COLUMNS", "NO_COLOR")}


def clearhead(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clearhead", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=PLAIN | environment, check=False)


def run_json(*arguments: str) -> dict:
    result = clearhead(*arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    """The one sentence that a bad request gets."""
    result = clearhead(*arguments)
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_the_installed_command_is_the_module() -> None:
    script = Path(sys.executable).with_name("clearhead")
    if not script.exists():
        pytest.skip("the package is not installed beside this Python")
    installed = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert installed.stdout == clearhead("--help").stdout
    assert "clearhead [OPTIONS] COMMAND" in installed.stdout


def help_of(*names: str) -> str:
    from clearhead.cli.main import cli

    result = CliRunner().invoke(cli, [*names, "--help"], prog_name="clearhead")
    assert result.exit_code == 0, result.output
    return result.output


def subcommands() -> list[tuple[str, ...]]:
    """Every command, and every command of a group, by its words."""
    from clearhead.cli.main import COMMANDS, cli

    found = {name: cli.get_command(None, name) for name in COMMANDS}  # type: ignore[arg-type]
    inner = [(name, sub) for name, group in found.items() if isinstance(group, click.Group) for sub in group.commands]
    return [*((name,) for name in found), *inner]


def test_help_names_every_command() -> None:
    from clearhead.cli.main import COMMANDS

    text = clearhead("-h").stdout
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("names", subcommands(), ids=" ".join)
def test_every_command_has_help_with_examples_in_one_vocabulary(names: tuple[str, ...]) -> None:
    text, line = help_of(*names), f"clearhead {' '.join(names)}"
    assert f"Usage: {line}" in text
    assert text.count(f"{line}\n") + text.count(f"{line} ") > 1, "an example below the usage line"
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text.partition("Options:")[2]))
    assert not options & {"--figure", "--save", "--output", "--num-beams", "--beam", "--samples", "--dark"}
    if "Colours of pictures" in text:
        assert options & {"--out", "--attention"}


@pytest.mark.parametrize(
    "names",
    """train,generate,chat,serve,translate,embed,classify,fill-mask,studio,inspect,eval,compare,scaling sweep,
    quantize,export,lab""".replace("\n", "")
    .replace("    ", "")
    .split(","),
)
def test_a_command_that_runs_a_model_has_a_device(names: str) -> None:
    text = " ".join(help_of(*names.split()).split())
    assert "--device [auto|cpu|cuda|mps]" in text or "on the CPU" in text


def test_version() -> None:
    import clearhead as package

    assert clearhead("--version").stdout.split()[-1] == package.__version__


def test_help_and_cost_do_not_load_torch() -> None:
    for arguments in (["--help"], ["cost", "gpt3-175b", "--json"], ["trace", "llama-3-8b"]):
        code = f"import sys; sys.argv[1:] = {arguments!r}\nfrom clearhead.cli.main import cli\n"
        code += "try: cli()\nexcept SystemExit: pass\nprint('torch' in sys.modules, file=sys.stderr)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stderr.split()[-1] == "False"


def test_cost_in_json() -> None:
    bill = run_json("cost", "gpt3-175b", "--json")
    assert bill["parameters"]["total"] == 174_604_259_328
    assert sum(bill["parameters"]["by_part"].values()) == bill["parameters"]["total"]
    assert sum(bill["flops"]["by_part"].values()) == bill["flops"]["forward"]


def test_cost_for_people_says_the_same() -> None:
    text = clearhead("cost", "mixtral-8x7b", "--train", "--length", "100").stdout
    assert "46,702,792,704 parameters, 12,879,925,248 active per token" in text
    assert "training step" in text
    assert max(map(len, text.splitlines())) <= 80


def test_trace_in_json_and_for_people() -> None:
    traced = run_json("trace", "transformer-base", "--batch", "32", "--length", "20", "--json")
    scores = next(step for step in traced["steps"] if step["name"] == "decoder.blocks.0.mixer.scores")
    assert (scores["letters"], scores["shape"]) == (["B", "H", "T", "S"], [32, 8, 20, 20])
    text = clearhead("trace", "transformer-base", "--batch", "32", "--length", "20").stdout
    assert "[B,T,D] = [32,20,512]" in text
    assert "(6 alike)" in text
    assert "63,045,632 parameters" in text


def test_set_changes_the_config() -> None:
    small = run_json("cost", "gpt2", "--set", "stack.repeats=6", "--json")["parameters"]["total"]
    assert small == 124_439_808 - 6 * 7_087_872


def test_preset_to_file_to_cost(tmp_path: Path) -> None:
    text = clearhead("presets", "tiny-deepseek").stdout
    assert loads(text) == preset("tiny-deepseek")
    (tmp_path / "clearhead.json").write_text(text)
    for where in (tmp_path, tmp_path / "clearhead.json"):
        assert (
            run_json("cost", str(where), "--json")["parameters"]
            == run_json("cost", "tiny-deepseek", "--json")["parameters"]
        )


def test_cost_of_a_hugging_face_config(tmp_path: Path) -> None:
    hf = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(hf))
    assert run_json("cost", str(tmp_path), "--json")["parameters"]["total"] == 124_439_808


def test_presets_are_listed_with_their_size() -> None:
    assert run_json("presets", "--json") == {
        name: run_json("cost", name, "--json")["parameters"]["total"] if name in ("gpt2", "tiny-vit") else size
        for name, size in run_json("presets", "--json").items()
    }
    assert set(run_json("presets", "--json")) == set(PRESETS)
    assert "gpt2-xl                 1,557,611,200" in clearhead("presets").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("cots",), "there is no command 'cots'; did you mean 'cost'?"),
        (("cost", "gpt22"), "there is no preset 'gpt22'; did you mean 'gpt2'?"),
        (("cost", "nowhere.json"), "there is no file or folder nowhere.json"),
        (("cost", "gpt2", "--set", "stack.repeat=6"), "Stack has no field 'repeat'; did you mean 'repeats'?"),
        (("cost", "gpt2", "--set", "stack.repeats=many"), "Stack.repeats is 'many', but must be a whole number"),
        (("cost", "gpt2", "--set", "stack.repeats"), "--set takes PATH=VALUE"),
        (("cost", "gpt2", "--set", "stack.dim=770"), "dim=770 is not a multiple of heads=12"),
        (("cost", "gpt2", "--length", "5000"), "this model has 1024 learned positions"),
        (("cost", "gpt2", "--length", "x"), "'x' is not a valid integer"),
        (("trace", "gpt2", "--source-length", "5"), "this model has no encoder"),
        (("completion", "tcsh"), "'tcsh' is not one of"),
        (("lab", "scores", "--widths", "100000000000"), "there is not enough memory"),
        (("generate", ""), "the name of the model is empty; give the folder of a checkpoint"),
        (("scaling", "plan", "--flops", "1e21", "--from", ""), "there are no constants ''"),
        (("scaling", "fit", "nowhere.csv"), "nowhere.csv: no such file or directory"),
        (("scaling", "fit", "runs.csv", "--seed", "-1"), "-1 is not in the range x>=0"),
        (("scaling", "fit", "runs.csv", "--out", "/"), "/ ends in ''"),
        (("inspect", "tiny-gpt", "1 2", "--ids", "--out", "x.gif"), "x.gif ends in '.gif'"),
    ],
)
def test_bad_input_gets_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused(*arguments)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object with a 'kind'"),
        ('{"kind": "Winndow"}', "unknown kind 'Winndow'; did you mean 'Window'?"),
        ('{"kind": "Window"}', "Window needs size"),
        ('{"kind": "Window", "size": 3}', "describes a Window, not a whole model"),
        ('{"model_type": "gpt5"}', "the model_type 'gpt5' is not supported; the nearest supported family is gpt2"),
    ],
)
def test_a_bad_file_gets_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "clearhead.json").write_text(text)
    assert sentence in refused("cost", str(tmp_path / "clearhead.json"))


def test_an_interrupt_is_no_failure_of_ours(tmp_path: Path) -> None:
    """Before the first step there is nothing to save."""
    code = """
import signal, sys
from clearhead.training import loop
assert loop.prepare_task
loop.prepare_task = lambda *given: signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
from clearhead.cli.main import main
sys.argv = ["clearhead", "train", "chars", "--out", sys.argv[1]]
main()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, env=PLAIN, check=False)
    assert result.returncode == 130
    assert result.stderr.strip() == "clearhead: interrupted"


def test_colour_only_for_terminals_that_want_it() -> None:
    assert "\x1b[" not in clearhead("trace", "tiny-gpt").stdout
    assert "\x1b[" in clearhead("trace", "tiny-gpt", FORCE_COLOR="1").stdout
    assert "\x1b[36m" not in clearhead("trace", "tiny-gpt", FORCE_COLOR="1", NO_COLOR="1").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    script = clearhead("completion", shell).stdout
    assert f"_CLEARHEAD_COMPLETE={shell}_complete" in script


def test_completion_completes() -> None:
    environment = {"_CLEARHEAD_COMPLETE": "bash_complete", "COMP_WORDS": "clearhead co", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from clearhead.cli.main import main; main()"]
    result = subprocess.run(command, capture_output=True, text=True, env=PLAIN | environment, check=False)
    assert result.stdout.split() == ["plain,convert", "plain,compare", "plain,cost", "plain,completion"]


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m clearhead trace gpt3-175b --json | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, env=PLAIN, check=False)
    assert result.stdout == "{\n"
    assert "Traceback" not in result.stderr


def test_a_saved_preset_is_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "clearhead.json"
    path.write_text(dumps(preset("llama-3-8b")))
    assert run_json("cost", str(path), "--json")["parameters"]["total"] == 8_030_261_248


@pytest.mark.parametrize("command", ["cost", "trace"])
def test_any_number_of_blocks_is_counted_once(command: str) -> None:
    """The work does not grow with the number of blocks, and the numbers are those of every block."""
    data = run_json(command, "gpt2", "--set", "stack.repeats=60000", "--json")
    if command == "cost":
        assert data["parameters"]["total"] == 124_439_808 + (60_000 - 12) * 7_087_872
    else:
        assert len(data["steps"]) == len(run_json(command, "gpt2", "--json")["steps"])
        assert {step["repeats"] for step in data["steps"]} == {1, 60_000}


def test_absurd_sizes_are_refused_before_anything_is_allocated() -> None:
    assert "at most 65,536 blocks" in refused("cost", "gpt2", "--set", "stack.repeats=10000000")
    assert "this machine has" in refused("inspect", "gpt3-175b", "5 3", "--ids")
