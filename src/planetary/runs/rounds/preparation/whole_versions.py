"""Versions of the parameters that workers take whole, the outer state, and contributions on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planetary.core.configuration.schema import OuterConfig
from planetary.core.errors import NumericsError
from planetary.core.extension_points import MERGE_RULES
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runs.rounds import events as e
from planetary.runs.rounds.changes import WHOLE, Change
from planetary.sync.contributions import Contribution, Weighting
from planetary.sync.merge import MergeRule, rule_of
from planetary.sync.outer import OuterStep, outer_step, published_params
from planetary.sync.outer_optimizers import AVERAGING, OuterOptimizer, OuterState


class WholeVersions:
    """Used from one thread at a time, except `of_version`, which only reads.

    Attributes:
        state: of the outer optimizer.
    """

    _statistics: frozenset[str] = frozenset()

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        state: OuterState,
        version: int,
        optimizer: OuterOptimizer = AVERAGING,
        published: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Start from `state`, the state after `version` outer steps of the optimizer.

        `published`: this version as workers take it; None: the parameters in their own types.
        """
        self._specs, self._optimizer = tuple(specs), optimizer
        self.state = state
        self._version = version
        self._published = {version: published or published_params(specs, state.params)}
        self._contributions: dict[int, Tensors] = {}
        self._delta: dict[str, np.ndarray] = {}  # previous outer step of each tensor stepped here
        self._attachments = 0

    def of_version(self, version: int) -> Mapping[str, np.ndarray]:
        """The parameters of a version, as workers take them."""
        return self._published[version]

    @property
    def change(self) -> Change:
        """The form of the newest version for workers with the one before."""
        return WHOLE

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

    def step(self, outer: OuterConfig, step_tokens: int, instruction: e.TakeOuterStep) -> e.Event:
        """Make the next version from contributions; `step_tokens` are those of an inner step."""
        try:
            step = self.take_outer_step(
                instruction.round,
                instruction.contributions,
                rule_of(MERGE_RULES.chosen(instruction.rule, outer)),
                weighting=outer.weights,
                step_tokens=step_tokens,
            )
        except NumericsError as error:
            return e.OuterStepFailed(instruction.round, str(error))
        return e.OuterStepDone(instruction.round, step.delta_norm, step.autocorrelation, self.change)

    def take_outer_step(
        self,
        round_: int,
        parts: Sequence[tuple[int, int, int]],
        rule: MergeRule,
        *,
        weighting: Weighting = "tokens",
        step_tokens: int = 1,
    ) -> OuterStep:
        """Make version `round_` from contributions given as (task, tokens, attachment), `step_tokens` an inner step.

        Raises `NumericsError`; the state is then as before.
        """
        contributions = [
            self._contribution(task, tokens, self._contributions.pop(attachment), max(1, tokens // step_tokens))
            for task, tokens, attachment in parts
        ]
        specs = self._specs_of(round_)
        step = outer_step(
            specs,
            self.state,
            contributions,
            self._optimizer,
            rule=rule,
            weighting=weighting,
            before=self._delta if self._trained(specs)[0].name in self._delta else None,
            statistics=self._statistics,
        )
        self.state = self.state.updated(step.state)
        self._delta = {**self._delta, **step.delta}
        self._stepped(round_, step, rule, {task: attachment for task, _, attachment in parts})
        self._published = {**self._published, round_: self._newest()}
        return step

    def _contribution(self, task: int, tokens: int, tensors: Tensors, steps: int = 1) -> Contribution:
        return Contribution(task, tokens, tensors, steps)

    def _specs_of(self, round_: int) -> Sequence[TensorSpec]:
        """Return the tensors that a round steps."""
        return self._specs

    def _trained(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        return [spec for spec in specs if spec.name not in self._statistics]

    def _newest(self) -> Mapping[str, np.ndarray]:
        return published_params(self._specs, self.state.params)

    def _stepped(self, round_: int, step: OuterStep, rule: MergeRule, parts: Mapping[int, int]) -> None:
        """Take note of an outer step; `parts`: attachments of the contributions by task."""
