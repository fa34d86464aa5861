"""Checks of properties that every part must have, such as determinism and a correct gradient."""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..candidate import (
    Candidate,
    CannotCall,
    CannotConstruct,
    NeedsFloat32,
    NeedsModule,
    NotWritten,
    ProbeSizes,
    one_line,
    pick_array,
)
from ..diagnostic import Diagnostic, Example
from ..engine import MetaTorch, NumPy, equal
from ..weights import Weight, is_array, iter_weights

Inputs = Mapping[str, Any]
OURS = (
    r"clearhead[/\\]checker[/\\]|site-packages|dist-packages|[/\\]lib[/\\]python"  # frames outside the learner's code
)


# errors that are not a verdict on the code: checks re-raise them
NO_VERDICT = (CannotCall, CannotConstruct, NeedsFloat32, NeedsModule, NotWritten, NotImplementedError)


# words for features beyond plain attention that the checker does not model
UNKNOWN_PARTS = (
    r"rope|rotary|freqs|\bcos\b|alibi|slope|relative|rel_?pos|window|q_?norm|k_?norm|norm_?[qk]|softcap|talking"
    r"|topk|null_k|mem_k|sink|gate|feature_map|elu\b|sparse|local_att|lora|pos_?bias|position_bias|conv|linear_?att|fast_?att|performer|kernel_|random_feat"
)


def is_about_dtype(error: str, candidate: Candidate) -> bool:
    """Return True if an error says that float64 met another type, so that float32 is worth a try."""
    is_double = candidate.engine_name == "torch" and candidate.dtype == "float64"
    return is_double and bool(re.search(r"dtype|scalar type|BFloat16|\bHalf\b", error))


class Recorder:
    """Records diagnostics and assumptions about one candidate, and sends each one immediately."""

    def __init__(self, candidate: Candidate, send: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        self.candidate, self.send = candidate, send
        self.diagnostics: list[Diagnostic] = []
        self.assumed: list[str] = []

    def add(self, key: str, example: Example | None = None, **values: Any) -> None:
        if any(diagnostic.key == key for diagnostic in self.diagnostics):
            return
        diagnostic = Diagnostic(
            self.candidate.part, self.candidate.name, key, values, example, self.candidate.engine_name
        )
        self.diagnostics.append(diagnostic)
        self.send({"diagnostic": diagnostic.to_dict()})

    def cannot_run(self, error: BaseException | str, inputs: Inputs) -> None:
        """Record that the first call failed: either our call is wrong or the code is, so there is no verdict."""
        text = one_line(error) if isinstance(error, BaseException) else error
        if is_about_dtype(text, self.candidate):
            raise NeedsFloat32
        self.add("cannot-run", Example(inputs, None, None), error=text, name=self.candidate.name)

    def assume(self, key: str) -> None:
        if key not in self.assumed:
            self.assumed.append(key)
            self.send({"assumed": key})

    def start(self, check: str) -> None:
        """Announce which check runs next, so that a timeout or crash can name it."""
        self.send({"at": check})

    @property
    def is_clean(self) -> bool:
        """True if only notes have been recorded."""
        return all(diagnostic.severity == "note" for diagnostic in self.diagnostics)

    @property
    def is_wrong(self) -> bool:
        return any(diagnostic.severity == "wrong" for diagnostic in self.diagnostics)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def small_integers(generator: np.random.Generator, *shape: int, top: int = 2) -> np.ndarray:
    """Draw small integers, so that a reader can follow the example."""
    return generator.integers(-top, top + 1, shape).astype(float)


@dataclass
class Runner:
    """Runs the learner's code. `native(inputs, engine)` calls it and returns its result unchanged."""

    native: Callable[[Inputs, NumPy], Any]
    engine: NumPy
    shape: Callable[[Inputs], tuple[int, ...]]  # of the result
    layout: Callable[[np.ndarray], np.ndarray] = field(default=lambda a: a)  # converts the result to our layout

    def __call__(self, inputs: Inputs, engine: NumPy | None = None) -> np.ndarray | None:
        engine = engine or self.engine
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = pick_array(self.native(inputs, engine), self.shape(inputs), engine)
        return None if found is None else self.layout(found)

    def attempt(self, inputs: Inputs, engine: NumPy | None = None) -> tuple[np.ndarray | None, str]:
        """Return the result and an empty string, or None and the error in one line."""
        try:
            return self(inputs, engine), ""
        except NO_VERDICT:
            raise
        except NameError as error:
            if isinstance(error, UnboundLocalError):
                return None, one_line(error)
            raise
        except Exception as error:
            return None, one_line(error)


def smallest_failure(
    cases: Iterable[Inputs],
    run: Runner,
    expected: Callable[[Inputs], np.ndarray],
    weights: Mapping[str, Any] | None = None,
) -> Example | None:
    """Return the first failing case; the cases are ordered by size."""
    for inputs in cases:
        want = expected(inputs)
        got, error = run.attempt(inputs)
        if not equal(got, want, run.engine.tolerance):
            return Example(shown_inputs(inputs), want, error or got, weights or {})
    return None


def shown_inputs(inputs: Inputs) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if value is not None}


def arrays_only(inputs: Inputs) -> dict[str, np.ndarray]:
    return {n: a for n, a in inputs.items() if isinstance(a, np.ndarray) and a.dtype.kind == "f"}


def check_inputs_unchanged(recorder: Recorder, run: Runner, cases: Iterable[Inputs]) -> None:
    """Check that the code does not modify its arguments."""
    recorder.start("inputs_unchanged")
    for inputs in cases:
        given = {name: run.engine.to_native(value) for name, value in inputs.items()}
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                run.native(given, without_copy(run.engine))
        except Exception:
            continue
        for name, value in inputs.items():
            after, before = run.engine.to_numpy(given[name]), run.engine.to_numpy(run.engine.to_native(value))
            if isinstance(value, np.ndarray) and after is not None and not equal_exactly(after, before):
                recorder.add("inputs-changed", Example(shown_inputs(inputs), value, after), argument=name)
                return


def equal_exactly(a: np.ndarray, b: np.ndarray | None) -> bool:
    return b is not None and bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def without_copy(engine: NumPy) -> NumPy:
    """Return an engine that passes arrays on without a copy, so that in-place changes are visible."""
    same = copy.copy(engine)
    ours = () if engine.name == "numpy" else (np.ndarray, dict)
    same.to_native = lambda value: engine.to_native(value) if isinstance(value, ours) else value  # type: ignore[method-assign]
    return same


def check_deterministic(recorder: Recorder, run: Runner, inputs: Inputs) -> bool:
    """Check that two runs in eval mode agree."""
    recorder.start("deterministic")
    first, second = run.attempt(inputs)[0], run.attempt(inputs)[0]
    if first is None or second is None or np.array_equal(first, second, equal_nan=True):
        return True
    example = Example(shown_inputs(inputs), first, second)
    recorder.add(
        "dropout-in-eval" if looks_like_dropout(first, second, recorder.candidate.source) else "not-deterministic",
        example,
    )
    return False


def looks_like_dropout(first: np.ndarray, second: np.ndarray, source: str) -> bool:
    return bool(re.search(r"dropout|drop\(", source, re.IGNORECASE)) or bool((first == 0).any() or (second == 0).any())


def check_views(recorder: Recorder, run: Runner, inputs: Inputs) -> None:
    """Check that non-contiguous arrays work."""
    recorder.start("non_contiguous")
    want, _ = run.attempt(inputs)
    if want is None:
        return

    def make_strided(value: Any) -> Any:
        given = run.engine.to_native(value)
        if not isinstance(value, np.ndarray) or value.ndim < 2 or value.dtype.kind != "f":
            return given
        one, two = {2: (0, 1), 3: (0, 1)}.get(value.ndim, (1, 2))
        if run.engine.name == "torch":
            return given.transpose(one, two).contiguous().transpose(one, two)
        return np.ascontiguousarray(given.swapaxes(one, two)).swapaxes(one, two)

    got, error = run.attempt({n: make_strided(v) for n, v in inputs.items()}, without_copy(run.engine))
    if error or not equal(got, want, run.engine.tolerance):
        recorder.add("needs-contiguous", Example(shown_inputs(inputs), want, error or got))


def check_dtype(recorder: Recorder, run: Runner, inputs: Inputs) -> None:
    recorder.start("dtype")
    if run.engine.name != "torch":
        return
    result = run.native(inputs, run.engine)
    first = result[0] if isinstance(result, tuple | list) else result
    got = str(getattr(first, "dtype", "")).removeprefix("torch.")
    if got and got != run.engine.dtype and got.startswith(("float", "bfloat")):
        recorder.add("dtype-changed", Example({}, run.engine.dtype, got), given=run.engine.dtype, got=got)


def check_device(recorder: Recorder, run: Runner, inputs: Inputs, thing: Any = None) -> None:
    """Check that no tensor stays on the CPU when weights and inputs are on another device."""
    recorder.start("device")
    if (
        run.engine.name != "torch"
        or recorder.is_wrong
        or not (hasattr(thing, "state_dict") or recorder.candidate.is_function)
    ):
        return
    from ..device import DeviceMismatch, RequireOneDevice

    try:
        with warnings.catch_warnings(), RequireOneDevice():
            warnings.simplefilter("ignore")
            result = run.native(inputs, MetaTorch(run.engine.dtype))
    except DeviceMismatch as error:
        theirs = [f for f in traceback.extract_tb(error.__traceback__) if not re.search(OURS, f.filename)]
        if theirs:
            recorder.add("device", line=theirs[-1].lineno, code=theirs[-1].line or "")
        return
    except Exception:
        return
    first = result[0] if isinstance(result, tuple | list) else result
    if str(getattr(first, "device", "meta")) == "cpu":
        recorder.add("device-changed")


def check_gradient(recorder: Recorder, run: Runner, inputs: Inputs) -> None:
    """Compare autograd with finite differences of the forward pass, in float64, along random directions."""
    recorder.start("gradient")
    if run.engine.name != "torch" or run.engine.dtype != "float64":
        return
    import torch

    given = {n: run.engine.to_native(v) for n, v in inputs.items()}
    leaves = {n: given[n].clone().requires_grad_() for n in arrays_only(inputs)}
    shape = run.shape(inputs)

    def out(at: Mapping[str, Any]) -> Any:
        result = run.native({**given, **at}, run.engine)
        items = result if isinstance(result, tuple | list) else [result]
        fitting = [t for t in items if isinstance(t, torch.Tensor) and tuple(t.shape) == shape]
        return fitting[0] if fitting else items[0]

    try:
        result = out(leaves)
        generator = torch.Generator().manual_seed(0)
        cotangent = torch.randn(result.shape, generator=generator, dtype=result.dtype)
        if not result.requires_grad:
            recorder.add("gradient-cut", argument=", ".join(leaves))
            return
        result.backward(cotangent)  # torch.autograd.grad would refuse checkpointed layers
        gradients = [leaf.grad for leaf in leaves.values()]
    except (RuntimeError, TypeError) as error:
        if "checkpoint" not in recorder.candidate.file_source:  # checkpointed code runs without autograd
            recorder.add("gradient-fails", error=one_line(error))
        return
    with torch.no_grad():
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            direction = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
            got = 0.0 if gradient is None else (gradient * direction).sum().item()
            slopes = []
            for h, room in ((1e-6, 1e-4), (1e-3, 2e-2)):  # the wider step suits code that computes in float32
                up, down = (out({**leaves, name: leaf + sign * h * direction}) for sign in (1, -1))
                slopes.append((((up - down) / (2 * h)) * cotangent).sum().item())
                if abs(slopes[-1] - got) <= room * max(1.0, abs(slopes[-1])) or not np.isfinite(slopes[-1]):
                    break
            else:
                recorder.add("gradient-wrong", Example({}, round(slopes[0], 5), round(got, 5)), argument=name)
                return


def check_float16(
    recorder: Recorder, run: Runner, inputs: Inputs, expected: np.ndarray, masked: bool = False, tolerance: float = 3e-2
) -> None:
    """Check that float16 inputs give about the same result, without overflow or NaN."""
    recorder.start("float16")
    if recorder.candidate.dtype != "float64":  # it chooses its types itself
        return
    half = type(run.engine)("float16")
    try:
        got = run(inputs, half)
    except (CannotCall, NotWritten):
        return
    except Exception as error:
        recorder.add("half-fails", Example(shown_inputs(inputs), expected, one_line(error)), error=one_line(error))
        return
    if got is None or not equal(got, expected, tolerance):
        recorder.add("half-differs", Example(shown_inputs(inputs), expected, got))


def cast_module(thing: Any, engine: NumPy) -> Any:
    """Return the module in the engine's dtype and device, copied only if necessary."""
    if engine.name != "torch" or not hasattr(thing, "state_dict"):
        return thing
    real = [p for p in thing.parameters() if p.is_floating_point()]
    if all(str(p.dtype).endswith(engine.dtype) for p in real) and not isinstance(engine, MetaTorch):
        return thing
    for module in thing.modules():  # stored attention maps cannot be copied with their autograd history
        for name, value in list(vars(module).items()):
            if is_array(value) and value.grad_fn is not None:
                setattr(module, name, value.detach())
    return engine.eval_mode(copy.deepcopy(thing))


def mixes_rows(run: Callable[[np.ndarray], np.ndarray | None], x: np.ndarray, axis: int) -> bool | None:
    """Return whether a change in one item along an axis changes another item; None if it cannot run."""
    other = x.copy()
    last = [slice(None)] * x.ndim
    last[axis] = slice(1, None)
    other[tuple(last)] *= -2
    one, two = run(np.ascontiguousarray(x)), run(other)
    if one is None or two is None or one.shape != x.shape:
        return None
    return not equal(np.take(one, 0, axis), np.take(two, 0, axis), 1e-5)


@dataclass
class InnerNorm:
    """A norm that a sublayer applies to its own input, as in vit-pytorch."""

    module: Any
    engine: NumPy
    weights: set[int]  # ids of its parameters and buffers

    def __call__(self, x: np.ndarray) -> np.ndarray:
        with self.engine.no_grad():
            found = self.engine.to_numpy(self.module(self.engine.to_native(x)))
        return x if found is None else found


Layer = Callable[[np.ndarray], np.ndarray]
# how a sublayer combines its computation f with its own norm n and perhaps a residual
WRAPS: dict[str, Callable[[np.ndarray, Layer, Layer], np.ndarray]] = {
    "norm_inside": lambda x, f, n: f(n(x)),
    "residual_post": lambda x, f, n: n(x + f(x)),
    "residual_pre": lambda x, f, n: x + f(n(x)),
}


def find_inner_norm(thing: Any, engine: NumPy) -> InnerNorm | None:
    """Return the norm inside a torch sublayer, if it has exactly one."""
    if engine.name != "torch" or not hasattr(thing, "named_modules"):
        return None
    from .sublayer_calls import kind_of

    norms = [m for name, m in thing.named_modules() if name and kind_of(name.split(".")[-1], m) == "norm"]
    norms = [m for m in norms if any(True for _ in m.parameters())]
    if len(norms) != 1:
        return None
    return InnerNorm(norms[0], engine, {id(p) for p in (*norms[0].parameters(), *norms[0].buffers())})


def check_dropout_mean(recorder: Recorder, sizes: Any, value: Callable[[Any, np.ndarray], Any], x: np.ndarray) -> None:
    """Check that dropout keeps the mean: the kept values are divided by 1 − p."""
    recorder.start("dropout")
    candidate = recorder.candidate
    if (
        candidate.engine_name != "torch"
        or not candidate.is_class
        or "drop" not in candidate.source.lower()
        or recorder.is_wrong
    ):
        return
    import torch

    module = candidate.instantiate(replace(sizes, dropout=0.5))
    if not isinstance(module, torch.nn.Module):
        return
    module = module.double().train()

    def of(batch: np.ndarray) -> np.ndarray:
        found = pick_array(value(module, batch), batch.shape, candidate.engine())
        return batch if found is None else found

    with torch.no_grad():
        sampled = of(np.repeat(x, 4000, 0))
        module.eval()
        quiet = of(x)[0]
    mean, error = sampled.mean(0), sampled.std(0) / len(sampled) ** 0.5
    if (np.abs(mean - quiet) > 6 * error + 1e-6).any():
        recorder.add("dropout-scale", Example({"x": x, "p": 0.5}, quiet, mean.round(3)))


def check_registered(recorder: Recorder, thing: Any) -> None:
    """Check that the optimizer sees every weight: no plain lists, no plain tensors."""
    candidate = recorder.candidate
    fresh = (
        candidate.instantiate(ProbeSizes()) if candidate.is_class else thing
    )  # a new object: a forward pass may have stored an attention map
    loose = [w for w in iter_weights(fresh) if not w.registered and w.array.ndim >= 2]
    if loose and candidate.is_class:
        again = {w.path: w.array for w in iter_weights(candidate.instantiate(ProbeSizes(), seed=1))}
        loose = [w for w in loose if not is_constant(w, again.get(w.path))]
    if loose:
        recorder.add("unregistered", weights=", ".join(w.path for w in loose[:3]))


def is_constant(weight: Weight, again: np.ndarray | None) -> bool:
    """Return True for tables such as masks and sines: they do not depend on the seed."""
    if again is None or getattr(weight.value, "requires_grad", False):
        return False
    return np.array_equal(weight.array, again) and np.unique(again).size > 1
