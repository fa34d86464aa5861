"""The studio's views in one HTML file that needs nothing else: the answers to the views' questions are enclosed.

Heads are stored exactly while they fit, the rest as thumbnails. The page says what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from clearhead.files import write_atomically

from .bundle import as_json, bundle, one_file, style
from .grid import Grid
from .questions import QuestionError, Session, encode, map_answer

if TYPE_CHECKING:
    from pathlib import Path

    from .inspection import Inspection
    from .maps import HeadSummary, Map

LIMIT = 25_000_000  # bytes
STEPS_SHARE = 0.35  # of the room, for the values of steps
STEP_BYTES = 1_000_000  # the most that one head of a step may take
Entry = tuple[dict[str, Any], dict[str, Any]]


def write_page(inspection: Inspection, path: Path, grids: Sequence[Grid] = (), limit: int = LIMIT) -> None:
    write_atomically(path, page(inspection, limit, grids))


def page(
    inspection: Inspection, limit: int = LIMIT, grids: Sequence[Grid] = (), state: dict[str, Any] | None = None
) -> str:
    """The page's text, at most `limit` bytes. `state` is where it opens."""
    title = f"{inspection.model_input.name} — Clearhead"
    room = limit - len(style().encode()) - len(bundle("page.js").encode()) - 8192
    return one_file(title, enclose(inspection, room, grids), {"state": first_state(inspection) | (state or {})})


def first_state(inspection: Inspection) -> dict[str, Any]:
    """Where the page opens: the atlas if there are maps."""
    state: dict[str, Any] = {"view": "atlas" if inspection.maps else "flow"}
    if inspection.rows:
        state["query"] = inspection.rows[0]
    return state


def enclose(inspection: Inspection, room: int, grids: Sequence[Grid]) -> dict[str, list[Entry]]:
    """Answers by question, each with the arguments it fits."""
    session = Session.of_inspection(inspection)
    name = inspection.model_input.name
    notes = [f"{grid.title}: {grid.note}" if grid.note else grid.title for grid in grids]
    answers: dict[str, list[Entry]] = {"head": [], "step": [], "cell": [], "predictions": []}
    for question in ("tokens", "flow", "model"):
        answers[question] = [({}, encode(session.ask(question)))]
    sections = dict.fromkeys(section_of(step["name"]) for step in session.ask("flow")["steps"])
    answers["strips"] = [({"section": each}, encode(session.ask("strips", {"section": each}))) for each in sections]
    answers["atlas"] = [({}, encode(atlas_of(inspection)))]
    if inspection.model_input.has_predictions:
        answers["lens"] = [({"token": ""}, encode(session.ask("lens", {"positions": 24})))]
        rows = range(len(inspection.model_input.labels)) if inspection.model_input.predicts_tokens else [-1]
        for row in list(rows)[-64:]:
            answers["predictions"].append(({"row": row}, encode(session.ask("predictions", {"row": row, "top": 12}))))
        with suppress(QuestionError):  # not every model's logits are sums of parts
            last = len(inspection.model_input.labels) - 1
            answers["attribution"] = [({"row": last, "token": ""}, encode(session.ask("attribution", {"row": last})))]
    room -= byte_count(answers)
    left = 0
    order = rank_heads([(each, head) for each in inspection.maps for head in each.head_summaries])
    for each, head in order:
        place = {"layer": each.layer, "head": head.head, "place": each.place}
        answer = encode(session.ask("head", place))
        size = byte_count((place, answer))
        if answer["weights"] is None or size > room * (1 - STEPS_SHARE):
            left += 1
            continue
        room -= size
        answers["head"].append((place, answer))
    if left:
        notes.append(
            f"{left} of {len(order)} heads are enclosed as thumbnails only, to keep the file small. "
            "Choose others with --layers and --heads, or open the model live: clearhead studio"
        )
    for question, arguments in step_questions(session):
        answer = encode(session.ask(question, arguments))
        size = byte_count((arguments, answer))
        if size < room:
            room -= size
            answers[question].append((arguments, answer))
    info = {"models": [name], "text": session.text, "runs": False, "notes": notes}
    return answers | {"models": [({}, info)]}


def byte_count(value: Any) -> int:
    """Bytes that a value takes on the page, with the comma after it."""
    return len(as_json(value).encode()) + 1


def section_of(step: str) -> str:
    """The section of the flow that a step stands in: its block, or its first name, as `parts/steps.js` has it."""
    parts = step.split(".")
    if parts[1:2] == ["blocks"]:
        return ".".join(parts[:3])
    if parts[0] == "head" or parts[-1] == "final_norm":
        return "output." + ("encoder" if parts[0] == "encoder" else "")
    return parts[0]


def atlas_of(inspection: Inspection) -> dict[str, Any]:
    maps = [map_answer(each) for each in inspection.maps]
    return {"maps": maps, "without_maps": inspection.layers_without_maps, "python": ""}


def rank_heads(heads: list[tuple[Map, HeadSummary]]) -> list[tuple[Map, HeadSummary]]:
    """The best head of each tag first, then the others from the most to the least pronounced."""

    def strength(found: tuple[Map, HeadSummary]) -> float:
        head = found[1]
        return max(head.scores.get(head.tag) or 0.0, 1 - (head.scores["uniform"] or 0.0))

    order = sorted(heads, key=strength, reverse=True)
    best = {found[1].tag: found for found in reversed(order) if found[1].tag}
    firsts = [found for found in order if best.get(found[1].tag) is found]
    return firsts + [found for found in order if found not in firsts]


def step_questions(session: Session) -> Iterator[tuple[str, dict[str, Any]]]:
    """The values of every step that is not too large."""
    _, values = session.pass_of({})
    for step in session.ask("flow")["steps"]:
        try:
            value = values[step["name"]]
        except (KeyError, IndexError):
            continue
        each = value[0] if value.dim() == 3 else value
        if each.numel() * 4 > STEP_BYTES:
            continue
        for head in range(value.shape[0]) if value.dim() == 3 else [0]:
            yield "step", {"path": step["name"], "head": head}
