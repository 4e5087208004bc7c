"""The mixture controller's part about what composers say: whether it counts, and who is to hear of it.

What is said under an epoch that is over is fenced off, and so is a payload that cannot be: its composer hears what it
needs to send another one.
"""

from __future__ import annotations

from planetary.fabric.controller.membership import Membership
from planetary.fabric.protocol import events as e
from planetary.fabric.protocol.sessions import WorkerSession
from planetary.moe.controller.mixture_events import TokensOf
from planetary.moe.controller.mixture_rounds import Composing
from planetary.moe.controller.mixture_syncing import Syncing
from planetary.moe.controller.payload_checks import impossible_steps
from planetary.moe.controller.records import ShardKept
from planetary.moe.methods.tiers import Tier
from planetary.wire import messages as m

FromComposer = (
    m.PublishFragment | m.PublishSurrogates | m.KeepShard | m.StepTaken | m.OfferSketches | m.ViewModel | m.WantTokens
)


class ComposerMessages:
    """See the module.

    Args:
        syncing: is told of publications, and brings the desk, rounds and expert workers' part with it.
        membership: is told of workers that do well.
    """

    def __init__(self, syncing: Syncing, membership: Membership) -> None:
        """Nobody has said anything."""
        self._desk, self._composing = syncing.desk, syncing.composing
        self._syncing, self._rounds, self._offload = syncing, syncing.rounds, syncing.offload
        self._membership = membership

    def says(self, worker: WorkerSession, event: e.Received, now: float) -> None:
        """Take a composer's message."""
        message = event.message
        composing = self._composing.get(worker.session)
        assert isinstance(message, FromComposer)
        if composing is None or (message.shard, message.epoch) != (composing.shard, composing.epoch):
            self._syncing.refuse(
                "fenced", f"{worker.worker} speaks for shard {message.shard} under epoch {message.epoch}, which is over"
            )
            return
        defect = event.defect or impossible_steps(message, self._desk.policy.plan)
        if defect:
            self._syncing.refuse("unusable", f"{type(message).__name__} of {worker.worker}: {defect}")
            self._ask_again(composing, message)
            return
        match message:
            case m.StepTaken():
                self._stepped(composing, message, now)
                self._membership.succeeded(worker)
            case m.ViewModel():
                self._rounds.viewed(message, event.payload)
            case m.WantTokens():
                self._send_tokens(worker.session, message)
            case m.PublishFragment():
                self._syncing.published(worker.worker, message, event.payload, now)
            case m.OfferSketches():
                self._rounds.sketched(message.shard, event.payload_bytes)
                plan, session = self._desk.policy.plan, worker.session
                if plan.offloads and not self._offload.offered(session, message, event.payload):
                    self._offload.send_experts(session, message.shard, message.layer)
            case m.PublishSurrogates():
                self._syncing.refreshed(message, event.payload)
            case m.KeepShard():
                self._kept(composing, message, event.payload)

    def _ask_again(self, composing: Composing, message: FromComposer) -> None:
        """A payload is unusable: say what makes its composer send another one, where it would not by itself."""
        session = composing.session
        match message:
            case m.PublishFragment() if (Tier(message.tier), message.fragment) in self._desk.state.fragments:
                self._syncing.send_fragment(session, Tier(message.tier), message.fragment)
            case m.PublishSurrogates():
                self._syncing.unusable_surrogates(composing)
            case m.OfferSketches():
                self._offload.unusable(session, message)
            case m.KeepShard() if message.progress >= self._desk.policy.plan.steps:
                # No later state will come: it has to save this one again.
                known = {"shard": message.shard, "epoch": message.epoch, "step": message.step}
                speaks, steps = self._syncing.spoken_for(message.shard), self._syncing.steps()
                self._desk.send(session, m.OwnShard(**known, payload="", speaks=speaks, steps=steps))
            case _:
                pass

    def _stepped(self, composing: Composing, message: m.StepTaken, now: float) -> None:
        composing.step, composing.progress_at = message.step, now
        composing.loss, composing.step_s = message.loss, message.seconds
        composing.surrogate_age = message.surrogate_age
        self._syncing.stepped(composing, now)
        self._offload.stepped(composing.session, message.shard, message.step)
        self._desk.send(composing.session, m.RunProgress(steps=self._syncing.steps()))

    def _kept(self, composing: Composing, message: m.KeepShard, payload: str) -> None:
        if message.step < self._desk.state.shards[message.shard].step:
            self._syncing.refuse("regression", f"shard {message.shard} went back to step {message.step}")
            return
        composing.step = max(message.step, composing.step)  # steps are told ahead of states
        self._desk.append(
            ShardKept(
                shard=message.shard,
                epoch=message.epoch,
                step=message.step,
                progress=message.progress,
                payload=payload,
                loss=message.loss,
                compute_s=message.compute_s,
            )
        )

    def _send_tokens(self, session: int, wanted: m.WantTokens) -> None:
        plan = self._desk.policy.plan
        last = wanted.first + wanted.count
        if not (0 <= wanted.first < last <= plan.most_steps and wanted.count <= plan.steps_ahead):
            self._syncing.refuse("unusable", f"shard {wanted.shard} wants tokens of steps {wanted.first} to {last}")
            return
        slices = tuple(plan.tokens_of(wanted.shard, step) for step in range(wanted.first, last))
        message = m.TokensReady(shard=wanted.shard, first=wanted.first, count=wanted.count)
        self._desk.send(session, message, TokensOf(slices))
