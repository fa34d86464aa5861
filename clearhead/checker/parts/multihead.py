"""Multi-head attention: self, cross, causal and grouped, against the reference with the learner's own weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from clearhead.reference import causal_mask

from ..adapt import MaskForm, mask_forms, promised
from ..adapt import pattern as mask_pattern
from ..engine import NumPy, equal
from ..finding import Example
from ..names import plain, size_of, weight_role
from ..suspect import Caller, CannotCall, Sizes, Suspect, arrays, forward_of, parameters_of
from ..weights import Projections, Weight, is_bias, projections, walk
from . import common, steps
from .attention import companion_sense, likeliest
from .common import Inputs, Runner, Voice

ROLES = ("q", "k", "v", "x", "memory", "mask", "causal", "cache", "weights_too", "training")


@dataclass
class Subject:
    """The layer with its weights read, its number of heads, and how it is called."""

    thing: Any
    caller: Caller
    D: int
    H: int
    G: int
    readings: list[Projections]
    given: dict[str, Any] = field(default_factory=dict)  # weights that are passed as arguments
    reading: Projections | None = None
    how: steps.Steps = steps.RIGHT
    unbatched: bool = False
    form: MaskForm | None = None
    causal: bool = False

    @property
    def mode(self) -> str:
        known = self.caller.known
        if {"q", "k", "v"} <= known:
            return "qkv"
        if "memory" in known or {"q", "k"} <= known:
            return "cross"
        return "self"

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        thing = common.halved(self.thing, engine)
        caller = replace(self.caller, engine=engine, function=forward_of(thing)).having(**self.given)
        x, source = inputs["x"], inputs.get("source")
        source = x if source is None else source
        if self.unbatched:
            x, source = x[0], source[0]
        given: dict[str, Any] = {}
        if inputs.get("allowed") is not None and self.form is not None:
            given["mask"] = self.form(np.asarray(inputs["allowed"]))
        if inputs.get("causal"):
            given["causal"] = True
        known = caller.known
        if self.mode == "qkv":
            return caller(q=x, k=source, v=source, **given)
        if self.mode == "cross" and "memory" in known:
            first = "x" if "x" in known else "q" if "q" in known else None
            optional = any(caller.role(p) == "memory" and p.default is not p.empty for p in caller.parameters)
            memory = {} if optional and inputs.get("source") is None else {"memory": source}
            return caller(**({first: x} if first else {}), **memory, **given)
        if self.mode == "cross":
            return caller(q=x, k=source, **given)
        return caller(x=x, **given) if "x" in known else caller(x, **given)

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        w = self.readings[0]
        width = w.v.shape[0] * (self.H // self.G) if w.o is None else w.o.shape[0]
        shape = (*inputs["x"].shape[:2], width)
        return shape[1:] if self.unbatched else shape

    def runner(self, engine: NumPy) -> Runner:
        return Runner(self.native, engine, self.shape, lambda a: a[None] if self.unbatched else a)

    def expected(
        self, inputs: Inputs, how: steps.Steps | None = None, reading: Projections | None = None
    ) -> np.ndarray:
        x = inputs["x"]
        source = x if inputs.get("source") is None else inputs["source"]
        allowed = np.ones((x.shape[0], 1, x.shape[1], source.shape[1]), bool)
        if self.causal or inputs.get("causal"):
            allowed = allowed & causal_mask(*allowed.shape[-2:])
        if inputs.get("allowed") is not None:
            allowed = allowed & np.asarray(inputs["allowed"])
        w = reading or self.reading or self.readings[0]
        return steps.multi_head(x, source, source, w, self.H, self.G, allowed, how or self.how)


def build(suspect: Suspect, sizes: Sizes) -> Subject:
    engine = suspect.engine()
    thing = engine.quiet(suspect.made(sizes))
    caller = Caller(forward_of(thing), engine, ROLES, sizes)
    if suspect.is_function:
        return build_function(thing, caller, sizes)
    if any(type(p).__name__ == "UninitializedParameter" for p in getattr(thing, "parameters", list)()):
        first_pass(thing, caller, sizes)
        thing = engine.quiet(thing)
    held = [w for w in walk(thing) if w.array.ndim <= 3]
    H, G = heads_of(thing, held, sizes, suspect)
    readings = list(projections(held, H, G))
    if not readings:
        raise CannotCall("weights")
    simplify(held, sizes)
    readings = list(projections([w for w in walk(thing) if w.array.ndim <= 3], H, G))
    return Subject(thing, caller, readings[0].q.shape[1], H, G, readings)


def first_pass(thing: Any, caller: Caller, sizes: Sizes) -> None:
    """Lazy layers learn their width from the first input."""
    x = np.ones((1, 2, sizes.D))
    wanted = {role: x for role in ("q", "k", "v", "x", "memory") if role in caller.known}
    caller(**wanted)


def simplify(held: list[Weight], sizes: Sizes) -> None:
    """Weights of small whole numbers for small layers, so that the example can be followed."""
    generator = common.rng(7)
    if sizes.D > 4:
        return
    for weight in held:
        if weight.array.ndim >= 1 and weight_role(weight.path) is not None:
            weight.set(common.whole(generator, *weight.array.shape))


def build_function(thing: Any, caller: Caller, sizes: Sizes) -> Subject:
    """mha(x, Wq, Wk, Wv, Wo, heads): the weights are arguments, and ours."""
    generator = common.rng(7)
    held, given = [], {}
    draw = (
        (lambda *shape: common.whole(generator, *shape))
        if sizes.D <= 4
        else lambda *shape: generator.normal(size=shape)
    )
    heads = 1
    for parameter in caller.parameters:
        name = plain(parameter.name)
        matrix = re.fullmatch(r"w_?(q|k|v|o|qkv|out|query|key|value)|(q|k|v|o|out)(proj|w|weight)s?|wo?ut|wproj", name)
        bias = re.fullmatch(r"b(q|k|v|o|qkv|out)", name)
        if size_of(parameter.name) == "H":
            heads = sizes.H
        if matrix and parameter.default is parameter.empty:
            value = draw(sizes.D, 3 * sizes.D if "qkv" in name else sizes.D)
        elif bias and parameter.default is parameter.empty:
            value = draw(3 * sizes.D if "qkv" in name else sizes.D)
        else:
            continue
        given[parameter.name] = value
        held.append(Weight(parameter.name, None, parameter.name, value))
    readings = list(projections(held, heads, heads))
    if not readings:
        raise CannotCall("weights")
    return Subject(thing, caller, sizes.D, heads, heads, readings, given)


def heads_of(thing: Any, held: list[Weight], sizes: Sizes, suspect: Suspect) -> tuple[int, int]:
    """How many heads: an attribute says so, or a list of them, or the constructor was told."""
    numbers = {size_of(n): v for n, v in vars(thing).items() if isinstance(v, int) and not isinstance(v, bool)}
    queries = [w for w in held if w.array.ndim >= 2 and weight_role(w.path) == "q" and not is_bias(w.path)]
    if len(queries) > 1:
        return len(queries), len(queries)
    if queries and queries[0].array.ndim == 3:
        return queries[0].array.shape[0], queries[0].array.shape[0]
    told = suspect.is_class and any(size_of(p.name) == "H" for p in parameters_of(suspect.thing.__init__))
    has_config = suspect.is_class and any(
        re.search("conf|cfg|args", p.name) for p in parameters_of(suspect.thing.__init__)
    )
    H = numbers.get("H") or (sizes.H if told or has_config else 1)
    G = numbers.get("G") or H
    keys = [w for w in held if w.array.ndim == 2 and weight_role(w.path) == "k"]
    if "G" not in numbers and queries and keys and queries[0].linear:
        G = H * keys[0].array.shape[0] // queries[0].array.shape[0] or 1
    return H, G


def big(subject: Subject, T: int = 4, S: int | None = None, seed: int = 0) -> dict[str, Any]:
    generator = common.rng(seed)
    B = 1 if subject.unbatched else 2
    case = {"x": generator.normal(size=(B, T, subject.D))}
    if S is not None:
        case["source"] = generator.normal(size=(B, S, subject.D))
    return case


def check(suspect: Suspect, voice: Voice) -> None:
    voice.at("shapes")
    grouped = suspect.is_class and any(size_of(p.name) == "G" for p in parameters_of(suspect.thing.__init__))
    sizes = Sizes(D=16, H=4, G=2) if grouped else Sizes()
    try:
        subject = build(suspect, sizes)
    except CannotCall as unknown:
        if str(unknown) == "weights" and not suspect.is_function:
            by_properties(suspect, voice)
            return
        raise
    engine = suspect.engine()
    run = subject.runner(engine)
    got, error = run.attempt(big(subject))
    if got is None or got.shape != big(subject)["x"].shape[:2] + got.shape[-1:] or got.ndim != 3:
        trial = replace(subject, unbatched=True)
        alone, _ = trial.runner(engine).attempt(big(trial))
        if alone is not None and alone.shape == (1, 4, trial.shape(big(trial))[-1]):
            subject, run, got = trial, trial.runner(engine), alone
            voice.assume("unbatched")
    if got is None:
        key = transposed_error(error)
        voice.say(key, Example({"x": f"[2, 4, {subject.D}]"}, None, error), error=error)
        return
    common.all_registered(voice, subject.thing)
    if not common.repeats(voice, run, big(subject)):
        return
    judge_value(suspect, subject, voice, run)
    judge_lengths(subject, voice, run)
    if "causal" in subject.caller.known:
        judge_flag(suspect, subject, voice, run)
    if "mask" in subject.caller.known:
        judge_mask(suspect, subject, voice, engine)
    properties(suspect, subject, voice, run)


def transposed_error(error: str) -> str:
    return (
        "four-as-three"
        if re.search("axes don't match|axes|repeated axis|number of dims|dimensions in the tensor", error)
        else "raises"
    )


def judge_value(suspect: Suspect, subject: Subject, voice: Voice, run: Runner) -> None:
    """Right under some reading of the weights, or a known mistake, or wrong in its own way."""
    voice.at("value")
    case = big(subject)
    got, _ = run.attempt(case)
    wants_causal = says_causal(suspect, subject)
    for causal in (False, True):
        subject.causal = causal
        for name, change in steps.TURNS.items():
            for reading in subject.readings:
                if agrees(subject, got, case, replace(steps.RIGHT, **change), reading, run):
                    subject.reading, subject.how = reading, replace(steps.RIGHT, **change)
                    for key in (*reading.assumed, *([name] if name != "plain" else [])):
                        voice.assume(key)
                    if causal:
                        voice.assume("always_causal")
                    elif wants_causal:
                        subject.causal = True
                        voice.say("causal-missing", small(suspect, subject, voice))
                    return
    for causal in (False, True) if not wants_causal else (True, False):
        subject.causal = causal
        banks: tuple[Any, ...] = (steps.HEADS, steps.SCALES, steps.WEIGHTS, steps.MIXES)
        banks = (
            (
                steps.CAUSAL,
                {
                    "mask-after-softmax": steps.MASKS["mask-after-softmax"],
                    "mask-to-zero": steps.MASKS["mask-to-zero"],
                    "mask-to-one": steps.MASKS["mask-to-one"],
                    "mask-positive": steps.MASKS["mask-positive"],
                },
                *banks,
            )
            if causal
            else banks
        )
        for keys, how in steps.mistakes(*banks):
            if "causal-missing" in keys and not wants_causal:
                continue
            for reading in subject.readings if len(keys) == 1 else subject.readings[:1]:
                if agrees(subject, got, case, how, reading, run):
                    subject.reading = reading
                    example = small(suspect, subject, voice)
                    subject.how = how
                    for key in keys:
                        voice.say(key, example)
                    return
    subject.causal = wants_causal
    voice.say(
        over_batch(suspect, subject, got, case, run) or mixing(subject, run) or "value", small(suspect, subject, voice)
    )


def says_causal(suspect: Suspect, subject: Subject) -> bool:
    """The name, a triangle in the source, or the house style of a decoder says that the future is hidden."""
    named = bool(re.search(r"causal|masked", suspect.name.lower()))
    builds = bool(re.search(r"tril|triu", suspect.source))
    return (named or builds) and not {"mask", "causal"} & subject.caller.known


def agrees(
    subject: Subject, got: np.ndarray | None, case: Inputs, how: steps.Steps, reading: Projections, run: Runner
) -> bool:
    try:
        return equal(got, subject.expected(case, how, reading), max(run.engine.tolerance, 1e-6))
    except ValueError:
        return False


def over_batch(suspect: Suspect, subject: Subject, got: np.ndarray | None, case: Inputs, run: Runner) -> str | None:
    """Attention over the first axis: [T, B, D] was expected."""
    flipped = {name: value.swapaxes(0, 1) for name, value in case.items()}
    for reading in subject.readings:
        for causal in (False, True):
            subject.causal = causal
            if agrees(subject, None if got is None else got.swapaxes(0, 1), flipped, steps.RIGHT, reading, run):
                return "attends-over-batch"
    return None


def mixing(subject: Subject, run: Runner) -> str | None:
    """One row of the batch must not change another."""
    case = big(subject)
    if subject.unbatched:
        return None
    other = {**case, "x": case["x"].copy()}
    other["x"][1] *= -2
    one, two = run.attempt(case)[0], run.attempt(other)[0]
    return "batch-mixed" if one is not None and two is not None and not equal(one[0], two[0], 1e-5) else None


def small(suspect: Suspect, subject: Subject, voice: Voice, mask: bool = False) -> Example | None:
    """The smallest layer and input that fail: width 2, one head, and up."""
    for sizes in (Sizes(D=2, H=1), Sizes(D=2, H=2), Sizes(D=4, H=2), Sizes(D=4, H=2, G=1)):
        try:
            tiny = build(suspect, sizes)
        except Exception:
            continue
        if tiny.D != sizes.D or (tiny.H // tiny.G != subject.H // subject.G and tiny.D < 4):
            continue
        index = next((i for i, r in enumerate(subject.readings) if r is subject.reading), 0)
        tiny.reading = tiny.readings[index] if index < len(tiny.readings) else tiny.readings[0]
        tiny = replace(tiny, causal=subject.causal, unbatched=subject.unbatched, form=subject.form, how=subject.how)
        weights = {n: getattr(tiny.reading, n[-1].lower()) for n in ("W_Q", "W_K", "W_V", "W_O")}
        weights |= {f"b_{n}": getattr(tiny.reading, f"{n.lower()}_bias") for n in "QKVO"}
        weights = {n: w for n, w in weights.items() if isinstance(w, np.ndarray)}
        for T in (1, 2, 3):
            for seed in range(4):
                case: dict[str, Any] = {"x": common.whole(common.rng(seed), 1, T, tiny.D)}
                if mask:
                    case["allowed"] = np.arange(T)[None, None, None] < max(1, T - 1)
                    case["allowed"] = np.broadcast_to(case["allowed"], (1, 1, T, T))
                found = common.smallest([case], tiny.runner(suspect.engine()), tiny.expected, weights)
                if found is not None:
                    return found
    case = big(subject)
    if mask:
        case["allowed"] = mask_pattern(subject.form.kind if subject.form else "any", case["x"].shape[0], 4, 4)
    return common.smallest([case], subject.runner(suspect.engine()), subject.expected)


def judge_lengths(subject: Subject, voice: Voice, run: Runner) -> None:
    """Keys and values from a sequence of another length."""
    voice.at("cross-length")
    if subject.mode == "self" or subject.causal or voice.is_wrong:
        return
    case = big(subject, 3, 5)
    got, error = run.attempt(case)
    if not equal(got, subject.expected(case), max(run.engine.tolerance, 1e-6)):
        even = big(subject, 4, 4)
        also, _ = run.attempt(even)
        key = "cross-length" if equal(also, subject.expected(even), 1e-5) else "cross-value"
        voice.say(
            key,
            Example(
                {"x": f"[2, 3, {subject.D}]", "source": f"[2, 5, {subject.D}]"},
                list(subject.shape(case)),
                error or (None if got is None else list(got.shape) if got.shape != subject.shape(case) else got),
            ),
            error=error,
        )


def judge_flag(suspect: Suspect, subject: Subject, voice: Voice, run: Runner) -> None:
    voice.at("causal")
    case = {**big(subject), "causal": True}
    got, error = run.attempt(case)
    if equal(got, subject.expected(case), max(run.engine.tolerance, 1e-6)):
        return
    for key, change in {**steps.CAUSAL, **steps.MASKS}.items():
        if equal(got, subject.expected(case, replace(subject.how, **change)), max(run.engine.tolerance, 1e-6)):
            voice.say(key, Example({}, None, None))
            return
    voice.say("raises" if error else "causal-value", error=error)


def judge_mask(suspect: Suspect, subject: Subject, voice: Voice, engine: NumPy) -> None:
    """The form of mask under which it is right, else the mistake."""
    voice.at("mask")
    trials, errors = [], []
    for form in mask_forms():
        if subject.unbatched and form.shape != "T S":
            continue
        trial = replace(subject, form=form)
        case = big(subject)
        case["allowed"] = mask_pattern(form.kind, case["x"].shape[0], 4, 4)
        got, error = trial.runner(engine).attempt(case)
        if equal(got, subject.expected(case), max(engine.tolerance, 1e-6)):
            subject.form = form
            confirm_sense(suspect, subject, voice)
            return
        errors.append(error)
        if got is not None:
            trials.append((trial, case, got))
    trials.sort(key=lambda trial: likeliest(suspect).index(trial[0].form.sense if trial[0].form else ""))
    banks = {**steps.MASKS, **steps.CAUSAL} if subject.causal else steps.MASKS
    for key, change in banks.items():
        for trial, case, got in trials:
            if equal(got, subject.expected(case, replace(subject.how, **change)), max(engine.tolerance, 1e-6)):
                voice.assume(trial.form.sense)  # type: ignore[union-attr]
                voice.say(key, small(suspect, trial, voice, mask=True))
                return
    if not trials:
        voice.say("mask-raises", error=errors[0] if errors else "")
    else:
        voice.say("mask-value", small(suspect, trials[0][0], voice, mask=True))


def confirm_sense(suspect: Suspect, subject: Subject, voice: Voice) -> None:
    assert subject.form is not None
    sense = subject.form.sense
    voice.assume(sense)
    does = "allows" if sense.endswith("allows") else "blocks" if sense.endswith("blocks") else None
    for key, promise in (
        ("mask-inverted", promised(suspect.source)),
        ("mask-inverted-beside", companion_sense(suspect)),
    ):
        if promise is not None and does is not None and promise != does:
            meant = replace(subject, form=replace(subject.form, sense=sense.replace(does, promise)))
            voice.say(key, small(suspect, meant, voice, mask=True))
            return


def properties(suspect: Suspect, subject: Subject, voice: Voice, run: Runner) -> None:
    case = big(subject)
    common.keeps_inputs(voice, run, [case])
    if any(finding.key == "inputs-changed" for finding in voice.findings):
        return
    common.takes_views(voice, run, case)
    common.keeps_dtype(voice, run, case)
    common.has_gradient(voice, run, case)
    if voice.is_wrong:
        return
    stable(subject, voice, run)
    masked(subject, voice, run)
    if not voice.findings and subject.D <= 64:
        mild = {"x": common.whole(common.rng(1), 1, 3, subject.D, top=1)}
        common.works_in_half(voice, run, mild, subject.expected(mild), tolerance=5e-2)
    judge_cache(subject, voice, run)

    def value(module: Any, batch: np.ndarray) -> Any:
        return replace(subject, thing=module, caller=replace(subject.caller, function=forward_of(module))).native(
            {"x": batch}, run.engine
        )

    if not subject.unbatched:
        common.dropout_scales(voice, subject.caller.sizes, value, case["x"][:1, :2])


def stable(subject: Subject, voice: Voice, run: Runner) -> None:
    """Large scores: a large x."""
    voice.at("stability")
    case = big(subject)
    case["x"] = case["x"] * 300
    got, error = run.attempt(case)
    want = subject.expected(case)
    if not equal(got, want, 1e-3):
        key = "softmax-unstable" if got is not None and np.isnan(got).any() else "value-at-extremes"
        voice.say(
            key,
            Example({"x": case["x"][0, :2, :4]}, want[0, :2, :4], error or (None if got is None else got[0, :2, :4])),
        )


def masked(subject: Subject, voice: Voice, run: Runner) -> None:
    """Rows that may read nothing; hidden tokens of size 1e4."""
    if subject.form is None or subject.causal:
        return
    run = subject.runner(run.engine)
    voice.at("leak")
    case = big(subject)
    case["allowed"] = mask_pattern("keys", case["x"].shape[0], 4, 4)
    if subject.form.kind == "shared":
        case["allowed"] = np.broadcast_to(case["allowed"][:1], case["allowed"].shape)
    hidden = ~case["allowed"][:, 0, 0]
    if subject.mode != "self":
        case["source"] = np.where(hidden[..., None], 1e4, case["x"])
        got, error = run.attempt(case)
        if not equal(got, subject.expected(case), 1e-3) and not error:
            voice.say(
                "fill-too-small",
                Example(
                    {"allowed": case["allowed"][0, 0, :1]},
                    subject.expected(case)[0, :1],
                    None if got is None else got[0, :1],
                ),
            )
    voice.at("empty_row")
    empty = {**big(subject), "allowed": np.zeros_like(case["allowed"])}
    got, error = run.attempt(empty)
    want = subject.expected(empty)
    if error:
        voice.say("empty-row-raises", Example({"allowed": "none"}, want[0, 0], error), error=error)
    elif got is not None and np.isnan(got).any():
        voice.say("empty-row-nan", Example({"allowed": "none"}, want[0, 0], got[0, 0]))
    elif not equal(got, want, 1e-5):
        voice.say("empty-row-mean", Example({"allowed": "none"}, want[0, 0], None if got is None else got[0, 0]))
    voice.at("float16_mask")
    if run.engine.name == "torch" and subject.D <= 64:
        mild = {"x": common.whole(common.rng(1), *case["x"].shape, top=1), "allowed": case["allowed"]}
        try:
            got = run(mild, type(run.engine)("float16"))
        except Exception as problem:
            voice.say("half-mask", Example({}, None, common.error_text(problem)))
            return
        if not equal(got, subject.expected(mild), 5e-2):
            voice.say("half-mask", Example({}, None, None))


def judge_cache(subject: Subject, voice: Voice, run: Runner) -> None:
    """One token at a time with the cache equals all at once."""
    voice.at("cache")
    if "cache" not in subject.caller.known or subject.mode != "self":
        return
    case = big(subject)
    full = subject.expected({**case, "causal": True})
    x, cache = case["x"], None
    outs: list[Any] = []
    try:
        for t in range(x.shape[1]):
            result = subject.caller(x=x[:, t : t + 1], cache=cache)
            outs.append(run.engine.take(result[0]))
            cache = result[1]
    except Exception:
        voice.assume("cache_not_tried")
        return
    got = np.concatenate(outs, 1)
    if not equal(got, full, 1e-5):
        t = int(np.abs(got - full).max((0, 2)).argmax())
        voice.say("cache-differs", Example({"step": t}, full[0, t], got[0, t]), step=t)


def by_properties(suspect: Suspect, voice: Voice) -> None:
    """Weights of unknown arrangement: only what holds for every attention."""
    voice.assume("weights_not_found")
    engine, sizes = suspect.engine(), Sizes()
    thing = engine.quiet(suspect.made(sizes))
    caller = Caller(forward_of(thing), engine, ROLES, sizes)
    eye = np.eye(sizes.D)
    subject = Subject(thing, caller, sizes.D, sizes.H, sizes.H, [Projections(eye, eye, eye, eye)])
    run = subject.runner(engine)
    case = big(subject)
    got, error = run.attempt(case)
    if got is None:
        voice.say(transposed_error(error), Example({"x": f"[2, 4, {sizes.D}]"}, None, error), error=error)
        return
    common.all_registered(voice, thing)
    common.repeats(voice, run, case)
    key = mixing(subject, run)
    if key:
        voice.say(key)
    shuffled = {"x": case["x"][:, ::-1].copy()}
    other, _ = run.attempt(shuffled)
    is_equivariant = other is not None and equal(other[:, ::-1], got, 1e-5)
    later = {"x": case["x"].copy()}
    later["x"][:, -1] *= -2
    changed, _ = run.attempt(later)
    is_causal = changed is not None and equal(changed[:, :-1], got[:, :-1], 1e-6)
    if not is_equivariant and not is_causal:
        voice.say("positions-mixed", Example({}, None, None))
    if says_causal(suspect, subject) and not is_causal:
        voice.say("causal-missing")
    common.keeps_inputs(voice, run, [case])
    common.has_gradient(voice, run, case)


__all__ = ["check", "Iterator", "arrays"]
