"""The tensors the gateway holds: global parameters by version, the outer state, contributions on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from planetary.core.errors import LocalProtocolError, ProtocolError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.protocol.messages import Message
from planetary.runs.rounds import events as e
from planetary.runs.rounds.changes import Change
from planetary.runs.rounds.messages import Compression, RingState, TrainResult
from planetary.runs.rounds.preparation.broadcast import broadcast_of
from planetary.runs.rounds.preparation.whole_versions import WholeVersions
from planetary.sync.contributions import Contribution, check_contribution, flat
from planetary.sync.deltas import Table, table_of
from planetary.sync.fragments import Fragments
from planetary.sync.merge import MergeRule
from planetary.sync.outer import OuterStep, published_params
from planetary.sync.outer_optimizers import AVERAGING, OuterOptimizer, OuterState
from planetary.sync.payload import PAYLOAD, PayloadForm, compile_loops, payload_digest
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
