"""Every key is honoured or refused by every kind of run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from planetary.compiler.frontend.export import MODEL_FILE
from planetary.core.config import apply_overrides, config_from_tables, load_config
from planetary.core.configuration.derived import COMPANIONS, set_keys
from planetary.core.configuration.honoured import UNDECLARED
from planetary.core.configuration.keys import FIELDS, LISTS, SECTIONS, all_keys
from planetary.core.configuration.schema import Config
from planetary.core.configuration.sections import section_names
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.monitor.sinks.webhook_sink import WebhookSink
from planetary.run.kinds import all_kinds, kind_of
from planetary.runs.serve.config import GRAPH_IN_FOLDER

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "star": ("rounds", {}),
    "ring": ("rounds", {"sync": {"topology": "ring"}}),
    "hub": ("hub", {"federation": {"sites": [{"name": "a"}]}}),
    "site": ("site", {"federation": {"hub": "h:1"}}),
    "served run": ("serving", {"serve": {"model": "runs/x"}}),
    "served graph": ("serving", {"serve": {"model": "runs/x.mlir"}}),
    "mixture": ("mixture", {"moe": {"composers": 2}, "model": {"source": "planetary.models.latent_moe:build"}}),
    "new policy": ("reinforcement", {"rl": {"task": "reverse"}}),
    "policy of a folder": ("reinforcement", {"rl": {"task": "reverse", "start": "runs/x"}}),
}
"""Name of a case -> its kind, and the tables of the smallest configuration of it."""
ABSENT = {section: why for kind in all_kinds() for section, why in kind.sections.items()}
SAMPLES: dict[str, Any] = {"data.sources": [{"source": "a.txt"}], "federation.sites": [{"name": "other"}]} | {
    "eval.sets": {"notes": "notes.txt"},
    "eval.metrics": ["perplexity"],
}
"""Values of keys whose types do not tell one."""


def config_of(case: str) -> Config:
    return config_from_tables(CASES[case][1])


def another_value(key: str, found: Any) -> Any:
    """Return a value that the key takes, other than the one found; not whether it fits the other keys."""
    if key in SAMPLES:
        return SAMPLES[key]
    if key == "sync.topology":  # each of both, since the keys depend on it
        return "star" if found == "ring" else "ring"
    section, name = key.split(".")
    kind = FIELDS[section][name].type
    bare = kind.type if isinstance(kind, inspect.Metadata) else kind
    match bare:
        case inspect.LiteralType():
            return next(value for value in bare.values if value != found)
        case inspect.BoolType():
            return not found
        case inspect.IntType():
            return found + 1
        case inspect.FloatType():
            top = bare.le if bare.le is not None else bare.lt
            return (found + top) / 2 if top is not None and found != top else found / 2 if found else 1.0
        case inspect.StrType():
            return "blocks" if bare.pattern else f"{found}x"
        case inspect.DictType():
            return {"x": 1 if isinstance(bare.value_type, inspect.AnyType) else "param"}
        case _:
            return ["x"]


def changed(config: Config, key: str) -> Config:
    """Return a configuration with another value of one key, unchecked."""
    if key in LISTS:
        return msgspec.structs.replace(config, sinks=(WebhookSink(url="https://example.org"),))
    tables = config.tables()
    for one in {key, COMPANIONS.get(key, key)}:
        section, name = one.split(".")
        table = tables.setdefault(section, msgspec.to_builtins(SECTIONS[section]()))
        table[name] = another_value(one, table[name])
    made = {section: msgspec.convert(tables[section], SECTIONS[section]) for section in tables if section in SECTIONS}
    kinds = {section: made.pop(section) for section in section_names() if section in made}
    return msgspec.structs.replace(config, **made, kinds=kinds)


@pytest.mark.parametrize("case", CASES)
def test_every_key_is_declared(case: str) -> None:
    """A kind honours a key or has a reason why not, which is a sentence's part of some words."""
    config = config_of(case)
    assert kind_of(config).name == CASES[case][0]
    keys = kind_of(config).keys(config)
    reasons = {key: keys.why_not(key, ABSENT) for key in all_keys()}
    assert UNDECLARED not in reasons.values()
    assert all(not why or len(why.split()) > 3 for why in reasons.values())
    assert all(not reasons[key] for key in keys.passed_on)


@pytest.mark.parametrize("case", CASES)
def test_every_other_key_is_refused(case: str) -> None:
    """A key that is set and not honoured is an error that names the key, the kind, the reason and the remedy."""
    config = config_of(case)
    kind = kind_of(config)
    kind.keys(config).refuse_others(set_keys(config), ABSENT)
    for key in all_keys():
        other = changed(config, key)
        if kind_of(other) is not kind:
            continue  # the key decides which kind of run it is
        keys = kind.keys(other)
        if not (why := keys.why_not(key, ABSENT)):
            keys.refuse_others(set_keys(other), ABSENT)
            continue
        with pytest.raises(UserError) as found:
            kind.check(other)
        assert f"a run of the kind {keys.kind!r} does not honour" in str(found.value)
        assert f"{key}: {why}" in str(found.value)
        assert "Leave them out" in str(found.value)


def test_derived_values_are_not_set() -> None:
    """The outer rule of a short run and a shorter warm-up are nobody's keys."""
    for case in CASES:
        config = apply_overrides(config_of(case), ["run.name=x"])
        again = config_from_tables(config.tables())
        kind_of(again).keys(again).refuse_others(set_keys(again), ABSENT)


def test_section_is_left_out(tmp_path: Any) -> None:
    path = tmp_path / "mixture.toml"
    path.write_text(to_toml(config_of("mixture")))
    whole = load_config(path, ["moe={}", "fabric.workers=1"])
    assert kind_of(whole).name == "rounds"
    assert kind_of(whole).check(whole) == []
    with pytest.raises(UserError, match=r"expected moe=\{\}, which leaves the section out"):
        load_config(path, ["moe={composers = 0}"])


def test_folder_of_a_graph_is_known_by_its_file() -> None:
    assert GRAPH_IN_FOLDER == MODEL_FILE
