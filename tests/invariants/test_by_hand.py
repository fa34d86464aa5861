"""What each part says, worked out beside it from the values that go in: numbers that no other invariant pins down."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clearhead.configs import AlibiConfig, AttentionConfig, Causal, Full
from clearhead.functional.rotary import rotate_by
from clearhead.nn.dropout import Dropout
from clearhead.nn.tap import Taps

from .cases import CASES, DIM, GATED, MIXERS, RMS, block, sequence
from .tools import BATCH, LENGTH, SOURCE, close, fresh, ids, sequence_model, translator_model


def watched(name_or_model: object, *inputs: Tensor) -> dict[str, Tensor]:
    taps = Taps(read=["*"])
    with torch.no_grad():
        name_or_model(*inputs, taps=taps)
    return taps.values


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + RMS.eps).sqrt() * weight


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=["causal", "full"])
def test_alibi_takes_off_slope_times_distance(mask: Causal | Full) -> None:
    """Four heads have the slopes 1/4, 1/16, 1/64, 1/256  (Press et al. 2022)."""
    mixer = AttentionConfig(heads=4, mask=mask, score_bias=AlibiConfig())
    seen = watched(fresh(sequence(block(mixer), repeats=1)), ids(BATCH, LENGTH))
    query, key, scores = (seen[f"stack.blocks.0.mixer.{name}"] for name in ("query", "key", "scores"))
    for head in range(4):
        for i in range(LENGTH):
            for j in range(i + 1):
                product = (query[:, head, i] * key[:, head, j]).sum(-1) / math.sqrt(5)
                close(scores[:, head, i, j], product - 4.0 ** -(head + 1) * (i - j))


def test_qk_norm_is_over_each_head() -> None:
    model = sequence_model("qk_norm; pre")
    seen, mixer = watched(model, ids(BATCH, LENGTH)), model.stack.blocks[0].mixer
    for name in ("query", "key"):
        weight = getattr(mixer, f"{name}_norm").weight.detach()
        close(seen[f"stack.blocks.0.mixer.{name}_norm"], rms(seen[f"stack.blocks.0.mixer.{name}"], weight))


@pytest.mark.parametrize("name", ["latent; pre", "latent, query latent; pre"])
def test_the_latents_are_normed(name: str) -> None:
    model = sequence_model(name)
    seen, mixer = watched(model, ids(BATCH, LENGTH)), model.stack.blocks[0].mixer
    path = "stack.blocks.0.mixer"
    close(seen[f"{path}.latent_norm"], rms(seen[f"{path}.down"][..., :9], mixer.latent_norm.weight.detach()))
    close(seen[f"{path}.up"], seen[f"{path}.latent_norm"] @ mixer.up.weight.detach().T)
    if "query latent" in name:
        close(seen[f"{path}.query_norm"], rms(seen[f"{path}.query_down"], mixer.query_norm.weight.detach()))


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_a_block_is_its_two_lines(placement: str) -> None:
    """x + f(norm(x)), norm(x + f(x)), x + norm(f(norm(x))), of the mixer and then of the feed-forward layer."""
    model = fresh(sequence(block(MIXERS["mha"], placement, GATED), repeats=1, final_norm=RMS))
    seen, part = watched(model, ids(BATCH, LENGTH)), model.stack.blocks[0]
    x, path = seen["embedding.tokens"], "stack.blocks.0"
    for name, out in (("mixer", "mixer.out"), ("ffn", "ffn.down")):
        residual = getattr(part, f"{name}_residual")
        branch = seen[f"{path}.{out}"]
        if placement == "post":
            want = rms(x + branch, residual.after.weight.detach())
        else:
            close(seen[f"{path}.{name}_residual.before"], rms(x, residual.before.weight.detach()))
            want = x + (rms(branch, residual.inside.weight.detach()) if placement == "sandwich" else branch)
        close(seen[f"{path}.{name}_residual.after"], want)
        x = want
    close(seen["stack.final_norm"], rms(x, model.stack.final_norm.weight.detach()))
    close(seen["head.logits"], seen["stack.final_norm"] @ model.head.weight.detach().T)


def test_a_parallel_block_is_its_one_line() -> None:
    """x + mixer(norm(x)) + ffn(norm(x))."""
    model = fresh(sequence(block(MIXERS["mha"], "parallel", GATED), repeats=1))
    seen, part = watched(model, ids(BATCH, LENGTH)), model.stack.blocks[0]
    x, path = seen["embedding.tokens"], "stack.blocks.0"
    normed = rms(x, part.norm.weight.detach())
    gate, up, down = (getattr(part.ffn, name).weight.detach() for name in ("gate", "up", "down"))
    close(seen[f"{path}.norm"], normed)
    close(seen[f"{path}.ffn.down"], (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T)
    close(seen[f"{path}.residual"], x + seen[f"{path}.mixer.out"] + seen[f"{path}.ffn.down"])


def test_tokens_are_rows_of_the_table() -> None:
    tokens = ids(BATCH, LENGTH)
    for name, scale in (("mha; pre", 1.0), ("tied head, scaled embedding", math.sqrt(DIM))):
        model = sequence_model(name)
        close(watched(model, tokens)["embedding.tokens"], scale * model.embedding.tokens.weight.detach()[tokens])


def test_positions_are_added_from_nought() -> None:
    tokens = ids(BATCH, LENGTH)
    model = sequence_model("position: learned")
    added = watched(model, tokens)["embedding.position"]
    close(added, model.embedding.position.weight.detach()[:LENGTH].expand_as(added))
    for name, base in (("position: sinusoidal", 1e4), ("position: sinusoidal, halves", 100.0)):
        added = watched(sequence_model(name), tokens)["embedding.position"]
        halves = "halves" in name
        for place in range(LENGTH):
            for i in range(DIM // 2):
                angle = place / base ** (2 * i / DIM)
                sine, cosine = (i, DIM // 2 + i) if halves else (2 * i, 2 * i + 1)
                assert float(added[..., place, sine].mean()) == pytest.approx(math.sin(angle), abs=1e-9)
                assert float(added[..., place, cosine].mean()) == pytest.approx(math.cos(angle), abs=1e-9)


def test_embedding_segments_and_norm_are_added_up() -> None:
    model, tokens, segments = sequence_model("head: no head"), ids(BATCH, LENGTH), ids(BATCH, LENGTH) % 3
    taps = Taps(read=["*"])
    with torch.no_grad():
        model(tokens, segments=segments, taps=taps)
        plain = model(tokens)
        table = model.embedding
        want = table.tokens.weight[tokens] + table.position.weight[:LENGTH] + table.segments.weight[segments]
        close(taps.values["embedding.norm"], want)
        close(model(tokens, segments=torch.zeros_like(tokens)), plain)


def test_patches_are_cut_row_by_row_after_the_class_token() -> None:
    config = CASES["patches"]
    model, size = fresh(config), 3
    images = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = watched(model, images)
    weight, bias = model.embedding.patches.weight.detach(), model.embedding.patches.bias.detach()
    for p, (y, x) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        pixels = images[:, :, y * size : (y + 1) * size, x * size : (x + 1) * size].flatten(1)
        close(seen["embedding.patches"][:, p], pixels @ weight.T + bias)
        close(seen["embedding.class_token"][:, p + 1], pixels @ weight.T + bias)
    close(seen["embedding.class_token"][:, 0], model.embedding.class_token.detach().expand(2, -1))
    close(seen["head.pool.pooled"], seen["stack.final_norm"][:, 0])


def test_heads_say_what_they_are_called() -> None:
    tokens = ids(BATCH, LENGTH)
    for name in ("head: first token", "head: mean", "head: pooler", "head: masked lm"):
        model = sequence_model(name)
        seen = watched(model, tokens)
        with torch.no_grad():
            x, out = seen["stack.final_norm"], model(tokens)
            if name == "head: first token":
                close(out, x[:, 0])
            elif name == "head: mean":
                close(out, x.mean(1))
            elif name == "head: pooler":
                close(out, torch.tanh(x[:, 0] @ model.head.dense.weight.T + model.head.dense.bias))
            else:
                hidden = torch.nn.functional.gelu(x @ model.head.dense.weight.T + model.head.dense.bias)
                norm = model.head.norm
                hidden = torch.nn.functional.layer_norm(hidden, (DIM,), norm.weight, norm.bias, 1e-12)
                close(out, hidden @ model.embedding.tokens.weight.T + model.head.bias)


def test_one_table_serves_both_sides_of_a_translator() -> None:
    model, source, target = translator_model("translator; post"), ids(BATCH, SOURCE, seed=2), ids(BATCH, LENGTH)
    seen, table = watched(model, source, target), model.source.tokens.weight.detach()
    close(seen["source.tokens"], math.sqrt(DIM) * table[source])
    close(seen["target.tokens"], math.sqrt(DIM) * table[target])
    close(seen["head.logits"], seen["decoder.final_norm"] @ table.T)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5])
def test_dropout_leaves_out_its_share_and_keeps_the_mean(p: float) -> None:
    torch.manual_seed(0)
    layer, x = Dropout(p).train(), torch.ones(700, 701, requires_grad=True)
    y = layer(x)
    assert (y == 0).float().mean().item() == pytest.approx(p, abs=0.003)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)), atol=1e-4, rtol=1e-4)
    y.sum().backward()
    assert torch.equal(x.grad, y)  # what is left out gets no gradient, the rest as much as it gave
    torch.manual_seed(0)
    assert torch.equal(layer(x), y)
    assert not torch.equal(layer(x), y)
    neighbours = (y[:, 1:] == 0) & (y[:, :-1] == 0)  # four values share one random number, and must not agree
    assert neighbours.float().mean().item() == pytest.approx(p * p, abs=0.003)
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_turning_has_the_gradient_of_turning(layout: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(1, 1, 5, 4, dtype=torch.float64)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return rotate_by(x, angles.cos(), angles.sin(), layout=layout)

    assert torch.autograd.gradcheck(turned, (x,))
    assert torch.autograd.gradgradcheck(turned, (x,))
    with torch.no_grad():
        torch.testing.assert_close(turned(x), turned(x.detach()))
