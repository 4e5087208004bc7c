"""The OpenAPI document of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from planetary.version import __version__
from planetary.web.access import Scope
from planetary.web.api_errors import CODES
from planetary.web.router import JSON, Operation

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
                "code": {
                    "type": ["string", "null"],
                    "description": "For programs. Those of the gateway itself: "
                    + "; ".join(f"{code}: {meaning}" for code, (_, meaning) in CODES.items())
                    + ".",
                },
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
    416: "The range begins beyond the end of the file.",
    429: "Too much is asked for at once.",
    503: "Not now.",
}


def openapi_document(
    operations: Sequence[Operation], title: str, text: str, needs: Callable[[Scope], str] = "the scope {0.word}".format
) -> dict[str, Any]:
    """Return the document; `needs` says which token an operation of a scope needs."""
    kinds = [one.kind for operation in operations for one in operation.at("path", "query", "body")]
    kinds += [operation.answer for operation in operations if operation.answer is not None]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        security = [{"token": []}] if one.scope is not None or one.checks_keys else []
        described = {**_described(one), "security": security}
        if one.scope is not None:
            described["description"] = f"Needs {needs(one.scope)}."
        paths.setdefault(one.template, {})[one.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": text},
        "paths": paths,
        "tags": [{"name": name} for name in dict.fromkeys(one.group for one in operations)],
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    bodies = operation.at("body")
    refuses = {400, *operation.refuses, *((413,) if bodies else ())}
    refuses |= {401, 403, 429} if operation.scope is not None else set()
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.text,
        "tags": [operation.group],
        "parameters": [
            {"name": one.name, "in": "path", "required": True, "schema": _schema(one.kind)}
            if one.place == "path"
            else {"name": one.name, "in": "query", "description": one.text, "schema": _schema(one.kind)}
            for one in operation.at("path", "query")
        ],
        "responses": {**_answers(operation), **{str(status): _refusal(status) for status in sorted(refuses)}},
    }
    raw = operation.raw or next((one.kind.__metadata__[0].name for one in operation.at("upload")), "")
    if raw:
        described["requestBody"] = {"required": True, "content": {raw: {"schema": {}}}}
    for one in bodies:
        content = {JSON: {"schema": _schema(one.kind)}}
        described["requestBody"] = {"required": one.default is not None, "content": content}
    return described


def _answers(operation: Operation) -> dict[str, Any]:
    contents: dict[int, dict[str, Any]] = {}
    if operation.answer is not None:
        contents[operation.status] = {JSON: {"schema": _schema(operation.answer)}}
    for one in operation.media:
        schema = {} if one.name == JSON else {"type": "string"}
        contents.setdefault(one.status or operation.status, {})[one.name] = {"schema": schema}
    return {str(status): {"description": operation.text, "content": content} for status, content in contents.items()}


def _refusal(status: int) -> dict[str, Any]:
    codes = ", ".join(code for code, (statuses, _) in CODES.items() if status in statuses)
    text = f"{_STATUSES[status]} Codes: {codes}." if codes else _STATUSES[status]
    return {"description": text, "content": {JSON: {"schema": {"$ref": _REFERENCE.format(name="Error")}}}}


def _schema(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    return schema
