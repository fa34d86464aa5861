"""Small, correct files of every kind that Clearhead reads, and the commands that read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

import clearhead
from clearhead.configs import BytesConfig, dumps
from clearhead.tokenize import make

TEXT = "To be, or not to be, that is the question. " * 40
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Commands = dict[str, list[list[str]]]
"""A file's path in the folder -> command lines that read it; `{}` is the folder."""


def write_assets(folder: Path) -> Commands:
    """Write the files; return which commands read each of them."""
    torch.manual_seed(0)
    tokenizer = make(BytesConfig(), [])
    commands: Commands = {}

    def checkpoint(name: str, preset: str, lines: list[list[str]], changes: dict[str, object] | None = None) -> None:
        config = clearhead.preset(preset).with_values(changes or {})
        clearhead.build(config).save(folder / name, tokenizer=tokenizer, force=True)
        settings = json.loads((folder / name / "tokenizer_config.json").read_text())
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
        generation = {"eos_token_id": 0, "do_sample": True, "temperature": 0.7, "top_k": 5, "max_new_tokens": 3}
        (folder / name / "generation_config.json").write_text(json.dumps(generation))
        for file in sorted((folder / name).iterdir()):
            commands[f"{name}/{file.name}"] = lines

    wide = {"embedding.vocabulary": tokenizer.vocabulary, "head.vocabulary": tokenizer.vocabulary}
    generate = ["generate", "{}/llama", "To be", "-m", "2"]
    reading = [generate, ["cost", "{}/llama"], ["eval", "{}/llama", "{}/text.txt"], ["inspect", "{}/llama", "to be"]]
    checkpoint("llama", "tiny-llama", [*reading, ["chat", "{}/llama", "-m", "2"]], wide)
    bert = [["fill-mask", "{}/bert", "a [MASK]"], ["embed", "{}/bert", "a text"], ["trace", "{}/bert"]]
    checkpoint("bert", "tiny-bert", bert)
    checkpoint("vit", "tiny-vit", [["classify", "{}/vit", "{}/grey.png"], ["cost", "{}/vit"]])
    (folder / "vit/preprocessor_config.json").write_text(
        json.dumps(
            {
                "do_resize": True,
                "size": {"height": 32, "width": 32},
                "resample": 2,
                "image_mean": [0.5],
                "image_std": [0.5],
            }
        )
    )
    commands["vit/preprocessor_config.json"] = [["classify", "{}/vit", "{}/grey.png"]]
    from PIL import Image

    Image.fromarray(np.full((20, 30), 128, np.uint8)).save(folder / "grey.png")
    commands["grey.png"] = [["classify", "{}/vit", "{}/grey.png"]]
    (folder / "text.txt").write_text(TEXT)
    commands["text.txt"] = [["eval", "{}/llama", "{}/text.txt"]]

    write_run(folder / "runs/a")
    shown = [["runs", "{}/runs"], ["plot", "{}/runs/a", "--out", "{}/out.png", "--force"]]
    for file in ("recipe.json", "metrics.jsonl"):
        commands[f"runs/a/{file}"] = shown
    train = ["train", "--data", "{}/text.txt", "--out", "{}/runs/a", "--resume"]
    for path in sorted((folder / "runs/a/checkpoints").rglob("*.json")):
        commands[str(path.relative_to(folder))] = [train]
    (folder / "preset.json").write_text(dumps(clearhead.preset("tiny-gpt")))
    commands["preset.json"] = [
        ["cost", "{}/preset.json"],
        ["trace", "{}/preset.json"],
        ["inspect", "{}/preset.json", "5", "--ids"],
    ]
    rows = [
        "N,D,loss",
        *(f"{n},{d},{2 + 400 / n**0.34 + 400 / d**0.28}" for n in (1e6, 3e6, 1e7) for d in (1e7, 3e7, 1e8)),
    ]
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    commands["table.csv"] = [["scaling", "fit", "{}/table.csv", "--draws", "0", "--law", "size"]]
    try:
        import gguf  # noqa: F401
    except ImportError:
        return commands
    from clearhead.models.gguf.write import save_gguf

    save_gguf(clearhead.load(folder / "llama"), folder / "m.gguf", None, "f32")
    commands["m.gguf"] = [["cost", "{}/m.gguf"], ["inspect", "{}/m.gguf", "5 3", "--ids"]]
    return commands


def write_run(folder: Path) -> None:
    """A stopped run of two steps."""
    from clearhead.training.loop import train
    from clearhead.training.recipes import recipe

    (folder.parent.parent / "text.txt").write_text(TEXT)
    small = recipe("chars").with_values({"steps": 2, "evaluate_every": 1, "save_every": 1, "batch": 2})
    train(small, [folder.parent.parent / "text.txt"], out=folder)
