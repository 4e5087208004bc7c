"""The OpenAPI 3.1 document of an HTTP interface, from its operations and the types of their messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from planetary.version import __version__
from planetary.web.operations import JSON, Operation

_REFERENCE = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string", "description": "The fault and its remedy."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The parameter that is wrong."},
                "code": {"type": ["string", "null"], "description": "For programs."},
            },
        }
    },
}
_STATUSES = {
    400: "The request is wrong.",
    401: "A token is needed, or this one is not known.",
    403: "The token does not allow this.",
    404: "There is no such thing.",
    409: "It cannot be done as things are.",
    413: "The body is too large.",
    429: "Too much is asked for at once.",
    503: "Not now.",
}


def openapi_document(operations: Sequence[Operation], title: str, text: str) -> dict[str, Any]:
    """Return the document."""
    types = [one for operation in operations for one in (operation.body, operation.answer) if _is_type(one)]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        entry = paths.setdefault(_template(operation.path), {})
        entry[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": text},
        "paths": paths,
        "tags": [{"name": name} for name in dict.fromkeys(operation.group for operation in operations)],
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    refuses = sorted({*operation.refuses, *({401, 403} if operation.scope is not None else ())})
    refuses = sorted({*refuses, *({400, 413} if operation.body is not None else ())})
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.text,
        "tags": [operation.group],
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)", operation.path)
            ),
            *(
                {"name": one.name, "in": "query", "description": one.text, "schema": msgspec.json.schema(one.kind)}
                for one in operation.parameters
            ),
        ],
        "responses": {
            str(operation.status): {"description": operation.text, "content": _content(operation.answer)},
            **{
                str(status): {
                    "description": _STATUSES[status],
                    "content": {JSON: {"schema": {"$ref": _REFERENCE.format(name="Error")}}},
                }
                for status in refuses
            },
        },
        "security": [] if operation.scope is None else [{"token": []}],
    }
    if operation.scope is not None:
        described["description"] = f"Needs a token with the scope {operation.scope.word}."
    if operation.raw:
        described["requestBody"] = {"required": True, "content": {operation.raw: {"schema": {}}}}
    if operation.body is not None:
        described["requestBody"] = {"required": not operation.optional, "content": _content(operation.body)}
    return described


def _content(kind: Any) -> dict[str, Any]:
    if not _is_type(kind):
        return {kind: {"schema": {} if kind == JSON else {"type": "string"}}}
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    return {JSON: {"schema": schema}}


def _is_type(kind: Any) -> bool:
    return kind is not None and not isinstance(kind, str)


def _template(path: str) -> str:
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)
