"""Instruments of the lab that answer while a slider moves: positions, masks, growth and the scaling planner.

Each is a function from the values of its controls to charts, maps and facts, all of them data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from clearhead.configs.masks import Causal, Full, Global, Mask, Scattered, Window
from clearhead.inspect.positions import Positions, products, wavelengths
from clearhead.inspect.questions import Answer, QuestionError, Session, question
from clearhead.measure.cost import cost
from clearhead.measure.growth import ModelSize, mixers, of_mixer
from clearhead.reference.positions import alibi_bias, alibi_slopes, sinusoidal_positions
from clearhead.scaling.published import PUBLISHED
from clearhead.scaling.table import FLOPS

MAP = 96  # the most positions that a map shows


def slider(name: str, default: float, low: float, high: float, step: float = 1, only: tuple[str, ...] = ()) -> Answer:
    """A slider. `only` names the choices of the first control that use it."""
    made = {"name": name, "default": default, "low": low, "high": high, "step": step}
    return made | ({"only": list(only)} if only else {})


def factors(name: str, default: float, low: float, high: float, factor: float, whole: bool = True) -> Answer:
    """A slider whose steps multiply."""
    return {"name": name, "default": default, "low": low, "high": high, "factor": factor, "whole": whole}


def choice(name: str, *choices: str) -> Answer:
    return {"name": name, "default": choices[0], "choices": list(choices)}


def chart(title: str, x: str, y: str, curves: Mapping[str, Any], python: str, **more: bool) -> Answer:
    drawn = [{"name": name, "points": [[float(a), float(b)] for a, b in points]} for name, points in curves.items()]
    return {"title": title, "x": x, "y": y, "curves": drawn, "python": python} | more


def heat_map(title: str, values: np.ndarray, kind: str, unit: str, python: str, **more: Any) -> Answer:
    rows, columns = ([str(n) for n in range(size)] for size in values.shape)
    shown = {"values": np.ascontiguousarray(values, dtype=np.float32), "rows": rows, "columns": columns}
    return {"title": title, "kind": kind, "unit": unit, "python": python} | shown | more


def answer(*, charts: Any = (), maps: Any = (), facts: Any = (), formula: str = "", python: str = "") -> Answer:
    """What an instrument shows. Charts and maps carry the Python that prints their numbers; `python` prints facts."""
    return {"charts": list(charts), "maps": list(maps), "facts": list(facts), "formula": formula, "python": python}


def positions(values: Mapping[str, Any]) -> Answer:
    """Sinusoids, rotary angles or ALiBi."""
    length, width, heads = int(values["length"]), 2 * round(float(values["width"]) / 2), int(values["heads"])
    theta, factor = float(values["theta"]), float(values["factor"])
    asked = Positions(length=length, dim=width, base=theta, heads=heads, factor=factor)
    far, head = np.arange(length, dtype=np.float64), heads // 2
    if values["encoding"] == "rotary":
        alike = products(far, width, theta)
        waves = {name: enumerate(wave) for name, wave in wavelengths(asked).items()}
        code = "from clearhead.inspect.positions import Positions, wavelengths\n\n"
        code += f"asked = Positions(length={length}, dim={width}, base={asked.base!r}, factor={asked.factor!r})\n"
        code += "for name, waves in wavelengths(asked).items():\n    print(name, list(waves))"
        similar = "import numpy as np\n\nfrom clearhead.inspect.positions import products\n\n"
        similar += f"print(list(products(np.arange({length}, dtype=float), {width}, {theta!r})))"
        return answer(
            charts=[
                chart("wavelength", "pair", "tokens", waves, code, log=True),
                chart("similarity", "distance", "number", {"Σ cos(k·ωᵢ)": zip(far, alike, strict=True)}, similar),
            ],
            formula="(a, b) ↦ (a·cos φ − b·sin φ, a·sin φ + b·cos φ),  φ = position · θ^(−2i/d)",
        )  # fmt: skip
    if values["encoding"] == "ALiBi":
        shown = min(length, MAP)
        bias = np.tril(alibi_bias(heads, shown, shown)[head])
        slopes = alibi_slopes(heads)[:6]
        curves = {f"head {n}": [(d, -slope * d) for d in far] for n, slope in enumerate(slopes)}
        code = "from clearhead.reference.positions import alibi_slopes\n\n"
        code += f"for slope in alibi_slopes({heads})[:6]:\n    print([-slope * d for d in range({length})])"
        table = "import numpy as np\n\nfrom clearhead.reference.positions import alibi_bias\n\n"
        table += f"print(np.tril(alibi_bias({heads}, {shown}, {shown})[{head}]).tolist())"
        return answer(
            charts=[chart("bias", "distance", "number", curves, code)],
            maps=[heat_map("bias", bias, "signed", "number", table)],
            formula="score − slope · distance,  slope = 2^(−8·(h + 1)/H)",
        )
    table_values = sinusoidal_positions(length, width, asked.base)
    code = "from clearhead.reference.positions import sinusoidal_positions\n\n"
    code += f"table = sinusoidal_positions({length}, {width}, {asked.base!r})\n"
    alike = table_values @ table_values[0]
    return answer(
        maps=[
            heat_map(
                "table", table_values[:MAP], "signed", "number", f"{code}print(table[:{MAP}].tolist())", top=1, height=7
            )
        ],
        charts=[
            chart(
                "similarity",
                "distance",
                "number",
                {"PE(0)·PE(k)": zip(far, alike, strict=True)},
                f"{code}print((table @ table[0]).tolist())",
            )
        ],
        formula="PE(pos, 2i) = sin(pos / θ^(2i/d)),  PE(pos, 2i+1) = cos(pos / θ^(2i/d))",
    )


def masks(values: Mapping[str, Any]) -> Answer:
    """Masks: which keys each query may read, for every kind of sparse attention."""
    length, window, globals_, random = (int(values[name]) for name in ("length", "window", "globals", "random"))
    made: dict[str, tuple[Mask, str]] = {
        "causal": (Causal(), "Causal()"),
        "full": (Full(), "Full()"),
        "window": (Causal() & Window(window), f"Causal() & Window({window})"),
        "Longformer": (Window(window) | Global(globals_), f"Window({window}) | Global({globals_})"),
        "BigBird": (
            Window(window) | Global(globals_) | Scattered(min(random, length), among=length),
            f"Window({window}) | Global({globals_}) | Scattered({min(random, length)}, among={length})",
        ),
    }
    mask, written = made[values["mask"]]
    at = np.arange(length)
    allowed = np.broadcast_to(mask(at[:, None], at[None, :]), (length, length)).astype(np.float32)
    pairs = int(allowed.sum())
    code = "import numpy as np\n\nfrom clearhead.configs.masks import Causal, Full, Global, Scattered, Window\n\n"
    code += f"at, mask = np.arange({length}), {written}\n"
    code += f"allowed = np.broadcast_to(mask(at[:, None], at[None, :]), ({length}, {length}))\n"
    return answer(
        python=f"{code}print(allowed.sum())",
        maps=[heat_map("allowed", allowed, "weight", "reads", f"{code}print(allowed.astype(float).tolist())", top=1)],
        facts=[["pairs", f"{pairs:,}"], ["share", f"{pairs / length**2:.1%}"], ["per_query", f"{pairs / length:.3g}"]],
        formula=written,
    )


def growth(values: Mapping[str, Any]) -> Answer:
    """FLOPs and state of each mixer by length."""
    size = ModelSize(dim=int(values["width"]), heads=int(values["heads"]))
    longest = int(values["length"])
    lengths = [2**n for n in range(7, 21) if 2**n <= longest] or [128]
    flops: dict[str, list[tuple[int, int]]] = {}
    state: dict[str, list[tuple[int, int]]] = {}
    for name, mixer in mixers(size).items():
        if name in ("flash", "longformer", "performer"):  # the same counts as another one
            continue
        for length in lengths:
            found = cost(of_mixer(name, mixer, size).make(length), length=length)
            flops.setdefault(name, []).append((length, found.flops.forward))
            if found.memory.kv_cache:
                state.setdefault(name, []).append((length, found.memory.kv_cache))

    def code(number: str) -> str:
        return f"""import clearhead
from clearhead.measure.growth import ModelSize, mixers, of_mixer

size = ModelSize(dim={size.dim}, heads={size.heads})
for name, mixer in mixers(size).items():
    make = of_mixer(name, mixer, size).make
    print(name, [clearhead.cost(make(length), length=length).{number} for length in {lengths}])"""

    return answer(
        charts=[
            chart("flops", "tokens", "FLOPs", flops, code("flops.forward"), log=True, logX=True),
            chart("memory", "tokens", "bytes", state, code("memory.kv_cache"), log=True, logX=True),
        ],
    )


def planner(values: Mapping[str, Any]) -> Answer:
    """The best size and number of tokens for a budget."""
    fit, budget = PUBLISHED[values["law"]], float(values["budget"])
    plan = fit.plan(budget)
    sizes = np.geomspace(plan.n / 30, plan.n * 30, 41)
    curves = {
        f"{scale * budget:.1e} FLOPs": [
            (n, float(loss))
            for n in sizes
            if (loss := fit.law.loss(fit.values, n, scale * budget / (FLOPS * n))) is not None
        ]
        for scale in (0.1, 1, 10)
    }
    code = "import numpy as np\n\nfrom clearhead.scaling.published import PUBLISHED\n\n"
    code += f"fit, budget = PUBLISHED[{values['law']!r}], {budget!r}\nplan = fit.plan(budget)\n"
    by_size = f"""{code}sizes = np.geomspace(plan.n / 30, plan.n * 30, 41)
for scale in (0.1, 1, 10):
    print([fit.law.loss(fit.values, n, scale * budget / ({FLOPS} * n)) for n in sizes])"""
    return answer(
        python=f"{code}print(plan.n, plan.d, plan.loss)",
        charts=[chart("frontier", "parameters", "loss", curves, by_size, logX=True)],
        facts=[
            ["parameters", si(plan.n)],
            ["data", si(plan.d)],
            ["ratio", f"{plan.d / plan.n:.3g}"],
            ["loss", "–" if plan.loss is None else f"{plan.loss:.3f}"],
        ],
        formula=fit.equation(),
    )


def si(value: float) -> str:
    """`70.1B`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


INSTRUMENTS: dict[str, tuple[Callable[[Mapping[str, Any]], Answer], list[Answer]]] = {
    "positions": (
        positions,
        [
            choice("encoding", "sinusoidal", "rotary", "ALiBi"),
            slider("length", 64, 8, 512),
            slider("width", 64, 4, 256, 2, only=("sinusoidal", "rotary")),
            factors("theta", 10000.0, 10.0, 1e6, 10 ** 0.25, whole=False),
            slider("heads", 8, 1, 32, only=("ALiBi",)),
            slider("factor", 8, 1, 32, only=("rotary",)),
        ],
    ),
    "masks": (
        masks,
        [
            choice("mask", "causal", "full", "window", "Longformer", "BigBird"),
            slider("length", 32, 4, 128),
            slider("window", 6, 1, 64, only=("window", "Longformer", "BigBird")),
            slider("globals", 2, 0, 16, only=("Longformer", "BigBird")),
            slider("random", 2, 0, 16, only=("BigBird",)),
        ],
    ),
    "growth": (
        growth,
        [factors("length", 16384, 256, 131072, 2), factors("width", 256, 64, 4096, 2), factors("heads", 4, 1, 64, 2)],
    ),
    "planner": (planner, [choice("law", *PUBLISHED), factors("budget", 1e21, 1e16, 1e27, 10 ** 0.25, whole=False)]),
}  # fmt: skip


@question
def instruments(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """The instruments and their controls."""
    return {"instruments": [{"name": name, "controls": controls} for name, (_, controls) in INSTRUMENTS.items()]}


@question
def instrument(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """What an instrument shows for the values of its controls."""
    name, given = str(arguments.get("name")), dict(arguments.get("values", {}))
    if name not in INSTRUMENTS:
        raise QuestionError(f"there is no instrument {name!r}; there are {', '.join(INSTRUMENTS)}")
    function, controls = INSTRUMENTS[name]
    return function({control["name"]: check_value(control, given.get(control["name"])) for control in controls})


def check_value(control: Answer, value: Any) -> Any:
    """A control's value within its range, or its default."""
    if value is None:
        return control["default"]
    if "choices" in control:
        if value not in control["choices"]:
            raise QuestionError(f"{control['name']} is {value!r}, but must be one of {', '.join(control['choices'])}")
        return value
    if not control["low"] * 0.99 <= float(value) <= control["high"] * 1.01:
        raise QuestionError(f"{control['name']} is {value}, but must be from {control['low']} to {control['high']}")
    return float(value)
