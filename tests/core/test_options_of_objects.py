"""An option that belongs to an object is refused beside every object that does not declare it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from planetary.core.config import config_from_tables
from planetary.core.configuration.keys import FIELDS, extension_keys
from planetary.core.configuration.needs import USES
from planetary.core.errors import UserError
from planetary.core.extension_points import EXTENSION_POINTS


def another(section: str, key: str) -> Any:
    """Return a value of a key that is not its default."""
    field = FIELDS[section][key]
    bare = field.type.type if isinstance(field.type, inspect.Metadata) else field.type
    match bare:
        case inspect.LiteralType():
            return next(value for value in bare.values if value != field.default)
        case inspect.FloatType():
            return 0.4 if field.default != 0.4 else 0.3
        case inspect.IntType():
            return field.default + 1
        case _:
            return ["x*"]


def unused() -> Iterator[tuple[str, str, str]]:
    """Yield the key of an object, a name, and an option which only other objects of the kind declare."""
    for (section, key), point in extension_keys(()).items():
        if USES.get(point.kind) != section:
            continue
        objects = EXTENSION_POINTS[point.kind].built_in
        options = sorted({option for one in objects.values() for option in one.keys})
        yield from (
            (f"{section}.{key}", name, one) for name in objects for one in options if one not in objects[name].keys
        )


CASES = list(unused())


def test_there_are_objects_with_options() -> None:
    assert {key for key, _, _ in CASES} == {
        "optimizer.name",
        "optimizer.schedule",
        "outer.merge",
        "sync.overlap",
    }


@pytest.mark.parametrize(("key", "name", "option"), CASES, ids=lambda value: value)
def test_an_option_of_another_object_is_refused(key: str, name: str, option: str) -> None:
    section, _, named = key.partition(".")
    with pytest.raises(UserError) as refused:
        config_from_tables({section: {named: name, option: another(section, option)}})
    assert f"{section}.{option}: expected" in str(refused.value) or key in str(refused.value)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"data": {"shuffle_leases": True}}, 'data.shuffle_leases: only data.sampling = "fifo"'),
        ({"optimizer": {"weight_decay": 0.0, "no_decay": ["*"]}}, "optimizer.no_decay: nothing decays"),
    ],
)
def test_a_key_that_needs_another_is_refused_alone(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config_from_tables(tables)
