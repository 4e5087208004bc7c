"""Request bodies: read within a limit, and decoded into a typed struct."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import Request

from planetary.core.configuration.ranges import describe, show_found
from planetary.core.errors import did_you_mean
from planetary.web.api_errors import ApiError, wrong

Body = TypeVar("Body", bound=msgspec.Struct)


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
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error, data, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON in UTF-8: {error}", code="invalid_json") from None


def _invalid(error: msgspec.ValidationError, data: bytes, kind: type[Any]) -> ApiError:
    text = str(error)
    if "unknown field" not in text:
        return _wrong_value(text, data, kind)
    name = text.split("`")[1]
    if " - at " in text:  # the field is nested: the error does not name the type that lacks it
        return ApiError(400, f"unknown parameter: {text}", param=name, code="unknown_parameter")
    known = sorted(kind.__struct_fields__)
    message = f"unknown parameter {name!r}{did_you_mean(name, known)} There are: {', '.join(known)}"
    return ApiError(400, message, param=name, code="unknown_parameter")


def _wrong_value(text: str, data: bytes, kind: type[Any]) -> ApiError:
    """Return the error of a value that its parameter cannot have; nested ones are named as msgspec names them."""
    place = text.partition(" - at `$.")[2].rstrip("`")
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    wanted = next((field.type for field in info.fields if field.encode_name == place), None)
    if wanted is None:
        return ApiError(400, text, param=re.split(r"[.\[]", place)[0] or None, code="invalid_value")
    return wrong(place, f"expected {describe(wanted)}, found {show_found(msgspec.json.decode(data)[place])}")
