"""A tree of tensors as one run of bytes with a digest, and the error feedback of the codec.

The error of a lossy codec is kept by the sender and added to the next update: e ← β e + Δ, sent = Q(e), e ← e − sent
(Karimireddy et al. 2019, arXiv:1901.09847). Everything is a pure function of the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import numpy as np
from cryptography.hazmat.primitives.poly1305 import Poly1305

from planetary.collectives.reduction import quantise
from planetary.core.errors import NumericsError, PlanetaryError, ProtocolError
from planetary.core.extension_points import CODECS
from planetary.core.tensors import Tensors, TensorSpec
from planetary.sync.codecs import tensor_codec
from planetary.sync.codecs.tensor_codec import Codec, CodecInput

PAYLOAD = "payload"
"""Name of the tensor of bytes a message carries."""

_DIGEST_KEY = bytes(range(1, 33))
_AT_ONCE = 1 << 28  # bytes: the library takes less than 2 GiB


class PayloadForm:
    """How the tensors of a model travel in one codec: one after the other, in the order of their specs.

    Attributes:
        lossy: whether the sender keeps the dropped part.
        spec: of the tensor of bytes.
    """

    def __init__(self, codec: str, specs: Sequence[TensorSpec]) -> None:
        """Raises `UserError` for an unknown codec."""
        self._name = codec
        self._codec: Codec = CODECS.find(codec)()
        self._specs = tuple(specs)
        sizes = [self._codec.nbytes(spec) for spec in specs]
        self._ends = np.cumsum(sizes).tolist()
        self.lossy = self._codec.lossy
        self.spec = TensorSpec(PAYLOAD, "ui8", (sum(sizes),))

    def encode(self, tensors: Tensors) -> np.ndarray:
        """Return finite float32 tensors by name as uint8 [nbytes]. Raises `NumericsError` for others."""
        return self.compress(tensors, None)[0]

    def decode(self, payload: np.ndarray, digest: str) -> dict[str, np.ndarray]:
        """Return the float32 tensors that bytes stand for.

        Raises:
            ProtocolError: the bytes are fewer or more, are not those of `digest`, or stand for numbers no codec sends;
                the text says which.
        """
        if payload.dtype != np.uint8 or payload.shape != self.spec.shape:
            raise ProtocolError(
                f"reading an update: expected {self.spec.shape[0]} bytes, found {payload.dtype}{list(payload.shape)}"
            )
        found = payload_digest(payload)
        if found != digest:
            raise ProtocolError(f"reading an update: its digest is {found}, expected {digest}: it was altered")
        return {
            spec.name: self._decoded(spec, part if _is_aligned(part) else part.copy())
            for spec, part in self._parts(payload)
        }

    def _decoded(self, spec: TensorSpec, part: np.ndarray) -> np.ndarray:
        try:
            values = self._codec.decode(spec, part)
        except PlanetaryError:
            raise
        except Exception as error:
            raise ProtocolError(
                f"reading an update: the codec {self._name} failed at tensor {spec.name!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if values.dtype != np.float32 or values.shape != spec.shape:
            raise ProtocolError(
                f"reading an update: the codec {self._name} made {values.dtype}{list(values.shape)} of tensor "
                f"{spec.name!r}, expected float32{list(spec.shape)}"
            )
        return values

    def compress(
        self, update: Tensors, residual: Tensors | None, base: Tensors | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray] | None]:
        """Return `update` less `base`, with the residual of earlier calls added, as bytes, and the new residual.

        Args:
            update: float32 by name.
            base: alike; None: zeros.
            residual: of the last call; None: nothing was dropped. It is left as it was.

        Raises:
            NumericsError: the update, the residual, or their sum in this codec has NaN or infinite numbers; the text
                names it and the tensor.
        """
        out, left = self.spec.empty(), {}
        for spec, part in self._parts(out):
            given = CodecInput(
                np.asarray(update[spec.name], np.float32),
                None if base is None else np.asarray(base[spec.name], np.float32),
                None if residual is None or not self.lossy else residual[spec.name],
            )
            piece = part if _is_aligned(part) else np.empty(len(part), np.uint8)
            rest = self._codec.compress(spec, given, piece)
            if rest is None:
                raise _not_finite(spec, given)
            if piece is not part:
                part[:] = piece
            left[spec.name] = rest
        return out, left if self.lossy else None

    def pending(self, update: Tensors, residual: Tensors | None, base: Tensors | None = None) -> dict[str, np.ndarray]:
        """Return what `compress` encodes, float32: `update` less `base`, with the residual of earlier calls added."""
        return {
            spec.name: CodecInput(
                np.asarray(update[spec.name], np.float32),
                None if base is None else np.asarray(base[spec.name], np.float32),
                None if residual is None or not self.lossy else residual[spec.name],
            ).sum(self._codec.decay)
            for spec in self._specs
        }

    def _parts(self, data: np.ndarray) -> list[tuple[TensorSpec, np.ndarray]]:
        starts = [0, *self._ends[:-1]]
        return [(spec, data[a:b]) for spec, a, b in zip(self._specs, starts, self._ends, strict=True)]


def _is_aligned(part: np.ndarray) -> bool:
    """Whether a tensor's bytes can be read and written as wider numbers where they are: parts begin at any byte."""
    return part.ctypes.data % 4 == 0


def _not_finite(spec: TensorSpec, update: CodecInput) -> NumericsError:
    """Return the error of a tensor that cannot be compressed."""
    residual = update.residual
    if not np.isfinite(CodecInput(update.values, update.base).sum(1.0)).all():
        return NumericsError(f"cannot send an update: tensor {spec.name!r} contains NaN or infinite numbers")
    if residual is not None and not np.isfinite(residual).all():
        return NumericsError(
            f"cannot send an update: the error feedback of tensor {spec.name!r} contains NaN or infinite numbers"
        )
    return NumericsError(
        f"cannot send an update: tensor {spec.name!r} with its error feedback is too large for float32"
    )


LEAST_COMPILED = 4_000_000
"""Numbers of a model for which codecs have compiled loops: numpy needs at most 0.15 s for the updates of fewer."""


def compile_loops(codecs: Collection[str], specs: Sequence[TensorSpec]) -> None:
    """Have the loops of the built-in ones of these codecs compiled, before a round waits for it.

    With numba, and for tensors of `LEAST_COMPILED` numbers. `specs`: of the updates.
    """
    chosen = sorted(CODECS.built_in.keys() & set(codecs))
    if not chosen or sum(spec.size for spec in specs) < LEAST_COMPILED:
        return
    tensor_codec.LOOPS.load()
    quantise.LOOPS.load()
    for codec in chosen:
        _compile(codec)


@functools.cache
def _compile(codec: str) -> None:
    form, one = PayloadForm(codec, [TensorSpec("one", "f32", (1,))]), {"one": np.ones(1, np.float32)}
    payload, _ = form.compress(one, None)
    form.decode(payload, payload_digest(payload))


class Shown:
    """The receivers' copy of parameters: a change is relative to this copy, so no rounding is ever lost.

    The receivers add the same numbers to the same numbers (`receive`), and so have the same bits.

    Attributes:
        params: float32 by name.
    """

    def __init__(self, codec: str, specs: Sequence[TensorSpec], params: Tensors) -> None:
        """`params`: the receivers' copy, float32 by name."""
        self._form = PayloadForm(codec, specs)
        self.params: dict[str, np.ndarray] = dict(params)

    @property
    def spec(self) -> TensorSpec:
        """Of the bytes of a change."""
        return self._form.spec

    def advance(self, params: Tensors) -> tuple[np.ndarray, str]:
        """Return the bytes that bring the receivers near `params`, float32 by name, and their digest."""
        payload, _ = self._form.compress(params, None, self.params)
        digest = payload_digest(payload)
        self.receive(payload, digest)
        return payload, digest

    def receive(self, payload: np.ndarray, digest: str) -> None:
        """Add a change. Raises `ProtocolError` as `PayloadForm.decode`."""
        change = self._form.decode(payload, digest)
        self.params = {name: np.add(values, change[name], out=change[name]) for name, values in self.params.items()}


def payload_digest(*parts: np.ndarray) -> str:
    """Return the digest of the bytes of contiguous arrays, one after the other: 128 bits in hex.

    Poly1305 (RFC 8439) with a key that is no secret: whatever damages bytes changes it, but for one case in 2^100, at
    more than ten times the speed of BLAKE2b. It is sent by the sender of the bytes, and proves nothing about that one.
    """
    digest = Poly1305(_DIGEST_KEY)
    for part in parts:
        data = part.reshape(-1).view(np.uint8)
        for begin in range(0, len(data), _AT_ONCE):
            digest.update(data[begin : begin + _AT_ONCE].data)
    return digest.finalize().hex()
