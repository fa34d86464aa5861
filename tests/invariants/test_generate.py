"""Generated text does not depend on caches, batches or widths: it equals plain passes over the whole text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import tokenizers
import torch

import clearhead
from clearhead.configs import PRECISIONS, BytesConfig, DecodingConfig, ParallelBlockConfig, Power, Wu
from clearhead.generate.beam import BLOCK, BeamSearch, beam_search, block_peaks, topk_by_peaks
from clearhead.generate.complete import TextGenerator
from clearhead.generate.filters import draw, sample_generator, uniform_numbers
from clearhead.generate.loop import prefill
from clearhead.generate.row import Detokenizer, Row
from clearhead.kernels.accelerate import accelerate
from clearhead.kernels.build import kernels
from clearhead.kernels.decode import KernelAttention
from clearhead.models.model import EncoderDecoder, Model
from clearhead.models.quantize import quantize
from clearhead.models.transformer import modern_transformer, transformer
from clearhead.nn.cache import KVCache
from clearhead.tokenize import Tokenizer, make

DECODERS = ["tiny-gpt", "tiny-llama", "tiny-mistral", "tiny-mixtral", "tiny-deepseek", "tiny-lstm", "tiny-mamba"]
SUMMARIES = ["tiny-lstm", "tiny-mamba"]  # keep no past to go back to
WRITERS = [*DECODERS, "tiny-transformer"]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [5, 80, 3, 1], [44]]


def model_of(name: str, noise: float = 0.2, vocabulary: int = 101):
    torch.manual_seed(0)
    config = clearhead.preset(name)
    sized = [part for part in ("embedding", "source", "head") if hasattr(config, part)] if vocabulary != 101 else []
    config = replace(config, **{part: replace(getattr(config, part), vocabulary=vocabulary) for part in sized})
    model = clearhead.build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))  # so that the likeliest token depends on the prompt
    return model


def next_logprobs(model, prompt: list[int], written: list[int], start: int = 1) -> torch.Tensor:
    """From one pass over the whole text, without a state."""
    if isinstance(model, EncoderDecoder):
        return model(torch.tensor([prompt]), torch.tensor([[start, *written]]))[0, -1].log_softmax(-1)
    return model(torch.tensor([[*prompt, *written]]))[0, -1].log_softmax(-1)


def greedy(model, prompt: list[int], steps: int, ends=()) -> list[int]:
    written: list[int] = []
    while len(written) < steps and not (written and written[-1] in ends):
        written.append(int(next_logprobs(model, prompt, written).argmax()))
    return written


def tokens_of(model, prompts, **options) -> list[list[int]]:
    options = {"max_new_tokens": 9, "start": 1} | options
    return [found.tokens for found in model.generate(prompts, **options)]


@pytest.mark.parametrize("name", WRITERS)
def test_greedy_equals_whole_passes_for_any_batch(name: str) -> None:
    model = model_of(name)
    with torch.no_grad():
        plain = [greedy(model, prompt, 9) for prompt in PROMPTS]
    assert tokens_of(model, PROMPTS) == plain
    assert tokens_of(model, PROMPTS, batch=1) == plain
    assert tokens_of(model, PROMPTS[::-1], batch=3) == plain[::-1]
    assert tokens_of(model, PROMPTS, temperature=0) == plain
    assert tokens_of(model, PROMPTS, top_k=1, seed=3) == plain


@pytest.mark.parametrize("parallel", [False, True])
@torch.no_grad()
def test_last_ffn_runs_only_on_the_last_token_of_each_row(parallel: bool) -> None:
    config = clearhead.preset("tiny-llama")
    if parallel:
        (one,) = config.stack.pattern
        config = config.with_value("stack.pattern.0", ParallelBlockConfig(mixer=one.mixer, ffn=one.ffn, norm=one.norm))
    model, tokens = clearhead.build(config).eval(), torch.arange(14).view(2, 7)
    seen: list[tuple[int, ...]] = []
    for block in model.stack.layers():
        block.ffn.register_forward_pre_hook(lambda ffn, given: seen.append(tuple(given[0].shape[:2])))
    readable = torch.arange(7) < torch.tensor([[7], [4]])
    for real in (None, readable):
        found = model.next_logits(tokens, model.init_state(2, 9), readable=real)
        assert seen == [(2, 7)] * (len(seen) - 1) + [(2, 1)]
        seen.clear()
        whole = model(tokens, readable=real)
        torch.testing.assert_close(found, whole[[0, 1], [6, 6 if real is None else 3]], atol=1e-5, rtol=1e-5)
        seen.clear()


def test_finished_rows_do_not_change_the_others() -> None:
    model = model_of("tiny-llama")
    plain = tokens_of(model, PROMPTS, max_new_tokens=12)
    end = plain[1][4]
    with torch.no_grad():
        cut = [greedy(model, prompt, 12, ends=(end,)) for prompt in PROMPTS]
    found = model.generate(PROMPTS, max_new_tokens=12, ends=(end,))
    assert [one.tokens for one in found] == cut
    assert [one.reason for one in found] == ["end" if end in tokens else "length" for tokens in cut]
    assert len({len(tokens) for tokens in cut}) > 1


@pytest.mark.parametrize("name", ["tiny-mistral", "tiny-transformer"])
def test_samples_depend_only_on_their_prompt_and_seed(name: str) -> None:
    model = model_of(name)
    options = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "seed": 7, "n": 3, "ends": tuple(range(0, 101, 9))}
    together = tokens_of(model, PROMPTS, **options)
    assert together == [tokens for prompt in PROMPTS for tokens in tokens_of(model, [prompt], **options)]
    assert together[:1] == tokens_of(model, PROMPTS[:1], **options | {"n": 1})
    assert len({tuple(tokens) for tokens in together[:3]}) == 3
    assert len({len(tokens) for tokens in together}) > 2
    assert together != tokens_of(model, PROMPTS, **options | {"seed": 8})
    large = tokens_of(model, PROMPTS[:1], **options | {"seed": 10**30, "n": 1})
    assert large != tokens_of(model, PROMPTS[:1], **options | {"seed": 10**30 + 1, "n": 1})


def test_large_repetition_penalty_never_repeats_a_token() -> None:
    for prompt, tokens in zip(PROMPTS, tokens_of(model_of("tiny-llama"), PROMPTS, repetition_penalty=1e6), strict=True):
        assert len({*prompt, *tokens}) == len({*prompt}) + 9


def test_logprobs_are_the_models_own() -> None:
    model = model_of("tiny-gpt")
    (found,) = model.generate([3, 1, 4], max_new_tokens=6, temperature=2.0, top_k=9, seed=1, logprobs=True)
    with torch.no_grad():
        for i, (token, logprob) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
            assert logprob == pytest.approx(float(next_logprobs(model, [3, 1, 4], found.tokens[:i])[token]), abs=1e-4)


# ---- beams


def plain_beam_search(model, prompt: list[int], config: DecodingConfig, steps: int) -> list[tuple[float, list[int]]]:
    """Beam search by its definition: lists of tokens, each log-probability from a pass over the whole text."""
    going: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, steps + 1):
        table = []
        for total, tokens in going:
            logprobs = next_logprobs(model, prompt, tokens).tolist()
            table += [(total + logprobs[token], [*tokens, token]) for token in range(len(logprobs))]
        table.sort(key=lambda item: -item[0])
        going = []
        for rank, (total, tokens) in enumerate(table):
            if tokens[-1] in config.ends or length == steps:
                if rank < config.beams:
                    ended.append((total / config.length_penalty(length), tokens))
            elif len(going) < config.beams:
                going.append((total, tokens))
        ended = sorted(ended, key=lambda item: -item[0])[: config.beams]
        if not going:
            break
        if len(ended) == config.beams:
            at = steps if config.early_stopping == "never" and config.length_penalty.alpha > 0 else length
            hope = going[0][0] / config.length_penalty(at)
            if config.early_stopping is True or hope <= ended[-1][0]:
                break
    return ended


@pytest.mark.parametrize(
    ("name", "penalty", "early"),
    [
        ("tiny-llama", Power(1.0), False),
        ("tiny-llama", Wu(0.6), "never"),
        ("tiny-transformer", Power(0.0), True),
        ("tiny-transformer", Power(-0.5), "never"),
        ("tiny-transformer", Wu(0.6), False),
    ],
    ids=str,
)
@torch.no_grad()
def test_beam_search_equals_its_definition(name: str, penalty, early) -> None:
    model = model_of(name, 0.3, 11)
    prompts = [[2, 3, 4], [5], [7, 8]]
    config = DecodingConfig(beams=3, n=3, ends=(0, 9), length_penalty=penalty, early_stopping=early)
    options = {"beams": 3, "n": 3, "ends": (0, 9), "length_penalty": penalty, "early_stopping": early}
    found = model.generate(prompts, start=1, max_new_tokens=6, logprobs=True, **options)
    for number, prompt in enumerate(prompts):
        plain = plain_beam_search(model, prompt, config, 6)
        mine = [one for one in found if one.prompt == number]
        assert [one.tokens for one in mine] == [tokens for _, tokens in plain]
        assert [one.score for one in mine] == pytest.approx([score for score, _ in plain], abs=1e-4)
        assert [one.score for one in mine] == sorted((one.score for one in mine), reverse=True)
        for one in mine:
            assert sum(one.logprobs) / penalty(len(one.tokens)) == pytest.approx(one.score, abs=1e-4)
    alone = [tokens for prompt in prompts for tokens in tokens_of(model, [prompt], max_new_tokens=6, **options)]
    assert [one.tokens for one in found] == alone


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-transformer"])
def test_one_beam_is_greedy(name: str) -> None:
    model, prompts = model_of(name, 0.3, 11), [[5, 6, 7], [2]]
    with torch.inference_mode():
        begun = prefill(model, prompts, 8, start=1)
        searches = beam_search(model, begun, [8, 8], DecodingConfig(beams=1, ends=(0,)))
        for prompt, search in zip(prompts, searches, strict=True):
            assert search.best()[0][1] == greedy(model, prompt, 8, ends=(0,))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-transformer"])
@pytest.mark.parametrize("penalty", [Power(0.0), Power(1.0), Wu(1.0)], ids=str)
@torch.no_grad()
def test_exhaustive_beam_finds_the_best_text(name: str, penalty) -> None:
    model, steps = model_of(name, 0.3, 4), 3
    texts = [
        [*body, *end]
        for length in range(steps + 1)
        for body in itertools.product((1, 2, 3), repeat=length)
        for end in (((0,),) if length < steps else ((),))
    ]

    def score(tokens: list[int]) -> float:
        total = sum(float(next_logprobs(model, [2, 3], tokens[:i])[token]) for i, token in enumerate(tokens))
        return total / penalty(len(tokens))

    options = {"max_new_tokens": steps, "ends": (0,), "length_penalty": penalty, "early_stopping": "never"}
    (found,) = model.generate([2, 3], beams=len(texts), start=1, **options)
    assert found.tokens == max(texts, key=score)


@pytest.mark.parametrize(
    ("early", "penalty", "second", "done"),
    [
        (True, Power(0.0), -2.3, True),  # two have ended, and there are two beams
        (False, Power(0.0), -2.3, False),  # better than the worst that has ended, -2.5
        (False, Power(0.0), -2.6, True),  # worse than both
        (False, Power(1.0), -2.6, True),  # -2.6/2 against -2.5/2
        ("never", Power(1.0), -2.6, False),  # it may become -2.6/10
        ("never", Power(-1.0), -2.6, True),  # and with α < 0 only worse
    ],
)
def test_early_stopping_rule(early, penalty, second: float, done: bool) -> None:
    search = BeamSearch(DecodingConfig(beams=2, ends=(0,), early_stopping=early, length_penalty=penalty), limit=10)
    assert search.step([-1.0, -2.0, -2.1, -9.0], [0, 0, 0, 0], [0, 1, 2, 3], 1) == [0, 0]
    assert not search.done
    ranked = sorted([(second, 1), (-2.5, 0), (-8.0, 2), (-9.0, 3)], reverse=True)
    search.step([score for score, _ in ranked], [0, 0, 0, 0], [token for _, token in ranked], 2)
    assert search.done is done


@pytest.mark.parametrize("width", [300, 8000, 16000, 58101])
def test_topk_by_peaks_equals_topk(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, width)
    x[0, : width // 2] = -torch.inf
    x[1] = torch.arange(width).float()
    values, places = topk_by_peaks(x, 10, block_peaks(x)[0])
    wanted = x.topk(10, dim=1)
    assert torch.equal(values, wanted.values)
    assert torch.equal(places, wanted.indices)


@pytest.mark.parametrize("width", [1, 15, 16, 128, 130, 16000])
def test_block_peaks_are_equal_with_and_without_kernels(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = 8 * torch.randn(3, width)
    x[0, width // 2 :] = -torch.inf
    x[0, 0] = 50.0
    peaks, whole = block_peaks(x)
    torch.testing.assert_close(whole, x.logsumexp(1))
    for piece, part in enumerate(x.split(BLOCK, dim=1)):
        assert torch.equal(peaks[:, piece], part.amax(1))
    monkeypatch.setattr("clearhead.generate.beam.kernels_on", lambda x: None)
    plain = block_peaks(x)
    assert torch.equal(plain[0], peaks)
    torch.testing.assert_close(plain[1], whole)


@pytest.mark.parametrize("name", ["tiny-transformer", "tiny-gpt", "tiny-gemma-3", "tiny-mistral"])
def test_fused_model_finds_the_same_beams(name: str) -> None:
    """Prompts of different lengths, searches that end at different steps, a window past its ring."""
    plain, config = model_of(name, 0.4, 11), DecodingConfig(beams=4, ends=(0,))
    ready = accelerate(model_of(name, 0.4, 11))
    assert any(isinstance(module, KernelAttention) for module in ready.modules())
    limits = [3, 12, 7, 9]
    prompts = [[token % 11 for token in prompt] for prompt in PROMPTS]
    with torch.inference_mode():
        found, wanted = (
            beam_search(model, prefill(model, prompts, 12, start=1), limits, config) for model in (ready, plain)
        )
    for one, other in zip(found, wanted, strict=True):
        assert [tokens for _, tokens, _ in one.best()] == [tokens for _, tokens, _ in other.best()]
        assert [score for score, _, _ in one.best()] == pytest.approx([s for s, _, _ in other.best()], abs=1e-4)


MADE_QUICK = {
    "made ready": (accelerate, 1e-4),
    "whole blocks": (lambda model: quantize(model, PRECISIONS["float32"]), 1e-4),
    "a cache of 16 bits": (lambda model: quantize(model, replace(PRECISIONS["float32"], cache="float16")), 0.02),
}


@pytest.mark.parametrize(("quick", "tolerance"), MADE_QUICK.values(), ids=MADE_QUICK)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma-3", "tiny-mistral"])
def test_reordered_rows_keep_their_past(name: str, quick: Callable[[Model], Model], tolerance: float) -> None:
    """Rows of different lengths are selected, repeated and dropped while keys stay in place."""
    plain, ready = model_of(name), quick(model_of(name))
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 101, (4, 6), generator=generator)
    readable = torch.arange(6) < torch.tensor([[6], [3], [5], [6]])

    def run(model) -> list[torch.Tensor]:
        state, logits = model.init_state(4, 20), []
        model(tokens, state=state, readable=readable)
        for rows in ([0, 3, 3, 0], [2, 0, 1, 1], [3, 1], [1, 0, 0, 1, 1], [4, 2, 0]):
            state.select(torch.tensor(rows))
            logits += [model(torch.full((len(rows), 1), 7 + len(logits)), state=state) for _ in range(2)]
        return logits

    with torch.inference_mode():
        for mine, theirs in zip(run(ready), run(plain), strict=True):
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("length", [1, 3])
def test_shared_source_is_read_the_same_with_and_without_kernels(normed: bool, length: int) -> None:
    """Sources of different lengths, three targets each, several tokens at once, after some rows were dropped."""
    make = modern_transformer if normed else transformer
    config = make(dim=32, layers=2, heads=4, hidden=48, vocabulary=31)
    torch.manual_seed(5)
    plain = clearhead.build(config).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ready = accelerate(deepcopy(plain))
    tokens, readable = torch.randint(0, 31, (3, 7)), torch.arange(7) < torch.tensor([[7], [2], [5]])

    def run(model: EncoderDecoder) -> torch.Tensor:
        state = model.init_state(model.encode(tokens, readable=readable), 20, readable=readable)
        model.decode(torch.ones(3, 1, dtype=torch.long), state)
        state.repeat_rows(3)
        first = model.decode(torch.arange(9 * length).view(9, length), state)
        state.select(torch.tensor([2, 0, 1, 7, 7, 6]))
        return torch.cat((first, model.decode(torch.arange(6 * length).view(6, length), state)))

    read = []
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        wanted = run(plain)
        reading = KernelAttention.read_source
        patch.setattr(KernelAttention, "read_source", lambda *given: read.append(1) or reading(*given))
        torch.testing.assert_close(run(ready), wanted, atol=1e-4, rtol=1e-4)
    assert len(read) == (0 if kernels() is None else 2 * 3)  # layers, passes


def test_finished_search_does_not_disturb_the_sources_of_others() -> None:
    """Beams share the keys of their source; when a sentence is done, the others keep their own source."""
    model, config = model_of("tiny-transformer", 0.5, 11), DecodingConfig(beams=3, ends=(0,))
    prompts, limits = [[2, 3, 4, 5], [5], [7, 8], [3, 3, 3]], [3, 9, 5, 7]
    with torch.inference_mode():
        together = beam_search(model, prefill(model, prompts, 9, start=1), limits, config)
        for prompt, limit, search in zip(prompts, limits, together, strict=True):
            (alone,) = beam_search(model, prefill(model, [prompt], 9, start=1), [limit], config)
            assert [tokens for _, tokens, _ in search.best()] == [tokens for _, tokens, _ in alone.best()]
    assert len({tuple(search.best()[0][1]) for search in together}) == len(prompts)


def test_beams_reorder_every_layer() -> None:
    """Reordering must carry every layer's keys along: beams of a model with a window, past its ring."""
    model = model_of("tiny-mistral", 0.3)
    config = DecodingConfig(beams=4, ends=(0,))
    with torch.no_grad():
        plain = plain_beam_search(model, [5, 6, 7], config, 12)
    found = model.generate([5, 6, 7], beams=4, n=4, ends=(0,), max_new_tokens=12)
    assert [one.tokens for one in found] == [tokens for _, tokens in plain]


# ---- the state: rows taken, and steps taken back


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in SUMMARIES])
def test_rewind_forgets_the_tokens(name: str) -> None:
    model = model_of(name)
    tokens = torch.randint(0, 101, (2, 14), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        state = model.init_state(2, 14, spare=4)
        model(tokens[:, :8], state=state)
        model(tokens[:, 2:5], state=state)  # read by mistake
        state.rewind(torch.tensor([8, 7]))
        assert state.lengths.tolist() == [8, 7]
        rest = torch.stack((tokens[0, 8:12], tokens[1, 7:11]))
        again = model(rest, state=state)
        alone = [model(tokens[:1, :12])[:, 8:], model(tokens[1:, :11])[:, 7:]]
    torch.testing.assert_close(again, torch.cat(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SUMMARIES)
def test_recurrent_state_cannot_rewind(name: str) -> None:
    state = model_of(name).init_state(1, 9)
    with pytest.raises(ValueError, match="keeps a summary of what it has read, and cannot go back"):
        state.rewind(torch.tensor([0]))


def test_ring_rewinds_at_most_its_spare_positions() -> None:
    model = model_of("tiny-mistral")
    state = model.init_state(1, 30, spare=2)
    with torch.no_grad():
        model(torch.arange(20)[None], state=state)
    with pytest.raises(ValueError, match="cannot go back 3 positions, only 2"):
        state.rewind(torch.tensor([17]))
    state.rewind(torch.tensor([18]))
    assert state.lengths.tolist() == [18]


def test_select_reuses_memory() -> None:
    model = model_of("tiny-llama")
    state = model.init_state(3, 10)
    with torch.no_grad():
        model(torch.arange(12).reshape(3, 4), state=state)
        memory = state.blocks[0].mixer
        assert isinstance(memory, KVCache)
        before, place = memory.key[:, :, :4].clone(), memory.key.data_ptr()
        state.select(torch.tensor([2, 0, 1]))
        assert memory.key.data_ptr() == place
        assert torch.equal(memory.key[:, :, :4], before[[2, 0, 1]])
        state.select(torch.tensor([1, 2]))
        assert memory.key.data_ptr() == place
        assert torch.equal(memory.key[:, :, :4], before[[0, 1]])
        state.select(torch.tensor([1, 0, 1, 1]))
        assert torch.equal(memory.key[:, :, :4], before[[1, 0, 1, 1]])


# ---- text


def byte_tokenizer() -> Tokenizer:
    return make(BytesConfig(), [])


def bytes_model():
    return model_of("tiny-llama", vocabulary=257)


def fed(row: Row, tokenizer: Tokenizer, text: str) -> list[str]:
    pieces = []
    for token in tokenizer.encode(text):
        if row.reason is None:
            pieces.append(row.append(token, None, ()))
    return pieces


def test_streamed_pieces_are_whole_characters() -> None:
    tokenizer = byte_tokenizer()
    text = "naïve 数学 🙂 end"
    row = Row(0, 100, Detokenizer(tokenizer, tokenizer.encode("x")))
    pieces = fed(row, tokenizer, text)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    cut = Row(0, 2, Detokenizer(tokenizer, []))
    assert "".join(fed(cut, tokenizer, "数")) == cut.text == "\ufffd"  # two of three bytes, and no room for more


def test_byte_tokens_are_shown_as_whole_characters() -> None:
    """SentencePiece byte tokens decode only as a complete run."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "▁": 257}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="a"))
    inner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    inner.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    tokenizer, khmer = Tokenizer(inner), "ភាសាខ្មែរភាសា"
    row = Row(0, 200, Detokenizer(tokenizer, tokenizer.encode("a " + khmer)))
    pieces = fed(row, tokenizer, khmer + " a" + khmer)
    assert "".join(pieces) == khmer + " a" + khmer
    assert len([piece for piece in pieces if piece]) == 2 * len(khmer) + 2, "each as soon as it is whole"
    assert len(row.detokenizer.ids) < 40  # type: ignore[union-attr]
    cut = Row(0, 8, Detokenizer(tokenizer, []))
    assert "".join(fed(cut, tokenizer, khmer)) == cut.text == khmer[:2] + 2 * "\ufffd"


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (("END",), "to the END of it", "to the "),
        (("\n\n", "E"), "a\nbE", "a\nb"),
        (("abcabd",), "xabcabcabd!", "xabc"),
        (("zzz",), "the buzz", "the buzz"),
    ],
)
def test_stop_strings_are_never_shown_even_in_part(stops, text: str, shown: str) -> None:
    tokenizer = byte_tokenizer()
    row = Row(0, len(text.encode()), Detokenizer(tokenizer, []), stops)
    assert "".join(fed(row, tokenizer, text)) == row.text == shown
    assert row.reason == ("length" if shown == text else "stop")


def test_streamed_pieces_add_up_to_the_text() -> None:
    model, tokenizer = bytes_model(), byte_tokenizer()
    options = {"temperature": 1.0, "seed": 3, "max_new_tokens": 60}
    (whole,) = model.generate("To be", tokenizer=tokenizer, **options)
    pieces = list(model.stream("To be", tokenizer=tokenizer, **options))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 10
    stop = whole.text[20:23]
    (cut,) = model.generate("To be", tokenizer=tokenizer, stop=stop, **options)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.reason == "stop"


def test_end_token_is_not_part_of_the_text() -> None:
    tokenizer = byte_tokenizer()
    row = Row(0, 9, Detokenizer(tokenizer, []))
    given = [row.append(token, None, (ord("!"),)) for token in tokenizer.encode("Hi!")]
    assert ("".join(given), row.text, row.reason) == ("Hi", "Hi", "end")
    with pytest.raises(ValueError, match="stream writes one text"):
        bytes_model().stream("x", tokenizer=tokenizer, beams=2)


def test_a_space_before_the_first_word_is_kept() -> None:
    """SentencePiece drops the space at the start of a text, but not at the start of a continuation."""
    words = {"▁Once": 0, "▁upon": 1, "▁a": 2, ",": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=","))
    inner.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(inner)
    after, fresh = Detokenizer(tokenizer, [0]), Detokenizer(tokenizer, [])
    assert [after.add(token) for token in (1, 3, 2)] == [" upon", ",", " a"]
    assert [fresh.add(token) for token in (0, 1)] == ["Once", " upon"]


# ---- chance


def test_draw_follows_the_probabilities() -> None:
    chances = torch.tensor([[0.1, 0.0, 0.6, 0.3, 0.0]], dtype=torch.float64).expand(40000, 5)
    drawn = draw(chances, uniform_numbers(sample_generator(0, 0), 40000))
    share = drawn.bincount(minlength=5) / 40000
    assert torch.allclose(share, chances[0].float(), atol=0.01)
    assert share[1] == share[4] == 0
    edges = draw(chances[:2].roll(1, 1), torch.tensor([0.0, 1 - 2**-40], dtype=torch.float64))
    assert edges.tolist() == [1, 4]


def test_samples_with_one_seed_are_independent() -> None:
    streams = torch.stack(
        [uniform_numbers(sample_generator(seed, sample), 2000) for seed in (1, 2) for sample in (0, 1, 2)]
    )
    assert torch.corrcoef(streams).triu(1).abs().max() < 0.08


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, but must be a finite number ≥ 0; 0 is greedy"),
        ({"top_p": 1.5}, "top_p is 1.5, but must be between 0 and 1"),
        ({"top_k": 0}, "Decoding.top_k is 0, but must be positive"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, but must be positive"),
        ({"n": 2}, "n=2 greedy texts would all be the same"),
        ({"beams": 2, "n": 3}, "n=3 is more than beams=2"),
        ({"beams": 2, "temperature": 0.5}, "does not sample; drop temperature"),
        ({"stop": ("",)}, "a stop string is empty"),
        ({"beams": 2, "stop": "x"}, "do not work with beam search"),
        ({"temprature": 1.0}, "generate has no option 'temprature'; did you mean 'temperature'?"),
    ],
)
def test_bad_options_are_refused(options, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        model_of("tiny-gpt").generate([1, 2], **options)


def test_bad_prompts_are_refused() -> None:
    model = model_of("tiny-gpt")
    with pytest.raises(ValueError, match="the prompt is empty and this model has no start token"):
        model.generate([[]])
    with pytest.raises(ValueError, match="token 101 is outside the vocabulary, which has ids 0 to 100"):
        model.generate([5, 101])
    with pytest.raises(ValueError, match="token -1 is outside"):
        model.generate([[5], [-1]])
    with pytest.raises(ValueError, match=r"the prompt has 65 tokens, but the model.s context is 64"):
        model.generate([[1] * 65])
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        model.generate("hello")
    with pytest.raises(ValueError, match="batch is 0, but must be at least 1"):
        model.generate([1], batch=0)
    with pytest.raises(ValueError, match="which token its targets begin with"):
        model_of("tiny-transformer").generate([1, 2])
    for name, head in {"tiny-bert": "Pooler", "tiny-vit": "ClassHead"}.items():
        with pytest.raises(ValueError, match=f"this model has a {head} head and cannot generate"):
            model_of(name).generate([1, 2])


def test_text_ends_with_the_token_after_a_full_context() -> None:
    model = model_of("tiny-gpt")
    (found,) = model.generate([[1] * 60], max_new_tokens=100)
    assert len(found.tokens) == 5  # the last one follows a full context
    assert found.reason == "length"
    with torch.no_grad():
        assert found.tokens == greedy(model, [1] * 60, 5)


# ---- what a checkpoint asks for


def saved(tmp_path, name: str, generation: dict, **config):
    model_of(name).save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    if config:
        hf = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(hf | config))
    return clearhead.load(tmp_path)


def test_generation_config_sets_the_defaults(tmp_path) -> None:
    asks = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "eos_token_id": [3, 4], "bos_token_id": 7}
    model = saved(tmp_path, "tiny-llama", asks, max_position_embeddings=40)
    config = TextGenerator.of(model).config
    assert (config.temperature, config.top_k, config.top_p, config.ends, config.start) == (0.7, 20, 0.9, (3, 4), 7)
    assert TextGenerator.of(model, temperature=0).config.sampling is False
    assert TextGenerator.of(model, beams=2).config.sampling is False
    assert tokens_of(model, [[]], temperature=0, start=None) == tokens_of(model, [[7]], temperature=0)
    with pytest.raises(ValueError, match=r"the prompt has 41 tokens, but the model.s context is 40"):
        model.generate([[1] * 41])


def test_beams_and_banned_tokens_of_the_checkpoint_are_used(tmp_path) -> None:
    asks = {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True, "bad_words_ids": [[5], [9]]}
    model = saved(tmp_path, "tiny-transformer", asks | {"decoder_start_token_id": 9, "forced_eos_token_id": 2})
    config = TextGenerator.of(model).config
    assert (config.beams, config.length_penalty, config.early_stopping) == (3, Power(0.5), True)
    assert (config.banned, config.start, config.forced_end) == ((5, 9), 9, 2)
    (found,) = model.generate([4, 5, 6], max_new_tokens=6)
    assert found.tokens[-1] == 2
    assert not {5, 9} & set(found.tokens)
    assert TextGenerator.of(model, temperature=1.0).config.beams == 1


def test_unsupported_settings_cause_a_warning(tmp_path) -> None:
    model = saved(tmp_path, "tiny-gpt", {"no_repeat_ngram_size": 3})
    with pytest.warns(UserWarning, match=r"no_repeat_ngram_size \(not supported"):
        (found,) = model.generate([1], max_new_tokens=1)
    assert len(found.tokens) == 1
    older = tmp_path / "config.json"
    older.write_text(json.dumps(json.loads(older.read_text()) | {"suppress_tokens": [3]}))
    with pytest.warns(UserWarning, match=r"no_repeat_ngram_size, suppress_tokens \(not supported"):
        model.generate([1], max_new_tokens=1)
