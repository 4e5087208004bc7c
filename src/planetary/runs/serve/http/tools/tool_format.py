"""How the models of a family write calls of tools, and reading the calls from an answer as it comes."""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from planetary.core import decoding
from planetary.core.extension_points import TOOL_FORMATS


@dataclass(frozen=True)
class Call:
    """A call of a function; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolFormat(ABC):
    """How the models of a family write calls of tools.

    Attributes:
        name: value of `serve.tool_format`.
        openings: strings that begin a call, and are no part of it.
        bare: begins a call without an opening, at the beginning of an answer and after a call; None: nothing does.
        key: name of a call's arguments in its JSON.
        forced: text after the prompt with which a call begins whose JSON object follows.
    """

    openings: ClassVar[tuple[str, ...]]
    bare: ClassVar[re.Pattern[str] | None] = None
    key: ClassVar[str] = "arguments"
    forced: ClassVar[str]

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Whether a model with this chat template writes calls so."""
        return False

    @abstractmethod
    def calls(self, text: str, *, is_whole: bool) -> tuple[list[Call], int] | None:
        """Return the calls at the beginning of a text, and their length; None: more text is needed.

        Args:
            text: after the opening.
            is_whole: whether the answer ends with it.

        Raises:
            ValueError: no call can begin so.
        """

    def shown(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]]]:
        """Return messages and tools as the chat template gets them."""
        return messages, tools

    def new_id(self) -> str:
        """Return the id of a call."""
        return f"call_{secrets.token_hex(12)}"


def format_of(template: str) -> type[ToolFormat]:
    """Return how a model with this chat template writes calls: as the first family that recognises it."""
    built_in = TOOL_FORMATS.built_in
    return next((one for one in built_in.values() if one.recognises(template)), built_in["generic"])


class _Written(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


_MARK = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)


def value_end(text: str) -> int | None:
    """Return the end of the JSON object or array a text begins with; None: it is not there yet."""
    depth = 0
    for mark in _MARK.finditer(text):
        if mark[0] in "{[":
            depth += 1
        elif mark[0] in "}]":
            depth -= 1
            if depth <= 0:
                return mark.end()
    return None


def call_of(data: bytes | msgspec.Raw) -> Call:
    """Return the call of a JSON object with `name` and `arguments` or `parameters`. Raises `ValueError`.

    Arguments keep the text the model wrote. Some models write them as a string with JSON in it.
    """
    try:
        written = decoding.from_json(data, _Written)
        arguments = bytes(written.arguments) or bytes(written.parameters) or b"{}"
        if arguments.startswith(b'"'):
            arguments = decoding.from_json(arguments, str).encode()
        decoding.from_json(arguments, dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return Call(written.name, arguments.decode())


@dataclass(frozen=True)
class CallPiece:
    """Some more of a call.

    Attributes:
        index: which call of the answer, from 0.
        arguments: the next part of the text.
        id, name: in the first piece of a call; "" later.
    """

    index: int
    arguments: str
    id: str = ""
    name: str = ""


class AnswerReader(Protocol):
    """Tells content from calls in one answer.

    Attributes:
        calls: calls so far.
        is_complete: whether nothing more is wanted of the answer.
    """

    calls: int
    is_complete: bool

    def add(self, text: str) -> list[str | CallPiece]:
        """Take text; return what is certain now: content, and pieces of calls."""
        ...

    def end(self) -> list[str | CallPiece]:
        """Return the rest."""
        ...


class CallReader:
    """Finds calls in a text a model writes freely.

    A call is given out when it is whole, so a broken one, or one of an unknown function, is content like other text.
    White space around calls is dropped.
    """

    def __init__(self, format_: ToolFormat, names: Collection[str], *, is_parallel: bool = True) -> None:
        """`names`: of the functions; `is_parallel`: whether there may be more than one call."""
        self._format, self._names, self._is_parallel = format_, names, is_parallel
        self._held = ""
        self._blank = ""  # white space, and nothing else since the last call
        self._at_call = True  # whether a call may begin without an opening
        self.calls = 0
        self.is_complete = False

    def add(self, text: str) -> list[str | CallPiece]:
        self._held += text
        return self._read(is_whole=False, is_new=bool(set(text) & {"}", "]", ">"}))

    def end(self) -> list[str | CallPiece]:
        found = self._read(is_whole=True, is_new=True)
        return found if self.calls or not self._blank else [*found, self._blank]

    def _read(self, *, is_whole: bool, is_new: bool) -> list[str | CallPiece]:
        """`is_new`: whether a call that was not whole may be so now."""
        found: list[str | CallPiece] = []
        while self._held and not self.is_complete:
            place, length = self._opening(is_whole)
            self._give(found, self._held[:place])
            self._held = self._held[place:]
            if not length and (place or not self._begins_bare()):
                break
            rest = self._held[length:]
            try:
                if (read := self._format.calls(rest, is_whole=is_whole) if is_new else None) is None and not is_whole:
                    break
                if read is None or any(call.name not in self._names for call in read[0]):
                    raise ValueError("no call")
            except ValueError:
                self._at_call = False
                self._give(found, self._held[:length])
                self._held, is_new = rest, True
                continue
            self._take(found, read[0])
            self._held, is_new = rest[read[1] :], True
        return found

    def _take(self, found: list[str | CallPiece], calls: Sequence[Call]) -> None:
        for call in calls if self._is_parallel else calls[:1]:
            found.append(CallPiece(self.calls, "", self._format.new_id(), call.name))
            found.append(CallPiece(self.calls, call.arguments))
            self.calls += 1
        self._blank, self._at_call = "", True
        self.is_complete = not self._is_parallel

    def _begins_bare(self) -> bool:
        bare = self._format.bare
        return bare is not None and self._at_call and bare.match(self._held) is not None

    def _opening(self, is_whole: bool) -> tuple[int, int]:
        """Return the place of the next opening, or of the end of certain content; and the opening's length."""
        bare = self._format.bare
        if bare is not None and self._at_call:
            if (match := bare.match(self._held)) is not None:
                return 0, match.end()
            if not is_whole and not self._held.strip(" \t\r\n;"):
                return 0, 0
        places = [(place, len(one)) for one in self._format.openings if (place := self._held.find(one)) >= 0]
        if places:
            return min(places)
        doubtful = max(
            (
                count
                for one in self._format.openings
                for count in range(1, min(len(one), len(self._held) + 1))
                if self._held.endswith(one[:count])
            ),
            default=0,
        )
        return len(self._held) - (0 if is_whole else doubtful), 0

    def _give(self, found: list[str | CallPiece], text: str) -> None:
        """Give out content, but for white space beside calls."""
        if self._at_call and not (self._blank + text).strip():
            self._blank += text
            return
        if text:
            found.append(self._blank + text)
            self._blank, self._at_call = "", False


class ForcedCallReader:
    """Reads the one call a grammar makes the model write, whose arguments are given out as they come."""

    def __init__(self, format_: ToolFormat) -> None:
        self._format = format_
        self._head = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), ' + f'"{format_.key}": ')
        self._text = self._held = ""
        self.calls = 0
        self.is_complete = False

    def add(self, text: str) -> list[str | CallPiece]:
        self._text += text
        self._held += text
        found: list[str | CallPiece] = []
        if not self.calls:
            if (match := self._head.match(self._held)) is None:
                return []
            self._held, self.calls = self._held[match.end() :], 1
            found.append(CallPiece(0, "", self._format.new_id(), msgspec.json.decode(match[1])))
        if len(self._held) > 1:  # the last brace is the whole object's
            found.append(CallPiece(0, self._held[:-1]))
            self._held = self._held[-1:]
        return found

    def end(self) -> list[str | CallPiece]:
        held, self._held = self._held, ""
        if not held or (self.calls and value_end(self._text) is not None):
            return []
        return [CallPiece(0, held) if self.calls else held]
