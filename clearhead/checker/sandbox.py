"""Run the learner's code in a child process with limits on time, memory, network and files.

A file is loaded and checked in one child, forked from a process that has imported torch (if the file needs it) and has
computed nothing. The child sends every diagnostic at once, so a crash loses nothing that was found before it. If a part
ends the child, the next child continues with the part after it.

Every message of the child carries a random token, and the last one says that the check is complete. If the learner's
code ends the process, writes to the pipe or forks, the complete message is missing and the part counts as not checked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from .confine import block_network, block_writes

Message = dict[str, Any]
SECONDS = 20.0
BYTES = 4 << 30


class Channel:
    """The child's end of the pipe: sends messages with the token, and starts the limit of each part."""

    def __init__(self, write: int, token: str, seconds: float) -> None:
        self.write, self.token, self.seconds, self.own = write, token, seconds, os.getpid()

    def __call__(self, message: Message) -> None:
        if os.getpid() != self.own:  # the learner's code has forked
            os._exit(70)
        os.write(self.write, json.dumps({**message, "token": self.token}, default=str).encode() + b"\n")

    def begin(self, index: int) -> None:
        """Announce the part that is checked next. Its time starts now."""
        limit_cpu(self.seconds)
        self({"begin": index})


def check_job(
    send: Channel,
    path: str,
    name: str | None,
    part: str | None,
    example: str | None,
    only: Collection[str],
    skip: int,
) -> None:
    """Send the parts that the file defines, then check those after the first `skip`."""
    from .discover import find_broken, find_candidates, load
    from .run import run_check

    try:
        loaded = load(Path(path))
    except SyntaxError as error:
        send({"syntax": {"line": error.lineno or 0, "error": error.msg, "text": (error.text or "").rstrip()}})
        return
    found = [c for c in find_candidates(loaded, name, part, example) if not only or c.part in only]
    if skip == 0:
        for problem in loaded.problems:
            send({"problem": vars(problem)})
        for broken in find_broken(loaded, name, part):
            if not only or broken["part"] in only:
                send({"broken": broken})
        for candidate in found:
            send({"candidate": {"name": candidate.name, "part": candidate.part, "engine": candidate.engine_name}})
    for index, candidate in list(enumerate(found))[skip:]:
        send.begin(index)
        run_check(candidate, send)


def run_in_child(*arguments: Any, seconds: float = SECONDS) -> Iterator[Message]:
    """Yield the messages of `check_job`; if the child did not complete, the last one is {"ended": reason}."""
    token, folder = secrets.token_hex(16), tempfile.mkdtemp(prefix="clearhead-")
    read, end = start(token, (folder, *arguments), seconds)
    deadline, text, complete = time.monotonic() + seconds, b"", False
    try:
        while not complete:
            ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(read, 1 << 16) if ready else b""
            if not chunk:
                break
            *lines, text = (text + chunk).split(b"\n")
            for message in parse_messages(lines, token):
                complete = complete or "complete" in message
                deadline = time.monotonic() + seconds if "begin" in message else deadline
                if "complete" not in message:
                    yield message
    finally:
        os.close(read)
        reason = end(time.monotonic() >= deadline, int(seconds))
        shutil.rmtree(folder, ignore_errors=True)
    if not complete:
        yield {"ended": reason}


def parse_messages(lines: list[bytes], token: str) -> Iterator[Message]:
    """Yield the messages that carry the token; skip everything else on the pipe."""
    for line in lines:
        with contextlib.suppress(ValueError, AttributeError):
            message = json.loads(line)
            if message.pop("token", None) == token:
                yield message


def start(token: str, arguments: tuple[Any, ...], seconds: float) -> tuple[int, Callable[[bool, int], Message]]:
    """Start the child; return the pipe to read, and a function that ends the child and says how it ended."""
    read, write = os.pipe()
    if hasattr(os, "fork"):
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.setsid()
            child_main(write, token, arguments, seconds)
        os.close(write)

        def end(is_late: bool, limit: int) -> Message:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # the child and every process that it started
            return exit_reason(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), is_late, limit)

        return read, end
    os.set_inheritable(write, True)
    command = [sys.executable, "-m", "clearhead.checker.sandbox", str(write), token, json.dumps(arguments)]
    child = subprocess.Popen([*command, str(seconds)], close_fds=False)
    os.close(write)

    def end_process(is_late: bool, limit: int) -> Message:
        child.kill()
        return exit_reason(child.wait(), is_late, limit)

    return read, end_process


def exit_reason(code: int, is_late: bool, limit: int) -> Message:
    """Describe why a child that did not complete has ended."""
    if is_late or code == -getattr(signal, "SIGXCPU", 0):
        return {"key": "timeout", "seconds": limit}
    if code == 77:
        return {"key": "memory"}
    if code >= 0 or code == -getattr(signal, "SIGKILL", 9):
        return {"key": "ended-process", "code": code}
    return {"key": "crash", "signal": signal.Signals(-code).name}


def child_main(write: int, token: str, arguments: tuple[Any, ...], seconds: float) -> None:
    """Run `check_job` in the child and exit. Standard streams go to /dev/null."""
    code = 1
    try:
        faulthandler.disable()  # the parent reports a crash in one sentence
        gc.freeze()  # collecting what the parent made would copy all of its memory
        set_limits(seconds)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(1)  # the parent's threads do not survive a fork
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.disable = True  # compiling would take longer than the check
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.closerange(3, write)  # files and sockets of the parent
        os.closerange(write + 1, 4096)
        folder, *rest = arguments
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        send = Channel(write, token, seconds)
        send({"confined": {"network": block_network(), "writes": block_writes(Path(folder))}})
        check_job(send, *rest)
        send({"complete": True})
        code = 0
    except MemoryError:
        code = 77
    except BaseException:
        code = 70
    finally:
        os._exit(code)


def set_limits(seconds: float) -> None:
    """Limit CPU time and memory; write no core files."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_cpu(seconds)
    status = Path("/proc/self/statm")
    if status.exists():
        size = int(status.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def limit_cpu(seconds: float) -> None:
    """Allow so many more seconds of CPU time."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, hard))


def main() -> None:
    write, token, arguments, seconds = sys.argv[1:]
    child_main(int(write), token, tuple(json.loads(arguments)), float(seconds))


if __name__ == "__main__":
    main()
