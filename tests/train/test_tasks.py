"""Tasks other than the next token: masked tokens and images."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead
from clearhead.cli.train import find_recipe
from clearhead.configs import ConfigError, PatchEmbeddingConfig
from clearhead.data import Batch, DataError, TokenMasking, chat
from clearhead.data.images import augment, digits, image_folders, read_image_file
from clearhead.generate.template import ChatTemplate
from clearhead.tasks.images import read_image
from clearhead.tokenize import Tokenizer
from clearhead.training.loop import train
from clearhead.training.recipes import recipe
from clearhead.training.run import Run
from clearhead.training.task import prepare_task

from .tools import small

# ---- conversations


def test_a_chat_model_has_a_template_and_is_scored_on_its_answers(tmp_path: Path) -> None:
    data, out = tmp_path / "chats.jsonl", tmp_path / "run"
    turns = [("user", "what comes after one?"), ("assistant", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    data.write_text((json.dumps({"messages": messages}) + "\n") * 30)
    train(small(steps=2, evaluate_every=2, **{"task.tokenizer": {"kind": "Bytes"}}), [data], out)
    for folder in (out, out / "best"):
        template = ChatTemplate.load(folder, Tokenizer.load(folder))
        assert template.render(messages, prompt=False) == "".join(text for text, _ in chat(messages))
    last = Run(out).history()[-1]
    answer = len("two<|end|>\n")  # and a token for the end
    assert last["val/bpb"] == pytest.approx(last["val/loss"] / np.log(2) * (answer + 1) / answer)


# ---- masked tokens


def test_eighty_percent_of_the_chosen_tokens_are_masked() -> None:
    tokens = np.full((64, 512), 7)
    hidden = TokenMasking(mask=999, vocabulary=1000, share=0.15, seed=0).mask_tokens(Batch(tokens, tokens), first=0)
    asked = hidden.targets != -100
    assert asked.mean() == pytest.approx(0.15, abs=0.01)
    assert (hidden.targets[asked] == 7).all()
    assert (hidden.inputs[~asked] == 7).all()
    shown = hidden.inputs[asked]
    assert (shown == 999).mean() == pytest.approx(0.8, abs=0.03)
    assert (shown == 7).mean() == pytest.approx(0.1, abs=0.02)
    assert len(np.unique(shown)) > 200  # the last tenth is anything


def test_masking_depends_on_the_row_number_alone() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, (8, 32))
    masking = TokenMasking(mask=51, vocabulary=52, share=0.3, seed=3)
    whole = masking.mask_tokens(Batch(tokens, tokens), first=8)
    half = masking.mask_tokens(Batch(tokens[4:], tokens[4:]), first=12)
    assert (whole.inputs[4:] == half.inputs).all()
    assert (whole.targets[4:] == half.targets).all()
    assert (whole.targets[0] != whole.targets[1]).any()


def test_padding_is_never_masked() -> None:
    tokens, documents = np.ones((4, 64), dtype=np.int64), np.zeros((4, 64), dtype=np.int64)
    documents[:, 32:] = -1
    hidden = TokenMasking(mask=9, vocabulary=10, share=0.9, seed=0).mask_tokens(
        Batch(tokens, tokens, documents), first=0
    )
    assert (hidden.targets[:, 32:] == -100).all()
    assert (hidden.targets[:, :32] != -100).any()


def test_the_bert_recipe_learns_masked_tokens(tmp_path: Path) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text("abcdefghij" * 1000)
    changes = {
        "task.context": 32, "task.tokenizer": {"kind": "Bytes"}, "batch": 8, "steps": 450, "evaluate_every": 450,
        "model.stack.dim": 32, "model.stack.repeats": 2, "schedule.warmup": 10,
    }  # fmt: skip
    config = recipe("bert")
    for path, value in changes.items():
        config = config.with_value(path, value)
    train(config, [corpus], tmp_path / "run")
    lines = Run(tmp_path / "run").history()
    assert lines[0]["train/loss"] == pytest.approx(np.log(258), rel=0.2)
    assert lines[-1]["val/accuracy"] > 0.9  # any one character alone would give 0.1
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "run").eval()
    assert AutoTokenizer.from_pretrained(tmp_path / "run").mask_token == "[MASK]"
    tokens = torch.randint(0, 258, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(
            clearhead.load(tmp_path / "run")(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4
        )


# ---- pictures


def test_the_vit_recipe_classifies_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    config = recipe("vit").with_value("steps", 80).with_value("model.stack.repeats", 2).with_value("task.shift", 0)
    config = config.with_value("schedule.warmup", 10)
    train(config, (), tmp_path / "run")
    last = Run(tmp_path / "run").history()[-1]
    assert last["val/accuracy"] > 0.7
    assert last["images_per_second"] > 0
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["id2label"]["7"] == "7"
    from transformers import AutoModelForImageClassification

    theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "run").eval()
    pixels = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            clearhead.load(tmp_path / "run")(pixels), theirs(pixels).logits, atol=1e-4, rtol=1e-4
        )


def folders(root: Path, split: bool = False) -> Path:
    from PIL import Image

    rng = np.random.default_rng(0)
    for shade, name in ((60, "dark"), (190, "light")):
        for i in range(12):
            part = ("val" if i % 4 == 0 else "train") if split else ""
            path = root / part / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((shade + rng.integers(0, 40, (10, 12, 3))).astype(np.uint8)).save(path)
    return root


def test_pictures_come_from_folders_one_for_each_class(tmp_path: Path) -> None:
    found = image_folders([folders(tmp_path)], size=8, channels=3)
    assert found.names == ("dark", "light")
    pixels = found.read(np.array([0, 23]))
    assert pixels.shape == (2, 3, 8, 8)
    assert pixels[0].mean() < 110 < pixels[1].mean()
    training, validation = found.split(0.25, seed=1)
    assert len(validation) == 6
    assert sorted([*training, *validation]) == list(range(24))


def test_a_checkpoint_of_other_classes_is_refused(tmp_path: Path) -> None:
    config = replace(recipe("vit"), start="runs/digits")
    with pytest.raises(ConfigError, match="the checkpoint has 10 classes, but the images have 2"):
        prepare_task(config, [folders(tmp_path)], (), Run(tmp_path / "run"), lambda text: None)


def test_folders_named_train_and_val_are_the_split(tmp_path: Path) -> None:
    found = image_folders([folders(tmp_path, split=True)], size=8, channels=1)
    training, validation = found.split(0.5, seed=1)
    assert (len(training), len(validation)) == (18, 6)


def test_a_picture_that_is_none_is_named(tmp_path: Path) -> None:
    folders(tmp_path)
    (tmp_path / "dark" / "0.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"0\.png cannot be read as an image"):
        image_folders([tmp_path], size=8, channels=3)


@pytest.mark.parametrize(("name", "dtype"), [("a.png", np.uint16), ("a.pgm", np.int32), ("a.tif", np.float32)])
def test_a_ramp_of_many_bits_stays_a_ramp(name: str, dtype: type, tmp_path: Path) -> None:
    from PIL import Image

    share = np.linspace(0, 1, 8)
    ramp = np.tile(share if dtype is np.float32 else share * 65535, (8, 1)).astype(dtype)
    Image.fromarray(ramp).save(tmp_path / name)
    for channels in (1, 3):
        read = read_image_file(tmp_path / name, 8, channels)
        np.testing.assert_allclose(read, np.broadcast_to(share * 255, (channels, 8, 8)), atol=1)
        image = read_image(tmp_path / name, PatchEmbeddingConfig(image=8, patch=4, channels=channels), {})
        np.testing.assert_allclose(image.numpy(), np.broadcast_to(share * 2 - 1, (channels, 8, 8)), atol=0.01)


def test_hidden_pictures_are_passed_over(tmp_path: Path) -> None:
    root = folders(tmp_path)
    for place in (root / "dark" / "._0.png", root / "__MACOSX" / "dark" / "._0.png", root / ".thumbs" / "0.png"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"not a picture")
    (root / "runs").mkdir()
    (root / "runs" / "loss.png").write_bytes(b"the run's own")
    found = image_folders([root], size=8, channels=3, besides=root / "runs")
    assert (found.names, len(found)) == (("dark", "light"), 24)


def test_a_picture_that_is_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    folders(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DataError, match=r"dark/0\.png cannot be read as an image: .*exceeds limit"):
        image_folders([tmp_path], size=8, channels=3)


def test_without_pillow_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"reading images needs pillow: pip install .*vision"):
        image_folders([tmp_path], size=8, channels=3)
    with pytest.raises(DataError, match=r"pip install .*vision"):
        digits(8, 1)


def test_how_pictures_are_read_is_said_and_can_be_set(tmp_path: Path) -> None:
    messages: list[str] = []
    data, run = [folders(tmp_path / "pictures")], Run(tmp_path / "run")
    prepare_task(recipe("vit"), data, (), run, messages.append)
    changes = ("model.embedding.image=64", "model.embedding.patch=8", "model.embedding.channels=3")
    task = prepare_task(find_recipe("vit", changes), data, (), run, messages.append)
    sizes = "19 images of 2 classes to train on, 5 to validate, resized to"
    assert messages == [f"{sizes} 8 × 8 grey", f"{sizes} 64 × 64 colour"]
    model = clearhead.build(task.config)
    assert model(task.batch(0, slice(2)).inputs).shape == (2, 2)


@pytest.mark.parametrize(("share", "split", "sentence"), [
    (0.0, False, "none of the 24 images is left for validation: the held-out share is 0.0"),
    (0.99, False, "none of the 24 images is left for training: the held-out share is 0.99"),
    (0.5, True, "none of the 24 images is left for training: all are in folders of held-out images"),
])  # fmt: skip
def test_pictures_of_which_none_are_left_are_refused(share: float, split: bool, sentence: str, tmp_path: Path) -> None:
    place = tmp_path / "pictures" / ("val" if split else "")
    folders(place)
    config = replace(recipe("vit"), validation=share)
    with pytest.raises(ConfigError, match=sentence):
        prepare_task(config, [tmp_path / "pictures"], (), Run(tmp_path / "run"), lambda text: None)


def test_one_class_alone_is_refused(tmp_path: Path) -> None:
    root = folders(tmp_path / "pictures")
    (root / "dark").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"there is only the class 'light' in .* at least two classes"):
        image_folders([root], size=8, channels=3)
    with pytest.raises(DataError, match="is not in the folder of a class"):
        image_folders([root / "light"], size=8, channels=3)
    with pytest.raises(DataError, match="nothing is not a folder"):
        image_folders([tmp_path / "nothing"], size=8, channels=3)


def test_augmenting_moves_and_mirrors_by_the_pictures_number() -> None:
    pytest.importorskip("sklearn")
    pixels = digits(8, 1).read(np.arange(64))
    moved = augment(pixels, np.arange(64), seed=0, shift=1, flip=True)
    assert (augment(pixels[32:], np.arange(32, 64), seed=0, shift=1, flip=True) == moved[32:]).all()
    assert (augment(pixels, np.arange(64), seed=0, shift=0, flip=False) == pixels).all()
    for before, after in zip(pixels, moved, strict=True):
        padded = np.pad(before, ((0, 0), (1, 1), (1, 1)))
        windows = [padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
        assert any((after == w).all() or (after == w[..., ::-1]).all() for w in windows)
