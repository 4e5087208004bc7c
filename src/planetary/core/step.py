"""The signature of a compiled training step: the contract between the compiler and every worker."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from planetary.core.random_keys import key_words, step_key
from planetary.core.tensors import TensorSpec

STEP = TensorSpec("step", "i32", ())  # the arguments of `train_step` between the optimizer's state and the batch
RATE = TensorSpec("rate", "f32", ())
GRADIENT = "gradient."  # prefix of a gradient's name, before the parameter's
_BATCH = "the batch's "  # prefix of an array's name as an argument of a step's function


class FunctionSpec(msgspec.Struct, frozen=True):
    """Arguments and results of one compiled function, in order."""

    arguments: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    # results that are choices, each with the result of the same shape with their scores, in descending order along the
    # last axis: two choices whose scores are equal but for rounding may be swapped
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def replaced(self) -> tuple[int, ...]:
        """The argument overwritten by each of the first results: the one of the same name."""
        place = {spec: i for i, spec in reversed([*enumerate(self.arguments)])}  # the first of equal ones
        return tuple(place[spec] for spec in itertools.takewhile(place.__contains__, self.results))


class StepSpec(msgspec.Struct, frozen=True):
    """Signature of a training-step module. All lists are in argument order.

    The module has two functions:

    `train_step(params..., buffers..., opt_state..., step: i32, rate: f32, batch..., keys...) ->
    (params'..., opt_state'..., loss: f32, grad_norm: f32)`: one forward, backward, clip and optimizer update.
    `step` is the 0-based index of the inner step since the start of the run; it seeds stochastic rounding, and a model
    may take it.
    `rate` is the learning rate of the step, from `planetary.core.schedules`: no length of a run is compiled in.
    The optimizer's own count is part of `opt_state`, because a worker that joins late starts with fresh moments.

    `eval_step(params..., buffers..., batch...) -> loss: f32`: the mean loss of one batch.
    """

    model: str  # a name for people
    params: tuple[TensorSpec, ...]  # trained; then the statistics
    buffers: tuple[TensorSpec, ...]  # constant inputs of the model such as RoPE tables; never trained
    opt_state: tuple[TensorSpec, ...]  # starts as zeros
    batch: tuple[TensorSpec, ...]  # inputs, then targets
    stablehlo_digest: str  # sha256 of the portable artifact both functions were compiled from
    keys: tuple[TensorSpec, ...] = ()  # one tensor, ui32 [2 × micro-batches], if the model draws random numbers
    statistics: tuple[str, ...] = ()  # names of `params` whose new values the model gives, such as running means
    table_rows: tuple[int, ...] = ()  # rows to pick from by each tensor of `batch`; 0: none

    @property
    def trial_bounds(self) -> tuple[int, ...]:
        """Exclusive bounds of the integers of a trial, of each tensor of `train_batch`.

        A trial picks from whole tables. Where the graph shows none, integers are small: rows of most tables.
        """
        known = (*(self.table_rows or (0,) * len(self.batch)), *(0 for _ in self.keys))
        return tuple(
            2 if one.dtype == "i1" else bound or 100 for one, bound in zip(self.train_batch, known, strict=True)
        )

    def __post_init__(self) -> None:
        """Raise `ValueError` where `table_rows` is not of the batch."""
        if self.table_rows and (len(self.table_rows) != len(self.batch) or min(self.table_rows) < 0):
            raise ValueError(f"table_rows {self.table_rows} of a batch of {len(self.batch)} tensors")

    @property
    def trained(self) -> tuple[TensorSpec, ...]:
        """The parameters the optimizer changes."""
        return tuple(spec for spec in self.params if spec.name not in self.statistics)

    @property
    def param_count(self) -> int:
        """Number of trained scalars."""
        return sum(spec.size for spec in self.trained)

    @property
    def train_batch(self) -> tuple[TensorSpec, ...]:
        """The last arguments of `train_step`: the batch, then the keys of random numbers."""
        return (*self.batch, *self.keys)

    @property
    def split(self) -> tuple[str, ...]:
        """Names of the arguments of `functions` that the devices of an island divide: those of the batch."""
        return tuple(_BATCH + spec.name for spec in self.batch)

    @property
    def functions(self) -> dict[str, FunctionSpec]:
        """Signatures of both functions. No parameter has the name of another argument or of a scalar result."""
        model = (*self.params, *self.buffers)
        batch, keys = (
            tuple(msgspec.structs.replace(spec, name=_BATCH + spec.name) for spec in specs)
            for specs in (self.batch, self.keys)
        )
        loss, norm = (TensorSpec(name, "f32", ()) for name in ("the loss", "the gradient norm"))
        return {
            "train_step": FunctionSpec(
                (*model, *self.opt_state, STEP, RATE, *batch, *keys), (*self.params, *self.opt_state, loss, norm)
            ),
            "eval_step": FunctionSpec((*model, *batch), (loss,)),
        }

    def keys_of(self, seed: int, lease: int, step: int) -> tuple[np.ndarray, ...]:
        """Return the keys of an inner step of a lease; see `planetary.core.random_keys`."""
        return tuple(key_words(step_key(seed, lease, step), spec.size // 2) for spec in self.keys)


class ProgramSpec(msgspec.Struct, frozen=True):
    """Signature of a module whose functions are called one by one."""

    model: str  # a name for people
    functions: dict[str, FunctionSpec]
    integers_below: int  # exclusive bound of integer arguments, for checks on random numbers: sizes of vocabularies
    stablehlo_digest: str  # sha256 of the portable artifact that all functions were compiled from
    weights: tuple[str, ...] = ()  # arguments that stay on a device for many calls, in any layout
