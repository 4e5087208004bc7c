"""What a worker in the star gets and sends: whole parameters, or changes and deltas in a codec with error feedback.

Used in the compute thread: encoding and decoding never hold up the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.diloco.bfloat16 import to_master
from planetary.diloco.outer import published_params
from planetary.diloco.payload import PAYLOAD, PayloadForm, Shown, payload_digest
from planetary.fabric.protocol.messages import Compression, Parameters


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

    def take(self, message: Parameters, tensors: Tensors) -> Tensors:
        """Return the parameters that a message makes the worker's own, in their own element types.

        Raises:
            ProtocolError: the bytes of a change are not those of its digest.
        """
        ...

    def give(self, start: Tensors, ends: Tensors) -> Outgoing:
        """Return what is sent of a task that went from `start` to `ends`.

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

    def expects(self, message: Parameters, name: str) -> TensorSpec | None:
        """See `Exchange`."""
        return self._specs.get(name)

    def take(self, message: Parameters, tensors: Tensors) -> Tensors:
        """See `Exchange`."""
        return tensors

    def give(self, start: Tensors, ends: Tensors) -> Outgoing:
        """See `Exchange`."""
        return Outgoing(ends)


class CodedUpdates:
    """Deltas up, and changes or whole parameters down; see `Exchange`.

    A lease that is trained again, or a second one in the same round, starts from the feedback of the round before, as
    it does from that round's optimizer state.
    """

    def __init__(self, specs: Sequence[TensorSpec], compression: Compression) -> None:
        """Raises `UserError` for a codec that is not known."""
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

    def take(self, message: Parameters, tensors: Tensors) -> Tensors:
        """See `Exchange`."""
        if self._change_spec is None:
            return tensors
        if message.since < 0:
            self._shown = Shown(self._compression.down, self._specs, tensors)
        elif self._shown is None or PAYLOAD not in tensors:
            raise RemoteProtocolError(
                f"parameters {message.version} came as a change since {message.since}, which this worker has not"
            )
        else:
            self._shown.receive(tensors[PAYLOAD], message.digest)
        return published_params(self._specs, self._shown.params)

    def give(self, start: Tensors, ends: Tensors) -> Outgoing:
        """See `Exchange`."""
        delta: dict[str, np.ndarray] = {}
        for spec in self._specs:
            with np.errstate(invalid="ignore", over="ignore"):  # an infinity is found, and named, by the codec
                delta[spec.name] = to_master(spec.dtype, start[spec.name]) - to_master(spec.dtype, ends[spec.name])
        payload, self.residual = self._up.compress(delta, self.residual)
        return Outgoing({PAYLOAD: payload}, payload_digest(payload))


def exchange_of(specs: Sequence[TensorSpec], compression: Compression) -> Exchange:
    """Return what a job asks for. Raises `UserError` for a codec that is not known."""
    return CodedUpdates(specs, compression) if compression.codecs else WholeParameters(specs)
