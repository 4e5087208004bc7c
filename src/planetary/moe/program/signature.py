"""Programs as those see them who run them: functions over named arrays, without the compiler that made them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from planetary.core.errors import LocalProtocolError, UserError
from planetary.core.step import GRADIENT, RATE, FunctionSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runtime.device_program import DeviceProgram


@dataclass(frozen=True)
class Program:
    """Several functions in one StableHLO module.

    Attributes:
        portable: the module as a portable artifact.
        functions: signatures by name.
        digest: sha256 of `portable`.
    """

    portable: bytes = field(repr=False)
    functions: Mapping[str, FunctionSpec]

    @property
    def digest(self) -> str:
        """sha256 of the portable artifact."""
        return hashlib.sha256(self.portable).hexdigest()


class ComposerShape(msgspec.Struct, frozen=True):
    """What a composer's program is built for, beside the model.

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


class Runner(DeviceProgram, Protocol):
    """A program ready to run: function by function on tensors that stay on its device, or from host to host."""

    @property
    def program(self) -> Program:
        """What it runs."""
        ...

    def __call__(self, function: str, tensors: Tensors) -> dict[str, np.ndarray]:
        """Return the results of a function by name; `tensors` has at least its arguments, and nothing stays there."""
        ...


def in_layer(layer: int, part: str, name: str) -> str:
    """Return the full name of a layer's tensor, such as `layers.2.experts.up`."""
    return f"layers.{layer}.{part}.{name}"


def signature(program: Program, function: str) -> FunctionSpec:
    """Return the signature of a program's function."""
    if function not in program.functions:
        known = ", ".join(program.functions)
        raise LocalProtocolError(f"the program has no function {function!r}; it has: {known}")
    return program.functions[function]


def zeros_for(specs: tuple[TensorSpec, ...]) -> dict[str, np.ndarray]:
    """Return zeros by name: the optimizer state before the first step."""
    return {spec.name: spec.zeros() for spec in specs}


def parameter_specs(program: Program) -> tuple[TensorSpec, ...]:
    """Return the parameters that a program's `update` moves, in the order of its arguments."""
    arguments = signature(program, "update").arguments
    return arguments[: sum(spec.name.startswith(GRADIENT) for spec in arguments)]


def state_specs(program: Program) -> tuple[TensorSpec, ...]:
    """Return the optimizer state of a program: what `update` takes between the parameters and the learning rate."""
    spec = signature(program, "update")
    names = [s.name for s in spec.arguments]
    count = sum(name.startswith("gradient.") for name in names)
    return spec.arguments[count : names.index(RATE.name)]
