"""Weights set by hand: sparse functions and Turing machines, against looking up and simulating."""

from __future__ import annotations

import pytest
import torch

from clearhead.configs import SequenceModelConfig, StackConfig
from clearhead.lab.manual_weights import IDENTITY_NORM, zero_model
from clearhead.lab.routing import SparseFunction, all_inputs, routing
from clearhead.lab.routing import build_model as route
from clearhead.lab.turing import (
    MACHINES,
    Machine,
    StepVocabulary,
    build_model,
    count_matching,
    decode_steps,
    parse_rules,
)
from clearhead.nn.build import build_part


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_silent_norm_is_the_identity_to_the_bit(dtype: torch.dtype) -> None:
    norm = build_part(IDENTITY_NORM, 7).to(dtype)
    norm.weight.data.fill_(2.0**50)
    x = torch.randn(5, 7, dtype=dtype) * torch.tensor([1e-6, 1.0, 1e3, 1e6, 3e6], dtype=dtype)[:, None]
    with torch.inference_mode():
        assert torch.equal(norm(x), x)
    assert torch.equal(norm(x.requires_grad_()), x)


@pytest.mark.parametrize(("symbols", "length", "inputs"), [(2, 6, 3), (3, 5, 2), (4, 7, 1)])
def test_any_sparse_function_is_computed_exactly(symbols: int, length: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(symbols)
    function = SparseFunction.random(symbols, length, inputs, generator)
    x = all_inputs(symbols, length, generator)
    by_hand = [
        [int(function.table[(i, *(int(row[j]) for j in function.route[i]))]) for i in range(length)] for row in x[-9:]
    ]
    assert function(x[-9:]).tolist() == by_hand
    with torch.inference_mode():
        logits = route(function, 128.0)(x)
    assert torch.equal(logits, torch.nn.functional.one_hot(function(x), symbols).float())


def test_routing_says_where_it_is_exact() -> None:
    found = routing(length=5, trials=2, gaps=(1.0, 128.0))
    assert found.column("largest other weight")[1] == 0
    assert found.column("largest |logit − one-hot|")[1] == 0
    assert found.column("share of outputs wrong")[1] == 0
    assert found.column("largest |logit − one-hot|")[0] > 0.1


def test_the_machines_do_what_is_known_of_them() -> None:
    steps, tape = MACHINES["beaver"].run(1000)
    assert (len(steps), list(tape.values()).count("1")) == (107, 13)  # Brady 1983
    _, tape = MACHINES["increment"].run(100)
    assert "".join(tape[cell] for cell in range(4)) == format(0b1011 + 1, "04b")
    for word, verdict in {"abba": "yes", "aba": "yes", "": "yes", "ab": "no", "abab": "no"}.items():
        assert Machine(MACHINES["palindrome"].rules, word).run(100)[0][-1][0] == verdict


@pytest.mark.parametrize("name", ["increment", "palindrome", "beaver", "counter"])
def test_every_decoded_token_is_a_step(name: str) -> None:
    machine = MACHINES[name]
    assert decode_steps(machine, 150) == machine.run(150)[0]


def test_random_machines_on_random_tapes() -> None:
    generator = torch.Generator().manual_seed(5)

    def pick(vocabulary: str) -> str:
        return vocabulary[int(torch.randint(0, len(vocabulary), (), generator=generator))]

    for _ in range(4):
        text = "; ".join(
            f"{state}{symbol} {pick('01_')}{pick('LSR')}{pick('ABCD')}" for state in "ABC" for symbol in "01_"
        )
        machine = Machine(parse_rules(text), "".join(pick("01") for _ in range(5)))
        assert decode_steps(machine, 60) == machine.run(60)[0]


STUCK = Machine(parse_rules("a0 1Ra; a1 1Rb; b0 0Sdone"), "011")  # in b on 1, for which there is no rule


@pytest.mark.parametrize("machine", [MACHINES["palindrome"], STUCK], ids=["palindrome", "stuck"])
def test_one_pass_says_the_same_as_decoding_with_the_cache(machine: Machine) -> None:
    vocabulary, (steps, _) = StepVocabulary(machine), machine.run(100)
    tokens = vocabulary.prompt() + [vocabulary.step(step) for step in steps]
    with torch.inference_mode():
        logits = build_model(machine, len(tokens))(torch.tensor([tokens]))
    written = logits[0, len(vocabulary.prompt()) - 1 :].argmax(-1).tolist()
    assert written == [*tokens[len(vocabulary.prompt()) :], 1]  # and at last "end"


def test_where_two_runs_part() -> None:
    a, b = ("A", "1", 1), ("B", "0", -1)
    assert (count_matching([a, b], [a, b]), count_matching([a, a], [a, b]), count_matching([b], [a])) == (2, 1, 0)


def test_blank_refuses_a_norm_that_is_not_silent() -> None:
    from clearhead.models.presets import preset

    config = preset("tiny-llama")
    assert isinstance(config, SequenceModelConfig)
    assert isinstance(config.stack, StackConfig)
    with pytest.raises(AssertionError, match="identity norms"):
        zero_model(config, torch.float32)
