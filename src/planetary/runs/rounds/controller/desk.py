"""The desk of a run in rounds: the connections and the state, and how far the run is."""

from __future__ import annotations

from planetary.core.errors import LocalProtocolError
from planetary.fleet.controller.desk import Desk
from planetary.runs.rounds.controller.early_stopping import has_stopped_improving
from planetary.runs.rounds.policy import ControllerPolicy
from planetary.runs.rounds.sessions import Trainer
from planetary.runs.rounds.state import ControllerState, OpenRound


class RoundsDesk(Desk[ControllerPolicy, ControllerState, Trainer]):
    """The desk of a run in rounds."""

    session = Trainer

    def ready_workers(self) -> list[Trainer]:
        return [worker for worker in super().ready_workers() if not worker.is_unresponsive]

    def open_round(self) -> OpenRound:
        """Return the round under way; it is a bug to ask when there is none."""
        if self.state.open is None:
            raise LocalProtocolError(f"no round is open after round {self.state.round}")
        return self.state.open

    # --- how far the run is -----------------------------------------------------------------------------------

    @property
    def stops_early(self) -> bool:
        """Whether no round follows the one under way, because held-out losses stopped improving.

        If none is under way and the newest parameters are in no checkpoint, one more round follows.
        """
        policy, state = self.policy, self.state
        is_kept = state.open is not None or state.durable_round >= state.round
        return is_kept and has_stopped_improving(state.evals, policy.patience, policy.least_gain)

    @property
    def has_lease(self) -> bool:
        """Whether a lease is free that the run still trains."""
        return self.policy.length.has_lease(self.state.ledger.peek()) and not self.stops_early

    def free_leases(self, count: int) -> tuple[int, ...]:
        """Return up to `count` free leases of the run, in the order of the data."""
        return tuple(lease for lease in self.state.ledger.free(count) if self.policy.length.has_lease(lease))

    def goes_on_after(self, round_: int) -> bool:
        """Whether another round can be opened after `round_`."""
        opened = self.state.open
        has_early = opened is not None and opened.round == round_ and bool(opened.early)
        return round_ < self.policy.length.most_rounds and (self.has_lease or has_early)

    def first_step(self, *, early: bool = False) -> int:
        """Return where the open round, or with `early` the one after it, begins in the learning-rate schedule."""
        opened, trained = self.open_round(), self.state.ledger.trained
        if not early:
            return self.policy.length.first_step(opened.round, trained - opened.trained)
        untrained = len(opened.holders) - len(opened.early) + len(opened.orphans)
        return self.policy.length.first_step(opened.round + 1, trained + untrained)

    @property
    def rounds_left(self) -> int:
        """How many more rounds are expected with the workers that are here, the open one included."""
        state, length = self.state, self.policy.length
        if self.stops_early:
            return 0 if state.open is None else state.open.round - state.round
        opened = 0 if state.open is None else state.open.trained
        return length.rounds_left(
            state.round, state.ledger.trained - opened, len(self.ready_workers()) or length.workers
        )

    def is_last(self, round_: int) -> bool:
        """Whether, as far as is known, no round follows one whose leases are all trained or given back.

        A result lost in its reduction makes a lease free again, and the run goes on.
        """
        opened = self.state.open
        return round_ >= self.policy.length.most_rounds or not (
            self.has_lease or (opened is not None and opened.round > round_)
        )

    def eval_due(self, version: int) -> bool:
        """Whether the parameters of `version` are evaluated."""
        return bool(self.policy.held_out) and version > 0 and self._is_due(version, self.policy.eval_every)

    def checkpoint_due(self, round_: int) -> bool:
        """Whether a checkpoint is written after `round_`; of a run that may stop early, of each evaluated version."""
        is_due = self._is_due(round_, self.policy.checkpoint_every)
        return is_due or (self.policy.patience > 0 and self.eval_due(round_))

    def _is_due(self, number: int, every: int) -> bool:
        return self.is_last(number) or (every > 0 and number % every == 0)
