"""The surrogates that a composer holds, and which of them others are known to hold, too.

A change of surrogates is of use to who has what it changes. So for every shard this remembers the payload that was sent
or received last on the present connection; the gateway remembers the same, and both forget it at the same messages.

All of this happens in one thread, in the order of arrival (`moe.composer.surrogate_traffic`). A bank that was handed
out never changes: a change makes another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.store import digest_of
from planetary.core.errors import RemoteProtocolError
from planetary.moe.payloads.surrogate_payloads import (
    change_bytes,
    changed_surrogates,
    empty_bank,
    install,
    messages_of,
    surrogates_bytes,
    surrogates_from,
)
from planetary.moe.plan.plan import MixturePlan
from planetary.moe.protocol import mixture_messages as mm
from planetary.moe.training.composer import ComposerSteps, LayerFit, mean_error
from planetary.moe.training.replicas import only_shards
from planetary.moe.training.states import ComposerState, Surrogates


class Publication(msgspec.Struct, frozen=True):
    """New surrogates of one shard, as `PublishSurrogates` says them; `data` comes along."""

    payload: str
    change: str
    base: str
    error: float | None
    data: memoryview


class Refresh(msgspec.Struct, frozen=True):
    """A shard has new surrogates of a version; nothing is published where there is no connection."""

    shard: int
    version: int
    publication: Publication | None


class ComposerSurrogates:
    """See the module. Nothing here is done before a message has arrived or a refresh was asked for."""

    def __init__(self, plan: MixturePlan) -> None:
        """No surrogate is here yet, and nothing is spoken for."""
        self._plan = plan
        self.bank: Surrogates = empty_bank(plan)
        self._known: dict[int, str] = {}
        self._newest = [-1] * plan.training.composers  # version, by shard
        self._speaks: tuple[int, ...] = ()
        self._connected = False

    def disconnected(self) -> None:
        """The connection was lost: nobody knows what arrived."""
        self._known.clear()
        self._connected = False

    def speak_for(self, before: Sequence[int], now: Sequence[int]) -> None:
        """On a connection, other shards' surrogates are published from here now than before.

        These begin whole, and so do those that are not published from here any more.
        """
        self._speaks, self._connected = tuple(now), True
        for shard in {*before, *now}:
            self._known.pop(shard, None)
            if shard not in now:  # what nobody has heard of does not count: somebody else's is the next
                versions = np.where(self._plan.owner_map == shard, -1, self.bank.versions)
                self.bank = msgspec.structs.replace(self.bank, versions=versions)

    def arrived(self, message: mm.SurrogatesReady, data: Packed) -> bool:
        """Take a shard's surrogates, which somebody else has fitted; return whether any are newer than those here.

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
        """Fit the surrogates of the experts that are spoken for and take them.

        Yields None after every layer, when something else may be done first, and at last what there is to publish.

        Args:
            steps: which fit.
            state: of the composer after `step` steps.
            step: see there.

        Raises:
            NumericsError: what is fitted is not finite.
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
        """`base`: what was known when the fit began, and what its changes are changes of."""
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
            return Refresh(shard, version, Publication(name, "", "", error, whole))
        data = change_bytes(messages, fits)
        return Refresh(shard, version, Publication(name, f"refresh/{digest_of(data)}", before, error, data))
