"""Whether parameters are of any use, by their loss, and how a run goes on after some that were not.

Judging contributions by each other (`sync.judgement`) is blind where there is one worker, or where most of them lie.
The damage then shows in the loss. These are the limits above which a loss counts as damage: one that is only somewhat
higher is training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

LOSS_MARGIN = 0.25  # nats per token a loss may always rise
MOST_RETREATS = 3  # retreats per run; after them a somewhat higher loss is attributed to the learning rates
PATIENCE = 4.0  # growth of the allowed rise after that
CAUTIOUS_ROUNDS = 8  # cautious rounds after a useless version
CAUTIOUS_RULE = "median"  # how their contributions are merged


def is_sane(loss: float, best: float | None, rise: float) -> bool:
    """Whether a loss is none of damaged parameters.

    Args:
        loss: nats per token.
        best: the lowest before it; None: there is none.
        rise: the part of it by which a loss may be higher; 0: everything is sane, unless it is not finite.
    """
    if not math.isfinite(loss):
        return False
    return best is None or rise <= 0 or loss <= best * (1 + rise) + LOSS_MARGIN


def first_damaged(losses: Mapping[int, float], rise: float, training: Mapping[int, float] | None = None) -> int | None:
    """Return the first version, or round, whose loss is insane after those before it; None when all are sane.

    Args:
        losses: version, or round -> nats per token.
        rise: as in `is_sane`.
        training: round -> training loss, where `losses` are held-out ones. Losses of a model that learns the data by
            heart rise far, but by less than `LOSS_MARGIN` from one to the next, and the training loss does not.
    """
    learned = {} if training is None else training
    unlearned = first_damaged(learned, rise) if learned else 0
    best = last = None
    for number in sorted(losses):
        loss = losses[number]
        by_heart = (unlearned is None or number < unlearned) and last is not None and loss <= last + LOSS_MARGIN
        if not (is_sane(loss, best, rise) or by_heart):
            return number
        best = loss if best is None else min(best, loss)
        last = loss
    return None


def is_cautious(round_: int, retreats: Iterable[int]) -> bool:
    """Whether a round is merged by `CAUTIOUS_RULE`, given the versions the run went back from."""
    return any(bad <= round_ <= bad + CAUTIOUS_ROUNDS for bad in retreats)
