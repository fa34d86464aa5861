"""The same weights in `torch.nn`: norms, multi-head attention, encoder layers, and the whole encoder–decoder.

float64, 1e-9. torch's boolean masks say True where a key is *hidden*; ours where it may be read.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    EncoderDecoderConfig,
    FeedForwardConfig,
    Full,
    LayerNormConfig,
    LMHeadConfig,
    LSTMConfig,
    RMSNormConfig,
    StackConfig,
    TokenEmbeddingConfig,
    Window,
)
from clearhead.models.model import EncoderDecoder
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.build import build_part
from clearhead.nn.cache import StateAllocator
from clearhead.nn.context import Context
from clearhead.nn.tap import Taps
from clearhead.reference import lstm_backward

DIM, HEADS, HIDDEN, BATCH, LENGTH, SOURCE, VOCABULARY = 20, 5, 33, 3, 7, 11, 17
EXACT = {"atol": 1e-9, "rtol": 1e-9}
ATTENTION = {"heads": HEADS, "qkv_bias": True, "out_bias": True}
BOTH = pytest.mark.parametrize("fused", [True, False], ids=["fused", "written out"])
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch on its own encoder
PLACEMENTS = pytest.mark.parametrize("placement", ["post", "pre"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: nn.Module) -> nn.Module:
    """Every weight drawn, also the biases and gains that torch starts at 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.double().named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.3 * noise)
    return module.eval()


def context(
    length: int, readable: Tensor | None = None, keys: int | None = None, source: Tensor | None = None, **rest: object
) -> Context:
    positions = torch.arange(length).expand(BATCH, -1)
    key_positions = positions if keys is None else torch.arange(keys).expand(BATCH, -1)
    return Context(positions, key_positions, readable, source=source, **rest)


def padding(length: int) -> Tensor:
    """True where real: the first row whole, the second short, the third with a hole."""
    readable = torch.ones(BATCH, length, dtype=torch.bool)
    readable[1, length - 3 :] = False
    readable[2, 1] = False
    return readable


def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    weights = {
        "qkv.weight": theirs.in_proj_weight,
        "qkv.bias": theirs.in_proj_bias,
        "out.weight": theirs.out_proj.weight,
        "out.bias": theirs.out_proj.bias,
    }
    ours.load_state_dict(weights, strict=True)


def attention(**options: object) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    theirs = randomised(nn.MultiheadAttention(DIM, HEADS, batch_first=True))
    ours = build_part(AttentionConfig(**ATTENTION, **options), DIM).double().eval()
    copy_attention(ours, theirs)
    return ours, theirs


@pytest.mark.parametrize("eps", [1e-5, 1e-1])
def test_norms(eps: float) -> None:
    x = 3 * numbers(BATCH, LENGTH, DIM) + 2
    pairs = [
        (LayerNormConfig(eps=eps), nn.LayerNorm(DIM, eps=eps)),
        (LayerNormConfig(eps=eps, bias=False), nn.LayerNorm(DIM, eps=eps, bias=False)),
        (RMSNormConfig(eps=eps), nn.RMSNorm(DIM, eps=eps)),
    ]
    for config, theirs in pairs:
        ours = build_part(config, DIM).double()
        with torch.no_grad():
            for weight in theirs.double().parameters():
                weight.copy_(numbers(DIM, seed=4))
            ours.load_state_dict(theirs.state_dict(), strict=True)
            torch.testing.assert_close(ours(x), theirs(x), **EXACT)


@BOTH
def test_self_attention(fused: bool) -> None:
    ours, theirs = attention(mask=Full())
    x = numbers(BATCH, LENGTH, DIM)
    taps = Taps(read=["weights"])
    with torch.no_grad():
        want, weights = theirs(x, x, x, average_attn_weights=False)
        got = ours(x, context(LENGTH, fused=fused, taps=taps))
    torch.testing.assert_close(got, want, **EXACT)
    torch.testing.assert_close(taps.values["weights"], weights, **EXACT)


@BOTH
@pytest.mark.parametrize("masked", ["causal", "causal, padded", "padded", "window"])
def test_masked_self_attention(masked: str, fused: bool) -> None:
    mask = {"causal": Causal(), "causal, padded": Causal(), "padded": Full(), "window": Causal() & Window(3)}[masked]
    ours, theirs = attention(mask=mask)
    x = numbers(BATCH, LENGTH, DIM)
    readable = padding(LENGTH) if "padded" in masked else None
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    if masked != "padded":
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if masked == "window":  # a token, and the two before it
        hidden = hidden | torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-3)
    aligned = readable is None
    with torch.no_grad():
        missing = None if readable is None else ~readable
        want, _ = theirs(x, x, x, attn_mask=hidden, key_padding_mask=missing)
        got = ours(x, context(LENGTH, readable, fused=fused, aligned=aligned))
    torch.testing.assert_close(got, want, **EXACT)


@BOTH
def test_cross_attention(fused: bool) -> None:
    ours, theirs = attention(mask=Full())
    x, source, readable = numbers(BATCH, LENGTH, DIM), numbers(BATCH, SOURCE, DIM, seed=2), padding(SOURCE)
    with torch.no_grad():
        want, _ = theirs(x, source, source, key_padding_mask=~readable)
        got = ours(x, context(LENGTH, readable, SOURCE, source, fused=fused))
        kept = ours(x, context(LENGTH, readable, SOURCE, fused=fused), ours.project_source(source))
    torch.testing.assert_close(got, want, **EXACT)
    torch.testing.assert_close(kept, want, **EXACT)


def test_attention_gradients() -> None:
    ours, theirs = attention(mask=Causal())
    x, aim = numbers(BATCH, LENGTH, DIM), numbers(BATCH, LENGTH, DIM, seed=3)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    (theirs(x, x, x, attn_mask=hidden)[0] * aim).sum().backward()
    (ours(x, context(LENGTH, aligned=True)) * aim).sum().backward()
    torch.testing.assert_close(ours.qkv.weight.grad, theirs.in_proj_weight.grad, **EXACT)
    torch.testing.assert_close(ours.qkv.bias.grad, theirs.in_proj_bias.grad, **EXACT)
    torch.testing.assert_close(ours.out.weight.grad, theirs.out_proj.weight.grad, **EXACT)


def norm_of(index: int) -> str:
    return f"norm{index + 1}"


def copy_layer(ours: nn.Module, theirs: nn.Module, branches: tuple[str, ...], placement: str) -> None:
    """torch numbers its norms by branch: self-attention, (cross-attention,) feed-forward."""
    copy_attention(ours.mixer, theirs.self_attn)
    if "cross" in branches:
        copy_attention(ours.cross, theirs.multihead_attn)
    ours.ffn.up.load_state_dict(theirs.linear1.state_dict())
    ours.ffn.down.load_state_dict(theirs.linear2.state_dict())
    for i, branch in enumerate(branches):
        place = "after" if placement == "post" else "before"
        getattr(getattr(ours, f"{branch}_residual"), place).load_state_dict(getattr(theirs, norm_of(i)).state_dict())


def block(placement: str, mask: Causal | Full, cross: bool = False, activation: str = "relu") -> BlockConfig:
    return BlockConfig(
        mixer=AttentionConfig(**ATTENTION, mask=mask),
        cross=AttentionConfig(**ATTENTION) if cross else None,
        ffn=FeedForwardConfig(hidden=HIDDEN, activation=activation),
        placement=placement,
    )


@BOTH
@PLACEMENTS
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer(placement: str, activation: str, fused: bool) -> None:
    theirs = nn.TransformerEncoderLayer(
        DIM, HEADS, HIDDEN, 0.0, activation, batch_first=True, norm_first=placement == "pre"
    )
    randomised(theirs)
    ours = build_part(block(placement, Full(), activation=activation), DIM).double().eval()
    copy_layer(ours, theirs, ("mixer", "ffn"), placement)
    x, readable = numbers(BATCH, LENGTH, DIM), padding(LENGTH)
    want = theirs(x, src_key_padding_mask=~readable)
    got = ours(x, context(LENGTH, readable, fused=fused))
    torch.testing.assert_close(got[readable], want[readable], **EXACT)
    torch.testing.assert_close(ours(x, context(LENGTH, fused=fused)), theirs(x), **EXACT)


def translators(placement: str) -> tuple[EncoderDecoder, nn.Transformer]:
    """torch's has a final norm on both stacks, post-norm ones too, which the paper's has not: so has ours, here."""
    theirs = nn.Transformer(
        DIM, HEADS, 2, 3, HIDDEN, dropout=0.0, activation="relu", batch_first=True, norm_first=placement == "pre"
    )
    randomised(theirs)
    final = LayerNormConfig()
    config = EncoderDecoderConfig(
        source=TokenEmbeddingConfig(vocabulary=VOCABULARY),
        encoder=StackConfig(dim=DIM, pattern=(block(placement, Full()),), repeats=2, final_norm=final),
        decoder=StackConfig(dim=DIM, pattern=(block(placement, Causal(), cross=True),), repeats=3, final_norm=final),
        head=LMHeadConfig(vocabulary=VOCABULARY, tied=True),
    )
    ours = EncoderDecoder(config).double().eval()
    for stack, other, branches in (
        (ours.encoder, theirs.encoder, ("mixer", "ffn")),
        (ours.decoder, theirs.decoder, ("mixer", "cross", "ffn")),
    ):
        for mine, layer in zip(stack.blocks, other.layers, strict=True):
            copy_layer(mine, layer, branches, placement)
        stack.final_norm.load_state_dict(other.norm.state_dict())
    return ours, theirs


@BOTH
@PLACEMENTS
def test_encoder_decoder(placement: str, fused: bool) -> None:
    ours, theirs = translators(placement)
    source = torch.randint(VOCABULARY, (BATCH, SOURCE), generator=torch.Generator().manual_seed(1))
    target = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    readable, taps = padding(SOURCE), Taps(read=["encoder.*", "decoder.*"])
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    seen: dict[str, Tensor] = {}
    for name, stack in (("encoder", theirs.encoder), ("decoder", theirs.decoder)):
        for i, layer in enumerate(stack.layers):
            layer.register_forward_hook(lambda _m, _i, out, key=f"{name}.blocks.{i}": seen.__setitem__(key, out))
    table = ours.source.tokens.weight
    memory = theirs.encoder(table[source], src_key_padding_mask=~readable)
    want = theirs.decoder(table[target], memory, tgt_mask=hidden, memory_key_padding_mask=~readable)
    logits = ours(source, target, source_readable=readable, taps=taps, fused=fused)
    for path, theirs_out in seen.items():
        out = taps.values[f"{path}.ffn_residual.after"]
        rows = readable if path.startswith("encoder") else torch.ones(BATCH, LENGTH, dtype=torch.bool)
        torch.testing.assert_close(out[rows], theirs_out[rows], **EXACT)
    assert len(seen) == 5
    torch.testing.assert_close(taps.values["encoder.final_norm"][readable], memory[readable], **EXACT)
    torch.testing.assert_close(taps.values["decoder.final_norm"], want, **EXACT)
    torch.testing.assert_close(logits, want @ table.T, **EXACT)


@PLACEMENTS
def test_encoder_decoder_decodes_what_torch_says(placement: str) -> None:
    ours, theirs = translators(placement)
    source = torch.randint(VOCABULARY, (BATCH, SOURCE), generator=torch.Generator().manual_seed(1))
    target = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    readable, table = padding(SOURCE), ours.source.tokens.weight
    with torch.no_grad():
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        memory = theirs.encoder(table[source], src_key_padding_mask=~readable)
        want = theirs.decoder(table[target], memory, tgt_mask=hidden, memory_key_padding_mask=~readable) @ table.T
        state = ours.init_state(ours.encode(source, readable=readable), LENGTH, readable=readable)
        got = torch.cat([ours.decode(piece, state) for piece in target.split((2, 1, 4), dim=1)], dim=1)
    torch.testing.assert_close(got, want, **EXACT)


def test_the_paper_has_no_final_norm() -> None:
    """Without it the post-norm stacks end in the norm of their last layer, which is what 2017 says."""
    ours, theirs = translators("post")
    x = numbers(BATCH, LENGTH, DIM)
    for layer in theirs.encoder.layers:
        x = layer(x)
    y = numbers(BATCH, LENGTH, DIM)
    stack = build_part(StackConfig(dim=DIM, pattern=(block("post", Full()),), repeats=2), DIM).double()
    stack.load_state_dict({k: v for k, v in ours.encoder.state_dict().items() if not k.startswith("final_norm")})
    torch.testing.assert_close(stack(y, context(LENGTH)), x, **EXACT)


@BOTH
def test_lstm_is_torchs(fused: bool) -> None:
    """Every h, and the last h and c. torch has two biases, which are added; an identity shows h as it is."""
    theirs = randomised(nn.LSTM(DIM, HIDDEN, batch_first=True))
    ours = build_part(LSTMConfig(hidden=HIDDEN), DIM).double()
    with torch.no_grad():
        ours.input.weight.copy_(theirs.weight_ih_l0)
        ours.input.bias.copy_(theirs.bias_ih_l0 + theirs.bias_hh_l0)
        ours.recurrent.weight.copy_(theirs.weight_hh_l0)
        x, taps = numbers(BATCH, LENGTH, DIM), Taps(read=["hidden"])
        positions = torch.arange(LENGTH).expand(BATCH, -1)
        state = ours.init_state(StateAllocator(BATCH, LENGTH, x.dtype, x.device))
        ours(x, Context(positions, positions, taps=taps, fused=fused), state)
        hidden, (h, c) = theirs(x)
    torch.testing.assert_close(taps.values["hidden"], hidden, **EXACT)
    torch.testing.assert_close(state.hidden, h[0], **EXACT)
    torch.testing.assert_close(state.cell, c[0], **EXACT)


def test_lstm_gradients_are_torchs() -> None:
    theirs = randomised(nn.LSTM(DIM, HIDDEN, batch_first=True))
    weights = [theirs.weight_ih_l0, theirs.weight_hh_l0, theirs.bias_ih_l0]
    x, d_out = numbers(BATCH, LENGTH, DIM).requires_grad_(), numbers(BATCH, LENGTH, HIDDEN, seed=2)
    expected = torch.autograd.grad(theirs(x)[0], (x, *weights), d_out)
    bias = weights[2] + theirs.bias_hh_l0
    arrays = [value.detach().numpy() for value in (d_out, x, *weights[:2], bias)]
    for found, want in zip(lstm_backward(*arrays), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(found), want, **EXACT)
