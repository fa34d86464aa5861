"""Reading a prompt and writing on, beside transformers and llama.cpp: a LLaMA of 110M, the same weights at each width.

    python -m benchmarks generation              all widths
    python -m benchmarks generation --isa avx2   the same with kernels for AVX2
    python -m benchmarks.generation int8 int4    some widths, without the table

Needs `pip install 'clearhead[bench]'`.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clearhead
from clearhead.configs import Float32, Precision, precision
from clearhead.generate.loop import prefill
from clearhead.measure.doctor import measure_read
from clearhead.measure.machine import look
from clearhead.models.llama import llama

from .results import Result, add

THREADS, NEW, ROUNDS, READINGS = 2, 128, 3, 9  # a prompt is read in half a second: more turns, less luck
SIZES = {"dim": 768, "layers": 12, "heads": 12, "hidden": 2048, "vocabulary": 32000}
CASES = ((1, 512), (8, 128))  # prompts, and the tokens of each
WIDTHS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


def main(widths: list[str] | None = None) -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = clearhead.build(llama(**SIZES, tied=True)).eval()
    prompts = {case: torch.randint(0, SIZES["vocabulary"], case) for case in CASES}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        exact = model(prompts[CASES[0]])[:, -1]
        for width in widths or list(WIDTHS):
            kind = WIDTHS[width]
            theirs = LlamaCpp(write_gguf(model, kind, Path(folder) / f"{kind}.gguf"))
            contestants: dict[str, Any] = {"clearhead": Ours(model, precision(width)), f"llama.cpp {kind}": theirs}
            if width == "float32":  # llama.cpp keeps keys and values in float16 by default
                contestants["clearhead, cache f16"] = Ours(model, Float32(cache="float16"))
                contestants["llama.cpp, cache f32"] = LlamaCpp(Path(folder) / f"{kind}.gguf", exact_cache=True)
                contestants["transformers"] = transformers_of(model, Path(folder) / "hf")
            print(f"{width}: relative distance of the logits from float32")
            for name, run in contestants.items():
                logits = run(prompts[CASES[0]], 0)[2]
                print(f"  {name:<20} {float((logits - exact).norm() / exact.norm()):.2e}")
            for case, prompt in prompts.items():
                size = contestants["clearhead"].weight_bytes
                compare(f"{width}, {case[0]} × {case[1]} tokens", contestants, prompt, size)


@cache
def memory_speed() -> float:
    """GB/s at which this machine reads its memory."""
    return measure_read(look())


def compare(title: str, contestants: dict[str, Any], prompt: torch.Tensor, weight_bytes: int) -> None:
    """In turns; the median round of each. One row writes at most as fast as the memory gives all weights."""
    read: dict[str, list[float]] = {name: [] for name in contestants}
    written: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(READINGS):
        for name, run in contestants.items():
            reading, writing, _ = run(prompt, NEW if turn < ROUNDS else 0)
            read[name].append(prompt.numel() / reading)
            written[name] += [len(prompt) * NEW / writing] if turn < ROUNDS else []
    print(f"{title}: tokens a second, read and written; medians of {READINGS} and {ROUNDS}")
    mine = [statistics.median(speeds["clearhead"]) for speeds in (read, written)]
    for number, (kind, speeds) in enumerate({"reading": read, "writing": written}.items()):
        peers = {name: statistics.median(found) for name, found in speeds.items() if not name.startswith("clearhead")}
        peer = max(peers, key=peers.__getitem__)
        rows, length = prompt.shape
        share = mine[1] * weight_bytes / (1e9 * memory_speed()) if (number, rows) == (1, 1) else None
        work = f"{title.split(',')[0]}, {kind}, {rows} × {length}"
        add(Result(work, "tokens/s", mine[number], peer, peers[peer], more_is_better=True, share=share))
    for name in contestants:
        speeds = [statistics.median(speeds[name]) for speeds in (read, written)]
        ratios = [f"{ours_ / speed:5.2f}×" for ours_, speed in zip(mine, speeds, strict=True)]
        print(f"  {name:<20} {speeds[0]:8.0f} {speeds[1]:8.1f}     clearhead is at {ratios[0]} and {ratios[1]}")


class Ours:
    """Reads the prompts, writes `new` tokens after each; seconds for both, and the logits after the prompt."""

    def __init__(self, model: Any, stored: Precision) -> None:
        self.model = clearhead.quantize(model, stored)
        stores = (*self.model.parameters(), *self.model.buffers())
        self.weight_bytes = sum(each.nbytes for each in {each.data_ptr(): each for each in stores}.values())

    def __call__(self, prompt: torch.Tensor, new: int) -> tuple[float, float, torch.Tensor]:
        start = time.perf_counter()
        batch = prefill(self.model, prompt.tolist(), new)
        first = batch.logits
        read = time.perf_counter()
        for _ in range(new):
            batch.advance(self.model, batch.logits.argmax(1))
        return read - start, time.perf_counter() - read, first


def transformers_of(model: Any, folder: Path) -> Callable[..., Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model.save(folder)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(prompt: torch.Tensor, new: int) -> tuple[float, float, torch.Tensor]:
        start = time.perf_counter()
        out = theirs(prompt, use_cache=True, logits_to_keep=1)
        first = out.logits[:, -1]
        read = time.perf_counter()
        for _ in range(new):
            out = theirs(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        return read - start, time.perf_counter() - read, first

    return run


class LlamaCpp:
    """llama.cpp by its C interface, so that no Python of its binding is timed."""

    def __init__(self, path: Path, *, exact_cache: bool = False) -> None:
        import llama_cpp

        self.api, self.exact_cache = llama_cpp, exact_cache
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise OSError(f"llama.cpp does not load {path}")

    def __call__(self, prompt: torch.Tensor, new: int) -> tuple[float, float, torch.Tensor]:
        api, (rows, length) = self.api, prompt.shape
        parameters = api.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch = rows * (length + NEW), rows * length
        parameters.n_seq_max, parameters.n_threads, parameters.n_threads_batch = rows, THREADS, THREADS
        if self.exact_cache:
            parameters.type_k = parameters.type_v = api.GGML_TYPE_F32
        context = api.llama_init_from_model(self.model, parameters)
        batch = api.llama_batch_init(rows * length, 0, 1)
        try:
            start = time.perf_counter()
            logits = self.decode(context, batch, prompt.tolist(), 0)
            first = torch.from_numpy(logits.copy())
            read = time.perf_counter()
            for i in range(new):
                logits = self.decode(context, batch, logits.argmax(1)[:, None].tolist(), length + i)
            return read - start, time.perf_counter() - read, first
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)

    def decode(self, context: Any, batch: Any, tokens: list[list[int]], at: int) -> np.ndarray:
        """The logits after each row's last token."""
        places, i = [], 0
        for row, ids in enumerate(tokens):
            for position, token in enumerate(ids):
                batch.token[i], batch.pos[i], batch.logits[i] = token, at + position, position == len(ids) - 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
                i += 1
            places.append(i - 1)
        batch.n_tokens = i
        if self.api.llama_decode(context, batch):
            raise RuntimeError("llama.cpp could not decode")
        size = SIZES["vocabulary"]
        return np.stack([np.ctypeslib.as_array(self.api.llama_get_logits_ith(context, p), (size,)) for p in places])


def write_gguf(model: Any, kind: str, path: Path) -> Path:
    """The weights as llama.cpp reads them: its rotary pairs are (2i, 2i + 1), so queries and keys are reordered."""
    import gguf

    stored = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(SIZES["dim"])
    writer.add_block_count(SIZES["layers"])
    writer.add_feed_forward_length(SIZES["hidden"])
    writer.add_head_count(SIZES["heads"])
    writer.add_rope_dimension_count(SIZES["dim"] // SIZES["heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(SIZES["vocabulary"])
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, weight: torch.Tensor) -> None:
        matrix = weight.dim() > 1
        data = weight.detach().float().contiguous().numpy()
        kind_ = stored if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(data, kind_), raw_dtype=kind_)

    def interleaved(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (SIZES["heads"], 2, -1)).transpose(1, 2).flatten(0, 2)

    weights = model.state_dict()
    add("token_embd.weight", weights["embedding.tokens.weight"])
    add("output_norm.weight", weights["stack.final_norm.weight"])
    for i in range(SIZES["layers"]):
        block, to = f"stack.blocks.{i}.", f"blk.{i}."
        q, k, v = weights[block + "mixer.qkv.weight"].chunk(3)
        add(to + "attn_q.weight", interleaved(q))
        add(to + "attn_k.weight", interleaved(k))
        add(to + "attn_v.weight", v)
        add(to + "attn_output.weight", weights[block + "mixer.out.weight"])
        add(to + "attn_norm.weight", weights[block + "mixer_residual.before.weight"])
        add(to + "ffn_norm.weight", weights[block + "ffn_residual.before.weight"])
        for theirs in ("gate", "up", "down"):
            add(f"{to}ffn_{theirs}.weight", weights[f"{block}ffn.{theirs}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
