"""Every family of checkpoints: the same hidden states and logits as `transformers`, in pieces, saved back, in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

import clearhead  # noqa: E402
from clearhead.models.model import SequenceModel  # noqa: E402
from clearhead.nn.tap import Taps  # noqa: E402
from clearhead.reference.run import run  # noqa: E402

from .families import DECODERS  # noqa: E402
from .test_transformers import TOLERANCE, block_outputs, ids, randomise  # noqa: E402


def make(name: str, head: str, fields: dict[str, Any], folder: Path) -> Any:
    """A random model of `transformers`, saved in `folder`."""
    fields = {key: list(value) if isinstance(value, list) else value for key, value in fields.items()}
    config = getattr(transformers, f"{name}Config")(**fields)
    theirs = randomise(getattr(transformers, f"{name}{head}")(config))
    theirs.save_pretrained(folder)
    return theirs


def check_saved(ours: Any, theirs: Any, folder: Path) -> Any:
    """Save our model, and load it in `transformers`: every tensor must be there."""
    ours.save(folder)
    again, loading = type(theirs).from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    return again.eval()


def check_counts(ours: Any, *lengths: int) -> None:
    """`cost` counts the parameters that there are, and `trace` lists values with the shapes that they have."""
    config = ours.config
    names = {name: tuple(value.shape) for name, value in ours.state_dict().items()}
    assert config.weights() == names
    assert config.count_parameters() == sum(value.numel() for value in ours.state_dict().values())
    from clearhead.configs.base import ONE

    sizes = {"B": 2, "T": lengths[-1], "S": lengths[-1]}
    if len(lengths) > 1:
        sizes |= {"source": lengths[0], "source_new": lengths[0]}
    steps = {step.name: step.shape for step in config.steps(ONE.with_sizes(**sizes))}
    taps = Taps(read=["*"])
    with torch.no_grad():
        ours(*(ids(2, length) for length in lengths), taps=taps, fused=False)
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
    for got, want in zip(block_outputs(taps), expected.hidden_states[1:], strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    for got in (logits, written_out, torch.tensor(in_numpy(ours, tokens)), again):
        torch.testing.assert_close(got, expected.logits, **TOLERANCE)
    if not any(getattr(getattr(block.mixer, "rotary", None), "varies", False) for block in ours.config.stack.blocks):
        state = ours.init_state(3, 13)
        with torch.no_grad():
            pieces = [ours(piece, state=state) for piece in tokens.split((4, 1, 8), dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected.logits, **TOLERANCE)
    check_counts(ours, 7)
