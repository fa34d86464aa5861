"""Storms: what hostile and careless clients cost our server, and whether every answer is the answer alone.

    python -m benchmarks storms

same        text and log-probabilities of 32 requests at once and one by one; 5 precisions, prefix cache on and off
idle        memory of 1,000 connections that send nothing
slow        what 8 streams lose while 64 clients read 1 KB/s
cut         1,000 requests that are cut off at random moments: when all rows and pages are free again
memory      resident memory after 10,000 requests over that after 1,000

STORMS_PARTS names some of them; the model is that of `serving`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import httpx2

from .serving import MODEL, ask, completion, free_port, load, new_prompt, our_command, start_server

PARTS = os.environ.get("STORMS_PARTS", "same idle slow cut memory").split()
WEIGHTS = os.environ.get("SERVING_BITS", "float32 bfloat16 float16 int8 int4").split()
REQUESTS = int(os.environ.get("STORMS_REQUESTS", "10000"))


def resident(process: int) -> float:
    """MB of a process."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[1]) / 1000  # type: ignore[index]


def metric(port: int, name: str) -> float:
    text = httpx2.get(f"http://127.0.0.1:{port}/metrics").text
    return float(re.search(rf"^clearhead_{name} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]


async def count_same_answers(port: int) -> int:
    """How many of 32 requests have the same text and log-probabilities at once and one by one."""
    bodies: list[dict[str, Any]] = [
        {"model": "m", "prompt": new_prompt(random.choice((3, 40, 64, 100))), "max_tokens": 24, "logprobs": 3}
        | ({"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number, "top_p": 0.9})
        for number in range(32)
    ]

    async def answer(client: httpx2.AsyncClient, body: dict[str, Any]) -> Any:
        reply = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
        return reply.raise_for_status().json()["choices"][0]

    async with httpx2.AsyncClient(timeout=600) as client:
        together = await asyncio.gather(*(answer(client, body) for body in bodies))
        alone = [await answer(client, body) for body in bodies]
    return sum(one == other for one, other in zip(together, alone, strict=True))


async def hold_idle(port: int, process: int) -> float:
    """MB that 1,000 silent connections add."""
    before = resident(process)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(1000)]
    await asyncio.sleep(2)
    after = resident(process)
    for _, writer in held:
        writer.close()
    return after - before


async def read_slowly(port: int, seconds: float) -> None:
    """A client with a tiny receive buffer that takes 1 KB of its stream each second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    body = json.dumps({"model": "m", "stream": True} | completion(new_prompt(8), 240)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        await reader.read(1024)
        await asyncio.sleep(1)
    writer.close()


async def measure_slow_readers(port: int) -> tuple[float, float]:
    """Output tokens per second of 8 streams alone, and once 64 slow readers have had their texts written."""
    before, _ = await load(port, 8, 16)
    slow = [asyncio.ensure_future(read_slowly(port, 40)) for _ in range(64)]
    while metric(port, "waiting_requests") + metric(port, "running_texts") > 0:
        await asyncio.sleep(0.5)
    after, _ = await load(port, 8, 16)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    return before, after


async def cut_requests(port: int, count: int) -> float:
    """Seconds after the last of many cut requests until no row and no page is in use."""

    async def cut() -> None:
        task = asyncio.ensure_future(ask(port, completion(new_prompt(random.randrange(1, 120)))))
        await asyncio.sleep(random.random() * 0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for first in range(0, count, 25):
        await asyncio.gather(*(cut() for _ in range(min(25, count - first))))
    began = time.perf_counter()
    while metric(port, "running_texts") or metric(port, "waiting_requests"):
        await asyncio.sleep(0.01)
    assert metric(port, "kv_pages") == metric(port, "kv_pages_free")
    return time.perf_counter() - began


async def many_requests(port: int, process: int, count: int) -> tuple[float, float]:
    """MB after a tenth of the requests, and after all of them."""
    seen = []
    for done in range(0, count, 100):
        await asyncio.gather(*(ask(port, completion(new_prompt(16), 2)) for _ in range(20) for _ in range(5)))
        if done + 100 in (count // 10, count):
            seen.append(resident(process))
    return seen[0], seen[1]


def main() -> None:
    if not MODEL.exists():
        print(f"{MODEL} is missing; set SERVING_MODEL to a checkpoint folder")
        return
    random.seed(0)
    port = free_port()
    if "same" in PARTS:
        for weights in WEIGHTS:
            for options in ([], ["--no-prefix-cache"]):
                with start_server(our_command(port, weights, *options), port):
                    same = asyncio.run(count_same_answers(port))
                    print(f"same      {weights:8} {' '.join(options):17} {same} of 32 answers", flush=True)
    with start_server(our_command(port, "float16", "--no-prefix-cache", "--queue", "100"), port) as process:
        asyncio.run(load(port, 8, 8))
        if "idle" in PARTS:
            print(f"idle      1,000 connections: {asyncio.run(hold_idle(port, process)):+.1f} MB", flush=True)
        if "slow" in PARTS:
            before, after = asyncio.run(measure_slow_readers(port))
            print(f"slow      8 streams {before:.0f} tokens/s, with 64 slow readers {after / before:.0%}", flush=True)
        if "cut" in PARTS:
            print(f"cut       all free {asyncio.run(cut_requests(port, 1000)):.2f} s after the last", flush=True)
    if "memory" in PARTS:
        with start_server(our_command(port, "float16", "--memory", "0.2", "--queue", "200"), port) as process:
            early, late = asyncio.run(many_requests(port, process, REQUESTS))
            print(
                f"memory    {early:.0f} MB after {REQUESTS // 10:,} requests, {late - early:+.1f} MB after {REQUESTS:,}"
            )


if __name__ == "__main__":
    main()
