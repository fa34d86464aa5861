"""Written out equals fused, forward and backward; watching changes nothing; replacing does what it says; the trace is
what really happens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from clearhead.configs import AttentionConfig, BlockConfig, Causal, EncoderDecoderConfig, SequenceModelConfig
from clearhead.measure.trace import trace
from clearhead.models.model import Model, SequenceModel, build
from clearhead.nn.tap import Taps

from .cases import CASES, DIM, MIXERS, PLAIN, RMS, VOCABULARY, block, sequence
from .tools import (
    BATCH,
    CAUSAL,
    EXACT,
    LENGTH,
    SOURCE,
    close,
    fresh,
    ids,
    inputs_of,
    is_causal,
    keeps_keys,
    kinds,
    mixers,
    model_of,
    once_each,
    randomise,
    sequence_model,
)

BOTH = pytest.mark.parametrize("fused", [True, False], ids=["fused", "written out"])


def gradients(model: Model, inputs: tuple[Tensor, ...], fused: bool) -> tuple[Tensor, list[Tensor]]:
    out = model(*inputs, fused=fused)
    aim = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return out.detach(), list(torch.autograd.grad((out * aim).sum(), list(model.parameters())))


@pytest.mark.parametrize("name", CASES)
def test_written_out_equals_fused_in_float64(name: str) -> None:
    model, inputs = model_of(name), inputs_of(CASES[name])
    (fused, steep), (written, steps) = gradients(model, inputs, True), gradients(model, inputs, False)
    close(written, fused)
    for (parameter, _), one, other in zip(model.named_parameters(), steep, steps, strict=True):
        torch.testing.assert_close(other, one, **EXACT, msg=lambda text, p=parameter: f"{p}: {text}")


@pytest.mark.parametrize("name", once_each(CASES))
def test_written_out_equals_fused_in_float32(name: str) -> None:
    model, inputs = fresh(CASES[name], torch.float32), inputs_of(CASES[name], torch.float32)
    (fused, steep), (written, steps) = gradients(model, inputs, True), gradients(model, inputs, False)
    assert fused.dtype == written.dtype == torch.float32
    close(written, fused, atol=1e-4, rtol=1e-4)
    for one, other in zip(steep, steps, strict=True):
        largest = max(1.0, float(one.abs().max()))  # the rounding error of a sum grows with its largest terms
        close(other, one, atol=1e-3 * largest, rtol=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "window; pre",
        "alibi, grouped; pre",
        "latent; pre",
        "ffn: moe, shared",
        "no final norm",
        "lstm; pre",
        "performer; pre",
    ],
)
def test_float16_is_near_float64(name: str) -> None:
    """Half precision in, half precision out, by both paths; statistics and weights are wider."""
    model, half = model_of(name), copy.deepcopy(model_of(name)).half()
    with torch.no_grad():
        want = model(ids(BATCH, LENGTH))
        for fused in (True, False):
            got = half(ids(BATCH, LENGTH), fused=fused)
            assert got.dtype == torch.float16
            close(got.double(), want, atol=0.05, rtol=0.05)


@BOTH
@pytest.mark.parametrize(
    "name", ["mha", "longformer, global projections", "latent", "performer", "linformer", "mamba", "short conv, biased"]
)
def test_under_autocast_as_without(name: str, fused: bool) -> None:
    """As in training in half precision; float16 stands for bfloat16, which some machines cannot multiply."""
    model, tokens = fresh(sequence(block(MIXERS[name]), repeats=1), torch.float32), ids(BATCH, LENGTH)
    want = model(tokens)
    with torch.autocast("cpu", torch.float16):
        got = model(tokens, fused=fused)
    close(got.float(), want, atol=0.05, rtol=0.05)
    assert all(g.isfinite().all() for g in torch.autograd.grad(got.float().sum(), list(model.parameters())))


@pytest.mark.parametrize("name", CASES)
def test_reading_taps_changes_nothing(name: str) -> None:
    model, inputs = model_of(name), inputs_of(CASES[name])
    with torch.no_grad():
        for fused in (True, False):
            taps = Taps(read=["*"])
            unseen, seen = model(*inputs, fused=fused), model(*inputs, fused=fused, taps=taps)
            assert torch.equal(seen, unseen)
            assert any(".mixer." in path for path in taps.values)


@pytest.mark.parametrize("name", CASES)
def test_attention_views_change_nothing_and_give_rows_of_the_weights(name: str) -> None:
    model, inputs, views = model_of(name), inputs_of(CASES[name]), []
    whole = Taps(read=["*.weights"], strict=False)  # a recurrence has no weights, and so no views
    with torch.no_grad():
        unseen = model(*inputs)
        seen = model(*inputs, taps=Taps(on_attention={"*": views.append}, strict=False))
        model(*inputs, taps=whole)
    assert torch.equal(seen, unseen)
    assert {view.context.path_of("weights") for view in views} == set(whole.values)
    for view in views:
        weights = whole.values[view.context.path_of("weights")]
        heads, rows = slice(1, 3), slice(2, 5)
        close(view.weights(heads, rows), weights[:, heads, rows])
        close(view.weights(slice(None), slice(None)), weights)


@BOTH
@pytest.mark.parametrize(
    "name", ["mha; pre", "gqa, head_dim; post", "latent; parallel", "two windows", "translator; post"]
)
def test_reading_taps_uses_no_random_numbers(name: str, fused: bool) -> None:
    config = CASES[name]
    if isinstance(config, SequenceModelConfig):
        config = config.with_value("stack.pattern.0.dropout", 0.3).with_value("stack.pattern.0.mixer.dropout", 0.4)
        config = config.with_value("embedding.dropout", 0.2)
    else:
        config = config.with_value("decoder.pattern.0.cross.dropout", 0.4).with_value("encoder.pattern.0.dropout", 0.3)
    model, inputs = fresh(config, torch.float32).train(), inputs_of(config)
    with torch.no_grad():
        torch.manual_seed(0)
        unseen, next_number = model(*inputs, fused=fused), torch.rand(1)
        torch.manual_seed(0)
        seen, same_number = model(*inputs, fused=fused, taps=Taps(read=["*"])), torch.rand(1)
        torch.manual_seed(1)
        other = model(*inputs, fused=fused)
    assert torch.equal(seen, unseen)
    assert torch.equal(next_number, same_number)
    assert not torch.equal(other, unseen), "dropout is on"


@BOTH
@pytest.mark.parametrize("name", ["mha", "gqa, head_dim", "latent"])
def test_dropout_keeps_the_mean(name: str, fused: bool) -> None:
    """Over many draws the mixture is what it is without dropout; and it does vary."""
    config = sequence(block(MIXERS[name]), repeats=1).with_value("stack.pattern.0.mixer.dropout", 0.3)
    model, path, tokens = fresh(config), "stack.blocks.0.mixer.mixed", ids(1, 4)
    taps, still = Taps(read=[path]), Taps(read=[path])
    torch.manual_seed(0)
    with torch.no_grad():
        model(tokens, taps=still)
        model.train()(tokens.expand(4000, -1), taps=taps, fused=fused)
    drawn, want = taps.values[path], still.values[path][0]
    error = drawn.std(0) / 4000**0.5
    assert (drawn.std(0) > 1e-3).all()
    assert ((drawn.mean(0) - want).abs() < 5 * error).all()


@BOTH
@pytest.mark.parametrize(
    "name",
    [
        "mha; pre",
        "window; pre",
        "latent; pre",
        "alibi, grouped; pre",
        "ffn: moe",
        "position: learned",
        "lstm; pre",
        "performer; pre",
        "linear, full; pre",
    ],
)
def test_no_tokens_and_no_rows_are_fine(name: str, fused: bool) -> None:
    model = sequence_model(name)
    with torch.no_grad():
        assert model(ids(2, 0), fused=fused).shape == (2, 0, VOCABULARY)
        assert model(ids(0, 4), fused=fused).shape == (0, 4, VOCABULARY)


@pytest.mark.parametrize("name", once_each(CAUSAL))
def test_watching_while_decoding_changes_nothing(name: str) -> None:
    model, tokens = sequence_model(name), ids(BATCH, 9)
    with torch.no_grad():
        unseen, seen = model.init_state(BATCH, 9), model.init_state(BATCH, 9)
        for piece in tokens.split((5, 1, 3), dim=1):
            taps = Taps(read=["*"])
            assert torch.equal(model(piece, state=seen, taps=taps), model(piece, state=unseen))
    weights = [value for path, value in taps.values.items() if path.endswith("mixer.weights")]
    assert len(weights) == sum(map(keeps_keys, mixers(CASES[name])))
    sinks = any(getattr(mixer, "sinks", None) is not None for mixer in mixers(CASES[name]))
    for value in weights:
        assert not sinks or (value.sum(-1) < 1).all()
        if not sinks:
            close(value.sum(-1), torch.ones_like(value[..., 0]))


def test_only_what_is_asked_for_is_read() -> None:
    taps = Taps(read=["stack.blocks.1.mixer.weights", "head.*"])
    with torch.no_grad():
        sequence_model("norm: layer norm")(ids(BATCH, LENGTH), taps=taps)
    assert set(taps.values) == {"stack.blocks.1.mixer.weights", "head.logits"}


@pytest.mark.parametrize("name", once_each(CASES))
def test_replacing_by_itself_is_the_written_out_result(name: str) -> None:
    """Every value of the pass replaced by a copy of itself."""
    model, inputs = model_of(name), inputs_of(CASES[name])
    with torch.no_grad():
        written = model(*inputs, fused=False)
        replaced = model(*inputs, taps=Taps(replace={"*": torch.clone}))
    assert torch.equal(replaced, written)


@pytest.mark.parametrize(
    "name",
    [
        "qk_norm; sandwich",
        "latent, query latent; parallel",
        "lstm, narrow; pre",
        "performer, value_dim; pre",
        "head: classes of the pooler",
    ],
)
def test_no_tap_is_a_dead_end(name: str) -> None:
    """Adding noise to any value changes the output, by both paths alike."""
    model, inputs, seen = model_of(name), inputs_of(CASES[name]), Taps(read=["*"])
    with torch.no_grad():
        written = model(*inputs, fused=False, taps=seen)
        for path in seen.values:
            noise = torch.randn(
                seen.values[path].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
            )
            changed = [
                model(*inputs, fused=fused, taps=Taps(replace={path: lambda x, noise=noise: x + noise}))
                for fused in (True, False)
            ]
            close(*changed)
            assert not torch.allclose(changed[1], written, atol=1e-4), f"{path} changes nothing"


@BOTH
def test_a_mixer_put_to_zero_is_a_block_without_it(fused: bool) -> None:
    """x + 0: what the block says is what its feed-forward layer says of the input."""
    config = sequence(block(MIXERS["mha"], ffn=PLAIN, norm=RMS))
    model, tokens = fresh(config), ids(BATCH, LENGTH)
    taps = Taps(replace={"stack.blocks.1.mixer.out": torch.zeros_like})
    without = copy.deepcopy(model)
    for parameter in without.stack.blocks[1].mixer.out.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        close(model(tokens, taps=taps, fused=fused), without(tokens))
        assert not torch.allclose(model(tokens), without(tokens))


@pytest.mark.parametrize("what", ["scores", "weights"])
@pytest.mark.parametrize("name", ["mha; pre", "gqa, head_dim; pre", "alibi, grouped; pre", "latent; pre"])
def test_replaced_weights_are_the_ones_used(name: str, what: str) -> None:
    """Even weights over what may be read: the mixture is the mean of the values so far."""
    taps = Taps(read=["*"], replace={f"stack.blocks.0.mixer.{what}": replacement(what)})
    with torch.no_grad():
        sequence_model(name)(ids(BATCH, LENGTH), taps=taps)
    even = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril() / torch.arange(1, LENGTH + 1)[:, None]
    mixed = taps.values["stack.blocks.0.mixer.mixed"]
    close(taps.values["stack.blocks.0.mixer.weights"], even.expand(BATCH, mixed.shape[1], -1, -1))
    close(mixed, even @ values_of(taps, mixed, name))


def replacement(what: str) -> object:
    if what == "scores":
        return torch.zeros_like
    return lambda w: torch.ones_like(w).tril() / torch.arange(1, LENGTH + 1)[:, None]


def values_of(taps: Taps, mixed: Tensor, name: str) -> Tensor:
    if name.startswith("latent"):
        up = taps.values["stack.blocks.0.mixer.up"].unflatten(-1, (mixed.shape[1], -1)).transpose(1, 2)
        return up[..., -mixed.shape[-1] :]
    value = taps.values["stack.blocks.0.mixer.value"]
    return value.repeat_interleave(mixed.shape[1] // value.shape[1], dim=1)


def test_a_replacement_of_another_shape_is_refused() -> None:
    model, tokens = sequence_model("mha; pre"), ids(BATCH, LENGTH)
    for path in ("stack.blocks.0.mixer.weights", "stack.blocks.0.ffn.up", "embedding.tokens", "head.logits"):
        with pytest.raises(ValueError, match=rf"{path} is \(3, .*, but its replacement is \(3, "):
            model(tokens, taps=Taps(replace={path: lambda x: x[..., :-1]}))


def test_a_head_cut_out_of_one_row_leaves_the_others() -> None:
    def cut(mixed: Tensor) -> Tensor:
        mixed = mixed.clone()
        mixed[1, 2] = 0
        return mixed

    model, tokens = sequence_model("mha; pre"), ids(BATCH, LENGTH)
    with torch.no_grad():
        before, after = model(tokens), model(tokens, taps=Taps(replace={"stack.blocks.0.mixer.mixed": cut}))
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert ((before[1] - after[1]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("name", once_each(CASES))
def test_the_trace_is_what_happens(name: str) -> None:
    """Every step that the trace tells of is a value of that name and shape in a real pass."""
    model, config, taps = model_of(name), CASES[name], Taps(read=["*"])
    source = SOURCE if isinstance(config, EncoderDecoderConfig) else None
    length = None if "PatchEmbedding" in kinds(config) else LENGTH
    with torch.no_grad():
        model(*inputs_of(config), fused=False, taps=taps)
    real = {path: tuple(value.shape) for path, value in taps.values.items()}
    steps = trace(config, batch=BATCH, length=length, source_length=source).steps
    traced = {step.name: step.shape for step in steps}
    assert traced
    assert {path: real.get(path) for path in traced} == traced


@pytest.mark.parametrize("name", once_each(CASES))
def test_the_config_names_every_weight(name: str) -> None:
    weights = {key: tuple(weight.shape) for key, weight in model_of(name).state_dict().items()}
    assert CASES[name].weights() == weights
    trained = {key for key, _ in model_of(name).named_parameters()}
    assert all(key in trained for key in weights if not key.endswith("choice.bias"))  # which no gradient moves
    assert trained <= weights.keys()


def test_a_model_of_one_block_without_feed_forward_is_written_by_hand() -> None:
    """Causal attention of three tokens, done with a loop over queries and heads."""
    config = sequence(BlockConfig(mixer=AttentionConfig(heads=2, mask=Causal()), norm=RMS), repeats=1, final_norm=None)
    model = build(config).double()
    randomise(model)
    assert isinstance(model, SequenceModel)
    assert is_causal(config)
    tokens, taps = ids(1, 3), Taps(read=["stack.*"])
    with torch.no_grad():
        model(tokens, taps=taps)
        x, mixer = model.embedding.tokens(tokens)[0], model.stack.blocks[0].mixer
        h = (
            x
            / (x.square().mean(-1, keepdim=True) + RMS.eps).sqrt()
            * model.stack.blocks[0].mixer_residual.before.weight
        )
        q, k, v = (h @ mixer.qkv.weight.T).split(DIM, dim=-1)
        rows = []
        for t in range(3):
            heads = []
            for part in (slice(0, 10), slice(10, 20)):
                scores = torch.stack([(q[t, part] * k[s, part]).sum() / 10**0.5 for s in range(t + 1)])
                share = scores.exp() / scores.exp().sum()
                heads.append(sum(share[s] * v[s, part] for s in range(t + 1)))
            rows.append(x[t] + torch.cat(heads) @ mixer.out.weight.T)
    close(taps.values["stack.blocks.0.mixer_residual"][0], torch.stack(rows))
