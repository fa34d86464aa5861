"""Training, experiments and checks as child processes, and the questions about them.

A child is `python -m clearhead …` in a process group of its own, so that an endless loop in a learner's code leaves the
studio usable and Stop ends everything the child started.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from .session import Answer, QuestionError, Session, map_answer, question, read_input

OUTPUT = 20_000  # characters of a child's output that are kept
SECONDS = 60.0  # after which a check is stopped
JOBS: dict[str, Job] = {}


@dataclass
class Job:
    """A child process and the folder it works in."""

    id: str
    kind: str
    process: subprocess.Popen[str]
    folder: Path
    run: str = ""
    started: float = field(default_factory=time.monotonic)
    limit: float | None = None

    @property
    def ended(self) -> bool:
        if self.limit is not None and self.process.poll() is None and time.monotonic() - self.started > self.limit:
            self.stop(signal.SIGKILL)
        return self.process.poll() is not None

    def stop(self, by: int = signal.SIGINT) -> None:
        """Interrupt the child as Ctrl-C does, so that training saves."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, by)

    def output(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")[-OUTPUT:]


def start_child(
    kind: str, arguments: list[str], run: str = "", limit: float | None = None, folder: Path | None = None
) -> Job:
    folder = folder or Path(tempfile.mkdtemp(prefix="clearhead-"))
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "clearhead", *arguments], stdout=out, stderr=err, stdin=subprocess.DEVNULL,
            start_new_session=True, text=True,
        )  # fmt: skip
    job = Job(f"job{len(JOBS) + 1}", kind, process, folder, run, limit=limit)
    JOBS[job.id] = job
    return job


def stop_all() -> None:
    """End every child when the studio ends; training saves."""
    for job in JOBS.values():
        job.stop()


def run_folder(session: Session, name: Any) -> Path:
    """A folder directly under --runs."""
    if session.runs is None:
        raise QuestionError("start the studio with --runs DIR to train: clearhead studio --runs runs")
    text = str(name)
    if not text or text in (".", "..") or any(mark in text for mark in "/\\\0") or text.startswith("-"):
        raise QuestionError(f"the name of a run is {text[:80]!r}, but must be a plain folder name")
    return session.runs / text


@question
def start(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """Start a child: train, lab or check."""
    kind = arguments.get("kind")
    if kind == "check":
        folder = Path(tempfile.mkdtemp(prefix="clearhead-"))
        (folder / "code.py").write_text(str(arguments.get("code", "")), encoding="utf-8")
        lang = "zh" if arguments.get("lang") == "zh" else "en"
        job = start_child(
            "check", ["check", str(folder / "code.py"), "--json", "--lang", lang], limit=SECONDS, folder=folder
        )
    elif kind == "lab":
        known = {each["name"]: each for each in experiments(session, {})["experiments"]}
        name = str(arguments.get("name"))
        if name not in known:
            raise QuestionError(f"there is no experiment {name!r}")
        folder = Path(tempfile.mkdtemp(prefix="clearhead-"))
        options: list[str] = []
        for option in known[name]["options"]:
            value = arguments.get("options", {}).get(option["name"])
            if value not in (None, ""):
                options.append(f"{option['name']}={value}")
        theme = "dark" if arguments.get("theme") == "dark" else "light"
        command = ["lab", name, "--json", "--theme", theme, "--out", str(folder / "figure.svg"), *options]
        job = start_child("lab", command, folder=folder)
    elif kind == "train":
        job = start_training(session, arguments)
    else:
        raise QuestionError(f"the kind of a job is {kind!r}, but must be train, lab or check")
    return {"id": job.id}


def start_training(session: Session, arguments: Mapping[str, Any]) -> Job:
    folder = run_folder(session, arguments.get("name"))
    if arguments.get("resume"):
        return start_child("train", ["train", "--out", str(folder), "--resume", *data_of(folder)], run=folder.name)
    recipe = str(arguments.get("recipe", "chars"))
    if recipe not in recipes(session, {})["recipes"]:
        raise QuestionError(f"there is no recipe {recipe!r}")
    if folder.exists():
        raise QuestionError(f"there is a run {folder.name!r} already; choose another name")
    data = [str(arguments["data"])] if arguments.get("data") else []
    steps = int(arguments.get("steps", 200))
    command = ["train", recipe, "--out", str(folder), "--steps", str(steps)]
    for path in data:
        if path.startswith("-"):
            raise QuestionError("data is a file or a folder")
        command += ["--data", path]
    DATA[folder.name] = data
    return start_child("train", command, run=folder.name)


DATA: dict[str, list[str]] = {}


def data_of(folder: Path) -> list[str]:
    """The data a run was started with here."""
    return [part for path in DATA.get(folder.name, []) for part in ("--data", path)]


@question
def job(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """How far a child is, and its result if it has ended."""
    found = JOBS.get(str(arguments.get("id")))
    if found is None:
        raise QuestionError(f"there is no job {arguments.get('id')!r}")
    answer: Answer = {"id": found.id, "kind": found.kind, "ended": found.ended, "code": found.process.poll()}
    answer["output"] = found.output("stderr")
    if answer["ended"] and found.kind in ("check", "lab"):
        try:
            answer["result"] = json.loads((found.folder / "stdout").read_text(encoding="utf-8"))
        except ValueError:
            answer["result"] = None
        figure = found.folder / "figure.svg"
        if figure.exists():
            answer["figure"] = "data:image/svg+xml;base64," + base64.b64encode(figure.read_bytes()).decode()
    return answer


@question
def stop(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """Interrupt a child; a check is killed."""
    found = JOBS.get(str(arguments.get("id")))
    if found is None:
        raise QuestionError(f"there is no job {arguments.get('id')!r}")
    found.stop(signal.SIGINT if found.kind == "train" else signal.SIGKILL)
    return {"stopped": True}


@question
def recipes(session: Session, arguments: Mapping[str, Any]) -> Answer:
    from clearhead.training.recipes import RECIPES

    return {"recipes": list(RECIPES)}


@question
def runs(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """Runs under --runs, newest first, whoever started them."""
    if session.runs is None:
        return {"runs": []}
    found = []
    folders = (
        [path for path in session.runs.iterdir() if (path / "recipe.json").exists()] if session.runs.is_dir() else []
    )
    for folder in sorted(folders, key=lambda path: -path.stat().st_mtime):
        try:
            steps = int(json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["steps"])
        except (ValueError, KeyError, TypeError):
            continue
        points = read_points(folder / "metrics.jsonl", 0)[0]
        step = points[-1]["step"] if points else 0
        own = next((job for job in reversed(JOBS.values()) if job.run == folder.name), None)
        busy = own is not None and not own.ended
        recent = (folder / "metrics.jsonl").exists() and time.time() - (folder / "metrics.jsonl").stat().st_mtime < 20
        done = any(folder.glob("model*.safetensors"))
        state = (
            "done" if done and not busy else "running" if busy or (recent and own is None and not done) else "stopped"
        )
        if done:
            session.sources.setdefault(folder.name, folder.resolve())
        found.append(
            {
                "name": folder.name,
                "step": step,
                "steps": steps,
                "state": state,
                "checkpoints": checkpoint_steps(folder),
                "job": own.id if busy and own is not None else None,
            }
        )
    return {"runs": found}


def checkpoint_steps(folder: Path) -> list[int]:
    names = (path.name for path in (folder / "checkpoints").glob("*") if path.is_dir())
    return sorted(int(digits) for name in names if (digits := "".join(filter(str.isdigit, name))))


def read_points(path: Path, since: int) -> tuple[list[dict[str, Any]], int]:
    """The measurements after byte `since`, and where they end; a line that is being written is left for later."""
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        file.seek(since)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    points = []
    for line in whole.splitlines():
        try:
            point = json.loads(line)
        except ValueError:
            continue
        if isinstance(point, dict) and isinstance(point.get("step"), int):
            points.append({key: value for key, value in point.items() if isinstance(value, int | float | str)})
    return points, since + len(whole)


@question
def follow(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """New points of a run's curves."""
    path, since = run_folder(session, arguments.get("run")) / "metrics.jsonl", int(arguments.get("since", 0))
    restart = path.exists() and path.stat().st_size < since
    points, end = read_points(path, 0 if restart else since)
    return {"points": points, "next": end, "restart": restart}


@question
def probe(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The heads of a text at one checkpoint of a run. Reads files only, so training is not changed by a bit."""
    from clearhead.inspect.inspection import inspect
    from clearhead.models.load import load
    from clearhead.tokenize import Tokenizer

    folder, step = run_folder(session, arguments.get("run")), int(arguments.get("step", 0))
    places = [
        path for path in (folder / "checkpoints").glob("*") if "".join(filter(str.isdigit, path.name)) == str(step)
    ]
    if not places:
        raise QuestionError(f"run {folder.name!r} has no checkpoint of step {step}")
    model = load(
        next((path for path in (places[0], places[0] / "model") if (path / "config.json").exists()), places[0])
    )
    holder = next((path for path in (places[0], folder) if (path / "tokenizer.json").exists()), None)
    tokenizer = None if holder is None else Tokenizer.load(holder)
    text = str(arguments.get("text", ""))
    try:
        found = inspect(model.eval(), read_input(model, text) if tokenizer is None else text, tokenizer=tokenizer)
    except ValueError:  # the run's alphabet lacks a character of the text
        known = "".join(
            letter
            for letter in text.lower()
            if tokenizer is None or not tokenizer.alphabet or letter in tokenizer.alphabet
        )
        found = inspect(model.eval(), known or "the", tokenizer=tokenizer)
    return {"maps": [map_answer(each) for each in found.maps], "labels": found.model_input.labels}


@question
def experiments(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The experiments of `clearhead lab`, with their options as data."""
    from clearhead.cli.lab import command

    found = []
    for name, each in command.commands.items():
        options = []
        for option in each.params:
            flag = next((text for text in option.opts if text.startswith("--")), "")
            if flag in ("--json", "--theme", "--format", "--out", "--force", "--data", "") or option.default is None:
                continue
            default: Any = option.default
            if isinstance(default, int | float) and not isinstance(default, bool):
                whole = isinstance(default, int)
                high: Any = max(4 * default, 10 if whole else 1.0)
                options.append(
                    {
                        "name": flag,
                        "help": getattr(option, "help", ""),
                        "kind": "number",
                        "default": default,
                        "low": 1 if whole and default > 0 else 0,
                        "high": high,
                        "step": 1 if whole else high / 200,
                    }
                )
            else:
                options.append(
                    {"name": flag, "help": getattr(option, "help", ""), "kind": "text", "default": str(default)}
                )
        found.append(
            {"name": name, "title": name, "help": (each.help or "").replace("\b", "").strip(), "options": options}
        )
    return {"experiments": found}


@question
def exercises(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The starter files of `clearhead exercises`."""
    found = []
    root = resources.files("clearhead.checker") / "exercises"
    for engine in ("numpy", "torch"):
        for path in sorted((root / engine).iterdir(), key=lambda each: each.name):
            found.append(
                {"engine": engine, "name": path.name.removesuffix(".txt"), "code": path.read_text(encoding="utf-8")}
            )
    return {"exercises": found}


@question
def presets(session: Session, arguments: Mapping[str, Any]) -> Answer:
    from clearhead.models.presets import PRESETS

    return {"presets": list(PRESETS)}


@question
def design(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """A preset with changes: its fields, cost and shapes."""
    from clearhead.configs import dumps
    from clearhead.measure.cost import cost
    from clearhead.measure.trace import trace
    from clearhead.models.presets import preset

    name, changes = str(arguments.get("preset", "tiny-llama")), dict(arguments.get("changes", {}))
    config: Any = preset(name)
    fields = list(config_fields(config, ""))
    if changes:
        config = config.changed_all(changes)
    length = max(1, int(arguments.get("length", 128)))
    numbers: Any = cost(config, length=length)
    shown = trace(config, length=length).steps
    first = [step for step in shown if ".blocks." not in step.name or ".blocks.0." in step.name]
    code = [f"config = clearhead.preset({name!r})"]
    if changes:
        code.append(f"config = config.changed_all({changes!r})")
    code.append(f"print(clearhead.cost(config, length={length}))")
    return {
        "fields": fields,
        "parameters": numbers.parameters.total,
        "flops": numbers.flops.forward,
        "memory": numbers.memory.training,
        "cache": numbers.memory.kv_cache,
        "steps": [{"name": step.name, "formula": step.formula, "shape": list(step.shape)} for step in first],
        "json": dumps(config),
        "python": "import clearhead\n\n" + "\n".join(code),
    }


def config_fields(node: Any, path: str) -> Any:
    """Every number, word and switch of a config tree, with its path and choices."""
    import typing
    from dataclasses import fields

    from clearhead.configs.base import Config, alternatives, field_types

    if isinstance(node, tuple):
        for n, item in enumerate(node):
            yield from config_fields(item, f"{path}.{n}".lstrip("."))
        return
    if not isinstance(node, Config):
        return
    hints = field_types(node.kind())
    for each in fields(node):
        value, place = getattr(node, each.name), f"{path}.{each.name}".lstrip(".")
        if isinstance(value, Config | tuple):
            yield from config_fields(value, place)
        elif isinstance(value, bool):
            yield {"path": place, "value": value, "type": "boolean"}
        elif isinstance(value, int | float):
            yield {"path": place, "value": value, "type": "integer" if isinstance(value, int) else "number"}
        elif isinstance(value, str):
            choices = [
                word
                for option in alternatives(hints[each.name])
                if typing.get_origin(option) is typing.Literal
                for word in typing.get_args(option)
            ]
            if choices:
                yield {"path": place, "value": value, "type": "text", "choices": choices}
