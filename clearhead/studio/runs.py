"""All runs under --runs: how far they are, their curves and the frames of their probes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.inspect.questions import Answer, ModelSource, QuestionError, Session, question, shade_heads
from clearhead.training.probe import list_probes, read_probe
from clearhead.training.recipes import RECIPES
from clearhead.training.steps import find_trained, list_steps, load_step

from .jobs import find_job, run_folder

PROBE_CODE = """from pathlib import Path

from clearhead.training.probe import list_probes, read_probe

"""
QUIET = 20.0  # seconds without a measurement after which a run of another process counts as stopped


@question
def recipes(session: Session, arguments: Mapping[str, Any]) -> Answer:
    return {"recipes": [{"name": name, "help": first_sentence(make)} for name, make in RECIPES.items()]}


def first_sentence(function: Any) -> str:
    return (function.__doc__ or "").strip().split("\n")[0]


@question
def runs(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """Runs, newest first."""
    if session.runs is None or not session.runs.is_dir():
        return {"runs": []}
    folders = [path for path in session.runs.iterdir() if (path / "recipe.json").exists()]
    wanted = [path for path in folders if session.only_run in (None, path.name)]
    found = [describe_run(session, folder) for folder in sorted(wanted, key=lambda path: -path.stat().st_mtime)]
    return {"runs": [run for run in found if run is not None]}


def describe_run(session: Session, folder: Path) -> Answer | None:
    try:
        steps = int(json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["steps"])
    except (ValueError, KeyError, TypeError, OSError):
        return None
    metrics = folder / "metrics.jsonl"
    own = find_job(folder.name)
    busy = own is not None and not own.ended
    recent = metrics.exists() and time.time() - metrics.stat().st_mtime < QUIET
    done = any(folder.glob("model*.safetensors"))
    failed = own is not None and own.ended and own.process.returncode not in (0, 130) and not done
    stopped = "failed" if failed else "stopped"
    state = "running" if busy or (recent and own is None and not done) else "done" if done else stopped
    opened = run_sources(folder)
    session.sources |= opened
    return {
        "name": folder.name,
        "folder": str(folder),
        "step": last_step(metrics),
        "steps": steps,
        "state": state,
        "frames": list(list_probes(folder)),
        "opens": bool(opened),
        "models": list(opened),
        "problem": own.output("stderr")[-600:] if failed and own is not None else "",
        "job": own.id if busy and own is not None else None,
    }


def run_sources(folder: Path) -> dict[str, Path | str | ModelSource]:
    """The models of a run by name: the trained one, and `name · step 0` for each step that it has kept."""
    trained = find_trained(folder)
    if trained is None:
        return {}
    found: dict[str, Path | str | ModelSource] = {folder.name: trained.resolve()}
    try:
        steps = list_steps(folder)
    except ValueError:  # a recipe of another version
        return found
    for step in steps:
        code = (
            "from clearhead.training.steps import load_step\n\n"
            + f"model = load_step({str(folder.resolve())!r}, {step})"
        )
        found[f"{folder.name} · step {step}"] = ModelSource(partial(load_step, folder, step), code)
    return found


def last_step(metrics: Path) -> int:
    """The step of the last whole line, from the end of the file."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 20_000))
        lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


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
    frames = list_probes(folder)
    if step not in frames:
        raise QuestionError(f"run {folder.name!r} has no frame of step {step}")
    facts, pictures = read_probe(frames[step])
    maps = []
    for each, small in zip(facts["maps"], pictures, strict=True):
        shades, top = shade_heads(small, not each["signed"])
        maps.append(each | {"thumbnails": shades, "top": top})
    code = f"{PROBE_CODE}facts, pictures = read_probe(list_probes(Path({str(folder)!r}))[{step}])\n"
    code += "for heads, picture in zip(facts['maps'], pictures):\n    print(heads['layer'], picture)"
    return {"step": step, "text": facts["text"], "maps": maps, "gradients": bool(facts["gradients"]), "python": code}


@question
def gradients(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The gradient norm of each block at every frame."""
    frames = list_probes(run_folder(session, arguments.get("run")))
    facts = [read_probe(path)[0] for path in frames.values()]
    names = list(facts[-1]["gradients"]) if facts else []
    norms = [[each["gradients"].get(name, 0.0) for each in facts] for name in names]
    folder = run_folder(session, arguments.get("run"))
    code = f"{PROBE_CODE}for step, path in list_probes(Path({str(folder)!r})).items():\n"
    code += "    print(step, read_probe(path)[0]['gradients'])"
    shown = np.array(norms, np.float32).reshape(len(names), len(facts))
    return {"steps": list(frames), "names": names, "norms": shown, "python": code}
