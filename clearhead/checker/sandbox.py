"""Run the learner's code in a child process with limits on time and memory.

Each part is checked in its own child, forked from a process that has imported torch (if the file needs it) and has
computed nothing. The child sends every diagnostic at once, so a crash loses nothing that was found before it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Send = Callable[[Message], None]
SECONDS = 20.0
BYTES = 4 << 30


def discover_job(send: Send, path: str, name: str | None, part: str | None) -> None:
    """Send the parts that the file defines."""
    from .discover import find_candidates, load

    try:
        loaded = load(Path(path))
    except SyntaxError as error:
        send({"syntax": {"line": error.lineno or 0, "error": error.msg, "text": (error.text or "").rstrip()}})
        return
    for problem in loaded.problems:
        send({"problem": vars(problem)})
    for candidate in find_candidates(loaded, name, part):
        send({"candidate": {"name": candidate.name, "part": candidate.part, "engine": candidate.engine_name}})


def check_job(send: Send, path: str, name: str, part: str) -> None:
    """Run one check and send its diagnostics."""
    from .discover import find_candidates, load
    from .run import run_check

    for candidate in find_candidates(load(Path(path)), name, part):
        run_check(candidate, send)


JOBS = {"discover": discover_job, "check": check_job}


def run_in_child(job: str, *arguments: Any, seconds: float = SECONDS) -> Iterator[Message]:
    """Yield the child's messages; if the child failed, the last one is {"ended": reason}."""
    read, ended = start(job, arguments)
    deadline, text = time.monotonic() + seconds, b""
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            ended(kill=True)
            yield {"ended": {"key": "timeout", "seconds": int(seconds)}}
            break
        chunk = os.read(read, 1 << 16)
        if not chunk:
            status = ended(kill=False)
            if status:
                yield {"ended": status}
            break
        *lines, text = (text + chunk).split(b"\n")
        yield from (json.loads(line) for line in lines)
    os.close(read)


def start(job: str, arguments: tuple[Any, ...]) -> tuple[int, Callable[..., Message | None]]:
    read, write = os.pipe()
    if hasattr(os, "fork"):
        pid = os.fork()
        if pid == 0:
            os.close(read)
            child_main(write, job, arguments)
        os.close(write)

        def ended(kill: bool) -> Message | None:
            if kill:
                os.kill(pid, signal.SIGKILL)
            return exit_reason(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        return read, ended
    os.set_inheritable(write, True)
    command = [sys.executable, "-m", "clearhead.checker.sandbox", str(write), job, json.dumps(arguments)]
    child = subprocess.Popen(command, close_fds=False)
    os.close(write)

    def over(kill: bool) -> Message | None:
        if kill:
            child.kill()
        return exit_reason(child.wait())

    return read, over


def exit_reason(code: int) -> Message | None:
    if code == 0:
        return None
    if code == 77:
        return {"key": "memory"}
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"key": "crash", "signal": name}


def child_main(write: int, job: str, arguments: tuple[Any, ...]) -> None:
    """Run a job in the child and exit. Standard streams go to /dev/null."""
    code = 1
    try:
        faulthandler.disable()  # the parent reports a crash in one sentence
        set_limits()
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(1)  # the parent's threads do not survive a fork
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)

        def send(event: Message) -> None:
            os.write(write, json.dumps(event, default=str).encode() + b"\n")

        JOBS[job](send, *arguments)
        code = 0
    except MemoryError:
        code = 77
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        code = 70
    finally:
        os._exit(code)


def set_limits() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = Path("/proc/self/statm")
    if used.exists():
        size = int(used.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main() -> None:
    write, job, arguments = sys.argv[1:]
    child_main(int(write), job, tuple(json.loads(arguments)))


if __name__ == "__main__":
    main()
