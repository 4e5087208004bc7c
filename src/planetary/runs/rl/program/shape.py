"""The sizes a policy is compiled for, and the functions of the program. Needs no JAX."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planetary.core.adapters import Adapter, trained_by
from planetary.core.step import RATE, STEP, FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.runs.rl.objectives.terms import TERMS
from planetary.runs.serve.program.shape import ServingShape

TRAIN, SCORE = "train_step", "score"
TOKENS, WEIGHTS, ADVANTAGES, SAMPLED, REFERENCE = "tokens", "weights", "advantages", "sampled", "reference"
TERM_ROWS = "terms"
LOSS, GRAD_NORM, LOGPROBS, ENTROPY = "loss", "grad_norm", "logprobs", "entropy"


class PolicyShape(msgspec.Struct, frozen=True):
    """The sizes of a policy's program.

    Attributes:
        serving: of the functions that sample.
        rows: rollouts of one training batch.
        length: tokens of a rollout, the first one not counted.
        micro_batches: equal parts a batch is trained in.
    """

    serving: ServingShape
    rows: int
    length: int
    micro_batches: int = 1

    @property
    def batch(self) -> tuple[TensorSpec, ...]:
        """The data of a training step, in order."""
        of_tokens = (self.rows, self.length)
        return (
            TensorSpec(TOKENS, "i32", (self.rows, self.length + 1)),
            *(TensorSpec(name, "f32", of_tokens) for name in (WEIGHTS, ADVANTAGES, SAMPLED, REFERENCE)),
            TensorSpec(TERM_ROWS, "f32", (self.rows, TERMS)),
        )

    def functions(
        self, params: tuple[TensorSpec, ...], state: tuple[TensorSpec, ...], adapters: Sequence[Adapter] = ()
    ) -> dict[str, FunctionSpec]:
        """Return the signatures of all functions, by name, for these parameters and this optimizer's state.

        With adapters, the step trains these, and takes the parameters behind them as they are without.
        """
        of_tokens = (self.rows, self.length)
        trained = trained_by(adapters) or params
        results = (*trained, *state, TensorSpec(LOSS, "f32", ()), TensorSpec(GRAD_NORM, "f32", ()))
        return {
            **self.serving.functions(params),
            TRAIN: FunctionSpec((*trained, *(params if adapters else ()), *state, STEP, RATE, *self.batch), results),
            SCORE: FunctionSpec(
                (*params, TensorSpec(TOKENS, "i32", (self.rows, self.length + 1))),
                (TensorSpec(LOGPROBS, "f32", of_tokens), TensorSpec(ENTROPY, "f32", of_tokens)),
            ),
        }
