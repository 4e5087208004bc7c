"""Parameters by version, in the forms in which the gateway sends new ones to workers: whole, coded or relayed changes.

One object per run. The controller chooses a form per worker from the `Change` it announces; a worker reads it with an
`Exchange`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from planetary.core.configuration.ranges import RELAY
from planetary.core.errors import LocalProtocolError, ProtocolError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.protocol.messages import Message
from planetary.runs.rounds import events as e
from planetary.runs.rounds.changes import WHOLE, Change, CodedChange, RelayedChange
from planetary.runs.rounds.messages import Compression, Relay, RingState, TrainResult
from planetary.runs.rounds.preparation.whole_versions import WholeVersions
from planetary.sync.contributions import Contribution, check_contribution, flat
from planetary.sync.deltas import Table, table_of
from planetary.sync.fragments import Fragments
from planetary.sync.merge import MergeRule
from planetary.sync.outer import OuterStep, published_params
from planetary.sync.outer_optimizers import AVERAGING, OuterOptimizer, OuterState
from planetary.sync.payload import PAYLOAD, PayloadForm, Shown, compile_loops, payload_digest
from planetary.sync.relay import COEFFICIENTS, params_digest, relayed_name
from planetary.sync.ring import check_state, state_of, state_tensors
from planetary.wire.streams import ReceivedMessage

PLAIN = Compression()


class ParameterVersions(WholeVersions):
    """Versions in all forms of a broadcast, contributions in codecs, and fragments.

    Used from one thread at a time, except `read` and `of_version`, which only read.

    `receive`, `compare` and `step` take a gateway's messages and instructions, and return the event that follows.

    Attributes:
        start_digest: of the initial parameters as they travel in a codec; "": they are tensors.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        state: OuterState,
        version: int,
        compression: Compression = PLAIN,
        shown: Tensors | None = None,
        *,
        fragments: int = 1,
        optimizer: OuterOptimizer = AVERAGING,
        statistics: Collection[str] = (),
    ) -> None:
        """Start from `state`, the state after `version` outer steps.

        With a codec for the initial parameters, version 0 has the decoded values.

        `shown`: the parameters as workers have them, as `Shown` keeps them; None, or empty: the same; `fragments`:
        parts of the parameters synchronised in turn; `optimizer`: whose state `state` is; `statistics`: names of
        `specs` that are averaged only, and not judged.

        The loops of the codecs are compiled here, so not on an event loop.

        Raises:
            UserError: the model has fewer tensors than fragments.
        """
        compile_loops(compression.codecs, specs)
        self._statistics = frozenset(statistics)
        self._fragments = Fragments(specs, fragments)
        self._start = None if compression.start == "none" else PayloadForm(compression.start, specs)
        state, start = self._begun(state, version)
        self.start_digest = payload_digest(start[PAYLOAD]) if start else ""
        up, parts = compression.up, self._fragments.parts
        self._up = None if up == "none" else [PayloadForm(up, part) for part in parts]
        self._broadcast = broadcast_of(specs, self._fragments, compression, shown or state.params)
        super().__init__(specs, state, version, optimizer, start or self._broadcast.newest(state.params))

    def change_of(self, version: int, own: Collection[int] = ()) -> Tensors:
        """Return the change from the version before to `version`, as it travels; `own`: as of `ChangeOf`."""
        return self._broadcast.change_of(version, own)

    @property
    def change(self) -> Change:
        return self._broadcast.change

    def _begun(self, state: OuterState, version: int) -> tuple[OuterState, Mapping[str, np.ndarray]]:
        """Return the state of the version to start from, and the encoded tensors where a codec is used."""
        if version > 0 or self._start is None:
            return state, {}
        payload = self._start.encode(state.params)
        params = self._start.decode(payload, payload_digest(payload))
        return replace(state, params=params), {PAYLOAD: payload}

    @property
    def is_partial(self) -> bool:
        """Whether the newest version is a change of one fragment."""
        return self._fragments.count > 1

    @property
    def shown(self) -> Tensors:
        """The newest version as workers have it, where they get changes in a codec; else empty."""
        return self._broadcast.shown

    def _newest(self) -> Mapping[str, np.ndarray]:
        return self._broadcast.newest(self.state.params)

    def keep(self, versions: Sequence[int]) -> None:
        super().keep(versions)
        self._broadcast.keep(versions)

    def attach(self, tensors: Tensors, payload: np.ndarray | None = None, digest: str = "") -> int:
        """Keep a worker's end parameters, or deltas that came as a `payload` of this digest; return their number."""
        attachment = super().attach(tensors)
        self._broadcast.attached(attachment, payload, digest)
        return attachment

    def drop(self, attachment: int) -> None:
        super().drop(attachment)
        self._broadcast.dropped(attachment)

    def adopt(self, version: int, attachment: int) -> None:
        """Ring: the outer state that came with a message is the newest known here."""
        self.state = state_of(self._specs, self._contributions.pop(attachment))
        self._version = version

    def replace(self, version: int, params: Mapping[str, np.ndarray]) -> None:
        """Let `params`, float32 masters, be those of `version`, which is the newest; velocity and moments stay.

        Workers that were sent this version have to be sent it again.
        """
        self.state, self._delta = replace(self.state, params=dict(params)), {}
        self._published = {**self._published, version: published_params(self._specs, params)}

    def outer_state(self, version: int) -> Tensors:
        """Ring: return the outer state of `version`, which is the newest known here, as it travels."""
        if version != self._version:
            raise LocalProtocolError(f"the outer state of round {version} is not here, that of {self._version} is")
        return state_tensors(self.state)

    async def receive(self, brings: type[Message], session: int, received: ReceivedMessage) -> e.Received:
        """Return the event of a worker's message; the tensors of one of the class `brings` are checked and kept."""
        if not isinstance(received.message, brings):
            return e.Received(session, received.message)
        message = received.message
        defect, tensors = await asyncio.to_thread(self.read, message, received.tensors)
        digest = message.digest if isinstance(message, TrainResult | RingState) else ""
        attachment = self.attach(tensors, received.tensors.get(PAYLOAD), digest)
        return e.Received(session, message, defect, attachment)

    def read(self, message: Message, tensors: Tensors) -> tuple[str, Tensors]:
        """Return the fault in the tensors of a worker's message, or "", and the values they stand for."""
        if isinstance(message, RingState):  # ring
            return check_state(self._specs, tensors, message.digest, self._optimizer), tensors
        round_ = message.round if isinstance(message, TrainResult) else 1
        if self._up is None:
            return check_contribution(self._fragments.of_round(round_), tensors), tensors
        assert isinstance(message, TrainResult)
        if PAYLOAD not in tensors:
            return "it came without its delta", {}
        try:
            form = self._up[self._fragments.number_of(round_)]
            return "", form.decode(tensors[PAYLOAD], message.digest)
        except ProtocolError as error:
            return str(error), {}

    def _contribution(self, task: int, tokens: int, tensors: Tensors, steps: int = 1) -> Contribution:
        return Contribution(task, tokens, tensors, steps, "ends" if self._up is None else "deltas")

    def measure(self, round_: int, parts: Sequence[tuple[int, int]]) -> Table:
        """Return the inner products of the deltas of contributions to a round, given as (task, attachment)."""
        contributions = [self._contribution(task, 1, self._contributions[attachment]) for task, attachment in parts]
        judged = self._trained(self._fragments.of_round(round_))
        table = table_of(judged, self.state.params, contributions)
        if not self.is_partial:
            return table
        # A fragment of tensors that begin at zero is near zero, and the first delta is no sign of a fault.
        squares = sum(float(np.add.reduce(np.square(flat(p), dtype=np.float64))) for p in self.state.params.values())
        return replace(table, start_norm=squares**0.5)

    def compare(self, instruction: e.MeasureContributions) -> e.Event:
        """Compare contributions with the start of the round."""
        return e.ContributionsMeasured(instruction.round, self.measure(instruction.round, instruction.contributions))

    def go_back(self, state: OuterState, version: int, shown: Tensors) -> None:
        """Hold the state after `version` outer steps again, and nothing of later ones; `shown` as of the start."""
        self.state, start = self._begun(state, version)
        self._version, self._delta = version, {}
        self._broadcast.go_back(shown or self.state.params)
        # Workers expect the codec in a run that began here at version 0.
        self._published = {version: start if start and self.start_digest else self._newest()}

    def _specs_of(self, round_: int) -> Sequence[TensorSpec]:
        return self._fragments.of_round(round_)

    def _stepped(self, round_: int, step: OuterStep, rule: MergeRule, parts: Mapping[int, int]) -> None:
        self._broadcast.advance(round_, step, rule, parts)


class Broadcast:
    """The form in which the gateway sends new versions: whole parameters, or the whole tensors of a fragment.

    Attributes:
        change: to the newest version.
    """

    def __init__(self, specs: Sequence[TensorSpec], fragments: Fragments) -> None:
        self._specs, self._fragments = tuple(specs), fragments
        self.change: Change = WHOLE
        self._changes: dict[int, Tensors] = {}

    @property
    def shown(self) -> Tensors:
        """The newest version as workers have it, where that is not the master copy; else empty."""
        return {}

    def newest(self, params: Tensors) -> Mapping[str, np.ndarray]:
        """Return the newest version, whose master copy is `params`, as workers get it whole."""
        return published_params(self._specs, params)

    def attached(self, attachment: int, payload: np.ndarray | None, digest: str) -> None:
        """Take note of the bytes, and their digest, in which a contribution came; None: it came as tensors."""

    def dropped(self, attachment: int) -> None:
        """Forget a contribution."""

    def advance(self, round_: int, step: OuterStep, rule: MergeRule, parts: Mapping[int, int]) -> None:
        """Make the change to the version after a round; `parts`: attachments of the contributions by task."""
        if self._fragments.count > 1:
            specs = self._fragments.of_round(round_)
            self.change, self._changes[round_] = CodedChange(), published_params(specs, step.state.params)

    def change_of(self, version: int, own: Collection[int] = ()) -> Tensors:
        """Return the tensors of a change that was announced, without the payloads of the tasks `own`."""
        return self._changes[version]

    def keep(self, versions: Sequence[int]) -> None:
        """Forget the changes to all other versions."""
        self._changes = {v: change for v, change in self._changes.items() if v in versions}

    def go_back(self, params: Tensors) -> None:
        """Let workers have `params`, float32 by name; there is no change."""
        self._changes, self.change = {}, WHOLE


class CodedChanges(Broadcast):
    """Changes in a codec, relative to the parameters that workers have. See `Shown`."""

    change: Change

    def __init__(self, specs: Sequence[TensorSpec], fragments: Fragments, codec: str, params: Tensors) -> None:
        """`params`: as workers have them, float32 by name."""
        super().__init__(specs, fragments)
        self._parts = [Shown(codec, part, _of(part, params)) for part in fragments.parts]

    @property
    def shown(self) -> Tensors:
        return {name: values for part in self._parts for name, values in part.params.items()}

    def newest(self, params: Tensors) -> Mapping[str, np.ndarray]:
        """As float32, to which changes are added."""
        return self.shown

    def advance(self, round_: int, step: OuterStep, rule: MergeRule, parts: Mapping[int, int]) -> None:
        payload, digest = self._parts[self._fragments.number_of(round_)].advance(step.state.params)
        self.change, self._changes[round_] = CodedChange(digest=digest), {PAYLOAD: payload}

    def go_back(self, params: Tensors) -> None:
        super().go_back(params)
        for part, specs in zip(self._parts, self._fragments.parts, strict=True):
            part.params = _of(specs, params)


class RelayedUpdates(Broadcast):
    """The contributions of a round as they came. See `sync.relay`."""

    change: Change

    def __init__(self, specs: Sequence[TensorSpec], fragments: Fragments, codec: str) -> None:
        """`codec`: of the contributions."""
        super().__init__(specs, fragments)
        self._payload_bytes = PayloadForm(codec, specs).spec.nbytes
        self._payloads: dict[int, tuple[np.ndarray, str]] = {}  # payload and digest by attachment

    def newest(self, params: Tensors) -> Mapping[str, np.ndarray]:
        """The master copy, from which workers take outer steps."""
        return params

    def attached(self, attachment: int, payload: np.ndarray | None, digest: str) -> None:
        """A contribution without a payload is refused, and never counts."""
        if payload is not None:
            self._payloads[attachment] = payload, digest

    def dropped(self, attachment: int) -> None:
        self._payloads.pop(attachment, None)

    def advance(self, round_: int, step: OuterStep, rule: MergeRule, parts: Mapping[int, int]) -> None:
        assert step.coefficients is not None
        tasks = tuple(sorted(parts))
        payloads = {task: self._payloads.pop(parts[task]) for task in tasks}
        digests = tuple(payloads[task][1] for task in tasks)
        self.change = RelayedChange(
            relay=Relay(rule=rule.chosen, rate=step.rate, tasks=tasks, digests=digests),
            digest=params_digest(self._specs, step.state.params),
            payload_bytes=self._payload_bytes,
            more_bytes=step.coefficients.nbytes,
            whole_bytes=sum(4 * spec.size for spec in self._specs),
        )
        tensors = {relayed_name(task): payload for task, (payload, _) in payloads.items()}
        self._changes[round_] = {COEFFICIENTS: step.coefficients, **tensors}

    def change_of(self, version: int, own: Collection[int] = ()) -> Tensors:
        left_out = {relayed_name(task) for task in own}
        return {name: values for name, values in self._changes[version].items() if name not in left_out}


def broadcast_of(
    specs: Sequence[TensorSpec], fragments: Fragments, compression: Compression, params: Tensors
) -> Broadcast:
    """Return the broadcast of a run; `params`: as workers have them, float32 by name."""
    if compression.down == "none":
        return Broadcast(specs, fragments)
    if compression.down == RELAY:
        return RelayedUpdates(specs, fragments, compression.up)
    return CodedChanges(specs, fragments, compression.down, params)


def _of(specs: Sequence[TensorSpec], tensors: Tensors) -> dict[str, np.ndarray]:
    return {spec.name: tensors[spec.name] for spec in specs}
