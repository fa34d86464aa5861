"""Maps: equal to those of `transformers`, computed for the rows asked for, and rightly described."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from clearhead.configs import Causal, Full, Mask
from clearhead.inspect.inspection import inspect
from clearhead.inspect.maps import Map, largest, rollout
from clearhead.inspect.page import enclose
from clearhead.models.load import load
from clearhead.nn.attention_view import SoftmaxView
from clearhead.nn.context import Context
from clearhead.nn.tap import Taps
from tests.invariants.cases import CASES
from tests.invariants.tools import inputs_of, model_of, once_each
from tests.parity.test_transformers import BERT, GPT, LLAMA, VOCABULARY, randomise

from .tools import small

LENGTH = 11


@pytest.mark.parametrize("name", once_each(CASES))
def test_the_answer_is_the_same_bit_for_bit(name: str) -> None:
    model, inputs = model_of(name), [x[:1] for x in inputs_of(CASES[name])]
    inspection = inspect(model, *inputs)
    for map in inspection.maps:
        assert len(map.head_summaries) == len(map.heads) == len(map.thumbnails)
    assert inspection.norms().rows[0] == "embedding"
    with torch.inference_mode():
        assert torch.equal(inspection.logits, model(*inputs))
    assert inspection.maps or inspection.layers_without_maps


MODELS: dict[str, Any] = {
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(**GPT, bos_token_id=1, eos_token_id=2)),
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
    "mistral": lambda t: t.MistralForCausalLM(t.MistralConfig(**LLAMA, sliding_window=5)),
    "bert": lambda t: t.BertModel(t.BertConfig(**BERT)),
    "vit": lambda t: t.ViTModel(
        t.ViTConfig(
            hidden_size=28, intermediate_size=41, num_hidden_layers=2, num_attention_heads=7, image_size=8, patch_size=4
        )
    ),
    "marian": lambda t: t.MarianMTModel(
        t.MarianConfig(
            vocab_size=VOCABULARY,
            d_model=24,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=3,
            decoder_attention_heads=4,
            encoder_ffn_dim=31,
            decoder_ffn_dim=29,
            max_position_embeddings=32,
            pad_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=0,
            forced_eos_token_id=None,
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_maps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = randomise(MODELS[name](transformers))
    if name == "marian":  # the sinusoids are not parameters that vary
        with torch.no_grad():
            for side in (theirs.model.encoder, theirs.model.decoder):
                side.embed_positions.weight.copy_(side.embed_positions.create_weight())
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    ours, ids = load(tmp_path), torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if name == "marian":
            source = ids[:, :7]
            out = theirs(input_ids=source, decoder_input_ids=ids, output_attentions=True)
            want = [*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions]
            inspection = ours.inspect(source, ids)
        elif name == "vit":
            pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
            want = theirs(pixels, output_attentions=True).attentions
            inspection = ours.inspect(pixels)
        else:
            want = theirs(ids, output_attentions=True).attentions
            inspection = ours.inspect(ids)
    assert len(inspection.maps) == len(want)
    for map, weights in zip(inspection.maps, want, strict=True):
        assert_allclose(map.weights(), weights[0].numpy(), atol=1e-5)
        head = map.heads[-1]
        assert_allclose(map.weights(head, [3, -1]), weights[0, head : head + 1, [3, -1]].numpy(), atol=1e-5)


def test_only_what_is_looked_at_is_kept() -> None:
    model, ids = small("tiny-llama"), list(range(9))
    inspection = inspect(model, ids, layers=[1], heads=[3, 0])
    (map,) = inspection.maps
    assert (map.layer, map.heads, map.attending.q.shape[1]) == (1, (3, 0), 2)
    whole = inspect(model, ids).at(1)
    assert_allclose(map.weights(), whole.weights()[[3, 0]], atol=1e-7)
    assert [head.head for head in map.head_summaries] == [3, 0]
    assert map.attending.context.taps is None
    assert not map.attending.context.memo


def handmade(target: np.ndarray, tokens: np.ndarray, mask: Mask, strength: float = 60.0) -> Map:
    """One head whose query i reads key target[i], as far as the mask lets it."""
    n = len(target)
    q, k = strength * math.sqrt(n) * torch.eye(n)[torch.from_numpy(target)], torch.eye(n)
    at = torch.arange(n)[None]
    context = Context(at, at)
    attending = SoftmaxView(q[None, None], k[None, None], mask, context, torch.eye(n)[None, None], None, None)
    return Map("stack", 0, (0,), attending, tokens)


def test_tags_entropy_and_distance_of_heads_made_by_hand() -> None:
    n = 12
    i, plain, twice = np.arange(n), np.arange(n), np.tile(np.arange(n // 2), 2)
    made = {
        "previous token": (np.maximum(i - 1, 0), plain, 60.0),
        "first-token sink": (np.zeros(n, int), plain, 60.0),
        "diagonal": (i, plain, 60.0),
        "induction": (np.where(i >= 6, i - 5, 0), twice, 60.0),
        "uniform": (i, plain, 0.0),
    }
    for tag, (target, tokens, strength) in made.items():
        (head,) = handmade(target, tokens, Causal(), strength).head_summaries
        assert head.tag == tag
        weights = handmade(target, tokens, Causal(), strength).weights()[0].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            bits = -np.where(weights > 0, weights * np.log2(weights), 0).sum(1)
        assert head.entropy == pytest.approx(bits.mean(), abs=1e-4)
        assert head.distance == pytest.approx((weights * abs(i[:, None] - i)).sum(1).mean(), abs=1e-4)
    (head,) = handmade(i, plain, Causal()).head_summaries
    assert head.scores["induction"] is None, "no token comes twice"


def test_a_score_is_the_mean_over_the_queries_that_could(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plain loops, on random weights, in chunks."""
    monkeypatch.setattr("clearhead.inspect.maps.CHUNK", 100)
    inspection = inspect(small("tiny-gpt"), tokens := [3, 1, 4, 1, 5, 5, 9, 2, 6, 5, 3])
    map, n = inspection.maps[0], len(tokens)
    for head, weights in zip(map.head_summaries, map.weights(), strict=True):
        late = range(2, n)
        assert head.scores["previous token"] == pytest.approx(np.mean([weights[i, i - 1] for i in late]), abs=1e-5)
        assert head.scores["first-token sink"] == pytest.approx(np.mean([weights[i, 0] for i in late]), abs=1e-5)
        assert head.scores["diagonal"] == pytest.approx(np.mean([weights[i, i] for i in late]), abs=1e-5)
        follow = [[j for j in range(1, i) if tokens[j - 1] == tokens[i]] for i in range(n)]
        shares = [weights[i, at].sum() for i, at in enumerate(follow) if at]
        assert head.scores["induction"] == pytest.approx(np.mean(shares), abs=1e-5)
        even = [-(w[w > 0] * np.log(w[w > 0])).sum() / np.log(i + 1) for i, w in enumerate(weights) if i]
        assert head.scores["uniform"] == pytest.approx(np.mean(even), abs=1e-4)


def test_thumbnails_keep_the_largest() -> None:
    n = 300
    map = handmade(np.random.default_rng(0).integers(0, n, n), np.arange(n), Full(), 0.3)
    small, weights = map.thumbnails[0], map.weights()[0]
    assert small.shape == (100, 100)
    want = weights.reshape(100, 3, 100, 3).max((1, 3))
    assert_allclose(small, want)
    assert handmade(np.arange(5), np.arange(5), Full()).thumbnails.shape == (1, 5, 5)


def test_rollout_is_the_product_of_half_identities() -> None:
    model, ids = small("tiny-bert"), torch.arange(7)[None]
    taps = Taps(read=["stack.blocks.*.mixer.weights"])
    with torch.no_grad():
        model(ids, taps=taps)
    want = np.eye(7)
    for weights in taps.values.values():
        want = (0.5 * weights[0].mean(0).numpy() + 0.5 * np.eye(7)) @ want
    inspection = inspect(model, ids)
    assert_allclose(rollout(inspection.maps), want, atol=1e-6)
    assert_allclose(inspection.rollout().values.sum(1), 1, atol=1e-5)
    with pytest.raises(ValueError, match="rollout needs the maps of all 2 layers"):
        inspect(model, ids, layers=[1]).rollout()
    assert inspection.rollout().note == ""
    assert inspect(model, ids, heads=[1, 3]).rollout().note == "only heads 1, 3"
    for name in ("linformer; pre", "linear, undivided; pre"):
        with pytest.raises(
            ValueError, match="rollout needs self-attention weights that sum to 1, which layer 0 does not have"
        ):
            inspect(model_of(name), inputs_of(CASES[name])[0][:1]).rollout()


def test_distances_between_patches_are_on_the_image() -> None:
    inspection = inspect(small("tiny-vit"), np.random.default_rng(0).normal(size=(1, 16, 16)))
    map = inspection.maps[0]
    far = map.distances(slice(0, 17)).numpy()
    assert far[0].max() == far[:, 0].max() == 0
    assert far[1 + 0, 1 + 5] == pytest.approx(math.sqrt(2))  # patch (0, 0) to (1, 1), four to a row
    assert far[1 + 4 * 3 + 2, 1 + 1] == pytest.approx(math.sqrt(10))
    assert map.head_summaries[0].scores["previous token"] is None


def test_keys_that_are_mixtures_are_called_so() -> None:
    inspection = inspect(model_of("linformer; pre"), inputs_of(CASES["linformer; pre"])[0][:1])
    grid = inspection.map(0, 1)
    assert grid.columns == [f"mixture {n}" for n in range(grid.values.shape[1])]
    assert inspection.heads[0].distance is None
    assert '"keys":["mixture 0"' in inspection.html()


def test_weights_that_are_no_softmax_sum_to_one() -> None:
    inspection = inspect(model_of("performer; pre"), inputs_of(CASES["performer; pre"])[0][:1], heads=[2, 0])
    (map,) = inspection.maps
    assert_allclose(map.weights().sum(-1), 1, atol=1e-6)
    whole = inspect(model_of("performer; pre"), inputs_of(CASES["performer; pre"])[0][:1]).at(0)
    assert_allclose(map.weights(), whole.weights()[[2, 0]], atol=1e-6)


def test_global_tokens_read_by_projections_of_their_own() -> None:
    name = "longformer, global projections; pre"
    model, ids, taps = model_of(name), inputs_of(CASES[name])[0][:1], Taps(read=["*.weights"])
    with torch.no_grad():
        model(ids, taps=taps)
    want = taps.values["stack.blocks.0.mixer.weights"][0].clone()
    want[:, :2] = taps.values["stack.blocks.0.mixer.global.weights"][0]
    inspection = inspect(model, ids)
    map = inspection.at(0)
    assert_allclose(map.weights(), want, atol=1e-6)
    assert_allclose(map.thumbnails, want, atol=1e-6)
    assert_allclose(inspect(model, ids, heads=[3]).at(0).weights(3, [5, 1]), want[3:4, [5, 1]], atol=1e-6)


def test_weights_that_are_no_shares_have_signs_and_no_tags(tmp_path: Path) -> None:
    name = "linear, undivided; pre"
    inspection = inspect(model_of(name), inputs_of(CASES[name])[0][:1])
    weights = inspection.at(0).weights()
    assert weights.min() < 0
    head = inspection.heads[0]
    assert (head.tag, head.entropy, head.distance, set(head.scores.values())) == ("", None, None, {None})
    assert inspection.map(0, 1).limits == (-abs(weights[1]).max(), abs(weights[1]).max())
    (_, answer), *_ = enclose(inspection, 10_000_000, ())["atlas"]
    (map,) = answer["maps"]
    small = np.frombuffer(base64.b64decode(map["thumbnails"]["data"]), np.uint8).reshape(weights.shape)
    assert_allclose((small.astype(float) - 128) / 127 * map["top"], weights, atol=map["top"] / 200)
    for name in ("maps.csv", "maps.png"):
        inspection.save(tmp_path / name)
    assert len((tmp_path / "maps.csv").read_text().splitlines()) == 1 + np.count_nonzero(weights)
    assert "stack layer 0, head 0" in str(
        inspect(inspection.model_input.model, inspection.model_input.inputs, heads=[0])
    )
    x = torch.tensor([[[-3.0, 1.0, 2.0], [2.0, 0.0, -1.0]]])
    assert largest(x, (2, 2), signed=True).tolist() == [[[-3, 2]]]
    assert largest(x, (2, 2), signed=False).tolist() == [[[2, 2]]]


def test_a_layer_without_a_map_says_so() -> None:
    inspection = inspect(model_of("lstm; pre"), inputs_of(CASES["lstm; pre"])[0][:1])
    assert (inspection.maps, inspection.layers_without_maps) == ([], ["stack layer 0 (LSTM) has no attention map"])
    assert "has no attention map" in str(inspection)
    assert "has no attention map" in inspection.html()
    with pytest.raises(ValueError, match="there is no map to draw"):
        inspection.save("never.png")
