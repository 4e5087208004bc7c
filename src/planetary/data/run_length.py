"""How long a run in rounds is: a number of rounds, or of leases where the passes over the data are limited."""

from __future__ import annotations

import msgspec


class RunLength(msgspec.Struct, frozen=True, kw_only=True):
    """The two limits of a run, which ends at whichever it reaches first.

    A limit on passes is one on leases, not on rounds: how many leases a round trains depends on who takes part in it.

    Attributes:
        rounds: the most rounds.
        leases: the most leases; 0: no limit.
        inner_steps: of an average worker in a round.
        workers: how many are expected to take part in a round.
        parts: leases an average worker trains in a round.
        beyond: rounds that may follow `rounds`, at the schedule's last rate: of a site, until the hub ends the run.
    """

    rounds: int
    leases: int = 0
    inner_steps: int
    workers: int
    parts: int = 1
    beyond: int = 0

    @property
    def most_rounds(self) -> int:
        """The rounds after which the run ends by itself."""
        return self.rounds + self.beyond

    @property
    def lease_steps(self) -> int:
        """Inner steps of a lease."""
        return self.inner_steps // self.parts

    @property
    def expected_rounds(self) -> int:
        """How many rounds the expected workers take."""
        return min(self.rounds, -(-self.leases // (self.workers * self.parts))) if self.leases else self.rounds

    @property
    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule: the inner steps that each of the expected workers takes."""
        steps = self.rounds * self.inner_steps
        return min(steps, -(-self.leases * self.lease_steps // self.workers)) if self.leases else steps

    def first_step(self, round_: int, trained: int) -> int:
        """Return the position in the schedule at which a round begins; `trained` leases precede it.

        It is `(round_ - 1) * inner_steps` with the expected workers. The schedule of a run ended by its data goes by
        the data: with fewer workers a round is a smaller part of it, with more a larger one.
        """
        steps = self.schedule_steps
        by_rounds = (round_ - 1) * steps // self.rounds
        return max(by_rounds, trained * steps // self.leases) if self.leases else by_rounds

    def has_lease(self, lease: int) -> bool:
        """Whether a lease lies within the run's passes over the data."""
        return not self.leases or lease < self.leases

    def rounds_left(self, finished: int, trained: int, workers: int) -> int:
        """Return how many more rounds are expected with so many workers."""
        rounds = max(0, self.rounds - finished)
        return (
            min(rounds, -(-max(0, self.leases - trained) // (max(1, workers) * self.parts))) if self.leases else rounds
        )

    def why_shorter(self) -> str:
        """Say that the data ends the run before its rounds do; "" where it does not."""
        if self.expected_rounds == self.rounds:
            return ""
        return (
            f"data.max_epochs ends the run after {self.leases} leases of data, about {self.expected_rounds} rounds of "
            f"{self.workers} workers; train.rounds = {self.rounds} would take more"
        )
