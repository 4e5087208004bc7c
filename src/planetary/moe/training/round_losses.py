"""What a composer says of its steps when it saves its state: their mean loss and the time that they took."""

from __future__ import annotations


class RoundLosses:
    """The steps since a round's end; what was said of them stays until the next step, for it may have to be sent again.

    Attributes:
        compute_s: seconds that these steps took.
    """

    def __init__(self) -> None:
        """No step was taken."""
        self.compute_s = 0.0
        self._losses: list[float] = []
        self._said, self._round = False, 0

    def clear(self) -> None:
        """Forget them: another state goes on."""
        self.compute_s, self._losses, self._said = 0.0, [], False

    def stepped(self, loss: float, seconds: float) -> None:
        """A step was taken, with a loss in nats per token."""
        if self._said:
            self.clear()
        self._losses.append(loss)
        self.compute_s += seconds

    def mean(self) -> float | None:
        """Return the mean loss; None where there is no step."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def saved(self, round_: int) -> None:
        """A state was sent when so many rounds were over."""
        if round_ > self._round:
            self._round, self._said = round_, True
