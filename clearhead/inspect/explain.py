"""Where a number comes from: the terms of any cell of any step, each linked to the cell that it came from.

A stage is one line of arithmetic. `Σ` stages sum their terms, `Π` stages multiply them; the last stage's value is the
cell. For example, a weight of attention is the stages score − max, exp, and exp / Σ exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from clearhead.nn.embedding import WidenedEmbedding
from clearhead.nn.moe import MoE
from clearhead.nn.rotary import DualChunk
from clearhead.nn.stack import Residual

from . import explain_mixers as mixers
from . import explain_parts as parts
from .cells import Cell, Explanation, Stage, StepValues, Term, linear_stage, matrix_row, norm_stages, top_terms
from .explain_mixers import by_mixer
from .explain_parts import copy_stage

CLOSE = 1e-3  # how far the terms of a rule may be from the value, for weights of 16 bits


@torch.no_grad()
def explain(values: StepValues, path: str, index: Sequence[int]) -> Explanation:
    """The terms of one cell. A step without a rule has no stages; nor has a cell that its rule does not reach."""
    at, value = tuple(index), values[path]
    if len(at) != value.dim() or any(not 0 <= i < n for i, n in zip(at, value.shape, strict=True)):
        raise ValueError(f"{path} is {list(value.shape)}, so it has no cell {list(at)}")
    found = float(value[at])
    rule = RULES.get(step_kind(path))
    try:
        stages = () if rule is None else tuple(rule(Cell(values, path, at, found)))
    except (AttributeError, IndexError, KeyError, TypeError):  # a part that the rule does not know
        stages = ()
    right = bool(stages) and math.isclose(stages[-1].value, found, rel_tol=CLOSE, abs_tol=CLOSE)
    return Explanation(path, at, found, stages if right else ())


def step_kind(path: str) -> str:
    """`stack.blocks.3.mixer.qkv` -> `mixer.qkv`; `stack.blocks.3.cross.weights` -> `mixer.weights`."""
    parts = path.split(".")
    if len(parts) > 3 and parts[1] == "blocks":
        kind = ".".join(parts[3:])
        return "mixer." + kind.removeprefix("cross.") if kind.startswith("cross.") else kind
    shared = len(parts) > 1 and parts[1] in ("final_norm", "score_bias", "distances")
    return ".".join(parts[1:] if shared else parts)


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
    scale, added = cell.module(cell.path).scale, float(cell.values[inside][cell.at])
    name, factors = f"{branch}(x), the branch", (("scale", scale), ("branch", added))
    terms = (
        Term("x, the stream", float(cell.values[stream][cell.at]), (), stream, cell.at),
        Term(
            name if scale == 1 else f"{scale:g}·{name}", scale * added, () if scale == 1 else factors, inside, cell.at
        ),
    )
    formula = "x + branch" if scale == 1 else f"x + {scale:g}·branch"
    return [Stage(formula, sum(term.value for term in terms), terms)]


def parallel_norm(cell: Cell) -> list[Stage]:
    stack, _, layer, _ = cell.path.split(".")
    return norm_stages(cell, cell.module(cell.path), previous_output(cell, stack, int(layer)))


def parallel_residual(cell: Cell) -> list[Stage]:
    """x + mixer(h) + ffn(h), both branches at once."""
    stack, _, layer, _ = cell.path.split(".")
    paths = {
        "x, the stream": previous_output(cell, stack, int(layer)),
        "mixer(h)": cell.near("mixer_residual.inside"),
        "ffn(h)": cell.near("ffn_residual.inside"),
    }
    terms = tuple(Term(name, float(cell.values[path][cell.at]), (), path, cell.at) for name, path in paths.items())
    return [Stage("x + mixer + ffn", sum(term.value for term in terms), terms)]


def inside(cell: Cell) -> list[Stage]:
    branch = cell.path.split(".")[3].removesuffix("_residual")
    if branch == "ffn" and isinstance(cell.module(cell.near("ffn")), MoE):
        return parts.expert_sum(cell)
    source = cell.near(f"{branch}.{'down' if branch == 'ffn' else 'out'}")
    if not cell.has(source):
        return []
    block: Any = cell.module(cell.block)
    residual = getattr(block, f"{branch}_residual", None)
    if not isinstance(residual, Residual):  # a parallel block adds its branches without a norm of their own
        return [copy_stage(cell, f"{branch}(h)", source, cell.at)]
    return norm_stages(cell, residual.inside, source)


def qkv(cell: Cell) -> list[Stage]:
    (t, row), mixer = cell.at, cell.module(cell.near("mixer"))
    stage = linear_stage(cell, "x·W_QKV", parts.branch_input(cell), (t,), mixer.qkv.weight, row, mixer.qkv.bias)
    return parts.clip_stages(stage, getattr(mixer, "clip", None))


def split_head(cell: Cell) -> list[Stage]:
    """query, key and value are cut from one matrix product."""
    attention, name = parts.layer_of(cell), cell.path.rpartition(".")[2]
    if ".cross." in cell.path:
        return parts.cross_projection(cell)
    head, t, d = cell.at
    key, value = attention.widths
    start = {"query": 0, "key": attention.rows[0], "value": attention.rows[0] + attention.rows[1]}[name]
    column = start + head * (value if name == "value" else key) + d
    return [copy_stage(cell, f"head {head}: columns of x·W_QKV", cell.near("mixer.qkv"), (t, column))]


def attention_inputs(cell: Cell) -> tuple[str, str]:
    """The paths of the queries and keys that a score compares. Dual chunks have a query for each kind of distance."""
    layer, rotary = ".".join(cell.path.split(".")[:4]), parts.layer_of(cell).rotary
    if rotary is None:
        return f"{layer}.query_norm", f"{layer}.key_norm"
    name = "query_rotated"
    if isinstance(rotary, DualChunk):
        _, i, j = cell.at
        kinds = rotary.config.queries(parts.layer_of(cell).mask)
        name = next((name for name, mask in kinds.items() if bool(mask(torch.tensor(i), torch.tensor(j)))), name)
    return f"{layer}.{name}", f"{layer}.key_rotated"


def scores(cell: Cell) -> list[Stage]:
    query, key = attention_inputs(cell)
    head, i, j = cell.at
    q, k = cell.values[query].double(), cell.values[key].double()
    layer, group = parts.layer_of(cell), head // (q.shape[0] // k.shape[0])
    bias = parts.position_bias(cell, head, i, j)
    return parts.score_stages(q[head, i], k[group, j], query, (head, i), layer.scale, layer.softcap, bias)


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
    sinks = cell.path.removesuffix("weights") + "sinks"
    sink = float(cell.values[sinks][head]) if cell.has(sinks) else -torch.inf
    top = max(float(shown.max()), sink)
    powers = (shown - top).exp()
    names = cell.key_names(len(row))
    terms = [
        Term(
            f"exp({float(row[k]) - top:.3g}) for {names[k]!r}",
            float(powers[k]),
            (("score", float(row[k])),),
            source,
            (head, i, k),
        )
        for k in range(len(row))
        if bool(allowed[k])
    ]
    total, mine = float(powers.sum()), float(powers[j])
    if cell.has(sinks):  # a score for reading nothing takes part in the softmax
        power = math.exp(sink - top)
        terms.append(Term(f"exp({sink - top:.3g}) of the sink", power, (("score", sink),), sinks, (head,)))
        total += power
    divide = (Term("exp(score − max)", mine, (("score", float(row[j])),), source, (head, i, j)), Term("1/Σ", 1 / total))
    return [
        Stage("Σ_k exp(score_k − max)", total, top_terms(terms)),
        Stage("exp(score − max) / Σ", mine / total, divide, "Π"),
    ]


def sink(cell: Cell) -> list[Stage]:
    entry = float(parts.layer_of(cell).sinks.weight[cell.at[0]])
    return [Stage("a learned score of the head, for reading nothing", entry, (Term(f"sink[{cell.at[0]}]", entry),))]


def shared_bias(cell: Cell) -> list[Stage]:
    head, bucket = cell.at
    entry = float(parts.layer_of(cell).score_bias.weight[head, bucket])
    return [Stage("a learned number of the head and the distance", entry, (Term(f"table[{head}, {bucket}]", entry),))]


def distance_vector(cell: Cell) -> list[Stage]:
    place, d = cell.at
    entry = float(cell.module(cell.path).weight[place, d])
    return [Stage("a learned vector of a distance", entry, (Term(f"table[{place}, {d}]", entry),))]


def normed_distance_vector(cell: Cell) -> list[Stage]:
    return norm_stages(cell, cell.module(cell.path), cell.path.removesuffix(".norm"))


def mixed(cell: Cell) -> list[Stage]:
    layer = cell.path.removesuffix(".mixed")
    if not (cell.has(f"{layer}.weights") and cell.has(f"{layer}.value")):
        return []
    head, i, d = cell.at
    v = cell.values[f"{layer}.value"].double()
    group = head // (cell.values[f"{layer}.weights"].shape[0] // v.shape[0])
    return [parts.mix_stage(cell, f"{layer}.weights", head, i, v[group, :, d])]


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
    return [linear_stage(cell, "concat·W_O", source, (t,), module.weight, row, module.bias)]


def logits(cell: Cell) -> list[Stage]:
    model: Any = cell.model
    (t, token), head = cell.at, model.head
    stack = cell.values.inspection.model_input.final_stack_name
    source = "head.norm" if model.config.head.kind() == "MaskedLMHead" else f"{stack}.final_norm"
    if getattr(head, "narrow", None) is not None:
        source = "head.narrow"
    if not cell.has(source):
        return []
    weight = head.weight
    if weight is None:
        weight = model.table
    stages = [linear_stage(cell, "x·W_vocabulary", source, (t,), weight, token, head.bias)]
    scale, cap = getattr(head, "scale", 1.0), getattr(head, "softcap", None)
    if scale != 1:
        both = (Term("x·W", stages[-1].value), Term("scale", scale))
        stages.append(Stage("× scale", stages[-1].value * scale, both, "Π"))
    if cap is not None:
        stages.append(parts.cap_stage(stages[-1], cap))
    return stages


def embedding(cell: Cell) -> list[Stage]:
    widened = isinstance(cell.module(cell.path), WidenedEmbedding)  # its positions come after the projection
    for whole in ("norm",) if widened else ("projection", "norm"):
        if cell.has(f"{cell.path}.{whole}"):
            return [copy_stage(cell, f"after the {whole}", f"{cell.path}.{whole}", cell.at)]
    names = ("projection" if widened else "tokens", "class_token", "position", "segments")
    known = [name for name in names if cell.has(f"{cell.path}.{name}")]
    terms = tuple(
        Term(
            name.removesuffix("s"),
            float(cell.values[f"{cell.path}.{name}"][cell.at]),
            (),
            f"{cell.path}.{name}",
            cell.at,
        )
        for name in known
    )
    return [Stage(" + ".join(term.name for term in terms), sum(term.value for term in terms), terms)]


def embedding_tokens(cell: Cell) -> list[Stage]:
    given, module = cell.values.inspection.model_input, parts.layer_of(cell)
    ids = given.source if cell.path.startswith("source") else given.inputs
    assert ids is not None, "a source embedding has a source"
    token, d = int(ids[0, cell.at[0]]), cell.at[1]
    table = cell.model.table if module.table is None else module.table  # a target may borrow the source's
    entry = float(matrix_row(table, token)[d])
    terms = [Term(f"table[{token}, {d}]", entry)]
    if module.scale != 1.0:
        terms.append(Term("√D", module.scale))
    return [Stage("row of the embedding table", entry * module.scale, tuple(terms), "Π")]


ATTENDS = ("attention", "linear", "linformer", "longformer", "disentangled")
RULES: dict[str, Callable[[Cell], list[Stage]]] = {
    "embedding": embedding,
    "source": embedding,
    "target": embedding,
    **{f"{place}.tokens": embedding_tokens for place in ("embedding", "source", "target")},
    **{f"{place}.position": parts.position for place in ("embedding", "source", "target")},
    "embedding.segments": parts.segments,
    **{f"{place}.norm": parts.embedding_norm for place in ("embedding", "source", "target")},
    **{f"{place}.projection": parts.embedding_projection for place in ("embedding", "source", "target")},
    "embedding.patches": parts.patches,
    "embedding.class_token": parts.class_token,
    "final_norm": final_norm,
    "score_bias": shared_bias,
    "distances": distance_vector,
    "distances.norm": normed_distance_vector,
    "norm": parallel_norm,
    "ffn_norm": parallel_norm,
    "residual": parallel_residual,
    "mixer.qkv": qkv,
    "mixer.query": by_mixer(
        attention=split_head,
        linear=split_head,
        latent=parts.latent_query,
        linformer=mixers.linformer_projection,
        longformer=mixers.split_thirds,
        disentangled=mixers.split_thirds,
    ),
    **{
        f"mixer.{name}": by_mixer(
            attention=split_head,
            linear=split_head,
            linformer=mixers.linformer_projection,
            longformer=mixers.split_thirds,
            disentangled=mixers.split_thirds,
        )
        for name in ("key", "value")
    },
    "mixer.query_norm": parts.head_norm,
    "mixer.key_norm": parts.head_norm,
    **{f"mixer.{name}": parts.rotated for name in ("query_rotated", "query_previous", "query_older", "key_rotated")},
    "mixer.query_features": mixers.features,
    "mixer.key_features": mixers.features,
    "mixer.scores": by_mixer(
        attention=scores,
        latent=parts.latent_scores,
        linformer=mixers.plain_scores,
        longformer=mixers.plain_scores,
        disentangled=mixers.disentangled_scores,
    ),
    "mixer.position_scores": mixers.position_scores,
    "mixer.sinks": sink,
    "mixer.weights": by_mixer(
        **dict.fromkeys(("attention", "latent", "linformer", "longformer", "disentangled"), weights),
        linear=mixers.linear_weights,
    ),
    "mixer.local": mixers.read_values,
    "mixer.mixed": by_mixer(
        attention=mixed,
        disentangled=mixed,
        latent=parts.latent_mixed,
        linear=mixers.read_values,
        linformer=mixers.read_values,
        longformer=mixers.longformer_mixed,
    ),
    "mixer.key_rows": mixers.mixture,
    "mixer.value_rows": mixers.mixture,
    "mixer.global_qkv": mixers.global_keys,
    "mixer.global.scores": mixers.global_scores,
    "mixer.global.weights": weights,
    "mixer.global.mixed": mixers.global_mixed,
    "mixer.concat": concat,
    "mixer.query_down": parts.linear_rule("x·W", "query_down"),
    "mixer.down": parts.linear_rule("x·W_down", "down"),
    "mixer.latent_norm": parts.latent_norm,
    "mixer.up": parts.linear_rule("latent·W_up", "up", "latent_norm"),
    "mixer.rope_key": parts.rope_key,
    "mixer.input": parts.linear_rule("x·W_in", "input"),
    "mixer.conv": by_mixer(mamba=mixers.mamba_conv, mamba2=mixers.mamba2_conv, short=mixers.short_conv),
    "mixer.select": parts.linear_rule("x·W_select", "select", "conv"),
    **{f"mixer.{name}": mixers.mamba_selected for name in ("step_norm", "write_norm", "read_norm")},
    "mixer.step": by_mixer(mamba=mixers.mamba_step, mamba2=mixers.mamba2_step),
    "mixer.scanned": by_mixer(mamba=mixers.mamba_scanned, mamba2=mixers.mamba2_scanned),
    "mixer.gated": by_mixer(mamba=mixers.mamba_gated, mamba2=mixers.mamba2_gated, short=mixers.short_gated),
    "mixer.norm": by_mixer(mamba2=mixers.mamba2_norm),
    "mixer.gates": parts.linear_rule("x·W_gates", "input"),
    "mixer.hidden": mixers.lstm_hidden,
    "mixer.out": by_mixer(
        **dict.fromkeys((*ATTENDS, "latent"), out),
        **dict.fromkeys(("mamba", "short"), parts.linear_rule("gated·W_out", "out", "gated")),
        mamba2=parts.linear_rule("normed·W_out", "out", "norm"),
        lstm=parts.linear_rule("h·W_out", "out", "hidden"),
    ),
    **{
        f"ffn.{inner}{name}": parts.ffn_down if name == "down" else parts.ffn_inner
        for inner in ("", "shared.", "shared.ffn.")
        for name in ("gate", "up", "down")
    },
    "ffn.shared.switch": parts.switch,
    "ffn.router": parts.router,
    "ffn.chosen": parts.expert_weight,
    **{f"ffn.experts.{name}": parts.expert_inner for name in ("gate", "up", "down")},
    "head.logits": logits,
    "head.narrow": parts.head_linear("narrow"),
    "head.dense": parts.head_dense,
    "head.norm": parts.head_norm_of_dense,
    "head.pooled": parts.pool_stages,
    "head.pool.pooled": parts.pool_stages,
    "head.pool.dense": parts.head_dense,
    "head.classes": parts.head_linear("classes", "head.pool.pooled", "head.pool.dense"),
    "head.span": parts.head_linear("span"),
    **{
        f"{branch}_residual{place}": rule
        for branch in ("mixer", "cross", "ffn")
        for place, rule in {"": residual, ".before": before, ".after": after, ".inside": inside}.items()
    },
}
"""By kind of step."""
