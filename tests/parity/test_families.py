"""Every family of checkpoints: the same hidden states and logits as `transformers`, in pieces, saved back, in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")

import clearhead  # noqa: E402
from clearhead.models.convert import FAMILIES  # noqa: E402
from clearhead.models.convert.multimodal import text_half  # noqa: E402
from clearhead.models.model import EncoderDecoder, SequenceModel  # noqa: E402
from clearhead.nn.tap import Taps  # noqa: E402
from clearhead.reference.run import run  # noqa: E402

from .families import DECODERS, EMBEDDING_GEMMA, ENCODERS, MULTIMODAL, TRANSLATORS, config_class  # noqa: E402
from .test_transformers import TOLERANCE, block_outputs, ids, randomise  # noqa: E402


def make(name: str, head: str, fields: dict[str, Any], folder: Path) -> Any:
    """A random model of `transformers`, saved in `folder`."""
    fields = {key: list(value) if isinstance(value, list) else value for key, value in fields.items()}
    config = getattr(transformers, config_class(name, head))(**fields)
    theirs = randomise(getattr(transformers, f"{name}{head}")(config))
    theirs.save_pretrained(folder)
    return theirs


def check_saved(ours: Any, theirs: Any, folder: Path) -> Any:
    """Save our model, and load it in `transformers`: every tensor must be there, but sinusoids, which it computes."""
    ours.save(folder)
    again, loading = type(theirs).from_pretrained(folder, output_loading_info=True)
    if "Sinusoidal" in str(ours.config):
        loading["missing_keys"] = {name for name in loading["missing_keys"] if "embed_positions" not in name}
    assert not any(loading.values()), loading
    return again.eval()


def check_counts(ours: Any, *given: int | torch.Tensor) -> None:
    """`cost` counts the parameters that there are, and `trace` lists values with the shapes that they have."""
    config = ours.config
    names = {name: tuple(value.shape) for name, value in ours.state_dict().items()}
    assert config.weights() == names
    assert config.count_parameters() == sum(value.numel() for value in ours.state_dict().values())
    from clearhead.configs.base import ONE

    inputs = [ids(2, one) if isinstance(one, int) else one[:2] for one in given]
    lengths = [one.shape[1] for one in inputs]
    sizes = {"B": 2, "T": lengths[-1], "S": lengths[-1]}
    if len(lengths) > 1:
        sizes |= {"source": lengths[0], "source_new": lengths[0]}
    steps = {step.name: step.shape for step in config.steps(ONE.with_sizes(**sizes))}
    taps = Taps(read=["*"])
    with torch.no_grad():
        ours(*inputs, taps=taps, fused=False)
    found = {name: tuple(value.shape) for name, value in taps.values.items() if name in steps}
    assert {name: steps[name] for name in found} == found
    assert len(found) > len(steps) // 2


def in_numpy(ours: Any, *inputs: torch.Tensor) -> np.ndarray:
    weights = {name: value.numpy() for name, value in ours.state_dict().items()}
    return run(ours.config, weights, *(tokens.numpy() for tokens in inputs))


@pytest.mark.parametrize("name", DECODERS)
def test_decoder(name: str, tmp_path: Path) -> None:
    theirs = make(*DECODERS[name], tmp_path)
    ours = clearhead.load(tmp_path)
    assert isinstance(ours, SequenceModel)
    tokens = ids(3, 13)
    taps = Taps(read="stack.*")
    with torch.no_grad():
        expected = theirs(tokens, output_hidden_states=True)
        logits, written_out = ours(tokens, taps=taps), ours(tokens, fused=False)
        again = check_saved(ours, theirs, tmp_path / "again")(tokens).logits
    hidden = expected.hidden_states[1:]
    if theirs.config.model_type == "mamba2":  # lists no embedding, and the last block before and after its norm
        hidden = [*expected.hidden_states[:-2], expected.hidden_states[-1]]
    if name == "opt, 350m":  # lists the last after its matrix to the narrow table
        hidden = [*hidden[:-1], taps.values["stack.final_norm"]]
    for got, want in zip(block_outputs(taps), hidden, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    for got in (logits, written_out, torch.tensor(in_numpy(ours, tokens)), again):
        torch.testing.assert_close(got, expected.logits, **TOLERANCE)
    if not any(getattr(getattr(block.mixer, "rotary", None), "varies", False) for block in ours.config.stack.blocks):
        state = ours.init_state(3, 13)
        with torch.no_grad():
            pieces = [ours(piece, state=state) for piece in tokens.split((4, 1, 8), dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected.logits, **TOLERANCE)
    check_counts(ours, 7)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name: str, tmp_path: Path) -> None:
    theirs = make(*ENCODERS[name], tmp_path)
    ours = clearhead.load(tmp_path)
    assert isinstance(ours, SequenceModel)
    tokens = ids(3, 13)
    readable = torch.ones(3, 13, dtype=torch.bool)
    readable[1, 9:] = False
    taps = Taps(read="stack.*")
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=readable.long(), output_hidden_states=True)
        logits, written_out = (ours(tokens, readable=readable, **way) for way in ({"taps": taps}, {"fused": False}))
        again = check_saved(ours, theirs, tmp_path / "again")(tokens, attention_mask=readable.long()).logits
    for got, want in zip(block_outputs(taps), expected.hidden_states[1:], strict=True):
        torch.testing.assert_close(got[readable], want[readable], **TOLERANCE)
    kept = readable if expected.logits.dim() == 3 else torch.ones(3, dtype=torch.bool)
    for got in (logits, written_out, again):
        torch.testing.assert_close(got[kept], expected.logits[kept], **TOLERANCE)
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(in_numpy(ours, tokens)), theirs(tokens).logits, **TOLERANCE)
    check_counts(ours, 7)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_encoder_decoder(name: str, tmp_path: Path) -> None:
    kind, head, fields = TRANSLATORS[name]
    theirs = make(kind, head, fields, tmp_path)
    with torch.no_grad():  # sinusoids are not parameters that vary
        for side in (theirs.get_encoder(), theirs.get_decoder()):
            if hasattr(getattr(side, "embed_positions", None), "create_weight"):
                side.embed_positions.weight.copy_(side.embed_positions.create_weight())
    theirs.save_pretrained(tmp_path)
    ours = clearhead.load(tmp_path)
    assert isinstance(ours, EncoderDecoder)
    source, target = ids(3, 11), ids(3, 9)
    readable = torch.ones(3, 11, dtype=torch.bool)
    readable[1, 6:] = False
    taps = Taps(read=["encoder.*", "decoder.*"])
    with torch.no_grad():
        expected = theirs(source, attention_mask=readable.long(), decoder_input_ids=target, output_hidden_states=True)
        logits = ours(source, target, source_readable=readable, taps=taps)
        state = ours.init_state(ours.encode(source, readable=readable), 9, readable=readable)
        pieces = torch.cat([ours.decode(piece, state) for piece in target.split((4, 1, 4), dim=1)], dim=1)
        again = check_saved(ours, theirs, tmp_path / "again")
        again = again(source, attention_mask=readable.long(), decoder_input_ids=target).logits
    hidden = {"encoder": expected.encoder_hidden_states[1:], "decoder": expected.decoder_hidden_states[1:]}
    for side, wanted in hidden.items():
        for got, want in zip(block_outputs(taps, side), wanted, strict=True):
            kept = readable if side == "encoder" else torch.ones_like(target, dtype=torch.bool)
            torch.testing.assert_close(got[kept], want[kept], **TOLERANCE)
    for got in (logits, pieces, again):
        torch.testing.assert_close(got, expected.logits, **TOLERANCE)
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(in_numpy(ours, source, target)), ours(source, target), **TOLERANCE)
    check_counts(ours, 11, 7)


def test_a_bart_without_its_head(tmp_path: Path) -> None:
    theirs = make("Bart", "Model", TRANSLATORS["bart"][2], tmp_path)
    ours, source, target = clearhead.load(tmp_path), ids(2, 7), ids(2, 5)
    with torch.no_grad():
        expected = theirs(source, decoder_input_ids=target).last_hidden_state
        again = check_saved(ours, theirs, tmp_path / "again")(source, decoder_input_ids=target).last_hidden_state
        torch.testing.assert_close(ours.hidden_states(source, target), expected, **TOLERANCE)
    torch.testing.assert_close(again, expected, **TOLERANCE)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_half_of_a_model_that_reads_images(name: str, tmp_path: Path) -> None:
    text, vision = ({k: list(v) if isinstance(v, list) else v for k, v in part.items()} for part in MULTIMODAL[name])
    theirs = make(name, "ForConditionalGeneration", {"text_config": text, "vision_config": vision}, tmp_path)
    with pytest.warns(UserWarning, match="tensors of the image half are left out"):
        ours = clearhead.load(tmp_path)
    tokens, taps = ids(3, 13), Taps(read="stack.*")
    with torch.no_grad():
        expected = theirs(tokens, output_hidden_states=True)
        logits = ours(tokens, taps=taps)
    for got, want in zip(block_outputs(taps), expected.hidden_states[1:], strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    torch.testing.assert_close(logits, expected.logits, **TOLERANCE)
    ours.save(tmp_path / "again")
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens).logits, expected.logits, **TOLERANCE)


def test_published_gemma_3_folders_lack_fields() -> None:
    """As google/gemma-3-4b-it has it: sizes that its class knows are absent, and older Qwen2-VL files are flat."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    more = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    half = text_half({"model_type": "gemma3", "text_config": inner | more, "vision_config": {}})
    assert FAMILIES[half["model_type"]].config(half).count_parameters() == 3_880_263_168
    flat = {"model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    flat |= {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": True}
    half = text_half(flat | {"vision_config": {}})
    assert FAMILIES[half["model_type"]].config(half).count_parameters() == 1_543_714_304


def test_the_page_names_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs/use/checkpoints.md").read_text()
    assert not [kind for kind in FAMILIES if f"`{kind}`" not in page]


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Experts as published files have them: blocks of four-bit numbers, and a scale for each block."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    theirs = make("GptOss", "ForCausalLM", DECODERS["gpt_oss"][2] | sizes, tmp_path)
    weights, packed = {name: weight.bfloat16() for name, weight in theirs.state_dict().items()}, {}
    theirs.load_state_dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        packed[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(122, 126, (experts, rows, columns // 32), dtype=torch.uint8)
        expanded = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"])
        theirs.get_parameter(name).data = expanded.float()
    save_file(weights | packed, tmp_path / "model.safetensors")
    hf = json.loads((tmp_path / "config.json").read_text())
    more = {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(hf | more))
    ours, tokens = clearhead.load(tmp_path), ids(2, 7)
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours.float()(tokens), expected, **TOLERANCE)
    ours.bfloat16().save(tmp_path / "again")
    with torch.no_grad():
        again = type(theirs).from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
        torch.testing.assert_close(again(tokens).logits, expected, **TOLERANCE)


def test_embedding_gemma_reads_both_ways(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(**EMBEDDING_GEMMA)
    theirs = randomise(transformers.Gemma3TextModel(config))
    theirs.save_pretrained(tmp_path)
    ours, tokens = clearhead.load(tmp_path), ids(3, 13)
    with torch.no_grad():
        expected = theirs(tokens).last_hidden_state
        again = check_saved(ours, theirs, tmp_path / "again")(tokens).last_hidden_state
        for got in (ours(tokens), ours(tokens, fused=False), again):
            torch.testing.assert_close(got, expected, **TOLERANCE)
