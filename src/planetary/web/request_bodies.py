"""Request bodies: read within limits of size, depth and numbers, and decoded into a typed struct."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import inspect
from starlette.requests import Request

from planetary.core import decoding
from planetary.core.configuration.ranges import describe, show_found
from planetary.core.errors import did_you_mean
from planetary.web.api_errors import ApiError, wrong

Body = TypeVar("Body", bound=msgspec.Struct)

MOST_DEPTH = 100
"""Nested arrays and objects. Decoders recurse, and so do their readers."""
MOST_VALUES = 1 << 19
"""Values of a body, and strings of it. An empty object of two bytes takes 64 in memory."""
MOST_DIGITS = 400
"""Digits of a number in a row; a float64 has 309 before the point at most."""
_MOST_NAME = 100  # characters of a wrong parameter's name that are shown, and compared with the known ones
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # an unterminated one ends with the text
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MOST_DIGITS + 1))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


async def read_body(request: Request, most: int) -> bytes:
    """Return the body, of `most` bytes at most. Raises `ApiError` (413) for a longer one."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise ApiError(413, f"the body has more than {most} bytes", code="too_large")
        parts.append(part)
    return b"".join(parts)


def parsed(data: bytes, kind: type[Body]) -> Body:
    """Decode a body. Raises `ApiError` (400) that names the fault and the nearest known parameter."""
    return converted(decoded(data), kind)


def decoded(data: bytes) -> Any:
    """Return the JSON value of a body. Raises `ApiError` (400) for anything else, and beyond the limits above."""
    _check_limits(data)
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # of numbers out of range, too
        raise ApiError(400, f"the body is no JSON in UTF-8: {error}", code="invalid_json") from None


def converted(value: Any, kind: type[Body]) -> Body:
    """Return a JSON value as a struct. Raises `ApiError` as `parsed`."""
    try:
        return decoding.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _invalid(error, value, kind) from None


def _check_limits(data: bytes) -> None:
    """Raise `ApiError` (400) for a body that would take much more time or memory than the size."""
    bare, strings = _STRING.subn(b"", data, count=MOST_VALUES)
    if strings == MOST_VALUES or bare.count(b",") + bare.count(b"[") + bare.count(b"{") > MOST_VALUES:
        raise ApiError(400, f"the body has more than {MOST_VALUES} values", code="invalid_json")
    if _LONG_NUMBER.search(bare):
        raise ApiError(400, f"the body has a number of more than {MOST_DIGITS} digits", code="invalid_json")
    brackets = np.frombuffer(bare.translate(None, _NO_BRACKETS), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1)
    if np.max(np.cumsum(steps), initial=0) > MOST_DEPTH:
        raise ApiError(400, f"the body is nested more than {MOST_DEPTH} deep", code="invalid_json")


def _invalid(error: msgspec.ValidationError, value: Any, kind: type[Any]) -> ApiError:
    text = str(error)
    if "unknown field" not in text:
        return _wrong_value(text, value, kind)
    name = text.split("`")[1][:_MOST_NAME]
    if " - at " in text:  # the field is nested: the error does not name the type that lacks it
        return ApiError(400, f"unknown parameter: {text}", param=name, code="unknown_parameter")
    known = sorted(kind.__struct_fields__)
    message = f"unknown parameter {name!r}{did_you_mean(name, known)} There are: {', '.join(known)}"
    return ApiError(400, message, param=name, code="unknown_parameter")


def _wrong_value(text: str, value: Any, kind: type[Any]) -> ApiError:
    """Return the error of an impossible value of a parameter; nested ones are named as msgspec names them."""
    place = text.partition(" - at `$.")[2].rstrip("`")
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    wanted = next((field.type for field in info.fields if field.encode_name == place), None)
    if wanted is None:
        return ApiError(400, text, param=re.split(r"[.\[]", place)[0] or None, code="invalid_value")
    return wrong(place, f"expected {describe(wanted)}, found {show_found(value[place])}")
