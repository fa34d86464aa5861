"""Rules of `explain` for parts beyond plain attention: cross and latent attention, experts, Mamba, LSTM, images, heads.

Each rule takes a `Cell` and returns the stages of its arithmetic. `explain.RULES` lists them by kind of step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.functional import ACTIVATIONS
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.embedding import PatchEmbedding
from clearhead.nn.latent import LatentAttention
from clearhead.nn.lstm import LSTM
from clearhead.nn.mamba import Mamba
from clearhead.nn.moe import MoE
from clearhead.nn.norm import ProjectionNorm
from clearhead.nn.positions import Learned
from clearhead.nn.rotary import Rotary

from .cells import Cell, Stage, Term, linear_stage, norm_stages, top_terms

Rule = Callable[[Cell], list[Stage]]


def layer_of(cell: Cell) -> Any:
    """The module that a step belongs to: `….mixer.scores` -> the mixer. A target may share the source's embedding."""
    path = cell.path.rpartition(".")[0]
    shared = path == "target" and getattr(cell.model, "target", None) is None
    return cell.module("source" if shared else path)


def branch_input(cell: Cell) -> str:
    """The normed stream that this block's branch reads."""
    branch = cell.path.split(".")[3]
    return cell.near(f"{branch}_residual.before")


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
    return [linear_stage(cell, f"x·W_{name[0].upper()}", source, (t,), attention.qkv.weight, row, attention.qkv.bias)]


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
    gain, inverse = float(module.norm.weight[at]), float((joint.square().mean() + module.norm.eps).rsqrt())
    terms = (
        Term("γ", gain),
        Term(f"x[{d}]", float(joint[at]), (), source, cell.at),
        Term("1/√(mean(x²) + ε)", inverse),
    )
    return [Stage("γ·x/√(mean(x²) + ε) over all heads", gain * float(joint[at]) * inverse, terms, "Π")]


# ---- rotation


def rotation_stage(
    rotary: Rotary, name: str, source: str, place: Callable[[int], tuple[int, ...]], cell: Cell, t: int, d: int
) -> Stage:
    """(a, b) ↦ (a·cos φ − b·sin φ, a·sin φ + b·cos φ)."""
    halves, half = rotary.config.layout == "halves", rotary.width // 2
    pair, second = (d % half, d >= half) if halves else (d // 2, d % 2 == 1)
    other = (d - half if second else d + half) if halves else (d - 1 if second else d + 1)
    angle = t * float(rotary.frequencies[pair])
    cos, sin = math.cos(angle) * rotary.config.magnitude, math.sin(angle) * rotary.config.magnitude
    own, mate = (float(cell.values[source][place(i)]) for i in (d, other))
    sign, mark = (1, "+") if second else (-1, "−")
    terms = (
        Term(f"{name}[{d}]·cos φ", own * cos, ((name, own), ("cos φ", cos)), source, place(d)),
        Term(f"{mark} {name}[{other}]·sin φ", sign * mate * sin, ((name, mate), ("sin φ", sin)), source, place(other)),
    )
    formula = f"rotated by φ = {t}·{float(rotary.frequencies[pair]):.4g} = {angle:.4g} rad"
    return Stage(formula, sum(term.value for term in terms), terms)


def rotated(cell: Cell) -> list[Stage]:
    layer, name = layer_of(cell), "query" if cell.path.endswith("query_rotated") else "key"
    if isinstance(layer, LatentAttention):
        return latent_query_rotated(cell, layer)
    rotary, source, (head, t, d) = getattr(layer, "rotary", None), beside(cell, f"{name}_norm"), cell.at
    if not isinstance(rotary, Rotary) or not cell.has(source):
        return []
    if d >= rotary.width:
        return [copy_stage(cell, "not rotated", source, cell.at)]
    return [rotation_stage(rotary, name, source, lambda i: (head, t, i), cell, t, d)]


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
    source, width = beside(cell, "down"), layer.config.latent_dim
    x = cell.values[source][t, :width].double().cpu()
    module: Any = layer.latent_norm
    gain, inverse = float(module.weight[d]), float((x.square().mean() + module.eps).rsqrt())
    terms = (Term("γ", gain), Term(f"x[{d}]", float(x[d]), (), source, (t, d)), Term("1/√(mean(x²) + ε)", inverse))
    return [Stage("γ·x/√(mean(x²) + ε) of the latent", gain * float(x[d]) * inverse, terms, "Π")]


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
    return score_stages(cell, q, k, source, (head, i), layer.config.scale)


def score_stages(
    cell: Cell, q: Tensor, k: Tensor, source: str, at: tuple[int, int], scale: float | None
) -> list[Stage]:
    """q·k, its scale, and what else is added to a score."""
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
    if abs(cell.value - total * factor) > 1e-3 * max(1.0, abs(cell.value)):
        rest = (Term("q·k/√K", total * factor), Term("bias", cell.value - total * factor))
        stages.append(Stage("+ position bias", cell.value, rest))
    return stages


def latent_mixed(cell: Cell) -> list[Stage]:
    layer, (head, i, d) = layer_of(cell), cell.at
    _, values = latent_parts(cell, layer)
    return [mix_stage(cell, beside(cell, "weights"), head, i, values[head, :, d])]


def mix_stage(cell: Cell, path: str, head: int, i: int, values: Tensor) -> Stage:
    """Σ_j weight_j·v_j, a term for each token that is read."""
    weights = cell.values[path][head, i].double()
    names = cell.key_labels()
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
    source = cell.near("ffn_residual.before")
    return source if cell.has(source) else cell.near("norm")


def ffn_inner(cell: Cell) -> list[Stage]:
    """gate and up of a feed-forward layer: an activation of x·W, or gate ⊙ x·W_up."""
    layer, name, (t, row) = layer_of(cell), cell.path.rpartition(".")[2], cell.at
    matrix = getattr(layer, name)
    stage = linear_stage(cell, f"x·W_{name}", ffn_input(cell), (t,), matrix.weight, row, matrix.bias)
    gate = beside(cell, "gate")
    if name == "up" and hasattr(layer, "gate"):
        value = float(cell.values[gate][t, row])
        both = (Term("gate", value, (), gate, cell.at), Term("x·W_up", stage.value))
        return [stage, Stage("gate ⊙ x·W_up", value * stage.value, both, "Π")]
    return [stage, act_stage(layer.activation, stage, float(ACTIVATIONS[layer.activation](torch.tensor(stage.value))))]


def ffn_down(cell: Cell) -> list[Stage]:
    layer, (t, row) = layer_of(cell), cell.at
    return [linear_stage(cell, "hidden·W_down", beside(cell, "up"), (t,), layer.down.weight, row, layer.down.bias)]


def router(cell: Cell) -> list[Stage]:
    moe, (t, expert) = layer_of(cell), cell.at
    source = ffn_input(cell)
    stage = linear_stage(cell, "x·W_router", source, (t,), moe.router.weight, expert, None)
    if type(moe.choice).__name__ == "GroupedChoice":
        return [stage, act_stage("sigmoid", stage, cell.value)]
    scores = moe.router.weight.double() @ cell.values[source][t].double()
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
    if name == "up" and layer.gated:
        gate = float(cell.values[beside(cell, "gate")][t, row, a])
        both = (Term("gate", gate, (), beside(cell, "gate"), cell.at), Term("x·W_up", stage.value))
        return [stage, Stage("gate ⊙ x·W_up", gate * stage.value, both, "Π")]
    activation = layer.config.activation
    return [stage, act_stage(activation, stage, float(ACTIVATIONS[activation](torch.tensor(stage.value))))]


def expert_sum(cell: Cell) -> list[Stage]:
    """What experts add to the stream: Σ weight·expert(x), and the shared expert."""
    (t, d), moe = cell.at, cell.module(cell.near("ffn"))
    weights, down = cell.near("ffn.chosen"), cell.near("ffn.experts.down")
    terms = [
        Term(
            f"expert {expert}",
            float(cell.values[weights][t, a] * cell.values[down][t, d, a]),
            (("weight", float(cell.values[weights][t, a])), ("expert(x)", float(cell.values[down][t, d, a]))),
            down,
            (t, d, a),
        )
        for a, expert in enumerate(chosen_experts(cell, moe, t))
    ]
    shared = cell.near("ffn.shared.down")
    if cell.has(shared):
        terms.append(Term("shared expert", float(cell.values[shared][t, d]), (), shared, (t, d)))
    return [Stage("Σ weight·expert(x)", sum(term.value for term in terms), tuple(terms))]


# ---- Mamba and LSTM


def mamba_conv(cell: Cell) -> list[Stage]:
    layer, (t, c), source = layer_of(cell), cell.at, beside(cell, "input")
    x, width = cell.values[source].double(), len(layer.filter)
    terms = [
        Term(
            f"filter[{s - t + width - 1}]·x[{s}]",
            float(layer.filter[s - t + width - 1, c] * x[s, c]),
            (),
            source,
            (s, c),
        )
        for s in range(max(0, t - width + 1), t + 1)
    ]
    terms += [] if layer.filter_bias is None else [Term("b", float(layer.filter_bias[c]))]
    stage = Stage("Σ_k filter_k·x", sum(term.value for term in terms), tuple(terms))
    return [stage, act_stage("silu", stage, float(F.silu(torch.tensor(stage.value, dtype=torch.float64))))]


def mamba_step(cell: Cell) -> list[Stage]:
    layer, (t, c), source = layer_of(cell), cell.at, beside(cell, "select")
    x, w = cell.values[source][t, : layer.rank].double().cpu(), layer.step.weight[c].double().cpu()
    terms = [Term(f"s[{j}]·W[{c},{j}]", float(x[j] * w[j]), (), source, (t, j)) for j in range(len(x))]
    terms.append(Term(f"b[{c}]", float(layer.step.bias[c])))
    stage = Stage("s·W_Δ + b", sum(term.value for term in terms), top_terms(terms))
    return [stage, act_stage("softplus", stage, float(F.softplus(torch.tensor(stage.value, dtype=torch.float64))))]


def mamba_scanned(cell: Cell) -> list[Stage]:
    """y_t = Σ_s C_t·(exp(Σ Δ A)∘B_s)·Δ_s·x_s + D·x_t: what each earlier token left in the state."""
    layer, (t, c) = layer_of(cell), cell.at
    conv, step, select = (cell.values[beside(cell, name)].double().cpu() for name in ("conv", "step", "select"))
    _, write, read = select.split((layer.rank, len(layer.decay), len(layer.decay)), dim=-1)
    decay = -layer.decay[:, c].double().cpu().exp()
    names, terms = cell.key_labels(), []
    for s in range(t + 1):
        kept = (decay * step[s + 1 : t + 1, c].sum()).exp()
        value = float((read[t] * kept * write[s]).sum() * step[s, c] * conv[s, c])
        terms.append(Term(f"from {names[s]!r}", value, (("x", float(conv[s, c])),), beside(cell, "conv"), (s, c)))
    terms.append(Term("skip·x", float(layer.skip[c] * conv[t, c]), (), beside(cell, "conv"), (t, c)))
    return [Stage("Σ_s C·decay·B·Δ·x_s + D·x", sum(term.value for term in terms), top_terms(terms))]


def mamba_gated(cell: Cell) -> list[Stage]:
    (t, c), source = cell.at, beside(cell, "input")
    width = cell.values[source].shape[1] // 2
    scanned, gate = float(cell.values[beside(cell, "scanned")][t, c]), cell.values[source][t, width + c].double()
    opened = float(F.silu(gate))
    terms = (
        Term("scanned", scanned, (), beside(cell, "scanned"), cell.at),
        Term("silu(gate)", opened, (), source, (t, width + c)),
    )
    return [Stage("scanned ⊙ silu(gate)", scanned * opened, terms, "Π")]


def lstm_hidden(cell: Cell) -> list[Stage]:
    """c = f∘c + i∘g and h = o∘tanh(c), token after token."""
    layer, (t, d), source = layer_of(cell), cell.at, beside(cell, "gates")
    gates, hidden = (cell.values[path].double().cpu() for path in (source, cell.path))
    recurrent = layer.recurrent.weight.double().cpu()
    state, before, inputs = torch.zeros(hidden.shape[1], dtype=torch.float64), hidden[0] * 0, hidden[0] * 0
    out = inputs
    for s in range(t + 1):
        past = hidden[s - 1] if s else torch.zeros_like(hidden[0])
        i, f, g, o = (gates[s] + recurrent @ past).chunk(4)
        before, inputs, out = f.sigmoid() * state, i.sigmoid() * g.tanh(), o.sigmoid()
        state = before + inputs
    kept = Term("forget gate · old c", float(before[d]))
    new = Term("input gate · tanh(g)", float(inputs[d]), (), source, (t, d))
    height = float(state[d].tanh())
    both = (Term("output gate", float(out[d])), Term("tanh(c)", height))
    return [
        Stage("c = f·c + i·g", float(state[d]), (kept, new)),
        Stage("h = o·tanh(c)", float(out[d]) * height, both, "Π"),
    ]


# ---- embeddings and heads


def position(cell: Cell) -> list[Stage]:
    """A row of a learned table, or sines and cosines."""
    embedding, (t, d) = layer_of(cell), cell.at
    if isinstance(embedding.position, Learned):
        return [Stage("row of the position table", cell.value, (Term(f"table[{t}, {d}]", cell.value),))]
    name = "cos" if d % 2 else "sin"
    return [Stage(f"{name}(position / 10000^(2i/D)), i = {d // 2}", cell.value, (Term(f"position {t}", cell.value),))]


def segments(cell: Cell) -> list[Stage]:
    return [Stage("row of the segment table", cell.value, (Term(f"table[0, {cell.at[1]}]", cell.value),))]


def embedding_norm(cell: Cell) -> list[Stage]:
    """The norm of the sum of token, position and segment."""
    embedding, (t, d) = layer_of(cell), cell.at
    parts = [name for name in ("tokens", "position", "segments") if cell.has(beside(cell, name))]
    total = torch.stack([cell.values[beside(cell, name)][t].double().cpu() for name in parts]).sum(0)
    terms = tuple(
        Term(name, float(cell.values[beside(cell, name)][t, d]), (), beside(cell, name), (t, d)) for name in parts
    )
    stage = Stage(" + ".join(parts), float(total[d]), terms)
    mean, deviation = float(total.mean()), float((total.var(unbiased=False) + embedding.norm.eps).sqrt())
    gain, shift = float(embedding.norm.weight[d]), float(embedding.norm.bias[d])
    scaled = gain * (stage.value - mean) / deviation
    factors = (("γ", gain), ("x", stage.value), ("μ", mean), ("σ", deviation))
    return [
        stage,
        Stage("γ·(x − μ)/√(σ² + ε) + β", scaled + shift, (Term("γ·(x − μ)/σ", scaled, factors), Term("β", shift))),
    ]


def embedding_projection(cell: Cell) -> list[Stage]:
    embedding, (t, row) = layer_of(cell), cell.at
    module = embedding.projection
    return [linear_stage(cell, "x·W", beside(cell, "norm"), (t,), module.weight, row, module.bias)]


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
        return [Stage("the learned class token", cell.value, (Term(f"class_token[{d}]", cell.value),))]
    return [copy_stage(cell, f"patch {t - 1}", beside(cell, "patches"), (t - 1, d))]


def head_linear(matrix: str, source: str, activation: bool = False) -> Rule:
    """A matrix of the head, from another step of it or from the final norm."""

    def rule(cell: Cell) -> list[Stage]:
        layer, final = layer_of(cell), f"{cell.values.inspection.model_input.final_stack_name}.final_norm"
        *row, d = cell.at
        module = getattr(layer, matrix)
        read = source if source and cell.has(source) else final
        at = tuple(row) if row else ((0,) if cell.values[read].dim() == 2 else ())
        stage = linear_stage(cell, "x·W + b", read, at, module.weight, d, module.bias)
        if not activation:
            return [stage]
        named = isinstance(layer.activation, str)
        function = ACTIVATIONS[layer.activation] if named else layer.activation
        value = float(function(torch.tensor(stage.value, dtype=torch.float64)))
        return [stage, act_stage(layer.activation if named else "tanh", stage, value)]

    return rule


def head_norm_of_dense(cell: Cell) -> list[Stage]:
    return norm_stages(cell, layer_of(cell).norm, "head.dense")


def pool_first(cell: Cell) -> list[Stage]:
    source = f"{cell.values.inspection.model_input.final_stack_name}.final_norm"
    return [copy_stage(cell, "the first position", source, (0, *cell.at))] if cell.has(source) else []


# ---- which rule a mixer has


def by_mixer(**rules: Rule) -> Rule:
    """The rule for the kind of mixer that the step belongs to; `attention` is the plain one."""

    def rule(cell: Cell) -> list[Stage]:
        layer: nn.Module = layer_of(cell)
        kinds = {MultiHeadAttention: "attention", LatentAttention: "latent", Mamba: "mamba", LSTM: "lstm", MoE: "moe"}
        name = next((word for kind, word in kinds.items() if isinstance(layer, kind)), "")
        found = rules.get(name)
        return [] if found is None else found(cell)

    return rule
