"""All functions that the participants of one mixture run, in one module: one artifact serves every role.

composer_gradients, composer_update, composer_evaluate
expert_update, and under offload expert_gradients and expert_proxy
whole_evaluate: of the assembled model, with all experts
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from planetary.compiler import ir
from planetary.moe.plan.plan import MixturePlan
from planetary.moe.program.programs import composer_program, expert_program
from planetary.moe.program.signature import ComposerShape
from planetary.runtime.program_runner import Program


def mixture_program(plan: MixturePlan) -> Program:
    """Build the module of a mixture.

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
