"""Tensors in a device's memory: the wire takes them from a copy in host memory, and puts results into it.

PyTorch moves them, whatever their device is; tensors of other libraries come to PyTorch through DLPack, which shares
their memory. For CUDA the copy is pinned, so the device moves it by itself at the bus's full rate.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

_CPU = 1  # DLPack's number of the kind of device


def is_tensor(array: Any) -> bool:
    """Whether `array` is PyTorch's, which a worker must not need."""
    torch = sys.modules.get("torch")  # loaded where there are tensors
    return torch is not None and isinstance(array, torch.Tensor)


def device_tensor(array: Any) -> Any | None:
    """Return a PyTorch tensor that shares the memory of `array` on a device; None for arrays in host memory.

    JAX's arrays cannot be changed, and are read as every other array that numpy converts: None for them too.
    """
    torch = sys.modules.get("torch")
    if is_tensor(array):
        return None if array.device.type == "cpu" else array.detach()
    if torch is None or hasattr(array, "__array__") or not hasattr(array, "__dlpack_device__"):
        return None
    return None if array.__dlpack_device__()[0] == _CPU else torch.from_dlpack(array)


def no_numbers_of(tensor: Any) -> Any:
    """Return an empty tensor on the CPU of the same element type."""
    return sys.modules["torch"].empty(0, dtype=tensor.dtype)


class HostCopy:
    """A tensor on a device and the copy in host memory, in the order of the caller's own work on the device.

    Attributes:
        host: the copy, a PyTorch tensor on the CPU.
    """

    def __init__(self, tensor: Any) -> None:
        """`tensor` is on a device, any layout."""
        torch = sys.modules["torch"]
        on_cuda = tensor.device.type == "cuda"
        self._tensor = tensor
        self._stream = torch.cuda.current_stream(tensor.device) if on_cuda else None
        self.host = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, pin_memory=on_cuda)

    def read(self) -> None:
        """Copy the tensor to the host; return when it is there."""
        self._copy(self.host, self._tensor)

    def write(self) -> None:
        """Copy the host's numbers into the tensor; return when they are there."""
        self._copy(self._tensor, self.host)

    def _copy(self, target: Any, source: Any) -> None:
        torch = sys.modules["torch"]
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=self._stream is not None)
        if self._stream is not None:
            self._stream.synchronize()
