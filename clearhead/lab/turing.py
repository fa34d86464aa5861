"""A Turing machine in a decoder with hand-set weights: every decoded token is one step of the machine.

A token encodes (new state, symbol written, move). To choose the next step, the decoder must know the symbol under the
head, which no token contains. Three blocks compute it:

    1  uniform attention:  mean of all moves;           gated FFN:  mean · time = head position h, and written cell c
    2  (no attention)                                   gated FFN:  h², c²
    3  attention with score −C·(h − c)² + g·time:  the latest token that wrote the cell under the head;
       FFN as a table:  (state, symbol read) → next step

An unwritten cell reads the first token, "go", which stands for a blank. Its score is −C/2, between a match and a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    FeedForwardConfig,
    GatedFeedForwardConfig,
    LearnedConfig,
    LMHeadConfig,
    SequenceModelConfig,
    TokenEmbeddingConfig,
)
from clearhead.inspect.plotting import colours
from clearhead.models.model import SequenceModel
from clearhead.nn.tap import Taps

from .manual_weights import IDENTITY_NORM, Fields, stack_of, zero_model
from .result import Progress, Result, Rows, no_progress, require

BLANK = "_"
GAP = 64.0  # score gap between successive writers of a cell; e⁻⁶⁴ is negligible
Step = tuple[str, str, int]
"""New state, symbol written, and move (−1, 0 or 1)."""


@dataclass(frozen=True)
class Machine:
    """Rules (state, symbol) → (symbol written, move, state). The first state starts; a state without rules halts."""

    rules: Mapping[tuple[str, str], tuple[str, int, str]]
    tape: str = ""

    @property
    def start(self) -> str:
        return next(iter(self.rules))[0]

    @property
    def states(self) -> list[str]:
        return list(dict.fromkeys([*(q for q, _ in self.rules), *(q for *_, q in self.rules.values())]))

    @property
    def stopping(self) -> list[str]:
        """The states for which there is no rule."""
        return [state for state in self.states if state not in {q for q, _ in self.rules}]

    @property
    def symbols(self) -> list[str]:
        read, written = (s for _, s in self.rules), (w for w, *_ in self.rules.values())
        return list(dict.fromkeys([BLANK, *read, *written, *self.tape]))

    def run(self, most: int) -> tuple[list[Step], dict[int, str]]:
        """Simulate up to `most` steps; return the steps and the final tape."""
        steps: list[Step] = []
        tape, state, head = dict(enumerate(self.tape)), self.start, 0
        while (rule := self.rules.get((state, tape.get(head, BLANK)))) is not None and len(steps) < most:
            written, move, state = rule
            tape[head] = written
            head += move
            steps.append((state, written, move))
        return steps, tape


def parse_rules(text: str) -> dict[tuple[str, str], tuple[str, int, str]]:
    """Parse rules such as `A0 1RB`: in state A on symbol 0, write 1, move right, go to state B."""
    vocabulary = [line.split() for line in text.strip().split(";")]
    moves = {"L": -1, "S": 0, "R": 1}
    return {(a[:-1], a[-1]): (b[0], moves[b[1]], b[2:]) for a, b in vocabulary}


INCREMENT = parse_rules("r0 0Rr; r1 1Rr; r_ _Lc; c1 0Lc; c0 1Sdone; c_ 1Sdone")  # go to the right end, then carry
MACHINES: dict[str, Machine] = {
    "increment": Machine(INCREMENT, "1011"),
    # erase the first letter, find the last, erase it if equal, return
    "palindrome": Machine(
        parse_rules(
            "s_ _Syes; sa _RA; sb _RB; Aa aRA; Ab bRA; A_ _Lx; Ba aRB; Bb bRB; B_ _Ly; xa _Lz; xb bSno; x_ _Syes; "
            "yb _Lz; ya aSno; y_ _Syes; za aLz; zb bLz; z_ _Rs"
        ),
        "abbabba",
    ),
    # the four-state busy beaver: 13 ones after 107 steps (Brady 1983)
    "beaver": Machine(parse_rules("A_ 1RB; A1 1LB; B_ 1LA; B1 _LC; C_ 1RH; C1 1LD; D_ 1RD; D1 _RA")),
    # counts in binary forever
    "counter": Machine(parse_rules("r0 0Rr; r1 1Rr; r_ _Lc; c1 0Lc; c0 1Rr; c_ 1Rr"), "0"),
    # far from the start, where h² is large
    "increment, 2,500 bits": Machine(INCREMENT, "10" * 1250),
}


@dataclass(frozen=True)
class StepVocabulary:
    """Tokens: go, end, the input symbols, and every step that a rule can produce."""

    machine: Machine

    @property
    def steps(self) -> list[Step]:
        return list(dict.fromkeys((state, written, move) for written, move, state in self.machine.rules.values()))

    @property
    def size(self) -> int:
        return 2 + len(self.machine.symbols) + len(self.steps)

    def step(self, step: Step) -> int:
        return 2 + len(self.machine.symbols) + self.steps.index(step)

    def prompt(self) -> list[int]:
        return [0, *(2 + self.machine.symbols.index(symbol) for symbol in self.machine.tape)]

    def read(self, tokens: Sequence[int]) -> list[Step]:
        """The steps among the tokens."""
        first = 2 + len(self.machine.symbols)
        return [self.steps[token - first] for token in tokens if token >= first]


def build_model(machine: Machine, length: int, dtype: torch.dtype = torch.float64) -> SequenceModel:
    """Build the decoder that runs the machine, with positions for `length` tokens."""
    states, symbols, vocabulary = machine.states, machine.symbols, StepVocabulary(machine)
    numbers = ("move", "time", "one", "go", "input", "mean", "head", "cell", "head2", "cell2")
    at = Fields(
        state=len(states), written=len(symbols), **dict.fromkeys(numbers, 1), read=len(symbols), next=vocabulary.size
    )
    causal = AttentionConfig(heads=1, head_dim=1, value_dim=1, mask=Causal())
    gated = GatedFeedForwardConfig(hidden=4, activation="relu")
    lookup = AttentionConfig(heads=1, head_dim=5, value_dim=len(symbols), mask=Causal())
    table = FeedForwardConfig(hidden=len(states) * len(symbols), activation="relu", bias=False)
    blocks = [
        BlockConfig(mixer=mixer, ffn=ffn, norm=IDENTITY_NORM)
        for mixer, ffn in ((causal, gated), (causal, gated), (lookup, table))
    ]
    config = SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=vocabulary.size, position=LearnedConfig(length=length)),
        stack=stack_of(at.dim, *blocks),
        head=LMHeadConfig(vocabulary=vocabulary.size),
    )
    model = zero_model(config, dtype)
    with torch.no_grad():
        set_embeddings(model, machine, at)
        first, second, third = model.stack.layers()
        set_head_position(first, at)
        set_squares(second, at)
        set_lookup(third.mixer, at, 4 * GAP * length)
        set_rules(third.ffn, machine, at)
        head: Any = model.head
        head.weight[:, at["next"]] = torch.eye(vocabulary.size, dtype=dtype)
    return model


def set_embeddings(model: SequenceModel, machine: Machine, at: Fields) -> None:
    """Set token and position embeddings."""
    tokens, vocabulary = model.embedding.tokens.weight, StepVocabulary(machine)
    tokens[:, at.at("one")] = 1
    tokens[0, at.at("go")] = 1
    for token in range(2 + len(machine.symbols)):
        tokens[token, at.at("state", machine.states.index(machine.start))] = 1
    tokens[0, at.at("written")] = 1  # a blank
    for i in range(len(machine.symbols)):
        tokens[2 + i, at.at("written", i)] = tokens[2 + i, at.at("input")] = 1
    for step in vocabulary.steps:
        state, written, move = step
        row = tokens[vocabulary.step(step)]
        row[at.at("state", machine.states.index(state))] = 1
        row[at.at("written", machine.symbols.index(written))] = 1
        row[at.at("move")] = move
    positions = model.embedding.position.weight
    positions[:, at.at("time")] = torch.arange(1, len(positions) + 1, dtype=positions.dtype)


def set_head_position(block: Any, at: Fields) -> None:
    """head = time · mean of moves. A step writes where the head was before its move; input i lies in cell i."""
    block.mixer.qkv.weight[2, at.at("move")] = 1  # queries and keys are 0: uniform attention
    block.mixer.out.weight[at.at("mean"), 0] = 1
    units = (  # relu(gate)·up is added to these fields
        ({"time": 1}, {"mean": 1}, {"head": 1, "cell": 1}),
        ({"one": 1}, {"move": -1}, {"cell": 1}),
        ({"input": 1}, {"time": 1, "one": -2}, {"cell": 1}),
    )
    set_units(block.ffn, at, units)


def set_squares(block: Any, at: Fields) -> None:
    """x² = relu(x)·x + relu(−x)·(−x)."""
    set_units(block.ffn, at, [({x: sign}, {x: sign}, {f"{x}2": 1}) for x in ("head", "cell") for sign in (1, -1)])


def set_units(ffn: Any, at: Fields, units: Sequence[tuple[dict[str, int], dict[str, int], dict[str, int]]]) -> None:
    for unit, (gate, up, down) in enumerate(units):
        for name, weight in gate.items():
            ffn.gate.weight[unit, at.at(name)] = weight
        for name, weight in up.items():
            ffn.up.weight[unit, at.at(name)] = weight
        for name, weight in down.items():
            ffn.down.weight[at.at(name), unit] = weight


def set_lookup(mixer: Any, at: Fields, sharp: float) -> None:
    """−C(h − c)² + g·time where the key is a writer, −C/2 + g·time where it is "go"."""
    query, key, value = mixer.qkv.weight.split(mixer.rows)
    scale = 5**0.5  # attention divides by √K
    terms = (  # one query field, and the key fields it multiplies
        ({"head": 2 * sharp}, {"cell": 1}),
        ({"one": sharp}, {"cell2": -1}),
        ({"head2": sharp}, {"one": -1, "go": 1}),
        ({"one": GAP}, {"time": 1}),
        ({"one": sharp / 2}, {"go": -1}),
    )
    for i, (asked, offered) in enumerate(terms):
        for name, weight in asked.items():
            query[i, at.at(name)] = weight * scale
        for name, weight in offered.items():
            key[i, at.at(name)] = weight
    width = value.shape[0]
    value[:, at["written"]] = torch.eye(width, dtype=value.dtype)
    mixer.out.weight[at["read"]] = torch.eye(width, dtype=value.dtype)


def set_rules(ffn: Any, machine: Machine, at: Fields) -> None:
    """One hidden unit per (state, symbol) pair, which outputs the step of their rule, or "end"."""
    vocabulary = StepVocabulary(machine)
    for unit, (state, symbol) in enumerate(product(machine.states, machine.symbols)):
        ffn.up.weight[unit, at.at("state", machine.states.index(state))] = 1
        ffn.up.weight[unit, at.at("read", machine.symbols.index(symbol))] = 1
        ffn.up.weight[unit, at.at("one")] = -1
        rule = machine.rules.get((state, symbol))
        written = 1 if rule is None else vocabulary.step((rule[2], rule[0], rule[1]))
        ffn.down.weight[at.at("next", written), unit] = 1


def decode_steps(machine: Machine, most: int, dtype: torch.dtype = torch.float64) -> list[Step]:
    """Decode the steps with the package's own generation loop and KV cache."""
    vocabulary = StepVocabulary(machine)
    prompt = vocabulary.prompt()
    model = build_model(machine, len(prompt) + most + 1, dtype)
    (found,) = model.generate([prompt], max_new_tokens=most + 1, temperature=0.0, ends=(1,))
    return vocabulary.read(found.tokens)[:most]


def count_matching(ours: list[Step], theirs: list[Step]) -> int:
    """How many leading steps are equal."""
    same = [a == b for a, b in zip(ours, theirs, strict=False)]
    return same.index(False) if False in same else len(same)


def turing(*, steps: int = 3000, seed: int = 0, progress: Progress = no_progress) -> Result:
    """Compare every machine with the simulator, in float64 and float32. The seed has no effect."""
    require(1, steps=steps)
    rows: Rows = []
    for name, machine in MACHINES.items():
        truth, tape = machine.run(steps)
        for dtype in (torch.float64, torch.float32):
            progress(f"{name}, {len(truth):,} steps")
            ours = decode_steps(machine, steps, dtype)
            right = count_matching(ours, truth)
            whole = right == len(truth) == len(ours)
            size = StepVocabulary(machine).size
            bits = str(dtype).removeprefix("torch.")
            ended = truth[-1][0] if truth[-1][0] in machine.stopping else None
            rows.append((name, bits, len(truth), right, "yes" if whole else "no", size, ended, format_tape(tape)))
    wide = [row for row in rows if row[1] == "float64"]
    narrow = [f"{row[0]} goes wrong after {row[3]} steps" for row in rows if row[1] == "float32" and row[4] == "no"]
    equal = "every machine" if all(row[4] == "yes" for row in wide) else "not every machine"
    return Result(
        name="turing",
        claim="A decoder with fixed weights runs a Turing machine, one step for each token that it decodes.",
        found=(
            f"In float64 {equal} matches the simulator, {sum(int(row[2] or 0) for row in wide):,} steps in all"
            + (f"; in float32 {', '.join(narrow)}" if narrow else "; the same in float32")
            + ". Assumptions: a text that fits the position table, enough precision to separate g from C·h², a softmax "
            "sharp enough to select one key, and norms turned off by a large ε. The theorems assume more: "
            "unbounded precision and steps."
        ),
        columns=("machine", "numbers", "steps", "steps right", "equal", "vocabulary", "stopped in", "tape"),
        rows=rows,
        draw=draw,
        size=(10.5, 5.4),
    )


def format_tape(tape: Mapping[int, str], most: int = 24) -> str:
    used = [cell for cell, symbol in tape.items() if symbol != BLANK]
    if not used:
        return BLANK
    text = "".join(tape.get(cell, BLANK) for cell in range(min(used), max(used) + 1))
    return text if len(text) <= most else text[: most - 1] + "…"


def draw(picture: Any, theme: str) -> None:
    """The busy beaver: its tape over time, and which token each step reads."""
    machine = MACHINES["beaver"]
    steps, tape = machine.run(1000)
    cells = range(min(tape) - 1, max(tape) + 2)
    grid, heads, head = np.zeros((len(steps) + 1, len(cells))), [0], 0
    for time, (_, written, move) in enumerate(steps, 1):
        grid[time] = grid[time - 1]
        grid[time, head - cells[0]] = written == "1"
        head += move
        heads.append(head)
    left, right = picture.subplots(1, 2, width_ratios=(1, 1.3))
    from matplotlib.colors import ListedColormap

    extent = (cells[0] - 0.5, cells[-1] + 0.5, len(steps) + 0.5, -0.5)
    colour_map = ListedColormap([picture.get_facecolor(), colours(theme)[0]])
    left.imshow(grid, aspect="auto", cmap=colour_map, extent=extent, interpolation="nearest")
    left.plot(heads, range(len(heads)), color=colours(theme)[1], linewidth=1.2, label="head")
    left.set(xlabel="cell", ylabel="step, one token each")
    left.set_title(f"the tape: {int(grid[-1].sum())} ones after {len(steps)} steps")
    left.legend(frameon=False, loc="upper left")
    vocabulary = StepVocabulary(machine)
    tokens = vocabulary.prompt() + [vocabulary.step(step) for step in steps]
    model, taps = build_model(machine, len(tokens)), Taps(read=["stack.blocks.2.mixer.weights"])
    with torch.inference_mode():
        model(torch.tensor([tokens]), taps=taps)
    weights = taps.values["stack.blocks.2.mixer.weights"][0, 0]
    read = weights.argmax(-1).numpy()
    right.plot(np.arange(len(read)), np.arange(len(read)), ":", color="gray", linewidth=1, label="itself")
    right.scatter(np.arange(len(read)), read, s=10, color=colours(theme)[0], label="the token that is read")
    right.set(xlabel="token that reads", ylabel="token that is read (0: go, a blank)")
    right.set_title(f"block 3 finds who wrote the cell under the head (weight ≥ {float(weights.amax(-1).min()):g})")
    right.grid(alpha=0.4)
    right.legend(frameon=False, loc="upper left")
    picture.suptitle("The four-state busy beaver, run by a decoder with weights set by hand")
