"""What is exported runs elsewhere: llama.cpp and onnxruntime say what we say; GGUF comes back as it went."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import tokenizers.processors
import torch
from click.testing import CliRunner

from clearhead.cli.main import cli
from clearhead.configs import BytePairConfig, Causal, LinearScaling, Llama3Scaling, RMSNormConfig, Window, YarnScaling
from clearhead.configs.data import CharactersConfig
from clearhead.generate.complete import TextGenerator
from clearhead.gguf_file import open_gguf
from clearhead.models.convert import CheckpointError
from clearhead.models.convert.differences import differences
from clearhead.models.llama import llama, mixtral
from clearhead.models.load import load
from clearhead.models.model import Model, build
from clearhead.models.onnx import save_onnx
from clearhead.models.presets import preset
from clearhead.models.quantize import dequantize
from clearhead.models.save import save
from clearhead.nn.tap import Taps
from clearhead.tokenize import Tokenizer, make
from clearhead.tokenize.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, Pieces, begin_with, from_pieces

from .test_transformers import randomise

gguf = pytest.importorskip("gguf")
from clearhead.models.gguf.read import hf_config, load_gguf, read_header  # noqa: E402
from clearhead.models.gguf.write import save_gguf  # noqa: E402

ROOT = Path(__file__).parents[2]
SIZES = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 96, "vocabulary": 288}
LLAMA = llama(**SIZES)
MODELS = {
    "llama": LLAMA,
    "llama, tied, wide heads": LLAMA.with_value("head.tied", True).with_value("stack.pattern.0.mixer.head_dim", 32),
    "llama 3": LLAMA.with_value("stack.pattern.0.mixer.rotary.scaling", Llama3Scaling(factor=8, length=8192)),
    "llama, linear": LLAMA.with_value("stack.pattern.0.mixer.rotary.scaling", LinearScaling(factor=4.0)),
    "llama, yarn": LLAMA.with_value("stack.pattern.0.mixer.rotary.scaling", YarnScaling(factor=4.0, length=16)),
    "qwen2": LLAMA.with_value("stack.pattern.0.mixer.qkv_bias", True),
    "qwen3": LLAMA.with_value("stack.pattern.0.mixer.qk_norm", RMSNormConfig()),
    "mixtral": mixtral(**SIZES, experts=4),
    "gemma": preset("tiny-gemma"),
}
TEXT = "the cat sat on the mat and the dog sat on the log while the frog ate a fig by the bog " * 30


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make(BytePairConfig(vocabulary=288), [TEXT])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_survives_gguf(name: str, tmp_path: Path) -> None:
    model = randomise(build(MODELS[name]))
    save_gguf(model, tmp_path / "m.gguf", None)
    again = load(tmp_path / "m.gguf")
    assert not differences(again.config, model.config)
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma"])
def test_llama_cpp_writes_the_same_text(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = randomise(build(MODELS[name]))
    save_gguf(model, tmp_path / "m.gguf", tokenizer)
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, n_threads=1, verbose=False, logits_all=True)
    tokens = tokenizer.encode("the cat sat on the frog")
    assert theirs.tokenize(b"the cat sat on the frog", add_bos=False) == tokens
    theirs.eval(tokens)
    with torch.no_grad():
        ours = model(torch.tensor([tokens]))[0]
    logits = np.array(theirs.scores[: len(tokens)])
    torch.testing.assert_close(torch.from_numpy(logits), ours, rtol=1e-2, atol=2e-2 * float(ours.abs().max()))
    assert logits.argmax(-1).tolist() == ours.argmax(-1).tolist()
    written = []
    for _ in range(8):
        written.append(int(np.argmax(theirs.scores[theirs.n_tokens - 1])))
        theirs.eval(written[-1:])
    assert written == greedy(lambda ids: model(ids), tokens, 8)


def greedy(run: Callable[[torch.Tensor], torch.Tensor], tokens: list[int], count: int) -> list[int]:
    """The likeliest token, again and again."""
    written: list[int] = []
    with torch.no_grad():
        for _ in range(count):
            written.append(int(run(torch.tensor([[*tokens, *written]]))[0, -1].argmax()))
    return written


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_1"])
def test_precisions_are_read_as_the_package_unpacks_them(kind: str, tmp_path: Path) -> None:
    model = randomise(build(LLAMA))
    save_gguf(model, tmp_path / "m.gguf", None, kind)
    again = load(tmp_path / "m.gguf")
    chosen = gguf.GGMLQuantizationType[kind.upper()]
    table = model.state_dict()["embedding.tokens.weight"].numpy()
    want = gguf.quants.dequantize(gguf.quants.quantize(table, chosen), chosen)
    got = dequantize(again).state_dict()["embedding.tokens.weight"]
    assert got.dtype == {"f16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32)
    np.testing.assert_array_equal(got.float().numpy(), np.asarray(want, np.float32))


def test_q6_k_is_read(tmp_path: Path) -> None:
    """No Python package packs it, so the blocks are random bytes with scales of a sane size."""
    model = randomise(build(llama(dim=256, layers=1, heads=2, vocabulary=8, hidden=256)))
    save_gguf(model, tmp_path / "m.gguf", None)
    source = gguf.GGUFReader(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0])
    generator, packed = np.random.default_rng(0), {}
    for tensor in source.tensors:
        kind = tensor.tensor_type
        data = np.array(tensor.data)
        if len(tensor.shape) > 1:
            kind = gguf.GGMLQuantizationType.Q6_K
            data = generator.integers(0, 256, (data.shape[0], data.shape[1] // 256 * 210), dtype=np.uint8)
            data.reshape(-1, 210)[:, 208:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            packed[tensor.name] = data
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = dequantize(load(tmp_path / "q.gguf")).state_dict()["stack.blocks.0.ffn.down.weight"].numpy()
    want = gguf.quants.dequantize(packed["blk.0.ffn_down.weight"], gguf.GGMLQuantizationType.Q6_K)
    np.testing.assert_array_equal(got, want)


FILE_TYPES = {"Q4_0": 2, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "IQ4_NL": 25, "IQ4_XS": 30}
"""llama.cpp's numbers of the mixtures it quantises files to."""


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_what_llama_cpp_quantises_is_read(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """llama.cpp rounds the activations too, so logits agree to about a percent."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    size = {"dim": 256, "layers": 1, "heads": 4, "hidden": 256, "vocabulary": tokenizer.vocabulary}
    plain, packed = tmp_path / "m.gguf", tmp_path / "q.gguf"
    save_gguf(randomise(build(llama(**size))), plain, tokenizer)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = FILE_TYPES[kind], 1
    assert llama_cpp.llama_model_quantize(str(plain).encode(), str(packed).encode(), options) == 0
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(packed).tensors}
    assert any(name in kinds for name in (kind, kind.removesuffix("_M")))
    theirs = llama_cpp.Llama(str(packed), n_ctx=16, n_threads=1, logits_all=True, verbose=False)
    tokens = [5, 17, 31, 8, 4]
    theirs.eval(tokens)
    want = theirs.scores[: len(tokens)]
    with torch.inference_mode():
        got = load(packed)(torch.tensor([tokens]))[0].numpy()
    assert np.abs(got - want).mean() < 0.03 * np.abs(want).mean()


def test_the_tokenizer_survives_gguf(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_gguf(build(LLAMA), tmp_path / "m.gguf", tokenizer)
    again = Tokenizer.load(tmp_path / "m.gguf")
    assert again.end == tokenizer.end
    for text in ("the cat  sat", "Ünïcode ☃\n\n1234", ""):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == text


def starting(tokenizer: Tokenizer) -> Tokenizer:
    """The same with a token before every prompt, as LLaMA 3 has it."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.json)
    inner.add_special_tokens(["<s>"])
    marks = [("<s>", inner.token_to_id("<s>"))]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=marks)
    return Tokenizer(inner, tokenizer.settings | {"bos_token": "<s>"})


def pieces() -> Tokenizer:
    """LLaMA's kind, as little as llama.cpp takes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrst"]
    merged = ["▁t", "he", "at", "▁the", "▁s", "▁sat"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(names) + len(merged) - 259)]
    scores = [*[-100.0] * len(names), *(-float(place) for place in range(len(merged)))]
    inner = from_pieces(Pieces(names=[*names, *merged], scores=scores, types=types, trimmed=False))
    begin_with(inner, 1)
    return Tokenizer(inner, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


@pytest.mark.parametrize("kind", ["byte pairs", "byte pairs that begin", "pieces"])
def test_a_file_begins_and_ends_where_its_folder_does(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The start token, the text that is written, and how much is read; llama.cpp begins with the same tokens."""
    named = Tokenizer(tokenizer.inner, {"bos_token": tokenizer.inner.id_to_token(5)})
    own = {"byte pairs": named, "byte pairs that begin": starting(tokenizer), "pieces": pieces()}[kind]
    model = randomise(build(llama(**SIZES | {"vocabulary": own.vocabulary})))
    start = own.token("bos_token")
    save(model, tmp_path / "mine", tokenizer=own, extra={"max_position_embeddings": 48, "bos_token_id": start})
    mine, file, there = (str(tmp_path / name) for name in ("mine", "m.gguf", "again"))
    for words in ([mine, "--to", "gguf", file], [file, "--to", "hf", there]):
        assert CliRunner().invoke(cli, ["export", *words]).exit_code == 0
    tasks = [TextGenerator.of(load(place)) for place in (mine, file, there)]
    want = own.prompt("the cat sat")
    assert (want[0] == start) is (kind != "byte pairs")
    for task in tasks:
        assert task.encode("the cat sat") == want
        assert task.encode("") == [start]
        assert task.config.ends == (own.end,)
        with pytest.raises(ValueError, match="context is 48 tokens"):
            task.encode("the cat sat " * 20)
    texts = [task.model.generate("the cat sat", max_new_tokens=4, temperature=0)[0].tokens for task in tasks]
    assert texts[0] == texts[1] == texts[2]
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    theirs = llama_cpp.Llama(file, n_ctx=64, n_threads=1, verbose=False)
    assert theirs.tokenize(b"the cat sat", add_bos=True) == want
    assert theirs.metadata["llama.context_length"] == "48"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: path.write_bytes(b"GGUX" + path.read_bytes()[4:]), "is not a GGUF file, or has been cut short"),
        (lambda path: path.write_bytes(path.read_bytes()[:2000]), "is not a GGUF file, or has been cut short"),
    ],
)
def test_a_spoilt_file_is_one_sentence(spoil: object, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(build(LLAMA), path, None)
    spoil(path)
    with pytest.raises(ValueError, match=sentence):
        load_gguf(path)


def test_what_has_no_place_in_gguf_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot export a BertModel \(bert\) to GGUF"):
        save_gguf(build(preset("tiny-bert")), tmp_path / "m.gguf", None)


def test_what_llama_cpp_would_turn_otherwise_is_not_written(tmp_path: Path) -> None:
    odd = YarnScaling(factor=4.0, length=16, slow=2.0)
    with pytest.raises(CheckpointError, match="it stores only YaRN's factor and length"):
        save_gguf(build(LLAMA.with_value("stack.pattern.0.mixer.rotary.scaling", odd)), tmp_path / "m.gguf", None)


def test_a_file_is_written_over_itself(tmp_path: Path) -> None:
    """The weights are still read from it."""
    path, model = tmp_path / "m.gguf", randomise(build(LLAMA))
    save_gguf(model, path, None)
    save_gguf(load_gguf(path), path, None, "f16", force=True)
    for name, weight in load_gguf(path).state_dict().items():
        torch.testing.assert_close(weight.float(), model.state_dict()[name], atol=1e-3, rtol=1e-3)
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match=r"is not a regular file|is a folder"):
            save_gguf(build(LLAMA), place, None)
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    save_gguf(randomise(build(LLAMA)), tmp_path / "m.gguf", None)
    loaded = load(tmp_path / "m.gguf")
    assert len(loaded.generate([1, 2], max_new_tokens=3)[0].tokens) == 3
    loaded.save(tmp_path / "folder")
    assert not (tmp_path / "folder" / "tokenizer.json").exists()


def test_the_tokenizer_of_a_file_goes_along(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_gguf(randomise(build(LLAMA)), tmp_path / "m.gguf", tokenizer)
    load(tmp_path / "m.gguf").save(tmp_path / "folder")
    assert Tokenizer.load(tmp_path / "folder").encode("the cat") == tokenizer.encode("the cat")


def test_characters_are_not_written_to_gguf(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot write a character tokenizer to GGUF"):
        save_gguf(build(LLAMA), tmp_path / "m.gguf", make(CharactersConfig(), [TEXT]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("rope.dimension_count", 8, "rotary positions over only 8 of a head's 16 dimensions are not supported"),
        ("rope.scaling.attn_factor", 2, "the rotary scaling llama.rope.scaling.attn_factor is not supported"),
    ],
)
def test_positions_that_are_told_otherwise_are_refused(name: str, value: int, sentence: str, tmp_path: Path) -> None:
    save_gguf(build(LLAMA), tmp_path / "m.gguf", None)
    _, tensors = read_header(tmp_path / "m.gguf")
    fields = open_gguf(tmp_path / "m.gguf").fields
    assert hf_config(fields, tensors)["head_dim"] == 16
    with pytest.raises(CheckpointError, match=sentence):
        hf_config(fields | {f"llama.{name}": value}, tensors)


def test_the_command_goes_there_and_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = randomise(build(LLAMA))
    save(model, tmp_path / "mine", tokenizer=tokenizer)
    mine, file, there = (str(tmp_path / name) for name in ("mine", "m.gguf", "again"))
    for words in ([mine, "--to", "gguf", file], [file, "--to", "hf", there, "--dtype", "f16"]):
        result = CliRunner().invoke(cli, ["export", *words])
        assert result.exit_code == 0, result.output
    result = CliRunner().invoke(cli, ["cost", file, "--json"])
    assert json.loads(result.output)["parameters"]["total"] == sum(weight.numel() for weight in model.parameters())
    again = load(tmp_path / "again")
    assert next(again.parameters()).dtype == torch.float16
    assert Tokenizer.load(tmp_path / "again").encode("the cat") == tokenizer.encode("the cat")
    assert isinstance(
        CliRunner().invoke(cli, ["export", "x", "--to", "hf", "y", "--dtype", "q8_0"]).exception, ValueError
    )


@pytest.mark.parametrize("kind", ["MoE", "Mamba"])
def test_what_has_no_place_in_onnx_is_said(kind: str, tmp_path: Path) -> None:
    config = {"MoE": MODELS["mixtral"], "Mamba": preset("tiny-mamba")}[kind]
    with pytest.raises(CheckpointError, match=f"a {kind} does something else for each text"):
        save_onnx(build(config), tmp_path / "m.onnx")


def export_onnx(model: Model, folder: Path) -> str:
    """The exported file. Sizes that vary fail checks of shapes, so those need another process."""
    model.save(folder / "mine")
    command = ["export", str(folder / "mine"), "--to", "onnx", str(folder / "m.onnx")]
    if os.environ.get("CLEARHEAD_SHAPES") == "unchecked":
        assert CliRunner().invoke(cli, command, catch_exceptions=False).exit_code == 0
    else:
        subprocess.run([sys.executable, "-m", "clearhead", *command], check=True, cwd=ROOT)
    return str(folder / "m.onnx")


def test_onnxruntime_says_what_we_say(tmp_path: Path) -> None:
    """A window shorter than some of the texts and longer than others; the exporter saw one of three tokens."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    small = LLAMA.with_value("stack.repeats", 1)
    model = randomise(build(small.with_value("stack.pattern.0.mixer.mask", Causal() & Window(5))))
    session = onnxruntime.InferenceSession(export_onnx(model, tmp_path))
    for shape in ((1, 1), (3, 11)):
        tokens = torch.randint(0, 288, shape, generator=torch.Generator().manual_seed(1))
        (logits,) = session.run(None, {"input_ids": tokens.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(tokens), atol=1e-4, rtol=1e-4)

    def theirs(ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])

    assert greedy(theirs, [5, 6, 7], 12) == greedy(lambda ids: model(ids), [5, 6, 7], 12)


def test_an_encoder_has_a_mask_in_onnx(tmp_path: Path) -> None:
    """Padded texts give the same vectors as alone; the exporter saw two texts of three tokens."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = randomise(build(preset("tiny-bert").with_value("stack.repeats", 1)))
    session = onnxruntime.InferenceSession(export_onnx(model, tmp_path))
    assert [given.name for given in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    assert [given.name for given in session.get_outputs()] == ["last_hidden_state", "pooler_output"]
    ids, lengths = torch.randint(5, 60, (3, 7), generator=torch.Generator().manual_seed(1)), (7, 4, 2)
    mask = torch.tensor([[int(place < length) for place in range(7)] for length in lengths])
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
    hidden, pooled = session.run(None, {name: value.numpy() for name, value in given.items()})
    for row, length in enumerate(lengths):
        taps = Taps(read="stack.final_norm")
        with torch.no_grad():
            want = model(ids[row : row + 1, :length], segments=ids[row : row + 1, :length] % 2, taps=taps)
        torch.testing.assert_close(torch.from_numpy(pooled[row : row + 1]), want, atol=1e-4, rtol=1e-4)
        (last,) = taps.values.values()
        torch.testing.assert_close(torch.from_numpy(hidden[row : row + 1, :length]), last, atol=1e-4, rtol=1e-4)


@pytest.mark.proof
@pytest.mark.parametrize("name", ["tiny-vit", "tiny-transformer"])
def test_images_and_pairs_of_texts_in_onnx(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = randomise(build(preset(name)))
    session = onnxruntime.InferenceSession(export_onnx(model, tmp_path))
    for batch in (1, 4):
        if name == "tiny-vit":
            images = torch.randn(batch, 1, 16, 16)
            got, inputs = session.run(["logits"], {"pixel_values": images.numpy()})[0], (images,)
            readable = {}
        else:
            inputs = torch.randint(0, 100, (batch, 6)), torch.randint(0, 100, (batch, 4))
            mask = torch.ones(batch, 6, dtype=torch.long)
            mask[0, 3:] = 0
            names = ("input_ids", "decoder_input_ids", "attention_mask")
            got = session.run(None, {n: x.numpy() for n, x in zip(names, (*inputs, mask), strict=True)})[0]
            readable = {"source_readable": mask.bool()}
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(got), model(*inputs, **readable), atol=1e-4, rtol=1e-4)


PEAK = """
import sys
from clearhead.models.load import load
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
load(sys.argv[1])  # what the first load of all takes for itself
before = peak()
model = load(sys.argv[2])
print((peak() - before) / sum(weight.nbytes for weight in model.state_dict().values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_loading_takes_less_than_the_weights_once(form: str, tmp_path: Path) -> None:
    """They are mapped; only queries, keys and values, which lie apart in the file, are copied side by side."""
    for name, config in {"small": LLAMA, "large": llama(dim=512, layers=4, heads=8, vocabulary=4000)}.items():
        if form == "folder":
            build(config).save(tmp_path / name)
        else:
            save_gguf(build(config), tmp_path / name, None)
            (tmp_path / name).rename(tmp_path / f"{name}.gguf")
    ends = [str(tmp_path / name) + (".gguf" if form == "gguf" else "") for name in ("small", "large")]
    done = subprocess.run([sys.executable, "-c", PEAK, *ends], check=True, cwd=ROOT, capture_output=True, text=True)
    assert 0.05 < float(done.stdout) < 1.0


# ---- the Hub, and what goes along


def test_a_name_is_found_in_the_cache_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache laid out by hand as huggingface-hub lays it out."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository = tmp_path / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    model = randomise(build(LLAMA))
    model.save(repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    again = load("someone/small")
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())
    with pytest.raises(CheckpointError, match="someone/absent is not a folder and not in the Hub's cache"):
        load("someone/absent")
    assert CliRunner().invoke(cli, ["cost", "someone/small"]).exit_code == 0


@pytest.mark.parametrize("name", ["runs/mien", "./mien", "../mien"])
def test_a_mistyped_path_is_not_asked_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("the Hub was asked"))
    with pytest.raises(CheckpointError, match=r"there is no folder .*mien; give a checkpoint folder"):
        load(name)
    assert f"there is no file or folder {name}" in CliRunner().invoke(cli, ["cost", name]).output


def test_what_lies_beside_a_model_goes_along(tokenizer: Tokenizer, tmp_path: Path) -> None:
    extra = {"eos_token_id": 7, "max_position_embeddings": 77}
    save(randomise(build(LLAMA)), tmp_path / "a", tokenizer=tokenizer, extra=extra)
    (tmp_path / "a" / "generation_config.json").write_text('{"temperature": 0.5}')
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    load(tmp_path / "a").save(tmp_path / "b")
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    hf = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {name: hf[name] for name in extra} == extra
    shutil.rmtree(tmp_path / "b")
    load(tmp_path / "a").save(tmp_path / "b", extra={"eos_token_id": 3})
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == 3
