"""Inner optimizers: the objects that `optimizer.name` names, each of which makes a transform of gradients.

What the classes declare is read where no compiler is installed, so a class imports operations only to emit them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from planetary.core.configuration.needs import Need
from planetary.core.configuration.step_options import StepOptions
from planetary.core.extension_points import INNER_OPTIMIZERS
from planetary.core.tensors import TensorSpec

if TYPE_CHECKING:
    from planetary.compiler.step.optimizers import Transform
    from planetary.core.configuration.schema import Config


class InnerOptimizer(ABC):
    """An inner optimizer: what is compiled into the training step between clipping and weight decay.

    A class is made with the keys of `[optimizer]` that it declares.

    Attributes:
        keys: of `[optimizer]`, the class's arguments.
    """

    keys: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[Need, ...]] = ()

    @staticmethod
    def objection(config: Config) -> str:
        """Return why values of the configuration do not suit the optimizer, naming the key; "" where they do."""
        return ""

    @abstractmethod
    def transform(self) -> Transform:
        """Return the transform from gradients to steps, before weight decay, and before the learning rate."""


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


def optimizer_of(options: StepOptions) -> Transform:
    """Return the optimizer the options name: clipping, preconditioning, decoupled weight decay, learning rate, and the
    moving average of the weights.

    Raises:
        UserError: there is no optimizer of this name, or it does not take its values.
    """
    from planetary.compiler.step import optimizers

    inner: InnerOptimizer = INNER_OPTIMIZERS.make(INNER_OPTIMIZERS.chosen(options.optimizer, options))
    clipping = [optimizers.clip_by_global_norm(options.clip_norm)] if options.clip_norm else []
    decay = optimizers.add_decayed_weights(options.weight_decay, options.decay_min_rank, options.no_decay)
    return optimizers.chain(
        *clipping,
        inner.transform(),
        *([decay] if options.weight_decay else []),
        optimizers.scale_by_learning_rate(),
        *([optimizers.average_weights(options.average_decay)] if options.average_decay else []),
    )
