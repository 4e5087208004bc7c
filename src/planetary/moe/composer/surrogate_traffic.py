"""A composer's surrogates as they come and go beside its steps, which only see one whole bank after the other.

Decoding, checking, fitting, packing and digests are done by one background thread, one thing after the other in the
order in which the compute thread has heard of them. What is ready is left in the composer's inbox with the bank that it
has made; between two steps the compute thread takes that bank in place of its own, which is all that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Literal, Protocol

import msgspec

from planetary.artifacts.packed_arrays import Packed
from planetary.core.tensors import Tensors
from planetary.fabric.protocol import messages as m
from planetary.moe.composer.composer_events import SurrogatesInstalled
from planetary.moe.composer.composer_machine import ComposerMachine
from planetary.moe.composer.composer_surrogates import ComposerSurrogates, Refresh
from planetary.moe.plan.plan import MixturePlan
from planetary.moe.protocol import mixture_messages as mm
from planetary.moe.training.composer import ComposerSteps
from planetary.moe.training.states import ComposerState, Surrogates


class Installed(msgspec.Struct, frozen=True):
    """A shard's surrogates that have arrived are in the bank; `newer`: than those that were in it."""

    message: mm.SurrogatesReady
    newer: bool
    bank: Surrogates


class Refreshed(msgspec.Struct, frozen=True):
    """Surrogates that were fitted here are in the bank.

    Attributes:
        refreshes: one for each shard.
        progress: of the run when they were fitted.
        bank: with them in it.
        heard: how often it had been heard until then that a connection was lost or who speaks for whom.
    """

    refreshes: list[Refresh]
    progress: float
    bank: Surrogates
    heard: int


Ready = Installed | Refreshed

_Work = Callable[[], Ready | Literal["again"] | None]  # again: there is more of it, other work may go first


class Tell(Protocol):
    """Sends a message about a composer as it is now."""

    def __call__(
        self, type_: type[m.Message], kind: str = "", pack: Callable[[], Packed] | None = None, /, **fields: object
    ) -> None:
        """`pack` makes the payload, `kind` is its kind; the rest are the message's fields."""
        ...


class SurrogateTraffic:
    """See the module. All methods are for the compute thread.

    Args:
        plan: of the mixture.
        steps: which fit.
        machine: of the composer; it is told what is in the bank.
        tell: sends a message.
        background: of one thread, for everything that takes long; None: it is done at once.
        leave: something for the compute thread, from the background: for `ready`, or an error.
    """

    def __init__(
        self,
        plan: MixturePlan,
        steps: ComposerSteps,
        machine: ComposerMachine,
        tell: Tell,
        *,
        background: Executor | None,
        leave: Callable[[Ready | Exception], None],
    ) -> None:
        self._plan, self._steps, self._machine, self._tell = plan, steps, machine, tell
        self._background, self._leave = background, leave
        self._held = ComposerSurrogates(plan)  # the background's from now on, as are the next two
        self._heard = 0
        self._failed = False
        self.bank: Surrogates = self._held.bank  # what steps compute with
        self._told = 0  # as `_heard`, of which it is ahead while the background has not come to it yet
        self._early: list[tuple[mm.SurrogatesReady, Packed]] = []
        self._waiting = 0  # arrivals that are not in the bank yet
        self._fitting = False
        self._fits: tuple[int, ...] = ()  # by layer: progress of the run at the expert workers' fits published last

    @property
    def behind(self) -> bool:
        """Whether so much has arrived that steps have to wait until it is in the bank, or it would pile up.

        One of each shard may come at the same time.
        """
        return self._waiting > self._plan.training.composers

    def begin_boundary(self) -> None:
        """Take what came too early at the last boundary."""
        early, self._early = self._early, []
        for message, data in early:
            self.received(message, data)

    def received(self, message: mm.SurrogatesReady, data: Packed) -> None:
        """A shard's surrogates have arrived. Raises as `ComposerSurrogates.arrived`, or leaves that error."""
        if self._plan.pace.holds_back(message.step, self._machine.done):
            self._early.append((message, data))
            return
        self._waiting += 1
        self._do(partial(self._install, message, data))

    def disconnected(self) -> None:
        """The connection was lost."""
        self._told += 1
        self._do(partial(self._hear, self._held.disconnected))

    def speak_for(self, shards: Sequence[int]) -> None:
        """The gateway says whose surrogates are published from here; the machine has not been told yet."""
        self._told += 1
        self._fits = ()
        self._do(partial(self._hear, partial(self._held.speak_for, self._machine.speaks, shards)))

    def fit(self, state: ComposerState) -> None:
        """Fit the surrogates of the experts that are spoken for, one such refresh at a time: the next one comes.

        Raises as `ComposerSurrogates.refreshed`, or leaves that error.
        """
        progress: float = self._machine.progress
        if self._fitting:
            return
        if self._steps.workers_fit:
            if not (self._machine.connected and self._take_fits(state.fitted)):
                return
            progress = sum(self._fits) / len(self._fits)
        self._fitting = True
        self._do(partial(next, self._refresh(state, self._machine.done, progress)))

    def ready(self, found: Ready) -> None:
        """Swap the bank, and publish what was fitted."""
        self.bank = found.bank
        machine = self._machine
        if isinstance(found, Installed):
            self._waiting -= 1
            if found.newer:
                said = found.message
                machine.handle(SurrogatesInstalled(said.shard, said.step, said.progress))
            return
        self._fitting = False
        for new in found.refreshes if machine.shard >= 0 else ():
            if new.shard not in machine.speaks:
                continue  # another owner speaks for it by now
            machine.handle(SurrogatesInstalled(new.shard, new.version, found.progress))
            one = new.publication
            # On another connection, or told anew who speaks, it may be a change of what nobody has.
            if one is not None and found.heard == self._told:
                said = {"payload": one.payload, "change": one.change, "base": one.base, "error": one.error}
                said |= {"of": new.shard, "step": new.version, "progress": found.progress}
                self._tell(mm.PublishSurrogates, "", partial(_same, one.data), **said)

    def _take_fits(self, fitted: Sequence[Tensors]) -> bool:
        """Return whether what expert workers have fitted, by layer as in `HeldExperts`, is to be published.

        It is if something of it is new, and nothing is missing, as it is before a composer has got its experts.
        """
        fits = tuple(int(layer["progress"]) for layer in fitted if layer)
        if not fits or len(fits) < len(fitted):
            return False
        if fits == self._fits and not self._plan.pace.publishes_unchanged_fits:
            return False
        self._fits = fits
        return True

    def _do(self, work: _Work) -> None:
        if self._background is not None:
            self._background.submit(self._go_on, self._background, work)
            return
        while (found := work()) == "again":
            pass
        if found is not None:
            self.ready(found)

    # --- in the background ------------------------------------------------------------------------------------

    def _go_on(self, background: Executor, work: _Work) -> None:
        if self._failed:
            return  # the compute thread gives up what is here as soon as it hears why
        try:
            found = work()
            if found == "again":
                background.submit(self._go_on, background, work)
            elif found is not None:
                self._leave(found)
        except Exception as error:  # noqa: BLE001 - the compute thread raises it
            self._failed = True
            self._leave(error)

    def _hear(self, change: Callable[[], None]) -> None:
        change()
        self._heard += 1

    def _install(self, message: mm.SurrogatesReady, data: Packed) -> Ready:
        newer = self._held.arrived(message, data)
        return Installed(message, newer, self._held.bank)

    def _refresh(self, state: ComposerState, step: int, progress: float) -> Iterator[Ready | Literal["again"]]:
        for refreshes in self._held.refreshed(self._steps, state, step):
            if refreshes is None:
                yield "again"
            else:
                yield Refreshed(refreshes, progress, self._held.bank, self._heard)


def _same(data: memoryview) -> memoryview:
    return data
