"""Prometheus metrics: requests, tokens, waiting times, and the load of the engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clearhead.generate.job import Job

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The metrics of one server. Nothing of a prompt or an answer is in them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self.counter("requests", "Requests by how they ended", ["result"])
        self.tokens = self.counter("tokens", "Tokens: read, taken from the prefix cache, generated", ["kind"])
        self.first = self.histogram("first_token_seconds", "Seconds from a request to its first token")
        self.whole = self.histogram("request_seconds", "Seconds from a request to its end")
        self.running = self.gauge("running_texts", "Texts being written")
        self.waiting = self.gauge("waiting_requests", "Requests in the queue")
        self.pages = self.gauge("kv_pages", "Pages of the KV cache, 32 tokens each")
        self.free = self.gauge("kv_pages_free", "Pages that neither a text nor the prefix cache uses")
        self.chunks = self.gauge("prefix_cache_chunks", "Chunks of 64 tokens in the prefix cache")
        self.preempted = self.gauge("preempted_requests", "Requests that had to wait again because memory was full")

    def counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"clearhead_{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"clearhead_{name}", text, buckets=SECONDS, registry=self.registry)

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"clearhead_{name}", text, registry=self.registry)

    def start(self, jobs: Sequence[Job]) -> None:
        self.requests.labels("started").inc()

    def finish(self, jobs: Sequence[Job]) -> None:
        now = time.monotonic()
        result = "cancelled" if any(job.cancelled for job in jobs) else "done"
        self.requests.labels(result).inc()
        for job in jobs:
            self.tokens.labels("read").inc(job.usage.prompt - job.usage.cached)
            self.tokens.labels("cached").inc(job.usage.cached)
            self.tokens.labels("generated").inc(job.usage.completion)
            self.whole.observe(now - job.arrived)
            if job.first_token is not None:
                self.first.observe(job.first_token - job.arrived)

    def render(self, engines: Sequence[Any]) -> bytes:
        self.running.set(sum(len(engine.core.texts) for engine in engines))
        self.waiting.set(sum(len(engine.core.waiting) + engine.pending for engine in engines))
        pools = [pool for engine in engines for pool in engine.core.memory.pools]
        self.pages.set(sum(pool.count for pool in pools))
        self.free.set(sum(len(pool.free) for pool in pools))
        self.chunks.set(sum(len(engine.core.prefix) for engine in engines))
        self.preempted.set(sum(engine.core.preempted for engine in engines))
        return generate_latest(self.registry)
