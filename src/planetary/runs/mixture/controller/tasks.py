"""What a mixture lends to its workers, on one board: expert work, evaluations, and the last states that are due."""

from __future__ import annotations

from dataclasses import dataclass

from planetary.machine.board import TaskBoard
from planetary.runs.mixture.records import ExpertWork

LACKS = {
    "work": "had no answer to its work",
    "evaluation": "had no answer to its evaluation",
    "state": "did not send the last state of its shard",
}
"""What a stuck worker has not done, by kind of task."""


@dataclass(eq=False)
class Improving:
    """Expert work.

    Attributes:
        work: experts and sketches.
        before: payload of the experts; "" before a worker has begun.
        version: theirs.
        fits: whether surrogates are fitted, too.
        first: attachment of the first worker's result, while a second one is wanted; 0: none.
        by: names of the workers that have made a result.
        task: number of the newest loan.
        session: its worker's.
    """

    work: ExpertWork
    before: str = ""
    version: int = 0
    fits: bool = False
    first: int = 0
    by: tuple[str, ...] = ()
    task: int = 0
    session: int = 0


@dataclass(eq=False)
class Evaluating:
    """A round's model that is to be evaluated."""

    round: int
    payload: str


@dataclass(frozen=True)
class LastState:
    """A shard's state after the last step of the run, which its composer has to send."""

    shard: int


MixtureBoard = TaskBoard[Improving | Evaluating | LastState]
