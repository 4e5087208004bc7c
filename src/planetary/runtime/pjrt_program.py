"""Programs run by XLA, on one PJRT device or on an island of several.

The artifact is the portable StableHLO itself: XLA compiles it here, for exactly these devices. An island holds every
tensor whole on every device but those a program splits, such as a batch; XLA's partitioner adds the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planetary.core.errors import ResourceError
from planetary.core.tensors import TensorSpec, host_dtype
from planetary.runtime.device_program import DeviceProgram, Handle, Program, copied
from planetary.runtime.pjrt_device import name_of_device


class PjrtProgram(DeviceProgram):
    """A module on one device or an island; each function is compiled when it is first called, or prepared.

    Args:
        portable: the module as a portable artifact.
        program: description of the module.
        devices: of JAX, as `pjrt_device.open_devices` returns them.
        backend: name of the backend, for people.
        optimise: False compiles faster and runs slower.
    """

    def __init__(
        self, portable: bytes, program: Program, devices: Sequence[Any], backend: str, *, optimise: bool = True
    ) -> None:
        import jax

        from planetary.compiler.backends import xla

        kind = name_of_device(devices[0])
        super().__init__(program, kind if len(devices) == 1 else f"{len(devices)} × {kind}")
        self._xla, self._portable, self._backend, self._optimise = xla, portable, backend, optimise
        self._devices = list(devices)
        self._whole = self._split = devices[0]
        self._join: Any = jax.make_array_from_single_device_arrays
        if len(devices) > 1:
            mesh = jax.sharding.Mesh(np.array(devices), ("island",))
            self._whole, self._split = (
                jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in ((), ("island",))
            )
        self._compiled: dict[str, Any] = {}

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        where = self._split if spec.name in self.program.split else self._whole
        try:
            # XLA's CPU device uses host memory as it is; a function may write over it, and the caller, too.
            return self._xla.place(array.copy(), spec.dtype, where)
        except (RuntimeError, ValueError) as error:
            raise ResourceError(
                f"cannot put tensor {spec.name!r} ({spec.nbytes} bytes) on the {self._backend} device: {error}"
            ) from error

    def get(self, spec: TensorSpec, handle: Handle, into: np.ndarray | None = None) -> np.ndarray:
        try:
            # A shard's own array, dropped at once: one that was read keeps a view of the device's memory, and then no
            # function could write over it.
            raw = np.asarray(handle.addressable_shards[0].data)
        except Exception as error:  # XLA's own class: a failed computation raises when it is read
            raise ResourceError(f"cannot read tensor {spec.name!r} from the {self._backend} device: {error}") from error
        return copied(raw.view(host_dtype(spec.dtype)), into)

    def prepare(self, function: str) -> None:
        """Compile a function. Raises `CompileError` if XLA refuses it, `UserError` if it cannot be split."""
        spec = self.signature(function)
        text, _ = self._xla.as_main(
            self._portable,
            function,
            replaced=spec.replaced,
            split=[i for i, one in enumerate(spec.arguments) if one.name in self.program.split],
            devices=len(self._devices),
            platform=self._devices[0].platform,
        )
        self._compiled[function] = self._xla.compile_main(text, self._devices, optimise=self._optimise)

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        """Also raises as `prepare`."""
        if function not in self._compiled:
            self.prepare(function)
        try:
            results = self._xla.run(self._compiled[function], arguments)
        except Exception as error:
            raise ResourceError(f"{function} failed on the {self._backend} device: {error}") from error
        if len(self._devices) == 1:
            return [parts[0] for parts in results]
        specs = self.signature(function).results
        return [self._join(spec.shape, self._whole, parts) for spec, parts in zip(specs, results, strict=True)]

    def peak_memory(self) -> int:
        counted = [device.memory_stats() or {} for device in self._devices]
        return max(int(stats.get("peak_bytes_in_use", 0)) for stats in counted)

    def compiled_text(self, function: str) -> str:
        """Return the text of a prepared function as XLA compiled it."""
        return self._compiled[function].hlo_modules()[0].to_string()

    def close(self) -> None:
        self._compiled.clear()
