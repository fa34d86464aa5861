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

from clearhead.inspect.questions import DEFAULT_TEXT, Answer, QuestionError, Session, map_answer, question

OUTPUT = 20_000  # characters of a child's output that are kept
FRAMES = 20  # checkpoints of a run that the studio starts
FRAME_STORE: dict[str, dict[int, Answer]] = {}
SECONDS = 60.0  # after which a check is stopped
JOBS: dict[str, StudioJob] = {}


@dataclass
class StudioJob:
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
) -> StudioJob:
    folder = folder or Path(tempfile.mkdtemp(prefix="clearhead-"))
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "clearhead", *arguments], stdout=out, stderr=err, stdin=subprocess.DEVNULL,
            start_new_session=True, text=True,
        )  # fmt: skip
    job = StudioJob(f"job{len(JOBS) + 1}", kind, process, folder, run, limit=limit)
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


def start_training(session: Session, arguments: Mapping[str, Any]) -> StudioJob:
    folder = run_folder(session, arguments.get("name"))
    if arguments.get("resume"):
        return start_child("train", ["train", "--out", str(folder), "--resume", *data_of(folder)], run=folder.name)
    recipe = str(arguments.get("recipe", "chars"))
    if arguments.get("config"):
        design_file = Path(tempfile.mkdtemp(prefix="clearhead-")) / "clearhead.json"
        design_file.write_text(str(arguments["config"]), encoding="utf-8")
        recipe = str(design_file)
    elif recipe not in recipes(session, {})["recipes"]:
        raise QuestionError(f"there is no recipe {recipe!r}")
    if folder.exists():
        raise QuestionError(f"there is a run {folder.name!r} already; choose another name")
    data = [str(arguments["data"])] if arguments.get("data") else []
    steps = int(arguments.get("steps", 200))
    command = ["train", recipe, "--out", str(folder), "--steps", str(steps)]
    command += ["--set", f"save_every={max(1, steps // FRAMES)}"]  # a frame for each checkpoint
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
    """All runs under --runs, newest first, not only those that the studio started."""
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
                "frames": take_frames(session, folder),
                "job": own.id if busy and own is not None else None,
            }
        )
    return {"runs": found}


def take_frames(session: Session, folder: Path) -> list[int]:
    """Record the heads of the probe text for each new checkpoint, and return the steps of all frames.

    Checkpoints are only read, so probing changes no bit of a run. Old checkpoints go; their frames stay here.
    """
    frames = FRAME_STORE.setdefault(folder.name, {})
    for path in sorted((folder / "checkpoints").glob("step-*")):
        step = int("".join(filter(str.isdigit, path.name)) or 0)
        if step not in frames and (path / "state.json").exists():
            try:
                frames[step] = {"maps": [map_answer(each) for each in open_checkpoint(session, folder, path).maps]}
            except (
                OSError,
                ValueError,
                KeyError,
                RuntimeError,
            ):
                continue  # it was deleted while being read
    return sorted(frames)


def open_checkpoint(session: Session, folder: Path, path: Path) -> Any:
    """The recorded pass of a checkpoint's model over the probe text."""
    from safetensors import safe_open

    from clearhead.configs import read
    from clearhead.inspect.inspection import inspect
    from clearhead.models.model import build
    from clearhead.tokenize import Tokenizer

    recipe: Any = read(folder / "recipe.json")
    with safe_open(str(path / "state.safetensors"), "pt") as file:
        weights = {
            name.removeprefix("weights."): file.get_tensor(name)
            for name in list(file.keys())
            if name.startswith("weights.")
        }
    config = recipe.model
    if "embedding.tokens.weight" in weights:  # the data decides the vocabulary of a recipe of characters
        size = weights["embedding.tokens.weight"].shape[0]
        config = config.with_values({"embedding.vocabulary": size, "head.vocabulary": size})
    model = build(config).eval()
    model.load_state_dict(weights, strict=False)
    holder = next((place for place in (folder, folder / "best") if (place / "tokenizer.json").exists()), None)
    if holder is None:  # the tokenizer is written with the first model; until then, probe with the run's own data
        return inspect(model, first_tokens(folder, config))
    tokenizer = Tokenizer.load(holder)
    text = session.text or DEFAULT_TEXT
    known = text if tokenizer.alphabet is None else "".join(letter for letter in text if letter in tokenizer.alphabet)
    return inspect(model, known or "the", tokenizer=tokenizer)


def first_tokens(folder: Path, config: Any) -> list[int]:
    """The first tokens that a run is validated on."""
    import numpy as np

    path = next(iter(sorted((folder / "tokens").glob("*/tokens-*.bin"))), None)
    size = getattr(getattr(config, "embedding", None), "vocabulary", 0)
    if path is None or not size:
        raise ValueError("this run keeps no tokens to probe with")
    return np.fromfile(path, np.uint16 if size <= 65536 else np.uint32, 24).astype(int).tolist()


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
    """The heads of the probe text at one step of a run."""
    folder, step = run_folder(session, arguments.get("run")), int(arguments.get("step", 0))
    found = FRAME_STORE.get(folder.name, {}).get(step)
    if found is None:
        raise QuestionError(f"run {folder.name!r} has no frame of step {step}")
    return found


@question
def experiments(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The experiments of `clearhead lab`, with their options as data."""
    return {"experiments": session.experiments}


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
        config = config.with_values(changes)
    length = max(1, int(arguments.get("length", 128)))
    numbers: Any = cost(config, length=length)
    shown = trace(config, length=length).steps
    first = [step for step in shown if ".blocks." not in step.name or ".blocks.0." in step.name]
    code = [f"config = clearhead.preset({name!r})"]
    if changes:
        code.append(f"config = config.with_values({changes!r})")
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
