"""Programs as those see them who run them: functions over named arrays, without the compiler that made them."""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.core.step import GRADIENT, RATE
from planetary.core.tensors import TensorSpec
from planetary.runtime.device_program import Program, signature


class ComposerShape(msgspec.Struct, frozen=True):
    """The shape of a composer's program, beside the model.

    Attributes:
        slots: places for owned experts per layer.
        rank: of the surrogates; 0: none, experts that are not owned contribute nothing.
        batch_size: sequences of one composer's step.
        detach: stop the gradient at the surrogates' input (the report's choice).
        train_experts: whether `gradients` returns the owned experts' gradients; not under offload, where the functions
            take the weights that experts compute with (ternary ones are made from their masters elsewhere).
    """

    slots: int
    rank: int
    batch_size: int
    detach: bool = True
    train_experts: bool = True

    def __post_init__(self) -> None:
        """Raise `UserError` for sizes that cannot be."""
        if self.slots < 1 or self.rank < 0 or self.batch_size < 1:
            raise UserError(f"a composer has slots ≥ 1, rank ≥ 0 and batch_size ≥ 1, found {self}")


def in_layer(layer: int, part: str, name: str) -> str:
    """Return the full name of a layer's tensor, such as `layers.2.experts.up`."""
    return f"layers.{layer}.{part}.{name}"


def zeros_for(specs: tuple[TensorSpec, ...]) -> dict[str, np.ndarray]:
    """Return zeros by name: the optimizer state before the first step."""
    return {spec.name: spec.zeros() for spec in specs}


def parameter_specs(program: Program) -> tuple[TensorSpec, ...]:
    """Return the parameters a program's `update` moves, in the order of the arguments."""
    arguments = signature(program, "update").arguments
    return arguments[: sum(spec.name.startswith(GRADIENT) for spec in arguments)]


def state_specs(program: Program) -> tuple[TensorSpec, ...]:
    """Return the optimizer state of a program: arguments of `update` between the parameters and the learning rate."""
    spec = signature(program, "update")
    names = [s.name for s in spec.arguments]
    count = sum(name.startswith("gradient.") for name in names)
    return spec.arguments[count : names.index(RATE.name)]
