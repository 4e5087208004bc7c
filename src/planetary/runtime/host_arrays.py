"""Checks of the host arrays that go to a device, the same for every executor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planetary.core.errors import LocalProtocolError
from planetary.core.tensors import Tensors, TensorSpec, host_dtype


def checked(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Return `array`, C-contiguous. Raises `LocalProtocolError` unless shape and dtype match `spec`."""
    if array.shape != spec.shape or array.dtype != host_dtype(spec.dtype):
        raise LocalProtocolError(
            f"tensor {spec.name!r} must be {spec.dtype}{list(spec.shape)} held as {host_dtype(spec.dtype)}, found "
            f"{array.dtype}{list(array.shape)}"
        )
    return np.asarray(array, order="C")  # ascontiguousarray would turn a scalar into a vector


def in_order(specs: Sequence[TensorSpec], tensors: Tensors) -> list[np.ndarray]:
    """Return the named tensors in the order of `specs`, checked. Raises `LocalProtocolError`."""
    missing = [spec.name for spec in specs if spec.name not in tensors]
    if missing:
        raise LocalProtocolError(f"{len(missing)} tensors are missing, the first is {missing[0]!r}")
    return [checked(spec, tensors[spec.name]) for spec in specs]


def checked_batch(specs: Sequence[TensorSpec], batch: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays of a batch, checked. Raises `LocalProtocolError`."""
    if len(batch) != len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise LocalProtocolError(f"a batch has {len(specs)} arrays ({names}), found {len(batch)}")
    return [checked(spec, array) for spec, array in zip(specs, batch, strict=True)]
