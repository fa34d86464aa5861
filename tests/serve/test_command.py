"""`clearhead serve` as a process: its ready line, its refusals before loading, and an orderly end on SIGTERM."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner

from clearhead.cli.serve import command as serve

from .tools import chat_folder


def test_refusals_come_before_a_model_is_loaded(tmp_path: Path) -> None:
    """Each is one sentence, and the folder that does not exist is never looked at."""
    empty = tmp_path / "key"
    empty.write_text("\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = {
            ("--host", "0.0.0.0"): "opens the server to other machines; protect it with --api-key-file FILE",
            ("--api-key-file", str(empty)): "is empty",
            ("--api-key-file", str(tmp_path / "none")): "No such file or directory",
            ("--port", str(taken.getsockname()[1])): "Address already in use; try --port 0",
        }
        for options, sentence in cases.items():
            found = CliRunner(env={"CLEARHEAD_API_KEY": None}).invoke(serve, ["nowhere", *options])
            assert found.exit_code != 0
            assert sentence in found.output + str(found.exception)


@pytest.mark.skipif(os.name == "nt", reason="SIGTERM ends a process at once there")
def test_sigterm_finishes_what_runs_and_exits_with_0(tmp_path: Path) -> None:
    """A stream that has begun is written to its end; the draft and the log of the server show nothing of it."""
    folder = chat_folder(tmp_path / "model")
    command = [sys.executable, "-m", "clearhead", "serve", f"m={folder}", "--port", "0", "--draft", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "Stop with Ctrl-C" in line:
            break
    url = re.search(r"http://127\.0\.0\.1:\d+", "".join(lines))[0]  # type: ignore[index]
    body = {
        "model": "m",
        "prompt": "Hello",
        "max_tokens": 200,
        "temperature": 0,
        "stream": True,
        "logit_bias": {"0": 100},
    }
    events: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                events.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(120)
    process.send_signal(signal.SIGTERM)
    reader.join(120)
    assert process.wait(120) == 0
    assert [line for line in events if line][-1] == "data: [DONE]"
    last = json.loads([line for line in events if line.startswith("data: {")][-1][6:])
    assert last["choices"][0]["finish_reason"] == "length"
    with process.stderr:
        assert process.stderr.read() == ""
