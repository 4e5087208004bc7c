"""Possible states of an expert's optimizer and residuals of lossy updates: pure, with the reason in words.

Both travel with an expert from one worker to the next, and are not computed again. A defect in them outlives the update
it came with: a mean square far too large or too small makes the next honest steps so short or so long that none of them
counts, and a refused update changes nothing. So a state that cannot come from gradients is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from planetary.core.configuration.step_options import StepOptions
from planetary.core.tensors import Tensors
from planetary.runs.mixture.methods.delta import Form, most_dropped

COUNT = ".count"  # suffix of the name of an optimizer's count of steps
_MEAN, _SQUARE = "adam.mean.", "adam.square."
_SQUARES = ("adam.square.", "adafactor.")
_AVERAGE = "average."  # prefix of the weights' averages

MOST_NATS = 1e4
"""The largest gradient: the gradient's length times that of the weights, in nats. A change of the weights by a
thousandth would change the mean loss by ten nats then; a model that knows nothing has the logarithm of its vocabulary,
about 12. Experts of the tests' small model are below 3."""

MOST_AVERAGE = 10.0
"""How far an average of the weights may be from them, relative to them."""

_ROUNDING = 1.01
_UNDERFLOW = 1e-15  # a mean whose squares are too small for float32; steps are divided by at least `epsilon`


def wrong_count(before: Tensors, after: Tensors, steps: int) -> str:
    """Return the defect of the state that experts of a layer share, or "": their counts go on by `steps`."""
    for name, value in before.items():
        expected = value + steps if name.endswith(COUNT) else value
        if value.ndim == 0 and after[name] != expected:
            return f"{name} is {after[name]}, expected {expected}"
    return ""


class MomentRule(msgspec.Struct, frozen=True):
    """The possible states of one expert, of an optimizer with these options."""

    options: StepOptions = StepOptions()

    def impossible(self, moments: Tensors, weights: Tensors, count: int) -> str:
        """Return why finite moments of one expert cannot come from gradients, or "".

        Args:
            moments: of one expert, by name.
            weights: of it.
            count: steps behind them, at most.
        """
        size = _norm(weights)
        total: dict[str, dict[str, np.ndarray]] = {"means": {}, "squares": {}}
        for name, value in moments.items():
            if name.startswith(_SQUARES) and (value < 0).any():
                return f"{name} is a mean of squares and {value.min():.3g} somewhere"
            if name.startswith(_AVERAGE):
                whole = weights[name.removeprefix(_AVERAGE)]
                apart = _norm({name: value.astype(np.float64) - whole})
                if apart > MOST_AVERAGE * _norm({name: whole}):
                    return f"{name} is {apart:.3g} from the weights"
                continue
            total["squares" if name.startswith(_SQUARES) else "means"][name] = value
        lengths = {
            "squares": math.sqrt(sum(float(np.sum(v, dtype=np.float64)) for v in total["squares"].values())),
            "means": _norm(total["means"]) * (1 - self.options.momentum if self.options.optimizer == "sgd" else 1),
        }
        for what, length in lengths.items():
            if length * size > MOST_NATS:
                return f"its {what} stand for gradients of length {length:.3g}, its weights have {size:.3g}"
        most = self._mean_over_root(count)
        for name in moments:
            if name.startswith(_MEAN) and math.isfinite(most):
                root = np.sqrt(moments[_SQUARE + name.removeprefix(_MEAN)], dtype=np.float64)
                if (np.abs(moments[name]) > _ROUNDING * most * root + _UNDERFLOW).any():
                    return f"{name} is more than {most:.3g} times the root of the mean squares"
        return ""

    def _mean_over_root(self, count: int) -> float:
        """The largest ratio of Adam's mean of gradients to the root of the mean of squares, after `count` steps.

        Both are sums over the same gradients, weighted with (1 - β1) β1ⁿ and (1 - β2) β2ⁿ: Cauchy and Schwarz.
        """
        beta1, beta2 = self.options.beta1, self.options.beta2
        ratio = beta1**2 / beta2 if beta2 else math.inf
        if ratio < 1:
            terms = (1 - ratio**count) / (1 - ratio)
        elif ratio == 1:
            terms = float(count)
        else:  # old gradients count for more and more in the mean: no bound holds
            return math.inf
        return (1 - beta1) * math.sqrt(terms / (1 - beta2))


def too_much_left(before: Tensors, after: Tensors, left: Tensors, form: Form, keep: float) -> dict[int, str]:
    """Return by slot why an update in a lossy form cannot have dropped so much.

    Args:
        before: weights, by name, [slots, ...].
        after: with the sent update.
        left: the residual. One that is not finite is left to `acceptance.judge`.
        form: of the update.
        keep: part of the elements that "topk" sends.
    """
    found: dict[int, str] = {}
    for name, value in left.items():
        most = most_dropped(form, keep, value.size)
        dropped, sent = (np.nan_to_num(_norm_of_each(x), posinf=0.0) for x in (value, after[name] - before[name]))
        if form == "topk":  # the largest of all slots together: one of them may send nothing
            dropped, sent = (np.full_like(x, np.linalg.norm(x)) for x in (dropped, sent))
        # A number far below the weights is rounded away where it is added to them.
        for slot in np.flatnonzero(dropped > most * sent + 1e-6 * _norm_of_each(before[name])):
            why = f"its residual of {name} is {dropped[slot]:.3g}, the update {sent[slot]:.3g}"
            found.setdefault(int(slot), why)
    return found


def _norm_of_each(value: np.ndarray) -> np.ndarray:
    """Of every slot, float64 [slots]."""
    return np.sqrt(np.sum(np.square(value, dtype=np.float64), axis=tuple(range(1, value.ndim))))


def _norm(tensors: Mapping[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(t, dtype=np.float64))) for t in tensors.values()))
