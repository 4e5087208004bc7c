"""The interface of inner optimizers, each of which makes a transform of gradients, and the optimizer of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from planetary.core.configuration.needs import Need
from planetary.core.configuration.step_options import StepOptions
from planetary.core.extension_points import INNER_OPTIMIZERS

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
