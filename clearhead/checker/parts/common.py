"""Properties that every part must have, checked on a closure that runs the learner's code."""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..engine import Elsewhere, NumPy, equal
from ..finding import Example, Finding
from ..suspect import CannotCall, NotWritten, Sizes, Suspect, pick
from ..weights import Weight, is_array, walk

Inputs = Mapping[str, Any]
OURS = (
    r"clearhead[/\\]checker[/\\]|site-packages|dist-packages|[/\\]lib[/\\]python"  # frames that are not the learner's
)


class Voice:
    """Collects what is found about one suspect; `tell` hears of everything as it happens."""

    def __init__(self, suspect: Suspect, tell: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        self.suspect, self.tell = suspect, tell
        self.findings: list[Finding] = []
        self.assumed: list[str] = []

    def say(self, key: str, example: Example | None = None, **values: Any) -> None:
        if any(finding.key == key for finding in self.findings):
            return
        finding = Finding(self.suspect.part, self.suspect.name, key, values, example)
        self.findings.append(finding)
        self.tell({"finding": finding.to_dict()})

    def assume(self, key: str) -> None:
        if key not in self.assumed:
            self.assumed.append(key)
            self.tell({"assumed": key})

    def at(self, check: str) -> None:
        """Which check is running, in case the code never comes back."""
        self.tell({"at": check})

    @property
    def is_clean(self) -> bool:
        """Nothing but notes so far."""
        return all(finding.severity == "note" for finding in self.findings)

    @property
    def is_wrong(self) -> bool:
        return any(finding.severity == "wrong" for finding in self.findings)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def whole(generator: np.random.Generator, *shape: int, top: int = 2) -> np.ndarray:
    """Small whole numbers that a reader can follow."""
    return generator.integers(-top, top + 1, shape).astype(float)


def error_text(error: BaseException) -> str:
    line = str(error).strip().splitlines()
    return f"{type(error).__name__}: {line[0] if line else ''}".rstrip(": ")[:160]


@dataclass
class Runner:
    """`native(inputs, engine)` calls the learner's code on arrays or tensors and returns what it returned."""

    native: Callable[[Inputs, NumPy], Any]
    engine: NumPy
    shape: Callable[[Inputs], tuple[int, ...]]  # of the result
    layout: Callable[[np.ndarray], np.ndarray] = field(default=lambda a: a)  # theirs -> ours

    def __call__(self, inputs: Inputs, engine: NumPy | None = None) -> np.ndarray | None:
        engine = engine or self.engine
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = pick(self.native(inputs, engine), self.shape(inputs), engine)
        return None if found is None else self.layout(found)

    def attempt(self, inputs: Inputs, engine: NumPy | None = None) -> tuple[np.ndarray | None, str]:
        """The result, or the error in one line. Not knowing how to call is no error of the learner's."""
        try:
            return self(inputs, engine), ""
        except (CannotCall, NotWritten, NotImplementedError):
            raise
        except Exception as error:
            return None, error_text(error)


def smallest(
    cases: Iterable[Inputs],
    run: Runner,
    expected: Callable[[Inputs], np.ndarray],
    weights: Mapping[str, Any] | None = None,
) -> Example | None:
    """The first of the cases, ordered by size, that comes out wrong."""
    for inputs in cases:
        want = expected(inputs)
        got, error = run.attempt(inputs)
        if not equal(got, want, run.engine.tolerance):
            return Example(shown(inputs), want, error or got, weights or {})
    return None


def shown(inputs: Inputs) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if value is not None}


def arrays_only(inputs: Inputs) -> dict[str, np.ndarray]:
    return {n: a for n, a in inputs.items() if isinstance(a, np.ndarray) and a.dtype.kind == "f"}


def keeps_inputs(voice: Voice, run: Runner, cases: Iterable[Inputs]) -> None:
    """The caller's arrays are the same afterwards."""
    voice.at("inputs_unchanged")
    for inputs in cases:
        given = {name: run.engine.give(value) for name, value in inputs.items()}
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                run.native(given, _as_is(run.engine))
        except Exception:
            continue
        for name, value in inputs.items():
            after = run.engine.take(given[name])
            if isinstance(value, np.ndarray) and after is not None and not np.array_equal(after, value, equal_nan=True):
                voice.say("inputs-changed", Example(shown(inputs), value, after), argument=name)
                return


def _as_is(engine: NumPy) -> NumPy:
    """The engine without its copying, so that a change reaches our own array; for torch, ours are tensors already."""
    same = copy.copy(engine)
    ours = () if engine.name == "numpy" else (np.ndarray, dict)
    same.give = lambda value: engine.give(value) if isinstance(value, ours) else value  # type: ignore[method-assign]
    return same


def repeats(voice: Voice, run: Runner, inputs: Inputs) -> bool:
    """The same result twice, in eval mode."""
    voice.at("deterministic")
    first, second = run.attempt(inputs)[0], run.attempt(inputs)[0]
    if first is None or second is None or np.array_equal(first, second, equal_nan=True):
        return True
    example = Example(shown(inputs), first, second)
    voice.say("dropout-in-eval" if drops(first, second, voice.suspect.source) else "not-deterministic", example)
    return False


def drops(first: np.ndarray, second: np.ndarray, source: str) -> bool:
    return bool(re.search(r"dropout|drop\(", source, re.IGNORECASE)) or bool((first == 0).any() or (second == 0).any())


def takes_views(voice: Voice, run: Runner, inputs: Inputs) -> None:
    """Arrays that are views of others, as a transpose makes them, work as well."""
    voice.at("non_contiguous")
    want, _ = run.attempt(inputs)
    if want is None:
        return

    def strided(value: Any) -> Any:
        given = run.engine.give(value)
        if not isinstance(value, np.ndarray) or value.ndim < 2 or value.dtype.kind != "f":
            return given
        one, two = {2: (0, 1), 3: (0, 1)}.get(value.ndim, (1, 2))
        if run.engine.name == "torch":
            return given.transpose(one, two).contiguous().transpose(one, two)
        return np.ascontiguousarray(given.swapaxes(one, two)).swapaxes(one, two)

    got, error = run.attempt({n: strided(v) for n, v in inputs.items()}, _as_is(run.engine))
    if error or not equal(got, want, run.engine.tolerance):
        voice.say("needs-contiguous", Example(shown(inputs), want, error or got))


def keeps_dtype(voice: Voice, run: Runner, inputs: Inputs) -> None:
    voice.at("dtype")
    if run.engine.name != "torch":
        return
    result = run.native(inputs, run.engine)
    first = result[0] if isinstance(result, tuple | list) else result
    got = str(getattr(first, "dtype", "")).removeprefix("torch.")
    if got and got != run.engine.dtype and got.startswith(("float", "bfloat")):
        voice.say("dtype-changed", Example({}, run.engine.dtype, got), given=run.engine.dtype, got=got)


def keeps_device(voice: Voice, run: Runner, inputs: Inputs, thing: Any = None) -> None:
    """With weights and inputs on another device, nothing is left on the CPU. Code that reads numbers is not judged."""
    voice.at("device")
    if run.engine.name != "torch" or voice.is_wrong or not (hasattr(thing, "state_dict") or voice.suspect.is_function):
        return
    from ..device import OneDevice, TwoDevices

    try:
        with warnings.catch_warnings(), OneDevice():
            warnings.simplefilter("ignore")
            result = run.native(inputs, Elsewhere(run.engine.dtype))
    except TwoDevices as error:
        theirs = [f for f in traceback.extract_tb(error.__traceback__) if not re.search(OURS, f.filename)]
        if theirs:
            voice.say("device", line=theirs[-1].lineno, code=theirs[-1].line or "")
        return
    except Exception:
        return
    first = result[0] if isinstance(result, tuple | list) else result
    if str(getattr(first, "device", "meta")) == "cpu":
        voice.say("device-changed")


def has_gradient(voice: Voice, run: Runner, inputs: Inputs) -> None:
    """autograd against the slope of the learner's own forward, in float64, along random directions."""
    voice.at("gradient")
    if run.engine.name != "torch" or run.engine.dtype != "float64":
        return
    import torch

    given = {n: run.engine.give(v) for n, v in inputs.items()}
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
            voice.say("gradient-cut", argument=", ".join(leaves))
            return
        gradients = torch.autograd.grad(result, list(leaves.values()), cotangent, allow_unused=True)
    except (RuntimeError, TypeError) as error:
        voice.say("gradient-fails", error=error_text(error))
        return
    with torch.no_grad():
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            direction = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
            got = 0.0 if gradient is None else (gradient * direction).sum().item()
            slopes = []
            for h, room in ((1e-6, 1e-4), (1e-3, 2e-2)):  # the wider step is for code that computes in float32
                up, down = (out({**leaves, name: leaf + sign * h * direction}) for sign in (1, -1))
                slopes.append((((up - down) / (2 * h)) * cotangent).sum().item())
                if abs(slopes[-1] - got) <= room * max(1.0, abs(slopes[-1])) or not np.isfinite(slopes[-1]):
                    break
            else:
                voice.say("gradient-wrong", Example({}, round(slopes[0], 5), round(got, 5)), argument=name)
                return


def works_in_half(
    voice: Voice, run: Runner, inputs: Inputs, expected: np.ndarray, masked: bool = False, tolerance: float = 3e-2
) -> None:
    """float16 in, about the same out: no overflow, no error, no NaN."""
    voice.at("float16")
    half = type(run.engine)("float16")
    try:
        got = run(inputs, half)
    except (CannotCall, NotWritten):
        return
    except Exception as error:
        voice.say("half-fails", Example(shown(inputs), expected, error_text(error)), error=error_text(error))
        return
    if got is None or not equal(got, expected, tolerance):
        voice.say("half-differs", Example(shown(inputs), expected, got))


def halved(thing: Any, engine: NumPy) -> Any:
    """A module's copy in the engine's precision and place, or the module itself if it is there already."""
    if engine.name != "torch" or not hasattr(thing, "state_dict"):
        return thing
    real = [p for p in thing.parameters() if p.is_floating_point()]
    if all(str(p.dtype).endswith(engine.dtype) for p in real) and not isinstance(engine, Elsewhere):
        return thing
    for module in thing.modules():  # a map of weights that the last pass left behind cannot be copied with its history
        for name, value in list(vars(module).items()):
            if is_array(value) and value.grad_fn is not None:
                setattr(module, name, value.detach())
    return engine.quiet(copy.deepcopy(thing))


def dropout_scales(voice: Voice, sizes: Any, value: Callable[[Any, np.ndarray], Any], x: np.ndarray) -> None:
    """In training, dropout changes the value but not its mean: what is kept is divided by 1 − p."""
    voice.at("dropout")
    suspect = voice.suspect
    if suspect.engine_name != "torch" or not suspect.is_class or "drop" not in suspect.source.lower() or voice.is_wrong:
        return
    import torch

    module = suspect.made(replace(sizes, dropout=0.5))
    if not isinstance(module, torch.nn.Module):
        return
    module = module.double().train()

    def of(batch: np.ndarray) -> np.ndarray:
        found = pick(value(module, batch), batch.shape, suspect.engine())
        return batch if found is None else found

    with torch.no_grad():
        sampled = of(np.repeat(x, 4000, 0))
        module.eval()
        quiet = of(x)[0]
    mean, error = sampled.mean(0), sampled.std(0) / len(sampled) ** 0.5
    if (np.abs(mean - quiet) > 6 * error + 1e-6).any():
        voice.say("dropout-scale", Example({"x": x, "p": 0.5}, quiet, mean.round(3)))


def all_registered(voice: Voice, thing: Any) -> None:
    """The optimiser sees every weight: nothing in plain lists or plain tensors."""
    suspect = voice.suspect
    fresh = suspect.made(Sizes()) if suspect.is_class else thing  # a forward pass may have left a map of weights behind
    loose = [w for w in walk(fresh) if not w.registered and w.array.ndim >= 2]
    if loose and suspect.is_class:
        again = {w.path: w.array for w in walk(suspect.made(Sizes(), seed=1))}
        loose = [w for w in loose if not is_constant(w, again.get(w.path))]
    if loose:
        voice.say("unregistered", weights=", ".join(w.path for w in loose[:3]))


def is_constant(weight: Weight, again: np.ndarray | None) -> bool:
    """A mask or a table of sines is the same under every seed; a weight is not, or it starts as all zeros or ones."""
    if again is None or getattr(weight.value, "requires_grad", False):
        return False
    return np.array_equal(weight.array, again) and np.unique(again).size > 1
