"""A config survives JSON, refuses what is not known, and can be changed by path. Presets too.

Tests run under a hook that checks the types of every call, and so sees a wrong type before the config does. What users
see is tested in a process without the hook, in `test_errors.py`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from clearhead.configs import AdamWConfig, Causal, Config, ConfigError, MoEConfig, Window, dumps, loads
from clearhead.models.presets import PRESETS, preset

from .cases import CASES, GATED
from .tools import once_each

GOOD = {name: CASES[name] for name in once_each(CASES)}
GOOD |= {f"preset {name}": preset(name) for name in PRESETS if name.startswith("tiny")}


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in GOOD.items()])
def test_a_config_survives_json(config: Config) -> None:
    again = loads(dumps(config))
    assert again == config
    assert hash(again) == hash(config)
    assert dumps(again) == dumps(config)
    assert type(again) is type(config)


def test_different_configs_are_different() -> None:
    texts = [dumps(config) for config in CASES.values()]
    same = len(texts) - len(set(texts))
    assert len(set(CASES.values())) == len(set(texts))
    assert same <= 2, "two cases that say the same test nothing more"


def broken(path: str, value: Any) -> str:
    """The text of a good config with one thing in it changed."""
    data = json.loads(dumps(CASES["window; pre"]))
    *way, last = path.split(".")
    node: Any = data
    for key in way:
        node = node[int(key)] if key.isdigit() else node[key]
    node[last] = value
    return json.dumps(data)


MIXER = "stack.pattern.0.mixer"
REFUSED = {
    f"{MIXER}.head": (3, r"config\.stack\.pattern\.0\.mixer: Attention has no field .head.; did you mean 'heads'\?"),
    f"{MIXER}.kind": ("Atention", r"pattern\.0\.mixer has the unknown kind .Atention.; did you mean 'Attention'\?"),
    f"{MIXER}.heads": (0, "heads is 0, but must be positive"),
    f"{MIXER}.kv_heads": (4, "heads=6 is not a multiple of kv_heads=4"),
    f"{MIXER}.head_dim": (7, "a head of 7 cannot turn 7"),
    "stack.pattern.0.dropout": (1.0, "dropout is 1.0, but must be at least 0 and below 1"),
    "stack.pattern": ([], "pattern is empty"),
    "stack.dim": (-1, "dim is -1, but must be positive"),
    "embeding": (3, "SequenceModel has no field .embeding.; did you mean 'embedding'"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_known_is_refused(path: str) -> None:
    value, message = REFUSED[path]
    with pytest.raises(ConfigError, match=message):
        loads(broken(path, value))


@pytest.mark.parametrize("text", ["", "{", "3", "[]", "null", '"GPT"', "{}", '{"kind": null}', '{"kind": "Attention"}'])
def test_what_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        loads(text)


@pytest.mark.parametrize("kind", [["Attention"], {"kind": "Attention"}], ids=str)
def test_a_kind_that_is_no_word_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError):
        loads(json.dumps({"kind": kind}))


def test_what_is_needed_is_named() -> None:
    with pytest.raises(ConfigError, match="Attention needs heads"):
        loads('{"kind": "Attention"}')


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("stack.pattern.0.mixer.heads", 2),
        ("stack.pattern.0.mixer.mask", Causal()),
        ("stack.pattern.0.mixer.mask.right.size", 5),
        ("stack.pattern.0.mixer.rotary", None),
        ("stack.pattern.0.mixer.rotary.theta", 500.0),
        ("stack.pattern.0.ffn", MoEConfig(expert=GATED, experts=3, active=1)),
        ("stack.repeats", 5),
        ("head.tied", True),
    ],
)
def test_a_field_is_changed_by_its_path(path: str, value: Any) -> None:
    config = CASES["window; pre"]
    before = dumps(config)
    changed = config.with_value(path, value)
    found: Any = changed
    for key in path.split("."):
        found = found[int(key)] if key.isdigit() else getattr(found, key)
    assert found == value
    assert changed != config
    assert dumps(config) == before, "the config itself does not change"
    assert changed.with_value(path, value) == changed


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("stack.pattern.0.mixer.head", "did you mean 'heads'"),
        ("stack.pattern.1.mixer.heads", "'1' is not one of the places 0 to 0"),
        ("stack.pattern.x.mixer", "'x' is not one of the places"),
        ("stack.dim.size", "has no fields, so no 'size'"),
        ("stak.dim", "did you mean 'stack'"),
        ("head.kind", "LMHead has no field 'kind'"),
        ("", "has no field ''"),
    ],
)
def test_a_path_with_a_slip_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CASES["window; pre"].with_value(path, 3)


def test_a_change_is_checked_like_anything_else() -> None:
    config = CASES["window; pre"]
    with pytest.raises(ConfigError, match="heads=7 is not a multiple of kv_heads=2"):
        config.with_value("stack.pattern.0.mixer.heads", 7)
    with pytest.raises(ConfigError, match="vocabulary 99 is not 23"):
        CASES["tied head, scaled embedding"].with_value("head.vocabulary", 99)
    assert config.with_value("stack.pattern.0.mixer.mask", {"kind": "Window", "size": 4}) == (
        config.with_value("stack.pattern.0.mixer.mask", Window(4))
    )


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no preset 'gpt-2'; did you mean 'gpt2'"):
        preset("gpt-2")


def test_an_encoder_with_cross_attention_is_refused() -> None:
    """It has nothing to read, and would fail only when run."""
    config = CASES["translator; pre"]
    with pytest.raises(ConfigError, match="cross-attention"):
        config.with_value("encoder.pattern.0.cross", config.decoder.pattern[0].cross)


def test_a_mask_that_says_nothing_is_refused() -> None:
    """`Mask` itself is no predicate: a model of it would fail only when run."""
    with pytest.raises((ConfigError, TypeError)):
        loads(broken("stack.pattern.0.mixer.mask", {"kind": "Mask"}))


def test_changes_that_are_right_only_together_are_made_together() -> None:
    vit = preset("tiny-vit")
    for order in (("image", "patch"), ("patch", "image")):
        values = {"embedding.image": 15, "embedding.patch": 5}
        changed = vit.with_values({f"embedding.{name}": values[f"embedding.{name}"] for name in order})
        assert (changed.embedding.image, changed.embedding.patch) == (15, 5)
    with pytest.raises(ConfigError, match="image=15 is not a multiple of patch=8"):
        vit.with_values({"embedding.image": 15, "embedding.patch": 8})
    inside = {"stack.pattern.0.mixer": {"kind": "Attention", "heads": 2}, "stack.pattern.0.mixer.heads": 1}
    assert vit.with_values(inside).stack.pattern[0].mixer.heads == 1
    assert vit.with_values({}) == vit


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_number_that_is_none_is_not_positive(value: float) -> None:
    with pytest.raises(ConfigError, match=f"AdamW.lr is {value}, but must be positive"):
        AdamWConfig(lr=value)
