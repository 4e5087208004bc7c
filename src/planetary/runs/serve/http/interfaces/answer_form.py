"""The interface of an answer's form, which is written whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from planetary.runs.serve.http.generation import Choice, ChoicePiece
from planetary.web.api_errors import ApiError


class AnswerForm(Protocol):
    """The form of one answer. `generated` is the number of tokens so far."""

    def whole(self, choices: Sequence[Choice], generated: int) -> dict[str, Any]:
        """Return the answer in one piece."""
        ...

    def begin(self) -> Iterator[bytes]:
        """Yield the events before every piece."""
        ...

    def events(self, piece: ChoicePiece) -> Iterator[bytes]:
        """Yield the events of a piece."""
        ...

    def end(self, generated: int) -> Iterator[bytes]:
        """Yield the events after every piece."""
        ...

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yield the events of a failure, after which nothing follows."""
        ...
