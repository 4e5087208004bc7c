"""The parts of a mixture's preparation that need JAX, imported when they are used: program and ownership by load."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import msgspec
import numpy as np

from planetary.compiler import ir
from planetary.core.tensors import Tensors
from planetary.data.reader import batches, read_slice
from planetary.data.slices import SliceOrder
from planetary.models.initial import filled
from planetary.models.latent_moe import expert_loads, parameters
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.moe.methods.ownership import load_aware
from planetary.moe.plan.plan import MixturePlan
from planetary.moe.program.programs import composer_program, expert_program
from planetary.moe.program.signature import ComposerShape
from planetary.runtime.program_runner import Program


def mixture_program(plan: MixturePlan) -> Program:
    """Build the module of a mixture: the functions of all participants, so that one artifact serves every role.

    `composer_gradients`, `composer_update`, `composer_evaluate`; `expert_update`, and under offload `expert_gradients`
    and `expert_proxy`; `whole_evaluate`, of the assembled model with all experts.

    Raises:
        CompileError, UnsupportedOpError: the model cannot be differentiated.
    """
    model, training, optimizer = plan.model, plan.training, plan.training.expert_optimizer
    rank = training.rank if training.composers > 1 else 0
    shape = ComposerShape(plan.slots, rank, model.batch_size, training.detach, train_experts=optimizer.in_step)
    composer = composer_program(model, shape, training.dense)
    unbalanced = msgspec.structs.replace(model, balance=0.0)
    expert = expert_program(unbalanced, plan.slots, plan.tokens_per_step, training.experts)
    whole = composer_program(model, ComposerShape(model.n_expert, 0, model.batch_size), training.dense)
    return combined(
        {
            "composer": (composer, ("gradients", "update", "evaluate")),
            "expert": (expert, optimizer.functions),
            "whole": (whole, ("evaluate",)),
        }
    )


def combined(parts: Mapping[str, tuple[Program, tuple[str, ...]]]) -> Program:
    """Return one program with some functions of several; each is named `<part>_<function>`."""
    with ir.new_context():
        module = ir.empty_module()
        functions = {}
        for part, (program, wanted) in parts.items():
            source = ir.parse_module(program.portable)
            found = ir.functions(source)
            for name in wanted:
                ir.copy_function(found[name], module, f"{part}_{name}")
                functions[f"{part}_{name}"] = program.functions[name]
        ir.verify(module)
        return Program(ir.to_portable_artifact(module), functions)


LOAD_TOKENS = 16_384
"""Of the run's first training tokens that are routed, at least: with 256 experts, top 16, a thousand of each."""


def owners_by_load(model: Tensors, config: LatentMoeConfig, order: SliceOrder, composers: int) -> np.ndarray:
    """Return the load-aware ownership map of a model, i32 [layers, experts].

    Args:
        model: all parameters, by the names of `models.latent_moe`.
        config: its sizes.
        order: of the training tokens.
        composers: C.

    Raises:
        UserError: the parameters are not of this model, or the tokens cannot be read.
    """
    params = filled(parameters(config), model)
    route = jax.jit(functools.partial(expert_loads, config=config))
    loads = np.zeros((config.n_layer, config.n_expert), np.int64)
    for step in range(-(-LOAD_TOKENS // order.slice_tokens)):
        for tokens, _ in batches(read_slice(order.locate(step)), config.batch_size, config.sequence_length):
            loads += np.asarray(route(params, tokens))
    return load_aware(loads, composers)
