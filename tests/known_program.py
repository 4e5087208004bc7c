"""Programs of the tests' models, whose functions are a few lines of NumPy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.runtime.device_program import DeviceProgram, Handle, Program, copied


class KnownProgram(DeviceProgram):
    """A program whose functions are a few lines of NumPy in place of compiled ones, without a device.

    Handles are arrays.
    """

    def __init__(self, name: bytes, functions: Mapping[str, FunctionSpec]) -> None:
        """`name`: in place of the module, whose digest identifies the program; `functions`: signatures by name."""
        super().__init__(Program(name, functions), "none")

    @abstractmethod
    def results(self, function: str, given: dict[str, np.ndarray]) -> Mapping[str, Any]:
        """Return at least the results of a function by name, of arguments by name."""

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        return np.array(array)

    def get(self, spec: TensorSpec, handle: Handle, into: np.ndarray | None = None) -> np.ndarray:
        return copied(handle, into)

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        spec = self.signature(function)
        found = self.results(function, {one.name: value for one, value in zip(spec.arguments, arguments, strict=True)})
        return [np.asarray(found[one.name], np.int32 if one.dtype == "i32" else np.float32) for one in spec.results]
