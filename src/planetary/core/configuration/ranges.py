"""The types of options with their ranges, the words for them, and the check of a value against the type."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect

from planetary.core import decoding
from planetary.core.errors import UserError
from planetary.core.registry import OWN

Count = Annotated[int, Meta(ge=1)]
Index = Annotated[int, Meta(ge=0)]
MOST_FRAGMENTS = 256
FragmentCount = Annotated[int, Meta(ge=1, le=MOST_FRAGMENTS)]
Seed = Annotated[int, Meta(ge=0, lt=2**32)]
ServedBatch = Annotated[int, Meta(ge=1, le=64)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]  # decay of a moving average: 0 keeps nothing, 1 would keep everything
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
ProperFraction = Annotated[float, Meta(gt=0, lt=1)]
TrimmedFraction = Annotated[float, Meta(ge=0, lt=0.5)]  # fraction at each end
Text = Annotated[str, Meta(min_length=1)]
MOST_NAME = 255
"""Bytes of a file's name; no file system has longer ones."""


class ExtensionPoint(msgspec.Struct, frozen=True):
    """What a key that names an object takes.

    Attributes:
        kind: of the object, in `extension_points.EXTENSION_POINTS`.
        also: values beside the names of objects.
        having: attribute the object must declare as true; "": none.
    """

    kind: str
    also: tuple[str, ...] = ()
    having: str = ""


def extension(kind: str, *also: str, having: str = "") -> Meta:
    """Return the constraint of a key that names an object; see `ExtensionPoint`."""
    return Meta(min_length=0 if "" in also else 1, extra={"extension": ExtensionPoint(kind, also, having)})


def extension_of(kind: inspect.Type) -> ExtensionPoint | None:
    """Return the kind of object a key's type names; None: it names none."""
    return (kind.extra or {}).get("extension") if isinstance(kind, inspect.Metadata) else None


Memory = Annotated[
    str,
    Meta(
        pattern=r"^(none|blocks|\d+(\.\d+)? ?([KMG]?B|[KMG]iB)?)$",
        description='"none", "blocks" or a string of bytes such as "200MiB"',
    ),
]
Factors = Literal["f32", "bf16", "f16"]
Rounding = Literal["nearest", "stochastic"]
InnerState = Literal["persist", "reset"]
ScheduleName = Annotated[str, extension("schedule")]
ArgumentRole = Literal["param", "statistic", "buffer", "input", "target", "key", "step"]
Delivery = Literal["path", "gateway"]
LeaseOrder = Literal["random", "fifo", "sequence"]
Weighting = Literal["tokens", "tokens_squared"]
"""Weight of a contribution. tokens: target tokens (DiLoCo). tokens_squared: tokens² / steps (Decoupled DiLoCo), which
is the same where all take as many steps with batches of one size."""
LeaseShares = Literal["equal", "measured"]
RELAY = "relay"
"""Among the names of the broadcast's codecs."""
RingPrecision = Literal["f32", "f64"]
BaseWeights = Literal["f32", "int8", "int4"]
WeightPrecision = Literal["f32", "bf16", "int8", "int4"]


def describe(kind: inspect.Type) -> str:
    """Describe the values of a key in words, e.g. `"a whole number >= 1"`."""
    if (point := extension_of(kind)) is not None:
        from planetary.core.extension_points import EXTENSION_POINTS

        registry = EXTENSION_POINTS[point.kind]
        able = [name for name, one in registry.built_in.items() if getattr(one, point.having or "name")]
        names = ", ".join(f'"{name}"' for name in (*point.also, *able))
        return f"one of {names}, an entry point of {registry.group}, or {OWN}"
    if isinstance(kind, inspect.Metadata):
        return (kind.extra_json_schema or {}).get("description") or describe(kind.type)
    if isinstance(kind, inspect.AnyType):
        return "any value"
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        limits = [
            f"{sign} {limit}"
            for sign, limit in ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
            if limit is not None
        ]
        noun = "a whole number" if isinstance(kind, inspect.IntType) else "a finite number"
        return " ".join([noun, " and ".join(limits)]).strip()
    if isinstance(kind, inspect.UnionType):
        return " or ".join(describe(one) for one in kind.types if not isinstance(one, inspect.NoneType))
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(f'"{value}"' for value in kind.values)
    if isinstance(kind, inspect.EnumType):
        return "one of " + ", ".join(one.value for one in kind.cls)
    if isinstance(kind, inspect.StrType):
        return "a string that is not empty" if kind.min_length else "a string"
    if isinstance(kind, inspect.DictType):
        value = kind.value_type
        return "a table" if isinstance(value, inspect.AnyType) else f"a table whose values are {describe(value)}"
    if isinstance(kind, inspect.StructType):
        return f"tables with {', '.join(field.name for field in kind.fields)}"
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return f"an array whose values are {describe(kind.item_type)}"
    raise AssertionError(f"no words for {kind}")  # a schema change must add them


def show_found(value: object) -> str:
    """Name a value and the TOML type, short enough for an error message."""
    names = {
        bool: "boolean",
        int: "whole number",
        float: "number",
        str: "string",
        list: "array",
        dict: "table",
    }
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # Python writes no number of more than 4300 digits
        text = "one too long to show"
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} ({names.get(type(value), type(value).__name__)})"


def convert_value(value: object, wanted: Any) -> Any:
    """Return `value` as a type with a range.

    Raises `ValueError` for another type, a value out of range, a NaN, a number beyond 64 bits, or a string no file or
    line of text can have.
    """
    # Comparisons with a NaN are all false, so the ranges in the types do not catch it.
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("beyond 64 bits")
    if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
        raise ValueError("no text")
    return decoding.convert(value, wanted, strict=True)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


@functools.cache
def field_types(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return field -> annotated type; msgspec evaluates a class's annotations anew at each call."""
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


@functools.cache
def field_infos(struct: type[msgspec.Struct]) -> Mapping[str, inspect.Field]:
    """Return field -> its type as msgspec describes it, default included."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.name: field for field in info.fields}


def check_ranges(options: msgspec.Struct) -> None:
    """Check every field of a struct made in Python; files are checked when they are read.

    Raises:
        UserError: naming the first field that is of another type or out of range.
    """
    for name, wanted in field_types(type(options)).items():
        value = getattr(options, name)
        try:
            convert_value(value, wanted)
        except ValueError:  # msgspec's own error is one
            kind = field_infos(type(options))[name].type
            raise UserError(f"{name}: expected {describe(kind)}, found {show_found(value)}") from None


def check_argument(name: str, value: Any, kind: Any) -> None:
    """Check an argument of a public function; scalars of NumPy count as Python's.

    Args:
        name: of the argument.
        value: as it was given.
        kind: type with range, as `Count`.

    Raises:
        UserError: the value is of another type or out of range.
    """
    plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    try:
        convert_value(plain, kind)
    except ValueError:  # msgspec's own error is one
        wanted = describe(inspect.type_info(kind))
        raise UserError(f"{name}: expected {wanted}, found {show_found(value)}") from None


def check_instance(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise `UserError` unless an argument of a public function is of one of these classes; `wanted`: in words."""
    if not isinstance(value, kinds):
        raise UserError(f"{name}: expected {wanted}, found {show_found(value)}")


def check_path(name: str, value: object) -> None:
    """Raise `UserError` unless an argument of a public function is a path, or None."""
    check_instance(name, value, (str, os.PathLike, NoneType), "a path")
