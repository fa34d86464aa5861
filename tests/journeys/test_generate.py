"""`clearhead generate`, `chat`, `eval`, `embed`, `fill-mask` and `classify` on the command line."""

from __future__ import annotations

import io
import json
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import clearhead as package
from clearhead.cli.main import main
from clearhead.configs import BytesConfig, ClassHeadConfig, PoolerConfig
from clearhead.measure.perplexity import perplexity_of
from clearhead.tokenize import make

from .test_cli import clearhead


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    torch.manual_seed(0)
    config = package.preset("tiny-gpt")
    config = replace(
        config, embedding=replace(config.embedding, vocabulary=257), head=replace(config.head, vocabulary=257)
    )
    model = package.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.embedding.tokens.weight[128:].zero_()  # bytes of ASCII only
    path = tmp_path_factory.mktemp("model")
    model.save(path, tokenizer=make(BytesConfig(), []))
    return str(path)


@dataclass
class CommandOutput:
    """The output of a command run in this process."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str, typed: str = "") -> CommandOutput:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["clearhead", *arguments])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode()), encoding="utf-8"))
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
    return CommandOutput(code, out.getvalue(), err.getvalue())


def run_json(*arguments: str) -> dict:
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def error_of(*arguments: str) -> str:
    result = run(*arguments)
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    return result.stderr


def test_only_the_text_goes_to_stdout(folder: str) -> None:
    model = package.load(folder)
    (wanted,) = model.generate("To be", max_new_tokens=12)
    result = clearhead("generate", folder, "To be", "--max-new-tokens", "12")
    assert (result.stdout, result.stderr) == (wanted.text + "\n", "")
    assert run("generate", folder, "To be", "-m", "12", "--temperature", "0").stdout == wanted.text + "\n"
    assert run("generate", folder, "To be", "-m", "12", "--echo").stdout == f"To be{wanted.text}\n"
    assert run("generate", folder, "-", "-m", "12", typed="To be\n").stdout == wanted.text + "\n"


def test_files_lines_and_json(folder: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("To be\nor not\n")
    options = ("--temperature", "0.9", "--top-k", "50", "--seed", "4", "-n", "2", "-m", "6", "--logprobs", "--json")
    found = run_json("generate", folder, "first", "--file", str(tmp_path / "prompts.txt"), "--lines", *options)
    assert [one["prompt"] for one in found["completions"]] == ["first"] * 2 + ["To be"] * 2 + ["or not"] * 2
    assert found["seed"] == 4
    wanted = package.load(folder).generate(
        ["first", "To be", "or not"], temperature=0.9, top_k=50, seed=4, n=2, max_new_tokens=6, logprobs=True
    )
    assert [one["tokens"] for one in found["completions"]] == [one.tokens for one in wanted]
    assert found["completions"][0]["logprobs"] == pytest.approx(wanted[0].logprobs, abs=1e-5)
    beams = run_json(
        "generate", folder, "", "--beams", "3", "-n", "3", "-m", "4", "--length-penalty", "wu:0.6", "--json"
    )
    assert [one["score"] for one in beams["completions"]] == sorted(
        (one["score"] for one in beams["completions"]), reverse=True
    )


def test_only_line_feeds_end_a_line(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("a\u2028b\x0cc\nd\n", encoding="utf-8")
    output = run("generate", folder, "--file", str(file), "--lines", "--json", "-m", "1")
    assert [one["prompt"] for one in json.loads(output.stdout)["completions"]] == ["a\u2028b\x0cc", "d"]
    file.write_text("")
    assert "there is no text: give one" in error_of("generate", folder, "--file", str(file), "--lines")
    for command in ("embed", "classify", "fill-mask"):
        assert "there is no text: give one" in error_of(command, folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_run_on_any_processor(folder: str, tmp_path: Path, dtype: torch.dtype) -> None:
    """Some processors cannot multiply in bfloat16."""
    model = package.load(folder).to(dtype)
    model.save(tmp_path / "half")
    wanted = model.float().generate("To be", max_new_tokens=8)[0].text
    result = run("generate", str(tmp_path / "half"), "To be", "-m", "8")
    assert (result.returncode, result.stdout) == (0, wanted + "\n"), result.stderr
    (tmp_path / "text.txt").write_text("To be or not to be " * 9)
    for words in (
        ("eval", str(tmp_path / "half"), str(tmp_path / "text.txt")),
        ("inspect", str(tmp_path / "half"), "To be"),
    ):
        assert run(*words).returncode == 0


def test_damaged_generation_config_is_named(folder: str) -> None:
    file = Path(folder) / "generation_config.json"
    file.write_text("{bad")
    assert "generation_config.json is not JSON" in error_of("generate", folder, "x")
    file.unlink()


def test_chat_answers_line_by_line(folder: str) -> None:
    assert "has no chat template" in error_of("chat", folder)
    (Path(folder) / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    result = run("chat", folder, "--max-new-tokens", "4", typed="hello\n\nagain\n")
    assert result.returncode == 0, result.stderr
    (first,) = package.load(folder).generate("hello\n", max_new_tokens=4)
    assert result.stdout.startswith(first.text + "\n")
    (Path(folder) / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("x" * 65,), "the prompt has 65 tokens, but the model's context is 64 tokens"),
        (("x", "--temprature", "1"), "No such option '--temprature'"),
        (("x", "--top-p", "2"), "top_p is 2.0, but must be between 0 and 1"),
        (("x", "--length-penalty", "long"), "'long' is neither power:ALPHA nor wu:ALPHA"),
        (("--lines",), "--lines needs --file"),
        (("x", "-t", "nan"), "temperature is nan, but must be a finite number ≥ 0"),
        (("-", "--file", "-"), "standard input can be read only once"),
        (("x", "--batch", "0"), "0 is not in the range x>=1"),
        (("--file", "nowhere.txt"), "nowhere.txt: no such file or directory"),
    ],
)
def test_bad_requests_get_one_sentence(folder: str, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in error_of("generate", folder, *arguments)


def test_models_without_lm_head_are_refused(tmp_path: Path) -> None:
    said = error_of("generate", "gpt2", "x")
    assert "gpt2 is a preset, which has no weights, and as a name on the Hub: gpt2 is not a folder" in said
    assert "nowhere is not a folder and not in the Hub's cache" in error_of("generate", "nowhere", "x")
    package.build(package.preset("tiny-bert")).save(tmp_path)
    assert "this model has a Pooler head and cannot generate text" in error_of("generate", str(tmp_path), "x")
    package.build(package.preset("tiny-gpt")).save(tmp_path / "bare")
    assert "the model has no tokenizer" in error_of("generate", str(tmp_path / "bare"), "x")


def test_draft_prints_its_acceptance_rate(folder: str) -> None:
    plain = run("generate", folder, "To be", "-m", "12")
    fast = run("generate", folder, "To be", "-m", "12", "--draft", folder, "--draft-tokens", "3")
    assert fast.stdout == plain.stdout
    assert fast.stderr.startswith("draft: ")
    assert fast.stderr.endswith("tokens accepted (100%)\n")


def test_eval_states_its_stride(folder: str, tmp_path: Path) -> None:
    text = "To be, or not to be: that is the question. " * 3
    (tmp_path / "text.txt").write_text(text)
    wanted = perplexity_of(package.load(folder), text, stride=16)
    told_of = run_json("eval", folder, str(tmp_path / "text.txt"), "--stride", "16", "--json")["files"]
    (found,) = told_of.values()
    assert found["perplexity"] == pytest.approx(wanted.perplexity)
    assert found["bits_per_byte"] == pytest.approx(wanted.bits_per_byte)
    assert (found["stride"], found["context"], found["tokens"]) == (16, 64, len(text))
    line = run("eval", folder, str(tmp_path / "text.txt")).stdout
    assert "bits per byte" in line
    assert "context 64, stride 32" in line
    assert "context is 100, but the model reads at most 64" in error_of(
        "eval", folder, str(tmp_path / "text.txt"), "--context", "100"
    )
    assert "No such file" in error_of("eval", folder, "nowhere.txt")


def test_encoders_on_the_command_line(folder: str, tmp_path: Path) -> None:
    tokenizer = make(BytesConfig(), [])
    bert = package.preset("tiny-bert").with_value("embedding.vocabulary", 257)
    package.build(bert).save(tmp_path / "bert", tokenizer=tokenizer)
    judge = bert.with_value("head", ClassHeadConfig(classes=3, pool=PoolerConfig()))
    package.build(judge).save(tmp_path / "judge", tokenizer=tokenizer)
    (tmp_path / "lines.txt").write_text("one\nthree")
    lines = ("--file", str(tmp_path / "lines.txt"), "--lines")
    vectors = run("embed", str(tmp_path / "bert"), *lines).stdout.splitlines()
    assert [len(vector.split()) for vector in vectors] == [32, 32]
    rows = run_json("embed", str(tmp_path / "bert"), "one", "--pool", "none", "--json")["embeddings"]
    assert len(rows[0]["vector"]) == 3
    classes = run_json("classify", str(tmp_path / "judge"), *lines, "--json")["inputs"]
    assert [sum(one["score"] for one in each["classes"]) for each in classes] == pytest.approx([1, 1])
    assert run("classify", str(tmp_path / "judge"), "one", "--top", "1").stdout.split()[1].startswith("LABEL_")
    assert "no masked-LM head" in error_of("fill-mask", str(tmp_path / "bert"), "one")
    assert "no class head" in error_of("classify", folder, "one")


def test_chat_commands(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    (Path(folder) / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    first = ("/help", "hello", f"/save {file}", f"/save {file}", "/reset")
    then = ("/system Be brief.", "/save", "/nothing", f"/save {tmp_path / 'two.json'}")
    result = run("chat", folder, "--max-new-tokens", "4", typed="\n".join((*first, *then)) + "\n")
    assert [message["role"] for message in json.loads(file.read_text())] == ["user", "assistant"]
    assert json.loads((tmp_path / "two.json").read_text()) == [{"role": "system", "content": "Be brief."}]
    for sentence in ("Saved 2 messages", "exists", "starts again", "/save needs a file name", "no command /nothing"):
        assert sentence in result.stderr


def test_generated_json_fits_its_schema(folder: str, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    result = run("generate", folder, "x", "--json-schema", str(tmp_path / "schema.json"), "-m", "40")
    assert set(json.loads(result.stdout)) == {"a"}
    assert run("generate", folder, "x", "--regex", "(yes|no)!", "-t", "1").stdout.strip() in ("yes!", "no!")
    assert "cannot read the JSON schema" in error_of("generate", folder, "x", "--json-schema", "nowhere.json")
