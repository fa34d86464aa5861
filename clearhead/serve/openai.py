"""The endpoints of the OpenAI API, for the models that a server has loaded."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from clearhead.configs import LMHeadConfig
from clearhead.generate.complete import vocabulary_size
from clearhead.generate.conversation import with_turn_end
from clearhead.generate.engine import QueueFull
from clearhead.generate.grammar import Grammar, GrammarError
from clearhead.generate.job import Job, JobError, JobOptions
from clearhead.generate.template import TemplateError

from .answer import Answer, ChatAnswer, CompletionAnswer
from .app import EventStream, json_response, read_json, until_disconnect
from .errors import ApiError, invalid
from .messages import flatten_messages
from .metrics import Metrics
from .request import (
    TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Sampling,
    TokenizeRequest,
    check_range,
    decoding_config,
    prompts_of,
    read,
)
from .schema import openapi
from .served_model import ServedModel, model_json
from .tools import check_tools, tool_schema

CHAT_TOKENS = 1024  # new tokens of a chat answer, if the request sets no limit
log = logging.getLogger("clearhead.serve")
PROMPTS = 256  # prompts or inputs of one request
EMBEDDING = 16  # requests for embeddings at a time


@dataclass
class Server:
    """The loaded models, and what every endpoint shares."""

    models: dict[str, ServedModel]
    metrics: Metrics
    timeout: float | None = None
    ready: bool = True
    draining: bool = False
    log_prompts: bool = False
    embedding: int = 0  # requests for embeddings that are running

    def find(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(
                404, f"there is no model {name!r}; this server has: {known}", param="model", code="model_not_found"
            )
        return self.models[name]

    async def read(self, kind: type[Any], request: Request) -> Any:
        """The request in the body; logged only with --log-prompts."""
        body = await read_json(request)
        if self.log_prompts:
            log.info("%s %s", request.url.path, body)
        return read(kind, body)

    def deadline(self) -> float | None:
        return None if self.timeout is None else time.monotonic() + self.timeout

    def submit(self, served: ServedModel, prompts: Sequence[list[int]], options: JobOptions, param: str) -> list[Job]:
        """Start one job per prompt, all of them or none."""
        try:
            jobs = served.writer.submit_jobs(prompts, options)
        except QueueFull as error:
            raise ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"}) from None
        except JobError as error:
            status = 503 if error.code == "stopped" else 400
            raise ApiError(status, str(error), param="n" if error.code == "n" else param, code=error.code) from None
        except ValueError as error:
            code = "context_length_exceeded" if "context is" in str(error) else "invalid_value"
            raise invalid(str(error), param, code) from None
        self.metrics.start(jobs)
        return jobs

    # ---- completions

    async def completions(self, request: Request) -> Response:
        asked: CompletionRequest = await self.read(CompletionRequest, request)
        jobs, answer = await asyncio.to_thread(self.start_completion, asked)
        return await self.respond(request, asked, jobs, answer)

    def start_completion(self, asked: CompletionRequest) -> tuple[list[Job], Answer]:
        """Check a request, encode its prompts and submit them. Runs in a thread, as a long prompt takes time."""
        served = self.find(asked.model)
        core = served.writer.core
        if asked.suffix is not None:
            raise invalid("suffix is not supported", "suffix")
        if asked.best_of is not None and asked.best_of != (asked.n or 1):
            raise invalid(f"best_of is {asked.best_of}, but only best_of = n is supported", "best_of")
        check_range(asked, "max_tokens", 0, 2**31)
        check_range(asked, "logprobs", 0, TOP_LOGPROBS)
        limit, echo = 16 if asked.max_tokens is None else asked.max_tokens, bool(asked.echo)
        if limit == 0 and not echo:
            raise invalid("max_tokens is 0, which needs echo=true", "max_tokens")
        config = decoding_config(asked, core.generator.config)
        prompts = prompts_of(asked.prompt)
        if len(prompts) > PROMPTS:
            raise invalid(f"prompt has {len(prompts)} prompts, but at most {PROMPTS} are allowed", "prompt")
        ids = [self.encode(served, one, "prompt") for one in prompts]
        options = JobOptions(
            config=config,
            limit=limit,
            choices=asked.n or 1,
            logprobs=asked.logprobs,
            echo_logprobs=echo and asked.logprobs is not None,
            **self.common_options(asked, served),
        )
        jobs = self.submit(served, ids, options, "prompt")
        return jobs, CompletionAnswer(served, asked, jobs, prompts=prompts)

    def encode(self, served: ServedModel, prompt: str | list[int], param: str) -> list[int]:
        try:
            return served.writer.core.generator.encode(prompt)
        except ValueError as error:
            code = "context_length_exceeded" if "context is" in str(error) else "invalid_value"
            raise invalid(str(error), param, code) from None

    def common_options(self, asked: Sampling, served: ServedModel) -> dict[str, Any]:
        """The options of a request that completions and chat have in common."""
        size = vocabulary_size(served.model)
        bias = tuple((int(token), value) for token, value in (asked.logit_bias or {}).items())
        if odd := [token for token, _ in bias if token >= size]:
            raise invalid(f"logit_bias has token {odd[0]}, but the vocabulary has ids 0 to {size - 1}", "logit_bias")
        return {
            "presence": asked.presence_penalty or 0.0,
            "frequency": asked.frequency_penalty or 0.0,
            "bias": bias,
            "grammar": self.grammar(asked, served),
            "user": asked.user or "",
            "deadline": self.deadline(),
        }

    def grammar(self, asked: Sampling, served: ServedModel, schema: Any = None) -> Grammar | None:
        wanted = asked.response_format
        core = served.writer.core
        if core.tokenizer is None or (schema is None and (wanted is None or wanted.type == "text")):
            return None
        head = core.model.config.head
        assert isinstance(head, LMHeadConfig)
        given = (head.vocabulary, core.generator.config.ends)
        try:
            if schema is not None:
                return Grammar.from_schema(core.tokenizer, schema, *given)
            assert wanted is not None
            if wanted.type == "regex":
                if wanted.pattern is None:
                    raise invalid("response_format of type regex needs a pattern", "response_format")
                return Grammar.from_regex(core.tokenizer, wanted.pattern, *given)
            if wanted.type == "json_schema" and wanted.json_schema is None:
                raise invalid("response_format of type json_schema needs json_schema", "response_format")
            schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema
            return Grammar.from_schema(core.tokenizer, schema, *given)
        except GrammarError as error:
            raise invalid(str(error), "response_format") from None

    # ---- chat

    async def chat(self, request: Request) -> Response:
        asked: ChatRequest = await self.read(ChatRequest, request)
        jobs, answer = await asyncio.to_thread(self.start_chat, asked)
        return await self.respond(request, asked, jobs, answer)

    def start_chat(self, asked: ChatRequest) -> tuple[list[Job], Answer]:
        """Check a request, render its messages and submit it. Runs in a thread, as templates and grammars take time."""
        served = self.find(asked.model)
        core = served.writer.core
        for name in ("max_tokens", "max_completion_tokens"):
            check_range(asked, name, 1, 2**31)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        check_range(asked, "top_logprobs", 0, TOP_LOGPROBS)
        if not asked.messages:
            raise invalid("messages is empty", "messages")
        template = served.template
        tools = check_tools(asked, template)
        try:
            text = template.render(flatten_messages(asked.messages), tools=tools or None)
        except TemplateError as error:
            raise invalid(str(error), "messages") from None
        assert core.tokenizer is not None
        ids = core.tokenizer.prompt(text, around=False)
        config = decoding_config(asked, core.generator.config)
        ending = with_turn_end(replace(core.generator, config=config), template)
        limit = asked.max_completion_tokens or asked.max_tokens
        limit = limit or max(1, min(CHAT_TOKENS, core.length - len(ids) + 1))
        shared = self.common_options(asked, served)
        if (schema := tool_schema(asked)) is not None:
            shared["grammar"] = self.grammar(asked, served, schema)
        options = JobOptions(
            config=ending.config,
            limit=limit,
            choices=asked.n or 1,
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
            **shared,
        )
        jobs = self.submit(served, [ids], options, "messages")
        return jobs, ChatAnswer(served, asked, jobs)

    # ---- answers

    async def respond(self, request: Request, asked: Sampling, jobs: list[Job], answer: Answer) -> Response:
        def cancel() -> None:
            for job in jobs:
                job.cancel()

        if asked.stream:
            return EventStream(self.watch(answer.stream(), jobs), cancel)
        try:
            return json_response(await until_disconnect(request, answer.whole(), cancel))
        except JobError as error:
            raise api_error(error) from None
        finally:
            self.metrics.finish(jobs)

    async def watch(self, events: AsyncIterator[Any], jobs: list[Job]) -> AsyncIterator[Any]:
        try:
            async for event in events:
                yield event
        except JobError as error:
            raise api_error(error) from None
        finally:
            self.metrics.finish(jobs)

    # ---- the rest

    async def list_models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [model_json(one) for one in self.models.values()]})

    async def show_model(self, request: Request) -> Response:
        return json_response(model_json(self.find(request.path_params["model"])))

    async def embeddings(self, request: Request) -> Response:
        asked: EmbeddingRequest = await self.read(EmbeddingRequest, request)
        served = self.find(asked.model)
        inputs = prompts_of(asked.input) if asked.input else []
        if not inputs or len(inputs) > PROMPTS or "" in inputs:
            raise invalid(f"input must be 1 to {PROMPTS} texts, none of them empty", "input")
        tokenizer = served.model.tokenizer
        if tokenizer is None:
            raise invalid(f"{served.name} has no tokenizer", "model")
        texts = [one for one in inputs if isinstance(one, str)]
        if len(texts) < len(inputs):
            raise invalid("input must be text; token ids are not supported for embeddings", "input")
        vectors, count = await until_disconnect(request, self.embed(served, texts), lambda: None)
        width = len(vectors[0])
        if asked.dimensions is not None:
            check_range(asked, "dimensions", 1, width)
            vectors = [cut / max(float(np.linalg.norm(cut)), 1e-12) for cut in (v[: asked.dimensions] for v in vectors)]
        data = [
            {"object": "embedding", "index": i, "embedding": encode_vector(vector, asked.encoding_format)}
            for i, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_response({"object": "list", "data": data, "model": served.name, "usage": usage})

    async def embed(self, served: ServedModel, texts: list[str]) -> tuple[list[Any], int]:
        """The vectors of texts and the number of tokens, a few texts at a time between two steps of the engine."""
        from clearhead.tasks.texts import TextReader, embed

        def work(some: list[str]) -> tuple[list[Any], int]:
            count = sum(len(TextReader.of(served.model).ids(text)) for text in some)
            return [vector.float().numpy() for vector in embed(served.model, some)], count

        if self.embedding >= EMBEDDING:
            message = f"{EMBEDDING} requests for embeddings are running already; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        vectors: list[Any] = []
        total, size = 0, 16 if served.engine is None else 1
        self.embedding += 1
        try:
            for first in range(0, len(texts), size):
                some = texts[first : first + size]
                running = (
                    asyncio.to_thread(work, some)
                    if served.engine is None
                    else asyncio.wrap_future(served.engine.call(partial(work, some)))
                )
                found, count = await running
                vectors += found
                total += count
        except ValueError as error:
            raise invalid(str(error), "input") from None
        finally:
            self.embedding -= 1
        return vectors, total

    async def tokenize(self, request: Request) -> Response:
        asked: TokenizeRequest = await self.read(TokenizeRequest, request)
        tokenizer = self.find(asked.model).model.tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer", "model")
        try:
            ids = await asyncio.to_thread(partial(tokenizer.prompt, asked.prompt, around=asked.add_special_tokens))
        except ValueError as error:
            raise invalid(str(error), "prompt") from None
        return json_response({"tokens": ids, "count": len(ids)})

    async def detokenize(self, request: Request) -> Response:
        asked: DetokenizeRequest = await self.read(DetokenizeRequest, request)
        tokenizer = self.find(asked.model).model.tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer", "model")
        if odd := [token for token in asked.tokens if not 0 <= token < tokenizer.vocabulary]:
            raise invalid(f"token {odd[0]} is outside the vocabulary of {tokenizer.vocabulary:,} tokens", "tokens")
        return json_response({"prompt": tokenizer.decode(asked.tokens)})

    async def tokenizer_info(self, request: Request) -> Response:
        """What `lm_eval` asks for, so that it can use this tokenizer remotely."""
        served = self.find(request.query_params.get("model"))
        tokenizer = served.model.tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer", "model")
        names = ("bos_token", "eos_token", "pad_token", "chat_template")
        info = {name: tokenizer.settings.get(name) for name in names}
        end = tokenizer.end
        info["eos_token"] = info["eos_token"] or (None if end is None else tokenizer.name(end))
        return json_response(info | {"vocab_size": tokenizer.vocabulary, "eos_token_id": end})

    async def health(self, request: Request) -> Response:
        dead = [one.name for one in self.models.values() if one.engine is not None and one.engine.failure is not None]
        if dead or self.draining or not self.ready:
            status = "engine failed" if dead else "draining" if self.draining else "loading"
            return json_response({"status": status}, 503)
        return json_response({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        engines = [one.engine for one in self.models.values() if one.engine is not None]
        return Response(self.metrics.render(engines), media_type="text/plain; version=0.0.4")

    async def show_openapi(self, request: Request) -> Response:
        return json_response(openapi())

    async def page(self, request: Request) -> Response:
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
        html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    def routes(self) -> list[Route]:
        def both(path: str, endpoint: Callable[..., Any], method: str) -> list[Route]:
            return [Route(prefix + path, endpoint, methods=[method]) for prefix in ("/v1", "")]

        return [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.show_openapi),
            *both("/models", self.list_models, "GET"),
            *both("/models/{model:path}", self.show_model, "GET"),
            *both("/completions", self.completions, "POST"),
            *both("/chat/completions", self.chat, "POST"),
            *both("/embeddings", self.embeddings, "POST"),
            *both("/tokenize", self.tokenize, "POST"),
            *both("/detokenize", self.detokenize, "POST"),
            *both("/tokenizer_info", self.tokenizer_info, "GET"),
        ]


def api_error(error: JobError) -> ApiError:
    status = {"timeout": 504, "stopped": 503, "queue_full": 429}.get(error.code, 500)
    headers = {"Retry-After": "1"} if status == 429 else None
    return ApiError(status, str(error), code=error.code, headers=headers)


def encode_vector(vector: Any, form: str) -> Any:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()
