"""The tensors that the gateway holds: global parameters by version, the outer state, contributions on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planetary.core.errors import LocalProtocolError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.diloco.contributions import Contribution, Weighting, check_contribution
from planetary.diloco.deltas import Table, table_of
from planetary.diloco.merge import MergeRule
from planetary.diloco.outer import OuterState, OuterStep, outer_step, published_params
from planetary.diloco.ring import check_state, state_of, state_tensors
from planetary.fabric.protocol.messages import Message
from planetary.fabric.protocol.messages import OuterState as OuterStateMessage


class Parameters:
    """Used from one thread at a time, except `check` and `of_version`, which only read."""

    def __init__(self, specs: Sequence[TensorSpec], state: OuterState, version: int) -> None:
        """Start from `state`, the state after `version` outer steps."""
        self._specs = tuple(specs)
        self.state = state
        self._version = version
        self._published: dict[int, Mapping[str, np.ndarray]] = {version: published_params(specs, state.params)}
        self._contributions: dict[int, Tensors] = {}
        self._delta: Tensors | None = None  # of the outer step before; None: it was not taken here
        self._attachments = 0

    def of_version(self, version: int) -> Mapping[str, np.ndarray]:
        """The parameters of a version, as workers take them."""
        return self._published[version]

    def keep(self, versions: Sequence[int]) -> None:
        """Forget all other versions."""
        self._published = {v: p for v, p in self._published.items() if v in versions}

    def kept(self) -> tuple[int, int]:
        """Return how many versions and how many workers' tensors are kept."""
        return len(self._published), len(self._contributions)

    def attach(self, tensors: Tensors) -> int:
        """Keep a worker's end parameters; return their number."""
        self._attachments += 1
        self._contributions[self._attachments] = tensors
        return self._attachments

    def drop(self, attachment: int) -> None:
        """Forget a worker's end parameters."""
        del self._contributions[attachment]

    def adopt(self, version: int, attachment: int) -> None:
        """Ring: the outer state that came with a message is the newest that is known here."""
        self.state = state_of(self._specs, self._contributions.pop(attachment))
        self._version = version

    def replace(self, version: int, params: Mapping[str, np.ndarray]) -> None:
        """Let `params`, float32 masters, be those of `version`, which is the newest; the velocity stays.

        Workers that were sent this version have to be sent it again.
        """
        self.state = OuterState(dict(params), self.state.velocity)
        self._published = {**self._published, version: published_params(self._specs, params)}

    def outer_state(self, version: int) -> Tensors:
        """Ring: return the outer state of `version`, which is the newest known here, as it travels."""
        if version != self._version:
            raise LocalProtocolError(f"the outer state of round {version} is not here, that of {self._version} is")
        return state_tensors(self.state)

    def check(self, message: Message, tensors: Tensors) -> str:
        """Return what makes the tensors of a worker's message unusable, or ""."""
        if isinstance(message, OuterStateMessage):  # ring
            return check_state(self._specs, tensors, message.digest)
        return check_contribution(self._specs, tensors)

    def measure(self, parts: Sequence[tuple[int, int]]) -> Table:
        """Return the inner products of the deltas of contributions given as (task, attachment)."""
        contributions = [Contribution(task, 1, self._contributions[attachment]) for task, attachment in parts]
        return table_of(self._specs, self.state.params, contributions)

    def go_back(self, state: OuterState, version: int) -> None:
        """Hold the state after `version` outer steps again, and nothing of later ones."""
        self.state, self._version, self._delta = state, version, None
        self._published = {version: published_params(self._specs, state.params)}

    def take_outer_step(
        self,
        round_: int,
        parts: Sequence[tuple[int, int, int]],
        learning_rate: float,
        momentum: float,
        rule: MergeRule,
        *,
        weighting: Weighting = "tokens",
        steps: int = 1,
    ) -> OuterStep:
        """Make version `round_` from contributions given as (task, tokens, attachment), of `steps` inner steps each.

        Raises `NumericsError`; the state is then as before.
        """
        contributions = [
            Contribution(task, tokens, self._contributions.pop(attachment), steps) for task, tokens, attachment in parts
        ]
        step = outer_step(
            self._specs,
            self.state,
            contributions,
            learning_rate,
            momentum,
            rule=rule,
            weighting=weighting,
            before=self._delta,
        )
        self.state, self._delta = step.state, step.delta
        self._published = {**self._published, round_: published_params(self._specs, step.state.params)}
        return step
