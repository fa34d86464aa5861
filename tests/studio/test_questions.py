"""What the views ask: answers equal to the Python API, terms that sum to their cell, and code that repeats them."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from clearhead.configs import Int4, Int8, Precision
from clearhead.inspect.cells import Stage, StepValues
from clearhead.inspect.explain import RULES, explain
from clearhead.inspect.questions import QUESTIONS, QuestionError, Session, encode, flow_steps
from clearhead.measure.trace import trace
from clearhead.models.model import build
from clearhead.models.quantize import quantize
from clearhead.nn.tap import Taps
from clearhead.studio.app import SMALL_MODEL, find_models
from tests.invariants.cases import CASES
from tests.invariants.tools import inputs_of, model_of, once_each

from .tools import has_english

TEXT = "To be or not to be"


@pytest.fixture(scope="module")
def session() -> Session:
    return Session({"small": SMALL_MODEL, "tiny-transformer": "tiny-transformer", "tiny-vit": "tiny-vit"}, TEXT)


@pytest.mark.parametrize("name", once_each(CASES))
def test_blocks_replay_to_the_bit_and_every_cell_is_the_sum_of_its_terms(name: str) -> None:
    model, inputs = model_of(name), [x[:1] for x in inputs_of(CASES[name])]
    inspection = model.inspect(*inputs)
    whole = Taps(read=["*"])
    inspection.model_input.run(whole)
    values, generator = StepValues(inspection), random.Random(name)
    for stack, blocks in inspection.model_input.stacks().items():
        for layer in range(len(blocks)):
            replayed = values.block(stack, layer)
            assert replayed
            for path, value in replayed.items():
                assert torch.equal(value, whole.values[path]), path
    for step in flow_steps(inspection):
        assert not has_english(plain(step.formula)), step.formula
        found = explain(values, step.name, [generator.randrange(size) for size in values[step.name].shape])
        assert found.stages, step.name
        last = found.stages[-1]
        for words in [text for stage in found.stages for text in (stage.formula, *(term.name for term in stage.terms))]:
            assert not has_english(plain(words)), words
        assert last.value == pytest.approx(found.value, rel=1e-4, abs=1e-5), step.name
        together = math.prod if last.operation == "Π" else sum
        if len(last.terms) > 1:
            parts = together(term.value for term in last.terms)
            assert parts == pytest.approx(found.value, rel=1e-4, abs=1e-5), step.name
        for term in last.terms:
            if term.path:
                assert values[term.path][term.index].numel() == 1, (step.name, term)
    if getattr(model.config.head, "kind", str)() == "LMHead":
        asked = Session.of_inspection(inspection)
        stack = model.config.decoder if hasattr(model.config, "decoder") else model.config.stack
        if any(getattr(block, "placement", "") == "post" for block in stack.blocks):
            with pytest.raises(QuestionError, match="stand on the residual stream"):
                asked.ask("attribution")
        else:
            added = asked.ask("attribution")
            assert added["sum"] == pytest.approx(added["logit"], rel=1e-4, abs=1e-4)


def plain(words: str) -> str:
    """Words with every number above 0 the same, so that each is translated once."""
    return re.sub(r"\d*[1-9][\d.]*(e[-+]?\d+)?", "7", re.sub("'[^']*'", "'x'", words))


def test_a_cell_that_its_rule_gets_wrong_has_no_terms(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    _, values = session.pass_of({})
    path = "stack.blocks.0.ffn.down"
    assert explain(values, path, [2, 5]).stages
    monkeypatch.setitem(RULES, "ffn.down", lambda cell: [Stage("wrong", cell.value + 1)])
    assert explain(values, path, [2, 5]).stages == ()
    monkeypatch.setitem(RULES, "ffn.down", lambda cell: cell.module("nowhere"))
    assert explain(values, path, [2, 5]).stages == ()


def test_every_step_of_the_trace_is_a_tap_with_the_traced_shape(session: Session) -> None:
    inspection, values = session.pass_of({})
    whole = Taps(read=["*"])
    inspection.model_input.run(whole)
    steps = session.ask("flow")["steps"]
    assert [step["name"] for step in steps] == [
        step.name
        for step in trace(inspection.model_input.model.config, length=len(inspection.model_input.labels)).steps
    ]
    generator = random.Random(0)
    for step in steps:
        value = values[step["name"]]
        assert [1, *value.shape] == step["shape"], step["name"]
        assert torch.equal(value, whole.values[step["name"]][0])
        for _ in range(3):
            index = [generator.randrange(size) for size in value.shape]
            found = explain(values, step["name"], index)
            assert found.stages, step["name"]
            assert found.stages[-1].value == pytest.approx(found.value, rel=1e-5, abs=1e-5), step["name"]
            last = found.stages[-1]
            if last.operation == "Σ" and len(last.terms) > 1:
                assert sum(term.value for term in last.terms) == pytest.approx(found.value, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("precision", [Int8(), Int4()])
def test_terms_of_packed_matrices_sum_to_their_cells(precision: Precision) -> None:
    model = quantize(build("tiny-llama"), precision)
    values = StepValues(model.inspect(torch.tensor([[3, 1, 4, 1, 5]])))
    for path in ("embedding.tokens", "stack.blocks.0.mixer.qkv", "stack.blocks.0.ffn.down", "head.logits"):
        found = explain(values, path, [size - 1 for size in values[path].shape])
        assert found.stages[-1].value == pytest.approx(found.value, rel=1e-4, abs=1e-5), path


CODE: dict[str, dict[str, Any]] = {
    "tokens": {},
    "atlas": {},
    "head": {"layer": 1, "head": 2},
    "flow": {},
    "step": {"path": "stack.blocks.1.mixer.scores", "head": 3},
    "cell": {"path": "stack.blocks.0.ffn.down", "index": [2, 5]},
    "lens": {},
    "predictions": {"row": 3},
    "generate": {"text": TEXT, "count": 4},
    "intervene": {"changes": [{"kind": "head", "layer": 1, "head": 0, "do": "mean"}]},
    "attribution": {"row": 3},
    "ablate": {"layer": 1, "head": 2},
    "compare": {"layer": 0, "head": 1, "other_text": "To be or not to do"},
}


@pytest.mark.parametrize("name", CODE)
def test_copied_python_runs_and_prints_what_is_on_screen(name: str, session: Session) -> None:
    answer = session.ask(name, CODE[name])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(answer["python"], name, "exec"), {})
    printed = out.getvalue()
    if name == "cell":
        assert float(printed.strip().removeprefix("tensor(").removesuffix(")")) == pytest.approx(
            answer["value"], abs=1e-4
        )
    elif name == "predictions":
        first = printed.splitlines()[0].split()
        assert float(first[-1]) == pytest.approx(answer["tokens"][0]["probability"], rel=1e-5)
    elif name == "generate":
        assert printed == answer["text"] + "\n"
    elif name == "compare":
        shown = np.array(re.findall(r"-?\d+\.\d*(?:e[-+]?\d+)?", printed), float)
        assert shown == pytest.approx(answer["difference"].ravel(), abs=1e-4)
    elif name == "ablate":
        assert float(printed.split("\n")[1].strip(" []").split()[2]) == pytest.approx(answer["effect"], abs=1e-6)
    elif name == "head":
        assert f"{answer['weights'][0, 0]:.0f}" in printed
    else:
        assert printed.strip()
    json.dumps(encode(answer), allow_nan=False)


def test_copied_python_of_curves_prints_what_they_show(session: Session) -> None:
    def numbers(code: str) -> np.ndarray:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, {})
        return np.array(re.findall(r"-?\d+(?:\.\d*)?(?:e[-+]?\d+)?", out.getvalue()), float)

    tokens = session.ask("tokens")
    bits = -np.log2(tokens["chances"][1:])
    assert numbers(tokens["surprise_python"]) == pytest.approx(bits, abs=1e-3)
    lens = session.ask("lens", {"token": "s"})
    assert numbers(lens["norms_python"]) == pytest.approx(lens["norms"].ravel(), rel=1e-4)
    length, rows = len(lens["labels"]), numbers(lens["track_python"])
    last = rows[-2 * length :]
    assert last[:length].tolist() == lens["ranks"][-1].tolist()
    assert last[length:] == pytest.approx(lens["chances"][-1], rel=1e-5)


def test_changes_equal_taps(session: Session) -> None:
    inspection, _ = session.pass_of({})
    run = inspection.model_input.run

    def zero(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, 2] = 0
        return x

    want = run(Taps(replace={"stack.blocks.1.mixer.mixed": zero}))[0, -1].softmax(-1)
    change = {"kind": "head", "place": "stack", "layer": 1, "head": 2, "do": "zero"}
    after = session.ask("intervene", {"changes": [change]})["after"]
    assert_allclose([one["probability"] for one in after], [float(want[one["id"]]) for one in after], atol=1e-6)
    same = session.ask("intervene", {"changes": [{**change, "do": "scale", "by": 1.0}]})
    assert same["after"] == same["before"] == session.ask("intervene", {"changes": []})["after"]
    patched = session.ask("intervene", {"changes": [{"kind": "patch", "layer": 2, "position": 5, "text": TEXT}]})
    assert patched["divergence"] == pytest.approx(0, abs=1e-6)
    ids = inspection.model_input.inputs.clone()
    ids[0, 2] = inspection.model_input.find_token(",")
    edited = session.ask("intervene", {"changes": [{"kind": "token", "position": 2, "token": ","}]})["after"]
    with torch.inference_mode():
        new = inspection.model_input.model(ids)[0, -1].softmax(-1)
    assert_allclose([one["probability"] for one in edited], [float(new[one["id"]]) for one in edited], atol=1e-6)
    gone = session.ask("intervene", {"changes": [{"kind": "branch", "layer": 0, "part": "ffn"}]})
    assert gone["divergence"] > 0.01


def test_ablation_of_a_layer_equals_whole_passes(session: Session) -> None:
    inspection, _ = session.pass_of({})
    before = inspection.logits[0, -1].log_softmax(-1)
    for head in inspection.at(1).heads:
        answer = session.ask("ablate", {"layer": 1, "head": head})

        def zero(x: torch.Tensor, head: int = head) -> torch.Tensor:
            x = x.clone()
            x[:, head] = 0
            return x

        after = inspection.model_input.run(Taps(replace={"stack.blocks.1.mixer.mixed": zero}))[0, -1].log_softmax(-1)
        assert answer["effect"] == pytest.approx(
            float(after[answer["token"][1]] - before[answer["token"][1]]), abs=1e-4
        )


def test_what_each_part_adds_sums_to_the_logit(session: Session) -> None:
    answer = session.ask("attribution", {})
    assert answer["sum"] == pytest.approx(answer["logit"], abs=1e-3)


def test_filters_are_those_of_generation(session: Session) -> None:
    answer = session.ask("predictions", {"top_k": 3, "temperature": 0.5})
    kept = [one for one in answer["tokens"] if one["kept"]]
    assert (len(kept), answer["kept"]) == (3, 3)
    assert sum(one["after"] for one in kept) == pytest.approx(1, abs=1e-5)
    with pytest.raises(QuestionError, match="top_p is 7"):
        session.ask("predictions", {"top_p": 7})


@pytest.mark.parametrize("name", ["tiny-transformer", "tiny-vit"])
def test_models_without_text_open(name: str, session: Session) -> None:
    for question in ("tokens", "atlas", "flow", "lens", "model"):
        assert json.dumps(encode(session.ask(question, {"model": name})), allow_nan=False)


def test_chinese_tokens_show_characters(session: Session) -> None:
    labels = session.ask("tokens", {"text": "从前有一个小女孩"})["labels"]
    assert "从·1/3" in labels
    assert not any("\ufffd" in label or "Ġ" in label or "ä" in label for label in labels)


def test_bad_questions_get_one_sentence(session: Session) -> None:
    for name, arguments, sentence in (
        ("nothing", {}, "there is no question 'nothing'"),
        ("tokens", {"model": "/etc/passwd"}, "there is no model '/etc/passwd' in this session"),
        ("head", {"layer": 99}, "layer 99 was not inspected"),
        ("head", {"head": 99}, "has no head 99"),
        ("step", {"path": "nowhere"}, "this model has no step 'nowhere'"),
        ("cell", {"path": "stack.final_norm", "index": [1, 2, 3]}, "so it has no cell"),
        ("intervene", {"changes": [{"kind": "spell"}]}, "must be head, branch, patch or token"),
        ("intervene", {"changes": [{"kind": "head", "layer": 0, "head": 0, "do": "burn"}]}, "must be one of zero"),
        ("tokens", {"text": ""}, "the text is empty"),
    ):
        with pytest.raises(ValueError, match=sentence):
            session.ask(name, arguments)
    assert "ask" not in QUESTIONS
    with pytest.raises(ValueError, match="there is no model 'nowhere'"):
        find_models(("nowhere",), None)


def test_a_comparison_has_a_difference(session: Session) -> None:
    answer = session.ask("compare", {"layer": 0, "head": 1, "other_text": "To be or not to do"})
    assert_allclose(answer["difference"], answer["second"] - answer["first"])
    assert np.abs(answer["difference"]).max() > 0
