"""Serving over HTTP: our server and llama-server (xllamacpp) in turns on the same weights.

    python -m benchmarks serving

throughput   prompts of 128 different tokens, 128 new ones, at 1, 8 and 32 clients; f32, f16, 8 and 4 bits
first token  p50 and p99 of the same requests at 8 clients
gaps         time between the tokens of a stream while strangers send long prompts: p99 over p50
prefix       a prompt whose beginning was read before, against a new one: time to the first token
overload     Poisson arrivals at 1.2 times the capacity: goodput, and how the others were refused
http         8 streams through HTTP against the same engine without it

SERVING_MODEL names a checkpoint folder (default: stories15M), SERVING_PARTS some of the parts, SERVING_BITS some of the
precisions. `python -m benchmarks storms` measures what hostile and careless clients cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

SHARED = Path(os.environ.get("CLEARHEAD_SHARED", "../shared"))
MODEL = Path(os.environ.get("SERVING_MODEL", SHARED / "models" / "stories15M"))
PARTS = os.environ.get("SERVING_PARTS", "throughput gaps prefix overload http").split()
BITS = {"float32": "f32", "float16": "f16", "int8": "q8_0", "int4": "q4_0"}  # ours, and llama.cpp's
CHOSEN = os.environ.get("SERVING_BITS", " ".join(BITS)).split()
READ = WRITE = 128
ROWS, ROUNDS = 32, 2
LLAMA = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_parallel, params.n_ctx = int(sys.argv[3]), 256 * int(sys.argv[3])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
server = xllamacpp.Server(params)
time.sleep(1e6)
"""


@dataclass
class Reply:
    """What a client saw: the status, the time of every piece of text since the request, and the tokens in all."""

    status: int = 0
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def start_server(command: list[str], port: int) -> Iterator[int]:
    """A server process that answers /health; yields its process id."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)


def our_command(port: int, weights: str, *options: str) -> list[str]:
    start = [sys.executable, "-m", "clearhead", "serve", f"m={MODEL}", "--port", str(port), "--weights", weights]
    return [*start, "--rows", str(ROWS), *options]


async def ask(port: int, body: dict[str, Any]) -> Reply:
    """Send a request and read its stream. Sockets and bytes, because a client library would cost more than a server."""
    reply, content = Reply(), json.dumps({"model": "m", "stream": True, "temperature": 0} | body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    began = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
    try:
        reply.status = int((await reader.readline()).split()[1])
        async for line in reader:
            if line.startswith(b'data: {"') and reply.status == 200:
                reply.times.append(time.perf_counter() - began)
                last = line
        if reply.status == 200:
            reply.tokens = json.loads(last[6:])["usage"]["completion_tokens"]
            reply.times.pop()  # the event with the usage
    finally:
        writer.close()
    return reply


def completion(prompt: list[int], write: int = WRITE) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": write, "stream_options": {"include_usage": True}}


def new_prompt(length: int = READ) -> list[int]:
    return [random.randrange(3, 30000) for _ in range(length)]


async def load(port: int, clients: int, requests: int) -> tuple[float, list[Reply]]:
    """Output tokens per second of clients that each send one request after the other."""
    replies: list[Reply] = []

    async def work() -> None:
        while pending:
            replies.append(await ask(port, completion(pending.pop())))

    pending = [new_prompt() for _ in range(requests)]
    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    return sum(reply.tokens for reply in replies) / (time.perf_counter() - began), replies


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def compare_throughput(weights: str, folder: str) -> None:
    gguf = Path(folder) / f"{BITS[weights]}.gguf"
    export = ["-m", "clearhead", "export", str(MODEL), str(gguf), "--to", "gguf", "--dtype", BITS[weights]]
    subprocess.run([sys.executable, *export], check=True, capture_output=True)
    mine, peer = free_port(), free_port()
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    theirs = [sys.executable, "-c", LLAMA, str(gguf), str(peer), str(ROWS), threads]
    with start_server(our_command(mine, weights, "--no-prefix-cache"), mine), start_server(theirs, peer):
        for clients, requests in ((1, 2), (8, 16), (32, 32)):
            found: dict[int, list[tuple[float, list[Reply]]]] = {mine: [], peer: []}
            for _ in range(ROUNDS):
                for port, runs in found.items():
                    runs.append(asyncio.run(load(port, clients, requests)))
            speeds = {port: max(speed for speed, _ in runs) for port, runs in found.items()}
            firsts = {port: [r.times[0] for _, replies in runs for r in replies] for port, runs in found.items()}
            first = [f"{1000 * percentile(firsts[port], share):.0f}" for share in (0.5, 0.99) for port in (mine, peer)]
            print(
                f"{weights:8} {clients:3} clients  ours {speeds[mine]:6.0f} tokens/s, "
                f"llama-server {speeds[peer]:6.0f}, {speeds[mine] / speeds[peer]:.2f}×   "
                f"first token p50 {first[0]} / {first[1]} ms, p99 {first[2]} / {first[3]} ms",
                flush=True,
            )


async def measure_gaps(port: int) -> tuple[float, float]:
    """p50 and p99 of the time between tokens of one stream while others send prompts of 240 tokens."""
    done = asyncio.Event()

    async def disturb() -> None:
        while not done.is_set():
            await ask(port, completion(new_prompt(240), 1))

    strangers = [asyncio.ensure_future(disturb()) for _ in range(2)]
    gaps: list[float] = []
    for _ in range(3):
        times = (await ask(port, completion(new_prompt(8), 200))).times
        gaps += [after - before for before, after in itertools.pairwise(times)]
    done.set()
    await asyncio.gather(*strangers)
    return percentile(gaps, 0.5), percentile(gaps, 0.99)


async def measure_prefix(port: int, shared: int, own: int) -> tuple[float, float]:
    """Median time to the first token of new prompts, and of prompts whose beginning is known."""
    cold, warm = [], []
    for _ in range(3):
        beginning = new_prompt(shared)
        for times in (cold, warm, warm):
            times.append((await ask(port, completion(beginning + new_prompt(own), 1))).times[0])
    return statistics.median(cold), statistics.median(warm)


async def measure_overload(port: int) -> tuple[float, float, dict[int, int]]:
    """Tokens per second at capacity, and at 1.2 times the arrivals it takes; the statuses of the second."""
    capacity, replies = await load(port, ROWS + 16, 96)
    rate = 1.2 * capacity / statistics.mean(reply.tokens for reply in replies)
    began, tasks = time.perf_counter(), []
    for _ in range(200):
        tasks.append(asyncio.ensure_future(ask(port, completion(new_prompt()))))
        await asyncio.sleep(random.expovariate(rate))
    found = await asyncio.gather(*tasks)
    statuses = {status: sum(one.status == status for one in found) for status in {one.status for one in found}}
    return capacity, sum(one.tokens for one in found) / (time.perf_counter() - began), statuses


def engine_alone(weights: str, requests: int) -> float:
    """Output tokens per second of 8 streams without HTTP."""
    import clearhead
    from clearhead.configs import precision
    from clearhead.generate.job import JobOptions
    from clearhead.models.quantize import quantize
    from clearhead.serve import Engine

    model = quantize(clearhead.load(MODEL), precision(weights))
    with Engine(model, rows=ROWS, queue=requests, prefix_cache=False) as engine:
        config = engine.core.generator.config
        began = time.perf_counter()
        waiting, running, tokens = [new_prompt() for _ in range(requests)], [], 0
        while waiting or running:
            while waiting and len(running) < 8:
                running += engine.submit_jobs([waiting.pop()], JobOptions(config=config, limit=WRITE))
            for _ in running.pop(0):
                tokens += 1
        return tokens / (time.perf_counter() - began)


def main() -> None:
    if not MODEL.exists():
        print(f"{MODEL} is missing; set SERVING_MODEL to a checkpoint folder")
        return
    random.seed(0)
    if "throughput" in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            for weights in CHOSEN:
                compare_throughput(weights, folder)
    port = free_port()
    if {"gaps", "overload", "http"} & set(PARTS):
        with start_server(our_command(port, "float16", "--no-prefix-cache", "--queue", "16"), port):
            if "gaps" in PARTS:
                middle, worst = asyncio.run(measure_gaps(port))
                print(
                    f"gaps      p50 {1000 * middle:.1f} ms, p99 {1000 * worst:.1f} ms, {worst / middle:.1f}×",
                    flush=True,
                )
            if "overload" in PARTS:
                capacity, goodput, statuses = asyncio.run(measure_overload(port))
                print(
                    f"overload  capacity {capacity:.0f} tokens/s, goodput {goodput / capacity:.0%}, answers {statuses}"
                )
            if "http" in PARTS:
                through, _ = asyncio.run(load(port, 8, 16))
        if "http" in PARTS:
            alone = engine_alone("float16", 16)
            print(
                f"http      {through:.0f} tokens/s through HTTP, {alone:.0f} without, {through / alone:.2f}", flush=True
            )
    if "prefix" in PARTS:
        with start_server(our_command(port, "float16"), port):
            cold, warm = asyncio.run(measure_prefix(port, 192, 32))
            print(f"prefix    first token cold {1000 * cold:.0f} ms, warm {1000 * warm:.0f} ms, {warm / cold:.2f}")


if __name__ == "__main__":
    main()
