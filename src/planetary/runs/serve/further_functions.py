"""Functions that a serving worker gets after the first ones, while it computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.core.artifact_label import read_label
from planetary.core.errors import CompileError, LocalProtocolError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec, WeightBlocks
from planetary.fleet.protocol.messages import WorkerJob
from planetary.fleet.worker.events import IndependentMachine
from planetary.machine.events import Instruction
from planetary.runs.serve.messages import FurtherFunctions, ServingJob
from planetary.runtime.backends import DeviceChoice, is_pjrt
from planetary.runtime.device_program import DeviceProgram, Handle, Program, open_program


class AddFunctions(Instruction, frozen=True):
    """Add the functions of a job that the role does not have."""

    further: tuple[FurtherFunctions, ...]


class ServingMachine(IndependentMachine):
    """The machine of a role that computes calls, and gets further functions with a job of the same loads."""

    def connected(self, session: int, job: WorkerJob) -> list[Instruction]:
        assert isinstance(job, ServingJob)
        return [*super().connected(session, job), AddFunctions(job.further)]


@dataclass(frozen=True)
class Extension:
    """Adds functions to a loaded model.

    Attributes:
        is_here: whether an artifact with this digest is on this machine.
        add: loads and compares functions, in the thread that computes. Raises `PlanetaryError`.
    """

    is_here: Callable[[str], bool]
    add: Callable[[FurtherFunctions], None]


class JoinedPrograms(DeviceProgram):
    """Artifacts on one device as one program: each has some of the functions, and takes the others' tensors."""

    def __init__(self, device: DeviceChoice, store: BlobStore) -> None:
        """Start without functions. `store` has the artifacts."""
        super().__init__(Program(b"", {}), "")
        self._device, self._store = device, store
        self._blocks: tuple[WeightBlocks, ...] = ()
        self._first: DeviceProgram | None = None
        self._runner_of: dict[str, DeviceProgram] = {}

    def add(self, artifact: str, functions: Mapping[str, FunctionSpec]) -> None:
        """Load the functions of an artifact.

        Raises:
            CompileError: they take parameters in another layout than the others.
            PlanetaryError: as `open_program`.
        """
        data = self._store.get(artifact)
        blocks = () if is_pjrt(self._device["backend"]) else read_label(data).blocks
        if self._first is None:
            self._blocks = blocks
        elif blocks != self._blocks:
            raise CompileError(f"{', '.join(functions)}: compiled for parameters in another layout than the first ones")
        runner = open_program(data, Program(b"", functions), **self._device)
        self._first, self.device_name = self._first or runner, runner.device_name
        self._runner_of |= dict.fromkeys(functions, runner)

    def remove(self, functions: Collection[str]) -> None:
        """Forget functions."""
        for name in functions:
            self._runner_of.pop(name, None)

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        return self._any.put(spec, array)

    def get(self, spec: TensorSpec, handle: Handle, into: np.ndarray | None = None) -> np.ndarray:
        return self._any.get(spec, handle, into)

    def signature(self, function: str) -> FunctionSpec:
        return self._of(function).signature(function)

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        return self._of(function).invoke(function, arguments)

    @property
    def _any(self) -> DeviceProgram:
        assert self._first is not None
        return self._first

    def _of(self, function: str) -> DeviceProgram:
        if function not in self._runner_of:
            known = ", ".join(self._runner_of)
            raise LocalProtocolError(f"the worker has no function {function!r}; it has: {known}")
        return self._runner_of[function]
