"""Load a file and find the parts it defines, by name, by signature and by trial."""

from __future__ import annotations

import ast
import inspect
import json
import linecache
import re
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np

from .candidate import (
    Candidate,
    ExampleCall,
    NeedsModule,
    ProbeSizes,
    Role,
    construct,
    find_forward,
    one_line,
    parameters_of,
    parse_example,
)
from .names import normalize_name, part_of, role_of, size_of, weight_role
from .weights import dict_keys, iter_weights

# only these top-level statements run: loops, prints and training code do not
DEFINING = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Try,
)
STATEMENT_SECONDS = 2.0
EXAMPLE = r"^\s*#\s*clearhead:\s*(\w+\(.*\))\s*$"
# parts that people also build in a function that returns the module
FACTORIES = ("feed_forward", "swiglu", "multi_head", "attention", "layer_norm", "rms_norm")


@dataclass(frozen=True)
class FailedLine:
    """A top-level statement that failed."""

    line: int
    error: str
    is_import: bool = False


@dataclass(frozen=True)
class Loaded:
    names: dict[str, Any]
    source: str
    problems: tuple[FailedLine, ...]
    broken: dict[str, FailedLine]  # names that a failed statement should have defined
    sources: dict[str, str]  # of each function and class
    examples: dict[str, str]  # name -> example call, from comments `# clearhead: name(…)`
    is_exercise: bool


class MissingImport:
    """Stands for a name whose import failed. Any use of it raises NeedsModule."""

    def __init__(self, module: str) -> None:
        object.__setattr__(self, "module", module)

    def __getattr__(self, name: str) -> Any:
        raise NeedsModule(object.__getattribute__(self, "module"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NeedsModule(self.module)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        raise NeedsModule(self.module)


def read_source(path: Path) -> str:
    """Return the Python source of a file; of a notebook, its code cells."""
    text = path.read_text(encoding="utf-8-sig")
    return notebook_source(text) if path.suffix == ".ipynb" else text


def notebook_source(text: str) -> str:
    """Join the code cells of a notebook. Magics and shell lines become comments."""
    cells = [cell["source"] for cell in json.loads(text).get("cells", []) if cell.get("cell_type") == "code"]
    sources = ["".join(cell) for cell in cells]
    kept = [source for source in sources if not re.match(r"\s*%%(?!check\b)", source)]
    lines = [line for source in kept for line in [*source.splitlines(), ""]]
    return "\n".join(re.sub(r"^(\s*)([%!?].*)$", r"\1# \2", line) for line in lines) + "\n"


def load(path: Path) -> Loaded:
    """Run the file's definitions one by one, so that a failing line does not hide the others."""
    source = read_source(path)
    tree = ast.parse(source, str(path))
    module = types.ModuleType("learner")
    module.__file__ = str(path)
    folder = path.resolve().parent
    is_package = (folder / "__init__.py").exists() or bool(re.search(r"^\s*from\s+\.", source, re.MULTILINE))
    sys.path[:0] = [str(folder), str(Path.cwd()), *package_roots(tree, folder)]
    module.__package__ = register_package(folder) if is_package else ""
    sys.modules["learner"] = module
    linecache.cache[str(path)] = (len(source), None, source.splitlines(True), str(path))
    names, problems = module.__dict__, []
    broken: dict[str, FailedLine] = {}
    used = names_used_inside(tree)
    for statement in defining(tree.body):
        try:
            run_statement(statement, names, path)
        except (Exception, SystemExit) as error:
            problem = FailedLine(statement.lineno, one_line(error), isinstance(statement, ast.Import | ast.ImportFrom))
            problems.append(problem)
            broken |= dict.fromkeys(bind_missing(statement, names, error), problem)
        shrink_sizes(statement, names, used)
    examples = {call.partition("(")[0]: call for call in re.findall(EXAMPLE, source, re.MULTILINE)}
    is_exercise = bool(re.search(r"^Check: clearhead check \d\d_", source, re.MULTILINE))
    return Loaded(names, source, tuple(problems), broken, sources_by_name(source), examples, is_exercise)


def run_statement(statement: ast.stmt, names: dict[str, Any], path: Path) -> None:
    """Run one statement. If a decorator fails, such as the registry of a missing library, leave the decorators out."""
    # annotations stay text, so that a missing typing library hides nothing
    code = compile(ast.Module([statement], []), str(path), "exec", annotations.compiler_flag, dont_inherit=True)
    try:
        with time_limit(STATEMENT_SECONDS):
            exec(code, names)
    except Exception:
        if not getattr(statement, "decorator_list", None):
            raise
        plain = copy(statement)
        plain.decorator_list = []  # type: ignore[attr-defined]
        run_statement(plain, names, path)


def defining(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements to run. An `if` runs if it only defines names and is not the main guard."""
    for statement in body:
        if isinstance(statement, DEFINING):
            yield statement
        elif isinstance(statement, ast.If) and "__name__" not in ast.unparse(statement.test):
            inner = [*statement.body, *statement.orelse]
            if all(isinstance(s, (*DEFINING, ast.Pass)) for s in inner):
                yield statement


def package_roots(tree: ast.Module, folder: Path) -> list[str]:
    """Return the folders above the file that hold a package which it imports, such as `src`."""
    names = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and not n.level}
    roots = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    return [str(above) for above in folder.parents if any((above / root).is_dir() for root in roots)][:3]


def register_package(folder: Path) -> str:
    """Make relative and package imports work without running any `__init__.py`; return the package's name."""
    chain = [folder]
    while (chain[0] / "__init__.py").exists() and chain[0].parent != chain[0]:
        chain.insert(0, chain[0].parent)
    folders = chain[1:] or chain
    sys.path.insert(1, str(folders[0].parent))
    name = ""
    for place in folders:
        name = f"{name}.{place.name}".lstrip(".")
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(place)]
            sys.modules[name] = package
    return name


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt one statement, such as a training run, after so many seconds."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def names_used_inside(tree: ast.Module) -> set[str]:
    """Return the names that functions and classes of the file read."""
    bodies = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.id for body in bodies for node in ast.walk(body) if isinstance(node, ast.Name)}


def targets_of(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in statement.names]
    places = getattr(statement, "targets", [getattr(statement, "target", None)])
    nodes = [node for place in places if place is not None for node in ast.walk(place)]
    return [node.id for node in nodes if isinstance(node, ast.Name)]


def bind_missing(statement: ast.stmt, names: dict[str, Any], error: BaseException) -> list[str]:
    """Bind what a failed statement should define, if we can; return the names that stay undefined."""
    missing = []
    for name in targets_of(statement):
        if isinstance(statement, ast.Import | ast.ImportFrom) and name != "*":
            module = getattr(error, "name", None) or getattr(statement, "module", None) or name
            names.setdefault(name, MissingImport(str(module)))
        elif not isinstance(statement, ast.FunctionDef | ast.ClassDef) and size_of(name):
            names[name] = ProbeSizes()[str(size_of(name))]
        else:
            missing.append(name)
    return missing


def shrink_sizes(statement: ast.stmt, names: dict[str, Any], used: set[str]) -> None:
    """Replace global sizes such as `n_embd = 384` that the file's classes read by small ones."""
    value = getattr(statement, "value", None)
    constants = [value] if isinstance(value, ast.Constant) else getattr(value, "elts", [])
    if not isinstance(statement, ast.Assign) or not all(isinstance(c, ast.Constant) for c in constants):
        return
    for name in targets_of(statement):
        size = size_of(name)
        if size in ("D", "H", "G", "K", "F", "V", "L", "N") and name in used and type(names.get(name)) is int:
            is_shared = size == "G" and names[name] < next((v for n, v in names.items() if size_of(n) == "H"), 0)
            names[name] = 1 if is_shared else ProbeSizes()[size] if len(normalize_name(name)) > 1 else names[name]


def uses_torch(source: str) -> bool:
    return bool(re.search(r"^\s*(import|from)\s+torch\b", source, re.MULTILINE))


def sources_by_name(source: str) -> dict[str, str]:
    """Return the source lines of every function and class of the file, nested ones too."""
    lines = source.splitlines(keepends=True)
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return {n.name: dedent("".join(lines[n.lineno - 1 : n.end_lineno])) for n in reversed(nodes)}


def engine_of(thing: Any, text: str, source: str) -> str:
    if not uses_torch(source) and "torch" not in sys.modules:
        return "numpy"
    if any(getattr(base, "__module__", "").startswith("torch") for base in getattr(thing, "__mro__", ())):
        return "torch"
    if re.search(r"\bnp\.|\bnumpy\.", text) and not re.search(r"\btorch\.|\bF\.|\bnn\.", text):
        return "numpy"
    return "torch" if uses_torch(source) else "numpy"


def find_candidates(
    loaded: Loaded, name: str | None = None, part: str | None = None, example: str | None = None
) -> list[Candidate]:
    """Return the functions and classes that are parts of a Transformer, in file order."""
    things = {
        own: thing
        for own, thing in loaded.names.items()
        if getattr(thing, "__module__", None) == "learner" and (inspect.isfunction(thing) or inspect.isclass(thing))
    }
    if name is not None:
        things = {own: thing for own, thing in things.items() if own == name}
    found = [make_candidate(own, thing, loaded, example) for own, thing in things.items()]
    parts = {candidate.name: part or part_of_candidate(candidate, tries=name is not None) for candidate in found}
    bases = {base for thing in things.values() if inspect.isclass(thing) for base in thing.__mro__[1:]}
    if not any(parts.values()) and name is None:
        parts = {c.name: classify_by_trial(c) for c in found if c.is_function}
    return [
        replace(candidate, part=kind)
        for candidate in found
        if (kind := parts.get(candidate.name))
        and not (candidate.thing in bases and is_abstract(candidate))
        and not inspect.isabstract(candidate.thing)
        and not (inspect.isclass(candidate.thing) and issubclass(candidate.thing, Enum))
        and not getattr(getattr(candidate.thing, "forward", None), "__isabstractmethod__", False)
    ]


def make_candidate(name: str, thing: Any, loaded: Loaded, example: str | None) -> Candidate:
    text = loaded.sources.get(getattr(thing, "__name__", ""), "")
    engine = engine_of(thing, text, loaded.source)
    call = example_for(name, thing, loaded, example)
    broken = {own: problem.line for own, problem in loaded.broken.items()}
    is_factory = engine == "torch" and part_of(name) in FACTORIES and returns_module(thing, text)
    source = loaded.source
    return Candidate(name, "", thing, engine, text, loaded.names, call, broken, loaded.is_exercise, source, is_factory)


def example_for(name: str, thing: Any, loaded: Loaded, example: str | None) -> ExampleCall | None:
    """Return the example call that was given, or the one in a comment `# clearhead: name(…)`."""
    text = example or loaded.examples.get(name)
    return None if text is None else parse_example(text, thing, loaded.names)


def part_of_candidate(candidate: Candidate, tries: bool) -> str | None:
    try:
        return classify(candidate, tries=tries)
    except Exception:  # if the trial fails, go by the name
        return part_of(candidate.name)


def is_abstract(candidate: Candidate) -> bool:
    """Return True for a base class without a computation of its own."""
    return not re.search(r"@|matmul|einsum|softmax|Linear|\.dot\(|mean\(|exp\(", candidate.source)


def returns_module(thing: Any, text: str) -> bool:
    """Return True for a function of sizes that returns a module: `def FeedForward(dim): return nn.Sequential(…)`."""
    if not inspect.isfunction(thing) or not re.search(r"return\s+[\s\S]*(nn|torch)\.", text):
        return False
    required = [p.name for p in parameters_of(thing) if p.default is p.empty]
    inputs = {role_of(p.name, ("q", "k", "v", "x", "mask", "tokens")) for p in parameters_of(thing)} - {None}
    return bool(required) and all(size_of(name) for name in required) and not inputs


def find_broken(loaded: Loaded, name: str | None, part: str | None) -> list[dict[str, Any]]:
    """Return the parts whose definition failed, with the reason."""
    found = []
    for own, problem in loaded.broken.items():
        kind = part_of(own) if (name is None or own == name) else None
        if kind is not None and re.search(rf"^\s*(class|def) {own}\b", loaded.source, re.MULTILINE):
            found.append({"name": own, "part": part or kind, "line": problem.line, "error": problem.error})
    return found


def classify(candidate: Candidate, tries: bool = False) -> str | None:
    """Return which part this is: first by its name, then by its signature or weights."""
    part = part_of(candidate.name)
    if candidate.name.startswith("_") or re.search("config|args$", candidate.name.lower()):
        return None
    if candidate.is_function:
        return classify_function(candidate, part) or (classify_by_trial(candidate) if tries else None)
    if candidate.is_factory:
        return part
    is_callable = hasattr(candidate.thing, "forward") or "__call__" in vars(candidate.thing)
    methods = [n for n, m in vars(candidate.thing).items() if inspect.isfunction(m) and not n.startswith("__")]
    if not is_callable and (part is None or not methods):
        return None
    return classify_class(candidate, part)


def classify_function(candidate: Candidate, part: str | None) -> str | None:
    names = [p.name for p in parameters_of(candidate.thing)]
    roles = {role_of(n, ("q", "k", "v")) for n in names}
    if candidate.example is not None:
        roles |= {shown.name for shown in candidate.example.call.values() if isinstance(shown, Role)}
    has_weights = sum(bool(re.match(r"^w_?[qkvo]|^w_?(query|key|value|qkv)", n.lower())) for n in names) >= 1
    has_weights = has_weights or any(weight_role(n) and dict_keys(n, candidate) for n in names)
    if part in ("attention", "multi_head"):
        return "multi_head" if has_weights else "attention" if {"q", "k", "v"} <= roles else None
    if part is None and {"q", "k", "v"} <= roles:
        return "multi_head" if has_weights else "attention"
    if part is None and has_weights:
        return "multi_head"
    if part is None and {"gamma", "beta"} <= {normalize_name(n) for n in names}:
        return "layer_norm"
    if part in ("lm", "encoder", "encoder_block", "decoder_block", "learned", "mixer"):
        return None
    if part == "feed_forward" and sum(n.lower().startswith("w") for n in names) == 3:
        return "swiglu"
    if part == "rotary" and not any(normalize_name(n) in ("x", "q", "xq", "k", "query", "vec", "t") for n in names):
        return None  # it builds the angle table and does not rotate
    if part == "rotary" and len(names) == 1 and re.search(r"(cat|concatenate|stack)\(.*-", candidate.source):
        return None if not re.search(r"\b(cos|sin)\b", candidate.source) else part  # `rotate_half` swaps the halves
    if part == "layer_norm" and re.search(r"(?i)rms|root mean|t5", candidate.name + candidate.source):
        return "rms_norm"
    if re.fullmatch(r"(?i)norm(alize)?", candidate.name) and classify_by_trial(candidate) != "layer_norm":
        return "rms_norm" if re.search(r"rms|rsqrt|mean", candidate.source) else None
    return part


def classify_class(candidate: Candidate, part: str | None) -> str | None:
    """Refine the part of a class by the weights it holds."""
    if part == "sinusoidal":
        is_learned = not re.search(r"\bsin\b|\.sin\(|cos\(", candidate.source) or trains_table(candidate)
        return "learned" if is_learned and re.search("Embedding|Parameter|randn|normal", candidate.source) else part
    if part == "layer_norm" and re.search(r"(?i)rms|root mean|t5", candidate.name + candidate.source):
        return "rms_norm"
    if part in ("attention", "multi_head", "rotary", "feed_forward", "swiglu", "lm", None):
        try:
            thing = construct(candidate.thing, ProbeSizes(), candidate.neighbours)
        except Exception:
            return part
        if part == "lm":
            return part if reads_tokens(thing) else "encoder"
        if part == "rotary" and builds_table(thing):
            return None
        if part is None and is_block(thing):
            return "encoder_block"
        if part is None and is_stack(thing):
            return None
        held = [w for w in iter_weights(thing) if w.array.ndim >= 2]
        if part in ("feed_forward", "swiglu"):
            return part if held else None  # an activation such as GEGLU has no weights
        if part in ("attention", "multi_head") and is_block(thing):
            return "decoder_block"
        roles = {weight_role(w.path) for w in held}
        if {"q", "k", "v"} <= roles or ((roles & {"qkv", "kv"}) and part is not None):
            return "multi_head"
        asked = {role_of(p.name, ("q", "k", "v")) for p in parameters_of(find_forward(thing))}
        if not held and {"q", "k", "v"} <= asked:
            return "attention"
        return part if held or part == "rotary" else None
    return part


def trains_table(candidate: Candidate) -> bool:
    """Return True if the class, with its defaults, holds an embedding that is trained."""
    try:
        thing = construct(candidate.thing, ProbeSizes(), candidate.neighbours)
    except Exception:
        return False
    modules = thing.modules() if hasattr(thing, "modules") else ()
    return any(type(m).__name__ == "Embedding" and m.weight.requires_grad for m in modules)


def reads_tokens(thing: Any) -> bool:
    """Return True if the model holds an embedding or a head of the vocabulary's size, or is not made of arrays."""
    held = list(iter_weights(thing))
    return not held or any(ProbeSizes().V in w.array.shape for w in held)


def is_block(thing: Any) -> bool:
    """Return True if it holds attention and a feed-forward layer: `ResidualAttentionBlock` is a block."""
    from .parts.sublayer_calls import kind_of

    children = thing.named_children() if hasattr(thing, "named_children") else ()
    kinds = {kind_of(name, child) for name, child in children}
    return {"attention", "ffn"} <= kinds


def is_stack(thing: Any) -> bool:
    """Return True if it holds an embedding or a list of blocks: a model, or a part of one that we have no check for."""
    from .parts.sublayer_calls import kind_of

    modules = thing.named_modules() if hasattr(thing, "named_modules") else ()
    return any(type(m).__name__ == "Embedding" or kind_of("", m) == "block" for name, m in modules if name)


def builds_table(thing: Any) -> bool:
    """Return True if it takes a length only: it builds the cosines and sines and does not rotate."""
    parameters = [p for p in parameters_of(find_forward(thing)) if p.default is p.empty]
    names = [p.name for p in parameters if p.name not in ("device", "dtype")]
    return bool(names) and all(size_of(name) == "L" or role_of(name, ("length",)) for name in names)


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
