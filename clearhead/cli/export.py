"""`clearhead export`: convert a model for another program."""

from __future__ import annotations

import shlex
from pathlib import Path
from shutil import copyfile

import click

from clearhead.files import stage_file
from clearhead.units import bytes_text

from .options import check_free, check_free_folder, force_option, read_finite_model

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@click.command("export")
@click.argument("model")
@click.option("--to", "form", type=click.Choice(["hf", "gguf", "onnx"]), required=True, help="Target format.")
@click.option(
    "--dtype",
    type=click.Choice([*DTYPES, "q8_0", "q4_0", "q4_1", "q4_k_m"]),
    default=None,
    help="Precision of the matrices (q8_0, q4_0, q4_1 and q4_k_m: GGUF only).  [default: unchanged]",
)
@click.argument("out")
@force_option
def command(model: str, form: str, dtype: str | None, out: str) -> None:
    """Write MODEL, a checkpoint folder or a GGUF file, to OUT for another program. Runs on the CPU.

    \b
    hf     a folder for transformers, vLLM and the Hub
    gguf   a file for llama.cpp, Ollama and LM Studio
    onnx   a graph for onnxruntime, for any batch and length
    \b
    clearhead export runs/mine --to gguf mine.gguf --dtype q4_k_m
    clearhead export mine.gguf --to hf folder/
    clearhead export runs/mine --to onnx mine.onnx --force
    """
    if form != "gguf" and dtype is not None and dtype not in DTYPES:
        raise ValueError(f"{dtype} is a GGUF precision; --to {form} takes {', '.join(DTYPES)}")
    force = check_free_folder(out) if form == "hf" else check_free(out)
    loaded = read_finite_model(model)
    from clearhead.configs import Blocks
    from clearhead.models.quantize import dequantize

    if isinstance(loaded.precision, Blocks):
        if form == "gguf" and dtype is None and loaded.origin is not None:
            with stage_file(Path(out)) as part:
                copyfile(loaded.origin, part)
            describe_export(form, Path(out))
            return
        loaded = dequantize(loaded)
    if loaded.precision is not None:
        raise ValueError(f"{model} is quantized in Clearhead's own format; export the model it was made from")
    import torch

    from clearhead.models.gguf.write import save_gguf
    from clearhead.models.onnx import save_onnx

    if form == "gguf":
        kept = {torch.float16: "f16", torch.bfloat16: "bf16"}.get(next(loaded.parameters()).dtype, "f32")
        save_gguf(loaded, Path(out), loaded.tokenizer, dtype or kept, force)
        describe_export(form, Path(out))
        return
    if dtype is not None:
        loaded.to(getattr(torch, DTYPES[dtype]))
    if form == "onnx":
        save_onnx(loaded, Path(out), force)
    else:
        loaded.save(out, force=force)
    describe_export(form, Path(out))


def describe_export(form: str, path: Path) -> None:
    """Say what was written, how large it is, and how to run it."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    ways = {
        "hf": f'python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(path)!r})"',
        "gguf": f"llama-cli -m {shlex.quote(str(path))}",
        "onnx": f'python -c "import onnxruntime as o; print(o.InferenceSession({str(path)!r}).get_inputs()[0])"',
    }
    click.echo(f"Wrote {path} ({bytes_text(size)}). To run it: {ways[form]}", err=True)
