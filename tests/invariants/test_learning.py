"""Fresh models: sane at the start, the same from the same seed, and able to learn."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.configs import LMHeadConfig
from clearhead.functional import cross_entropy
from clearhead.models.model import build
from clearhead.models.presets import preset

from .cases import CASES, PLACEMENTS, VOCABULARY, block, sequence
from .cases import MIXERS as ALL_MIXERS
from .tools import STREAMS, TRANSLATORS, ids, inputs_of, is_causal, once_each

TEXT = {"batch": 4, "length": 16}


READERS = [name for name in once_each(STREAMS) if hasattr(CASES[name].head, "vocabulary")] + TRANSLATORS


@pytest.mark.parametrize("name", READERS)
def test_a_fresh_model_knows_nothing(name: str) -> None:
    """Its loss is that of a guess, ln V, within 10 %, in the mean of three draws."""
    inputs = tuple(ids(16, x.shape[1], seed=i) for i, x in enumerate(inputs_of(CASES[name])))
    targets, losses = ids(16, inputs[-1].shape[1], seed=9), []
    for seed in range(3):
        torch.manual_seed(seed)
        model = build(CASES[name]).eval()
        with torch.no_grad():
            losses.append(float(cross_entropy(model(*inputs), targets)))
    assert abs(sum(losses) / 3 - math.log(VOCABULARY)) < 0.1 * math.log(VOCABULARY)


TINY = [
    "tiny-gpt",
    "tiny-llama",
    "tiny-mistral",
    "tiny-mixtral",
    "tiny-deepseek",
    "tiny-transformer",
    "tiny-lstm",
    "tiny-mamba",
]


@pytest.mark.parametrize("name", TINY)
def test_a_fresh_preset_knows_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = build(preset(name)).eval()
    tokens, targets = ids(8, 20, vocabulary=101), ids(8, 20, seed=2, vocabulary=101)
    with torch.no_grad():
        logits = model(tokens, tokens) if name == "tiny-transformer" else model(tokens)
    assert abs(float(cross_entropy(logits, targets)) - math.log(101)) < 0.1 * math.log(101)


@pytest.mark.parametrize("name", ["mha; pre", "ffn: moe, shared", "patches", "translator, two tables"])
def test_a_seed_is_a_model(name: str) -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return build(CASES[name]).state_dict()

    one, again, other = weights(3), weights(3), weights(4)
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert all(torch.equal(one[key], other[key]) == (one[key].unique().numel() == 1) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", once_each(CASES))
def test_gradients_reach_every_weight(name: str) -> None:
    """Of a fresh model, so that no part starts dead. Rows of tables that were not asked for have none."""
    torch.manual_seed(0)
    model, inputs = build(CASES[name]), inputs_of(CASES[name], torch.float32)
    out = model(*inputs)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    dead = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert dead == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_added_to_the_stream_starts_small(placement: str) -> None:
    """std √(2/5·width), and smaller by √branches for what enters the residual stream, and for nothing else."""
    for mixer in ("mha", "latent, query latent"):
        torch.manual_seed(0)
        model = build(sequence(block(ALL_MIXERS[mixer], placement), repeats=4))
        for name, parameter in model.stack.named_parameters():
            if parameter.dim() != 2 or parameter.numel() < 200:
                continue
            added = name.endswith(("mixer.out.weight", "ffn.down.weight"))
            want = math.sqrt(2 / (5 * parameter.shape[-1])) / (math.sqrt(8) if added else 1)
            assert float(parameter.detach().std()) == pytest.approx(want, rel=0.25), name


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-mixtral", "tiny-lstm", "tiny-mamba"])
def test_one_batch_is_memorised(name: str) -> None:
    torch.manual_seed(0)
    model = build(preset(name))
    tokens = ids(TEXT["batch"], TEXT["length"] + 1, vocabulary=101)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(60):
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(math.log(101), rel=0.1)
    assert losses[-1] < 0.05


def test_the_tied_table_learns_from_both_ends() -> None:
    """One weight, read as embedding and as head: its gradient has rows for tokens that were only targets."""
    torch.manual_seed(0)
    config = CASES["tied head, scaled embedding"]
    assert is_causal(config)
    assert config.head == LMHeadConfig(vocabulary=VOCABULARY, tied=True, bias=True)
    model, tokens = build(config), torch.tensor([[1, 2, 3]])
    cross_entropy(model(tokens), torch.tensor([[2, 3, 7]])).backward()
    gradient = model.embedding.tokens.weight.grad
    assert gradient[7].abs().max() > 0
    assert gradient[1].abs().max() > 0
