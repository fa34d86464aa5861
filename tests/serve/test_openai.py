"""The server over real HTTP, with the `openai` client and with hostile requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import httpx2
import openai
import pytest

import clearhead
from clearhead.configs import precision
from clearhead.models.quantize import quantize

from .tools import Running, chat_folder, running

KEY = "secret-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Running]:
    folder = chat_folder(tmp_path_factory.mktemp("served"))
    model = quantize(clearhead.load(folder), precision("float32"))
    with running({"tiny": model}, key=KEY, rows=4, length=400, queue=8) as found:
        yield found


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def post(server: Running, path: str, body: object, **headers: str) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body, headers={"authorization": f"Bearer {KEY}"} | headers, timeout=60)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'; this server has: tiny"):
        client.models.retrieve("other")


def test_completion_equals_generate_and_counts_usage(client: openai.OpenAI, server: Running) -> None:
    model = server.server.models["tiny"].model
    found = client.completions.create(model="tiny", prompt=["Hello", "To be"], max_tokens=12, temperature=0, n=2)
    wanted = [one.text for one in model.generate(["Hello", "To be"], max_new_tokens=12, temperature=0)]
    assert [choice.text for choice in found.choices] == [text for text in wanted for _ in range(2)]
    assert found.usage.prompt_tokens == 6 + 6
    assert found.usage.completion_tokens == sum(
        2 * len(one.tokens) for one in model.generate(["Hello", "To be"], max_new_tokens=12, temperature=0)
    )


def test_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 20, "temperature": 1.0, "seed": 5, "n": 2}
    whole = client.completions.create(**asked)
    texts, usage = ["", ""], None
    for event in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.text
        usage = event.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] != texts[1]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model="tiny", prompt="Hello you", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    logprobs = found.choices[0].logprobs
    assert found.choices[0].text.startswith("Hello you")
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 10 + 1
    assert all(value < 0 for value in logprobs.token_logprobs[1:])


def test_chat_uses_the_template(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 10, "temperature": 0}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    assert found.choices[0].message.role == "assistant"
    first = found.choices[0].logprobs.content[0]
    assert len(first.top_logprobs) == 3
    assert first.logprob == max(other.logprob for other in first.top_logprobs)
    parts = [event.choices[0].delta.content for event in client.chat.completions.create(**asked, stream=True)]
    assert "".join(part or "" for part in parts) == found.choices[0].message.content


def test_structured_output_is_valid(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for temperature in (0, 1.0):
        found = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "?"}],
            max_tokens=80,
            temperature=temperature,
            seed=1,
            response_format=wanted,
        )
        value = json.loads(found.choices[0].message.content)
        assert set(value) == {"name", "ok"}
        assert len(value["name"]) <= 5


def test_forced_tool_call_has_valid_arguments(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"day": {"enum": ["Mon", "Tue"]}},
        "required": ["day"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": [tool], "max_tokens": 80}
    choice = client.chat.completions.create(**asked, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "weather"
    assert json.loads(choice.message.tool_calls[0].function.arguments)["day"] in ("Mon", "Tue")
    events = client.chat.completions.create(**asked, tool_choice="required", stream=True)
    assert [e.choices[0].finish_reason for e in events][-1] == "tool_calls"


def test_penalties_and_bias_are_honoured(client: openai.OpenAI, server: Running) -> None:
    token = server.server.models["tiny"].engine.core.tokenizer.encode("z")[0]
    found = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=5, temperature=0, logit_bias={str(token): 100}
    )
    assert found.choices[0].text == "zzzzz"
    found = client.completions.create(
        model="tiny",
        prompt="Hello",
        max_tokens=5,
        temperature=0,
        logit_bias={str(token): 100},
        extra_body={"repetition_penalty": 100.0},
    )
    assert found.choices[0].text != "zzzzz"


def test_stop_strings_end_the_text(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 20, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    found = client.completions.create(**asked, stop=text[3:5]).choices[0]
    assert (found.text, found.finish_reason) == (text[: text.index(text[3:5])], "stop")


def test_answers_are_identical_in_company(server: Running) -> None:
    """32 clients at once, each with a prompt and seed of its own, against the same requests one by one."""

    async def ask(client: openai.AsyncOpenAI, number: int):
        found = await client.completions.create(
            model="tiny",
            prompt="Hello " * (number % 5) + "you",
            max_tokens=10,
            seed=number,
            temperature=number % 2,
            logprobs=2,
        )
        return found.choices[0].text, found.choices[0].logprobs.token_logprobs

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=200) as client:
            together = await asyncio.gather(*(ask(client, number) for number in range(32)))
            alone = [await ask(client, number) for number in range(32)]
        return together, alone

    together, alone = asyncio.run(main())
    assert together == alone


def test_full_queue_answers_429_and_the_client_retries(server: Running) -> None:
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 60, "temperature": 0, "logit_bias": {"0": 100}}
            return await asyncio.gather(
                *(client.completions.create(**asked) for _ in range(40)), return_exceptions=True
            )

    found = asyncio.run(main())
    refused = [one for one in found if isinstance(one, openai.RateLimitError)]
    assert refused
    assert len(refused) < 40
    assert refused[0].response.headers["retry-after"] == "1"


def test_client_that_leaves_frees_its_row(server: Running, client: openai.OpenAI) -> None:
    engine = server.server.models["tiny"].engine
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 300, "temperature": 0, "logit_bias": {"0": 100}}
    stream = client.completions.create(**asked, stream=True)
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**asked, timeout=0.05)
    end = time.monotonic() + 20
    while not engine.idle and time.monotonic() < end:
        time.sleep(0.01)
    assert engine.idle


def test_embeddings_as_floats_and_base64(client: openai.OpenAI) -> None:
    floats = client.embeddings.create(model="tiny", input=["a cat", "dogs"], encoding_format="float")
    packed = client.embeddings.create(model="tiny", input=["a cat", "dogs"])
    assert packed.data[1].embedding == pytest.approx(floats.data[1].embedding)
    short = client.embeddings.create(model="tiny", input="a cat", dimensions=4, encoding_format="float").data[0]
    assert sum(x * x for x in short.embedding) == pytest.approx(1)


def test_tokenize_and_back(server: Running) -> None:
    ids = post(server, "/tokenize", {"prompt": "Hello"}).json()["tokens"]
    assert post(server, "/detokenize", {"tokens": ids}).json() == {"prompt": "Hello"}
    info = httpx2.get(f"{server.url}/tokenizer_info", headers={"authorization": f"Bearer {KEY}"}).json()
    assert info["eos_token"] == "<|eos|>"


TINY = {"model": "tiny", "prompt": "Hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", TINY | {"surprise": 1}, 400, "surprise"),
        ("/v1/completions", TINY | {"max_tokens": "many"}, 400, "max_tokens"),
        ("/v1/completions", TINY | {"max_tokens": -1}, 400, "max_tokens"),
        ("/v1/completions", TINY | {"max_tokens": 10**6}, 400, "prompt"),
        ("/v1/completions", TINY | {"temperature": -1}, 400, "temperature"),
        ("/v1/completions", TINY | {"temperature": 3}, 400, "temperature"),
        ("/v1/completions", TINY | {"top_p": 1.5}, 400, "top_p"),
        ("/v1/completions", TINY | {"n": 0}, 400, "n"),
        ("/v1/completions", TINY | {"n": 100}, 400, "n"),
        ("/v1/completions", TINY | {"best_of": 3}, 400, "best_of"),
        ("/v1/completions", TINY | {"suffix": "x"}, 400, "suffix"),
        ("/v1/completions", TINY | {"logprobs": 21}, 400, "logprobs"),
        ("/v1/completions", TINY | {"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("/v1/completions", TINY | {"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ("/v1/completions", TINY | {"stop": [""]}, 400, "stop"),
        ("/v1/completions", TINY | {"prompt": []}, 400, "prompt"),
        ("/v1/completions", TINY | {"prompt": [1, "x"]}, 400, "prompt"),
        ("/v1/completions", TINY | {"prompt": [10**9]}, 400, "prompt"),
        ("/v1/completions", TINY | {"prompt": "x" * 3000}, 400, "prompt"),
        ("/v1/completions", TINY | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("/v1/completions", TINY | {"model": "other"}, 404, "model"),
        ("/v1/completions", [], 400, None),
        ("/v1/chat/completions", CHAT | {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "king", "content": "x"}]}, 400, "messages"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": 3}]}, 400, "messages"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs"),
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools"),
        ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, 400, "tool_choice"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "regex"}}, 400, "response_format"),
        ("/v1/embeddings", {"model": "tiny", "input": []}, 400, "input"),
        ("/v1/embeddings", {"model": "tiny", "input": "x", "dimensions": 10**6}, 400, "dimensions"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
    ],
)
def test_bad_requests_name_their_field(
    server: Running, path: str, body: object, status: int, param: str | None
) -> None:
    answer = post(server, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_key_health_metrics_and_page(server: Running) -> None:
    assert httpx2.get(f"{server.url}/v1/models").status_code == 401
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}
    page = httpx2.get(server.url).text
    assert "/v1/chat/completions" in page
    assert "http://" not in page
    assert "https://" not in page
    metrics = httpx2.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    assert 'clearhead_tokens_total{kind="generated"}' in metrics


def test_timeout_fails_the_request(tmp_path) -> None:
    model = quantize(clearhead.load(chat_folder(tmp_path)), precision("float32"))
    with running({"tiny": model}, timeout=0.0, rows=2) as server:
        answer = httpx2.post(f"{server.url}/v1/completions", json=TINY | {"max_tokens": 50}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
