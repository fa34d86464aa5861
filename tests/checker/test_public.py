"""The page states what was measured on public files, and faults are planted where a rule fits."""

import pytest

from .planting import plant
from .public import counts, read_ledger
from .table import PAGE

ATTENTION = """
import math
import torch

def attention(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return torch.softmax(scores, dim=-1) @ v
"""


def test_the_page_states_the_counts_of_the_ledger() -> None:
    assert "\n".join(counts(read_ledger())) in PAGE.read_text(encoding="utf-8")


def test_the_goals_on_public_files() -> None:
    lines = read_ledger()
    parts, planted = [line for line in lines if not line.fault], [line.result for line in lines if line.fault]
    assert len({line.file for line in parts}) >= 30
    assert {line.truth for line in parts} == {"right", "wrong", "other"}
    right = [line.result for line in parts if line.truth == "right"]
    assert right.count("wrong") <= 0.01 * len(right)
    checked = [result for result in planted if result != "unchecked"]
    assert checked.count("right") <= 0.05 * len(checked)
    assert checked.count("named") >= 0.7 * len(checked)


@pytest.mark.parametrize("key", ["no-scale", "scale-no-root", "scale-multiplied", "softmax-queries", "mixes-keys"])
def test_a_fault_is_planted(key: str) -> None:
    found = [planted for planted in plant(ATTENTION, "attention", "attention") if key in planted.keys]
    assert found
    assert all(planted.text != ATTENTION for planted in found)


def test_no_fault_is_planted_in_another_part() -> None:
    assert list(plant(ATTENTION, "attention", "layer_norm")) == []
