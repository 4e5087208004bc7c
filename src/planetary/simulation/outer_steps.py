"""The real outer steps of the ring, as the simulated workers take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planetary.diloco.outer import OuterState, outer_step
from planetary.diloco.ring import Held, outer_step_of_sum, share
from planetary.simulation.numerics import Numerics

OuterStepOf = Callable[[Numerics, OuterState, Sequence[Held]], OuterState]


def outer_of_held(numerics: Numerics, state: OuterState, parts: Sequence[Held]) -> OuterState:
    """Return the state after results that were trained from `state`."""
    for part in parts:
        for name, start in part.start.items():
            np.testing.assert_array_equal(start, state.params[name], "a result was trained from other parameters")
    contributions = [part.contribution for part in parts]
    return outer_step(numerics.specs, state, contributions, numerics.learning_rate, numerics.momentum).state


def delayed_outer(numerics: Numerics, state: OuterState, parts: Sequence[Held]) -> OuterState:
    """Return the state after the outer step with overlap: from `state`, with deltas from wherever they began."""
    specs = numerics.specs
    summed = share(specs, parts, sum(part.contribution.tokens for part in parts), "delta")
    return outer_step_of_sum(specs, state, (summed, "delta"), numerics.learning_rate, numerics.momentum).state
