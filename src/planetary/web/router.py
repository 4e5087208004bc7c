"""Operations from typed functions: requests are read, answers written and both described as the signature says.

A group is an object, and each of its decorated methods an operation:

    @operation("GET", "/v1/jobs/{job}/events", group="jobs", scope=Scope.READ, refuses=(404,))
    async def stream_job_events(
        self, job: str, after: Annotated[Index, "Only events after so many."] = 0
    ) -> Annotated[Response, Media(EVENTS)]:
        \"\"\"Stream the events of a job's run, until it has ended.\"\"\"
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Annotated, Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from planetary.core import decoding
from planetary.core.configuration.ranges import describe, show_found
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, wrong

JSON, TEXT, EVENTS, HTML, BYTES = (
    "application/json",
    "text/plain; charset=utf-8",
    "text/event-stream",
    "text/html; charset=utf-8",
    "application/octet-stream",
)
Caller = NewType("Caller", str)
"""Name of the request's token; "": none."""
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])


@dataclass(frozen=True)
class Media:
    """Media type of an answer that is no JSON of a type, with its HTTP status (0: the operation's); or of an upload."""

    name: str
    status: int = 0


Upload = Annotated[AsyncIterator[bytes], Media(BYTES)]
"""A body as it arrives."""
_PLACES: Mapping[Any, str] = {Request: "request", Caller: "caller", Upload: "upload"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function.

    Attributes:
        place: "path", if the path names it; "body" for a struct, which is the request's JSON and may be left out if
            the default is None; "request", "caller" and "upload" for these types; else "query".
        kind: type, with its range.
        text: description, a string in `Annotated`.
    """

    name: str
    place: str
    kind: Any
    default: Any
    text: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        method, path: HTTP method and path; `{name}` in a path matches one segment, `{name:path}` several.
        name, text: unique name, a verb and a noun; effect in one sentence. By default the function's and its docstring.
        group: section in the document.
        scope: least scope of the token; None: no token needed, or `checks_keys`.
        checks_keys: whether the function itself asks for a key, and takes any query.
        status: HTTP status of the answer.
        refuses: error statuses beside those of every operation.
        raw: media type of a body the function reads from the request; "": none.
        given: values of parameters that the path decides.
        refusal: returns the response of an error.
        function: returns a value for JSON or a `Response`; raises `ApiError`, or a `PlanetaryError` with the reason.
        answer, media: type of the answer's JSON, None: it has none; other media types.
    """

    method: str
    path: str
    name: str = ""
    text: str = ""
    group: str = ""
    scope: Scope | None = None
    checks_keys: bool = False
    status: int = 200
    refuses: Sequence[int] = ()
    raw: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    refusal: Callable[[ApiError], Response] = ApiError.response
    function: Callable[..., Awaitable[Any]] | None = None
    parameters: Sequence[Parameter] = ()
    answer: Any = None
    media: Sequence[Media] = ()

    @property
    def template(self) -> str:
        """The path as the document and messages show it."""
        return re.sub(r"{(\w+):\w+}", r"{\1}", self.path)

    def at(self, *places: str) -> list[Parameter]:
        """Return the parameters of some places."""
        return [one for one in self.parameters if one.place in places]

    async def __call__(self, request: Request, caller: str, body: Any) -> Any:
        """Call the function. Raises `ApiError` (400) for a value that a parameter of path or query cannot have."""
        values = {"request": request, "caller": caller, "body": body, "upload": request.stream()}
        texts = {"path": request.path_params, "query": request.query_params}
        arguments = {
            one.name: _value_of(one, texts[one.place].get(one.name, "")) if one.place in texts else values[one.place]
            for one in self.parameters
        }
        assert self.function is not None
        return await self.function(**arguments, **self.given)


def operation(method: str, path: str, **more: Any) -> Callable[[F], F]:
    """Make a function an operation, or one more; `more`: see `Operation`."""

    def mark(function: F) -> F:
        function.operations = [Operation(method=method, path=path, **more), *operations_in(function)]  # type: ignore[attr-defined]
        return function

    return mark


def operations_in(function: object) -> list[Operation]:
    return getattr(function, "operations", [])


def operations_of(group: object) -> list[Operation]:
    """Return the operations of a group, in the order of the methods."""
    methods = vars(type(group)).items()
    return [_read(mark, getattr(group, name)) for name, one in methods for mark in operations_in(one)]


def _read(mark: Operation, function: Callable[..., Awaitable[Any]]) -> Operation:
    hints, in_path = get_type_hints(function, include_extras=True), re.findall(r"{(\w+)", mark.path)
    answer, notes = _parts(hints.pop("return"))
    parameters = []
    for name, one in inspect.signature(function).parameters.items():
        kind, words = _parts(hints[name])
        is_body = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        place = "path" if name in in_path else "body" if is_body else _PLACES.get(hints[name], "query")
        text = next((word for word in words if isinstance(word, str)), "")
        parameters.append(Parameter(name, place, kind if is_body else hints[name], one.default, text))
    return replace(
        mark,
        name=mark.name or function.__name__,
        text=mark.text or " ".join((inspect.getdoc(function) or "").split()),
        function=function,
        parameters=[one for one in parameters if one.name not in mark.given],
        answer=answer,
        media=[one for one in notes if isinstance(one, Media)],
    )


def _parts(hint: Any) -> tuple[Any, Sequence[Any]]:
    """Return the type in an annotation, without None and `Response`, and its notes; None where no type is left."""
    hint, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    kinds = get_args(hint) if get_origin(hint) in (Union, type(int | str)) else (hint,)
    return next((one for one in kinds if one not in (Response, NoneType)), None), notes


def _value_of(parameter: Parameter, text: str) -> Any:
    if parameter.place == "query" and not text:
        return parameter.default
    try:
        return decoding.convert(text, parameter.kind, strict=False)
    except msgspec.ValidationError:
        expected = describe(msgspec.inspect.type_info(parameter.kind))
        raise wrong(parameter.name, f"expected {expected}, found {show_found(text)}") from None
