"""How a mixture is trained over composers: one value the trainer and the roles read."""

from __future__ import annotations

from typing import Literal

from planetary.core.configuration.ranges import check_ranges
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import UserError
from planetary.core.schedules import Schedule
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.config import MixtureOptions
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.methods.averaging import FragmentMergeRule
from planetary.runs.mixture.methods.surrogate import FitOptions, are_copies
from planetary.runs.mixture.methods.tiers import Cadence
from planetary.runs.mixture.training.expert_optimizer import OFFLOADED, RESIDENT, ExpertOptimizer


class MoeTraining(MixtureOptions, frozen=True, kw_only=True):
    """One way of training: keys of `[moe]`, and the objects that other keys make. One composer is ordinary training.

    Attributes:
        batch_size: sequences per step of all composers together.
        cadence: horizons of the tiers and of the surrogates' refresh.
        merge: of tiers with a horizon above 1.
        fit: of surrogates.
        sketches: where experts' gradients come from: "none" (the composer's own backward pass), the "owner"'s sketches,
            or those of "all" composers.
        acceptance: of workers' updates; None: every update counts, as it does under direct ownership.
        dense: of the optimizer of everything but the experts.
        experts: of the experts' optimizer.
        dense_schedule: of the learning rate of everything but the experts.
        expert_schedule: of the experts' learning rate.
    """

    batch_size: int
    cadence: Cadence = Cadence()
    merge: FragmentMergeRule = FragmentMergeRule()
    fit: FitOptions = FitOptions()
    sketches: Literal["none", "owner", "all"] = "none"
    acceptance: Policy | None = None
    dense: StepOptions = StepOptions()
    experts: StepOptions = StepOptions()
    dense_schedule: Schedule = Schedule()
    expert_schedule: Schedule = Schedule()

    def __post_init__(self) -> None:
        """Raise `UserError` where the parts do not fit together."""
        check_ranges(self)
        if self.composers < 1:
            raise UserError(f"a mixture's training needs composers ≥ 1, found {self.composers}")
        if self.delta_rank and self.refresh_form != "exact":
            raise UserError(
                f'moe.delta_rank = {self.delta_rank} and moe.refresh_form = "{self.refresh_form}" are two ways to send '
                'changes of surrogates: set moe.delta_rank = 0, or moe.refresh_form = "exact"'
            )
        if not 1 <= self.replicas <= self.composers:
            raise UserError(f"replicas must be between 1 and the {self.composers} composers, found {self.replicas}")
        if self.batch_size % self.composers:
            raise UserError(
                f"a batch of {self.batch_size} sequences cannot be divided among {self.composers} composers"
            )
        workers = self.inner_steps > 1 or self.trust or self.acceptance is not None or self.update_form != "exact"
        resident = self.expert_optimizer.in_step
        if resident and (workers or self.sketch_fraction < 1):
            raise UserError(
                "inner_steps, trust, acceptance, sketch_fraction and update_form are about expert workers: set "
                "sketches to owner or all"
            )
        if resident and self.fitted_by != "composers":
            raise UserError(
                "surrogates are fitted by expert workers where there are some: set sketches to owner or all"
            )

    @property
    def expert_optimizer(self) -> ExpertOptimizer:
        """Where the experts' optimizer runs."""
        return RESIDENT if self.sketches == "none" else OFFLOADED

    def workers_fit(self, config: LatentMoeConfig) -> bool:
        """Whether expert workers fit surrogates, of which there are some and no mere copies."""
        wanted = self.fitted_by == "expert-workers" and self.composers > 1 and self.rank > 0
        return wanted and not are_copies(self.rank, config)
