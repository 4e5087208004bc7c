"""How a training step updates the parameters: the options, without what they compile to."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from planetary.core.errors import UserError


class StepOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a training step computes and updates the parameters. The learning rate is an argument of every step."""

    optimizer: Literal["adamw", "sgd", "lion", "adafactor", "muon"] = "adamw"
    beta1: float = 0.9  # "adamw", "lion"; "muon" for what is not a matrix
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.95  # "sgd" and "muon"
    nesterov: bool = True  # "sgd" and "muon"
    # "muon": name patterns of matrices that AdamW updates
    adam_for: tuple[str, ...] = ("*embed*", "*wte*", "*head*", "*router*")
    matrix_stacks: tuple[str, ...] = ("*experts*",)  # "muon" and "adafactor": of [n, rows, columns], n by themselves
    weight_decay: float = 0.1
    decay_min_rank: int = 2  # parameters of fewer dimensions do not decay
    no_decay: tuple[str, ...] = ()  # nor do those whose name matches one of these patterns
    clip_norm: float = 1.0  # global gradient norm; 0: no clipping
    average_decay: float = 0.0  # of a moving average of the weights, kept in the state; 0: none
    micro_batches: int = 1  # parts of a batch, one after the other; the model is made for one part
    precision: Literal["f32", "bf16", "f16"] = "f32"  # of the factors in contractions
    rounding: Literal["nearest", "stochastic"] = "nearest"  # of parameters, wherever they become bf16 or f16
    # of what the model computes in float64 between its arguments and its loss: in float32, or an error
    f64: Literal["demote", "refuse"] = "demote"
    remat: str = "none"  # what is recomputed: "none", "blocks", or bytes that activations may take, as "200MiB"

    def __post_init__(self) -> None:
        """Raise `UserError` for a value outside its range."""
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UserError(f"beta1 and beta2 must be in [0, 1), found {self.beta1} and {self.beta2}")
        if not (0 <= self.momentum < 1 and 0 <= self.average_decay < 1):
            raise UserError(
                f"momentum and average_decay must be in [0, 1), found {self.momentum} and {self.average_decay}"
            )
        if not self.epsilon > 0:
            raise UserError(f"epsilon must be above 0, found {self.epsilon}")
        if not (self.weight_decay >= 0 and self.clip_norm >= 0):
            raise UserError(
                f"weight_decay and clip_norm must be at least 0, found {self.weight_decay} and {self.clip_norm}"
            )
        if self.micro_batches < 1:
            raise UserError(f"micro_batches must be at least 1, found {self.micro_batches}")
        remat_budget(self.remat)


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
