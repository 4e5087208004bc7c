"""What a worker in the star gets and sends: whole parameters, or changes and deltas in a codec with error feedback.

Used in the compute thread: encoding and decoding never hold up the event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec
import numpy as np

from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.diloco.bfloat16 import to_master
from planetary.diloco.contributions import Contribution
from planetary.diloco.outer import published_params
from planetary.diloco.payload import PAYLOAD, PayloadForm, Shown, payload_digest
from planetary.diloco.ring import HeldContribution, eager_start
from planetary.fabric.protocol.messages import Compression, Parameters


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
    """What a worker sends of a task.

    Attributes:
        tensors: that travel.
        digest: of the bytes of a delta; "": these are end parameters.
    """

    tensors: Tensors
    digest: str = ""


class Exchange(Protocol):
    """One per role of a worker.

    Attributes:
        residual_specs: of the tensors that it keeps from round to round; empty: none.
        residual: these, by name; None: they are zero.
    """

    residual_specs: tuple[TensorSpec, ...]
    residual: Tensors | None

    def expects(self, message: Parameters, name: str) -> TensorSpec | None:
        """Return the tensor of this name that comes with parameters, None for one that does not."""
        ...

    def take(self, message: Parameters, tensors: Tensors) -> None:
        """Keep the parameters that a message makes the newest.

        Raises:
            ProtocolError: the bytes of a change are not those of its digest.
        """
        ...

    def start(self, ahead: Collection[int], tokens: int) -> Tensors:
        """Return the newest parameters, in their own element types, less the worker's part of the tasks `ahead`.

        `tokens`: behind all contributions to the round of these tasks.
        """
        ...

    def give(self, trained: Trained) -> Outgoing:
        """Return what is sent of a task.

        Raises:
            NumericsError: they, or what is kept from round to round, are not finite.
        """
        ...


class WholeParameters:
    """End parameters up and whole parameters down, exact. See `Exchange`."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.residual_specs: tuple[TensorSpec, ...] = ()
        self.residual: Tensors | None = None
        self._specs = {spec.name: spec for spec in specs}
        self._newest: Tensors = {}

    def expects(self, message: Parameters, name: str) -> TensorSpec | None:
        """See `Exchange`."""
        return self._specs.get(name)

    def take(self, message: Parameters, tensors: Tensors) -> None:
        """See `Exchange`."""
        self._newest = tensors

    def start(self, ahead: Collection[int], tokens: int) -> Tensors:
        """See `Exchange`; end parameters have no part that could be told apart."""
        return self._newest

    def give(self, trained: Trained) -> Outgoing:
        """See `Exchange`."""
        return Outgoing(trained.ends)


class CodedUpdates:
    """Deltas up, and changes or whole parameters down; see `Exchange`.

    A lease that is trained again, or a second one in the same round, starts from the feedback of the round before, as
    it does from that round's optimizer state.
    """

    def __init__(self, specs: Sequence[TensorSpec], compression: Compression, eager_rate: float = 0.0) -> None:
        """Start with no parameters; `eager_rate`: as of `Job`. Raises `UserError` for a codec that is not known."""
        self._eager_rate = eager_rate
        self._newest: Tensors = {}  # float32 with changes, else in their own element types
        self._held: dict[
            int, tuple[int, HeldContribution]
        ] = {}  # eager: task -> its round, and the delta that was sent
        self._specs, self._compression = tuple(specs), compression
        self._whole = WholeParameters(specs)
        self._masters = {spec.name: TensorSpec(spec.name, "f32", spec.shape) for spec in specs}
        self._up = PayloadForm(compression.up, specs)
        self._shown: Shown | None = None
        self._change_spec = None if compression.down == "none" else PayloadForm(compression.down, specs).spec
        self.residual_specs: tuple[TensorSpec, ...] = tuple(self._masters.values()) if self._up.lossy else ()
        self.residual: Tensors | None = None

    def expects(self, message: Parameters, name: str) -> TensorSpec | None:
        """See `Exchange`."""
        if self._change_spec is None:
            return self._whole.expects(message, name)
        if message.since >= 0:
            return self._change_spec if name == PAYLOAD else None
        return self._masters.get(name)

    def take(self, message: Parameters, tensors: Tensors) -> None:
        """See `Exchange`."""
        self._held = {task: held for task, held in self._held.items() if held[0] > message.version}
        if self._change_spec is None:
            self._newest = tensors
            return
        if message.since < 0:
            self._shown = Shown(self._compression.down, self._specs, tensors)
        elif self._shown is None or PAYLOAD not in tensors:
            raise RemoteProtocolError(
                f"parameters {message.version} came as a change since {message.since}, which this worker has not"
            )
        else:
            self._shown.receive(tensors[PAYLOAD], message.digest)
        self._newest = self._shown.params

    def start(self, ahead: Collection[int], tokens: int) -> Tensors:
        """See `Exchange`. What was sent is what the aggregate contains; the rest is in the error feedback."""
        masters = {spec.name: to_master(self._dtype_of(spec), self._newest[spec.name]) for spec in self._specs}
        own = [self._held[task][1] for task in ahead if task in self._held]
        if own:
            masters = eager_start(self._specs, masters, own, tokens, self._eager_rate)
        return published_params(self._specs, masters)

    def _dtype_of(self, spec: TensorSpec) -> str:
        return spec.dtype if self._change_spec is None else "f32"

    def give(self, trained: Trained) -> Outgoing:
        """See `Exchange`."""
        start, ends, delta = trained.start, trained.ends, {}
        for spec in self._specs:
            with np.errstate(invalid="ignore", over="ignore"):  # an infinity is found, and named, by the codec
                delta[spec.name] = to_master(spec.dtype, start[spec.name]) - to_master(spec.dtype, ends[spec.name])
        payload, self.residual = self._up.compress(delta, self.residual)
        digest = payload_digest(payload)
        if self._eager_rate:
            sent = Contribution(trained.task, trained.tokens, self._up.decode(payload, digest), form="deltas")
            self._held[trained.task] = trained.round, HeldContribution(sent, {})
        return Outgoing({PAYLOAD: payload}, digest)


def exchange_of(specs: Sequence[TensorSpec], compression: Compression, eager_rate: float = 0.0) -> Exchange:
    """Return what a job asks for; `eager_rate` as of `Job`. Raises `UserError` for a codec that is not known."""
    return CodedUpdates(specs, compression, eager_rate) if compression.codecs else WholeParameters(specs)
