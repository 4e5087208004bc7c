"""Drives one machine on an event loop: events in from anywhere, instructions out to one function, ticks on time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from planetary.core.clock import Clock
from planetary.machine.events import Event, Instruction, Tick
from planetary.machine.machine import Machine

Result = TypeVar("Result")


class Shell(Generic[Result]):
    """Feeds a machine, one event at a time, until its instructions are answered with a result."""

    def __init__(
        self,
        machine: Machine[Event, Instruction],
        carry_out: Callable[[Instruction], Result | None],
        clock: Clock,
        observe: Callable[[Machine[Event, Instruction]], None] | None = None,
    ) -> None:
        """`carry_out` must not block; it returns something else than None to end `run` with that.

        `observe` is called with the machine after each event that it handled.
        """
        self._machine = machine
        self._carry_out = carry_out
        self._clock = clock
        self._observe = observe
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def post(self, event: Event) -> None:
        """Queue an event. May be called from any thread once `run` has begun, and from the loop's before."""
        if self._loop is None or self._is_own_loop():
            self._events.put_nowait(event)
        else:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _is_own_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:  # no loop runs in this thread
            return False

    async def run(self) -> Result:
        """Go on until `carry_out` returns a result; events that are queued by then are not handled."""
        self._loop = asyncio.get_running_loop()
        result = self._handle(Tick())
        while result is None:
            result = self._handle(await self._next_event())
        return result

    def _handle(self, event: Event) -> Result | None:
        instructions: Sequence[Instruction] = self._machine.handle(event, self._clock.monotonic())
        if self._observe is not None:
            self._observe(self._machine)
        result = None
        for instruction in instructions:
            answer = self._carry_out(instruction)
            result = answer if result is None else result
        return result

    async def _next_event(self) -> Event:
        deadline = self._machine.next_deadline()
        if deadline is None:
            return await self._events.get()
        timeout = deadline - self._clock.monotonic()
        if timeout <= 0 and self._events.empty():
            return Tick()
        try:
            async with asyncio.timeout(max(timeout, 0.0)):
                return await self._events.get()
        except TimeoutError:
            return Tick()
