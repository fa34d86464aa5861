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
from pathlib import Path
from typing import Any

from clearhead.checker.exercises import ENGINES, starters, titles
from clearhead.inspect.questions import Answer, QuestionError, Session, question
from clearhead.training.recipes import RECIPES

OUTPUT = 20_000  # characters of a child's output that are kept
SAMPLES = 8  # evaluations of a run that the studio starts
FRAMES = 40  # probes of a run that the studio starts
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


def find_job(run: str) -> StudioJob | None:
    """The last child that trained a run."""
    return next((job for job in reversed(JOBS.values()) if job.run == run), None)


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
        if not (folder / "recipe.json").exists():
            raise QuestionError(f"there is no run {folder.name!r} to resume")
        return start_child(
            "train", ["train", "--out", str(folder), "--resume", *START.get(folder.name, [])], folder.name
        )
    recipe = str(arguments.get("recipe", "chars"))
    if arguments.get("config"):
        design_file = Path(tempfile.mkdtemp(prefix="clearhead-")) / "clearhead.json"
        design_file.write_text(str(arguments["config"]), encoding="utf-8")
        recipe = str(design_file)
    elif recipe not in RECIPES:
        raise QuestionError(f"there is no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    if folder.exists():
        raise QuestionError(f"there is a run {folder.name!r} already; choose another name")
    steps, data, text = int(arguments.get("steps", 200)), str(arguments.get("data") or ""), arguments.get("probe") or ""
    if steps < 1:
        raise QuestionError(f"the number of steps is {steps}, but must be at least 1")
    if data.startswith("-"):
        raise QuestionError(f"data is {data!r}, but must be a file or a folder, which does not begin with a dash")
    again = [f"--probe-every={max(1, steps // FRAMES)}", f"--device={session.device}"]
    again += [f"--data={data}"] if data else []
    again += [f"--probe={text}"] if text else []
    START[folder.name] = again
    pace = [f"evaluate_every={max(1, steps // SAMPLES)}"]
    return start_child(
        "train", ["train", recipe, "--out", str(folder), f"--steps={steps}", *sets(pace), *again], folder.name
    )


def sets(changes: list[str]) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


START: dict[str, list[str]] = {}
"""How a run was started here, so that Resume goes on in the same way."""


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
def experiments(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The experiments of `clearhead lab`, with their options as data."""
    return {"experiments": session.experiments}


@question
def exercises(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The starter files of `clearhead exercises`, in the order in which they are learned."""
    lang = "zh" if arguments.get("lang") == "zh" else "en"
    found = []
    for engine in ENGINES:
        named = titles(engine, lang)
        for name, code in starters(engine, lang).items():
            about = {"name": name.removesuffix(".py"), "title": named[name].rstrip(".。")}
            found.append(about | {"engine": engine, "code": code})
    return {"exercises": found}
