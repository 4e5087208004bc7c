"""A training step in StableHLO, as it is passed on: without the compiler that made it."""

from __future__ import annotations

from dataclasses import dataclass

from planetary.core.step import StepSpec


@dataclass(frozen=True)
class Plan:
    """The partition of a tape into kept and recomputed steps.

    Attributes:
        cuts: positions of the last steps of all segments but the last, ascending.
        kept: positions of steps whose results stay in memory.
        recomputed: per segment but the last, the positions computed again, ascending.
        bytes_before: of all results of the forward pass the backward pass reads.
        bytes_after: of those, the most that are alive at once under the plan.
        cost: of all recomputation, as a share of the cost of the tape.
    """

    cuts: tuple[int, ...]
    kept: frozenset[int]
    recomputed: tuple[tuple[int, ...], ...]
    bytes_before: int
    bytes_after: int
    cost: float


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
