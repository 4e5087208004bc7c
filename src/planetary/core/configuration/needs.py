"""Whether the parts of a configuration go together: each part declares its needs, and one check reads them.

An object named by a key (`extension_points`) declares `needs`, the used optional `keys` of its section, and an
`objection` to their values. A section of the configuration has an `objection` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from planetary.core.configuration.ranges import RELAY, ExtensionPoint
from planetary.core.errors import UserError

if TYPE_CHECKING:
    from planetary.core.configuration.schema import Config


class Declares(msgspec.Struct, frozen=True):
    """A condition on the object that a key names: the attribute has this truth value."""

    attribute: str
    value: bool = True


class Need(msgspec.Struct, frozen=True):
    """A demand on the value of another key. Exactly one of the four conditions is set.

    Attributes:
        key: "section.key".
        why: reason, for people.
        among: allowed values.
        unlike: values that are not allowed.
        having: attribute that the object which the key names must declare as true.
        lacking: attribute that it must not.
        when: values of other keys, without which there is no such need; `Declares`: of an object's attribute.
    """

    key: str
    why: str
    among: tuple[Any, ...] = ()
    unlike: tuple[Any, ...] = ()
    having: str = ""
    lacking: str = ""
    when: Mapping[str, Any] = {}


KEY_NEEDS: Mapping[tuple[str, Any], tuple[Need, ...]] = {
    ("sync.ring_compression", ...): (
        Need("sync.topology", "a ring quantises float32 deltas only", having="in_ring"),
        Need("sync.precision", "a ring quantises float32 deltas only", among=("f32",)),
        Need("outer.merge", "a ring quantises float32 deltas only", among=("mean",)),
    ),
    ("sync.broadcast_compression", ...): (
        Need(
            "sync.compression",
            "end parameters of workers that have not all of the parameters would lose the rest; take, for example, "
            '"float32"',
            unlike=("none",),
        ),
    ),
    ("sync.broadcast_compression", RELAY): (
        Need("sync.overlap", "workers take the outer step from all updates of a whole round", having="relays"),
        Need(
            "outer.optimizer",
            "workers take the outer step themselves, and newcomers would not have the moments",
            among=("nesterov",),
        ),
        Need(
            "outer.momentum",
            "workers take the outer step themselves, and newcomers would not have the velocity",
            among=(0.0,),
        ),
    ),
    ("sync.start_compression", ...): (
        Need("sync.compression", "a start in a codec is for workers that send deltas", unlike=("none",)),
        Need("sync.overlap", "a start in a codec is for workers that send all parameters", lacking="fragmented"),
    ),
}
"""Needs of keys that name no object: (key, value) -> needs; `...`: every value but the default."""

USES: Mapping[str, str] = {
    "overlap": "sync",
    "topology": "sync",
    "merge rule": "outer",
    "outer optimizer": "outer",
    "inner optimizer": "optimizer",
    "schedule": "optimizer",
}
"""Kind of object -> the section whose optional keys its objects declare in `keys`."""


class _Values:
    """A configuration by dotted keys, and the classes of the objects that it names."""

    def __init__(self, config: Config, objects: Mapping[tuple[str, str], ExtensionPoint], *, own: bool) -> None:
        self.config, self.own = config, own
        self.points = {f"{section}.{key}": point for (section, key), point in objects.items()}

    def of(self, key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(self.config.section(section), name)

    def class_of(self, key: str) -> Any:
        """Return the class named by a key; None: it names none, or one in a file not to be run."""
        from planetary.core.extension_points import EXTENSION_POINTS

        point, name = self.points[key], self.of(key)
        if name in point.also:
            return None
        registry = EXTENSION_POINTS[point.kind]
        return registry.find(name) if self.own and not registry.apart else registry.declared(name)

    def meets(self, key: str, wanted: Any) -> bool:
        """Whether a key has a value, or names an object that `Declares` an attribute; no object has any true."""
        if isinstance(wanted, Declares):
            return bool(getattr(self.class_of(key), wanted.attribute, False)) == wanted.value
        return self.of(key) == wanted

    def able(self, key: str, attribute: str, wanted: bool) -> str:
        """Return the values of a key that names objects which declare an attribute, or do not, in words."""
        from planetary.core.extension_points import EXTENSION_POINTS

        point = self.points[key]
        built_in = EXTENSION_POINTS[point.kind].built_in.items()
        also = () if wanted else point.also
        return _listed([*also, *(name for name, one in built_in if getattr(one, attribute) == wanted)])


def check_needs(
    config: Config, origin: str, objects: Mapping[tuple[str, str], ExtensionPoint], *, own: bool = False
) -> None:
    """Raise `UserError` with the first unmet need, or the first key unused by the configuration.

    Args:
        config: to check.
        origin: where it was written.
        objects: section and key of each object that it names.
        own: look into users' files, too, which runs them.
    """
    values = _Values(config, objects, own=own)
    for holder, needs in _needs_of(values):
        for need in needs:
            _check(need, holder, values, origin)
    for key, point in values.points.items():
        if (section := key.partition(".")[0]) == USES.get(point.kind):
            _check_used(section, key, values, origin)


def _needs_of(values: _Values) -> Iterator[tuple[str, tuple[Need, ...]]]:
    for key in values.points:
        found = values.class_of(key)
        yield key, () if found is None else found.needs
    for (key, wanted), needs in KEY_NEEDS.items():
        value = values.of(key)
        if value == wanted or (wanted is ... and value != _default(values.config, key)):
            yield key, needs


def _check(need: Need, holder: str, values: _Values, origin: str) -> None:
    if not all(values.meets(key, wanted) for key, wanted in need.when.items()):
        return
    value, expected = values.of(need.key), ""
    if need.among:
        expected = "" if value in need.among else _listed(need.among)
    elif need.unlike:
        point = values.points.get(need.key)
        other = f"another value than {_listed(need.unlike)}" if point is None else f"a {point.kind}"
        expected = other if value in need.unlike else ""
    elif (found := values.class_of(need.key)) is not None and bool(getattr(found, need.having or need.lacking)) != bool(
        need.having
    ):
        expected = values.able(need.key, need.having or need.lacking, bool(need.having))
    if expected:
        beside = "".join(f" and {key} = {_shown(values.of(key))}" for key in need.when)
        raise UserError(
            f"{origin}: {need.key}: expected {expected} with {holder} = {_shown(values.of(holder))}{beside}, found "
            f"{_shown(value)}: {need.why}"
        )


def _check_used(section: str, holder: str, values: _Values, origin: str) -> None:
    """Refuse an optional key without effect on the object in use, and values outside its domain."""
    from planetary.core.extension_points import EXTENSION_POINTS

    registry, chosen = EXTENSION_POINTS[values.points[holder].kind], values.class_of(holder)
    if chosen is None:
        return
    users = registry.built_in
    for key in sorted({key for one in users.values() for key in one.keys} - set(chosen.keys)):
        found, default = values.of(f"{section}.{key}"), _default(values.config, f"{section}.{key}")
        if found != default:
            able = [name for name, one in users.items() if key in one.keys]
            raise UserError(
                f"{origin}: {section}.{key}: expected {_shown(default)} with {holder} = {_shown(values.of(holder))}, "
                f"found {_shown(found)}: only {' and '.join(able)} use it"
            )
    if objection := chosen.objection(values.config):
        raise UserError(f"{origin}: {objection}")


def _default(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(type(config.section(section))(), name)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        texts = all(isinstance(one, str) for one in value)
        return "none" if not value else f"[{', '.join(map(_shown, value))}]" if texts else "a table"
    return str(value)


def _listed(values: Any) -> str:
    shown = [_shown(value) for value in values]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
