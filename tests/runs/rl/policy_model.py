"""A tiny policy, compiled for nothing, whose functions XLA runs."""

from __future__ import annotations

import functools

from planetary.core.configuration.step_options import StepOptions
from planetary.core.tensors import TensorSpec
from planetary.models.gpt2 import build, cache_sizes, decode
from planetary.models.initial import flat_names
from planetary.runs.rl.program.program import policy_program
from planetary.runs.rl.program.shape import PolicyShape
from planetary.runs.serve.program.shape import PAGE, ServingShape
from planetary.runtime.device_program import Program

OPTIONS = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 40, "sequence_length": 15, "batch_size": 4}
VOCABULARY, ROWS, LENGTH = 40, 4, 15
DECODE = functools.partial(decode, **OPTIONS)
PARAMS = build(**OPTIONS)[1]
SPECS = tuple(TensorSpec(name, "f32", value.shape) for name, value in flat_names(PARAMS).items())
SIZES = cache_sizes(**OPTIONS)
SERVING = ServingShape(
    vocabulary=VOCABULARY,
    window=PAGE,
    pages=9,
    page_shape=(2 * SIZES.layers, SIZES.heads, PAGE, SIZES.width),
    batches=(2, 4),
    chunks=(PAGE,),
    prefills=(1, 4),
    context_sizes=(1,),
    most_candidates=1,
    scores_prompts=False,
)
SHAPE = PolicyShape(SERVING, ROWS, LENGTH)


@functools.cache
def program(micro_batches: int = 1) -> tuple[Program, tuple[TensorSpec, ...]]:
    """The policy's program, with plain gradient descent of rate 1 so that a step shows its gradient."""
    options = StepOptions(optimizer="sgd", momentum=0.0, weight_decay=0.0, clip_norm=0.0, micro_batches=micro_batches)
    shape = PolicyShape(SERVING, ROWS, LENGTH, micro_batches)
    return policy_program(DECODE, PARAMS, SPECS, shape, options)[:2]
