"""The endpoint's interface to a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.shape import ServingShape
from planetary.runs.serve.scheduling.scheduler import SequenceOutput
from planetary.runs.serve.scheduling.sequences import SequenceRequest


class Service(Protocol):
    """A model that continues texts. All methods are called on one event loop."""

    @property
    def model(self) -> ServedModel | None:
        """The model; None before it is loaded."""
        ...

    @property
    def shape(self) -> ServingShape | None:
        """The sizes of the functions; None before."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether a worker computes."""
        ...

    @property
    def why_not_ready(self) -> str:
        """The reason, for people."""
        ...

    @property
    def waiting(self) -> int:
        """How many texts have no worker."""
        ...

    @property
    def running(self) -> int:
        """How many texts have one."""
        ...

    @property
    def cache_used(self) -> float:
        """Which part of the caches texts use, 0 to 1."""
        ...

    def next_sequence(self) -> int:
        """Return a number for a text."""
        ...

    def generate(self, request: SequenceRequest) -> AsyncIterator[SequenceOutput]:
        """Submit a text and yield new tokens until it is finished; leaving early cancels it.

        Raises:
            ClosedError: the gateway ends.
        """
        ...
