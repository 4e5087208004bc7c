"""The tools of a request: checked, and as the schema of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from planetary.core import decoding
from planetary.runs.serve.http.tools.tool_format import AnswerReader, CallReader, ForcedCallReader, ToolFormat
from planetary.web.api_errors import ApiError, wrong

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_ONE, _MANY, _LISTS = (
    ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else"),
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
    ("anyOf", "oneOf", "allOf", "prefixItems"),
)
"""Keywords of JSON Schema with a schema, with schemas by name, and with a list of schemas."""


class Function(msgspec.Struct, frozen=True):
    """The function of a tool. `strict` has no effect with the choice "auto": calls are as the model writes them."""

    name: Annotated[str, Meta(pattern=r"^[\w.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool of a request."""

    type: Literal["function"]
    function: Function


class _Named(msgspec.Struct, frozen=True):
    name: str


class _Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: _Named
    type: Literal["function"] = "function"


@dataclass(frozen=True)
class ToolUse:
    """Which calls an answer may have.

    Attributes:
        functions: that may be called; none: nothing is called.
        is_forced: whether the answer is a call.
        is_parallel: whether it may have several calls.
    """

    functions: Sequence[Function] = ()
    is_forced: bool = False
    is_parallel: bool = True

    def reader(self, format_: ToolFormat) -> AnswerReader:
        """Return a reader of one answer."""
        if self.is_forced:
            return ForcedCallReader(format_)
        return CallReader(format_, {one.name for one in self.functions}, is_parallel=self.is_parallel)

    def schema(self, key: str) -> dict[str, Any]:
        """Return the JSON schema of a call; `key` is the name of its arguments."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": one.name},
                    key: _moved(one.parameters or {"type": "object"}, f"#/anyOf/{i}/properties/{key}"),
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
            for i, one in enumerate(self.functions)
        ]
        return {"anyOf": calls}


def tool_use_of(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, parallel: bool) -> ToolUse:
    """Return the calls a request allows. Raises `ApiError` for malformed tools or choices."""
    functions = [_function(one, f"tools[{i}]") for i, one in enumerate(tools)]
    if twice := [one.name for i, one in enumerate(functions) if one.name in {two.name for two in functions[:i]}]:
        raise wrong("tools", f"there are two functions {twice[0]!r}")
    if choice == "none" or (not functions and choice in (None, "auto")):
        return ToolUse()
    if not functions:
        raise wrong("tool_choice", "there are no tools")
    if choice in (None, "auto", "required"):
        return ToolUse(functions, choice == "required", parallel)
    try:
        name = decoding.convert(choice, _Choice).function.name
    except msgspec.ValidationError:
        expected = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise wrong("tool_choice", f"expected {expected}, found {choice!r}") from None
    named = [one for one in functions if one.name == name]
    if not named:
        known = ", ".join(one.name for one in functions)
        raise wrong("tool_choice", f"there is no function {name!r} among the tools: {known}")
    return ToolUse(named, True, parallel)


def shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as a chat template gets it: without nulls, and without `strict`, which is not for the model."""
    function = tool["function"]
    return {**tool, "function": {key: one for key, one in function.items() if one is not None and key != "strict"}}


def _function(tool: Mapping[str, Any], place: str) -> Function:
    try:
        function = decoding.convert(tool, Tool).function
    except msgspec.ValidationError as error:
        raise _refused(place, str(error)) from None
    if function.parameters is not None:
        where = f"{place}.function.parameters"
        if function.parameters.get("type", "object") != "object":
            raise _refused(where, f'the arguments of {function.name!r} are an object: expected "type": "object"')
        for path, fault in _faults(function.parameters, function.parameters, where):
            raise _refused(path, f"{fault}, in the JSON schema of {function.name!r}")
    return function


def _refused(place: str, fault: str) -> ApiError:
    return ApiError(400, f"{place}: {fault}", param="tools", code="invalid_value")


def _faults(schema: Any, root: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
    """Yield the places of what can be in no JSON schema, and why."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield place, "expected an object"
        return
    types = schema.get("type", [])
    for one in types if isinstance(types, list) else [types]:
        if not isinstance(one, str) or one not in _TYPES:
            yield f"{place}.type", f"there is no type {one!r}"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        yield f"{place}.required", "expected a list of names"
    if not isinstance(schema.get("enum", []), list):
        yield f"{place}.enum", "expected a list of values"
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and not _leads(reference, root):
        yield f"{place}.$ref", f"{reference!r} leads nowhere"
    for key in _ONE:
        if not isinstance(schema.get(key, []), list):  # `items` may be a list in older drafts
            yield from _faults(schema[key], root, f"{place}.{key}")
    for key in _MANY:
        many = schema.get(key, {})
        if not isinstance(many, dict):
            yield f"{place}.{key}", "expected an object"
            continue
        for name, one in many.items():
            yield from _faults(one, root, f"{place}.{key}.{name}")
    for key in _LISTS:
        several = schema.get(key, [])
        if not isinstance(several, list):
            yield f"{place}.{key}", "expected a list"
            continue
        for i, one in enumerate(several):
            yield from _faults(one, root, f"{place}.{key}[{i}]")


def _leads(reference: str, root: Any) -> bool:
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(root, dict) or name not in root:
            return isinstance(root, list) and name.isdecimal() and int(name) < len(root)
        root = root[name]
    return True


def _moved(schema: Any, place: str) -> Any:
    """Return a schema as a part of another: references to itself begin with its new place."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + one[1:] if key == "$ref" and isinstance(one, str) and one[:1] == "#" else _moved(one, place)
        for key, one in schema.items()
    }
