"""Element types, and the flat numpy view of a caller's array: numpy, PyTorch, JAX, or a tensor on a device."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from planetary.collectives.reduction.device_tensors import HostCopy, device_tensor, is_tensor, no_numbers_of
from planetary.core.errors import UserError

# Spelling on the wire -> numpy type in memory. bfloat16 is held as 16 raw bits.
TYPES: Mapping[str, np.dtype] = {
    "ui8": np.dtype("u1"),
    "i8": np.dtype("i1"),
    "ui16": np.dtype("<u2"),
    "i16": np.dtype("<i2"),
    "ui32": np.dtype("<u4"),
    "i32": np.dtype("<i4"),
    "ui64": np.dtype("<u8"),
    "i64": np.dtype("<i8"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "f32": np.dtype("<f4"),
    "f64": np.dtype("<f8"),
}
FLOATS = frozenset({"f16", "bf16", "f32", "f64"})

_NAMES = {dtype: name for name, dtype in TYPES.items() if name != "bf16"}


class Flat:
    """One caller's array as a flat, contiguous, aligned numpy array, and the way back.

    Attributes:
        dtype: element type, e.g. `"bf16"`.
        flat: one-dimensional array of `TYPES[dtype]`. It shares memory with the caller's array unless `copied`.
        copied: whether `write_back` is needed because the caller's memory cannot be used as it is.
    """

    def __init__(self, array: Any, *, writable: bool, what: str = "the array") -> None:
        """Look at a numpy array, a torch tensor, or (only to read) anything numpy can convert; copy from a device.

        Raises `UserError` when the type is unknown or no plain array, or `writable` is asked of memory that cannot be
        written.
        """
        tensor = device_tensor(array)
        self._device = None if tensor is None else HostCopy(tensor)
        host, self.dtype = _host_array(array if self._device is None else self._device.host, what)
        if writable and not host.flags.writeable:
            raise UserError(
                f"{what} cannot be changed in place (a {type(array).__module__.split('.')[0]} array that is "
                "read-only); give a writable array as out="
            )
        self._host = host
        direct = host.flags.c_contiguous and host.flags.aligned and host.dtype.isnative
        self.copied = not direct or self._device is not None
        held = TYPES[self.dtype]
        if self._device is not None:
            try:
                self._device.read()
            except RuntimeError as error:
                raise UserError(f"{what} cannot be copied from its device: {error}") from error
        self.flat = host.reshape(-1).view(held) if direct else np.ascontiguousarray(host, held).reshape(-1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the caller's array."""
        return self._host.shape

    def read_again(self) -> None:
        """Copy the caller's array into `flat` again where that has memory of another layout."""
        if self._device is not None:
            self._device.read()
        elif self.copied:
            self.flat[...] = self._host.reshape(-1)

    def write_back(self) -> None:
        """Copy `flat` into the caller's array where that has memory of another layout."""
        if self._device is not None:
            self._device.write()
        elif self.copied:
            self._host[...] = self.flat.reshape(self._host.shape)


def element_type(array: Any, what: str = "the array") -> str:
    """Return the element type of a caller's array without copying it from the device; raises as `Flat`."""
    tensor = device_tensor(array)
    return _host_array(array if tensor is None else no_numbers_of(tensor), what)[1]


def raw(array: np.ndarray) -> memoryview:
    """Return the bytes of a flat, contiguous array, without a copy."""
    return array.view(np.uint8).data if array.size else memoryview(b"")


def _host_array(array: Any, what: str) -> tuple[np.ndarray, str]:
    if is_tensor(array):
        return _torch_array(array, what)
    if not isinstance(array, np.ndarray):
        if not hasattr(array, "__array__"):
            raise UserError(f"{what} is a {type(array).__name__}; give a numpy, torch or JAX array")
        array = np.asarray(array)
    if isinstance(array, np.matrix):  # has two dimensions even when flattened
        raise UserError(f"{what} is a numpy.matrix, which cannot be made flat; give numpy.asarray(it)")
    if isinstance(array, np.ma.MaskedArray):
        raise UserError(
            f"{what} is a numpy.ma.MaskedArray, and peers would get the masked elements; give it.filled(value), or "
            "it.data if that is meant"
        )
    name = _NAMES.get(array.dtype)
    if name is not None:
        return array, name
    if array.dtype.name == "bfloat16":  # ml_dtypes, which JAX uses
        return array.view(np.uint16), "bf16"
    name = _NAMES.get(array.dtype.newbyteorder("<") if array.dtype.itemsize > 1 else array.dtype)
    if name is None:
        raise UserError(f"{what} has elements of type {array.dtype}; supported: {', '.join(TYPES)}")
    return array, name


def _torch_array(tensor: Any, what: str) -> tuple[np.ndarray, str]:
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        torch = sys.modules["torch"]  # loaded where there are tensors; a worker must not need it

        return tensor.view(torch.int16).numpy().view(np.uint16), "bf16"
    try:
        return _host_array(tensor.numpy(), what)
    except (TypeError, RuntimeError) as error:
        raise UserError(f"{what}: {error}") from None
