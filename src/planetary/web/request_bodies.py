"""Request bodies: read within a limit, and decoded into a typed struct."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from planetary.core.errors import did_you_mean
from planetary.web.api_errors import ApiError

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
        raise _invalid(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON in UTF-8: {error}", code="invalid_json") from None


def _invalid(error: msgspec.ValidationError, kind: type[Any]) -> ApiError:
    text = str(error)
    if "unknown field" not in text:
        return ApiError(400, text, code="invalid_value")
    name = text.split("`")[1]
    if " - at " in text:  # the field is nested: the error does not name the type that lacks it
        return ApiError(400, f"unknown parameter: {text}", param=name, code="unknown_parameter")
    known = sorted(kind.__struct_fields__)
    message = f"unknown parameter {name!r}{did_you_mean(name, known)} There are: {', '.join(known)}"
    return ApiError(400, message, param=name, code="unknown_parameter")
