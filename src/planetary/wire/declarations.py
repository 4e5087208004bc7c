"""Declarations of the tensors that follow a message, to and from JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from planetary.core.errors import LocalProtocolError, RemoteProtocolError
from planetary.core.tensors import HOST_DTYPES, TensorSpec
from planetary.wire.limits import Limits

_declarations = msgspec.json.Decoder(tuple[TensorSpec, ...])
_encoder = msgspec.json.Encoder()

_MOST_DIMENSIONS = 32
_LONGEST_NAME = 1024

# A bfloat16 is held as 16 raw bits, so an array of them is declared as `ui16`.
_DECLARED: Mapping[np.dtype, str] = {host: name for name, host in HOST_DTYPES.items() if name != "bf16"}


def declare(tensors: Mapping[str, np.ndarray]) -> tuple[TensorSpec, ...]:
    """Return name, element type and shape of each array, in order.

    The element type is the one whose host type the array has; raw bfloat16 bits are declared as `ui16`.
    Raises `LocalProtocolError` for an array of a type that has no place on the wire, such as a
    big-endian one.
    """
    specs = []
    for name, array in tensors.items():
        dtype = _DECLARED.get(array.dtype)
        if dtype is None:
            raise LocalProtocolError(
                f"sending tensor {name!r}: numpy type {array.dtype.str!r} is none of "
                f"{', '.join(host.str for host in _DECLARED)}"
            )
        specs.append(TensorSpec(name, dtype, tuple(array.shape)))
    return tuple(specs)


def encode_declaration(specs: tuple[TensorSpec, ...], limits: Limits) -> bytes:
    """Return the JSON of a message's tensors, empty for none. Raises `LocalProtocolError` over a cap."""
    if not specs:
        return b""
    data = _encoder.encode(specs)
    try:
        _check_declaration(specs, limits)
        if len(data) > limits.declaration_bytes:
            raise ValueError(f"their list may have {limits.declaration_bytes} bytes, it has {len(data)}")
    except ValueError as error:
        raise LocalProtocolError(f"sending tensors: {error}") from None
    return data


def decode_declaration(data: bytes | bytearray | memoryview, limits: Limits) -> tuple[TensorSpec, ...]:
    """Read a message's tensors. Raises `RemoteProtocolError` before anything of their size was allocated."""
    if not len(data):
        return ()
    try:
        specs = _declarations.decode(data)
        _check_declaration(specs, limits)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise RemoteProtocolError(f"reading the list of tensors of a message: {error}") from None
    return specs


def _check_declaration(specs: tuple[TensorSpec, ...], limits: Limits) -> None:
    if not 0 < len(specs) <= limits.tensors:
        raise ValueError(f"expected 1 to {limits.tensors} tensors, found {len(specs)}")
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two tensors of one message have the same name")
    total = 0
    for spec in specs:
        if not 0 < len(spec.name) <= _LONGEST_NAME:
            raise ValueError(f"a tensor's name has 1 to {_LONGEST_NAME} characters, found {len(spec.name)}")
        if len(spec.shape) > _MOST_DIMENSIONS or any(extent < 0 for extent in spec.shape):
            raise ValueError(f"tensor {spec.name!r} has an impossible shape {spec.shape}")
        try:
            # An extent of 0 must not hide one that numpy cannot index.
            spanned = math.prod(max(extent, 1) for extent in spec.shape) * HOST_DTYPES[spec.dtype].itemsize
        except KeyError:
            raise ValueError(f"tensor {spec.name!r} has an unknown element type {spec.dtype!r}") from None
        total += spec.nbytes
        if max(spanned, total) > limits.tensor_bytes:
            raise ValueError(
                f"the tensors of one message may have {limits.tensor_bytes} bytes, "
                f"with {spec.name!r} of shape {spec.shape} they have more"
            )
