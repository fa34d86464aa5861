"""Plant faults in right code by rules: each rule replaces one text of a part and knows the mistake that this makes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

ATTENTION = ("attention", "multi_head")
NORMS = ("layer_norm", "rms_norm")
FFNS = ("feed_forward", "swiglu")
BLOCKS = ("encoder_block", "decoder_block")
ARGUMENT = r"([^()]*(?:\([^()]*\))?[^()]*)"  # with at most one pair of parentheses inside


@dataclass(frozen=True)
class Rule:
    """Where `pattern` stands in a part, `new` makes the mistake `keys` (any of these names is right)."""

    parts: tuple[str, ...]
    keys: tuple[str, ...]
    pattern: str
    new: str


def rule(parts: tuple[str, ...], keys: str, pattern: str, new: str) -> Rule:
    return Rule(parts, tuple(keys.split()), pattern, new)


RULES = (
    rule(ATTENTION, "no-scale", rf" / \(?(?:math|np|torch)\.sqrt\({ARGUMENT}\)", ""),
    rule(ATTENTION, "no-scale", r" [/*] \(?[\w.\[\]()-]+ ?\*\* ?\(?-?(?:0\.5|1 ?/ ?2)\)?", ""),
    rule(ATTENTION, "no-scale scale-constant", r"self\.scale = .*", "self.scale = 1.0"),
    rule(ATTENTION, "scale-no-root", rf" / (?:math|np|torch)\.sqrt\({ARGUMENT}\)", r" / (\1)"),
    rule(ATTENTION, "scale-multiplied", rf" / ((?:math|np|torch)\.sqrt\({ARGUMENT}\))", r" * \1"),
    rule(ATTENTION, "softmax-queries", r"softmax\((.*)dim ?= ?-1\)", r"softmax(\1dim=-2)"),
    rule(ATTENTION, "softmax-queries softmax-heads", r"softmax\((.*)(axis|dim) ?= ?-1\)", r"softmax(\1\2=1)"),
    rule(
        ATTENTION,
        "mask-to-zero causal-missing causal-value mask-value",
        r"float\(['\"]-inf['\"]\)|-torch\.inf|-np\.inf|-math\.inf|-1e\d+",
        "0.0",
    ),
    rule(
        ATTENTION,
        "mask-positive causal-inverted mask-value mask-additive-sign",
        r"float\(['\"]-inf['\"]\)|-1e(?=\d+)",
        "1e9 + 0 * 1e0",
    ),
    rule(ATTENTION, "causal-transposed", r"\btril\(", "triu("),
    rule(ATTENTION, "causal-strict", r"(triu\(.*)diagonal ?= ?1", r"\1diagonal=0"),
    rule(ATTENTION, "causal-one-ahead", r"(triu\(.*)diagonal ?= ?1", r"\1diagonal=2"),
    rule(
        ATTENTION,
        "merge-no-transpose",
        r"\.transpose\(1, 2\)\.contiguous\(\)\.(view|reshape)\(",
        r".contiguous().\1(",
    ),
    rule(ATTENTION, "merge-no-transpose", r"\.transpose\(1, 2\)\.reshape\(", ".reshape("),
    rule(ATTENTION, "out-unused", r"return self\.(\w*(?:out|proj|_o|fc|wo)\w*)\((\w+)\)$", r"return \2"),
    rule(ATTENTION, "mixes-keys values-from-keys", r" @ (v|V)\b", r" @ (\1 * 0 + k)"),
    rule(ATTENTION, "values-from-keys", r"self\.(w_?v|W_?v|v_proj|value|to_v)\(", "self.KEYS("),
    rule(ATTENTION, "rope-on-queries-only", r"^( *)k = (?:self\.)?(?:rope|apply_rope|rotary_emb)\w*\(k.*$", r"\1k = k"),
    rule(NORMS, "eps-outside", r"(?<!r)sqrt\((.*?) \+ (self\.eps|eps)\)", r"sqrt(\1) + (\2)"),
    rule(NORMS, "unbiased", r"unbiased ?= ?False", "unbiased=True"),
    rule(NORMS, "unbiased", r"correction ?= ?0", "correction=1"),
    rule(NORMS, "not-centred", r"\((\w+) - (?:self\.)?(?:mean|mu)\w*\) /", r"\1 /"),
    rule(NORMS, "gamma-unused", r"self\.(?:weight|gamma|g|gain|alpha|a_2) \* ", ""),
    rule(NORMS, "gamma-unused", r" \* self\.(?:weight|gamma|g|gain|alpha)\b", ""),
    rule(NORMS, "beta-unused", r" \+ self\.(?:bias|beta|b|shift|b_2)\b", ""),
    rule(("rms_norm",), "rms-sum", r"\.mean\(", ".sum("),
    rule(NORMS, "norm-over-positions", r"mean\((.*)(dim|axis) ?= ?-1", r"mean(\1\2=-2"),
    rule(("rms_norm",), "rms-multiplied", r"rsqrt\(", "sqrt("),
    rule(FFNS, "ffn-no-activation glu-no-activation", r"nn\.(?:ReLU|GELU|SiLU)\(.*?\)", "nn.Identity()"),
    rule(FFNS, "ffn-no-activation glu-no-activation", rf"(?:F|torch)\.(?:relu|gelu|silu)\({ARGUMENT}\)", r"(\1)"),
    rule(FFNS, "ffn-sigmoid glu-sigmoid", r"F\.(?:relu|gelu|silu)\(", "torch.sigmoid("),
    rule(FFNS, "ffn-sigmoid glu-sigmoid", r"nn\.(?:ReLU|GELU|SiLU)\(.*?\)", "nn.Sigmoid()"),
    rule(("swiglu",), "glu-sum", r"(silu\(.*\)) \* ", r"\1 + "),
    rule(BLOCKS, "residual-missing", r"^( *)(\w+) = \2 \+ ", r"\1\2 = "),
    rule(BLOCKS, "residual-missing", r"return (\w+) \+ ", "return "),
    rule(BLOCKS, "residual-doubled residual-missing", r"^( *)(\w+) = \2 \+ (.*)$", r"\1\2 = 2 * (\3)"),
    rule(BLOCKS, "norm-missing", r"self\.(?:ln|norm|\w*_norm|layer_?norm)\w*\((\w+)\)", r"\1"),
    rule(BLOCKS, "future-leak mask-ignored", r", (?:tgt_|trg_)?mask\b(?=\))", ", None"),
    rule(
        ("rotary",),
        "rope-no-minus rope-changes-length rope-direction value",
        r"\(-x2, x1\)|\(-(\w+), (\w+)\)",
        "(x2, x1)",
    ),
    rule(("rotary",), "rope-direction rope-changes-length rope-no-minus", r"cos - ", "cos + "),
    rule(("rotary", "sinusoidal"), "rope-base pe-base", r"\b10_?000(?:\.0)?\b", "1000.0"),
    rule(("sinusoidal",), "pe-swapped pe-only-cosine", r"torch\.sin\(", "torch.cos("),
    rule(("sinusoidal",), "pe-only-sine", r"\.cos\(", ".sin("),
    rule(("sinusoidal",), "pe-replaces pe-not-added", r"= x \+ ", "= 0 * x + "),
    rule(
        ("lm",), "final-norm-missing weight-unused", r"self\.(?:ln_f|norm|final_norm|ln_final|norm_f)\((\w+)\)", r"\1"
    ),
    rule(("lm",), "no-positions weight-unused", r"(\w*tok\w*) \+ (\w*pos\w*)", r"\1"),
    rule(("softmax",), "softmax-axis", r"(sum\(.*)(axis|dim) ?= ?-1", r"\1\2=0"),
    rule(("softmax",), "softmax-unstable", r"exp\((\w+) - [^)]*(?:\([^)]*\))?[^)]*\)", r"exp(\1)"),
    rule(("causal_mask",), "causal-transposed causal-inverted", r"\btril\(", "triu("),
    rule(("causal_mask",), "causal-strict causal-one-ahead", r"diagonal ?= ?1", "diagonal=0"),
    rule(("padding_mask",), "mask-inverted padding-value", r"!= ", "> 1 + "),
)


@dataclass(frozen=True)
class Planted:
    keys: tuple[str, ...]
    text: str  # of the whole file


def plant(source: str, name: str, part: str) -> Iterator[Planted]:
    """Yield the file with one fault in the named function or class, for each rule that fits."""
    node = next((n for n in ast.parse(source).body if getattr(n, "name", "") == name), None)
    if node is None:
        return
    lines = source.splitlines(keepends=True)
    before, body = "".join(lines[: node.lineno - 1]), "".join(lines[node.lineno - 1 : node.end_lineno])
    after, seen = "".join(lines[node.end_lineno :]), {body}
    for each in RULES:
        changed = re.sub(each.pattern, each.new, body, count=1, flags=re.MULTILINE) if part in each.parts else body
        if "KEYS(" in changed:
            keys = re.search(r"self\.(w_?k|W_?k|k_proj|key|to_k)\(", body)
            changed = changed.replace("KEYS(", f"{keys.group(1)}(") if keys else body
        if changed not in seen and is_python(before + changed + after) and changes_code(body, changed):
            seen.add(changed)
            yield Planted(each.keys, before + changed + after)


def changes_code(old: str, new: str) -> bool:
    """Return False if only texts differ, such as a formula in a docstring."""
    return code_of(old) != code_of(new)


def code_of(text: str) -> str:
    tree = ast.parse(dedent(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    return ast.dump(tree)


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
