"""Calls a function with the metrics of every round that ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planetary.monitor.run_folder import METRICS, read_metrics
from planetary.run.processes.announcement import Announcement
from planetary.runs.rounds.metrics import RoundMetrics

OnRound = Callable[[RoundMetrics], object]


class RoundObserver:
    """Follows `metrics.jsonl`, and knows the dashboard's address; a `planetary.run.processes.local_run.RunObserver`."""

    def __init__(self, folder: Path, on_round: OnRound | None) -> None:
        """Follow the run in `folder`; rounds it holds already are not reported."""
        self.dashboard = ""  # URL; "" until the gateway listens
        self._folder = folder
        self._on_round = on_round
        self._size = -1
        self._known = {line.round: line for line in read_metrics(folder)}

    def listening(self, announcement: Announcement) -> None:
        """Keep the dashboard's address."""
        self.dashboard = announcement.dashboard

    def lost(self, reason: str) -> None:
        """A training's gateway is not started again."""

    async def look(self) -> None:
        """Report the rounds that ended since the last look, and those trained again."""
        path = self._folder / METRICS
        size = path.stat().st_size if path.exists() else -1
        if self._on_round is None or size == self._size:
            return
        self._size = size
        for line in read_metrics(self._folder):
            if self._known.get(line.round) != line:
                self._known[line.round] = line
                self._on_round(line)

    async def ended(self) -> None:
        """Report the last rounds."""
        self.dashboard = ""
        self._size = -1
        await self.look()
