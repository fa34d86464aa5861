"""The learner's code in a child process with limits of time and memory: it may loop, crash or eat all it can.

Each part is checked in a child of its own, forked from a process that has loaded torch (if the file needs it) and has
computed nothing. What the child finds it tells at once, so that a crash loses nothing that was found before it.
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

Event = dict[str, Any]
Tell = Callable[[Event], None]
SECONDS = 20.0
BYTES = 4 << 30


def find_job(tell: Tell, path: str, name: str | None, part: str | None) -> None:
    """What the file defines."""
    from .find import load, suspects

    try:
        loaded = load(Path(path))
    except SyntaxError as error:
        tell({"syntax": {"line": error.lineno or 0, "error": error.msg, "text": (error.text or "").rstrip()}})
        return
    for problem in loaded.problems:
        tell({"problem": vars(problem)})
    for suspect in suspects(loaded, name, part):
        tell({"suspect": {"name": suspect.name, "part": suspect.part, "engine": suspect.engine_name}})


def check_job(tell: Tell, path: str, name: str, part: str) -> None:
    """One suspect through its check."""
    from .examine import examine
    from .find import load, suspects

    for suspect in suspects(load(Path(path)), name, part):
        examine(suspect, tell)


JOBS = {"find": find_job, "check": check_job}


def events_of(job: str, *arguments: Any, seconds: float = SECONDS) -> Iterator[Event]:
    """What the child tells; last, if it did not end well, {"ended": why}."""
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


def start(job: str, arguments: tuple[Any, ...]) -> tuple[int, Callable[..., Event | None]]:
    read, write = os.pipe()
    if hasattr(os, "fork"):
        pid = os.fork()
        if pid == 0:
            os.close(read)
            in_child(write, job, arguments)
        os.close(write)

        def ended(kill: bool) -> Event | None:
            if kill:
                os.kill(pid, signal.SIGKILL)
            return why(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        return read, ended
    os.set_inheritable(write, True)
    command = [sys.executable, "-m", "clearhead.checker.sandbox", str(write), job, json.dumps(arguments)]
    child = subprocess.Popen(command, close_fds=False)
    os.close(write)

    def over(kill: bool) -> Event | None:
        if kill:
            child.kill()
        return why(child.wait())

    return read, over


def why(code: int) -> Event | None:
    if code == 0:
        return None
    if code == 77:
        return {"key": "memory"}
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"key": "crash", "signal": name}


def in_child(write: int, job: str, arguments: tuple[Any, ...]) -> None:
    """Never returns. Standard input and output are nobody's; memory is limited, core files are not written."""
    code = 1
    try:
        faulthandler.disable()  # a crash is reported by the parent, in one sentence
        limit()
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(1)  # after a fork the threads of the parent are gone
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)

        def tell(event: Event) -> None:
            os.write(write, json.dumps(event, default=str).encode() + b"\n")

        JOBS[job](tell, *arguments)
        code = 0
    except MemoryError:
        code = 77
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        code = 70
    finally:
        os._exit(code)


def limit() -> None:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = Path("/proc/self/statm")
    if used.exists():
        size = int(used.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main() -> None:
    write, job, arguments = sys.argv[1:]
    in_child(int(write), job, tuple(json.loads(arguments)))


if __name__ == "__main__":
    main()
