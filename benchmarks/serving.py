"""Serving: our server and llama-server (xllamacpp) in turns on the same weights, over HTTP.

    python -m benchmarks serving

Each client sends prompts of 100 different tokens and reads 100 new ones, streamed. The table has output tokens per
second and the time to the first token. `SERVING_MODEL` names a checkpoint folder (default: stories15M).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2

SHARED = Path(os.environ.get("CLEARHEAD_SHARED", "../shared"))
MODEL = Path(os.environ.get("SERVING_MODEL", SHARED / "models" / "stories15M"))
READ, WRITE = 100, 100  # tokens; stories15M has a context of 256
ROUNDS = 2
LLAMA = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.hostname = sys.argv[1], int(sys.argv[2]), "127.0.0.1"
params.n_parallel, params.n_ctx = int(sys.argv[3]), 256 * int(sys.argv[3])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
server = xllamacpp.Server(params)
time.sleep(1e6)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def started(command: list[str], port: int) -> Iterator[str]:
    """A server process, once it answers /health."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{url}/health").status_code == 200:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with {process.returncode}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


async def ask(client: httpx2.AsyncClient, url: str, ids: list[int], model: str) -> tuple[float, int]:
    """Seconds to the first token, and the number of pieces of text."""
    body = {"model": model, "prompt": ids, "max_tokens": WRITE, "temperature": 0, "stream": True}
    began, first, count = time.perf_counter(), 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                count += 1
    return first, count


async def load(url: str, clients: int, requests: int, seed: int, model: str) -> tuple[float, float]:
    """Output tokens per second, and the median time to the first token."""
    prompts = [[3 + (seed * 7919 + i * 131 + j * 17) % 30000 for j in range(READ)] for i in range(requests)]
    queue = list(prompts)
    firsts: list[float] = []
    total = 0

    async def work(client: httpx2.AsyncClient) -> None:
        nonlocal total
        while queue:
            first, count = await ask(client, url, queue.pop(), model)
            firsts.append(first)
            total += count

    async with httpx2.AsyncClient(timeout=600) as client:
        began = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(clients)))
        return total / (time.perf_counter() - began), statistics.median(firsts)


def main() -> None:
    if not MODEL.exists():
        print(f"{MODEL} is missing; set SERVING_MODEL to a checkpoint folder")
        return
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as folder:
        for ours, theirs in (("float16", "f16"), ("int8", "q8_0")):
            gguf = Path(folder) / f"{theirs}.gguf"
            export = ["-m", "clearhead", "export", str(MODEL), str(gguf), "--to", "gguf", "--dtype", theirs]
            subprocess.run([sys.executable, *export], check=True, stdout=subprocess.DEVNULL)
            ports = free_port(), free_port()
            options = ["--weights", ours, "--rows", "32", "--port", str(ports[0]), "--memory", "0"]
            mine = [sys.executable, "-m", "clearhead", "serve", f"m={MODEL}", *options]
            peer = [sys.executable, "-c", LLAMA, str(gguf), str(ports[1]), "32", threads]
            with started(mine, ports[0]) as one, started(peer, ports[1]) as other:
                compare(ours, one, other)


def compare(precision: str, mine: str, peer: str) -> None:
    for clients, requests in ((1, 2), (8, 16), (32, 32)):
        found: dict[str, list[tuple[float, float]]] = {"clearhead": [], "llama-server": []}
        for turn in range(ROUNDS):
            for name, url in (("clearhead", mine), ("llama-server", peer)):
                found[name].append(asyncio.run(load(url, clients, requests, turn, "m")))
        best = {name: (max(a for a, _ in runs), min(b for _, b in runs)) for name, runs in found.items()}
        (fast, first), (other, other_first) = best["clearhead"], best["llama-server"]
        print(
            f"{precision:8} {clients:3} clients  ours {fast:7.0f} tokens/s, first {first * 1000:6.0f} ms   "
            f"llama-server {other:7.0f} tokens/s, first {other_first * 1000:6.0f} ms   {fast / other:.2f}×"
        )


if __name__ == "__main__":
    main()
