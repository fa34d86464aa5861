"""embed, fill-mask and classify against the pipelines of `transformers`, on tiny random models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tokenizers
import torch

import clearhead
from clearhead.configs import ClassHeadConfig, PatchEmbeddingConfig, PoolerConfig
from clearhead.tasks.classify import classify
from clearhead.tasks.fill import fill_mask
from clearhead.tasks.images import read_image
from clearhead.tasks.texts import embed

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *["the", "a", "cat", "dog", "sat", "on", "mat", "is", "what", "fine", "day", ".", "?"],
]
TEXTS = ["the cat sat on the mat .", "what a fine day", "dog ?"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def bert_folder(path, architecture: str, **extra):
    torch.manual_seed(0)
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(WORDS[:5])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=20, **named)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=20, **SIZES, **extra)
    config.initializer_range = 0.4
    model = getattr(transformers, architecture)(config).eval()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model, tokenizer


def pipeline(task: str, model, **parts):
    return transformers.pipeline(task, model=model, device="cpu", **parts)


def test_embeddings_are_the_feature_extraction_pipeline(tmp_path) -> None:
    theirs, tokenizer = bert_folder(tmp_path, "BertModel")
    wanted = pipeline("feature-extraction", theirs, tokenizer=tokenizer)(TEXTS)
    ours = clearhead.load(tmp_path)
    rows = [torch.tensor(one)[0] for one in wanted]
    for found, each in zip(embed(ours, TEXTS, pool="none"), rows, strict=True):
        torch.testing.assert_close(found, each, atol=1e-4, rtol=1e-4)
    for found, each in zip(embed(ours, TEXTS), rows, strict=True):
        torch.testing.assert_close(found, each.mean(0), atol=1e-4, rtol=1e-4)
    for found, each in zip(embed(ours, TEXTS, pool="first"), rows, strict=True):
        torch.testing.assert_close(found, each[0], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        pooled = theirs(**tokenizer(TEXTS[0], return_tensors="pt")).pooler_output[0]
    torch.testing.assert_close(embed(ours, TEXTS, pool="pooler")[0], pooled, atol=1e-4, rtol=1e-4)


def test_masks_are_filled_as_by_the_pipeline(tmp_path) -> None:
    theirs, tokenizer = bert_folder(tmp_path, "BertForMaskedLM")
    fill = pipeline("fill-mask", theirs, tokenizer=tokenizer)
    texts = ["the [MASK] sat on the mat .", "what a fine [MASK]"]
    for found, wanted in zip(fill_mask(clearhead.load(tmp_path), texts, top=4), fill(texts, top_k=4), strict=True):
        (mask,) = found
        assert [one.token for one in mask] == [one["token"] for one in wanted]
        assert [one.score for one in mask] == pytest.approx([one["score"] for one in wanted], abs=1e-5)
        assert [one.word for one in mask] == [one["token_str"] for one in wanted]
        assert [one.text for one in mask] == [one["sequence"] for one in wanted]
    two = fill_mask(clearhead.load(tmp_path), ["[MASK] cat [MASK]"], top=2)[0]
    wanted = fill("[MASK] cat [MASK]", top_k=2)
    assert [[one.token for one in mask] for mask in two] == [[one["token"] for one in mask] for mask in wanted]
    with pytest.raises(ValueError, match=r"there is no \[MASK\] in 'the cat'"):
        fill_mask(clearhead.load(tmp_path), ["the cat"])


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
def test_texts_are_classified_as_by_the_pipeline(tmp_path, problem) -> None:
    labels = {0: "bad", 1: "good", 2: "dull"}
    extra = {"num_labels": 3, "id2label": labels, "label2id": {name: i for i, name in labels.items()}}
    theirs, tokenizer = bert_folder(tmp_path, "BertForSequenceClassification", problem_type=problem, **extra)
    wanted = pipeline("text-classification", theirs, tokenizer=tokenizer)(TEXTS, top_k=3)
    ours = clearhead.load(tmp_path)
    ours.save(tmp_path / "again")
    for model in (ours, clearhead.load(tmp_path / "again")):
        for found, each in zip(classify(model, TEXTS), wanted, strict=True):
            assert [one.label for one in found] == [one["label"] for one in each]
            assert [one.score for one in found] == pytest.approx([one["score"] for one in each], abs=1e-5)


def test_images_are_classified_as_by_the_pipeline(tmp_path) -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, initializer_range=0.4, **SIZES)
    theirs = transformers.ViTForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 16, "width": 16},
        "resample": 3,
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.2, 0.3, 0.25],
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    picture = tmp_path / "picture.png"
    rng = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (37, 29, 3), generator=rng, dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(picture)
    ours = clearhead.load(tmp_path)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    wanted = processor(Image.open(picture), return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(read_image(picture, ours.config.embedding, settings), wanted, atol=1e-5, rtol=1e-5)
    expected = pipeline("image-classification", theirs, image_processor=processor)(str(picture), top_k=5)
    (found,) = classify(ours, [picture])
    assert [one.label for one in found] == [one["label"] for one in expected]
    assert [one.score for one in found] == pytest.approx([one["score"] for one in expected], abs=1e-5)
    (half,) = classify(ours.to(torch.float16), [picture])
    assert half[0].score == pytest.approx(found[0].score, abs=0.02)
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(ValueError, match=r"text\.png cannot be read as an image"):
        classify(ours, [tmp_path / "text.png"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"size": {"width": 8}}, "a size has {'width': 8}, but must have height and width, or shortest_edge"),
        ({"do_center_crop": True, "crop_size": {"longest_edge": 8}}, "a size has {'longest_edge': 8}"),
        ({"image_mean": [0.5, 0.5]}, "image_mean has 2 numbers, but must have 1 or 3"),
        ({"image_std": None, "rescale_factor": None, "resample": None, "do_resize": None}, None),
    ],
)
def test_odd_settings_of_images_are_one_sentence_or_defaults(tmp_path: Path, settings: dict, sentence: str) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (9, 7), (10, 200, 30)).save(tmp_path / "a.png")
    embedding = PatchEmbeddingConfig(image=8, patch=4, channels=3)
    if sentence is None:
        plain = read_image(tmp_path / "a.png", embedding, {})
        assert torch.equal(read_image(tmp_path / "a.png", embedding, settings), plain)
        return
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_image(tmp_path / "a.png", embedding, settings)


def test_models_of_another_kind_are_refused(tmp_path) -> None:
    bert_folder(tmp_path, "BertModel")
    bert, gpt = clearhead.load(tmp_path), clearhead.build(clearhead.preset("tiny-gpt"))
    with pytest.raises(ValueError, match="no masked-LM head"):
        fill_mask(bert, ["[MASK]"])
    with pytest.raises(ValueError, match="no class head"):
        classify(bert, ["the cat"])
    judge = clearhead.build(bert.config.with_value("head", ClassHeadConfig(classes=3, pool=PoolerConfig())))
    with pytest.raises(ValueError, match="top is 0, but must be at least 1"):
        classify(judge, ["the cat"], top=0)
    with pytest.raises(ValueError, match="the text has 27 tokens, but the model reads at most 20"):
        embed(bert, ["the " * 25])
    with pytest.raises(ValueError, match="no tokenizer"):
        embed(gpt, ["the cat"])
    with pytest.raises(ValueError, match="not one text"):
        embed(clearhead.build(clearhead.preset("tiny-vit")), ["the cat"])


def test_a_sentence_transformers_folder_decides(tmp_path) -> None:
    """Pooling, normalizing and the longest text come from the folder, and go along when it is saved."""
    theirs, tokenizer = bert_folder(tmp_path / "a", "BertModel")
    kinds = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "path": path, "type": f"x.models.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (tmp_path / "a" / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "a" / "1_Pooling").mkdir()
    (tmp_path / "a" / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    )
    (tmp_path / "a" / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    clearhead.load(tmp_path / "a").save(tmp_path / "b")
    for folder in ("a", "b"):
        with pytest.warns(UserWarning, match="1 of 3 texts has more than 6 tokens"):
            found = embed(clearhead.load(tmp_path / folder), TEXTS)
        with torch.no_grad():
            read = tokenizer(TEXTS, return_tensors="pt", padding=True, truncation=True, max_length=6)
            wanted = torch.nn.functional.normalize(theirs(**read).last_hidden_state[:, 0], dim=-1)
        torch.testing.assert_close(torch.stack(found), wanted, atol=1e-4, rtol=1e-4)


def test_long_texts_are_cut_if_asked(tmp_path) -> None:
    theirs, tokenizer = bert_folder(tmp_path, "BertModel")
    long = "the cat sat on the mat . " * 5
    ours = clearhead.load(tmp_path)
    with pytest.raises(ValueError, match="reads at most 20; to cut it, use truncate"):
        embed(ours, [long])
    with torch.no_grad():
        read = tokenizer([long], return_tensors="pt", truncation=True, max_length=20)
        wanted = theirs(**read).last_hidden_state[0]
    torch.testing.assert_close(embed(ours, [long], truncate=True)[0], wanted.mean(0), atol=1e-4, rtol=1e-4)
    for pool, want in (("max", wanted.amax(0)), ("last", wanted[-1])):
        torch.testing.assert_close(embed(ours, [long], truncate=True, pool=pool)[0], want, atol=1e-4, rtol=1e-4)
    scaled = embed(ours, [long, "a dog"], truncate=True, normalize=True)
    assert all(float(vector.norm()) == pytest.approx(1, abs=1e-5) for vector in scaled)
