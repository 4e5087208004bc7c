"""Fragments of the parameters, each synchronised in turn (Streaming DiLoCo, arXiv:2501.18512).

A round of H / P inner steps ends with the synchronisation of one of P fragments, so each is synchronised every H steps,
at a separate offset, and a round moves 1 / P of the bytes. A worker keeps own values of all fragments; the merged one
reaches it some inner steps later and is mixed into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec
from planetary.sync.bfloat16 import from_master, to_float64


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
        """Return the fragment a round ends with, from 0; rounds count from 1."""
        return (round_ - 1) % self.count

    def of_round(self, round_: int) -> tuple[TensorSpec, ...]:
        """Return the tensors of the fragment a round ends with, in the model's order."""
        return self.parts[self.number_of(round_)]

    def one_each(self, versions: Iterable[int]) -> list[int]:
        """Return the newest version of each fragment among `versions`, ascending."""
        return sorted({self.number_of(version): version for version in sorted(versions)}.values())


class FragmentSteps:
    """Inner steps for which a worker's own values of each fragment were trained since shared ones were mixed in.

    They are behind the worker's delta of the fragment. A returning worker begins with shared values of all fragments,
    so the first deltas are shorter than the others'.
    """

    def __init__(self, count: int = 1, delay: int = 0) -> None:
        """Start with the shared values of `count` fragments; a lease mixes one in after `delay` steps."""
        self._delay = delay
        self._steps = [0] * count

    def begin(self, missed: Iterable[int], *, goes_on: bool) -> None:
        """A lease begins from the worker's own values, or from the shared ones; `missed`: versions mixed in before."""
        for number in {(version - 1) % len(self._steps) for version in missed} if goes_on else range(len(self._steps)):
            self._steps[number] = 0

    def trained(self, steps: int, mixes: int) -> None:
        """A lease of so many steps is trained, in which version `mixes` was mixed in; -1: none."""
        self._steps = [before + steps for before in self._steps]
        if mixes >= 0:
            self._steps[(mixes - 1) % len(self._steps)] = max(0, steps - self._delay)

    def of_round(self, round_: int) -> int:
        """Return the steps behind a delta of the fragment a round ends with."""
        return self._steps[(round_ - 1) % len(self._steps)]

    def share(self, round_: int, lease_steps: int) -> float:
        """Return these steps against those of a worker that has been there from the start and missed nothing."""
        count = len(self._steps)
        whole = round_ * lease_steps if round_ <= count else count * lease_steps - self._delay
        return self.of_round(round_) / max(1, whole)


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
