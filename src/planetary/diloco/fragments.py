"""Fragments of the parameters, each synchronised in its turn (Streaming DiLoCo, arXiv:2501.18512).

A round of H / P inner steps ends with the synchronisation of one of P fragments, so that each is synchronised every H
steps, at an offset of its own, and a round moves 1 / P of the bytes. A worker keeps its own values of all fragments;
the merged one reaches it some inner steps later and is mixed into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec
from planetary.diloco.bfloat16 import from_master, to_float64


class Fragments:
    """Parts of a model's parameters, balanced by bytes."""

    def __init__(self, specs: Sequence[TensorSpec], count: int = 1) -> None:
        """Give each tensor, the largest first, to the fragment with the fewest bytes; ties go by name and by number.

        Raises:
            UserError: there are fewer tensors than fragments.
        """
        if not 1 <= count <= len(specs):
            raise UserError(
                f"sync.fragments: expected at most {len(specs)}, the number of the model's tensors, found {count}"
            )
        bins: list[list[str]] = [[] for _ in range(count)]
        nbytes = [0] * count
        for spec in sorted(specs, key=lambda one: (-one.nbytes, one.name)):
            smallest = min(range(count), key=lambda number: (nbytes[number], number))
            bins[smallest].append(spec.name)
            nbytes[smallest] += spec.nbytes
        self.parts = tuple(tuple(spec for spec in specs if spec.name in names) for names in bins)
        self.count = count

    def number_of(self, round_: int) -> int:
        """Return the fragment that a round ends with, from 0; rounds count from 1."""
        return (round_ - 1) % self.count

    def of_round(self, round_: int) -> tuple[TensorSpec, ...]:
        """Return the tensors of the fragment that a round ends with, in the model's order."""
        return self.parts[self.number_of(round_)]

    def one_each(self, versions: Iterable[int]) -> list[int]:
        """Return the newest version of each fragment among `versions`, ascending."""
        return sorted({self.number_of(version): version for version in sorted(versions)}.values())


def mixed(spec: TensorSpec, own: np.ndarray, shared: np.ndarray, mixing: float) -> np.ndarray:
    """Return α θₘ + (1 − α) θ, in the tensor's own element type; at α = 0 the shared values themselves.

    Args:
        spec: of the tensor.
        own: θₘ, the worker's values.
        shared: θ, the merged ones, in the same element type.
        mixing: α.
    """
    if mixing == 0:
        return shared
    values = mixing * to_float64(spec.dtype, own) + (1.0 - mixing) * to_float64(spec.dtype, shared)
    return from_master(spec.dtype, values.astype(np.float32).reshape(spec.shape))
