"""What a held-out loss is, where some of those who evaluate it may lie: a pure function of what they say.

The same parameters on the same tokens give the same loss on every device, up to rounding. So a loss that is unlike
those before it, or has none before it, is computed again by others. It is believed when most of all workers say it, and
whoever differs from those who are believed is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import msgspec

from planetary.diloco.sanity import LOSS_MARGIN, is_sane

TOLERANCE = 0.02  # relative, between devices; far above rounding, far below what would make a run go back
LOWEST = 0.5  # of the best loss before, less `LOSS_MARGIN`; no round of training gains so much


class Settled(msgspec.Struct, frozen=True):
    """What a part of the held-out loss is taken to be."""

    loss: float
    wrong: tuple[str, ...] = ()  # who said something else


def settle(said: Mapping[str, float], best: float | None, rise: float, others: int) -> Settled | None:
    """Return the loss that is taken for the truth; None when another worker is to evaluate, too.

    Args:
        said: worker -> loss, nats per token, finite; at least one.
        best: the lowest loss of earlier versions; None: there is none, so that two have to say the same.
        rise: as of `diloco.sanity.is_sane`.
        others: how many more workers could be asked.
    """
    groups = [[other for other in said if _agree(said[other], said[one])] for one in said]
    for group in sorted(groups, key=len, reverse=True):
        loss = said[group[0]]
        plausible = is_sane(loss, best, rise) and (best is None or loss >= LOWEST * best - LOSS_MARGIN)
        agreed = len(group) > 1 or (len(said) == 1 and (best is not None or others == 0))
        if (plausible and agreed) or 2 * len(group) > len(said) + others:
            return Settled(loss, tuple(worker for worker in said if worker not in group))
    return None if others > 0 else Settled(median(said.values()))


def _agree(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other), 1.0)
