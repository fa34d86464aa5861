"""Load a file and find the parts it defines, by name, by signature and by trial."""

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

from .candidate import Candidate, Sizes, construct, find_forward, parameters_of
from .names import part_of, plain, role_of, weight_role
from .weights import dict_keys, iter_weights

# only these top-level statements run: loops, prints and training code do not
DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Try)


@dataclass(frozen=True)
class Problem:
    """A top-level statement that failed."""

    line: int
    error: str
    is_import: bool = False


@dataclass(frozen=True)
class Loaded:
    names: dict[str, Any]
    source: str
    problems: tuple[Problem, ...]


def load(path: Path) -> Loaded:
    """Run the file's definitions one by one, so that a failing line does not hide the others."""
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


def source_of(thing: Any, source: str) -> str:
    """Return the source lines that define this function or class."""
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


def find_candidates(loaded: Loaded, name: str | None = None, part: str | None = None) -> list[Candidate]:
    """Return the functions and classes that are parts of a Transformer, in file order."""
    found = []
    for own, thing in loaded.names.items():
        is_ours = getattr(thing, "__module__", None) == "learner"
        if not is_ours or not (inspect.isfunction(thing) or inspect.isclass(thing)) or (name and own != name):
            continue
        text = source_of(thing, loaded.source)
        engine = engine_of(thing, text, loaded.source)
        candidate = Candidate(own, part or "", thing, engine, text, loaded.names)
        try:
            kind = part or classify(candidate, tries=bool(name))
        except Exception:  # if the trial fails, go by the name
            kind = part_of(own)
        if kind is not None:
            found.append(Candidate(own, kind, thing, engine, text, loaded.names))
    if not found and not name:
        for own, thing in loaded.names.items():
            if getattr(thing, "__module__", None) == "learner" and inspect.isfunction(thing):
                text = source_of(thing, loaded.source)
                candidate = Candidate(own, "", thing, engine_of(thing, text, loaded.source), text, loaded.names)
                kind = classify_by_trial(candidate)
                if kind is not None:
                    found.append(Candidate(own, kind, thing, candidate.engine_name, text, loaded.names))
    return found


def classify(candidate: Candidate, tries: bool = False) -> str | None:
    """Return which part this is: first by its name, then by its signature or weights."""
    part = part_of(candidate.name)
    if candidate.name.startswith("_") or re.search("config|args$", candidate.name.lower()):
        return None
    if candidate.is_function:
        return classify_function(candidate, part) or (classify_by_trial(candidate) if tries else None)
    if not hasattr(candidate.thing, "forward") and "__call__" not in vars(candidate.thing) and part is None:
        return None
    return classify_class(candidate, part)


def classify_function(candidate: Candidate, part: str | None) -> str | None:
    names = [p.name for p in parameters_of(candidate.thing)]
    roles = {role_of(n, ("q", "k", "v")) for n in names}
    has_weights = sum(bool(re.match(r"^w_?[qkvo]|^w_?(query|key|value|qkv)", n.lower())) for n in names) >= 1
    has_weights = has_weights or any(weight_role(n) and dict_keys(n, candidate) for n in names)
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
        return None  # it builds the angle table and does not rotate
    return part


def classify_class(candidate: Candidate, part: str | None) -> str | None:
    """Refine the part of a class by the weights it holds."""
    if part == "sinusoidal":
        is_learned = not re.search(r"\bsin\b|\.sin\(|cos\(", candidate.source)
        return "learned" if is_learned and re.search("Embedding|Parameter|randn|normal", candidate.source) else part
    if part in ("attention", "multi_head", "rotary", None):
        try:
            thing = construct(candidate.thing, Sizes(), candidate.neighbours)
        except Exception:
            return part
        held = [w for w in iter_weights(thing) if w.array.ndim >= 2]
        roles = {weight_role(w.path) for w in held}
        if {"q", "k", "v"} <= roles or ("qkv" in roles and part is not None):
            return "multi_head" if part != "lm" else part
        asked = {role_of(p.name, ("q", "k", "v")) for p in parameters_of(find_forward(thing))}
        if not held and {"q", "k", "v"} <= asked:
            return "attention"
        return part if held else None
    return part


def classify_by_trial(candidate: Candidate) -> str | None:
    """Guess the part of a function from what it does to numbers."""
    engine = candidate.engine()
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
    required = [p for p in parameters_of(candidate.thing) if p.default is p.empty]
    for part, arguments, looks in trials:
        if len(arguments) != len(required):
            continue
        try:
            result = candidate.thing(*map(engine.to_native, arguments))
            value = engine.to_numpy(result[0] if isinstance(result, tuple) else result)
            if value is not None and looks(value):
                return part
        except Exception:
            continue
    return None
