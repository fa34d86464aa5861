"""A probe writes frames of a run and changes no bit of its weights."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from clearhead.training.loop import Callbacks, Execution, RunStopped, train
from clearhead.training.probe import TrainingProbe, list_probes, read_probe

from .tools import TEXT, same, small

PROBED = Execution(probe_every=3, probe_text="the lazy dog")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_probes_change_no_weight_bit_even_after_stop_and_resume(data: Path, tmp_path: Path) -> None:
    plain, probed, stopped = (tmp_path / name for name in ("plain", "probed", "stopped"))
    train(small(), [data], plain)
    train(small(), [data], probed, execution=PROBED)
    assert same(plain, probed)

    def stop_at_five(numbers: dict[str, object]) -> None:
        if numbers["step"] == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunStopped):
        train(small(), [data], stopped, execution=PROBED, callbacks=Callbacks(step=stop_at_five))
    train(small(), [data], stopped, execution=PROBED, resume=True)
    assert same(plain, stopped)
    assert list(list_probes(probed)) == list(list_probes(stopped)) == [3, 6, 9, 12]


def test_a_frame_holds_the_heads_and_the_gradients(data: Path, tmp_path: Path) -> None:
    model = train(small(), [data], tmp_path / "run", execution=PROBED)
    facts, pictures = read_probe(list_probes(tmp_path / "run")[12])
    assert facts["text"] == "the lazy dog"
    maps = model.inspect("the lazy dog").maps
    assert [each["layer"] for each in facts["maps"]] == [each.layer for each in maps]
    for small_map, each in zip(pictures, maps, strict=True):
        assert small_map == pytest.approx(each.thumbnails, abs=1e-6)
    assert all(norm > 0 for norm in facts["gradients"].values())
    assert {"embedding", "block 0", "head"} <= facts["gradients"].keys()


def test_a_probe_that_never_comes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every 0 steps"):
        TrainingProbe(tmp_path, 0, [1])
