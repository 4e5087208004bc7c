"""The surrogates that a composer holds, and which of them others are known to hold, too.

A change of surrogates is of use to who has what it changes. So for every shard this remembers the payload that was sent
or received last on the present connection; the gateway remembers the same, and both forget it at the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.store import digest_of
from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import Tensors
from planetary.moe.composer import LayerFit, mean_error
from planetary.moe.plan import MixturePlan
from planetary.moe.states import Surrogates
from planetary.moe.surrogate_payloads import (
    change_bytes,
    changed_surrogates,
    empty_bank,
    install,
    messages_of,
    surrogates_bytes,
    surrogates_from,
)
from planetary.wire import messages as m


class Refresh(msgspec.Struct, frozen=True):
    """New surrogates of one shard, as `PublishSurrogates` says them; `data` comes along."""

    error: float | None
    payload: str
    change: str
    base: str
    data: memoryview


class ComposerSurrogates:
    """See the module. Nothing here is done before a message has arrived or a fit has ended."""

    def __init__(self, plan: MixturePlan) -> None:
        """No surrogate is here yet."""
        self._plan = plan
        self.bank: Surrogates = empty_bank(plan)
        self._known: dict[int, str] = {}
        self._fits: tuple[int, ...] = ()  # by layer: progress of the run at the expert workers' fits published last

    def known(self) -> dict[int, str]:
        """Return, by shard, the payload whose surrogates the gateway knows to be here."""
        return dict(self._known)

    def disconnected(self) -> None:
        """The connection was lost: nobody knows what arrived."""
        self._known.clear()

    def arrived(self, message: m.SurrogatesReady, data: Packed) -> bool:
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
        return bool((self.bank.versions > before.versions).any())

    def speak_for(self, before: Sequence[int], now: Sequence[int]) -> None:
        """Other shards' surrogates are published from here now than before.

        These begin whole, and so do those that are not published from here any more.
        """
        self._fits = ()
        for shard in {*before, *now}:
            self._known.pop(shard, None)
            if shard not in now:  # what nobody has heard of does not count: somebody else's is the next
                versions = np.where(self._plan.owner_map == shard, -1, self.bank.versions)
                self.bank = msgspec.structs.replace(self.bank, versions=versions)

    def take_fits(self, fitted: Sequence[Tensors]) -> bool:
        """Return whether what expert workers have fitted, by layer as in `HeldExperts`, is to be published.

        It is if something of it is new, and nothing is missing, as it is before a composer has got its experts.
        """
        fits = tuple(int(layer["progress"]) for layer in fitted if layer)
        if not fits or len(fits) < len(fitted) or (fits == self._fits and self._plan.pace == "free"):
            return False
        self._fits = fits
        return True

    @property
    def progress_of_fits(self) -> float:
        """What the progress of the run was when expert workers fitted what `take_fits` has taken, mean over layers."""
        return sum(self._fits) / len(self._fits)

    def fitted(self, shard: int, step: int, fits: Sequence[LayerFit], base: str | None, *, publish: bool) -> Refresh:
        """Take what was fitted here after `step` steps and return what to publish of it.

        Args:
            shard: whose experts these are.
            step: of the composer.
            fits: of all layers.
            base: what was known when the fit began, and what its changes are changes of.
            publish: whether there is a connection to publish it on.
        """
        messages = messages_of(fits, shard, step)
        self.bank = install(self.bank, messages, self._plan)
        whole = surrogates_bytes(messages)
        name = f"surrogate/{digest_of(whole)}"
        error = mean_error(fits) if any(fit.errors.size for fit in fits) else None
        before = self._known.get(shard)
        if publish:
            self._known[shard] = name
        smaller = all(len(fit.changes) == len(fit.experts) for fit in fits)
        if not smaller or before is None or before != base:
            return Refresh(error, name, "", "", whole)
        data = change_bytes(messages, fits)
        return Refresh(error, name, f"refresh/{digest_of(data)}", before, data)
