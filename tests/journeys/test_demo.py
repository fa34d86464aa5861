"""The demo with few steps: it trains on Python's own library, writes, draws, and says what to type next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_leaves_a_model_and_pages(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import demo; demo.main(steps=2)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "runs" / "demo-1" / "model"
    for name in ("model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl"):
        assert (run / name).exists()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "attention.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "┤" in result.stdout, "the loss curve"
    assert "clearhead train lm --data YOUR_TEXT" in result.stdout
