"""A composer's surrogates in transit beside the steps, which only see one whole bank after the other.

Decoding, checking, fitting, packing and digests are done by one background thread, one thing after the other in the
order in which the compute thread took their messages. Results are left in the composer's inbox with the new bank;
between two steps the compute thread takes that bank, and does no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Literal, Protocol

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.store import digest_of
from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import Tensors
from planetary.fleet.protocol import messages as m
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.composer.events import SurrogatesInstalled
from planetary.runs.mixture.composer.machine import ComposerMachine
from planetary.runs.mixture.payloads.surrogates import (
    change_bytes,
    changed_surrogates,
    empty_bank,
    install,
    messages_of,
    surrogates_bytes,
    surrogates_from,
)
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.training.composer import ComposerSteps, LayerFit, mean_error
from planetary.runs.mixture.training.participant_states import ComposerState, Surrogates
from planetary.runs.mixture.training.replicas import only_shards


class SurrogatePublication(msgspec.Struct, frozen=True):
    """New surrogates of one shard, with fields of `PublishSurrogates`; `data` comes along."""

    payload: str
    change: str
    base: str
    error: float | None
    data: memoryview


class Refresh(msgspec.Struct, frozen=True):
    """A shard has new surrogates of a version; nothing is published where there is no connection."""

    shard: int
    version: int
    publication: SurrogatePublication | None


class ComposerSurrogates:
    """The surrogates a composer holds, and which of them others are known to hold, too.

    A change of surrogates is of use to a peer with the surrogates before it. So for every shard this keeps the payload
    that was sent or received last on the present connection; the gateway keeps the same, and both drop it at the same
    messages. A bank handed out never changes: a change makes another one.
    """

    def __init__(self, plan: MixturePlan) -> None:
        """Start without surrogates, and speaking for no shard."""
        self._plan = plan
        self.bank: Surrogates = empty_bank(plan)
        self._known: dict[int, str] = {}
        self._newest = [-1] * plan.training.composers  # version, by shard
        self._speaks: tuple[int, ...] = ()
        self._connected = False

    def disconnected(self) -> None:
        """Forget the gateway's copies: the connection was lost."""
        self._known.clear()
        self._connected = False

    def speak_for(self, before: Sequence[int], now: Sequence[int]) -> None:
        """On a connection, other shards' surrogates are published from here now than before.

        These begin whole, and so do those not published from here any more.
        """
        self._speaks, self._connected = tuple(now), True
        for shard in {*before, *now}:
            self._known.pop(shard, None)
            if shard not in now:  # unpublished surrogates are void: another composer's are the next
                versions = np.where(self._plan.owner_map == shard, -1, self.bank.versions)
                self.bank = msgspec.structs.replace(self.bank, versions=versions)

    def arrived(self, message: mm.SurrogatesReady, data: Packed) -> bool:
        """Take a shard's surrogates that were fitted elsewhere; return whether any are newer than those here.

        Raises:
            TrustError: they are damaged, or not their sender's.
            RemoteProtocolError: they are a change of others than those that are here.
        """
        if not message.change:
            messages = surrogates_from(data)
        elif message.base == self._known.get(message.shard):
            messages = changed_surrogates(data, self.bank.of, self._plan.training)
        else:
            raise RemoteProtocolError(
                f"the gateway changes surrogates of shard {message.shard} that are not those which it sent before"
            )
        before, self.bank = self.bank, install(self.bank, messages, self._plan)
        self._known[message.shard] = message.payload
        newer = bool((self.bank.versions > before.versions).any())
        if newer:
            self._newest[message.shard] = max(message.step, self._newest[message.shard])
        return newer

    def refreshed(self, steps: ComposerSteps, state: ComposerState, step: int) -> Iterator[list[Refresh] | None]:
        """Fit the surrogates of the experts spoken for and take them.

        Yields None after every layer, when other work may go first, and at last the refreshes to publish.

        Args:
            steps: which fit.
            state: of the composer after `step` steps.
            step: see there.

        Raises:
            NumericsError: a fit is not finite.
        """
        bank, bases = self.bank, dict(self._known)
        fits: dict[int, list[LayerFit]] = {shard: [] for shard in self._speaks}
        for shard, found in fits.items():
            experts = only_shards(state, self._plan.owner_map, [shard])
            for layer in range(self._plan.model.n_layer):
                found.append(steps.fit_layer(experts, bank, layer, whole=shard not in bases))
                yield None
        # Another owner may speak for a shard by now.
        yield [self._fitted(s, step, found, bases.get(s)) for s, found in fits.items() if s in self._speaks]

    def _fitted(self, shard: int, step: int, fits: Sequence[LayerFit], base: str | None) -> Refresh:
        """`base`: the payload known when the fit began, the base of the changes."""
        # Versions are steps, but who speaks for others' experts may have taken more or fewer than they.
        version = self._newest[shard] = max(step, self._newest[shard] + 1)
        messages = messages_of(fits, shard, version)
        self.bank = install(self.bank, messages, self._plan)
        if not self._connected:
            return Refresh(shard, version, None)
        whole = surrogates_bytes(messages)
        name = f"surrogate/{digest_of(whole)}"
        error = mean_error(fits) if any(fit.errors.size for fit in fits) else None
        before, self._known[shard] = self._known.get(shard), name
        smaller = all(len(fit.changes) == len(fit.experts) for fit in fits)
        if not smaller or before is None or before != base:
            return Refresh(shard, version, SurrogatePublication(name, "", "", error, whole))
        data = change_bytes(messages, fits)
        return Refresh(shard, version, SurrogatePublication(name, f"refresh/{digest_of(data)}", before, error, data))


class Installed(msgspec.Struct, frozen=True):
    """A shard's arrived surrogates are in the bank; `newer`: than the previous ones."""

    message: mm.SurrogatesReady
    newer: bool
    bank: Surrogates


class Refreshed(msgspec.Struct, frozen=True):
    """Surrogates fitted here are in the bank.

    Attributes:
        refreshes: one for each shard.
        progress: of the run when they were fitted.
        bank: with them in it.
        generation: at the fit; every lost connection and every change of speakers begins another one.
    """

    refreshes: list[Refresh]
    progress: float
    bank: Surrogates
    generation: int


Ready = Installed | Refreshed

_Work = Callable[[], Ready | Literal["again"] | None]  # again: there is more of it, other work may go first


class SendOwn(Protocol):
    """Sends a message about a composer as it is now."""

    def __call__(
        self, type_: type[m.Message], kind: str = "", pack: Callable[[], Packed] | None = None, /, **fields: object
    ) -> None:
        """`pack` makes the payload, `kind` is the payload's kind; the rest are the message's fields."""
        ...


class SurrogateTraffic:
    """Surrogates on their way to and from a composer. All methods are for the compute thread.

    Args:
        plan: of the mixture.
        steps: which fit.
        machine: of the composer; it gets an event for each change of the bank.
        send: sends a message.
        background: of one thread, for everything that takes long; None: it is done at once.
        leave: something for the compute thread, from the background: for `ready`, or an error.
    """

    def __init__(
        self,
        plan: MixturePlan,
        steps: ComposerSteps,
        machine: ComposerMachine,
        send: SendOwn,
        *,
        background: Executor | None,
        leave: Callable[[Ready | Exception], None],
    ) -> None:
        self._plan, self._steps, self._machine, self._send = plan, steps, machine, send
        self._background, self._leave = background, leave
        self._held = ComposerSurrogates(plan)  # the background's from now on, as are the next two
        self._generation = 0
        self._failed = False
        self.bank: Surrogates = self._held.bank  # bank of the steps
        self._generation_begun = 0  # ahead of the background's until that has taken the change
        self._early: list[tuple[mm.SurrogatesReady, Packed]] = []
        self._waiting = 0  # arrivals that are not in the bank yet
        self._fitting = False
        self._fits: tuple[int, ...] = ()  # progress of the run, by layer, at the expert workers' last published fits

    @property
    def behind(self) -> bool:
        """Whether so much has arrived that steps have to wait until it is in the bank, or it would pile up.

        One of each shard may come at the same time.
        """
        return self._waiting > self._plan.training.composers

    def begin_boundary(self) -> None:
        """Take the surrogates that came too early at the last boundary."""
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
        self._generation_begun += 1
        self._do(partial(self._apply, self._held.disconnected))

    def speak_for(self, shards: Sequence[int]) -> None:
        """Take the gateway's assignment of shards to speak for; the machine has the one before until then."""
        self._generation_begun += 1
        self._fits = ()
        self._do(partial(self._apply, partial(self._held.speak_for, self._machine.speaks, shards)))

    def fit(self, state: ComposerState) -> None:
        """Fit the surrogates of the experts spoken for, one such refresh at a time: the next one comes.

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
        """Swap the bank, and publish the fits."""
        self.bank = found.bank
        machine = self._machine
        if isinstance(found, Installed):
            self._waiting -= 1
            if found.newer:
                new = found.message
                machine.handle(SurrogatesInstalled(new.shard, new.step, new.progress))
            return
        self._fitting = False
        for new in found.refreshes if machine.shard >= 0 else ():
            if new.shard not in machine.speaks:
                continue  # another owner speaks for it by now
            machine.handle(SurrogatesInstalled(new.shard, new.version, found.progress))
            one = new.publication
            # On another connection, or under other speakers, it may be a change of surrogates the gateway has not.
            if one is not None and found.generation == self._generation_begun:
                fields = {"payload": one.payload, "change": one.change, "base": one.base, "error": one.error}
                fields |= {"of": new.shard, "step": new.version, "progress": found.progress}
                self._send(mm.PublishSurrogates, "", partial(_same, one.data), **fields)

    def _take_fits(self, fitted: Sequence[Tensors]) -> bool:
        """Return whether fits of expert workers, by layer as in `HeldExperts`, are to be published.

        True if something is new and nothing is missing, as before a composer has got experts.
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
            return  # the compute thread drops the state as soon as it takes the error
        try:
            found = work()
            if found == "again":
                background.submit(self._go_on, background, work)
            elif found is not None:
                self._leave(found)
        except Exception as error:  # noqa: BLE001 - the compute thread raises it
            self._failed = True
            self._leave(error)

    def _apply(self, change: Callable[[], None]) -> None:
        change()
        self._generation += 1

    def _install(self, message: mm.SurrogatesReady, data: Packed) -> Ready:
        newer = self._held.arrived(message, data)
        return Installed(message, newer, self._held.bank)

    def _refresh(self, state: ComposerState, step: int, progress: float) -> Iterator[Ready | Literal["again"]]:
        for refreshes in self._held.refreshed(self._steps, state, step):
            if refreshes is None:
                yield "again"
            else:
                yield Refreshed(refreshes, progress, self._held.bank, self._generation)


def _same(data: memoryview) -> memoryview:
    return data
