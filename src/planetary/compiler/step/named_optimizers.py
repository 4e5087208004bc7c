"""The optimizer a training step's options name."""

from __future__ import annotations

from planetary.compiler.step import optimizers
from planetary.compiler.step.optimizers import Transform
from planetary.compiler.step.optimizers_adafactor import clip_each_by_rms, scale_by_factored_rms, scale_by_parameter_rms
from planetary.compiler.step.optimizers_adaptive import add_momentum, scale_by_adam, scale_by_lion
from planetary.compiler.step.optimizers_muon import scale_by_muon
from planetary.core.configuration.step_options import StepOptions
from planetary.core.tensors import TensorSpec


def optimizer_of(options: StepOptions) -> Transform:
    """Return the optimizer the options name: clipping, preconditioning, decoupled weight decay, learning rate, and the
    moving average of the weights.
    """
    clipping = [optimizers.clip_by_global_norm(options.clip_norm)] if options.clip_norm else []
    decay = optimizers.add_decayed_weights(options.weight_decay, options.decay_min_rank, options.no_decay)
    return optimizers.chain(
        *clipping,
        _preconditioner(options),
        *([decay] if options.weight_decay else []),
        optimizers.scale_by_learning_rate(),
        *([optimizers.average_weights(options.average_decay)] if options.average_decay else []),
    )


def _preconditioner(options: StepOptions) -> Transform:
    adam = scale_by_adam(options.beta1, options.beta2, options.epsilon)
    if options.optimizer == "sgd":
        return add_momentum(options.momentum, options.nesterov)
    if options.optimizer == "lion":
        return scale_by_lion(options.beta1, options.beta2)

    def stacked(spec: TensorSpec) -> bool:
        return len(spec.shape) == 3 and optimizers.matches(spec.name, options.matrix_stacks)

    if options.optimizer == "adafactor":
        return optimizers.chain(
            scale_by_factored_rms(stacked=stacked),
            clip_each_by_rms(stacked=stacked),
            scale_by_parameter_rms(stacked=stacked),
        )
    if options.optimizer == "muon":

        def choose(spec: TensorSpec) -> str:
            matrix = len(spec.shape) == 2 and not optimizers.matches(spec.name, options.adam_for)
            return "muon" if stacked(spec) or matrix else "adam"

        muon = scale_by_muon(options.momentum, options.nesterov, options.epsilon)
        return optimizers.partition(choose, {"muon": muon, "adam": adam})
    return adam
