"""`clearhead convert`: pickled weights as safetensors."""

from __future__ import annotations

import click

from .options import check_free_folder, force_option, read_finite_model


@click.command("convert")
@click.argument("folder")
@click.argument("out")
@click.option("--family", default=None, metavar="NAME", help="The model_type, if config.json has none: bert, llama, …")
@force_option
def command(folder: str, out: str, family: str | None) -> None:
    """Write the model in FOLDER to the folder OUT, with weights as safetensors.

    FOLDER is a Hugging Face folder, usually one with pickles (pytorch_model.bin). A pickle can run code when it is
    opened, so a child process with limits reads only the tensors in it, and refuses anything else.

    \b
    clearhead convert old-bert new-bert
    clearhead convert old-bert new-bert --family bert
    """
    force = check_free_folder(out)
    model = read_finite_model(folder, convert=True, family=family)
    model.save(out, force=force)
    kind = model.family or type(model).__name__
    count = sum(weight.numel() for weight in model.parameters())
    click.echo(f"Wrote {out}: {kind}, {count:,} parameters. To look at it: clearhead cost {out}", err=True)
