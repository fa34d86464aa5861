"""A cell of a recorded pass, and the lines of arithmetic that explain it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from clearhead.nn.norm import HeadwiseNorm, LayerNorm, OffsetRMSNorm, PlainLayerNorm, PlainRMSNorm, RMSNorm
from clearhead.precision.matrix import Packed

if TYPE_CHECKING:
    from .inspection import Inspection

SHOWN = 24  # terms of a sum that are listed; the others are one term
OUTPUTS = ("head.logits", "head.classes", "head.pooled", "head.span")  # steps that are the model's output
WITHOUT_BATCH = {"sinks", "score_bias", "distances"}  # tables that all rows of a batch share


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
        if path in OUTPUTS and path not in self.inspection.values:
            return self.inspection.logits[0]
        block = len(parts) > 2 and parts[1] == "blocks"
        value = (self.block(parts[0], int(parts[2])) if block else self.inspection.values)[path]
        return value if WITHOUT_BATCH & {*parts} else value[0]

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

    def key_labels(self) -> list[str]:
        """The tokens that this cell's step reads: those of the source in cross-attention and in an encoder."""
        given = self.values.inspection.model_input
        of_source = ".cross." in self.path or self.path.startswith("encoder")
        return given.source_labels if of_source and given.source_labels else given.labels

    def key_names(self, count: int) -> list[str]:
        """A name for each of the keys; a Linformer reads mixtures of tokens."""
        labels = self.key_labels()
        return labels if len(labels) == count else [f"mixture {n}" for n in range(count)]

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
    """The norm of one vector of another step; a place without a norm passes the value through."""
    *row, d = cell.at
    x = cell.values[source][tuple(row)].double().cpu()
    if isinstance(module, nn.Identity):
        here = Term(f"x[{d}]", float(x[d]), (), source, cell.at)
        return [Stage("no norm here: the value passes through", float(x[d]), (here,))]
    return vector_norm(module, x, d, source, cell.at, head=row[0] if len(row) == 2 else 0)


def vector_norm(
    module: Any, x: Tensor, d: int, source: str = "", at: tuple[int, ...] = (), head: int = 0, over: str = ""
) -> list[Stage]:
    """γ·x/√(mean(x²) + ε), or γ·(x − μ)/√(σ² + ε) + β, at place d of a vector. `over` says what the vector is."""
    if isinstance(module, RMSNorm | OffsetRMSNorm | PlainRMSNorm):
        learned = 0.0 if isinstance(module, PlainRMSNorm) else float(module.weight[d])
        gain = learned + (0.0 if isinstance(module, RMSNorm) else 1.0)
        inverse = float((x.square().mean() + module.eps).rsqrt())
        terms = (Term("γ", gain), Term(f"x[{d}]", float(x[d]), (), source, at), Term("1/√(mean(x²) + ε)", inverse))
        return [Stage(f"γ·x/√(mean(x²) + ε){over}", gain * float(x[d]) * inverse, terms, "Π")]
    if not isinstance(module, LayerNorm | PlainLayerNorm | HeadwiseNorm):
        return []
    mean, deviation = float(x.mean()), float((x.var(unbiased=False) + module.eps).sqrt())
    gain = 1.0
    if isinstance(module, LayerNorm | HeadwiseNorm):
        gain = float(module.weight[head, d] if isinstance(module, HeadwiseNorm) else module.weight[d])
    scaled = gain * (float(x[d]) - mean) / deviation
    factors = (("γ", gain), ("x", float(x[d])), ("μ", mean), ("σ", deviation))
    sums = [Term("γ·(x − μ)/σ", scaled, factors, source, at)]
    if isinstance(module, LayerNorm) and module.bias is not None:
        sums.append(Term("β", float(module.bias[d])))
    formula = "γ·(x − μ)/√(σ² + ε)" + (" + β" if len(sums) > 1 else "") + over
    return [Stage(formula, sum(term.value for term in sums), tuple(sums))]
