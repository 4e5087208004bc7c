"""Values of a published model's `config.json`: checked numbers, and rotary positions in their several forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planetary.core.errors import UserError

CONFIG_FILE = "config.json"
ABSENT = object()
_SCALINGS: Mapping[str, tuple[str, ...]] = {  # types of stretched rotary positions, and the keys of each
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
_OLD_NAMES = {"su": "longrope"}
_LARGEST_SIZE, _MOST_LAYERS = 2**31 - 1, 4096
_LARGEST_NUMBER = 1e12  # largest base, factor or length; the largest published base is 1e9


def require_only(published: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `UserError` where a key has another value than those; `...` among them: any."""
    for name, values in only.items():
        found = published.get(name, ABSENT)
        if found is not ABSENT and found not in values and ... not in values:
            raise UserError(f"{name} is {found!r:.80}: the model here has {values[0]!r} only")


def read_size(published: Mapping[str, Any], name: str) -> int:
    """Return a whole number of at least 1. Raises `UserError`."""
    value, most = published.get(name), _MOST_LAYERS if "layer" in name else _LARGEST_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UserError(f"{CONFIG_FILE} says {name} is {value!r}: expected a whole number from 1 to {most}")
    return value


def read_number(published: Mapping[str, Any], name: str, absent: float | None = None) -> float:
    """Return a number of at least 0. Raises `UserError`."""
    value = published.get(name, absent)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _LARGEST_NUMBER:
        raise UserError(f"{CONFIG_FILE} says {name} is {value!r}: expected a number from 0 to {_LARGEST_NUMBER:g}")
    return float(value)


def read_rope(published: Mapping[str, Any], n_position: int, theta: float, part: float | None = None) -> dict[str, Any]:
    """Return `rope_base`, and where they are not plain `rope_scaling` and `rope_fraction`.

    `rope_parameters` has them since transformers 5, `rope_theta` and `rope_scaling` before.

    Args:
        published: the `config.json`.
        n_position: longest text, in tokens.
        theta: the base where no key has it.
        part: of a head's channels that turn where no key has it; None: the family turns all.

    Raises:
        UserError: the model here has no such positions.
    """
    rope = {"rope_theta": published.get("rope_theta", theta), **read_table(published, "rope_scaling")}
    rope |= read_table(published, "rope_parameters")
    found: dict[str, Any] = {"rope_base": read_number(rope, "rope_theta")}
    del rope["rope_theta"]
    turning = rope.pop("partial_rotary_factor", None)
    if part is not None:
        named = {"partial_rotary_factor": part if turning is None else turning}
        found["rope_fraction"] = read_number(named, "partial_rotary_factor")
    elif turning not in (None, 1, 1.0):
        raise UserError(f"partial_rotary_factor is {turning!r}: the model here turns all channels")
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    kind = _OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    rope.pop("type", None)
    if not isinstance(kind, str) or kind not in ("default", *_SCALINGS):
        types = ", ".join(f"'{one}'" for one in ("default", *_SCALINGS))
        raise UserError(f"rotary positions of type {kind!r}: the model here has those of types {types}")
    if kind == "default":
        return found
    if kind == "yarn":
        rope.setdefault("original_max_position_embeddings", n_position)
    if kind == "longrope":  # the model's own key counts before that of the positions, as in transformers
        name = "original_max_position_embeddings"
        rope[name] = read_size({name: published.get(name) or rope.get(name) or n_position}, name)
        if rope[name] < 2:  # the amplitude divides by its logarithm
            raise UserError(f"{name} is {rope[name]}: rotary positions of type 'longrope' take 2 tokens at least")
        rope["factor"] = rope.get("factor") or n_position / rope[name]
    unknown = sorted(name for name, value in rope.items() if name not in _SCALINGS[kind] and value is not None)
    if unknown:
        raise UserError(f"rotary positions of type {kind!r} have {unknown[0]}, which the model here has not")
    scaling = {name: rope[name] for name in _SCALINGS[kind] if rope.get(name) is not None}
    for name, value in scaling.items():
        if name in ("short_factor", "long_factor"):
            scaling[name] = _read_divisors(value, name)
        elif name != "truncate":
            read_number(scaling, name)
    missing = next((name for name in _SCALINGS[kind][-2:] if kind == "longrope" and name not in scaling), None)
    if missing:
        raise UserError(f"rotary positions of type 'longrope' lack {missing}: expected a number a pair of channels")
    return {**found, "rope_scaling": scaling if kind == "llama3" else {"rope_type": kind, **scaling}}


def _read_divisors(value: Any, name: str) -> tuple[float, ...]:
    """Return numbers above 0. Raises `UserError`."""
    numbers = value if isinstance(value, list | tuple) else ()
    if not numbers or not all(isinstance(one, int | float) and 0 < one <= _LARGEST_NUMBER for one in numbers):
        raise UserError(f"{CONFIG_FILE} says {name} is {value!r:.80}: expected numbers above 0, one a pair of channels")
    return tuple(map(float, numbers))


def written_rope(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that `read_rope` reads."""
    scaling = {name: value for name, value in (options.get("rope_scaling") or {}).items() if value is not None}
    rope = {"rope_type": "llama3", **scaling} if scaling else {"rope_type": "default"}
    return {
        "rope_parameters": {"rope_theta": options["rope_base"], **rope},
        "rope_theta": options["rope_base"],  # this and the next for transformers before 5
        "rope_scaling": rope if scaling else None,
    }


def read_table(published: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object; an empty one where there is none. Raises `UserError`."""
    value = published.get(name)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{CONFIG_FILE} says {name} is {value!r}: expected an object, or null")
    return value or {}
