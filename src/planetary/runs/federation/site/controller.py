"""The controller of a site: that of a run in rounds, which meets the hub between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planetary.fleet.controller.controller import RunPhase
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol.records import EndKind
from planetary.runs.federation.site import events as s
from planetary.runs.federation.site.border import Border
from planetary.runs.federation.site.points import Anchor, Offered
from planetary.runs.rounds.controller.controller import Controller
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.star import Star
from planetary.runs.rounds.controller.topology import Topology
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.policy import ControllerPolicy
from planetary.runs.rounds.state import ControllerState


class SiteStar(Star):
    """A star that sends no parameters ahead of a replacement by the hub."""

    def __init__(self, desk: RoundsDesk, is_due: Callable[[int], bool]) -> None:
        """`is_due`: whether that is so after a round."""
        super().__init__(desk)
        self._is_due = is_due

    def announce(self, round_: int) -> None:
        if not self._is_due(round_):
            super().announce(round_)

    def replaced(self) -> None:
        """The parameters of the newest version are others than workers may have been sent."""
        for worker in self._desk.workers.values():
            worker.version = -1


class SiteController(Controller):
    """The controller of a site: trains in rounds, and meets the hub between two of them.

    Attributes:
        border: the site's dealings with the hub.
    """

    def __init__(
        self,
        policy: ControllerPolicy,
        state: ControllerState,
        now: float,
        unreported: Iterable[RoundMetrics] = (),
        *,
        anchor: Anchor | None,
        offered: Offered | None,
        patience_s: float,
    ) -> None:
        super().__init__(policy, state, now, unreported)
        self.border = Border(self.desk, anchor, offered, patience_s, now)
        self._may_pass = False
        self._over: tuple[EndKind, str] | None = None  # the hub has nothing more to do with this site

    def _topology_of(self, policy: ControllerPolicy) -> Topology:
        self._star = SiteStar(self.desk, self._is_due)
        return self._star

    def _is_due(self, round_: int) -> bool:
        return self.border.is_due(round_)

    def _deadlines(self) -> Iterable[float | None]:
        between = self.state.open is None
        return (*super()._deadlines(), self.border.next_deadline() if between and not self._may_pass else None)

    def _startup_tick(self) -> float | None:
        """A deadline that has passed while the hub is waited for would be due for ever."""
        return None if self.border.wait() else super()._startup_tick()

    def _take_event(self, event: e.Event, now: float) -> None:
        match event:
            case s.VersionArrived():
                self.border.arrived(event)
            case s.HubAsks():
                self.border.asks(event.task)
            case s.HubAsksNoMore():
                self.border.asks_no_more(event.task)
            case s.VersionTaken():
                self.border.taken(event.anchor, now)
                self._star.replaced()
            case s.ContributionKept():
                self.border.kept()
            case s.SiteFileLost():
                self._end("resource", event.reason)
            case s.FederationEnded():
                self._over = (event.kind, event.reason)
            case _:
                super()._take_event(event, now)

    # --- consequences -----------------------------------------------------------------------------------------

    def _may_open(self, now: float) -> bool:
        return super()._may_open(now) and self._passes(now)

    def _passes(self, now: float) -> bool:
        """Meet the hub, as far as it is time; return whether the next round may begin."""
        round_ = self.state.round
        passes = self.border.passes(
            now, evaluates=round_ in self.evaluation.versions, is_last=not self.training.may_open
        )
        self._may_pass = passes and self._over is None
        return self._may_pass

    def _go_on(self, now: float) -> None:
        super()._go_on(now)
        if self._has_ended or self.phase is not RunPhase.RUNNING or self.guard.retreat is not None:
            return
        self.border.show_progress()
        if self.state.open is None and not self._passes(now) and self.border.failure:
            self._end("data", self.border.failure)
        elif self._over is not None and self._over[0] != "done":
            self._end(*self._over)

    def _retreats(self, now: float) -> bool:
        """End when parameters are of no use: the hub has the tokens behind them, so the site cannot go back."""
        damage = None if self.training.ended is not None else self.guard.damage()
        if damage is not None:
            self._end("numerics", damage[1])
        return damage is not None

    def _why_nothing_goes_on(self) -> str:
        why = super()._why_nothing_goes_on()
        return why or (self.border.wait() if self.state.open is None and not self._may_pass else "")

    def _is_done(self) -> tuple[EndKind, str] | None:
        if self.state.open is not None or self.border.is_busy:
            return None
        if self._over is not None and not self.evaluation.versions:
            return self._over
        return super()._is_done() if self._may_pass else None
