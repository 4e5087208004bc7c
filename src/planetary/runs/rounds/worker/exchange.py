"""Payloads of a worker in the star: whole parameters, or changes and deltas in a codec with error feedback.

Used in the compute thread: encoding and decoding never hold up the event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from planetary.core.configuration.ranges import RELAY
from planetary.core.errors import RemoteProtocolError
from planetary.core.registry import file_of
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runs.rounds.messages import Compression, Fragmentation, Parameters
from planetary.sync.bfloat16 import in_float32, to_master
from planetary.sync.contributions import Contribution
from planetary.sync.fragments import Fragments, mixed
from planetary.sync.merge import rule_of
from planetary.sync.outer import published_params
from planetary.sync.payload import PAYLOAD, PayloadForm, Shown, compile_loops, payload_digest
from planetary.sync.relay import COEFFICIENTS, RelayedVersion, relayed_name
from planetary.sync.ring import HeldContribution, eager_start


class Trained(msgspec.Struct, frozen=True):
    """A finished train task.

    Attributes:
        start, ends: parameters before and after it, in their own element types.
    """

    task: int
    round: int
    tokens: int
    start: Tensors
    ends: Tensors


class Outgoing(msgspec.Struct, frozen=True):
    """The payload of a task.

    Attributes:
        tensors: that travel.
        digest: of the bytes of a delta; "": these are end parameters.
    """

    tensors: Tensors
    digest: str = ""


class Exchange:
    """One per role of a worker: by default end parameters up and whole parameters down, exact.

    Attributes:
        residual_specs: of the tensors it keeps from round to round; empty: none.
        residual: these, by name; None: they are zero.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.residual_specs: tuple[TensorSpec, ...] = ()
        self.residual: Tensors | None = None
        self._by_name = {spec.name: spec for spec in specs}
        self._newest: Tensors = {}

    def expects(self, message: Parameters, name: str) -> TensorSpec | None:
        """Return the tensor of this name among parameters, None for another name."""
        return self._by_name.get(name)

    def take(self, message: Parameters, tensors: Tensors) -> None:
        """Keep the parameters a message makes the newest.

        Raises:
            ProtocolError: the bytes of a change do not match the digest.
        """
        self._newest = tensors

    def start(
        self, ahead: Collection[int] = (), tokens: int = 0, after: int = 0, missed: Sequence[int] = ()
    ) -> Tensors:
        """Return where a task begins, in the parameters' own element types.

        Args:
            ahead: the worker's tasks whose part is subtracted from the newest parameters.
            tokens: behind all contributions to the round of these tasks.
            after: the worker's task whose end parameters it goes on from; 0: from the newest parameters.
            missed: versions whose fragments are mixed into these end parameters, with the newest shared values.

        Raises:
            ProtocolError: the worker does not have these end parameters.
        """
        _refuse_chain(after)  # end parameters have no part that could be told apart
        return self._newest

    def mix(self, params: Tensors, version: int) -> Tensors:
        """Return a worker's own parameters with the fragment of a version, which was taken, mixed in.

        Raises:
            ProtocolError: the run has no fragments.
        """
        raise _no_fragments(version)

    def give(self, trained: Trained) -> Outgoing:
        """Return the payload of a task.

        Raises:
            NumericsError: the trained parameters, or the error feedback, are not finite.
        """
        return Outgoing(trained.ends)


class IncomingVersions:
    """The versions a worker gets, whole. The other side of `runs.rounds.preparation.parameters.Broadcast`.

    Attributes:
        masters: the newest version, float32 by name; empty: there is none.
    """

    def __init__(self, specs: Sequence[TensorSpec], compression: Compression) -> None:
        self._specs = tuple(specs)
        self._start = None if compression.start == "none" else PayloadForm(compression.start, specs)
        self.masters: Mapping[str, np.ndarray] = {}

    def expects(self, message: Parameters, name: str) -> TensorSpec | None:
        if message.codec:
            return self._start.spec if self._start is not None and name == PAYLOAD else None
        if message.since >= 0:
            return self._expects_of_change(message, name)
        return next((spec for spec in self._whole_specs() if spec.name == name), None)

    def take(self, message: Parameters, tensors: Tensors) -> None:
        if message.since >= 0:
            if not self.masters or not tensors:
                raise _lacking(message)
            self._take_change(message, tensors)
        elif message.codec:
            if self._start is None or PAYLOAD not in tensors:
                raise RemoteProtocolError(f"parameters {message.version} came in the codec {message.codec!r}")
            self._take_whole(self._start.decode(tensors[PAYLOAD], message.digest))
        else:
            specs = {spec.name: spec for spec in self._whole_specs()}
            self._take_whole({name: to_master(specs[name].dtype, values) for name, values in tensors.items()})

    def sent(self, trained: Trained, payload: np.ndarray, digest: str) -> None:
        """Take note of the worker's own payload of a task."""

    def _whole_specs(self) -> Iterable[TensorSpec]:
        """Return the specs of a version that comes whole, in no codec."""
        return self._specs

    def _take_whole(self, masters: Mapping[str, np.ndarray]) -> None:
        self.masters = masters

    def _expects_of_change(self, message: Parameters, name: str) -> TensorSpec | None:
        return next((spec for spec in self._specs if spec.name == name), None)

    def _take_change(self, message: Parameters, tensors: Tensors) -> None:
        """Take the tensors of a fragment, which are all that this object has."""
        self._take_whole({spec.name: to_master(spec.dtype, tensors[spec.name]) for spec in self._specs})


class CodedIncoming(IncomingVersions):
    """Whole versions in float32, and changes of them in a codec. See `IncomingVersions` and `Shown`."""

    def __init__(self, specs: Sequence[TensorSpec], compression: Compression) -> None:
        super().__init__(specs, compression)
        self._codec = compression.down
        self._shown = Shown(compression.down, specs, {})

    def _whole_specs(self) -> Iterable[TensorSpec]:
        return _master_specs(self._specs)

    def _take_whole(self, masters: Mapping[str, np.ndarray]) -> None:
        self._shown.params = dict(masters)
        self.masters = self._shown.params

    def _expects_of_change(self, message: Parameters, name: str) -> TensorSpec | None:
        return self._shown.spec if name == PAYLOAD else None

    def _take_change(self, message: Parameters, tensors: Tensors) -> None:
        self._shown.receive(tensors[PAYLOAD], message.digest)
        self.masters = self._shown.params


class RelayedIncoming(IncomingVersions):
    """Float32 versions, and outer steps from the payloads of all workers. See `IncomingVersions` and `sync.relay`."""

    def __init__(self, specs: Sequence[TensorSpec], compression: Compression) -> None:
        super().__init__(specs, compression)
        self._version = RelayedVersion(compression.up, specs, {})
        self._payload = PayloadForm(compression.up, specs).spec
        self._own: dict[int, tuple[int, np.ndarray, str]] = {}  # task -> round, payload and digest

    def sent(self, trained: Trained, payload: np.ndarray, digest: str) -> None:
        self._own[trained.task] = trained.round, payload, digest

    def _whole_specs(self) -> Iterable[TensorSpec]:
        return _master_specs(self._specs)

    def _take_whole(self, masters: Mapping[str, np.ndarray]) -> None:
        self._version.params = dict(masters)
        self.masters = self._version.params

    def _expects_of_change(self, message: Parameters, name: str) -> TensorSpec | None:
        relay = message.relay
        if relay is None:
            return None
        if name == COEFFICIENTS:
            return TensorSpec(name, "f64", (len(self._specs), len(relay.tasks)))
        return replace(self._payload, name=name) if name in map(relayed_name, relay.tasks) else None

    def _take_change(self, message: Parameters, tensors: Tensors) -> None:
        relay = message.relay
        fits = relay is not None and file_of(relay.rule.name) is None and len(relay.tasks) == len(relay.digests)
        if relay is None or not fits or COEFFICIENTS not in tensors:
            raise RemoteProtocolError(f"parameters {message.version} came as a change that is not a relay of results")
        payloads = {}
        for task, digest in zip(relay.tasks, relay.digests, strict=True):
            own = self._own[task][1] if task in relay.own and task in self._own else None
            payload = tensors.get(relayed_name(task), own)
            if payload is None:
                raise RemoteProtocolError(f"parameters {message.version} came without the payload of task {task}")
            payloads[task] = payload, digest
        rule = rule_of(relay.rule)
        self._version.advance(payloads, tensors[COEFFICIENTS], rule, message.digest, rate=relay.rate)
        self.masters = self._version.params
        # A version that is evaluated may be followed by this one again.
        self._own = {task: kept for task, kept in self._own.items() if kept[0] >= message.version}


def _master_specs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [TensorSpec(spec.name, "f32", spec.shape) for spec in specs]


def _lacking(message: Parameters) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"parameters {message.version} came as a change since {message.since}, which this worker has not"
    )


def _incoming_of(specs: Sequence[TensorSpec], compression: Compression) -> IncomingVersions:
    if compression.down == "none":
        return IncomingVersions(specs, compression)
    return RelayedIncoming(specs, compression) if compression.down == RELAY else CodedIncoming(specs, compression)


class _Unmerged(msgspec.Struct, frozen=True):
    """A trained task no version contains.

    Attributes:
        start, ends: parameters before and after it, float32.
        residual: the error feedback before it.
    """

    task: int
    round: int
    tokens: int
    start: Tensors
    ends: Tensors
    residual: Tensors | None

    def contribution(self, form: PayloadForm) -> HeldContribution:
        """Return the delta with the error feedback."""
        deltas = form.pending(self.start, self.residual, self.ends)
        return HeldContribution(Contribution(self.task, self.tokens, deltas, form="deltas"), {})


class CodedUpdates(Exchange):
    """Deltas up, and changes or whole parameters down.

    A lease trained again, or a second one in the same round, starts from the feedback of the round before, as it does
    from that round's optimizer state.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        compression: Compression,
        eager_rate: float = 0.0,
        *,
        eager_radial: bool = False,
    ) -> None:
        """Start with no parameters; `eager_...`: as of `TrainingJob`. Raises `UserError` for an unknown codec.

        The loops of the codecs are compiled here, so not on an event loop.
        """
        compile_loops(compression.codecs, specs)
        self._eager_rate, self._eager_radial = eager_rate, eager_radial
        self._held: dict[int, _Unmerged] = {}  # eager: by task
        self._specs = tuple(specs)
        self._down = _incoming_of(specs, compression)
        self._up = PayloadForm(compression.up, specs)
        self.residual_specs: tuple[TensorSpec, ...] = tuple(_master_specs(specs)) if self._up.lossy else ()
        self.residual: Tensors | None = None

    def expects(self, message: Parameters, name: str) -> TensorSpec | None:
        return self._down.expects(message, name)

    def take(self, message: Parameters, tensors: Tensors) -> None:
        self._held = {task: held for task, held in self._held.items() if held.round > message.version}
        self._down.take(message, tensors)

    def start(
        self, ahead: Collection[int] = (), tokens: int = 0, after: int = 0, missed: Sequence[int] = ()
    ) -> Tensors:
        """The worker's part is the delta with the error feedback: all training missing in every version. The aggregate
        will contain the decoded payload, and the error feedback carries the rest into the next start.
        """
        _refuse_chain(after)
        masters = self._down.masters
        own = [self._held[task].contribution(self._up) for task in ahead if task in self._held]
        if own:
            rate, radial = self._eager_rate, self._eager_radial
            masters = eager_start(self._specs, masters, own, tokens, rate, radial=radial)
        return published_params(self._specs, masters)

    def give(self, trained: Trained) -> Outgoing:
        start, ends = (
            {spec.name: in_float32(spec.dtype, params[spec.name]) for spec in self._specs}
            for params in (trained.start, trained.ends)
        )
        before = self.residual
        payload, self.residual = self._up.compress(start, before, ends)
        digest = payload_digest(payload)
        self._down.sent(trained, payload, digest)
        if self._eager_rate:
            self._held[trained.task] = _Unmerged(trained.task, trained.round, trained.tokens, start, ends, before)
        return Outgoing({PAYLOAD: payload}, digest)


class FragmentUpdates(Exchange):
    """One fragment a round each way, and the worker's own values of all of them. See `sync.fragments`.

    Each fragment has the exchange of the fragment's tensors. Deltas count from the newest shared values, wherever the
    worker's task began.
    """

    def __init__(self, specs: Sequence[TensorSpec], compression: Compression, terms: Fragmentation) -> None:
        """Raises `UserError` for a codec that is not known, and more fragments than tensors."""
        self._fragments, self._mixing = Fragments(specs, terms.count), terms.mixing
        self._parts = [exchange_of(part, compression) for part in self._fragments.parts]
        self._version = -1  # the newest that was taken
        self._ends: dict[int, tuple[int, Tensors]] = {}  # own task -> round, and all end parameters
        kept = (spec for part in self._parts for spec in part.residual_specs)
        self.residual_specs: tuple[TensorSpec, ...] = tuple(kept)
        self.residual: Tensors | None = None  # residual of all fragments; zeros for fragments not sent yet

    def expects(self, message: Parameters, name: str) -> TensorSpec | None:
        found = (part.expects(message, name) for part in self._carried(message))
        return next((spec for spec in found if spec is not None), None)

    def take(self, message: Parameters, tensors: Tensors) -> None:
        if 0 <= message.since != self._version:
            raise RemoteProtocolError(
                f"parameters {message.version} came as a fragment for version {message.since}, and this worker has "
                f"version {self._version}"
            )
        for part, specs in zip(self._parts, self._fragments.parts, strict=True):
            if part in self._carried(message):
                part.take(message, tensors if message.digest else {spec.name: tensors[spec.name] for spec in specs})
        self._version = message.version

    def _carried(self, message: Parameters) -> Sequence[Exchange]:
        return self._parts if message.since < 0 else [self._parts[self._fragments.number_of(message.version)]]

    def start(
        self, ahead: Collection[int] = (), tokens: int = 0, after: int = 0, missed: Sequence[int] = ()
    ) -> Tensors:
        if not after:
            return {name: values for part in self._parts for name, values in part.start().items()}
        if after not in self._ends:
            raise RemoteProtocolError(f"a task goes on from task {after}, whose end parameters are not here")
        params = self._ends[after][1]
        for version in self._fragments.one_each(missed):
            params = self.mix(params, version)
        return params

    def mix(self, params: Tensors, version: int) -> Tensors:
        shared = self._parts[self._fragments.number_of(version)].start()
        taken = {
            spec.name: mixed(spec, params[spec.name], shared[spec.name], self._mixing)
            for spec in self._fragments.of_round(version)
        }
        return {**params, **taken}

    def give(self, trained: Trained) -> Outgoing:
        self._ends = {task: held for task, held in self._ends.items() if held[0] >= trained.round - 1}
        self._ends[trained.task] = trained.round, trained.ends
        part = self._parts[self._fragments.number_of(trained.round)]
        ends = {spec.name: trained.ends[spec.name] for spec in self._fragments.of_round(trained.round)}
        part.residual = self.residual
        outgoing = part.give(replace(trained, start=part.start(), ends=ends))
        if part.residual is not None:
            before = self.residual or {spec.name: spec.zeros() for spec in self.residual_specs}
            self.residual = {**before, **part.residual}
        return outgoing


def _no_fragments(version: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"a task mixes in version {version}, and its run has no fragments")


def _refuse_chain(after: int) -> None:
    if after:
        raise RemoteProtocolError(f"a task goes on from task {after}, and its run has no fragments")


def exchange_of(
    specs: Sequence[TensorSpec],
    compression: Compression,
    eager_rate: float = 0.0,
    fragments: Fragmentation | None = None,
    *,
    eager_radial: bool = False,
) -> Exchange:
    """Return the exchange of a job; the arguments are those of `TrainingJob`.

    Raises:
        UserError: a codec is not known, or there are more fragments than tensors.
    """
    if fragments is not None:
        return FragmentUpdates(specs, compression, fragments)
    if not compression.codecs:
        return Exchange(specs)
    return CodedUpdates(specs, compression, eager_rate, eager_radial=eager_radial)
