"""The logit lens and the effect of heads and positions, compared with `transformers` and with direct runs."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.testing import assert_allclose

from clearhead.cli.inspect import find_model
from clearhead.cli.main import cli
from clearhead.inspect.interventions import log_probabilities
from clearhead.inspect.model_input import token_labels
from clearhead.models.load import load
from clearhead.nn.tap import Taps
from tests.invariants.cases import CASES
from tests.invariants.tools import fresh, model_of
from tests.parity.test_transformers import LLAMA, VOCABULARY, randomise

from .tools import letters, small, writer

TEXT = "the cat sat on the mat."


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return randomise(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)))


@pytest.fixture(scope="module")
def ours(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return load(folder)


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(seed))


def test_the_lens_is_each_hidden_state_through_norm_and_head(theirs: Any, ours: Any) -> None:
    tokens = ids()
    with torch.no_grad():
        hidden = list(theirs(tokens, output_hidden_states=True).hidden_states[:-1])
        expected = [theirs.lm_head(theirs.model.norm(x)).softmax(-1)[0].max(-1) for x in hidden]
        expected.append(theirs(tokens).logits.softmax(-1)[0].max(-1))
    grid = ours.inspect(tokens).lens()
    assert grid.rows == ["embedding", "layer 0", "layer 1", "layer 2"]
    assert_allclose(grid.values, torch.stack([s.values for s in expected]).numpy(), atol=1e-4)
    assert grid.texts is not None
    assert grid.texts == [[str(id) for id in s.indices.tolist()] for s in expected]


def test_norms_and_next(theirs: Any, ours: Any) -> None:
    tokens = ids()
    inspection = ours.inspect(tokens)
    with torch.no_grad():
        out = theirs(tokens, output_hidden_states=True)
    want = torch.stack([x[0].norm(dim=-1) for x in out.hidden_states[:-1]]).numpy()
    assert_allclose(inspection.norms().values[:3], want, rtol=1e-4)
    chances = out.logits[0, 2].softmax(-1)
    for word, id, share in inspection.next(row=2, top=4):
        assert (word, share) == (str(id), pytest.approx(float(chances[id]), abs=1e-5))
    assert inspection.next(2, 4)[0][1] == int(chances.argmax())


def test_ablation_is_the_model_without_the_columns_of_that_head(theirs: Any, ours: Any) -> None:
    tokens, token = ids(), 17
    grid = ours.inspect(tokens).ablate(token, row=5)
    assert grid.values.shape == (3, 6)

    def log_p() -> float:
        with torch.no_grad():
            return float(theirs(tokens).logits[0, 5].log_softmax(-1)[token])

    before = log_p()
    for layer, head in ((0, 0), (1, 4), (2, 5)):
        weight = theirs.model.layers[layer].self_attn.o_proj.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[:, 8 * head : 8 * head + 8] = 0
        assert grid.values[layer, head] == pytest.approx(log_p() - before, abs=1e-4)
        with torch.no_grad():
            weight.copy_(kept)


def test_patching_is_one_hidden_state_put_into_another_run(theirs: Any, ours: Any) -> None:
    clean, other, token = ids(0), ids(1), 23
    grid = ours.inspect(clean).patch(other, token)
    with torch.no_grad():
        hidden = theirs(clean, output_hidden_states=True).hidden_states
        there = float(theirs(other).logits[0, -1].log_softmax(-1)[token])
        here = float(theirs(clean).logits[0, -1].log_softmax(-1)[token])
    for layer, position in ((0, 3), (1, 7), (1, 0)):

        def put(module: Any, given: Any, out: Any, layer: int = layer, position: int = position) -> Any:
            x = (out[0] if isinstance(out, tuple) else out).clone()
            x[:, position] = hidden[layer + 1][:, position]
            return (x, *out[1:]) if isinstance(out, tuple) else x

        hook = theirs.model.layers[layer].register_forward_hook(put)
        with torch.no_grad():
            patched = float(theirs(other).logits[0, -1].log_softmax(-1)[token])
        hook.remove()
        assert grid.values[layer, position] == pytest.approx(patched - there, abs=1e-4)
    assert grid.values[2, -1] == pytest.approx(here - there, abs=1e-4), "the last layer's last position is the answer"
    assert_allclose(grid.values[2, :-1], 0, atol=1e-6)
    assert grid.columns[0] == f"{other[0, 0]}→{clean[0, 0]}"


def test_patching_a_prompt_into_itself_is_refused(ours: Any) -> None:
    with pytest.raises(ValueError, match="both prompts are the same"):
        ours.inspect(ids(0)).patch(ids(0), 5)


@pytest.mark.parametrize("part", ["mixer", "ffn", "heads"])
def test_patching_a_branch_is_its_value_put_into_another_run(theirs: Any, ours: Any, part: str) -> None:
    """What a head mixed is read by the matrix after it; what a branch adds is what its last matrix says."""
    grid = ours.inspect(ids(0)).patch(ids(1), 5, part=part)
    assert grid.values.shape == ((3, 6) if part == "heads" else (3, 8))

    def log_p(tokens: torch.Tensor) -> float:
        with torch.no_grad():
            return float(theirs(tokens).logits[0, -1].log_softmax(-1)[5])

    there = log_p(ids(1))
    for layer, at in ((0, 3), (1, 0), (2, 5)):
        block, kept = theirs.model.layers[layer], []
        matrix = block.mlp.down_proj if part == "ffn" else block.self_attn.o_proj
        where = (slice(None), slice(None), slice(8 * at, 8 * at + 8)) if part == "heads" else (slice(None), at)

        def put(module: Any, given: Any, out: Any = None, kept: list = kept, where: Any = where) -> Any:
            x = (given[0] if out is None else out).clone()
            kept.append(x.clone())
            x[where] = kept[0][where]
            return (x,) if out is None else x

        hook = matrix.register_forward_pre_hook(put) if part == "heads" else matrix.register_forward_hook(put)
        log_p(ids(0))
        assert grid.values[layer, at] == pytest.approx(log_p(ids(1)) - there, abs=1e-4)
        hook.remove()
    assert abs(grid.values).max() > 1e-3


@pytest.mark.parametrize(("part", "tap"), [("mixer", "mixer.out"), ("ffn", "ffn.down")])
def test_patching_a_branch_of_a_parallel_block(part: str, tap: str) -> None:
    model, path = model_of("mha; parallel"), f"stack.blocks.0.{tap}"
    clean = Taps(read=[path])

    def put(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x[:, :-1], clean.values[path][:, -1:]), 1)

    with torch.no_grad():
        model(torch.tensor([[4, 5, 6]]), taps=clean)
        runs = [model(torch.tensor([[7, 8, 9]]), taps=taps) for taps in (None, Taps(replace={path: put}))]
    there, patched = (float(logits[0, -1].log_softmax(-1)[3]) for logits in runs)
    assert model.inspect([4, 5, 6]).patch([7, 8, 9], 3, part=part).values[0, -1] == pytest.approx(
        patched - there, abs=1e-5
    )


def test_patching_a_translator_takes_another_source() -> None:
    model, target = small("tiny-transformer"), [1, 2, 3]
    inspection = model.inspect([5, 6, 7, 8], target)
    grid = inspection.patch([9, 6, 7, 8], 4)
    with torch.no_grad():
        runs = [model(torch.tensor([source]), torch.tensor([target])) for source in ([5, 6, 7, 8], [9, 6, 7, 8])]
    here, there = (float(logits[0, -1].log_softmax(-1)[4]) for logits in runs)
    assert grid.values[-1, -1] == pytest.approx(here - there, abs=1e-5)
    assert grid.columns == ["1", "2", "3"]
    assert inspection.patch([9, 6], 4).values.shape == (2, 3), "the decoder's stream is as long for any source"
    with pytest.raises(ValueError, match="the prompts have 4 and 2 tokens"):
        inspection.patch([9, 6], 4, part="heads")


def test_a_translators_rows_are_the_targets(tmp_path: Path) -> None:
    inspection = small("tiny-transformer").inspect([5, 6, 7], [1, 2, 3, 4, 5, 6], rows=[-1])
    for name in ("maps.csv", "maps.npz", "maps.svg"):
        inspection.save(tmp_path / name)
    with np.load(tmp_path / "maps.npz") as arrays:
        shapes = [arrays[f"{place}.1"].shape for place in ("encoder", "decoder", "cross")]
    assert shapes == [(4, 3, 3), (4, 1, 6), (4, 1, 3)]
    assert inspection.rollout().values.shape == (3, 3)
    assert inspection.map(1, 0, "cross").rows == ["6"]
    assert not any("summary" in vars(map) for map in inspection.maps), "nobody asked about the other rows"


def test_prompts_of_different_length_are_refused(ours: Any) -> None:
    with pytest.raises(ValueError, match="the prompts have 8 and 5 tokens"):
        ours.inspect(ids()).patch(ids()[:, :5])


def test_generated_tokens_are_looked_at_too() -> None:
    model, tokenizer = writer(), letters()
    inspection = model.inspect("the cat", tokenizer=tokenizer, write=5)
    (found,) = model.generate("the cat", tokenizer=tokenizer, max_new_tokens=5)
    wrote = found.tokens
    assert inspection.model_input.inputs[0, 7:].tolist() == wrote
    assert inspection.model_input.labels == [*"the cat", *(tokenizer.decode([id]) for id in wrote)]
    assert inspection.map(1, 2).values.shape == (12, 12)


def test_a_translator_writes_its_target(tmp_path: Path) -> None:
    small("tiny-transformer").save(tmp_path, extra={"decoder_start_token_id": 9})
    model = load(tmp_path)
    inspection = model.inspect([5, 6, 7], write=4)
    (found,) = model.generate([[5, 6, 7]], max_new_tokens=4)
    assert inspection.model_input.inputs[0].tolist() == [9, *found.tokens]
    assert inspection.at(1, "cross").weights().shape == (4, 5, 3)
    typed = model.inspect([5, 6, 7], "cab", tokenizer=letters())
    assert typed.model_input.inputs[0].tolist() == [9, *letters().encode("cab")], "a text comes after the start"
    inspection.save(tmp_path / "maps.svg")
    written = " ".join(re.findall("<!-- (.*?) -->", (tmp_path / "maps.svg").read_text()))  # of each line of a text
    assert f"on “5 6 7”, output “{' '.join(map(str, [9, *found.tokens]))}”" in written


def test_rows_are_chosen() -> None:
    inspection = writer().inspect(TEXT, tokenizer=letters(), rows=[-1, 3])
    grid = inspection.map(0, 1)
    assert (grid.rows, len(grid.columns)) == ([".", " "], len(TEXT))
    assert "summary" not in vars(inspection.at(0)), "the other rows were not computed"
    whole = writer().inspect(TEXT, tokenizer=letters())
    assert_allclose(grid.values, whole.map(0, 1).values[[-1, 3]], atol=1e-6)
    assert inspection.norms().columns == [".", " "]
    assert_allclose(inspection.norms().values, whole.norms().values[:, [-1, 3]], rtol=1e-6)
    with pytest.raises(ValueError, match="no head is selected; choose from the 4 heads, 0 to 3"):
        writer().inspect(TEXT, tokenizer=letters(), heads=[])


def test_a_masked_language_model_says_what_stands_there() -> None:
    inspection = model_of("head: masked lm").inspect([4, 5, 6])
    assert inspection.lens().title == "logit lens: the most likely token if model stopped at a layer"
    assert inspection.model_input.describe_position(1) == "token in place of '5'"
    assert '"label":"6","predicts":"token"' in inspection.html()


def test_classes_are_named_or_numbered(tmp_path: Path) -> None:
    model = fresh(CASES["head: classes of the mean"])
    model_input = model.inspect("cab", tokenizer=letters()).model_input
    assert (model_input.find_token("1"), model_input.find_token(12)) == (1, 12)
    for bad, sentence in {
        "13": "class 13 does not exist: model has class 0 to 12",
        "cat": "has no class 'cat'; give its number",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            model_input.find_token(bad)
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "dog", "1": "cat"}}))
    model.origin = tmp_path
    model_input = model.inspect("cab", tokenizer=letters()).model_input
    assert (model_input.find_token("cat"), model_input.token_text(1)) == (1, "cat")
    with pytest.raises(ValueError, match="has no class 'cow' among dog, cat"):
        model_input.find_token("cow")


def test_pieces_are_what_each_token_adds() -> None:
    from clearhead.configs import BytesConfig
    from clearhead.tokenize import make

    tokenizer = make(BytesConfig(), [])
    text = " a cat\n"
    found = token_labels(tokenizer, [*tokenizer.encode(text), tokenizer.end])
    assert found == [*text, "<|endoftext|>"]
    assert token_labels(None, [3, 4]) == ["3", "4"]


def test_classes_of_an_image(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = np.zeros((40, 30), np.uint8)
    picture[:20] = 255
    image.fromarray(picture).save(tmp_path / "half.png")
    inspection = small("tiny-vit").inspect(tmp_path / "half.png")
    pixels = inspection.model_input.inputs
    assert (pixels.shape, pixels[0, 0, 0, 0], pixels[0, 0, -1, 0]) == ((1, 1, 16, 16), 1.0, -1.0)
    assert inspection.lens().rows == ["embedding", "layer 0", "layer 1"]
    assert_allclose(inspection.lens().values[-1, 0], inspection.next()[0][2], rtol=1e-5)
    image.fromarray(picture[::-1].copy()).save(tmp_path / "turned.png")
    other = run("tiny-vit", str(tmp_path / "half.png"), "--show", "patching", "--other", str(tmp_path / "turned.png"))
    assert other.exit_code == 0, other.output
    assert sum(share for _, _, share in inspection.next()) == pytest.approx(1)
    assert inspection.model_input.image is not None
    assert (inspection.model_input.image[0, 0] == 255).all()
    for path in ("over.png", "over.svg"):
        inspection.save(tmp_path / path)
        assert (tmp_path / path).stat().st_size > 5000


def test_tables_hold_the_weights(tmp_path: Path) -> None:
    inspection = writer().inspect("a cat", tokenizer=letters(), layers=[1])
    for name in ("maps.csv", "maps.npz", "maps.png", "maps.svg"):
        inspection.save(tmp_path / name, "dark")
    weights = inspection.at(1).weights()
    with np.load(tmp_path / "maps.npz") as arrays:
        assert_allclose(arrays["stack.1"], weights)
        assert arrays["tokens"].tolist() == list("a cat")
    with (tmp_path / "maps.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    again = np.zeros_like(weights)
    for line in lines:
        again[int(line["head"]), int(line["query"]), int(line["key"])] = float(line["weight"])
    assert_allclose(again, weights)
    assert lines[0]["query token"] == "a"
    effect = inspection.ablate()
    effect.save(tmp_path / "effect.csv")
    with (tmp_path / "effect.csv").open(encoding="utf-8") as file:
        assert float(list(csv.DictReader(file))[2][effect.unit]) == effect.values[0, 2]
    assert effect._repr_html_().startswith("<img")
    with pytest.raises(ValueError, match=r"must end in one of \.png, \.svg"):
        inspection.save(tmp_path / "maps.gif")


def test_a_suffix_in_capitals_is_the_same_suffix(folder: Path, tmp_path: Path) -> None:
    names = {"maps": ("MAPS.NPZ", "MAPS.CSV"), "rollout": ("ROLLOUT.NPZ", "ROLLOUT.HTML")}
    for view, files in names.items():
        paths = (word for name in files for word in ("--out", str(tmp_path / name)))
        done = run(str(folder), "a cat", "--show", view, *paths)
        assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {*names["maps"], *names["rollout"]}
    with np.load(tmp_path / "MAPS.NPZ") as maps, np.load(tmp_path / "ROLLOUT.NPZ") as rollout:
        assert maps["stack.1"].shape == (4, 5, 5)
        assert rollout["values"].shape == (5, 5)
    assert (tmp_path / "MAPS.CSV").read_text().startswith("place,layer,head")
    assert "rollout through 2 layers" in (tmp_path / "ROLLOUT.HTML").read_text()


def test_a_table_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.inspect.inspection.CELLS", 100)
    with pytest.raises(ValueError, match="select layers, heads or rows"):
        writer().inspect("a cat", tokenizer=letters()).save(tmp_path / "x.csv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "writer"
    writer().save(path, tokenizer=letters())
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["inspect", *arguments], terminal_width=100)


def test_the_command_tells_what_heads_do(folder: Path) -> None:
    out = run(str(folder), TEXT).output
    assert out.startswith("writer: 2 layers, 8 heads, 23 positions\n")
    assert "next token after '.'" in out
    heads = json.loads(run(str(folder), TEXT, "--json").output)["heads"]
    assert [(head["layer"], head["head"]) for head in heads] == [(i, h) for i in range(2) for h in range(4)]
    following = json.loads(run(str(folder), TEXT, "--json", "--at", "3").output)["next"]
    want = writer().inspect(TEXT, tokenizer=letters()).next(3)
    assert [(each["token"], each["id"]) for each in following] == [(word, id) for word, id, _ in want]
    assert_allclose([each["probability"] for each in following], [share for _, _, share in want], rtol=1e-5)
    one = run(str(folder), "a cat", "--layers", "1", "--heads", "2").output
    assert "stack layer 1, head 2" in one
    assert "entropy" in one


@pytest.mark.parametrize(
    "arguments",
    [
        ("rollout",),
        ("lens",),
        ("norms",),
        ("ablation", "--token", "c"),
        ("patching", "--other", "a dog", "--part", "heads"),
        ("patching", "--ids", "--other", "5 6 7"),
    ],
)
def test_the_command_shows_each_view(folder: Path, arguments: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "view.png"
    text = "1 2 3" if "--ids" in arguments else "a cat"
    shown = run(str(folder), text, "--show", *arguments, "--out", str(out))
    assert shown.exit_code == 0, shown.output
    assert out.stat().st_size > 4000
    grid = json.loads(run(str(folder), text, "--show", *arguments, "--json").output)
    assert len(grid["values"]) == len(grid["rows"])
    assert len(grid["values"][0]) == len(grid["columns"])


def test_log_probabilities_are_of_every_copy() -> None:
    inspection = writer().inspect("a cat", tokenizer=letters())
    found = log_probabilities(inspection.model_input, 3, -1, copies=3)
    assert found.shape == (3,)
    assert_allclose(found, found[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("FOLDER", "a cat", "--layers", "5"), "layer 5 does not exist; choose from the 2 layers of stack, 0 to 1"),
        (("FOLDER", "a cat", "--heads", "4"), "head 4 does not exist; choose from the 4 heads, 0 to 3"),
        (("FOLDER", "a cat", "--rows", "9"), "row 9 does not exist; choose from the 5 queries, 0 to 4"),
        (("FOLDER", "a cat", "--layers", "x"), "--layers takes numbers and ranges, such as 0,3-5, not 'x'"),
        (("FOLDER", "a cat", "--show", "patching"), "--show patching needs --other INPUT"),
        (("FOLDER", "a cat", "--rows", "3--1"), "--rows 3--1 holds nothing: a range goes up from one end"),
        (("FOLDER", "a cat", "--heads", "2-1"), "--heads 2-1 holds nothing: a range goes up from one end"),
        (("tiny-gpt", "1 2", "--ids", "--show", "ablation", "--token", "500"), "token 500 does not exist: tiny-gpt"),
        (
            ("tiny-mamba", "1 2", "--ids", "--show", "patching", "--other", "3 4", "--part", "heads"),
            "no inspected layer of tiny-mamba with fresh weights has heads",
        ),
        (
            ("tiny-mamba", "1 2", "--ids", "--show", "patching", "--other", "3 4", "--part", "ffn"),
            "no inspected layer of tiny-mamba with fresh weights has ffn",
        ),
        (("FOLDER", "a cat", "--show", "patching", "--other", "a"), "the prompts have 5 and 1 tokens"),
        (
            ("FOLDER", "a cat", "--show", "ablation", "--token", "at"),
            "'at' is 2 tokens ('a' 't'), but must be exactly one",
        ),
        (("FOLDER", "A cat"), "the character 'A'"),
        (("FOLDER", "a cat", "--target", "x"), "a target was given, but"),
        (("FOLDER", "a cat", "--at", "7"), "position 7 does not exist; choose from the 5 positions"),
        (
            ("tiny-gpt", "a cat"),
            "tiny-gpt with fresh weights has no tokenizer and cannot read a text: give token ids (--ids)",
        ),
        (("tiny-gpt", "a cat", "--ids"), "token ids are whole numbers, such as '5 3 8', not 'a cat'"),
        (("tiny-vit", "nowhere.png"), "this model reads images, and there is no file nowhere.png"),
        (
            ("tiny-transformer", "1 2", "--ids"),
            "give a target (--target), or let it generate one (--write N), not both",
        ),
        (
            ("tiny-transformer", "1 2", "--ids", "--write", "3"),
            "does not say which token starts a target; give the target as ids (--ids, --target)",
        ),
        (("tiny-bert", "1 2", "--ids", "--show", "lens"), "has no head over tokens or classes"),
        (("tiny-gpt", "1 2", "--ids", "--rows", "0-99999999999"), "is a range of more than 1,048,576"),
        (("nowhere", "a"), "nowhere is not a folder and not in the Hub's cache"),
    ],
)
def test_bad_input_gets_one_sentence(folder: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = run(*(str(folder) if word == "FOLDER" else word for word in arguments))
    assert done.exit_code != 0
    assert sentence in (done.output + str(done.exception))
    assert isinstance(done.exception, SystemExit | ValueError)


def test_a_name_on_the_hub_is_loaded_and_a_preset_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.cli.inspect.load_model", lambda model: f"the weights of {model}")
    assert find_model("somebody/gpt") == ("the weights of somebody/gpt", None)
    assert find_model("tiny-gpt")[1] == "tiny-gpt with fresh weights"
