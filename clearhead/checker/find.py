"""What a file defines, by name, by signature and by trial."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .names import part_of, plain, role_of, weight_role
from .suspect import Sizes, Suspect, construct, forward_of, parameters_of
from .weights import keys_of, walk

# statements that define something; loops, prints and training at the top level are not run
DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Try)


@dataclass(frozen=True)
class Problem:
    """A line of the file that could not be run."""

    line: int
    error: str
    is_import: bool = False


@dataclass(frozen=True)
class Loaded:
    names: dict[str, Any]
    source: str
    problems: tuple[Problem, ...]


def load(path: Path) -> Loaded:
    """Run the definitions of the file one by one, so that one that fails does not take the others with it."""
    source = path.read_text(encoding="utf-8-sig")
    tree = ast.parse(source, str(path))
    module = types.ModuleType("learner")
    module.__file__ = str(path)
    sys.modules["learner"] = module
    sys.path.insert(0, str(path.resolve().parent))
    problems = []
    for statement in tree.body:
        if not isinstance(statement, DEFINING):
            continue
        code = compile(ast.Module([statement], []), str(path), "exec")
        try:
            exec(code, module.__dict__)
        except Exception as error:
            is_import = isinstance(statement, ast.Import | ast.ImportFrom)
            problems.append(Problem(statement.lineno, f"{type(error).__name__}: {error}"[:160], is_import))
    return Loaded(module.__dict__, source, tuple(problems))


def uses_torch(source: str) -> bool:
    return bool(re.search(r"^\s*(import|from)\s+torch\b", source, re.MULTILINE))


def text_of(thing: Any, source: str) -> str:
    """The lines that define it."""
    name = getattr(thing, "__name__", "")
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return ast.get_source_segment(source, node) or ""
    return ""


def engine_of(thing: Any, text: str, source: str) -> str:
    if not uses_torch(source) and "torch" not in sys.modules:
        return "numpy"
    if any(getattr(base, "__module__", "").startswith("torch") for base in getattr(thing, "__mro__", ())):
        return "torch"
    if re.search(r"\bnp\.|\bnumpy\.", text) and not re.search(r"\btorch\.|\bF\.|\bnn\.", text):
        return "numpy"
    return "torch" if uses_torch(source) else "numpy"


def suspects(loaded: Loaded, name: str | None = None, part: str | None = None) -> list[Suspect]:
    """Everything in the file that is a part, in the order of its definition."""
    found = []
    for own, thing in loaded.names.items():
        is_ours = getattr(thing, "__module__", None) == "learner"
        if not is_ours or not (inspect.isfunction(thing) or inspect.isclass(thing)) or (name and own != name):
            continue
        text = text_of(thing, loaded.source)
        engine = engine_of(thing, text, loaded.source)
        suspect = Suspect(own, part or "", thing, engine, text, loaded.names)
        try:
            kind = part or classified(suspect, tries=bool(name))
        except Exception:  # a trial that fails says nothing; the name still does
            kind = part_of(own)
        if kind is not None:
            found.append(Suspect(own, kind, thing, engine, text, loaded.names))
    if not found and not name:
        for own, thing in loaded.names.items():
            if getattr(thing, "__module__", None) == "learner" and inspect.isfunction(thing):
                text = text_of(thing, loaded.source)
                suspect = Suspect(own, "", thing, engine_of(thing, text, loaded.source), text, loaded.names)
                kind = by_trial(suspect)
                if kind is not None:
                    found.append(Suspect(own, kind, thing, suspect.engine_name, text, loaded.names))
    return found


def classified(suspect: Suspect, tries: bool = False) -> str | None:
    """The part that this is: the name says so, the signature corrects it."""
    part = part_of(suspect.name)
    if suspect.name.startswith("_") or re.search("config|args$", suspect.name.lower()):
        return None
    if suspect.is_function:
        return by_signature(suspect, part) or (by_trial(suspect) if tries else None)
    if not hasattr(suspect.thing, "forward") and "__call__" not in vars(suspect.thing) and part is None:
        return None
    return by_weights(suspect, part)


def by_signature(suspect: Suspect, part: str | None) -> str | None:
    names = [p.name for p in parameters_of(suspect.thing)]
    roles = {role_of(n, ("q", "k", "v")) for n in names}
    has_weights = sum(bool(re.match(r"^w_?[qkvo]|^w_?(query|key|value|qkv)", n.lower())) for n in names) >= 1
    has_weights = has_weights or any(weight_role(n) and keys_of(n, suspect) for n in names)
    if part in ("attention", "multi_head"):
        return "multi_head" if has_weights else "attention" if {"q", "k", "v"} <= roles else None
    if part is None and {"q", "k", "v"} <= roles:
        return "multi_head" if has_weights else "attention"
    if part is None and has_weights:
        return "multi_head"
    if part is None and {"gamma", "beta"} <= {plain(n) for n in names}:
        return "layer_norm"
    if part in ("lm", "encoder", "encoder_block", "decoder_block", "learned"):
        return None
    if part == "feed_forward" and sum(n.lower().startswith("w") for n in names) == 3:
        return "swiglu"
    if part == "rotary" and not any(plain(n) in ("x", "q", "xq", "k", "query", "vec", "t") for n in names):
        return None  # makes the table, does not turn
    return part


def by_weights(suspect: Suspect, part: str | None) -> str | None:
    """A class called attention that holds W_Q, W_K, W_V is multi-head; a table that is trained is learned."""
    if part == "sinusoidal":
        is_learned = not re.search(r"\bsin\b|\.sin\(|cos\(", suspect.source)
        return "learned" if is_learned and re.search("Embedding|Parameter|randn|normal", suspect.source) else part
    if part in ("attention", "multi_head", "rotary", None):
        try:
            thing = construct(suspect.thing, Sizes(), suspect.neighbours)
        except Exception:
            return part
        held = [w for w in walk(thing) if w.array.ndim >= 2]
        roles = {weight_role(w.path) for w in held}
        if {"q", "k", "v"} <= roles or ("qkv" in roles and part is not None):
            return "multi_head" if part != "lm" else part
        asked = {role_of(p.name, ("q", "k", "v")) for p in parameters_of(forward_of(thing))}
        if not held and {"q", "k", "v"} <= asked:
            return "attention"
        return part if held else None
    return part


def by_trial(suspect: Suspect) -> str | None:
    """A function with a name that says nothing, by what it does to numbers."""
    engine = suspect.engine()
    x = np.random.default_rng(0).normal(size=(3, 5))
    trials: list[tuple[str, tuple[Any, ...], Any]] = [
        ("softmax", (x,), lambda y: y.shape == x.shape and np.isclose(y.sum(-1), 1).all() and (y >= 0).all()),
        (
            "layer_norm",
            (x,),
            lambda y: (
                y.shape == x.shape and np.allclose(y.mean(-1), 0, atol=1e-3) and np.allclose(y.std(-1), 1, atol=0.2)
            ),
        ),
        ("causal_mask", (4,), lambda y: y.size == 16 and len(np.unique(y)) == 2),
        ("attention", (x, x, x), lambda y: y.shape == x.shape),
    ]
    required = [p for p in parameters_of(suspect.thing) if p.default is p.empty]
    for part, arguments, looks in trials:
        if len(arguments) != len(required):
            continue
        try:
            result = suspect.thing(*map(engine.give, arguments))
            value = engine.take(result[0] if isinstance(result, tuple) else result)
            if value is not None and looks(value):
                return part
        except Exception:
            continue
    return None
