"""What the views ask and what they get: one function for each question, on models that this session may open.

The page, the one-file page and the notebook ask the same questions and get the same answers. An answer is JSON-able
data with NumPy arrays in it; `encode` turns the arrays into text.
"""

from __future__ import annotations

import base64
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clearhead.configs import AudioEmbeddingConfig, EncoderDecoderConfig, PatchEmbeddingConfig, Step
from clearhead.generate.complete import TextGenerator
from clearhead.generate.conversation import Conversation
from clearhead.generate.defaults import context_length, default_decoding
from clearhead.generate.filters import Filter, MinP, Temperature, TopK, TopP
from clearhead.generate.template import ChatTemplate
from clearhead.measure.trace import trace
from clearhead.models.device import place_model
from clearhead.models.load import load
from clearhead.models.model import Model, build
from clearhead.models.presets import PRESETS, preset
from clearhead.nn.norm import OffsetRMSNorm, PlainRMSNorm, RMSNorm
from clearhead.precision.matrix import dense

from . import changes as interventions
from .cells import StepValues, matrix_row
from .explain import explain
from .interventions import ablate_layer
from .lens import logits_at, residual_stream
from .maps import Map
from .model_input import ModelInput, token_labels

if TYPE_CHECKING:
    from .inspection import Inspection

STRIP = (48, 96)  # the most rows and columns of a small picture
MAP_COLUMNS = 4096  # the widest map
LENS_POSITIONS = 64  # positions of a lens
LOGIT_COLUMNS = 64  # tokens of a map of logits
KEPT_BYTES = 512_000_000  # recorded passes that stay in memory
SLICE_BYTES = 4_000_000  # the most that one answer carries of one value
SOURCE_TOKENS = 24  # target tokens that an encoder–decoder generates to look at
DEFAULT_TEXT = "To be or not to be, that is the question"
Answer = dict[str, Any]
Question = Callable[["Session", Mapping[str, Any]], Answer]
QUESTIONS: dict[str, Question] = {}
FILTERS: dict[str, Callable[[Any], Filter]] = {"temperature": Temperature, "top_k": TopK, "top_p": TopP, "min_p": MinP}


def question(function: Question) -> Question:
    """Register a function under its name as a question."""
    QUESTIONS[function.__name__] = function
    return function


class QuestionError(ValueError):
    """A question that cannot be answered; the message is shown to the user."""


@dataclass(frozen=True)
class ModelSource:
    """A model that a function makes, and the Python that makes it, such as one step of a run."""

    load: Callable[[], Model]
    python: str


@dataclass
class Session:
    """The models that may be opened by name, and the passes recorded lately."""

    sources: dict[str, Path | str | ModelSource]  # a checkpoint folder, the name of a preset, or a function
    text: str = ""
    runs: Path | None = None
    only_run: str | None = None  # the one run that a widget follows
    trains: bool = False  # whether jobs can be started
    experiments: list[dict[str, Any]] = field(default_factory=list)
    device: str = "cpu"  # where models run: "auto", "cpu", "cuda", "mps"
    loaded: dict[str, Model] = field(default_factory=dict)
    recorded: OrderedDict[tuple[str, str], tuple[Inspection, StepValues]] = field(default_factory=OrderedDict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def of_model(cls, model: Model, text: Any = "", name: str = "model") -> Session:
        """A session of one model that is in memory already."""
        origin = model.origin
        session = cls({name: name if origin is None else origin}, str(text))
        session.loaded[name] = model
        return session

    @classmethod
    def of_inspection(cls, inspection: Inspection) -> Session:
        """A session that answers from one recorded pass."""
        given = inspection.model_input
        read = given.inputs if given.source is None else given.source
        ids = None if read.is_floating_point() else read[0].tolist()
        words = "" if ids is None else " ".join(map(str, ids))
        text = words if ids is None or given.tokenizer is None else given.tokenizer.decode(ids)
        session = cls.of_model(given.model, text, given.name)
        session.recorded[given.name, session.text or DEFAULT_TEXT] = inspection, StepValues(inspection)
        return session

    def ask(self, name: str, arguments: Mapping[str, Any] | None = None) -> Answer:
        if name not in QUESTIONS:
            raise QuestionError(f"there is no question {name!r}")
        with self.lock:
            return QUESTIONS[name](self, arguments or {})

    def model(self, name: str) -> Model:
        if name not in self.sources:
            raise QuestionError(f"there is no model {name!r} in this session; it has {', '.join(self.sources)}")
        if name not in self.loaded:
            source = self.sources[name]
            if isinstance(source, ModelSource):
                model = source.load()
            elif isinstance(source, Path):
                model = load(source)
            else:
                torch.manual_seed(0)
                model = build(preset(source))
            self.loaded[name] = place_model(model.eval(), self.device)
        return self.loaded[name]

    def pass_of(self, arguments: Mapping[str, Any]) -> tuple[Inspection, StepValues]:
        """The recorded pass of a model over a text; the least recently used passes make room for new ones."""
        name, text = self.model_name(arguments), str(arguments.get("text", self.text or DEFAULT_TEXT))
        key = name, text
        if key not in self.recorded:
            model = self.model(name)
            made = record_pass(model, text, name)
            self.recorded[key] = made, StepValues(made)
        self.recorded.move_to_end(key)
        while len(self.recorded) > 1 and sum(values.bytes() for _, values in self.recorded.values()) > KEPT_BYTES:
            self.recorded.popitem(last=False)
        return self.recorded[key]

    def model_name(self, arguments: Mapping[str, Any]) -> str:
        return str(arguments.get("model") or next(iter(self.sources)))

    def opening(self, arguments: Mapping[str, Any]) -> str:
        """Python that opens the model and records the pass."""
        name = self.model_name(arguments)
        inspection, _ = self.pass_of(arguments)
        source = self.sources[name]
        if isinstance(source, ModelSource):
            load_line = source.python
        elif isinstance(source, Path):
            load_line = f"model = clearhead.load({str(source)!r})"
        elif source in PRESETS:
            load_line = f"torch.manual_seed(0)\nmodel = clearhead.build(clearhead.preset({source!r})).eval()"
        else:
            load_line = "# `model` is the model that you inspected"
        given = inspection.model_input
        if given.image is not None:
            shape = ", ".join(map(str, given.inputs.shape))
            asked = f"torch.randn({shape}, generator=torch.Generator().manual_seed(0))"
        elif given.tokenizer is None:
            asked = repr((given.source if given.source is not None else given.inputs)[0].tolist())
        else:
            asked = repr(str(arguments.get("text", self.text or DEFAULT_TEXT)))
        more = (
            f", write={writes(given.model)}"
            if writes(given.model)
            else f", {asked}"
            if given.source is not None
            else ""
        )
        return f"import torch\n\nimport clearhead\n\n{load_line}\ninspection = model.inspect({asked}{more})"


def writes(model: Model) -> int:
    """How many tokens a recorded pass generates first: the target of an encoder–decoder that can start one."""
    if not isinstance(model.config, EncoderDecoderConfig):
        return 0
    return SOURCE_TOKENS if default_decoding(model, model.tokenizer).start is not None else 0


def record_pass(model: Model, text: str, name: str) -> Inspection:
    """An encoder–decoder without a start token reads its source as the target too."""
    given = read_input(model, text)
    target = given if isinstance(model.config, EncoderDecoderConfig) and not writes(model) else None
    return model.inspect(given, target, name=name, write=writes(model))


def read_input(model: Model, text: str) -> Any:
    """A text; ids for a model without a tokenizer; a fixed random image or sound for a model of those."""
    embedding: Any = model.config.source if isinstance(model.config, EncoderDecoderConfig) else model.config.embedding
    if isinstance(embedding, PatchEmbeddingConfig | AudioEmbeddingConfig):
        shape = (1, *embedding.input_shape(0))
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if model.tokenizer is not None:
        if not text:
            raise QuestionError("the text is empty: type something")
        return text
    words = text.replace(",", " ").split()
    ids = [int(word) for word in words] if words and all(word.isdigit() for word in words) else list(text.encode())
    return [id % embedding.vocabulary for id in ids] or [0]


def encode(value: Any) -> Any:
    """Arrays as {"dtype", "shape", "data": base64}; everything else as it is."""
    if isinstance(value, np.ndarray):
        kind = {
            "float64": "f4",
            "float32": "f4",
            "float16": "f2",
            "uint8": "u1",
            "int64": "i4",
            "int32": "i4",
            "bool": "u1",
        }
        array = np.ascontiguousarray(value, dtype="<" + kind[str(value.dtype)])
        return {
            "dtype": kind[str(value.dtype)],
            "shape": list(value.shape),
            "data": base64.b64encode(array.tobytes()).decode(),
        }
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


# ---- models and text


@question
def models(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The models that can be opened, and where to start."""
    return {
        "models": list(session.sources),
        "text": session.text or DEFAULT_TEXT,
        "runs": session.runs is not None,
        "train": session.trains and session.runs is not None,
    }


@question
def model(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """What one model is."""
    opened = session.model(name := session.model_name(arguments))
    config: Any = opened.config
    stack = config.decoder if isinstance(config, EncoderDecoderConfig) else config.stack
    head = config.head
    return {
        "name": name,
        "parameters": sum(p.numel() for p in opened.parameters()),
        "layers": len(stack.blocks),
        "dim": stack.dim,
        "vocabulary": getattr(head, "vocabulary", None),
        "context": context_length(opened),
        "kind": type(opened).__name__,
        "heads": max((getattr(block.mixer, "heads", 0) for block in stack.blocks), default=0),
        "branches": [part for part in ("mixer", "cross", "ffn") if any(getattr(b, part, None) for b in stack.blocks)],
    }


@question
def tokens(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The tokens of the text."""
    inspection, _ = session.pass_of(arguments)
    given = inspection.model_input
    ids = [] if given.image is not None else given.inputs[0].tolist()
    raw = [] if given.tokenizer is None else [str(given.tokenizer.name(id)) for id in ids]
    return {
        "labels": given.labels,
        "ids": ids,
        "raw": raw,
        "source": given.source_labels,
        "image": given.image,
        "generated": given.generated,
        "predicts": given.prediction_kind if given.has_predictions else None,
        "chances": token_chances(inspection),
        "chat": chat_template(given) is not None,
        "python": session.opening(arguments) + "\nprint(inspection.model_input.labels)",
        "surprise_python": session.opening(arguments) + SURPRISE_CODE,
    }


SURPRISE_CODE = """
logs = inspection.logits[0, :-1].float().log_softmax(-1)
chosen = inspection.model_input.inputs[0, 1:, None]
print(-logs.gather(-1, chosen)[:, 0] / torch.tensor(2.0).log())"""


def token_chances(inspection: Inspection) -> list[float]:
    """How likely each token was by the tokens before it; -1 for the first. Empty if the model predicts none."""
    given = inspection.model_input
    if not given.has_predictions or given.prediction_kind != "next token":
        return []
    ids = given.inputs[0].to(inspection.logits.device)
    found = inspection.logits[0, :-1].float().softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return [-1.0, *found.tolist()]


def chat_template(given: ModelInput) -> ChatTemplate | None:
    folder = given.model.origin
    if given.tokenizer is None or folder is None:
        return None
    try:
        return ChatTemplate.load(folder, given.tokenizer)
    except (ValueError, OSError):
        return None


# ---- attention


@question
def atlas(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """Every head: a thumbnail, its tag and numbers."""
    inspection, _ = session.pass_of(arguments)
    return {
        "maps": [map_answer(each) for each in inspection.maps],
        "without_maps": inspection.layers_without_maps,
        "python": session.opening(arguments)
        + "\nfor head in inspection.heads:\n    print(head.name, head.tag, head.entropy)",
    }


def map_answer(each: Map) -> Answer:
    small = each.thumbnails
    shades, top = shade_heads(small, each.normalized)
    return {
        "place": each.place,
        "layer": each.layer,
        "shape": list(each.shape),
        "pool": [-(-n // max(m, 1)) for n, m in zip(each.shape, small.shape[1:], strict=True)],
        "signed": not each.normalized,
        "top": top,
        "thumbnails": shades,
        "heads": [
            {
                "head": one.head,
                "tag": one.tag,
                "entropy": one.entropy,
                "distance": one.distance,
                "scores": {name: share for name, share in one.scores.items() if share is not None},
            }
            for one in each.head_summaries
        ],
    }


def shade_heads(small: np.ndarray, normalized: bool) -> tuple[np.ndarray, float]:
    """Small pictures as bytes, and the value of the darkest: 0 to 1, or around 128 if values have signs."""
    top = 1.0 if normalized else float(np.abs(small).max(initial=0)) or 1.0
    shades = np.ceil(small * 255) if normalized else np.rint(128 + 127 * small / top)
    return shades.astype(np.uint8), top


def find_map(inspection: Inspection, arguments: Mapping[str, Any]) -> Map:
    place = arguments.get("place")
    return inspection.at(int(arguments.get("layer", 0)), None if place is None else str(place))


@question
def head(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """One head's map: exact weights, or the largest of neighbours when the text is long."""
    inspection, _ = session.pass_of(arguments)
    each, number = find_map(inspection, arguments), int(arguments.get("head", 0))
    if number not in each.heads:
        raise QuestionError(f"layer {each.layer} has no head {number}; it has {len(each.heads)}")
    queries, keys = inspection.names(each)
    whole = each.shape[0] * each.shape[1] * 4 <= SLICE_BYTES
    answer = {
        "place": each.place,
        "layer": each.layer,
        "head": number,
        "queries": queries,
        "keys": keys,
        "signed": not each.normalized,
        "weights": each.weights(number)[0] if whole else None,
        "path": f"{'decoder' if each.place == 'cross' else each.place}.blocks.{each.layer}."
        f"{'cross' if each.place == 'cross' else 'mixer'}.weights",
    }
    code = f"\nprint(inspection.map({each.layer}, {number}, {each.place!r}).values)"
    return answer | {"opening": session.opening(arguments), "python": session.opening(arguments) + code}


@question
def row(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """One query's weights in one head, exact at any length."""
    inspection, _ = session.pass_of(arguments)
    each, number, query = find_map(inspection, arguments), int(arguments.get("head", 0)), int(arguments.get("query", 0))
    return {"weights": each.weights(number, [query])[0, 0]}


# ---- every step


@question
def flow(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """Every step that the model computes, in order, with its true shape."""
    inspection, _ = session.pass_of(arguments)
    steps = [
        {
            "name": step.name,
            "formula": step.formula,
            "letters": step.letters.split(),
            "shape": list(step.shape),
            "part": step.part,
        }
        for step in flow_steps(inspection)
    ]
    code = (
        "\ntrace = clearhead.trace(model.config, length=len(inspection.model_input.labels))"
        "\nfor step in trace.steps:\n    print(step.name, step.shape)"
    )
    return {"steps": steps, "python": session.opening(arguments) + code}


def flow_steps(inspection: Inspection) -> list[Step]:
    given = inspection.model_input
    lengths: dict[str, Any] = {"length": len(given.labels)}
    if given.source is not None:
        lengths["source_length"] = len(given.source_labels or ())
    return list(trace(given.model.config, **lengths).steps)


@question
def strips(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """A small picture of every step of one section: a block (`stack.blocks.0`), or what stands outside the blocks."""
    inspection, values = session.pass_of(arguments)
    section, head = str(arguments.get("section", "")), int(arguments.get("head", 0))
    block = section.split(".")[1:2] == ["blocks"]
    found = {}
    for each in flow_steps(inspection):
        if each.name.startswith(section + ".") if block else ".blocks." not in each.name:
            try:
                value = values[each.name]
            except KeyError:
                continue
            matrix = value[min(head, len(value) - 1)] if value.dim() == 3 else value
            found[each.name] = strip(matrix.reshape(-1, matrix.shape[-1]), each.name.endswith(("weights", "router")))
    return {"strips": found}


def strip(matrix: torch.Tensor, positive: bool) -> Answer:
    """A matrix as at most 48 × 96 bytes; a byte stands for the value of the largest size in its cell."""
    array = matrix.float().nan_to_num(0, 0, 0).cpu().numpy()
    sizes = [-(-n // most) for n, most in zip(array.shape, STRIP, strict=True)]
    padded = np.pad(array, [(0, -n % size) for n, size in zip(array.shape, sizes, strict=True)])
    cells = (
        padded.reshape(len(padded) // sizes[0], sizes[0], -1, sizes[1]).swapaxes(1, 2).reshape(-1, sizes[0] * sizes[1])
    )
    pooled = np.take_along_axis(cells, np.abs(cells).argmax(1)[:, None], 1).reshape(len(padded) // sizes[0], -1)
    top = 1.0 if positive else float(np.quantile(np.abs(array), 0.995)) or 1.0
    shades = 255 * pooled if positive else 128 + 127 * np.clip(pooled / top, -1, 1)
    return {"values": np.rint(np.clip(shades, 0, 255)).astype(np.uint8), "signed": not positive}


@question
def step(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The values of one step: a matrix of positions by numbers, for one head where there are heads."""
    inspection, values = session.pass_of(arguments)
    path = str(arguments.get("path", ""))
    try:
        value = values[path]
    except (KeyError, IndexError):
        raise QuestionError(f"this model has no step {path!r}, or it is not recorded") from None
    which = int(arguments.get("head", 0))
    heads = value.shape[0] if value.dim() == 3 else 1
    if value.dim() == 3:
        if not 0 <= which < heads:
            raise QuestionError(f"{path} has {heads} heads, so there is no head {which}")
        value = value[which]
    shown = value[None] if value.dim() == 1 else value
    array = shown.float().cpu().numpy()
    finite = array[np.isfinite(array)]
    cut = array[:, : max(1, min(MAP_COLUMNS, SLICE_BYTES // 4 // max(len(array), 1)))]
    some: Answer = {}
    if path == "head.logits":
        ids = logit_columns(array, arguments.get("include"))
        cut, some = array[:, ids], {"ids": ids, "names": [inspection.model_input.token_text(id) for id in ids]}
    index = f"[0, {which}]" if heads > 1 else "[0]"
    code = tap_code(path, index)
    return {
        "path": path,
        "heads": heads,
        "head": which,
        "values": np.ascontiguousarray(cut),
        "columns": array.shape[1],
        "rows": array.shape[0],
        "least": float(finite.min()) if finite.size else 0.0,
        "most": float(finite.max()) if finite.size else 0.0,
        "python": session.opening(arguments) + code,
    } | some


def logit_columns(logits: np.ndarray, include: Any) -> list[int]:
    """The tokens that a map of logits shows: the likeliest at the last position, and one that was asked for."""
    order = np.argsort(-logits[-1], kind="stable")[:LOGIT_COLUMNS].tolist()
    wanted = include if isinstance(include, int) and 0 <= include < logits.shape[1] else None
    return order if wanted is None or wanted in order else [*order[:-1], wanted]


def tap_code(path: str, index: str) -> str:
    """Python that reads one value by its tap."""
    read = f"taps = clearhead.Taps(read=[{path!r}])\ninspection.model_input.run(taps)"
    return f"\n{read}\nprint(taps.values[{path!r}]{index})"


@question
def cell(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The arithmetic of one number."""
    inspection, values = session.pass_of(arguments)
    path, index = str(arguments.get("path", "")), [int(i) for i in arguments.get("index") or ()]
    try:
        found = explain(values, path, index)
    except KeyError:
        raise QuestionError(f"this model has no step {path!r}") from None
    at = ", ".join(map(str, (0, *index)))
    code = tap_code(path, f"[{at}]")
    return found.to_dict() | {
        "labels": cell_labels(inspection.model_input, path, index),
        "python": session.opening(arguments) + code,
    }


def cell_labels(given: ModelInput, path: str, index: list[int]) -> list[str]:
    """The tokens that a cell belongs to: the query and the key of a score or weight, or one position."""
    source = given.source_labels or given.labels
    rows = source if path.startswith(("encoder", "source")) else given.labels
    if path.endswith(("scores", "weights")) and len(index) == 3:
        keys = source if ".cross." in path else rows
        return [rows[index[1]], keys[index[2]]] if index[1] < len(rows) and index[2] < len(keys) else []
    at = index[1] if len(index) == 3 else index[0] if index else -1
    names = [rows[at]] if 0 <= at < len(rows) else []
    return [*names, given.token_text(index[-1])] if path == "head.logits" else names


# ---- lens


@question
def lens(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The most likely tokens by layer and position, the norm of the stream, and one token's rank and probability."""
    inspection, _ = session.pass_of(arguments)
    given, top = inspection.model_input, int(arguments.get("top", 3))
    given.check_predictions()
    stream = residual_stream(given, inspection.values)
    length = len(next(iter(stream.values())))
    count = int(arguments.get("count", LENS_POSITIONS))
    first = max(0, min(int(arguments.get("from", length)), length - count))
    at = list(range(first, min(first + count, length))) if given.predicts_tokens else [0]
    wanted = arguments.get("token")
    id = None if wanted in (None, "") else given.find_token(wanted if isinstance(wanted, int) else str(wanted))
    lines, ranks, chances = [], [], []
    for x in stream.values():
        logits = given.head(x[None, at] if given.predicts_tokens else x[None]).float().cpu()
        logits = logits[0] if given.predicts_tokens else logits
        probability = logits.softmax(-1)
        best = probability.topk(min(top, probability.shape[-1]))
        lines.append(
            [
                [[given.token_text(i), i, p] for p, i in zip(row, ids, strict=True)]
                for row, ids in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        )
        if id is not None:
            ranks.append((logits > logits[:, [id]]).sum(-1).numpy() + 1)
            chances.append(probability[:, id].numpy())
    answer: Answer = {
        "layers": list(stream),
        "positions": at,
        "labels": [given.labels[i] for i in at] if given.predicts_tokens else ["·"],
        "top": lines,
        "norms": np.stack([x[at].float().norm(dim=-1).cpu().numpy() for x in stream.values()]),
        "python": session.opening(arguments) + f"\nprint(inspection.lens(rows={at}).texts)",
        "norms_python": session.opening(arguments) + f"\nprint(inspection.norms().values[:, {at}])",
    }
    if id is not None:
        answer |= {"token": [given.token_text(id), id], "ranks": np.stack(ranks), "chances": np.stack(chances)}
        answer["track_python"] = session.opening(arguments) + track_code(given, at, id)
    return answer


def track_code(given: ModelInput, rows: list[int], id: int) -> str:
    """Python that prints rank and probability of a token after each layer."""
    rows_of = f"[0, {rows}]" if given.predicts_tokens else ""
    return f"""
for name, path in inspection.model_input.residual_taps():
    logits = inspection.model_input.head(inspection.values[path]){rows_of}.float()
    print(name, ((logits > logits[:, [{id}]]).sum(-1) + 1).tolist(), logits.softmax(-1)[:, {id}].tolist())"""


@question
def attribution(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """What each attention and FFN branch adds to one logit: its output through the final norm's scale and the head."""
    inspection, values = session.pass_of(arguments)
    given = inspection.model_input
    row, token = int(arguments.get("row", -1)), arguments.get("token")
    at = logits_at(given, inspection.logits, row)[0]
    lm_head: Any = given.model.head
    if given.model.config.head is None or given.model.config.head.kind() != "LMHead":
        raise QuestionError("attribution needs a language model")
    row %= len(given.labels)
    id = int(at.argmax()) if token in (None, "") else given.find_token(token if isinstance(token, int) else str(token))
    final = values[list(dict(given.residual_taps()).values())[-1]][row].double()
    parts = stream_parts(given, values, row)
    if not torch.allclose(torch.stack([vector for _, _, vector in parts]).sum(0), final, atol=1e-3, rtol=1e-3):
        raise QuestionError("the norms of this model stand on the residual stream, so its logits are no sum of parts")
    direction, offset = logit_direction(given, given.final_stack.final_norm, final, id)
    shares = [float(vector @ direction) for _, _, vector in parts]
    terms = [
        {"layer": layer, "part": part, "value": share} for (layer, part, _), share in zip(parts, shares, strict=True)
    ]
    logit, cap = float(at[id]), lm_head.softcap
    return {
        "token": [given.token_text(id), id],
        "row": row,
        "terms": terms,
        "offset": offset,
        "sum": sum(shares) + offset,
        "logit": logit if cap is None else cap * math.atanh(logit / cap),
        "softcap": cap,
        "python": session.opening(arguments)
        + "\nfrom clearhead.inspect.questions import Session\n"
        + f"\nfound = Session.of_inspection(inspection).ask('attribution', {{'row': {row}, 'token': {id}}})"
        + "\nfor term in found['terms']:\n    print(term['layer'], term['part'], term['value'])",
    }


def stream_parts(given: ModelInput, values: StepValues, row: int) -> list[tuple[str, str, torch.Tensor]]:
    """The vectors whose sum is the residual stream at one position: layer, branch, vector."""
    stack = given.final_stack_name
    parts = [("embedding", "", values[next(iter(given.residual_taps()))[1]][row].double())]
    for layer, block in enumerate(given.final_stack.layers()):
        for branch in ("mixer", "cross", "ffn"):
            path = f"{stack}.blocks.{layer}.{branch}_residual.inside"
            if path in values.block(stack, layer):
                scale = getattr(getattr(block, f"{branch}_residual", None), "scale", 1.0)
                parts.append((f"layer {layer}", branch, scale * values[path][row].double()))
    return parts


def logit_direction(given: ModelInput, norm: Any, x: torch.Tensor, token: int) -> tuple[torch.Tensor, float]:
    """The vector d and the offset with logit = x·d + offset, holding the norm's scale at its value for x."""
    model: Any = given.model
    with torch.no_grad():
        weight = model.head.weight
        if weight is None:
            weight = model.table
        w = matrix_row(weight, token) * model.head.scale
        if model.head.narrow is not None:
            w = w @ dense(model.head.narrow.weight).double()
        offset = 0.0 if model.head.bias is None else float(model.head.bias[token]) * model.head.scale
        if isinstance(norm, torch.nn.Identity):
            return w, offset
        gain = norm.weight.double() if hasattr(norm, "weight") else torch.ones_like(x)
        if isinstance(norm, RMSNorm | OffsetRMSNorm | PlainRMSNorm):
            gain = gain + (1.0 if isinstance(norm, OffsetRMSNorm) else 0.0)
            return gain * w * (x.square().mean() + norm.eps).rsqrt(), offset
        direction = gain * w * (x.var(unbiased=False) + norm.eps).rsqrt()
        bias = getattr(norm, "bias", None)
        return direction - direction.mean(), offset + (0.0 if bias is None else float(bias.double() @ w))


# ---- predictions and text


@question
def predictions(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The likeliest tokens at a position, with what temperature, top-k, top-p and min-p leave of them."""
    inspection, _ = session.pass_of(arguments)
    given, place = inspection.model_input, int(arguments.get("row", -1))
    at = logits_at(given, inspection.logits, place)
    answer = prediction_answer(given, at, arguments)
    code = f"\nfor text, id, probability in inspection.next({place}, 10):\n    print(repr(text), id, probability)"
    return answer | position_words(given, place) | {"python": session.opening(arguments) + code}


def position_words(given: ModelInput, row: int) -> Answer:
    """What a list of predictions is about, for the page to put into words."""
    return {"label": given.labels[row] if given.predicts_tokens else "", "predicts": given.prediction_kind}


def prediction_answer(given: Any, at: torch.Tensor, arguments: Mapping[str, Any]) -> Answer:
    plain = at.softmax(-1)[0]
    filtered = at
    seen = torch.zeros_like(at, dtype=torch.bool)
    stages = []
    for name, make in FILTERS.items():
        value = arguments.get(name)
        if value in (None, "", 0, 0.0) or (name in ("temperature", "top_p") and float(value) == 1):
            continue
        if float(value) < 0 or (name == "top_p" and float(value) > 1) or (name == "min_p" and float(value) > 1):
            raise QuestionError(
                f"{name} is {value}, but must be {'from 0 to 1' if name != 'temperature' else 'above 0'}"
            )
        filtered = make(int(value) if name == "top_k" else float(value))(filtered, seen)
        stages.append([name, int(torch.isfinite(filtered).sum())])
    after = filtered.softmax(-1)[0]
    count = min(int(arguments.get("top", 20)), len(plain))
    order = plain.topk(count).indices.tolist()
    return {
        "tokens": [
            {
                "text": given.token_text(id),
                "id": id,
                "logit": float(at[0, id]),
                "probability": float(plain[id]),
                "after": float(after[id]),
                "kept": bool(torch.isfinite(filtered[0, id])),
            }
            for id in order
        ],
        "kept": int(torch.isfinite(filtered).sum()),
        "vocabulary": len(plain),
        "stages": stages,
        "entropy": float(-(plain * plain.clamp(min=1e-30).log2()).sum()),
    }


@question
def generate(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """Generated text, token by token, with the alternatives at each step."""
    opened = session.model(session.model_name(arguments))
    inspection, _ = session.pass_of(arguments)
    given = inspection.model_input
    text, count = str(arguments.get("text", "")), min(int(arguments.get("count", 20)), 256)
    options: dict[str, Any] = {
        name: arguments[name] for name in ("temperature", "top_k", "top_p", "min_p") if arguments.get(name)
    }
    options.setdefault("temperature", 0.0)
    asked: Any = text if given.tokenizer is not None else given.inputs[0].tolist()
    (found,) = opened.generate([asked], max_new_tokens=count, seed=int(arguments.get("seed", 0)), **options)
    whole = [*given.inputs[0].tolist(), *found.tokens]
    with torch.inference_mode():
        logits = (
            opened(torch.tensor([whole]))[0, len(whole) - len(found.tokens) - 1 : -1].float() if found.tokens else []
        )
    steps = []
    labels = token_labels(given.tokenizer, whole)[-len(found.tokens) :] if found.tokens else []
    for label, id, line in zip(labels, found.tokens, logits, strict=True):
        chance = line.softmax(-1)
        best = chance.topk(5)
        steps.append(
            {
                "text": label,
                "id": id,
                "probability": float(chance[id]),
                "alternatives": [
                    [given.token_text(i), i, p]
                    for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
                ],
            }
        )
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
    call = f"model.generate([{asked!r}], max_new_tokens={count}, seed={int(arguments.get('seed', 0))}, {shown})"
    code = f"\n(found,) = {call}\nprint(found.text)"
    return {"text": found.text, "tokens": steps, "python": session.opening(arguments) + code}


@question
def chat(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The model's answer to the last message of a conversation."""
    opened = session.model(session.model_name(arguments))
    messages = [{"role": str(one["role"]), "content": str(one["content"])} for one in arguments["messages"]]
    last, earlier = messages[-1], list[Mapping[str, Any]](messages[:-1])
    options = {name: arguments[name] for name in ("temperature", "top_k", "top_p", "min_p") if arguments.get(name)}
    options |= {"max_new_tokens": min(int(arguments.get("count", 200)), 1024), "seed": int(arguments.get("seed", 0))}
    generator = TextGenerator.of(opened, **options)
    if opened.origin is None or generator.tokenizer is None:
        raise QuestionError("this model has no chat template")
    conversation = Conversation(generator, ChatTemplate.load(opened.origin, generator.tokenizer))
    conversation.messages = earlier
    said = ", ".join(f"{name}={value!r}" for name, value in options.items())
    code = f"""from pathlib import Path

import clearhead
from clearhead.generate.complete import TextGenerator
from clearhead.generate.conversation import Conversation
from clearhead.generate.template import ChatTemplate

model = clearhead.load({str(opened.origin)!r})
generator = TextGenerator.of(model, {said})
conversation = Conversation(generator, ChatTemplate.load(Path({str(opened.origin)!r}), generator.tokenizer))
conversation.messages = {earlier!r}
print("".join(conversation.reply({last["content"]!r})))"""
    return {"text": "".join(conversation.reply(last["content"])).strip(), "python": code}


@question
def continue_with(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The text followed by chosen tokens, for going on from an alternative."""
    inspection, _ = session.pass_of(arguments)
    given = inspection.model_input
    before, chosen = given.inputs[0].tolist(), [int(id) for id in arguments.get("ids", ())]
    row = int(arguments.get("row", -1))
    if 0 <= row < len(before) - 1:  # go on from an earlier position
        kept = before[: row + 1]
        if given.tokenizer is not None:
            return {"text": given.tokenizer.decode([*kept, *chosen])}
        before = kept
    if given.tokenizer is None:
        return {"text": " ".join(map(str, [*before, *chosen]))}
    whole = given.tokenizer.decode([*before, *chosen])
    known = given.tokenizer.decode(before)
    return {"text": str(arguments.get("text", "")) + whole[len(known) :]}


# ---- interventions


@question
def intervene(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The predictions at one position before and after a list of changes."""
    inspection, _ = session.pass_of(arguments)
    given, place = inspection.model_input, int(arguments.get("row", -1))
    wanted = list(arguments.get("changes", []))

    def other(text: str) -> Inspection:
        return session.pass_of({**arguments, "text": text})[0]

    before = logits_at(given, inspection.logits, place)
    after = logits_at(given, interventions.run_changed(wanted, inspection, other), place) if wanted else before
    code = (
        "\n"
        + interventions.python_code(wanted)
        + f"\nprint(logits[{f'0, {place}' if given.predicts_tokens else 0}].softmax(-1).topk(5))"
    )
    divergence = (before.softmax(-1) * (before.log_softmax(-1) - after.log_softmax(-1))).sum()
    return {
        "before": prediction_answer(given, before, {"top": 12})["tokens"],
        "after": prediction_answer(given, after, {"top": 12})["tokens"],
        "divergence": float(divergence),
        "python": session.opening(arguments) + code,
    } | position_words(given, place)


@question
def ablate(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The effect of removing one head on log p(token); the page asks head by head, so that it can stop."""
    inspection, _ = session.pass_of(arguments)
    each, place, token = find_map(inspection, arguments), int(arguments.get("row", -1)), arguments.get("token")
    at = logits_at(inspection.model_input, inspection.logits, place)[0].double().log_softmax(-1)
    id = (
        int(at.argmax())
        if token in (None, "")
        else inspection.model_input.find_token(token if isinstance(token, int) else str(token))
    )
    effect = ablate_layer(inspection.replay, each, id, place, [int(arguments.get("head", 0))]) - float(at[id])
    return {
        "effect": float(effect[0]),
        "token": [inspection.model_input.token_text(id), id],
        "python": session.opening(arguments) + f"\nprint(inspection.ablate({id}, {place}).values)",
    }


# ---- two texts or two models


@question
def compare(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """One head of two passes of equal size, and their difference; and how the predictions differ."""
    one, _ = session.pass_of(arguments)
    second = {
        **arguments,
        "model": arguments.get("other_model") or arguments.get("model"),
        "text": arguments.get("other_text") or arguments.get("text", ""),
    }
    two, _ = session.pass_of(second)
    each, other = find_map(one, arguments), find_map(two, arguments)
    number = int(arguments.get("head", 0))
    a, b = each.weights(number)[0], other.weights(number)[0]
    answer: Answer = {"first": a, "second": b, "labels": [one.names(each), two.names(other)]}
    if a.shape == b.shape:
        answer["difference"] = b - a
    which = f"({each.layer}, {number}, {each.place!r}).values"
    both = [
        session.opening(arguments).replace("inspection =", "one ="),
        session.opening(second).replace("inspection =", "two ="),
    ]
    return answer | {"python": "\n".join([*both, f"print(two.map{which} - one.map{which})"])}


@question
def defaults_of(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """How the checkpoint wants to be sampled."""
    inspection, _ = session.pass_of(arguments)
    config = default_decoding(inspection.model_input.model, inspection.model_input.tokenizer)
    return {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p, "min_p": config.min_p}
