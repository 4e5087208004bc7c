"""The mixture controller's part about the syncer's machine: grants and merges become messages, records and work."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from planetary.fleet.protocol import messages as m
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.controller.desk import MixtureDesk
from planetary.runs.mixture.controller.events import FragmentMade, MakeFragment, PublishedPart, StoredPayload
from planetary.runs.mixture.controller.offload import Offload
from planetary.runs.mixture.controller.rounds import Composing, MixtureRounds
from planetary.runs.mixture.controller.syncer_machine import (
    Announce,
    CaughtUp,
    Event,
    GrantOwnership,
    Instruction,
    Merge,
    Merged,
    Note,
    Publication,
    Reject,
    Speak,
    Standby,
    SyncerMachine,
)
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.records import (
    FragmentAdvanced,
    ShardGranted,
    SpeakerChanged,
    SurrogatesRefreshed,
    SyncNote,
)


class Syncing:
    """The mixture controller's part for the syncer's machine."""

    def __init__(
        self, desk: MixtureDesk, rounds: MixtureRounds, offload: Offload, composing: dict[int, Composing], now: float
    ) -> None:
        """Go on from the desk's state. `composing`: the live composers by session; grants add to them."""
        self.desk, self.rounds, self.offload, self.composing = desk, rounds, offload, composing
        self.machine = SyncerMachine(desk.policy.sync)
        self.machine.go_on(
            {key: fragment.version for key, fragment in desk.state.fragments.items()},
            [(shard.owner, shard.epoch, shard.speaker) for shard in desk.state.shards],
            now,
        )
        self.claims: dict[str, tuple[int, int, int]] = {}  # claimed shard, epoch and step by worker
        self._noted = "", ""  # the refusal that was put into the journal last
        self._publisher: dict[tuple[Tier, int], dict[str, int]] = {}
        self._first_at: dict[tuple[Tier, int], float] = {}  # arrival of the first publication of a merge under way

    def handle(self, event: Event, now: float) -> None:
        """Hand the machine an event, and carry out the instructions."""
        self.carry_out(self.machine.handle(event, now), now)

    def published(self, worker: str, message: mm.PublishFragment, payload: str, now: float) -> None:
        """A composer has published a fragment."""
        key = (Tier(message.tier), message.fragment)
        self._publisher.setdefault(key, {})[worker] = message.shard
        self.handle(Publication(worker, *key, message.base, payload, message.tokens, message.steps), now)

    def carry_out(self, instructions: Sequence[Instruction], now: float) -> None:
        """Carry out instructions of the syncer's machine."""
        for one in instructions:
            match one:
                case GrantOwnership():
                    self._grant(one, now)
                case Announce():
                    session = self._session_of(one.composer)
                    if session is not None:
                        self.send_fragment(session, one.tier, one.fragment)
                case Merge():
                    self._merge(one)
                case Reject():
                    self.refuse("stale", f"{one.publication.composer}: {one.why}", told=False)
                case Speak():
                    self._speak(one)
                case Note():
                    self.desk.append(SyncNote(what=one.what, why=one.why))
                case Standby():
                    pass

    def _grant(self, grant: GrantOwnership, now: float) -> None:
        session = self._session_of(grant.composer)
        if session is None:
            return
        shard = self.desk.state.shards[grant.shard]
        claim = self.claims.pop(grant.composer, None)
        # No other composer had it since: the process has a newer state than the store.
        keeps = claim is not None and claim[:2] == (grant.shard, grant.epoch - 1) and claim[2] >= shard.step
        step = claim[2] if keeps and claim is not None else shard.step
        self.composing[session] = Composing(session, grant.composer, grant.shard, grant.epoch, step, step, now)
        steps = self.steps()
        self.desk.append(
            ShardGranted(
                shard=grant.shard,
                epoch=grant.epoch,
                worker=grant.composer,
                step=step,
                progress=self.desk.policy.plan.pace.run_steps(step, sum(steps) - step, len(steps)),
                why=grant.why,
            )
        )
        self.rounds.began(now)
        self.desk.send(
            session,
            mm.GrantShard(
                shard=grant.shard,
                epoch=grant.epoch,
                step=step,
                payload="" if keeps else shard.payload,
                speaks=self.spoken_for(grant.shard),
                steps=steps,
            ),
            None if keeps else StoredPayload(shard.payload),
        )
        plan = self.desk.policy.plan
        for key in self.desk.state.fragments:
            if plan.takes_part(grant.shard, key):
                self.send_fragment(session, *key)
        for number, layer in self.desk.state.experts:
            if number == grant.shard:
                self.offload.send_experts(session, number, layer)
        if plan.has_surrogates:
            for number in range(len(self.desk.state.shards)):
                if number != grant.shard or not keeps or plan.training.replicas > 1:
                    self.send_surrogates(self.composing[session], number)
        self.composing[session].awaits = self.desk.under_way.count(session)
        self.stepped(self.composing[session], now)

    def payload_sent(self, session: int, now: float) -> None:
        """A payload sent in turn has left: a composer's first ones take long on a slow line."""
        one = self.composing.get(session)
        if one is not None:
            one.sent(now)

    def stepped(self, one: Composing, now: float) -> None:
        """A composer has taken steps, or begins. After an absence it has caught up after the steps of a refresh
        interval: it began with the newest merge of the experts.
        """
        if self.machine.behind(one.shard) and one.step >= one.granted + self.desk.policy.plan.training.cadence.refresh:
            self.handle(CaughtUp(one.shard), now)

    def steps(self) -> tuple[int, ...]:
        """Return how many steps every shard has taken: those of a live composer, else those of the saved state."""
        live = {one.shard: one.step for one in self.composing.values()}
        return tuple(live.get(n, shard.step) for n, shard in enumerate(self.desk.state.shards))

    def spoken_for(self, number: int) -> tuple[int, ...]:
        """Return the shards whose surrogates the composer of a shard publishes."""
        return tuple(n for n, shard in enumerate(self.desk.state.shards) if shard.speaker == number)

    def _speak(self, speak: Speak) -> None:
        before = self.desk.state.shards[speak.shard].speaker
        self.desk.append(SpeakerChanged(shard=speak.shard, by=speak.by, why=speak.why))
        for one in self.composing.values():
            if one.shard in {before, speak.by}:
                one.surrogates.pop(speak.shard, None)  # as it does at this message
                self.desk.send(one.session, mm.AssignSpeaker(shards=self.spoken_for(one.shard)))

    def refreshed(self, message: mm.PublishSurrogates, payload: str) -> None:
        """A composer has published surrogates."""
        held = self.desk.state.shards[message.of]
        if held.speaker != message.shard:
            why = f"the composer of shard {message.shard} speaks for shard {message.of}, for which {held.speaker} does"
            self.refuse("fenced", why)
            return
        if message.step <= held.surrogate_step:  # of a composer that went back: those here are newer
            why = f"surrogates of shard {message.of} went back to step {message.step}"
            self.refuse("regression", why, told=False)
            return
        self.desk.append(
            SurrogatesRefreshed(
                shard=message.of,
                by=message.shard if message.shard != message.of else None,
                epoch=message.epoch,
                step=message.step,
                progress=message.progress,
                error=message.error,
                payload=payload,
                change=message.change,
                base=message.base,
            )
        )
        for other in self.composing.values():
            if other.shard != message.shard:
                self.send_surrogates(other, message.of)

    def unusable_surrogates(self, one: Composing) -> None:
        """Have a composer send whole surrogates: a change of them was unusable."""
        self.desk.send(one.session, mm.AssignSpeaker(shards=self.spoken_for(one.shard)))

    def send_fragment(self, session: int, tier: Tier, fragment: int) -> None:
        """Send a composer the newest version of a fragment."""

        def newest() -> tuple[m.Message, StoredPayload]:
            held = self.desk.state.fragments[tier, fragment]
            message = mm.FragmentMerged(
                tier=tier.value,
                fragment=fragment,
                version=held.version,
                shards=held.shards,
                payload=held.payload,
            )
            return message, StoredPayload(held.payload)

        self.desk.send_newest(session, ("fragment", tier.value, fragment), newest)

    def send_surrogates(self, one: Composing, number: int) -> None:
        """Send a composer the newest surrogates of a shard: their change, if it has those before."""

        def newest() -> tuple[m.Message, StoredPayload]:
            shard = self.desk.state.shards[number]
            message = mm.SurrogatesReady(
                shard=number,
                step=shard.surrogate_step,
                progress=shard.surrogate_progress,
                payload=shard.surrogates,
            )
            before, one.surrogates[number] = one.surrogates.get(number), shard.surrogates
            if shard.surrogate_change and shard.surrogate_base == before:
                message = replace(message, change=shard.surrogate_change, base=shard.surrogate_base)
            return message, StoredPayload(message.change or message.payload)

        self.desk.send_newest(one.session, ("surrogates", number, 0), newest)

    def _merge(self, merge: Merge) -> None:
        key = (merge.tier, merge.fragment)
        self._first_at[key] = merge.first_at
        held = self.desk.state.fragments[key]
        by = self._publisher[key]
        published = tuple(
            PublishedPart(by[one.composer], one.payload, one.tokens, one.steps) for one in merge.publications
        )
        self.desk.out.append(MakeFragment(*key, merge.version, held.payload, held.velocity, published, merge.why))

    def made(self, event: FragmentMade, now: float) -> None:
        """A merge has ended."""
        key = (event.tier, event.fragment)
        began = self._first_at.pop(key)
        self._publisher.pop(key, None)
        if not event.failed:
            self.rounds.merges.setdefault(event.tier, []).append(now - began)
            self.desk.append(
                FragmentAdvanced(
                    tier=event.tier,
                    fragment=event.fragment,
                    version=event.version,
                    shards=event.shards,
                    payload=event.payload,
                    velocity=event.velocity,
                    seconds=now - began,
                    why=event.why,
                    steps=event.steps,
                )
            )
        self.handle(Merged(*key, event.version, event.failed), now)
        if event.failed:  # the version they have already: they may publish again
            for one in self.composing.values():
                if self.desk.policy.plan.takes_part(one.shard, key):
                    self.send_fragment(one.session, *key)

    def refuse(self, what: str, why: str, *, told: bool = True) -> None:
        """Count a refusal; `told`: also in the journal, once where it is repeated: no two lines of it are equal."""
        self.rounds.refused[what] = self.rounds.refused.get(what, 0) + 1
        if told and (what, why) != self._noted:
            self._noted = what, why
            self.desk.append(SyncNote(what=what, why=why))

    def _session_of(self, worker: str) -> int | None:
        return next((w.session for w in self.desk.workers.values() if w.worker == worker), None)
