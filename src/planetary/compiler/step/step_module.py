"""A training step in StableHLO, as it is passed on: without the compiler that made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planetary.core.step import StepSpec

if TYPE_CHECKING:
    from planetary.compiler.step.remat_policy import Plan


@dataclass(frozen=True)
class TrainStep:
    """A training step in StableHLO.

    Attributes:
        stablehlo: the module as text, "" for a step that was read back; `spec.stablehlo_digest` is the sha256 of
            `portable`.
        spec: signature of the step.
        portable: the module as a portable artifact, readable by other releases.
        remat: the recomputed part, and the activation memory of one micro-batch before and after; None without.
        notes: sentences on deviations of the step's arithmetic from the model's, for reports.
    """

    stablehlo: str
    spec: StepSpec
    portable: bytes
    remat: Plan | None = None
    notes: tuple[str, ...] = ()


def replaced_arguments(spec: StepSpec) -> list[int]:
    """Return, for each result of `train_step` but loss and norm, the argument it replaces."""
    first_state = len(spec.params) + len(spec.buffers)
    return [*range(len(spec.params)), *range(first_state, first_state + len(spec.opt_state))]
