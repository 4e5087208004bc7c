"""Journals as streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from planetary.artifacts.jsonl import JsonLinesTail
from planetary.core.configuration.ranges import Index
from planetary.core.errors import UserError
from planetary.core.redaction import redacted_toml
from planetary.web.api_errors import event_line, wrong
from planetary.web.router import EVENTS

TOGETHER = 64
"""Events sent at once, from a journal with more of them."""
KEEP_ALIVE_S = 15.0
"""A stream without events has a comment in this time, so nothing on the way takes it for dead."""
After = Annotated[Index, "Only events after so many; Last-Event-ID counts more."]
Follow = Annotated[bool, '"false": end after the present events.']


def shown_record(record: Any) -> Any:
    """Return a record of a journal, as JSON holds it, without secrets."""
    if isinstance(record, dict):
        return {key: shown_record(value) for key, value in record.items()}
    return redacted_toml(record) if isinstance(record, str) else record


def event_stream(
    request: Request,
    path: Path,
    after: int,
    follow: bool,
    *,
    grows: Callable[[float], Awaitable[None]],
    is_over: Callable[[], bool],
) -> Response:
    """Return a response with the events of a journal as `event_lines`; without `follow`, the present ones.

    Raises `ApiError` (400) for a wrong number.
    """
    text = request.headers.get("last-event-id") or str(after)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise wrong("after", f"expected the number of an event, found {text!r}")
    lines = event_lines(path, int(text), grows, is_over if follow else lambda: True)
    return StreamingResponse(lines, media_type=EVENTS, headers={"cache-control": "no-store"})


async def event_lines(
    path: Path, after: int, grows: Callable[[float], Awaitable[None]], is_over: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yield the events of a journal after the first `after`, until nothing more can come."""
    tail, number, quiet_s = JsonLinesTail(path), 0, 0.0
    while True:
        over = is_over()  # before the last look, so lines appended until then are delivered
        try:
            records = await asyncio.to_thread(tail.poll)
        except UserError as error:
            yield event_line({"message": str(error)}, name="error")
            return
        for first in range(0, len(records), TOGETHER):
            lines = []
            for record in records[first : first + TOGETHER]:
                number += 1
                if number > after:
                    lines.append(event_line(shown_record(record), number=number, name=str(record.get("event", ""))))
            if lines:
                yield b"".join(lines)
            await asyncio.sleep(0)  # a client that is gone ends the stream here, and others have their turn
        if over:
            return
        quiet_s = 0.0 if records else quiet_s + 1.0
        if quiet_s >= KEEP_ALIVE_S:
            yield b": still here\n\n"
            quiet_s = 0.0
        if not records:
            await grows(1.0)
