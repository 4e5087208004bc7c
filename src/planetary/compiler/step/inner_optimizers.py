"""The built-in inner optimizers, found by the name that `optimizer.name` has.

What the classes declare is read where no compiler is installed, so a class imports operations only to emit them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planetary.compiler.step.inner_optimizer import InnerOptimizer
from planetary.core.tensors import TensorSpec

if TYPE_CHECKING:
    from planetary.compiler.step.optimizers import Transform


@dataclass(frozen=True)
class AdamW(InnerOptimizer):
    """Adam with bias correction."""

    name, keys = "adamw", ("beta1", "beta2", "epsilon")

    beta1: float
    beta2: float
    epsilon: float

    def transform(self) -> Transform:
        from planetary.compiler.step.optimizers_adaptive import scale_by_adam

        return scale_by_adam(self.beta1, self.beta2, self.epsilon)


@dataclass(frozen=True)
class Sgd(InnerOptimizer):
    """Gradient descent with Nesterov's momentum."""

    name, keys = "sgd", ("momentum",)

    momentum: float

    def transform(self) -> Transform:
        from planetary.compiler.step.optimizers_adaptive import add_momentum

        return add_momentum(self.momentum)


@dataclass(frozen=True)
class Lion(InnerOptimizer):
    """The sign of a momentum interpolated with the gradient."""

    name, keys = "lion", ("beta1", "beta2")

    beta1: float
    beta2: float

    def transform(self) -> Transform:
        from planetary.compiler.step.optimizers_adaptive import scale_by_lion

        return scale_by_lion(self.beta1, self.beta2)


@dataclass(frozen=True)
class Adafactor(InnerOptimizer):
    """Second moments by rows and columns, clipped and scaled as Adafactor does."""

    name, keys = "adafactor", ("matrix_stacks",)

    matrix_stacks: tuple[str, ...]

    def transform(self) -> Transform:
        from planetary.compiler.step.optimizers import chain
        from planetary.compiler.step.optimizers_adafactor import (
            clip_each_by_rms,
            scale_by_factored_rms,
            scale_by_parameter_rms,
        )

        def stacked(spec: TensorSpec) -> bool:
            return is_stack(spec, self.matrix_stacks)

        return chain(
            scale_by_factored_rms(stacked=stacked),
            clip_each_by_rms(stacked=stacked),
            scale_by_parameter_rms(stacked=stacked),
        )


@dataclass(frozen=True)
class Muon(InnerOptimizer):
    """Muon for matrices, AdamW for the rest; see `scale_by_muon`."""

    name, keys = "muon", ("beta1", "beta2", "epsilon", "momentum", "adam_for", "matrix_stacks")

    beta1: float
    beta2: float
    epsilon: float
    momentum: float
    adam_for: tuple[str, ...]
    matrix_stacks: tuple[str, ...]

    def transform(self) -> Transform:
        from planetary.compiler.step.optimizers import matches, partition
        from planetary.compiler.step.optimizers_muon import scale_by_muon

        def choose(spec: TensorSpec) -> str:
            matrix = len(spec.shape) == 2 and not matches(spec.name, self.adam_for)
            return "muon" if is_stack(spec, self.matrix_stacks) or matrix else "adam"

        adam = AdamW(self.beta1, self.beta2, self.epsilon).transform()
        return partition(choose, {"muon": scale_by_muon(self.momentum, self.epsilon), "adam": adam})


def is_stack(spec: TensorSpec, patterns: tuple[str, ...]) -> bool:
    """Whether a parameter is a stack of matrices, named by one of the patterns."""
    from planetary.compiler.step.optimizers import matches

    return len(spec.shape) == 3 and matches(spec.name, patterns)
