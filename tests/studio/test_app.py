"""Who may use the studio: hostile requests are refused, jobs run in children, and the page is complete."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from clearhead.cli.lab import describe_experiments
from clearhead.inspect.bundle import WEB
from clearhead.inspect.questions import Session
from clearhead.studio import jobs
from clearhead.studio.app import SMALL_MODEL, make_app

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


@pytest.mark.parametrize(("lang", "words"), [("en", "√d_k"), ("zh", "√d_k")])
def test_a_missing_scale_is_found_in_both_languages(session: Session, lang: str, words: str) -> None:
    found = wait(session, session.ask("start", {"kind": "check", "code": NO_SCALE, "lang": lang})["id"])
    (diagnostic,) = [one for one in found["result"]["parts"][0]["diagnostics"] if one["key"] == "no-scale"]
    assert words in diagnostic["text"]
    assert diagnostic["example"]["expected"] != diagnostic["example"]["got"]
    assert bool(re.search("[\u4e00-\u9fff]", diagnostic["text"])) == (lang == "zh")


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


def test_training_is_followed_with_frames(session: Session, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 300)
    asked = {"kind": "train", "recipe": "chars", "name": "mine", "data": str(text), "steps": 4}
    id = session.ask("start", asked)["id"]
    seen: set[int] = set()
    end = time.monotonic() + 180
    while time.monotonic() < end:
        found = session.ask("job", {"id": id})
        for run in session.ask("runs")["runs"]:
            seen |= set(run["frames"])
        if found["ended"]:
            break
        time.sleep(0.2)
    assert found["code"] == 0, found["output"]
    (run,) = session.ask("runs")["runs"]
    assert (run["name"], run["step"], run["state"]) == ("mine", 4, "done")
    assert seen
    points = session.ask("follow", {"run": "mine"})
    assert [point["step"] for point in points["points"] if "train/loss" in point][-1] == 4
    assert session.ask("follow", {"run": "mine", "since": points["next"]})["points"] == []
    assert session.ask("probe", {"run": "mine", "step": max(seen)})["maps"]
    with pytest.raises(ValueError, match="there is a run 'mine' already"):
        session.ask("start", asked)
    assert "mine" in session.sources


def test_a_design_costs_what_cost_says(session: Session) -> None:
    import clearhead

    answer = session.ask("design", {"preset": "tiny-llama", "changes": {"stack.repeats": 3}, "length": 64})
    config = clearhead.preset("tiny-llama").with_value("stack.repeats", 3)
    assert answer["parameters"] == clearhead.cost(config, length=64).parameters.total
    with pytest.raises(ValueError, match="must be"):
        session.ask("design", {"changes": {"stack.repeats": "x"}})


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
    for path in [*WEB.glob("*.js"), *WEB.glob("views/*.js")]:
        used |= set(re.findall(r'\bt\("(\w+)"[,)]', path.read_text(encoding="utf-8")))
    assert used <= english.keys(), used - english.keys()


def test_the_vendored_file_is_the_one_described() -> None:
    import hashlib

    digest = hashlib.sha256((WEB / "vendor" / "htm-preact.js").read_bytes()).hexdigest()
    assert digest in (WEB / "vendor" / "README.md").read_text()


def test_the_small_model_is_small() -> None:
    assert sum(path.stat().st_size for path in SMALL_MODEL.iterdir()) < 1_500_000
    assert jobs.JOBS is not None
