"""The metrics of a run's rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import msgspec

from planetary.core.errors import UserError
from planetary.runs.rounds.metrics import RoundMetrics


class RoundRewards(msgspec.Struct, frozen=True):
    """Mean rewards of one round of reinforcement learning."""

    round: int
    sampled: float | None  # of sampled completions of training prompts; None: the round trained on answers
    greedy: float | None  # of the likeliest completions of held-out prompts after it; None: they were not evaluated
    held_out: float | None  # mean of held-out prompts' completions drawn at temperature 1; None: not evaluated


def rewards_of(metrics: Iterable[RoundMetrics]) -> tuple[RoundRewards, ...]:
    """Return the rewards of rounds; of rounds that train on data there are none."""
    from planetary.runs.rl.status import PolicyMetrics

    return tuple(
        RoundRewards(line.round, line.own.reward, line.own.held_out_reward, line.own.held_out_sampled)
        for line in metrics
        if isinstance(line.own, PolicyMetrics)
    )


class Metrics(Sequence[RoundMetrics]):
    """The records of all finished rounds, ascending: `metrics[-1].loss`."""

    def __init__(self, lines: Iterable[RoundMetrics]) -> None:
        self._lines = tuple(lines)

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> RoundMetrics: ...

    @overload
    def __getitem__(self, index: slice) -> Metrics: ...

    def __getitem__(self, index: int | slice) -> RoundMetrics | Metrics:
        return Metrics(self._lines[index]) if isinstance(index, slice) else self._lines[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(line.round for line in self._lines))

    def __repr__(self) -> str:
        if not self._lines:
            return "Metrics: no round has ended"
        last = self._lines[-1]
        return f"Metrics: {len(self._lines)} rounds, loss {last.loss:.4f} in round {last.round}"

    def records(self) -> list[dict[str, Any]]:
        """Return each round as a dictionary of plain values."""
        return [msgspec.to_builtins(line) for line in self._lines]

    def dataframe(self) -> Any:
        """Return a pandas DataFrame with a row for each round; the round is the index.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports] - an extra
        except ModuleNotFoundError:
            raise UserError(
                "a DataFrame needs pandas, which is not installed here: pip install 'planetary-compute[dataframe]', "
                "or use metrics.records()"
            ) from None
        names = [field.name for field in msgspec.structs.fields(RoundMetrics)]
        return pandas.DataFrame.from_records(self.records(), columns=names).set_index("round")
