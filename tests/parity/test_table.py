"""The table of families in docs/use/checkpoints.md, made by trying each ability on a tiny model of each family.

To write it again: `python -m tests.parity.test_table`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from clearhead.configs import EncoderDecoderConfig, Int8, TokenEmbeddingConfig  # noqa: E402
from clearhead.models.convert import FAMILIES, CheckpointError  # noqa: E402
from clearhead.models.gguf.write import save_gguf  # noqa: E402
from clearhead.models.load import load  # noqa: E402
from clearhead.models.model import Model, build  # noqa: E402
from clearhead.models.onnx import Graph, check_onnx, save_onnx  # noqa: E402
from clearhead.models.quantize import quantize  # noqa: E402

from . import families, test_transformers  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/use/checkpoints.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"
COLUMNS = ("load", "save", "train", "quantize", "GGUF", "ONNX", "look inside")
YES, NO = "✓", "–"


class Unbuilt:
    """`transformers`, whose models are not built: calling a model's class gives its config and its name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(transformers, name) if name.endswith("Config") else lambda config: (config, name)


def tiny_configs() -> dict[str, list[dict[str, Any]]]:
    """`config.json` of the tiny models of each family in the lists of the other tests."""
    found: dict[str, list[dict[str, Any]]] = {}
    for config, architecture in cases():
        found.setdefault(config.model_type, []).append(config.to_dict() | {"architectures": [architecture]})
    return found


def cases() -> Iterator[tuple[Any, str]]:
    """Configs of `transformers`, and the classes that they are for."""
    theirs = Unbuilt()
    yield from (make(theirs) for make in test_transformers.DECODERS.values())
    yield from (make(theirs, "ForMaskedLM") for make in test_transformers.ENCODERS.values())
    for cases in vars(families).values():
        named = cases.values() if isinstance(cases, dict) else ()
        for name, head, fields in (case for case in named if isinstance(case, tuple) and len(case) == 3):
            yield getattr(transformers, families.config_class(name, head))(**fields), f"{name}{head}"
    yield transformers.ViTConfig(**test_transformers.VIT), "ViTForImageClassification"


def example(model: Model) -> tuple[torch.Tensor, ...]:
    """An input that the model reads."""
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    config = model.config
    pair = isinstance(config, EncoderDecoderConfig)
    embedding = config.source if pair else config.embedding
    first = tokens if isinstance(embedding, TokenEmbeddingConfig) else torch.randn(1, *embedding.input_shape(0))
    return (first, tokens) if pair else (first,)


def trains(model: Model) -> str:
    """Every weight gets a gradient."""
    model(*example(model)).float().logsumexp(-1).sum().backward()
    weights = list(model.parameters())
    learned = all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in weights)
    model.zero_grad(set_to_none=True)
    return YES if learned else NO


def quantizes(model: Model) -> str:
    with torch.inference_mode():
        return YES if bool(quantize(model, Int8())(*example(model)).isfinite().all()) else NO


def exports(*tries: Callable[[], object]) -> str:
    """Whether another program's format has one of the family's tiny models. For the others, one sentence says so."""
    reasons = []
    for write in tries:
        try:
            write()
        except CheckpointError as error:
            reasons.append(str(error))
    assert not any("\n" in reason for reason in reasons)
    return YES if len(reasons) < len(tries) else NO


def looks_inside(model: Model) -> str:
    inputs = [given if given.is_floating_point() else given[0].tolist() for given in example(model)]
    inspection = model.inspect(*inputs)
    inspection.norms()
    return YES if inspection.maps else "without maps"


def build_family(kind: str, hf: dict[str, Any]) -> Model:
    torch.manual_seed(0)
    model = build(FAMILIES[kind].config(hf)).eval()
    model.family = kind
    return model


def abilities(kind: str, cases: list[dict[str, Any]], folder: Path) -> dict[str, str]:
    """What can be done with this family."""
    models = [build_family(kind, hf) for hf in cases]
    model = models[0]
    model.save(folder / "model")
    assert json.loads((folder / "model" / "config.json").read_text())["model_type"] == kind
    again = load(folder / "model")
    with torch.no_grad():
        inputs = example(model)
        torch.testing.assert_close(again(*inputs), model(*inputs))
    return {
        "load": YES,
        "save": YES,
        "train": trains(model),
        "quantize": quantizes(model),
        "GGUF": exports(*(partial(save_gguf, one, folder / "m.gguf", None, force=True) for one in models)),
        "ONNX": exports(*(partial(check_onnx, one.config) for one in models)),
        "look inside": looks_inside(again),
    }


def table() -> str:
    configs = tiny_configs()
    missing = FAMILIES.keys() - configs.keys()
    assert not missing, f"no tiny model in tests/parity/families.py: {', '.join(sorted(missing))}"
    lines = [f"| family | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for kind in sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            found = abilities(kind, configs[kind], Path(folder))
        lines.append(f"| `{kind}` | {' | '.join(found[column] for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table_of_families() -> None:
    page = PAGE.read_text()
    written = page.partition(BEGIN)[2].partition(END)[0]
    assert written.strip() == table().strip(), "to write it again: python -m tests.parity.test_table"


@pytest.mark.proof
@pytest.mark.parametrize("kind", FAMILIES)
def test_onnxruntime_runs_every_family_that_it_has(kind: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    models = [build_family(kind, hf) for hf in tiny_configs()[kind]]
    able = [model for model in models if exports(partial(check_onnx, model.config)) == YES]
    if not able:
        pytest.skip(f"ONNX has no {kind}")
    save_onnx(able[0], tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    inputs = dict.fromkeys(Graph(able[0]).names)
    given = [torch.cat([x] * 3) for x in example(able[0])]
    for name in inputs:
        inputs[name] = given[name == "decoder_input_ids"].numpy()
        if name == "attention_mask":
            inputs[name] = torch.ones_like(given[0]).numpy()
        elif name == "token_type_ids":
            inputs[name] = torch.zeros_like(given[0]).numpy()
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(session.run(None, inputs)[-1]), able[0](*given), atol=1e-4, rtol=1e-4
        )


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
