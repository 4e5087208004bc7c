"""How a training step updates the parameters: the options, without their compiled form."""

from __future__ import annotations

import re
from typing import Annotated

from planetary.core.configuration.ranges import (
    Count,
    Decay,
    Factors,
    Index,
    Memory,
    NotNegative,
    Positive,
    Rounding,
    check_ranges,
    extension,
)
from planetary.core.configuration.section import Section
from planetary.core.errors import UserError
from planetary.core.extension_points import INNER_OPTIMIZERS

InnerOptimizerName = Annotated[str, extension("inner optimizer")]
INNER_OPTIMIZER = "adamw"
"""The default, of the key and of a step's options."""


class UpdateOptions(Section, frozen=True):
    """The keys of `[optimizer]` that are compiled into the step; `schema.OptimizerConfig` adds the schedule."""

    beta1: Decay = 0.9  # "adamw", "lion", and the non-matrices of "muon"
    beta2: Decay = 0.95  # decay of the squares; "adamw" and "lion"
    epsilon: Positive = 1e-8  # added to the root of the squares
    momentum: Decay = 0.95  # Nesterov's, of "sgd" and "muon"
    # "muon": name patterns of matrices that AdamW updates
    adam_for: tuple[str, ...] = ("*embed*", "*wte*", "*head*", "*router*")
    matrix_stacks: tuple[str, ...] = ("*experts*",)  # "muon" and "adafactor": of [n, rows, columns], n by themselves
    weight_decay: NotNegative = 0.1  # decoupled, times the learning rate
    decay_min_rank: Index = 2  # parameters of fewer dimensions do not decay
    no_decay: tuple[str, ...] = ()  # nor do those whose name matches one of these patterns
    clip_norm: NotNegative = 1.0  # the gradient's global norm is cut to this; 0: never
    average_decay: Decay = 0.0  # decay of a moving average of the weights in the optimizer's state; 0: no average


class ComputeOptions(Section, frozen=True):
    """The keys of `[train]` that are compiled into the step: how it computes."""

    micro_batches: Count = 1  # parts a batch is trained in, one after the other: less memory, same update
    precision: Factors = "f32"  # precision of factors in matrix products; parameters stay float32
    rounding: Rounding = "nearest"  # rounding of parameters to bf16 or f16
    # recompute activations to save memory: "none", "blocks" (as many as possible), or the bytes they may take
    remat: Memory = "none"


_COMPUTE = ComputeOptions()


class StepOptions(UpdateOptions, frozen=True, forbid_unknown_fields=True):
    """How a training step computes and updates the parameters. The learning rate is an argument of every step.

    The keys are those of `UpdateOptions` and of `ComputeOptions`, flat, as `planetary compile --step` takes them. A
    struct has one base: the second group is listed again by name, with the types and defaults of `ComputeOptions`. The
    model is made for one of the `micro_batches`.

    Raises:
        UserError: a value is of another type or out of range, or names no inner optimizer.
    """

    optimizer: InnerOptimizerName = INNER_OPTIMIZER
    micro_batches: Count = _COMPUTE.micro_batches
    precision: Factors = _COMPUTE.precision
    rounding: Rounding = _COMPUTE.rounding
    remat: Memory = _COMPUTE.remat
    marked_targets: bool = False  # a negative target does not count: micro-batches weigh as many as do

    def __post_init__(self) -> None:
        """Check every field."""
        check_ranges(self)
        remat_budget(self.remat)
        try:
            INNER_OPTIMIZERS.check_name(self.optimizer)
        except UserError as error:
            raise UserError(f"optimizer: {error}") from None


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def remat_budget(text: str) -> int | None:
    """Return the bytes that activations may take: None for "none", 0 for "blocks" (as few as possible).

    Raises:
        UserError: it is neither of these nor a number of bytes such as `"200MiB"`.
    """
    if text == "none":
        return None
    if text == "blocks":
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if found is None or found[2] not in _UNITS:
        raise UserError(
            'remat: expected "none", "blocks" or a number of bytes such as "500000000" or "200MiB" '
            f"(units: {', '.join(unit for unit in _UNITS if unit)}), found {text!r}"
        )
    return int(float(found[1]) * _UNITS[found[2]])
