"""A configuration in a notebook: completion, help, and the nearest of a wrong name."""

from __future__ import annotations

import copy
import pickle
import pydoc
import rlcompleter
from typing import Any

import msgspec
import pytest

import planetary
from planetary.core.configuration.keys import FIELDS, LISTS, SECTIONS
from planetary.runs.rl.config import RlConfig


def completed(text: str) -> list[str]:
    """Return the completions of a prompt with `config`."""
    config: Any = planetary.Config().having(RlConfig(task="sort"))
    found = rlcompleter.Completer({"config": config}).attr_matches(text)
    return [one.rstrip("(") for one in found]


def test_sections_and_keys_are_completed() -> None:
    assert {f"config.{name}" for name in (*SECTIONS, *LISTS)} <= set(completed("config."))
    assert sorted(completed("config.train.rou")) == ["config.train.rounding", "config.train.rounds"]
    for section, fields in FIELDS.items():
        assert {f"config.{section}.{key}" for key in fields} <= set(completed(f"config.{section}.")), section
    assert sorted(completed("config.rl.imitation_")) == ["config.rl.imitation_every", "config.rl.imitation_goal"]


def test_section_of_a_kind_is_an_attribute() -> None:
    config: Any = planetary.Config().having(RlConfig(task="sort"))
    assert config.rl == config.of(RlConfig)
    assert (config.rl.task, config.rl.groups, config.serve.model, config.train.rounds) == ("sort", 16, "", 12)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda config: config.trian, r"Config has no 'trian'; did you mean train\? It has run, model, .*sinks, .*rl"),
        (
            lambda config: config.train.roundz,
            r"TrainConfig has no 'roundz'; did you mean rounds\? It has .*inner_steps",
        ),
        (lambda config: config.rl.tasks, r"RlConfig has no 'tasks'; did you mean task\? It has "),
        (lambda config: config.rl.xyzzy, r"RlConfig has no 'xyzzy'\. It has task, "),
        (lambda config: config._repr_html_, "Config has no '_repr_html_'$"),
    ],
)
def test_wrong_name_gives_the_nearest(ask: Any, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        ask(planetary.Config())


def test_help_lists_sections_and_keys() -> None:
    shown = pydoc.plain(pydoc.render_doc(planetary.Config))
    for section, fields in FIELDS.items():
        assert f"{section}: " in shown
        assert f"Keys: {', '.join(fields)}" in shown.replace("\n |  ", " "), section
    train = pydoc.plain(pydoc.render_doc(planetary.Config().train))
    assert "rounds (default 12): " in train
    assert "inner_steps (default 30): " in train


def test_configuration_is_copied_and_sent_as_before() -> None:
    config = planetary.Config().having(RlConfig(task="sort"))
    assert copy.deepcopy(config) == copy.copy(config) == pickle.loads(pickle.dumps(config)) == config
    assert msgspec.json.decode(msgspec.json.encode(config.train), type=type(config.train)) == config.train
    assert hash(config.train) == hash(copy.copy(config.train))
