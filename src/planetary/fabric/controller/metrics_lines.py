"""Lines of finished rounds that wait for their held-out loss."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from planetary.fabric.controller.desk import RoundsDesk
from planetary.fabric.controller.evaluation import Evaluation
from planetary.fabric.protocol.events import WriteMetrics
from planetary.fabric.protocol.status import RoundMetrics


class MetricsLines:
    """Each finished round gets one line, complete where its parameters are evaluated."""

    def __init__(self, desk: RoundsDesk, evaluation: Evaluation, lines: Iterable[RoundMetrics]) -> None:
        """Start with lines that an earlier incarnation of the gateway left unwritten."""
        self._desk, self._evaluation = desk, evaluation
        self._lines = {metrics.round: metrics for metrics in lines}

    def add(self, metrics: RoundMetrics | None) -> None:
        """Keep the line of a round that is finished now; None: it is not."""
        if metrics is not None:
            self._lines[metrics.round] = metrics

    def write(self, *, everything: bool = False) -> None:
        """Write the lines of rounds that are not evaluated any more; or all of them, at the end of the run."""
        for round_ in sorted(self._lines):
            if everything or round_ not in self._evaluation.versions:
                loss = self._desk.state.evals.get(round_)
                self._desk.out.append(WriteMetrics(msgspec.structs.replace(self._lines.pop(round_), eval_loss=loss)))

    def forget_after(self, round_: int) -> None:
        """The run went back: rounds after this one were not."""
        self._lines = {number: metrics for number, metrics in self._lines.items() if number <= round_}
