"""Rules of `explain` for parts beyond plain attention: cross and latent attention, experts, images, heads.

Each rule takes a `Cell` and returns the stages of its arithmetic. `explain.RULES` lists them by kind of step; the rules
of mixers without softmax attention are in `explain_mixers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.configs import ClampedFeedForwardConfig
from clearhead.functional import ACTIVATIONS
from clearhead.functional.positions import relative_bias
from clearhead.nn.embedding import PatchEmbedding, WidenedEmbedding
from clearhead.nn.heads import LastToken, MeanPool
from clearhead.nn.latent import LatentAttention
from clearhead.nn.moe import GroupedChoice, InputWeightedMoE, MoE, SigmoidChoice
from clearhead.nn.norm import ProjectionNorm
from clearhead.nn.positions import Alibi, Learned
from clearhead.nn.rotary import DualChunk, QueryScale, Rotary
from clearhead.reference.positions import alibi_slopes

from .cells import Cell, Stage, Term, linear_stage, norm_stages, top_terms, vector_norm

Rule = Callable[[Cell], list[Stage]]


def layer_of(cell: Cell) -> Any:
    """The module that a step belongs to: `….mixer.scores` -> the mixer. A target may share the source's embedding."""
    path = cell.path.rpartition(".")[0]
    shared = path == "target" and getattr(cell.model, "target", None) is None
    return cell.module("source" if shared else path)


def branch_input(cell: Cell) -> str:
    """The normed stream that this block's branch reads."""
    own = cell.near(f"{cell.path.split('.')[3]}_residual.before")
    return own if cell.has(own) else cell.near("norm")  # both branches of a parallel block read one norm


def beside(cell: Cell, name: str) -> str:
    """Another step of the same layer."""
    return f"{cell.path.rpartition('.')[0]}.{name}"


def linear_rule(formula: str, matrix: str, source: str = "") -> Rule:
    """x·W of a matrix of the layer, reading another step of it or, without a name, the branch's input."""

    def rule(cell: Cell) -> list[Stage]:
        layer, (t, row) = layer_of(cell), cell.at
        module = getattr(layer, matrix)
        read = beside(cell, source) if source else branch_input(cell)
        return [linear_stage(cell, formula, read, (t,), module.weight, row, module.bias)]

    return rule


def act_stage(name: str, before: Stage, value: float) -> Stage:
    return Stage(f"{name}(·)", value, (Term(before.formula, before.value),))


# ---- cross-attention and norms of queries and keys


def cross_projection(cell: Cell) -> list[Stage]:
    """Queries read the decoder's stream; keys and values read the encoder's output."""
    attention, name, (head, t, d) = layer_of(cell), cell.path.rpartition(".")[2], cell.at
    key, value = attention.widths
    start = {"query": 0, "key": attention.rows[0], "value": attention.rows[0] + attention.rows[1]}[name]
    row = start + head * (value if name == "value" else key) + d
    source = branch_input(cell) if name == "query" else "encoder.final_norm"
    formula, module = f"x·W_{name[0].upper()}", attention.qkv
    return clip_stages(linear_stage(cell, formula, source, (t,), module.weight, row, module.bias), attention.clip)


def head_norm(cell: Cell) -> list[Stage]:
    """The norm of one head's query or key, or of all heads together."""
    layer, name = layer_of(cell), cell.path.rpartition(".")[2]
    module = getattr(layer, name)
    if isinstance(layer, LatentAttention):
        return norm_stages(cell, module, beside(cell, "query_down"))
    source = beside(cell, name.removesuffix("_norm"))
    if not isinstance(module, ProjectionNorm):
        return norm_stages(cell, module, source)
    head, t, d = cell.at
    joint = cell.values[source][:, t].flatten().double().cpu()
    at = head * cell.values[source].shape[2] + d
    return vector_norm(module.norm, joint, at, source, cell.at, over=" over all heads")


def clip_stages(stage: Stage, limit: float | None) -> list[Stage]:
    """A stage, and what a limit leaves of it."""
    if limit is None:
        return [stage]
    cut = min(max(stage.value, -limit), limit)
    return [stage, Stage(f"clipped to ±{limit:g}", cut, (Term(stage.formula, stage.value),))]


# ---- rotation


def rotation_stage(
    rotary: Rotary, name: str, source: str, place: Callable[[int], tuple[int, ...]], cell: Cell, t: int, d: int
) -> Stage:
    """(a, b) ↦ (a·cos φ − b·sin φ, a·sin φ + b·cos φ)."""
    halves, half = rotary.config.layout == "halves", rotary.width // 2
    pair, second = (d % half, d >= half) if halves else (d // 2, d % 2 == 1)
    other = (d - half if second else d + half) if halves else (d - 1 if second else d + 1)
    frequency = rotary_frequency(rotary, pair, cell)
    angle = t * frequency
    cos, sin = math.cos(angle) * rotary.config.magnitude, math.sin(angle) * rotary.config.magnitude
    own, mate = (float(cell.values[source][place(i)]) for i in (d, other))
    sign, mark = (1, "+") if second else (-1, "−")
    terms = (
        Term(f"{name}[{d}]·cos φ", own * cos, ((name, own), ("cos φ", cos)), source, place(d)),
        Term(f"{mark} {name}[{other}]·sin φ", sign * mate * sin, ((name, mate), ("sin φ", sin)), source, place(other)),
    )
    formula = f"rotated by φ = {t}·{frequency:.4g} = {angle:.4g} rad"
    return Stage(formula, sum(term.value for term in terms), terms)


def rotary_frequency(rotary: Rotary, pair: int, cell: Cell) -> float:
    """Radians per position; a dynamic scaling depends on the length of the text."""
    if not rotary.config.varies:
        return float(rotary.frequencies[pair])
    length = len(cell.key_labels())
    return float(rotary.config.frequencies(rotary.head_dim, length)[pair])


def rotated(cell: Cell) -> list[Stage]:
    layer, kind = layer_of(cell), cell.path.rpartition(".")[2]
    if isinstance(layer, LatentAttention):
        return latent_query_rotated(cell, layer)
    name = "key" if kind == "key_rotated" else "query"
    rotary, source, (head, t, d) = getattr(layer, "rotary", None), beside(cell, f"{name}_norm"), cell.at
    turned = t
    if isinstance(rotary, QueryScale):
        if name == "key":
            return [copy_stage(cell, "unchanged", source, cell.at)]
        scale = 1 + rotary.config.strength * math.log1p((t + 1) // rotary.config.every)
        value = float(cell.values[source][cell.at])
        terms = (Term("query", value, (), source, cell.at), Term("scale of the position", scale))
        return [Stage(rotary.config.formulas[0], value * scale, terms, "Π")]
    if isinstance(rotary, DualChunk):  # positions start again in every chunk
        turned = int(rotary.config.places(torch.tensor(t))["query_rotated" if name == "key" else kind])
        rotary = rotary.rotary
    if not isinstance(rotary, Rotary) or not cell.has(source):
        return []
    if d >= rotary.width:
        return [copy_stage(cell, "not rotated", source, cell.at)]
    return [rotation_stage(rotary, name, source, lambda i: (head, t, i), cell, turned, d)]


def copy_stage(cell: Cell, formula: str, source: str, at: tuple[int, ...]) -> Stage:
    value = float(cell.values[source][at])
    return Stage(formula, value, (Term(source.rpartition(".")[2], value, (), source, at),))


# ---- latent attention


def latent_query_rotated(cell: Cell, layer: LatentAttention) -> list[Stage]:
    (head, t, d), c = cell.at, layer.config
    source, start = beside(cell, "query"), head * (c.plain_dim + c.rope_dim)
    if d < c.plain_dim:
        return [copy_stage(cell, f"head {head}, without position", source, (t, start + d))]
    shift = start + c.plain_dim
    return [rotation_stage(layer.rotary, "query", source, lambda i: (t, shift + i), cell, t, d - c.plain_dim)]


def latent_query(cell: Cell) -> list[Stage]:
    layer, (t, row) = layer_of(cell), cell.at
    source = beside(cell, "query_norm")
    read = source if cell.has(source) else branch_input(cell)
    return [linear_stage(cell, "x·W_Q", read, (t,), layer.query.weight, row, layer.query.bias)]


def latent_norm(cell: Cell) -> list[Stage]:
    layer, (t, d) = layer_of(cell), cell.at
    source = beside(cell, "down")
    x = cell.values[source][t, : layer.config.latent_dim].double().cpu()
    return vector_norm(layer.latent_norm, x, d, source, (t, d), over=" of the latent")


def rope_key(cell: Cell) -> list[Stage]:
    layer, (_, t, d) = layer_of(cell), cell.at
    shift = layer.config.latent_dim
    return [rotation_stage(layer.rotary, "key", beside(cell, "down"), lambda i: (t, shift + i), cell, t, d)]


def latent_parts(cell: Cell, layer: LatentAttention) -> tuple[Tensor, Tensor]:
    """Keys and values of every head, H S K and H S U."""
    c, up, rope = layer.config, cell.values[beside(cell, "up")].double(), cell.values[beside(cell, "rope_key")].double()
    made = up.unflatten(-1, (c.heads, -1)).movedim(1, 0)
    key, value = made.split((c.plain_dim, c.value_dim), dim=-1)
    return torch.cat((key, rope.expand(c.heads, -1, -1)), dim=-1), value


def latent_scores(cell: Cell) -> list[Stage]:
    layer, (head, i, j) = layer_of(cell), cell.at
    keys, _ = latent_parts(cell, layer)
    source = beside(cell, "query_rotated")
    q, k = cell.values[source][head, i].double(), keys[head, j]
    return score_stages(q, k, source, (head, i), layer.config.scale)


def score_stages(
    q: Tensor,
    k: Tensor,
    source: str,
    at: tuple[int, ...],
    scale: float | None = None,
    softcap: float | None = None,
    bias: float | None = None,
) -> list[Stage]:
    """q·k, its scale, its cap, and the position bias that is added to a score."""
    products, factor = q * k, len(q) ** -0.5 if scale is None else scale
    total = float(products.sum())
    terms = [
        Term(f"q[{d}]·k[{d}]", float(products[d]), (("q", float(q[d])), ("k", float(k[d]))), source, (*at, d))
        for d in range(len(q))
    ]
    name = f"÷ √{len(q)}" if scale is None else f"× {factor:.4g}"
    stages = [
        Stage("q·k = Σ_d q_d·k_d", total, top_terms(terms)),
        Stage(name, total * factor, (Term("q·k", total), Term("1/√K" if scale is None else "scale", factor)), "Π"),
    ]
    if softcap is not None:
        stages.append(cap_stage(stages[-1], softcap))
    if bias is not None:
        both = (Term("q·k/√K" if softcap is None else "capped", stages[-1].value), Term("bias", bias))
        stages.append(Stage("+ position bias", stages[-1].value + bias, both))
    return stages


def cap_stage(before: Stage, cap: float) -> Stage:
    value = cap * math.tanh(before.value / cap)
    return Stage(f"{cap:g}·tanh(· / {cap:g})", value, (Term(before.formula, before.value),))


def position_bias(cell: Cell, head: int, i: int, j: int) -> float | None:
    """What ALiBi, or the bias that all layers of a stack share (T5), adds to a score."""
    own, stack = getattr(layer_of(cell), "score_bias", None), cell.module(cell.path.split(".")[0])
    if isinstance(own, Alibi):
        return float(-own.scale * alibi_slopes(own.heads)[head] * abs(i - j))
    if stack.score_bias is None or ".cross." in cell.path:
        return None
    shared = stack.score_bias
    bias = relative_bias(torch.tensor([[j - i]]), shared.weight, torch.tensor(shared.starts), shared.mirrored)
    return float(bias[head, 0, 0])


def latent_mixed(cell: Cell) -> list[Stage]:
    layer, (head, i, d) = layer_of(cell), cell.at
    _, values = latent_parts(cell, layer)
    return [mix_stage(cell, beside(cell, "weights"), head, i, values[head, :, d])]


def mix_stage(cell: Cell, path: str, head: int, i: int, values: Tensor) -> Stage:
    """Σ_j weight_j·v_j, a term for each token that is read."""
    weights = cell.values[path][head, i].double()
    names = cell.key_names(len(weights))
    terms = [
        Term(
            f"weight on {names[j]!r} · v",
            float(weights[j] * values[j]),
            (("weight", float(weights[j])), ("v", float(values[j]))),
            path,
            (head, i, j),
        )
        for j in range(len(values))
        if float(weights[j]) != 0
    ]
    return Stage("Σ_j weight_j·v_j", float((weights * values).sum()), top_terms(terms))


# ---- feed-forward layers and experts


def ffn_input(cell: Cell) -> str:
    names = ("ffn_residual.before", "ffn_norm", "norm")
    return next(path for name in names if cell.has(path := cell.near(name)))


def open_gate(layer: Any, stage: Stage) -> list[Stage]:
    """The activation of a gate, or of a layer without a gate."""
    config = getattr(layer, "config", None)
    if isinstance(config, ClampedFeedForwardConfig):
        cut = min(stage.value, config.limit)
        share = 1 / (1 + math.exp(-config.steepness * cut))
        return [
            Stage(f"min(·, {config.limit:g})", cut, (Term(stage.formula, stage.value),)),
            Stage(f"x·σ({config.steepness:g}·x)", cut * share, (Term("x", cut), Term("σ", share)), "Π"),
        ]
    activation = layer.activation if config is None else config.activation
    value = ACTIVATIONS[activation](torch.tensor(stage.value, dtype=torch.float64))
    return [act_stage(activation, stage, float(value))]


def pass_gate(layer: Any, stage: Stage, gate: Term) -> list[Stage]:
    """gate ⊙ x·W_up; a clamped layer limits x·W_up and adds 1 first."""
    config, passed, name, stages = getattr(layer, "config", None), stage.value, "x·W_up", [stage]
    if isinstance(config, ClampedFeedForwardConfig):
        cut = min(max(stage.value, -config.limit), config.limit)
        passed, name = cut + 1, "clipped x·W_up + 1"
        stages.append(Stage(f"clipped to ±{config.limit:g}, + 1", passed, (Term("clipped", cut), Term("1", 1.0))))
    return [*stages, Stage(f"gate ⊙ {name}", gate.value * passed, (gate, Term(name, passed)), "Π")]


def ffn_inner(cell: Cell) -> list[Stage]:
    """gate and up of a feed-forward layer: an activation of x·W, or gate ⊙ x·W_up."""
    layer, name, (t, row) = layer_of(cell), cell.path.rpartition(".")[2], cell.at
    matrix = getattr(layer, name)
    stage = linear_stage(cell, f"x·W_{name}", ffn_input(cell), (t,), matrix.weight, row, matrix.bias)
    gate = beside(cell, "gate")
    if name == "up" and hasattr(layer, "gate"):
        return pass_gate(layer, stage, Term("gate", float(cell.values[gate][t, row]), (), gate, cell.at))
    return [stage, *open_gate(layer, stage)]


def ffn_down(cell: Cell) -> list[Stage]:
    layer, (t, row) = layer_of(cell), cell.at
    return [linear_stage(cell, "hidden·W_down", beside(cell, "up"), (t,), layer.down.weight, row, layer.down.bias)]


def switch(cell: Cell) -> list[Stage]:
    """σ(x·w): how much of the shared expert a token lets through."""
    stage = linear_stage(cell, "x·w", ffn_input(cell), (cell.at[0],), layer_of(cell).switch.weight, 0, None)
    return [stage, act_stage("σ", stage, float(torch.tensor(stage.value, dtype=torch.float64).sigmoid()))]


def router(cell: Cell) -> list[Stage]:
    moe, (t, expert) = layer_of(cell), cell.at
    source, bias = ffn_input(cell), moe.router.bias
    stage = linear_stage(cell, "x·W_router", source, (t,), moe.router.weight, expert, bias)
    if isinstance(moe.choice, GroupedChoice | SigmoidChoice):
        return [stage, act_stage("sigmoid", stage, float(torch.tensor(stage.value, dtype=torch.float64).sigmoid()))]
    scores = moe.router.weight.double() @ cell.values[source][t].double() + (0 if bias is None else bias.double())
    powers = (scores - scores.max()).exp()
    terms = [Term(f"exp(score) of expert {n}", float(power)) for n, power in enumerate(powers)]
    top, total = float(powers[expert]), float(powers.sum())
    share = Stage("exp(score − max) / Σ", top / total, (Term("exp(score − max)", top), Term("1/Σ", 1 / total)), "Π")
    return [stage, Stage("Σ exp(score − max)", total, top_terms(terms)), share]


def chosen_experts(cell: Cell, moe: MoE, t: int) -> list[int]:
    ranks = moe.choice.rank(cell.values[cell.near("ffn.router")][None, t : t + 1])
    return [int(n) for n in ranks.topk(moe.active, dim=-1).indices[0, 0]]


def expert_weight(cell: Cell) -> list[Stage]:
    moe, (t, a) = layer_of(cell), cell.at
    source, experts = beside(cell, "router"), chosen_experts(cell, layer_of(cell), cell.at[0])
    p = [float(cell.values[source][t, expert]) for expert in experts]
    terms = [Term(f"p of expert {experts[a]}", p[a], (), source, (t, experts[a]))]
    if moe.normalised:
        terms.append(Term("1/Σ of the chosen", 1 / sum(p)))
    if moe.scale != 1:
        terms.append(Term("scale", moe.scale))
    return [Stage("weight of this expert", math.prod(term.value for term in terms), tuple(terms), "Π")]


def expert_inner(cell: Cell) -> list[Stage]:
    """gate, up and down of the a-th expert that a token chose."""
    moe, name, (t, row, a) = cell.module(cell.near("ffn")), cell.path.rpartition(".")[2], cell.at
    expert, layer = chosen_experts(cell, moe, t)[a], moe.experts
    matrix = getattr(layer, name)
    bias = None if matrix.bias is None else matrix.bias[expert]
    if name == "down":
        hidden = beside(cell, "up")
        x, w = cell.values[hidden][t, :, a].double().cpu(), matrix.weight[expert, row].double().cpu()
        terms = [
            Term(f"h[{j}]·W[{row},{j}]", float(u * v), (("h", float(u)), ("W", float(v))), hidden, (t, j, a))
            for j, (u, v) in enumerate(zip(x, w, strict=True))
        ]
        terms += [] if bias is None else [Term("b", float(bias[row]))]
        return [Stage(f"expert {expert}: hidden·W_down", sum(term.value for term in terms), top_terms(terms))]
    stage = linear_stage(cell, f"expert {expert}: x·W_{name}", ffn_input(cell), (t,), matrix.weight[expert], row, bias)
    if isinstance(moe, InputWeightedMoE):  # a matrix times p·x is p times the matrix times x
        weight, chosen = float(cell.values[cell.near("ffn.chosen")][t, a]), cell.near("ffn.chosen")
        added = 0.0 if bias is None else float(bias[row])
        both = (Term("x·W", stage.value - added), Term("weight", weight, (), chosen, (t, a)))
        stage = Stage(f"expert {expert}: (p·x)·W_{name}", (stage.value - added) * weight + added, both, "Π")
    if name == "up" and layer.gated:
        gate = float(cell.values[beside(cell, "gate")][t, row, a])
        return pass_gate(layer, stage, Term("gate", gate, (), beside(cell, "gate"), cell.at))
    return [stage, *open_gate(layer, stage)]


def expert_sum(cell: Cell) -> list[Stage]:
    """What experts add to the stream: Σ weight·expert(x), and the shared expert."""
    (t, d), moe = cell.at, cell.module(cell.near("ffn"))
    weights, down = cell.near("ffn.chosen"), cell.near("ffn.experts.down")
    counts = [1.0 if isinstance(moe, InputWeightedMoE) else float(weight) for weight in cell.values[weights][t]]
    terms = [
        Term(
            f"expert {expert}",
            counts[a] * float(cell.values[down][t, d, a]),
            (("weight", counts[a]), ("expert(x)", float(cell.values[down][t, d, a]))),
            down,
            (t, d, a),
        )
        for a, expert in enumerate(chosen_experts(cell, moe, t))
    ]
    shared, gated, switch = (cell.near(f"ffn.shared.{name}") for name in ("down", "ffn.down", "switch"))
    if cell.has(shared):
        terms.append(Term("shared expert", float(cell.values[shared][t, d]), (), shared, (t, d)))
    if cell.has(gated):
        passed, made = float(cell.values[switch][t, 0]), float(cell.values[gated][t, d])
        factors = (("switch", passed), ("expert(x)", made))
        terms.append(Term("switch · shared expert", passed * made, factors, gated, (t, d)))
    return [Stage("Σ weight·expert(x)", sum(term.value for term in terms), tuple(terms))]


# ---- embeddings and heads


def position(cell: Cell) -> list[Stage]:
    """A row of a learned table, or sines and cosines."""
    module, (t, d) = layer_of(cell).position, cell.at
    if isinstance(module, Learned):
        entry = float(module.weight[t, d])
        return [Stage("row of the position table", entry, (Term(f"table[{t}, {d}]", entry),))]
    config, half = module.config, module.dim // 2
    pair, odd = (d % half, d >= half) if config.layout == "halves" else (d // 2, d % 2 == 1)
    angle = (t + config.start) * config.base ** (-2 * pair / module.dim)
    wave, name = (math.cos, "cos") if odd else (math.sin, "sin")
    value = wave(angle)
    return [
        Stage(f"{name}(position / {config.base:g}^(2i/D)), i = {pair}", value, (Term(f"{name}({angle:.4g})", value),))
    ]


def segments(cell: Cell) -> list[Stage]:
    d = cell.at[1]
    entry = float(layer_of(cell).segments.weight[0, d])
    return [Stage("row of the segment table", entry, (Term(f"table[0, {d}]", entry),))]


def embedding_norm(cell: Cell) -> list[Stage]:
    """The norm of the sum of token, position and segment."""
    embedding, (t, d) = layer_of(cell), cell.at
    first = "projection" if isinstance(embedding, WidenedEmbedding) else "tokens"
    parts = [name for name in (first, "position", "segments") if cell.has(beside(cell, name))]
    total = torch.stack([cell.values[beside(cell, name)][t].double().cpu() for name in parts]).sum(0)
    terms = tuple(
        Term(name, float(cell.values[beside(cell, name)][t, d]), (), beside(cell, name), (t, d)) for name in parts
    )
    stage = Stage(" + ".join(parts), float(total[d]), terms)
    return [stage, *vector_norm(embedding.norm, total, d)]


def embedding_projection(cell: Cell) -> list[Stage]:
    embedding, (t, row) = layer_of(cell), cell.at
    module = embedding.projection
    source = beside(cell, "tokens" if isinstance(embedding, WidenedEmbedding) else "norm")
    return [linear_stage(cell, "x·W", source, (t,), module.weight, row, module.bias)]


def patches(cell: Cell) -> list[Stage]:
    """Pixels of one patch · W."""
    embedding, (patch, row) = layer_of(cell), cell.at
    pixels = patch_pixels(embedding, cell.values.inspection.model_input.inputs)[patch].double().cpu()
    w = embedding.patches.weight[row].double().cpu()
    terms = [Term(f"pixel {j}·W", float(pixels[j] * w[j]), (("pixel", float(pixels[j])),)) for j in range(len(w))]
    terms.append(Term("b", float(embedding.patches.bias[row])))
    return [Stage("pixels·W + b", sum(term.value for term in terms), top_terms(terms))]


def patch_pixels(embedding: PatchEmbedding, images: Tensor) -> Tensor:
    cut = images.unfold(2, embedding.patch, embedding.patch).unfold(3, embedding.patch, embedding.patch)
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)[0]


def class_token(cell: Cell) -> list[Stage]:
    t, d = cell.at
    if t == 0:
        entry = float(layer_of(cell).class_token[d])
        return [Stage("the learned class token", entry, (Term(f"class_token[{d}]", entry),))]
    return [copy_stage(cell, f"patch {t - 1}", beside(cell, "patches"), (t - 1, d))]


def final_norm_path(cell: Cell) -> str:
    return f"{cell.values.inspection.model_input.final_stack_name}.final_norm"


def head_linear(matrix: str, *sources: str) -> Rule:
    """A matrix of the head, from another step of it or from the final norm."""

    def rule(cell: Cell) -> list[Stage]:
        layer, (*row, d) = layer_of(cell), cell.at
        read = next((path for path in sources if cell.has(path)), final_norm_path(cell))
        at = tuple(row) if row else ((0,) if cell.values[read].dim() == 2 else ())
        module = getattr(layer, matrix)
        return [linear_stage(cell, "x·W + b", read, at, module.weight, d, module.bias)]

    return rule


def head_dense(cell: Cell) -> list[Stage]:
    """The activation of a dense layer, in a masked language model's head or in a pooler."""
    (stage,) = head_linear("dense")(cell)
    named = layer_of(cell).activation
    function = ACTIVATIONS[named] if isinstance(named, str) else named
    word = named if isinstance(named, str) else next((name for name, f in ACTIVATIONS.items() if f is named), "tanh")
    return [stage, act_stage(word, stage, float(function(torch.tensor(stage.value, dtype=torch.float64))))]


def head_norm_of_dense(cell: Cell) -> list[Stage]:
    return norm_stages(cell, layer_of(cell).norm, "head.dense")


def pool_stages(cell: Cell) -> list[Stage]:
    """One vector for the whole text: that of the first or last position, or the mean."""
    source, (d,), pool = final_norm_path(cell), cell.at, layer_of(cell)
    x = cell.values[source]
    if isinstance(pool, MeanPool):
        names = cell.values.inspection.model_input.labels
        terms = [Term(repr(names[t]), float(x[t, d]) / len(x), (), source, (t, d)) for t in range(len(x))]
        return [Stage("mean over positions", sum(term.value for term in terms), top_terms(terms))]
    last = isinstance(pool, LastToken)
    at = len(x) - 1 if last else 0
    return [copy_stage(cell, "the last position" if last else "the first position", source, (at, d))]
