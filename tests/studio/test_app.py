"""Who may use the studio: hostile requests are refused, jobs run in children, and the page is complete."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
import torch
from numpy.testing import assert_allclose
from starlette.testclient import TestClient

from clearhead.cli.lab import describe_experiments
from clearhead.inspect.bundle import WEB
from clearhead.inspect.questions import Session
from clearhead.studio import jobs
from clearhead.studio.app import SMALL_MODEL, make_app
from clearhead.training.model import make_model
from clearhead.training.run import Run
from clearhead.training.steps import load_step

BASE = "http://127.0.0.1:7777"
JSON = {"x-clearhead": "studio", "content-type": "application/json"}


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(
        {"small": SMALL_MODEL}, "To be or not", tmp_path / "runs", trains=True, experiments=describe_experiments()
    )


@pytest.fixture
def client(session: Session) -> Any:
    app, token = make_app(session, 7777)
    client = TestClient(app, base_url=BASE, follow_redirects=False)
    client.token = token
    return client


def enter(client: Any) -> None:
    answer = client.get(f"/?token={client.token}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie


def test_the_token_is_swapped_for_a_cookie(client: Any) -> None:
    assert client.get("/").status_code == 403
    assert client.get("/?token=wrong").status_code == 403
    assert client.post("/ask/models", content="{}", headers=JSON).status_code == 403
    enter(client)
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert client.post("/ask/models", content="{}", headers=JSON).json()["models"] == ["small"]


def test_hostile_requests_are_refused(client: Any) -> None:
    enter(client)
    for headers, status in (
        ({"host": "evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ):
        assert client.get("/", headers=headers).status_code == status, headers
        assert client.post("/ask/models", content="{}", headers=JSON | headers).status_code == status, headers
    assert client.post("/ask/models", data={"a": "b"}).status_code in (403, 415)
    assert client.post("/ask/models", content="{}", headers={"content-type": "application/json"}).status_code == 403
    assert client.post("/ask/models", content="{" + " " * 2_000_000 + "}", headers=JSON).status_code == 413
    for path in ("/web/../studio/app.py", "/web/%2e%2e/studio/app.py", "/web//etc/passwd", "/web/vendor/LICENSE-htm"):
        assert client.get(path).status_code in (403, 404), path
    for body in ("[]", "not json", '{"text": ' + "[" * 5000, '{"head": []}', '{"layer": "x"}', '{"layer": 1e999}'):
        answer = client.post("/ask/head", content=body, headers=JSON)
        assert answer.status_code == 400, body[:20]
        assert answer.json()["error"]
    assert client.post("/ask/__init__", content="{}", headers=JSON).status_code == 400


def test_jobs_stay_in_their_folder(session: Session, tmp_path: Path) -> None:
    for name in ("../up", "a/b", "", "..", "-x", "a\0b"):
        with pytest.raises(ValueError, match="must be a plain folder name"):
            session.ask("start", {"kind": "train", "name": name})
    with pytest.raises(ValueError, match="there is no recipe"):
        session.ask("start", {"kind": "train", "name": "a", "recipe": "--help"})
    with pytest.raises(ValueError, match="there is no experiment"):
        session.ask("start", {"kind": "lab", "name": "../x"})
    assert session.ask("runs")["runs"] == []
    outside = Session({"small": SMALL_MODEL})
    with pytest.raises(ValueError, match="--runs DIR"):
        outside.ask("follow", {"run": "a"})


def wait(session: Session, id: str, seconds: float = 120) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = session.ask("job", {"id": id})
        if found["ended"]:
            return found
        time.sleep(0.2)
    raise AssertionError("the job did not end")


NO_SCALE = """
import numpy as np

def attention(q, k, v):
    s = q @ np.swapaxes(k, -1, -2)
    w = np.exp(s - s.max(-1, keepdims=True))
    return (w / w.sum(-1, keepdims=True)) @ v
"""


def test_a_missing_scale_is_found(session: Session) -> None:
    found = wait(session, session.ask("start", {"kind": "check", "code": NO_SCALE, "lang": "en"})["id"])
    (diagnostic,) = [one for one in found["result"]["parts"][0]["diagnostics"] if one["key"] == "no-scale"]
    assert "√d_k" in diagnostic["text"]
    assert diagnostic["example"]["expected"] != diagnostic["example"]["got"]


def test_an_endless_loop_can_be_stopped(session: Session) -> None:
    id = session.ask("start", {"kind": "check", "code": "while True:\n    pass\n"})["id"]
    assert session.ask("models")["models"] == ["small"]
    session.ask("stop", {"id": id})
    assert wait(session, id)["code"] != 0


def test_an_experiment_runs_with_its_options(session: Session) -> None:
    options = {"--widths": "4,8", "--draws": "16"}
    found = wait(session, session.ask("start", {"kind": "lab", "name": "scores", "options": options})["id"])
    assert [row["d_k"] for row in found["result"]["rows"]] == [4, 8]
    assert found["figure"].startswith("data:image/svg+xml;base64,")


def test_training_is_followed_with_frames_and_steps(short_run: Path) -> None:
    session = Session({"small": SMALL_MODEL}, "To be or not", short_run.parent, trains=True)
    (run,) = [run for run in session.ask("runs")["runs"] if run["name"] == "short"]
    assert (run["step"], run["state"], run["frames"]) == (4, "done", [2, 4])
    points = session.ask("follow", {"run": "short"})
    assert [point["step"] for point in points["points"] if "train/loss" in point][-1] == 4
    assert session.ask("follow", {"run": "short", "since": points["next"]})["points"] == []
    frame = session.ask("probe", {"run": "short", "step": 4})
    assert [len(each["heads"]) for each in frame["maps"]] == [len(each["thumbnails"]) for each in frame["maps"]]
    gradients = session.ask("gradients", {"run": "short"})
    assert gradients["norms"].shape == (len(gradients["names"]), 2)
    assert (gradients["norms"] > 0).all()
    assert [float(x) for x in re.findall(r"\d+\.\d+", print_of(gradients["python"]))][-1] == pytest.approx(
        float(gradients["norms"][-1, -1])
    )
    assert print_of(frame["python"]).strip()
    with pytest.raises(ValueError, match="there is a run 'short' already"):
        session.ask("start", {"kind": "train", "recipe": "chars", "name": "short"})
    assert run["models"] == ["short", "short · step 0", "short · step 2", "short · step 4"]
    weights = [dict(session.model(name).named_parameters()) for name in ("short", "short · step 4", "short · step 0")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert not all(torch.equal(value, weights[2][name]) for name, value in weights[0].items())
    recipe = Run(short_run).recipe()
    first = make_model(recipe, session.model("short").config)
    assert all(torch.equal(value, weights[2][name]) for name, value in first.named_parameters())
    with pytest.raises(ValueError, match="has no model of step 3; it has steps: 0, 2, 4"):
        load_step(short_run, 3)


def print_of(code: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(code, {})
    return shown.getvalue()


def test_a_design_costs_what_cost_says(session: Session) -> None:
    import clearhead

    changes = {"stack.repeats": 3, "stack.pattern.0.mixer": {"kind": "Mamba"}}
    answer = session.ask("design", {"preset": "tiny-llama", "changes": changes, "length": 64})
    config = clearhead.preset("tiny-llama").with_values(changes)
    assert answer["cost"] == clearhead.cost(config, length=64).to_dict()
    assert json.loads(answer["json"]) == config.to_dict()
    assert int(print_of(answer["python"])) == answer["cost"]["parameters"]["total"]
    longest = answer["growth"][1]["points"][-1]
    assert f"{longest[0]} " in print_of(answer["growth_python"])
    assert str(longest[1]) in print_of(answer["growth_python"])
    assert f"{answer['steps'][0]['name']} {answer['steps'][0]['shape']}" in print_of(answer["shapes_python"])
    with pytest.raises(ValueError, match="must be"):
        session.ask("design", {"changes": {"stack.repeats": "x"}})


def every_kind(node: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for kind, value in node["kinds"]:
        yield node["path"], kind, value
    for child in node["children"]:
        yield from every_kind(child)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-bert", "tiny-transformer"])
def test_every_part_that_can_be_chosen_has_a_cost_or_one_sentence(preset: str, session: Session) -> None:
    tree = session.ask("design", {"preset": preset})["tree"]
    costs, problems = [], []
    for path, kind, value in every_kind(tree):
        try:
            costs.append(session.ask("design", {"preset": preset, "changes": {path: value}})["cost"])
        except ValueError as error:
            problems.append(f"{path} {kind}: {error}")
    assert len(costs) > 15
    assert all(one["parameters"]["total"] > 0 for one in costs)
    assert not any("\n" in problem for problem in problems)


INSTRUMENT_VALUES: dict[str, list[dict[str, Any]]] = {
    "positions": [{"encoding": each, "length": 16, "width": 8} for each in ("sinusoidal", "rotary", "ALiBi")],
    "masks": [{"mask": each, "length": 12} for each in ("causal", "full", "window", "Longformer", "BigBird")],
    "growth": [{"length": 512, "width": 64}],
    "planner": [{"law": "chinchilla", "budget": 1e20}, {"law": "reanalysis", "budget": 1e22}],
}


@pytest.mark.parametrize("name", INSTRUMENT_VALUES)
def test_an_instrument_shows_what_its_python_prints(name: str, session: Session) -> None:
    listed = {one["name"]: one for one in session.ask("instruments")["instruments"]}
    assert listed.keys() == INSTRUMENT_VALUES.keys()
    for values in INSTRUMENT_VALUES[name]:
        answer = session.ask("instrument", {"name": name, "values": values})
        assert answer["charts"] or answer["maps"]
        for shown in answer["maps"]:
            assert_allclose(json.loads(print_of(shown["python"])), shown["values"], rtol=1e-5, atol=1e-6)
        for shown in answer["charts"]:
            printed = {float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", print_of(shown["python"]))}
            for curve in shown["curves"]:
                missing = [y for _, y in curve["points"] if not any(y == pytest.approx(x, rel=1e-6) for x in printed)]
                assert not missing, (shown["title"], curve["name"], missing[:3])
        if name == "masks":
            pairs = answer["maps"][0]["values"].sum()
            assert int(print_of(answer["python"])) == pairs == int(answer["facts"][0][1].replace(",", ""))
        if name == "planner":
            assert f"{float(print_of(answer['python']).split()[2]):.3f}" == answer["facts"][3][1]
    with pytest.raises(ValueError, match="there is no instrument 'x'"):
        session.ask("instrument", {"name": "x"})


def words(language: str) -> dict[str, str]:
    text = (WEB / "words" / f"{language}.js").read_text(encoding="utf-8")
    return dict(re.findall(r'(\w+): "((?:[^"\\]|\\.)*)"', text))


def test_both_languages_have_every_word() -> None:
    english, chinese = words("en"), words("zh")
    assert english.keys() == chinese.keys()
    holes = re.compile(r"\{(\w+)\}")
    for key, text in english.items():
        assert set(holes.findall(text)) == set(holes.findall(chinese[key])), key
    used = set()
    for path in [*WEB.glob("*.js"), *WEB.glob("views/*.js"), *WEB.glob("parts/*.js")]:
        used |= set(re.findall(r'\bt\("(\w+)"[,)]', path.read_text(encoding="utf-8")))
    assert used <= english.keys(), used - english.keys()


def test_the_vendored_file_is_the_one_described() -> None:
    import hashlib

    digest = hashlib.sha256((WEB / "vendor" / "htm-preact.js").read_bytes()).hexdigest()
    assert digest in (WEB / "vendor" / "README.md").read_text()


def test_the_small_model_is_small() -> None:
    assert sum(path.stat().st_size for path in SMALL_MODEL.iterdir()) < 1_500_000
    assert jobs.JOBS is not None
