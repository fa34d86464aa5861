"""Rules of `explain` for mixers without softmax attention over tokens, and the choice of a rule by the kind of mixer.

Linear attention, Linformer, Longformer's global tokens, short convolutions, Mamba and Mamba-2, LSTM.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.disentangled import DisentangledAttention
from clearhead.nn.latent import LatentAttention
from clearhead.nn.linear_attention import Elu, Favor, LinearAttention
from clearhead.nn.linformer import Linformer
from clearhead.nn.longformer import Longformer
from clearhead.nn.lstm import LSTM
from clearhead.nn.mamba import Mamba
from clearhead.nn.mamba2 import Mamba2
from clearhead.nn.shortconv import ShortConv
from clearhead.precision.matrix import dense

from .cells import Cell, Stage, Term, linear_stage, norm_stages, top_terms, vector_norm
from .explain_parts import (
    Rule,
    act_stage,
    beside,
    branch_input,
    copy_stage,
    layer_of,
    mix_stage,
    score_stages,
)

KINDS: dict[type[nn.Module], str] = {
    MultiHeadAttention: "attention",
    LatentAttention: "latent",
    LinearAttention: "linear",
    Linformer: "linformer",
    Longformer: "longformer",
    DisentangledAttention: "disentangled",
    ShortConv: "short",
    Mamba: "mamba",
    Mamba2: "mamba2",
    LSTM: "lstm",
}


def by_mixer(**rules: Rule) -> Rule:
    """The rule for the kind of mixer that the step belongs to. Without one, the step has no rule."""

    def rule(cell: Cell) -> list[Stage]:
        mixer: Any = cell.module(".".join(cell.path.split(".")[:4]))
        found = rules.get(next((word for kind, word in KINDS.items() if isinstance(mixer, kind)), ""))
        return [] if found is None else found(cell)

    return rule


# ---- linear attention


def features(cell: Cell) -> list[Stage]:
    """φ of a query or a key: elu(x) + 1, x itself, or the exponents of random features."""
    layer, source, (head, t, w) = layer_of(cell), beside(cell, cell.path.rpartition(".")[2][:-9]), cell.at
    if isinstance(layer.kernel, Elu):
        own = float(cell.values[source][head, t, w])
        return [Stage("elu(x) + 1", float(F.elu(torch.tensor(own))) + 1, (Term(f"x[{w}]", own, (), source, cell.at),))]
    if not isinstance(layer.kernel, Favor):
        return [copy_stage(cell, "φ(x) = x", source, cell.at)]
    x, root = cell.values[source][head, t].double().cpu(), cell.values[source].shape[-1] ** -0.25
    products = x * layer.kernel.directions[w].double() * root
    terms = [Term(f"x[{d}]·ω[{d}]/√√K", float(p), (), source, (head, t, d)) for d, p in enumerate(products)]
    terms.append(Term("−|x|²/(2√K)", float(-0.5 * (x * root).square().sum())))
    return [Stage("ω·x/√√K − |x|²/(2√K)", sum(term.value for term in terms), top_terms(terms))]


def linear_weights(cell: Cell) -> list[Stage]:
    """φ(q)·φ(k) as a share of its row's sum, or undivided."""
    layer, (head, i, j) = layer_of(cell), cell.at
    source, keys = beside(cell, "query_features"), beside(cell, "key_features")
    q, k = cell.values[source][head, i].double(), cell.values[keys][head].double()
    if float(cell.values[cell.path][head, i, j]) == 0 and layer.mask.causal and j > i:
        return [Stage("the mask hides this key: weight 0", 0.0)]
    read = k[: i + 1] if layer.mask.causal else k
    if isinstance(layer.kernel, Favor):
        logs = torch.logsumexp(q + read, -1)
        powers, name = (logs - logs.max()).exp(), "Σ_w exp(φ(q)_w + φ(k)_w)"
        own = Stage(f"{name}, relative to the largest", float(powers[j]), (Term("exp(log − max)", float(powers[j])),))
    else:
        powers = read @ q
        products = q * k[j]
        terms = [Term(f"φ(q)[{w}]·φ(k)[{w}]", float(p), (), source, (head, i, w)) for w, p in enumerate(products)]
        own = Stage("φ(q)·φ(k)", float(products.sum()), top_terms(terms))
    if not layer.kernel.shares:
        return [own]
    total = float(powers.sum()) or 1.0
    return [
        own,
        Stage("÷ Σ over the keys", own.value / total, (Term("φ(q)·φ(k)", own.value), Term("1/Σ", 1 / total)), "Π"),
    ]


def read_values(cell: Cell) -> list[Stage]:
    """Σ_j weight_j·v_j with one value for each head."""
    head, i, d = cell.at
    weights, value = beside(cell, "weights"), beside(cell, "value")
    if not cell.has(weights):
        return []
    return [mix_stage(cell, weights, head, i, cell.values[value][head, :, d].double())]


# ---- Linformer and Longformer


def mixture(cell: Cell) -> list[Stage]:
    """One of the W learned mixtures of all positions."""
    layer, name, (row, d) = layer_of(cell), cell.path.rpartition(".")[2], cell.at
    source, names = branch_input(cell), cell.key_labels()
    x, share = cell.values[source][:, d].double(), getattr(layer, name).weight[row].double()
    terms = [
        Term(f"E[{row}, {t}]·x of {names[t]!r}", float(share[t] * x[t]), (), source, (t, d)) for t in range(len(x))
    ]
    return [Stage("Σ_t E[row, t]·x_t", sum(term.value for term in terms), top_terms(terms))]


def linformer_projection(cell: Cell) -> list[Stage]:
    """Queries read x; keys and values read the mixtures."""
    layer, name, (head, t, d) = layer_of(cell), cell.path.rpartition(".")[2], cell.at
    (key, value), (queries, keys, _) = layer.widths, layer.parts
    start = {"query": 0, "key": queries, "value": queries + keys}[name]
    row = start + head * (value if name == "value" else key) + d
    own = beside(cell, f"{name}_rows")
    mixtures = own if cell.has(own) else beside(cell, "key_rows")
    source = branch_input(cell) if name == "query" else mixtures
    return [linear_stage(cell, f"x·W_{name[0].upper()}", source, (t,), layer.qkv.weight, row, None)]


def plain_scores(cell: Cell) -> list[Stage]:
    """q·k/√K of layers without rotation, caps or biases."""
    source, (head, i, j) = beside(cell, "query"), cell.at
    q, k = cell.values[source][head, i].double(), cell.values[beside(cell, "key")][head, j].double()
    return score_stages(q, k, source, (head, i))


def split_thirds(cell: Cell) -> list[Stage]:
    """Longformer, DeBERTa: query, key and value are thirds of one product."""
    layer, (head, t, d), name = layer_of(cell), cell.at, cell.path.rpartition(".")[2]
    place = ("query", "key", "value").index(name) * (layer.qkv.weight.shape[0] // 3) + head * layer.width + d
    return [copy_stage(cell, f"head {head}: columns of x·W_QKV", beside(cell, "qkv"), (t, place))]


def global_keys(cell: Cell) -> list[Stage]:
    """Keys and values of the second set of projections, which the global tokens read."""
    layer, (t, row) = layer_of(cell), cell.at
    module = layer.global_qkv
    row += module.weight.shape[1]
    return [linear_stage(cell, "x·[W_K W_V], global", branch_input(cell), (t,), module.weight, row, module.bias)]


def global_query(cell: Cell, layer: Longformer, head: int, t: int) -> Tensor:
    rows = slice(head * layer.width, (head + 1) * layer.width)
    x, weight = cell.values[branch_input(cell)][t].double(), layer.global_qkv.weight[rows].double()
    bias = layer.global_qkv.bias
    return weight @ x + (0 if bias is None else bias[rows].double())


def global_scores(cell: Cell) -> list[Stage]:
    layer, (head, i, j) = cell.module(cell.near("mixer")), cell.at
    keys = cell.values[cell.near("mixer.global_qkv")].double()
    q, k = global_query(cell, layer, head, i), keys[j, head * layer.width : (head + 1) * layer.width]
    return score_stages(q, k, "", ())


def global_mixed(cell: Cell) -> list[Stage]:
    layer, (head, i, d) = cell.module(cell.near("mixer")), cell.at
    keys = cell.values[cell.near("mixer.global_qkv")].double()
    values = keys[:, keys.shape[1] // 2 + head * layer.width + d]
    return [mix_stage(cell, beside(cell, "weights"), head, i, values)]


def longformer_mixed(cell: Cell) -> list[Stage]:
    """The local result, or that of a global token."""
    head, t, d = cell.at
    far = beside(cell, "global.mixed")
    if cell.has(far) and t < cell.values[far].shape[1]:
        return [copy_stage(cell, "a global token", far, (head, t, d))]
    return [copy_stage(cell, "a local token", beside(cell, "local"), cell.at)]


# ---- disentangled attention


def position_scores(cell: Cell) -> list[Stage]:
    """q_i·K_{i−j} + Q_{i−j}·k_j, with vectors of the distance."""
    layer, (head, i, j) = layer_of(cell), cell.at
    name, shared = cell.path.split(".")[0], cell.module(cell.path.split(".")[0]).distances
    source = f"{name}.distances" if shared.config.norm is None else f"{name}.distances.norm"
    place = int(shared.config.places(torch.tensor(i - j), torch.tensor(shared.lookup)))
    matrix = layer.qkv if layer.positions is None else layer.positions
    vector = cell.values[source][place].double().cpu()
    q, k = (cell.values[beside(cell, part)][head].double().cpu() for part in ("query", "key"))
    contents = {"content to position": (q[i], "query", i), "position to content": (k[j], "key", j)}
    names = {"content to position": "q_i·K_{i−j}", "position to content": "Q_{i−j}·k_j"}
    terms = []
    for number, term in enumerate(layer.config.projected):
        at = slice(number * layer.rows + head * layer.width, number * layer.rows + (head + 1) * layer.width)
        turned = dense(matrix.weight)[at].double() @ vector + matrix.bias[at].double()
        content, part, row = contents[term]
        if term in layer.config.terms:
            terms.append(Term(names[term], float(content @ turned), (), beside(cell, part), (head, row, 0)))
    named = tuple(terms)
    return [Stage(" + ".join(term.name for term in named), sum(term.value for term in named), named)]


def disentangled_scores(cell: Cell) -> list[Stage]:
    layer, (head, i, j) = layer_of(cell), cell.at
    q, k = (cell.values[beside(cell, part)][head].double() for part in ("query", "key"))
    added = float(cell.values[beside(cell, "position_scores")][head, i, j]) * layer.scale
    return score_stages(q[i], k[j], beside(cell, "query"), (head, i), layer.scale, None, added)


# ---- convolutions, Mamba and LSTM


def convolution(cell: Cell, x: Tensor, source: str, first: int = 0) -> Stage:
    """Σ_k filter_k·x over the last few tokens; x is T D, and begins at column `first` of its source."""
    layer, (t, c) = layer_of(cell), cell.at
    width = len(layer.filter)
    places = [(s, s - t + width - 1) for s in range(max(0, t - width + 1), t + 1)]
    terms = [
        Term(f"filter[{k}]·x[{s}]", float(layer.filter[k, c] * x[s, c]), (), source, (s, first + c)) for s, k in places
    ]
    terms += [] if layer.filter_bias is None else [Term("b", float(layer.filter_bias[c]))]
    return Stage("Σ_k filter_k·x", sum(term.value for term in terms), tuple(terms))


def mamba_conv(cell: Cell) -> list[Stage]:
    source = beside(cell, "input")
    stage = convolution(cell, cell.values[source].double(), source)
    return [stage, act_stage("silu", stage, float(F.silu(torch.tensor(stage.value, dtype=torch.float64))))]


def short_conv(cell: Cell) -> list[Stage]:
    """The convolution of write ⊙ x, two thirds of the input's product."""
    source = beside(cell, "input")
    write, _, x = cell.values[source].double().chunk(3, dim=-1)
    return [convolution(cell, write * x, source)]


def short_gated(cell: Cell) -> list[Stage]:
    (t, d), source, conv = cell.at, beside(cell, "input"), beside(cell, "conv")
    at = t, cell.values[conv].shape[1] + d
    terms = (
        Term("read", float(cell.values[source][at]), (), source, at),
        Term("conv", float(cell.values[conv][t, d]), (), conv, (t, d)),
    )
    return [Stage("read ⊙ conv", terms[0].value * terms[1].value, terms, "Π")]


def mamba_step(cell: Cell) -> list[Stage]:
    layer, (t, c) = layer_of(cell), cell.at
    source = beside(cell, "step_norm" if layer.normed else "select")
    x, w = cell.values[source][t, : layer.rank].double().cpu(), layer.step.weight[c].double().cpu()
    terms = [Term(f"s[{j}]·W[{c},{j}]", float(x[j] * w[j]), (), source, (t, j)) for j in range(len(x))]
    terms.append(Term(f"b[{c}]", float(layer.step.bias[c])))
    stage = Stage("s·W_Δ + b", sum(term.value for term in terms), top_terms(terms))
    return [stage, act_stage("softplus", stage, float(F.softplus(torch.tensor(stage.value, dtype=torch.float64))))]


def mamba_selected(cell: Cell) -> list[Stage]:
    """The norm of one of the three parts of `select`."""
    layer, name, (t, place) = layer_of(cell), cell.path.rpartition(".")[2], cell.at
    widths = {"step_norm": layer.rank, "write_norm": len(layer.decay), "read_norm": len(layer.decay)}
    first = sum(list(widths.values())[: list(widths).index(name)])
    source = beside(cell, "select")
    x = cell.values[source][t, first : first + widths[name]].double().cpu()
    return vector_norm(getattr(layer, name), x, place, source, (t, first + place))


def mamba_scanned(cell: Cell) -> list[Stage]:
    """y_t = Σ_s C_t·(exp(Σ Δ A)∘B_s)·Δ_s·x_s + D·x_t: what each earlier token left in the state."""
    layer, (t, c) = layer_of(cell), cell.at
    conv, step, select = (cell.values[beside(cell, name)].double().cpu() for name in ("conv", "step", "select"))
    _, write, read = select.split((layer.rank, len(layer.decay), len(layer.decay)), dim=-1)
    if layer.normed:
        write, read = (cell.values[beside(cell, name)].double().cpu() for name in ("write_norm", "read_norm"))
    decay = -layer.decay[:, c].double().cpu().exp()
    labels, terms = cell.key_labels(), []
    for s in range(t + 1):
        kept = (decay * step[s + 1 : t + 1, c].sum()).exp()
        value = float((read[t] * kept * write[s]).sum() * step[s, c] * conv[s, c])
        terms.append(Term(f"from {labels[s]!r}", value, (("x", float(conv[s, c])),), beside(cell, "conv"), (s, c)))
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


def mamba2_conv(cell: Cell) -> list[Stage]:
    source, first = beside(cell, "input"), layer_of(cell).widths[0]  # the gate comes before
    x = cell.values[source].double()[:, first:]
    stage = convolution(cell, x, source, first)
    return [stage, act_stage("silu", stage, float(F.silu(torch.tensor(stage.value, dtype=torch.float64))))]


def mamba2_step(cell: Cell) -> list[Stage]:
    layer, (t, head), source = layer_of(cell), cell.at, beside(cell, "input")
    at = t, sum(layer.widths[:2]) + head
    terms = (
        Term("x·W_Δ", float(cell.values[source][at]), (), source, at),
        Term(f"b[{head}]", float(layer.step_bias[head])),
    )
    stage = Stage("x·W_Δ + b", terms[0].value + terms[1].value, terms)
    return [stage, act_stage("softplus", stage, float(F.softplus(torch.tensor(stage.value, dtype=torch.float64))))]


def mamba2_scanned(cell: Cell) -> list[Stage]:
    """y_t = Σ_s (C_t·B_s)·exp(A·Σ Δ)·Δ_s·x_s + D·x_t: an attention that fades with distance."""
    layer, (t, c) = layer_of(cell), cell.at
    config, head = layer.config, c // layer.config.head_dim
    conv, step = (cell.values[beside(cell, name)].double().cpu() for name in ("conv", "step"))
    group, size = head // (config.heads // config.groups), config.state_dim
    write = conv[:, config.inner + group * size :][:, :size]
    read = conv[:, config.inner + (config.groups + group) * size :][:, :size]
    decay = -float(layer.decay[head].double().exp())
    names, terms = cell.key_labels(), []
    for s in range(t + 1):
        kept = (decay * step[s + 1 : t + 1, head].sum()).exp()
        value = float(read[t] @ write[s] * kept * step[s, head] * conv[s, c])
        terms.append(Term(f"from {names[s]!r}", value, (("x", float(conv[s, c])),), beside(cell, "conv"), (s, c)))
    terms.append(Term("skip·x", float(layer.skip[head] * conv[t, c]), (), beside(cell, "conv"), (t, c)))
    return [Stage("Σ_s (C·B)·decay·Δ·x_s + D·x", sum(term.value for term in terms), top_terms(terms))]


def mamba2_gated(cell: Cell) -> list[Stage]:
    (t, c), source, scanned = cell.at, beside(cell, "input"), beside(cell, "scanned")
    opened = float(F.silu(cell.values[source][t, c].double()))
    terms = (
        Term("scanned", float(cell.values[scanned][t, c]), (), scanned, cell.at),
        Term("silu(gate)", opened, (), source, (t, c)),
    )
    return [Stage("scanned ⊙ silu(gate)", terms[0].value * opened, terms, "Π")]


def mamba2_norm(cell: Cell) -> list[Stage]:
    return norm_stages(cell, layer_of(cell).norm, beside(cell, "gated"))


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
