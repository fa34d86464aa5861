"""Chat templates against `transformers`, and conversations against a fresh prefill of the whole text."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch

import clearhead
from clearhead.data.chat import CHAT_TEMPLATE
from clearhead.generate.complete import TextGenerator
from clearhead.generate.conversation import Conversation
from clearhead.generate.template import ChatTemplate, TemplateError
from clearhead.tokenize import Tokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if loop.first and message.role != 'system' %}{{ bos_token }}{% endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\n' }}\n"
    "    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}\n"
    "    {%- else %}{{ message.content | trim }}{% endif %}\n"
    "    {{- '<|im_end|>\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRICKY = (
    "{{ bos_token }}{% set ns = namespace(count=0) %}{% for message in messages %}"
    "{% if message.role == 'tool' %}{% continue %}{% endif %}{% set ns.count = ns.count + 1 %}"
    "[{{ message.role.upper() }}] {{ message | tojson }} {{ message.content[:5] }}{% if tools %}T{% endif %}\n"
    "{% endfor %}{{ ns.count }}{{ eos_token }}"
)
TEMPLATES = {"chatml": CHATML, "tricky": TRICKY, "ours": CHAT_TEMPLATE}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is «2 + 2»? "},
    {"role": "assistant", "content": "Four."},
    {"role": "tool", "content": "{}"},
    {"role": "user", "content": "数学?"},
]
SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer() -> Tokenizer:
    letters = sorted(set(" \n.,?!<>|{}[]()'\"+-:_" + "".join(map(chr, range(48, 123)))))
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="?"))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(SPECIAL)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", inner.token_to_id("<|bos|>"))]
    )
    return Tokenizer(inner, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer and ChatML."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = clearhead.preset("tiny-llama")
    for part in ("embedding", "head"):
        config = config.with_value(f"{part}.vocabulary", tokenizer.vocabulary)
    model = clearhead.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("chat")
    model.save(path, tokenizer=tokenizer)
    (path / "chat_template.jinja").write_text(CHATML)
    return path


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("answering", [True, False])
def test_templates_render_as_in_transformers(name: str, answering: bool, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    make_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=answering)
    ours = ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))
    assert ours.render(TALK, prompt=answering) == wanted
    ids = theirs.apply_chat_template(TALK, add_generation_prompt=answering, return_dict=False)
    assert Tokenizer.load(tmp_path).prompt(wanted, around=False) == ids


def test_template_of_tokenizer_config_is_used_without_a_file(tmp_path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.settings["chat_template"] = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "{{ messages[0].content }}!"},
    ]
    tokenizer.save(tmp_path)
    template = ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))
    assert template.render(TALK[:1]) == "Be brief.!"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path)).render(TALK) == "file"


def test_templates_are_sandboxed() -> None:
    for source in ("{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}"):
        with pytest.raises(TemplateError, match=r"rejects this conversation: .*unsafe"):
            ChatTemplate(source, {}).render(TALK)
    with pytest.raises(TemplateError, match="rejects"):
        ChatTemplate("{{ messages.append(1) }}", {}).render(TALK)
    with pytest.raises(TemplateError, match="rejects this conversation: users first"):
        ChatTemplate("{{ raise_exception('users first') }}", {}).render(TALK)
    with pytest.raises(TemplateError, match="has a Jinja syntax error"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_failing_template_raises_template_error(source: str) -> None:
    with pytest.raises(TemplateError, match="the chat template rejects this conversation"):
        ChatTemplate(source, {}).render([])


def test_turn_end_is_found_in_the_template() -> None:
    assert ChatTemplate(CHATML, {"bos_token": "<s>"}).turn_end() == "<|im_end|>"
    assert ChatTemplate(CHAT_TEMPLATE, {}).turn_end() == "<|end|>"
    assert ChatTemplate("{{ messages[0].content }}", {}).turn_end() == ""


def test_turns_read_only_what_is_new(folder) -> None:
    model = clearhead.load(folder)
    task = TextGenerator.of(model, max_new_tokens=12)
    talk = Conversation(task, ChatTemplate.load(folder, task.tokenizer), system="Be brief. " * 20)
    mark = task.tokenizer.inner.token_to_id("<|im_end|>")
    assert mark in talk.generator.config.ends
    messages = list(talk.messages)
    fed = []
    original = model.next_logits
    model.next_logits = lambda tokens, state, **rest: fed.append(tokens.shape[1]) or original(tokens, state, **rest)
    for message in ("What is two?", "And three?", "Why"):
        messages.append({"role": "user", "content": message})
        ids = task.tokenizer.prompt(talk.template.render(messages), around=False)
        fed.clear()
        answer = "".join(talk.reply(message))
        read = sum(count for count in fed if count > 1)
        (fresh,) = model.generate(ids, max_new_tokens=12, ends=talk.generator.config.ends)
        assert answer == fresh.text
        assert len(messages) == 2 or read < len(ids) - 64
        messages.append({"role": "assistant", "content": answer.strip()})
    assert talk.messages == messages


def test_an_answer_that_nobody_reads_to_its_end_leaves_no_trace(folder) -> None:
    task = TextGenerator.of(clearhead.load(folder), max_new_tokens=12)
    talk, other = (Conversation(task, ChatTemplate.load(folder, task.tokenizer)) for _ in range(2))
    stopped = talk.reply("one")
    next(stopped, None)
    stopped.close()
    assert talk.messages == []
    assert not talk.engine.busy
    assert "".join(talk.reply("two")) == "".join(other.reply("two"))


def test_every_turn_has_its_own_random_numbers(folder) -> None:
    task = TextGenerator.of(clearhead.load(folder), max_new_tokens=8, temperature=1.0, seed=3)
    template = ChatTemplate("{{ messages[-1].content }}", {})  # the model reads the last message only
    talk, again = (Conversation(task, template) for _ in range(2))
    first, second = ("".join(talk.reply("same")) for _ in range(2))
    assert first != second
    assert ["".join(again.reply("same")) for _ in range(2)] == [first, second]


def test_conversation_longer_than_the_context_is_refused(folder) -> None:
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"max_position_embeddings": 60}))
    task = TextGenerator.of(clearhead.load(folder), max_new_tokens=5)
    talk = Conversation(task, ChatTemplate.load(folder, task.tokenizer))
    list(talk.reply("hi"))
    with pytest.raises(
        ValueError, match=r"the conversation has \d+ tokens, but the model.s context is 60 tokens; shorten it"
    ):
        list(talk.reply("long " * 20))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than 10,000,000 characters"),
        ("{{ 'x' * 99999999 }}", "builds a value of more than 10,000,000 items"),
        ("{{ 9 ** 99999 }}", "which is too large"),
    ],
)
def test_template_output_is_limited(source: str, sentence: str) -> None:
    with pytest.raises(TemplateError, match=sentence):
        ChatTemplate(source, {}).render(TALK)


def test_template_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.generate.template.SECONDS", 0.2)
    endless = "{% set m = range(99999) | list %}{% for a in m %}{% for b in m %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match=r"runs longer than 0.2 s"):
        ChatTemplate(endless, {}).render(TALK)
