"""Latent attention: two forms with one result, and a cache of the latent and one rotary key."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.configs import Scope
from clearhead.models.presets import preset
from clearhead.nn.cache import LatentCache
from clearhead.nn.context import Context
from clearhead.nn.latent import LatentAttention
from clearhead.nn.tap import Taps

from .cases import DIM, MIXERS
from .tools import BATCH, LENGTH, close, ids, sequence_model

LATENT = [name for name in MIXERS if name.startswith("latent")]


def mixer_of(name: str) -> LatentAttention:
    mixer = sequence_model(f"{name}; pre").stack.blocks[0].mixer
    assert isinstance(mixer, LatentAttention)
    return mixer


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("queries", [1, 3, LENGTH])
def test_the_absorbed_form_is_the_plain_form(name: str, queries: int, fused: bool) -> None:
    mixer, generator = mixer_of(name), torch.Generator().manual_seed(2)
    x = torch.randn(BATCH, LENGTH, DIM, generator=generator, dtype=torch.float64)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    readable = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    readable[1, 2] = False
    whole = Context(positions, positions)
    some = Context(positions[:, -queries:], positions, readable, fused=fused)
    with torch.no_grad():
        q, joint = mixer.queries(x, whole)[:, :, -queries:], mixer.latents(x, whole)
        plain, absorbed = mixer.attend_plain(q, joint, some), mixer.attend_absorbed(q, joint, some)
    assert plain.shape == (BATCH, 3, queries, mixer.config.value_dim)
    close(absorbed, plain)


@pytest.mark.parametrize("name", LATENT)
def test_both_forms_are_used(name: str) -> None:
    mixer = mixer_of(name)
    assert not mixer.prefers_absorbed(LENGTH, LENGTH)
    assert mixer.prefers_absorbed(1, 100)
    assert not mixer.prefers_absorbed(99, 100)


def test_the_cache_holds_the_latent_and_the_rotary_key_and_nothing_else() -> None:
    state = sequence_model("latent; pre").init_state(BATCH, 11)
    (block,) = state.blocks
    assert isinstance(block.mixer, LatentCache)
    assert block.mixer.joint.shape == (BATCH, 1, 11, 9 + 4)
    tensors = [value for value in vars(block.mixer).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in tensors) == BATCH * 11 * (9 + 4)


def test_the_published_cache_is_the_small_one() -> None:
    """DeepSeek-V2-Lite keeps 512 + 64 numbers per token and layer (arXiv 2405.04434, table 1)."""
    config = preset("deepseek-v2-lite")
    shapes = config.state(Scope({"B": 1, "S": 1, "T": 1}))
    assert sum(map(math.prod, shapes.values())) == 27 * (512 + 64)


def test_the_scale_is_of_the_whole_key_times_the_magnitude_squared() -> None:
    mixer = mixer_of("latent, query latent")
    taps = Taps(read=["*.mixer.scores", "*.query_rotated", "*.mixer.up", "*.rope_key"])
    with torch.no_grad():
        sequence_model("latent, query latent; pre")(ids(BATCH, LENGTH), taps=taps)
    value = {path.rsplit(".", 1)[1]: tensor for path, tensor in taps.values.items()}
    keys = value["up"].unflatten(-1, (3, -1)).transpose(1, 2)[..., :5]
    keys = torch.cat((keys, value["rope_key"].expand(-1, 3, -1, -1)), -1)
    close(value["scores"], value["query_rotated"] @ keys.mT * 1.2**2 / 3.0)
    assert mixer.config.scale == pytest.approx(1.2**2 / 9**0.5)
