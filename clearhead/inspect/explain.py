"""Where a number comes from: the terms of any cell of any step, each linked to the cell that it came from.

A stage is one line of arithmetic. `Σ` stages sum their terms, `Π` stages multiply them; the last stage's value is the
cell. For example, a weight of attention is the stages score − max, exp, and exp / Σ exp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.ffn import FeedForward, GatedFeedForward
from clearhead.nn.norm import LayerNorm, OffsetRMSNorm, RMSNorm
from clearhead.nn.rotary import Rotary
from clearhead.precision.matrix import Packed

from .inspection import Inspection

SHOWN = 24  # terms of a sum that are listed; the others are one term


@dataclass(frozen=True)
class Term:
    """One number of a sum or product, its factors, and the cell it came from."""

    name: str
    value: float
    factors: tuple[tuple[str, float], ...] = ()
    path: str = ""
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stage:
    formula: str
    value: float
    terms: tuple[Term, ...] = ()
    operation: str = "Σ"


@dataclass(frozen=True)
class Explanation:
    path: str
    index: tuple[int, ...]
    value: float
    stages: tuple[Stage, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        stages = [
            {
                "formula": stage.formula,
                "operation": stage.operation,
                "value": stage.value,
                "terms": [vars(term) for term in stage.terms],
            }
            for stage in self.stages
        ]
        return {"path": self.path, "index": self.index, "value": self.value, "stages": stages}


class StepValues(Mapping[str, Tensor]):
    """Every traced value of a recorded pass by its path, without the batch axis; blocks are replayed on request."""

    def __init__(self, inspection: Inspection) -> None:
        self.inspection = inspection
        self.blocks: dict[tuple[str, int], dict[str, Tensor]] = {}

    def __getitem__(self, path: str) -> Tensor:
        parts = path.split(".")
        if path == "head.logits" or path == "head.classes":
            return self.inspection.logits[0]
        if len(parts) > 2 and parts[1] == "blocks":
            return self.block(parts[0], int(parts[2]))[path][0]
        return self.inspection.values[path][0]

    def block(self, stack: str, layer: int) -> dict[str, Tensor]:
        if (stack, layer) not in self.blocks:
            self.blocks[stack, layer] = self.inspection.replay.block_values(stack, layer)
        return self.blocks[stack, layer]

    def bytes(self) -> int:
        kept = [*self.inspection.values.values(), self.inspection.logits]
        kept += [value for block in self.blocks.values() for value in block.values()]
        return sum(value.numel() * value.element_size() for value in kept)

    def __iter__(self) -> Any:
        return iter(self.inspection.values)

    def __len__(self) -> int:
        return len(self.inspection.values)


@torch.no_grad()
def explain(values: StepValues, path: str, index: Sequence[int]) -> Explanation:
    """The terms of one cell. A step without a rule has no stages."""
    at, value = tuple(index), values[path]
    if len(at) != value.dim() or any(not 0 <= i < n for i, n in zip(at, value.shape, strict=True)):
        raise ValueError(f"{path} is {list(value.shape)}, so it has no cell {list(at)}")
    found = float(value[at])
    rule = RULES.get(step_kind(path))
    stages = () if rule is None else tuple(rule(Cell(values, path, at, found)))
    return Explanation(path, at, found, stages)


def step_kind(path: str) -> str:
    """`stack.blocks.3.mixer.qkv` -> `mixer.qkv`; `stack.blocks.3.cross.weights` -> `mixer.weights`."""
    parts = path.split(".")
    if len(parts) > 3 and parts[1] == "blocks":
        kind = ".".join(parts[3:])
        return "mixer." + kind.removeprefix("cross.") if kind.startswith("cross.") else kind
    return parts[-1] if parts[-1] == "final_norm" else ".".join(parts)


@dataclass(frozen=True)
class Cell:
    """A cell of a step, and what its rule needs to find its neighbours."""

    values: StepValues
    path: str
    at: tuple[int, ...]
    value: float

    @property
    def model(self) -> nn.Module:
        return self.values.inspection.model_input.model

    @property
    def block(self) -> str:
        return ".".join(self.path.split(".")[:3])

    def near(self, name: str) -> str:
        """The path of another step of the same block."""
        return f"{self.block}.{name}"

    def module(self, path: str) -> Any:
        parts = path.split(".")
        if len(parts) > 2 and parts[1] == "blocks":
            block: Any = getattr(self.model, parts[0]).layers()[int(parts[2])]
            return block.get_submodule(".".join(parts[3:]))
        return self.model.get_submodule(path)

    def has(self, path: str) -> bool:
        try:
            self.values[path]
        except KeyError:
            return False
        return True


def top_terms(terms: list[Term]) -> tuple[Term, ...]:
    """The largest terms, and the rest as one."""
    if len(terms) <= SHOWN:
        return tuple(terms)
    order = sorted(terms, key=lambda term: -abs(term.value))
    rest = order[SHOWN - 1 :]
    return (*order[: SHOWN - 1], Term(f"{len(rest)} smaller terms", sum(term.value for term in rest)))


def matrix_row(weight: Any, row: int) -> Tensor:
    found = weight[row : row + 1].dense()[0] if isinstance(weight, Packed) else weight[row]
    return found.detach().double().cpu()


def linear_stage(cell: Cell, formula: str, source: str, at: tuple[int, ...], weight: Any, row: int, bias: Any) -> Stage:
    """Σ_j x_j·W[row, j] + b[row]."""
    x, w = cell.values[source][at].double().cpu(), matrix_row(weight, row)
    products = x * w
    terms = [
        Term(f"x[{j}]·W[{row},{j}]", float(products[j]), (("x", float(x[j])), ("W", float(w[j]))), source, (*at, j))
        for j in range(len(x))
    ]
    total = float(products.sum())
    if bias is not None:
        terms.append(Term(f"b[{row}]", float(bias[row])))
        total += float(bias[row])
    return Stage(formula, total, top_terms(terms))


def norm_stages(cell: Cell, module: Any, source: str) -> list[Stage]:
    """γ·x/√(mean(x²) + ε), or LayerNorm."""
    *row, d = cell.at
    x = cell.values[source][tuple(row)].double().cpu()
    here = Term(f"x[{d}]", float(x[d]), (), source, cell.at)
    if isinstance(module, nn.Identity):
        return [Stage("no norm here: the value passes through", float(x[d]), (here,))]
    if isinstance(module, LayerNorm):
        mean, deviation = float(x.mean()), float((x.var(unbiased=False) + module.eps).sqrt())
        gain = float(module.weight[d])
        scaled = gain * (float(x[d]) - mean) / deviation
        terms = [
            Term(
                "γ·(x − μ)/σ", scaled, (("γ", gain), ("x", float(x[d])), ("μ", mean), ("σ", deviation)), source, cell.at
            )
        ]
        if module.bias is not None:
            terms.append(Term("β", float(module.bias[d])))
        return [Stage("γ·(x − μ)/√(σ² + ε) + β", sum(term.value for term in terms), tuple(terms))]
    if not isinstance(module, RMSNorm | OffsetRMSNorm):
        return []
    gain = float(module.weight[d]) + (1.0 if isinstance(module, OffsetRMSNorm) else 0.0)
    inverse = float((x.square().mean() + module.eps).rsqrt())
    terms = [Term("γ", gain), here, Term("1/√(mean(x²) + ε)", inverse)]
    return [Stage("γ·x/√(mean(x²) + ε)", gain * float(x[d]) * inverse, tuple(terms), "Π")]


def block_source(cell: Cell, branch: str) -> str:
    """The stream that a residual branch of this block reads."""
    stack, _, layer, *_ = cell.path.split(".")
    order = [name for name in ("mixer", "cross", "ffn") if cell.has(cell.near(f"{name}_residual"))]
    before = order[: order.index(branch)] if branch in order else []
    if before:
        return cell.near(f"{before[-1]}_residual.after")
    return previous_output(cell, stack, int(layer))


def previous_output(cell: Cell, stack: str, layer: int) -> str:
    if layer == 0:
        return {"stack": "embedding", "encoder": "source", "decoder": "target"}[stack]
    from .model_input import block_output_tap

    blocks = cell.values.inspection.model_input.stacks()[stack]
    return f"{stack}.blocks.{layer - 1}.{block_output_tap(blocks[layer - 1])}"


def before(cell: Cell) -> list[Stage]:
    branch = cell.path.split(".")[3].removesuffix("_residual")
    return norm_stages(cell, cell.module(cell.path), block_source(cell, branch))


def after(cell: Cell) -> list[Stage]:
    return norm_stages(cell, cell.module(cell.path), cell.path.removesuffix(".after"))


def final_norm(cell: Cell) -> list[Stage]:
    stack = cell.path.split(".")[0]
    count = len(cell.values.inspection.model_input.stacks()[stack])
    return norm_stages(cell, cell.module(cell.path), previous_output(cell, stack, count))


def residual(cell: Cell) -> list[Stage]:
    branch = cell.path.split(".")[3].removesuffix("_residual")
    stream, inside = block_source(cell, branch), f"{cell.path}.inside"
    terms = (
        Term("x, the stream", float(cell.values[stream][cell.at]), (), stream, cell.at),
        Term(f"{branch}(x), the branch", float(cell.values[inside][cell.at]), (), inside, cell.at),
    )
    return [Stage("x + branch", sum(term.value for term in terms), terms)]


def inside(cell: Cell) -> list[Stage]:
    branch = cell.path.split(".")[3].removesuffix("_residual")
    source = cell.near(f"{branch}.{'down' if branch == 'ffn' else 'out'}")
    if not cell.has(source):
        return []
    block: Any = cell.module(cell.block + f".{branch}_residual")
    return norm_stages(cell, block.inside, source)


def qkv(cell: Cell) -> list[Stage]:
    (t, row), module = cell.at, cell.module(cell.near("mixer.qkv"))
    source = cell.near("mixer_residual.before")
    return [linear_stage(cell, "x·W_QKV", source, (t,), module.weight, row, module.bias)]


def split_head(cell: Cell) -> list[Stage]:
    """query, key and value are cut from one matrix product."""
    attention, name = cell.module(".".join(cell.path.split(".")[:4])), cell.path.rpartition(".")[2]
    if not isinstance(attention, MultiHeadAttention) or not cell.has(cell.near("mixer.qkv")) or ".cross." in cell.path:
        return []
    head, t, d = cell.at
    key, value = attention.widths
    start = {"query": 0, "key": attention.rows[0], "value": attention.rows[0] + attention.rows[1]}[name]
    column = start + head * (value if name == "value" else key) + d
    return [copy_stage(cell, f"head {head}: columns of x·W_QKV", cell.near("mixer.qkv"), (t, column))]


def copy_stage(cell: Cell, formula: str, source: str, at: tuple[int, ...]) -> Stage:
    value = float(cell.values[source][at])
    return Stage(formula, value, (Term(source.rpartition(".")[2], value, (), source, at),))


def rotated(cell: Cell) -> list[Stage]:
    """(a, b) ↦ (a·cos φ − b·sin φ, a·sin φ + b·cos φ)."""
    attention = cell.module(cell.near("mixer"))
    rotary = getattr(attention, "rotary", None)
    name = "query" if cell.path.endswith("query_rotated") else "key"
    source = cell.near(f"mixer.{name}_norm")
    head, t, d = cell.at
    if not isinstance(rotary, Rotary) or not cell.has(source):
        return []
    if d >= rotary.width:
        return [copy_stage(cell, "not rotated", source, cell.at)]
    halves, half = rotary.config.layout == "halves", rotary.width // 2
    pair = d % half if halves else d // 2
    second = d >= half if halves else d % 2 == 1
    other = (d - half if second else d + half) if halves else (d - 1 if second else d + 1)
    angle = t * rotary.frequencies[pair]
    cos, sin = (
        float(f(torch.tensor(angle, dtype=torch.float64))) * rotary.config.magnitude for f in (torch.cos, torch.sin)
    )
    own, mate = (float(cell.values[source][head, t, i]) for i in (d, other))
    sign = 1 if second else -1
    terms = (
        Term(f"{name}[{d}]·cos φ", own * cos, ((name, own), ("cos φ", cos)), source, (head, t, d)),
        Term(
            f"{'+' if second else '−'} {name}[{other}]·sin φ",
            sign * mate * sin,
            ((name, mate), ("sin φ", sin)),
            source,
            (head, t, other),
        ),
    )
    return [
        Stage(
            f"rotated by φ = {t}·{rotary.frequencies[pair]:.4g} = {angle:.4g} rad",
            sum(term.value for term in terms),
            terms,
        )
    ]


def attention_inputs(cell: Cell) -> tuple[str, str]:
    """The paths of the queries and keys that the scores compare."""
    layer = ".".join(cell.path.split(".")[:4])
    names = ("rotated", "norm") if cell.has(f"{layer}.query_rotated") else ("norm",)
    return f"{layer}.query_{names[0]}", f"{layer}.key_{names[0]}"


def scores(cell: Cell) -> list[Stage]:
    query, key = attention_inputs(cell)
    if not (cell.has(query) and cell.has(key)):
        return []
    head, i, j = cell.at
    q, k = cell.values[query].double(), cell.values[key].double()
    group = head // (q.shape[0] // k.shape[0])
    a, b = q[head, i], k[group, j]
    scale = len(a) ** -0.5
    products = a * b
    terms = [
        Term(f"q[{d}]·k[{d}]", float(products[d]), (("q", float(a[d])), ("k", float(b[d]))), query, (head, i, d))
        for d in range(len(a))
    ]
    stages = [Stage("q·k = Σ_d q_d·k_d", float(products.sum()), top_terms(terms))]
    scaled = float(products.sum()) * scale
    stages.append(Stage(f"÷ √{len(a)}", scaled, (Term("q·k", float(products.sum())), Term("1/√K", scale)), "Π"))
    if abs(cell.value - scaled) > 1e-3 * max(1.0, abs(cell.value)):
        stages.append(Stage("+ position bias", cell.value, (Term("q·k/√K", scaled), Term("bias", cell.value - scaled))))
    return stages


def weights(cell: Cell) -> list[Stage]:
    source = cell.path.removesuffix("weights") + "scores"
    if not cell.has(source):
        return []
    head, i, j = cell.at
    row = cell.values[source][head, i].double()
    allowed = cell.values[cell.path][head, i] > 0
    if not bool(allowed[j]):
        return [Stage("the mask hides this key: weight 0", 0.0)]
    shown = row.masked_fill(~allowed, -torch.inf)
    powers = (shown - shown.max()).exp()
    labels = cell.values.inspection.model_input
    names = labels.source_labels if ".cross." in cell.path and labels.source_labels else labels.labels
    terms = [
        Term(
            f"exp({float(row[k] - shown.max()):.3g}) for {names[k]!r}",
            float(powers[k]),
            (("score", float(row[k])),),
            source,
            (head, i, k),
        )
        for k in range(len(row))
        if bool(allowed[k])
    ]
    total, top = float(powers.sum()), float(powers[j])
    divide = (Term("exp(score − max)", top, (("score", float(row[j])),), source, (head, i, j)), Term("1/Σ", 1 / total))
    return [
        Stage("Σ_k exp(score_k − max)", total, top_terms(terms)),
        Stage("exp(score − max) / Σ", top / total, divide, "Π"),
    ]


def mixed(cell: Cell) -> list[Stage]:
    layer = cell.path.removesuffix(".mixed")
    if not (cell.has(f"{layer}.weights") and cell.has(f"{layer}.value")):
        return []
    head, i, d = cell.at
    w, v = cell.values[f"{layer}.weights"].double(), cell.values[f"{layer}.value"].double()
    group = head // (w.shape[0] // v.shape[0])
    products = w[head, i] * v[group, :, d]
    labels = cell.values.inspection.model_input
    names = labels.source_labels if ".cross." in cell.path and labels.source_labels else labels.labels
    terms = [
        Term(
            f"weight on {names[j]!r} · v",
            float(products[j]),
            (("weight", float(w[head, i, j])), ("v", float(v[group, j, d]))),
            f"{layer}.weights",
            (head, i, j),
        )
        for j in range(len(products))
        if float(w[head, i, j]) > 0
    ]
    return [Stage("Σ_j weight_j·v_j", float(products.sum()), top_terms(terms))]


def concat(cell: Cell) -> list[Stage]:
    source = cell.path.removesuffix("concat") + "mixed"
    t, column = cell.at
    width = cell.values[source].shape[2]
    return [
        copy_stage(
            cell, f"head {column // width}, number {column % width}", source, (column // width, t, column % width)
        )
    ]


def out(cell: Cell) -> list[Stage]:
    source, (t, row) = cell.path.removesuffix("out") + "concat", cell.at
    module = cell.module(cell.path)
    if not cell.has(source) or not isinstance(cell.module(cell.path.removesuffix(".out")), MultiHeadAttention):
        return []
    return [linear_stage(cell, "concat·W_O", source, (t,), module.weight, row, module.bias)]


def ffn_input(cell: Cell) -> str:
    source = cell.near("ffn_residual.before")
    return source if cell.has(source) else cell.near("norm")


def ffn_gate(cell: Cell) -> list[Stage]:
    return explain_activation(cell, "gate")


def explain_activation(cell: Cell, name: str) -> list[Stage]:
    layer = cell.module(cell.near("ffn"))
    t, row = cell.at
    matrix = getattr(layer, name)
    stage = linear_stage(cell, f"x·W_{name}", ffn_input(cell), (t,), matrix.weight, row, matrix.bias)
    return [stage, Stage(f"{layer.activation}(·)", cell.value, (Term(f"x·W_{name}", stage.value),))]


def ffn_up(cell: Cell) -> list[Stage]:
    layer = cell.module(cell.near("ffn"))
    if isinstance(layer, FeedForward):
        return explain_activation(cell, "up")
    if not isinstance(layer, GatedFeedForward):
        return []
    t, row = cell.at
    stage = linear_stage(cell, "x·W_up", ffn_input(cell), (t,), layer.up.weight, row, layer.up.bias)
    gate = cell.near("ffn.gate")
    value = float(cell.values[gate][t, row])
    return [
        stage,
        Stage(
            "gate ⊙ x·W_up",
            value * stage.value,
            (Term("gate", value, (), gate, cell.at), Term("x·W_up", stage.value)),
            "Π",
        ),
    ]


def ffn_down(cell: Cell) -> list[Stage]:
    layer = cell.module(cell.near("ffn"))
    if not isinstance(layer, FeedForward | GatedFeedForward):
        return []
    (t, row), source = cell.at, cell.near("ffn.up")
    return [linear_stage(cell, "hidden·W_down", source, (t,), layer.down.weight, row, layer.down.bias)]


def logits(cell: Cell) -> list[Stage]:
    model: Any = cell.model
    t, token = cell.at
    stack = cell.values.inspection.model_input.final_stack_name
    if model.config.head.kind() != "LMHead":
        return []
    weight = model.head.weight
    if weight is None:
        embedding = model.embedding if hasattr(model, "embedding") else model.target or model.source
        weight = embedding.table
    return [linear_stage(cell, "x·W_vocabulary", f"{stack}.final_norm", (t,), weight, token, model.head.bias)]


def embedding(cell: Cell) -> list[Stage]:
    parts = [name for name in ("tokens", "position", "segments") if cell.has(f"{cell.path}.{name}")]
    if "tokens" not in parts:
        return []
    terms = tuple(
        Term(
            {"tokens": "token", "position": "position", "segments": "segment"}[name],
            float(cell.values[f"{cell.path}.{name}"][cell.at]),
            (),
            f"{cell.path}.{name}",
            cell.at,
        )
        for name in parts
    )
    total = sum(term.value for term in terms)
    norm = cell.module(f"{cell.path}.norm")
    stages = [Stage(" + ".join(term.name for term in terms), total, terms)]
    if not isinstance(norm, nn.Identity):
        stages.append(Stage("normalized over the row", cell.value, (Term("sum", total),)))
    return stages


def embedding_tokens(cell: Cell) -> list[Stage]:
    given, module = cell.values.inspection.model_input, cell.module(cell.path.rpartition(".")[0])
    ids = given.source if cell.path.startswith("source") else given.inputs
    assert ids is not None, "a source embedding has a source"
    token, d = int(ids[0, cell.at[0]]), cell.at[1]
    entry = float(matrix_row(module.table, token)[d])
    terms = [Term(f"table[{token}, {d}]", entry)]
    if module.scale != 1.0:
        terms.append(Term("√D", module.scale))
    return [Stage("row of the embedding table", entry * module.scale, tuple(terms), "Π")]


RULES: dict[str, Callable[[Cell], list[Stage]]] = {
    "embedding": embedding,
    "source": embedding,
    "target": embedding,
    "embedding.tokens": embedding_tokens,
    "source.tokens": embedding_tokens,
    "target.tokens": embedding_tokens,
    "final_norm": final_norm,
    "mixer.qkv": qkv,
    "mixer.query": split_head,
    "mixer.key": split_head,
    "mixer.value": split_head,
    "mixer.query_rotated": rotated,
    "mixer.key_rotated": rotated,
    "mixer.scores": scores,
    "mixer.weights": weights,
    "mixer.mixed": mixed,
    "mixer.concat": concat,
    "mixer.out": out,
    "ffn.gate": ffn_gate,
    "ffn.up": ffn_up,
    "ffn.down": ffn_down,
    "head.logits": logits,
    **{
        f"{branch}_residual{place}": rule
        for branch in ("mixer", "cross", "ffn")
        for place, rule in {"": residual, ".before": before, ".after": after, ".inside": inside}.items()
    },
}
"""By kind of step. Steps of other mixers (Mamba, LSTM, experts) show their values without terms."""
