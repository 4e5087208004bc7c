"""A site's dealings with the hub, all between two rounds of the site. See `docs/federation.md`."""

from __future__ import annotations

import math

from planetary.runs.federation.records import ContributionOffered, VersionAdopted, WentAlone
from planetary.runs.federation.site import events as s
from planetary.runs.federation.site.points import Anchor, Offered
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.messages import TrainTask


def adoption_of(anchor: Anchor, tokens_total: int, why: str = "") -> VersionAdopted:
    """Return the record of a site's start from an anchor, after `tokens_total` own tokens."""
    carried = tokens_total - anchor.tokens
    return VersionAdopted(round=anchor.round, version=anchor.version, carried=carried, why=why)


class Border:
    """A part of a site's controller; a pure machine as that is.

    Attributes:
        anchor: the hub's version the site trains from; None before the first.
        offered: the last contribution, until a newer version shows whether it counted.
        task: the hub's request; None: nothing.
        failure: why the site cannot go on with this hub; "" while it can.
    """

    def __init__(
        self, desk: RoundsDesk, anchor: Anchor | None, offered: Offered | None, patience_s: float, now: float
    ) -> None:
        """Start at monotonic time `now`; a site with a known hub gives the hub some time to answer."""
        self._desk, self._patience_s = desk, patience_s
        self.anchor, self.offered = anchor, offered
        self.task: TrainTask | None = None
        self.failure = ""
        self._arrived: s.VersionArrived | None = None
        self._adopting: s.AdoptVersion | None = None
        self._keeping = False  # a contribution is being written
        self._waits_until: float | None = None if anchor is None else now + patience_s
        self._is_alone = False
        self._went_on_at = now
        self._why = ""  # reason why the site's training is given up
        self._shown = 0  # the last round of which the hub was shown progress

    # --- messages of the hub ----------------------------------------------------------------------------------

    def arrived(self, event: s.VersionArrived) -> None:
        """Take a version; the newest counts."""
        self._arrived, self._is_alone = event, False

    def asks(self, task: TrainTask) -> None:
        """Take a task."""
        self.task, self._is_alone = task, False

    def asks_no_more(self, task: int) -> None:
        """Forget a task."""
        if self.task is not None and self.task.task == task:
            self.task = None

    def taken(self, anchor: Anchor, now: float) -> None:
        """The site has the parameters it asked for."""
        self.anchor, self.offered, self._adopting = anchor, None, None
        self._waits_until, self._went_on_at = None, now
        why, self._why = self._why, ""
        self._desk.append(adoption_of(anchor, self._desk.state.tokens_total, why))

    def kept(self) -> None:
        """The contribution is in flight."""
        self._keeping = False

    # --- between two rounds -----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether files are being written, or the site's parameters are about to be replaced."""
        return self._keeping or self.is_adopting

    @property
    def is_adopting(self) -> bool:
        """Whether the site's parameters are being replaced, or are about to be."""
        return self._adopting is not None or self._arrived is not None

    def passes(self, now: float, *, evaluates: bool, is_last: bool) -> bool:
        """Handle the end of the newest round; return whether the next one may begin.

        Asked again after every event while no round is open. `evaluates`: whether the newest parameters still are;
        `is_last`: whether no round follows, so whatever there is is offered.
        """
        state = self._desk.state
        if self._adopting is not None or self._keeping or self.failure:
            return False
        if self._arrived is not None and (evaluates or self._take(self._arrived)):
            return False
        if self.anchor is None:
            return False
        if state.durable_round < state.round:
            return True  # the checkpoint failed: nothing is handed over that the site might lose
        rounds = state.round - self.anchor.round
        if self.task is not None and rounds > 0 and (rounds >= self.task.steps or is_last):
            self._offer(self.task, self.anchor, now)
            return False
        if self._waits_until is None and self.task is None and rounds > 0:
            self._go_alone("the hub asks for nothing, or is out of reach")
        return self._is_over(now)

    def is_due(self, round_: int) -> bool:
        """Whether the parameters of a round may not be those the next one begins with."""
        task, anchor = self.task, self.anchor
        return self.is_adopting or (task is not None and anchor is not None and round_ - anchor.round >= task.steps)

    def wait(self) -> str:
        """Return a sentence on why the site waits; "" where the next round may begin."""
        if self.anchor is None:
            return "waiting for the hub's first version"
        if self._adopting is not None or self._arrived is not None:
            return "adopting a version of the hub"
        return "" if self._waits_until is None else "waiting for the hub's next version"

    def next_deadline(self) -> float | None:
        """When the patience with the hub ends, where nothing else is under way."""
        return None if self.is_busy else self._waits_until

    def show_progress(self) -> None:
        """Let the hub see that a round is done."""
        state = self._desk.state
        if self.task is None or self.anchor is None or state.round in (self._shown, self.anchor.round):
            return
        self._shown = state.round
        loss = state.train_losses.get(state.round, 0.0)
        self._desk.out.append(s.ShowProgress(self.task.task, state.round - self.anchor.round, loss))

    # --- inside -----------------------------------------------------------------------------------------------

    def _take(self, arrived: s.VersionArrived) -> bool:
        """Begin to go on from a version; return whether anything has begun, or failed."""
        self._arrived = None
        state, anchor, offered = self._desk.state, self.anchor, self.offered
        tokens, base = state.tokens_total, None
        if arrived.counted > tokens:
            self.failure = (
                f"the hub has counted {arrived.counted} tokens of this site, and its run folder has {tokens}: it is "
                "another folder, or went back to an earlier round. Go on with the folder that this site had, or "
                "join under another name"
            )
            return True
        if anchor is not None:
            if arrived.is_anchor and arrived.counted <= anchor.tokens:
                return False  # the site has it already, with the tokens that are not in it on top
            base = self._base_of(arrived, anchor, offered)
        counted = tokens if base is None else base.tokens
        base = None if counted == tokens else base
        self._adopting = s.AdoptVersion(arrived.version, state.round, counted, base)
        self._desk.out.append(self._adopting)
        return True

    def _base_of(self, arrived: s.VersionArrived, anchor: Anchor, offered: Offered | None) -> Anchor | Offered | None:
        """Return where the tokens begin put on top of a version; None: nothing is."""
        is_offered = offered is not None and arrived.counted == offered.tokens
        if arrived.version > anchor.version:
            return offered if is_offered else anchor
        self._why = f"the hub went back from version {anchor.version} to {arrived.version}"
        if arrived.counted < anchor.tokens:  # it lost versions, or was resumed from an older checkpoint
            lost = anchor.tokens - arrived.counted
            self._why += f", and {lost} tokens of this site that only its later versions had are lost"
            return anchor
        self._why += ", since later ones are of no use: the training of this site from them is given up"
        return offered if is_offered and arrived.is_anchor else None

    def _offer(self, task: TrainTask, anchor: Anchor, now: float) -> None:
        state, self.task = self._desk.state, None
        rounds = range(anchor.round + 1, state.round + 1)
        losses = [state.train_losses[round_] for round_ in rounds if round_ in state.train_losses]
        tokens = state.tokens_total - anchor.tokens
        self.offered = Offered(round=state.round, tokens=state.tokens_total)
        self._keeping, self._waits_until = True, now + self._patience_s
        self._desk.append(ContributionOffered(round=state.round, version=anchor.version, tokens=tokens))
        self._desk.out.append(
            s.OfferParameters(
                task=task,
                offered=self.offered,
                rounds=len(rounds),
                tokens=tokens,
                loss=sum(losses) / len(losses) if losses else math.nan,
                seconds=now - self._went_on_at,
            )
        )

    def _is_over(self, now: float) -> bool:
        """Whether there is nothing to wait for, or the patience has ended."""
        if self._waits_until is None:
            return True
        if now < self._waits_until:
            return False
        self._waits_until = None
        self._go_alone(f"the hub sent no version for {self._patience_s:g} s")
        return True

    def _go_alone(self, why: str) -> None:
        if not self._is_alone:
            self._is_alone = True
            self._desk.append(WentAlone(round=self._desk.state.round, why=why))
