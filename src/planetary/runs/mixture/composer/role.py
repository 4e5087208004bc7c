"""A composer: carries out a machine's instructions, one boundary and one step at a time; and the worker's role with the
composer's thread, on an unreliable connection.

Messages are left in an inbox from any thread and taken between two steps only, so no event on the network holds a step
up. Long work besides the step goes to background threads: packing, and everything about surrogates
(`runs.mixture.composer.surrogate_traffic`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial

import msgspec
import numpy as np

from planetary.artifacts.packed_arrays import Packed
from planetary.artifacts.store import digest_of
from planetary.core.errors import (
    LocalProtocolError,
    NumericsError,
    PlanetaryError,
    RemoteProtocolError,
    ResourceError,
    UserError,
)
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.protocol import messages as m
from planetary.fleet.shell.system import System, unobserved
from planetary.fleet.worker.events import IndependentMachine, RoleConnected, RoleDisconnected
from planetary.machine.events import Instruction, Payload
from planetary.machine.machine import Validated
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.composer import events as c
from planetary.runs.mixture.composer.data import HELD_OUT, ComposerData
from planetary.runs.mixture.composer.events import Upload, upload_of
from planetary.runs.mixture.composer.machine import ComposerMachine
from planetary.runs.mixture.composer.surrogate_traffic import Installed, Ready, Refreshed, SurrogateTraffic
from planetary.runs.mixture.composer.view import composer_view, view_bytes
from planetary.runs.mixture.methods.ownership import owned_slots
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.payloads.experts import changed_from, improved_bytes, weights_from, work_from
from planetary.runs.mixture.payloads.payloads import fragment_bytes, fragment_from, sketch_bytes
from planetary.runs.mixture.payloads.shard import Key, model_from, shard_bytes, shard_from
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.program.part import ProgramPart
from planetary.runs.mixture.program.signature import parameter_specs
from planetary.runs.mixture.training.composer import ComposerSteps, ResidentComposer, mean_loss, owned_by
from planetary.runs.mixture.training.participant_states import ComposerState, Surrogates
from planetary.runtime.device_program import DeviceProgram
from planetary.wire.limits import MAX_PAYLOAD_BYTES

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.2


class _Left(msgspec.Struct, frozen=True):
    upload: Upload


_News = tuple[m.Message, Packed] | Ready | _Left | Exception | None  # None: the connection was lost


Send = Callable[[m.Message, Packed | None], None]
"""Queue a message, with a payload where it has one."""


class ComposerPost:
    """A composer's outgoing messages, packed beside the steps and sent in order.

    Args:
        send: called in the thread that packs.
        packing: of one thread; None: everything is packed and sent at once.
        failed: called in that thread with a payload's packing error.
    """

    def __init__(self, send: Send, packing: Executor | None, failed: Callable[[Exception], None]) -> None:
        self.send, self._packing, self._failed = send, packing, failed
        self._connection = 0  # how many there were

    def put(self, message: m.Message, kind: str = "", pack: Callable[[], Packed] | None = None) -> None:
        """Send a message, with the payload that `pack` makes; as `payload` it has kind and sha256 of it.

        Without a kind the message itself names the payload. The payload's arrays must not change from now on.
        """
        if pack is None:
            self.send(message, None)
        elif self._packing is None:
            self._pack_and_send(message, kind, pack)
        else:
            self._packing.submit(self._pack_and_send_or_fail, message, kind, pack, self._connection)

    def forget(self) -> None:
        """Drop unpacked messages of a lost connection."""
        self._connection += 1

    def _pack_and_send(self, message: m.Message, kind: str, pack: Callable[[], Packed]) -> None:
        data = pack()
        if kind:
            message = msgspec.structs.replace(message, payload=f"{kind}/{digest_of(data)}")
        self.send(message, data)

    def _pack_and_send_or_fail(
        self, message: m.Message, kind: str, pack: Callable[[], Packed], connection: int
    ) -> None:
        if connection != self._connection:
            return
        try:
            self._pack_and_send(message, kind, pack)
        except Exception as error:  # noqa: BLE001 - the compute thread raises it
            self._failed(error)


class ComposerDriver:
    """Carries out a composer machine's instructions.

    Args:
        plan: of the mixture.
        run: the mixture's program.
        send: to the gateway.
        fitting: of one thread, for surrogates: fitting the composer's own and taking the others', not bound to end
            before the next step; None: do it at once.
        packing: for packing and sending, one message after the other; None: do it at once.
        clock: monotonic seconds.
        observe: is called with the machine after each event it handled for the driver.
    """

    def __init__(
        self,
        plan: MixturePlan,
        run: DeviceProgram,
        send: Send,
        *,
        fitting: Executor | None = None,
        packing: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[Validated], None] = unobserved,
    ) -> None:
        self.plan, self._clock, self._observe = plan, clock, observe
        self.post = ComposerPost(send, packing, self._leave)
        composer = ProgramPart(run, "composer")
        self._whole = ProgramPart(run, "whole")
        self._optimizer = plan.training.expert_optimizer
        expert, masters = ProgramPart(run, "expert"), self._optimizer.in_step
        self.steps = ComposerSteps(plan.model, plan.training, plan.model.batch_size, composer, expert, masters=masters)
        self._names = plan.fragments(parameter_specs(composer.program), parameter_specs(self.steps.expert.program))
        self.machine = ComposerMachine(plan, list(self._names))
        self._run = run
        self.composer: ResidentComposer | None = None
        self._surrogates = (
            SurrogateTraffic(plan, self.steps, self.machine, self._send_own, background=fitting, leave=self._leave)
            if plan.has_surrogates
            else None
        )
        self.on_news: Callable[[], None] = lambda: None  # called from whichever thread leaves something in the inbox
        self._data = ComposerData(plan)
        self._inbox: deque[_News] = deque()
        self._arrived: dict[Key, Packed] = {}
        self._published: dict[Key, Mapping[str, np.ndarray]] = {}
        self._losses = RoundLosses()
        self._reported_at = -math.inf

    @property
    def state(self) -> ComposerState | None:
        """The composer on the host; None before it has a shard."""
        return None if self.composer is None else self.composer.state

    @property
    def bank(self) -> Surrogates | None:
        """The surrogates that steps compute with; None in a mixture without."""
        return None if self._surrogates is None else self._surrogates.bank

    # --- from any thread --------------------------------------------------------------------------------------

    def receive(self, message: m.Message, payload: Packed = b"") -> None:
        """Leave a message for the next boundary."""
        self._leave((message, payload))

    def sent(self, message: m.Message) -> None:
        """Take the news that a message with a payload has left this machine."""
        upload = upload_of(message)
        if upload is not None:
            self._leave(_Left(upload))

    def disconnected(self) -> None:
        """Take the news that the connection to the gateway was lost."""
        self.post.forget()
        self._leave(None)

    def claims(self, ready: mm.MixtureReady) -> mm.MixtureReady:
        """Return `ready` with the shard here, if it is complete."""
        machine = self.machine
        shard = machine.shard if machine.composes else -1  # messages in flight for it may be lost
        return msgspec.structs.replace(ready, shard=shard, epoch=machine.epoch, step=machine.done)

    def _leave(self, news: _News) -> None:
        self._inbox.append(news)
        self.on_news()

    # --- in the compute thread --------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Carry out the machine's instructions at a boundary; return whether a step was taken.

        Raises:
            NumericsError: the loss, or a fitted or merged tensor, is not finite.
            TrustError: surrogates are damaged, or not their sender's.
        """
        if self._surrogates is not None:
            self._surrogates.begin_boundary()
        while self._inbox:
            self._take(self._inbox.popleft())
        stepped = False
        for action in self._handle(c.StepBoundary()):
            match action:
                case c.Adopt():
                    self._adopt(action)
                case c.Publish():
                    self._publish(action)
                case c.Fit():
                    assert self.composer is not None
                    assert self._surrogates is not None
                    self._surrogates.fit(self.composer.without_dense)
                case c.Keep():
                    self._keep()
                case c.EvaluateView():
                    self._view()
                case c.AskForTokens():
                    self._send_own(mm.RequestTokens, first=action.first, count=action.count)
                case c.TakeStep() if self._surrogates is None or not self._surrogates.behind:
                    self._step()
                    stepped = True
                case _:
                    pass
        return stepped

    def _handle(self, event: c.Event) -> list[c.Instruction]:
        found = self.machine.handle(event)
        self._observe(self.machine)
        return found

    def _take(self, news: _News) -> None:
        match news:
            case None:
                self._handle(c.ConnectionLost())
                if self._surrogates is not None:
                    self._surrogates.disconnected()
            case Installed() | Refreshed():
                assert self._surrogates is not None
                self._surrogates.ready(news)
            case _Left():
                self._handle(c.UploadSent(news.upload))
            case (message, payload):
                self._received(message, payload)
            case error:
                raise error

    def _received(self, message: m.Message, payload: Packed) -> None:
        match message:
            case mm.GrantShard():
                self._own(message, payload)
            case mm.StandBy():
                self._handle(c.StoodDown())
                self.composer = None
            case mm.FragmentMerged():
                key = (Tier(message.tier), message.fragment)
                if self._handle(c.MergeArrived(key, message.version, message.shards)):
                    self._arrived[key] = payload
            case mm.RunProgress():
                self._handle(c.StepsReported(message.steps))
            case mm.AssignSpeaker():
                self._speak_for(message.shards)
            case mm.SurrogatesReady() if self._surrogates is not None:
                self._surrogates.received(message, payload)
            case mm.ExpertsUpdate():
                self._use_experts(message, payload)
            case mm.ImproveExperts():
                self._improve(message, payload)
            case mm.TokensReady():
                arrived = c.TokensArrived(message.shard, message.first, message.count)
                if message.shard == HELD_OUT or self._handle(arrived):
                    self._data.arrived(message, payload, self.machine.done)
            case mm.EvaluateMixture():
                self._evaluate(message, payload)
            case _:
                pass

    def _own(self, message: mm.GrantShard, payload: Packed) -> None:
        if self._surrogates is not None:  # before the machine has the shard it speaks for
            self._surrogates.speak_for(message.speaks)
        self._handle(c.StepsReported(message.steps))
        if not message.payload:
            self._handle(c.GrantArrived(message.shard, message.epoch, message.step, None, message.speaks))
            return
        state, step, held = shard_from(payload, self.plan)
        self.composer = ResidentComposer(self.steps, self._run, state)
        self._handle(c.GrantArrived(message.shard, message.epoch, step, held, message.speaks))
        self._data.forget()
        self._published.clear()
        self._arrived.clear()
        self._losses.clear()

    def _speak_for(self, shards: tuple[int, ...]) -> None:
        if self._surrogates is not None:
            self._surrogates.speak_for(shards)
        self._handle(c.SpeakerAssigned(shards))

    def _step(self) -> None:
        assert self.composer is not None
        began = self._clock()
        step, progress = self.machine.done, self.machine.progress
        tokens, targets = self._data.batch(self.machine.shard, step)
        loss = self.composer.gradients(self.bank, tokens, targets)
        if not math.isfinite(loss):
            raise NumericsError(
                f"the loss of shard {self.machine.shard} became {loss} at step {step + 1}; a lower "
                "optimizer.learning_rate or optimizer.clip_norm may help"
            )
        self.composer.update(progress, experts=self._optimizer.in_step)
        self._offer_sketches(self.composer, step)
        self.composer.end_step()
        self._handle(c.StepCompleted())
        seconds = self._clock() - began
        self._losses.stepped(loss, seconds)
        due = began - self._reported_at >= REPORT_EVERY_S or self.machine.seems_done
        if due and self.machine.connected:  # before the shard is granted again, messages are under an old epoch
            self._reported_at = began
            self._send_own(mm.StepTaken, loss=loss, seconds=seconds, surrogate_age=self.machine.surrogate_age)

    def _offer_sketches(self, composer: ResidentComposer, step: int) -> None:
        streamed = self._optimizer.streamed_layers(self.plan.model.n_layer)
        wanted = [layer for layer in streamed if self.machine.may_offer(layer)]
        if not wanted:
            return
        found = composer.seen(wanted)
        for layer in wanted:
            sketch = self.steps.sketch(step, self.machine.shard, layer, found)
            self._handle(c.SketchSent(layer))
            version = self.machine.expert_versions[layer]
            known = {"step": step, "progress": self.machine.progress, "layer": layer, "version": version}
            self._send_own(mm.OfferSketches, "sketch", partial(sketch_bytes, sketch), **known)

    def _use_experts(self, message: mm.ExpertsUpdate, payload: Packed) -> None:
        if self.composer is None or message.shard != self.machine.shard:
            return
        self._handle(c.SketchesAnswered(message.layer, message.arrived, message.waiting))
        held = self.machine.expert_versions[message.layer]
        if not self._handle(c.ExpertsArrived(message.layer, message.version, message.step)):
            return
        state = self.composer.without_dense
        if message.base < 0:
            experts, surrogates = weights_from(payload)
        elif message.base == held:
            experts, surrogates = changed_from(payload, state.experts[message.layer])
        else:
            raise RemoteProtocolError(
                f"the gateway changes version {message.base} of layer {message.layer}'s experts; here is {held}"
            )
        fitted = state.fitted[message.layer] if state.fitted else {}
        self.composer.replace_experts(message.layer, experts, surrogates or fitted)

    def _improve(self, message: mm.ImproveExperts, payload: Packed) -> None:
        before, sketches = work_from(payload)
        slots = owned_slots(self.plan.owner_map, message.shard, self.plan.slots)[message.layer]
        improved = self.steps.improved(before, sketches, step=message.progress, slots=slots, fits=message.fits)
        self._send_own(mm.ExpertsImproved, "improved", partial(improved_bytes, improved), task=message.task)

    def _adopt(self, action: c.Adopt) -> None:
        assert self.composer is not None
        names = self._names[action.key]
        merged = fragment_from(self._arrived.pop(action.key))
        new = {name: merged[name].copy() for name in names}
        published = self._published.pop(action.key, None)
        if action.carry and published is not None:
            now = self.composer.named(names)
            new = {name: value + (now[name] - published[name]) for name, value in new.items()}
        self.composer.adopt(new)

    def _publish(self, action: c.Publish) -> None:
        assert self.composer is not None
        tensors = self.composer.named(self._names[action.key])
        one = self.steps.published(self.machine.shard, tensors, action.steps)
        self._published[action.key] = one.tensors
        tier, fragment = action.key
        self._send_own(
            mm.PublishFragment,
            "fragment",
            partial(fragment_bytes, one.tensors),
            tier=tier.value,
            fragment=fragment,
            base=action.base,
            tokens=one.tokens,
            steps=one.steps,
        )

    def _keep(self) -> None:
        assert self.composer is not None
        pack = partial(shard_bytes, self.composer.state, self.machine.done, dict(self.machine.held), self.plan)
        self._send_own(mm.SaveShard, "shard", pack, loss=self._losses.mean(), compute_s=self._losses.compute_s)
        self._losses.saved(self.machine.progress // self.plan.steps_per_round)

    def _view(self) -> None:
        if self.composer is None or self.bank is None:
            return
        held_out = self._data.held_out()
        # At the end no step waits for this composer; before, one batch is all the time it gets.
        used = held_out if self.machine.finished else held_out[:1]
        view = composer_view(self.composer, self.plan.model, self.bank, used)
        if math.isfinite(view.mixed) and math.isfinite(view.surrogates):
            losses = {"mixed_loss": view.mixed, "surrogate_loss": view.surrogates}
            self._send_own(mm.ViewModel, "view", partial(view_bytes, view), **losses)

    def _evaluate(self, message: mm.EvaluateMixture, payload: Packed) -> None:
        model, plan = model_from(payload), self.plan
        every = np.tile(np.arange(plan.model.n_expert, dtype=np.int32), (plan.model.n_layer, 1))
        arguments = {**model, **owned_by(every, plan.model)}
        held_out = self._data.held_out()
        loss = mean_loss(self._whole, arguments, held_out)
        if not math.isfinite(loss):
            raise NumericsError(f"the held-out loss of the model after round {message.version} is {loss}")
        self.post.put(mm.MixtureEvaluated(task=message.task, version=message.version, loss=loss, batches=len(held_out)))

    def _send_own(
        self, type_: type[m.Message], kind: str = "", pack: Callable[[], Packed] | None = None, **fields: object
    ) -> None:
        """Send a message about this composer as it is now."""
        machine = self.machine
        known = {"shard": machine.shard, "epoch": machine.epoch, "step": machine.done, "progress": machine.progress}
        known |= {"payload": ""}
        fields = {name: known[name] for name in known if name in type_.__struct_fields__} | fields
        message = type_(**fields)  # type: ignore[arg-type]
        upload = upload_of(message)
        if upload is not None:
            self._handle(c.UploadBegun(upload))
        self.post.put(message, kind, pack)


class RoundLosses:
    """Losses and time of the steps since a round's end; kept until the next step: the state may have to be sent again.

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


class ComposerRole:
    """A worker's role in a mixture, composer or expert worker: a driver and threads. See `Role`."""

    def __init__(
        self, plan: MixturePlan, run: DeviceProgram, ready: mm.MixtureReady, send: Send, system: System
    ) -> None:
        """`ready`: the worker's description of itself, without a shard."""
        self.machine = IndependentMachine()
        self._ready, self._send, self._system = ready, send, system
        self._compute, self._fitting, self._packing = map(system.threads, ("compute", "fitting", "packing"))
        beside = (self._fitting, self._packing) if plan.pace.works_in_background else (None, None)
        self._make: Callable[[], ComposerDriver] = lambda: ComposerDriver(
            plan,
            run,
            send,
            fitting=beside[0],
            packing=beside[1],
            clock=system.clock.monotonic,
            observe=system.observe,
        )
        self._lock = threading.Lock()  # lock of the two fields below
        self._closed = False
        self._is_due = False  # a visit of the compute thread is scheduled and has not begun
        self._driver = self._fresh()

    @property
    def driver(self) -> ComposerDriver:
        """The composer's driver; another one after each failure."""
        return self._driver

    def carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case RoleConnected():
                self._send(self._driver.claims(self._ready), None)
            case RoleDisconnected():
                self._driver.disconnected()
            case _:
                pass

    def tensors(self, payload: Payload) -> Tensors:
        """The driver sends tensors."""
        raise LocalProtocolError(f"a composer's machine sends no tensors, and was asked for those of {payload}")

    def expects(self, message: m.Message, tensor: TensorSpec) -> TensorSpec | None:
        fits = isinstance(message, m.RoleMessage) and tensor.name == "payload" and tensor.nbytes <= MAX_PAYLOAD_BYTES
        return TensorSpec("payload", "ui8", (tensor.size,)) if fits else None

    def received(self, session: int, message: m.Message, tensors: Tensors) -> None:
        self._driver.receive(message, tensors["payload"].data if tensors else memoryview(b""))

    def sent(self, message: m.Message) -> None:
        self._driver.sent(message)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._compute.shutdown(wait=True)
        self._fitting.shutdown(wait=True, cancel_futures=True)
        self._packing.shutdown(wait=True)

    def _fresh(self) -> ComposerDriver:
        driver = self._make()
        driver.on_news = self._schedule
        return driver

    def _schedule(self) -> None:
        """Have the compute thread look into the driver's inbox. From any thread."""
        with self._lock:
            if self._closed or self._is_due:
                return
            self._is_due = True
            self._compute.submit(self._work)

    def _work(self) -> None:
        """In the compute thread: take steps until there is none to take before further news."""
        with self._lock:
            self._is_due = False
        goes_on = True
        while goes_on and not self._closed:
            driver = self._driver
            try:
                goes_on = driver.turn()
            except Exception as error:  # noqa: BLE001 - every failure is reported to the gateway
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Report the failure and drop the state: the one the gateway has saved counts."""
        step = self._driver.machine.done
        kind = "internal"
        if isinstance(error, NumericsError):
            kind = "numerics"
        elif isinstance(error, UserError):
            kind = "data"
        elif isinstance(error, ResourceError | MemoryError):
            kind = "resource"
        reason = str(error) if isinstance(error, PlanetaryError) else f"{type(error).__name__}: {error}"
        log.exception("step %d failed", step + 1)
        self._driver = self._fresh()
        self._send(m.TaskFailed(task=0, kind=kind, reason=reason, step=step + 1), None)  # type: ignore[arg-type]
