"""Tensors that stay on a device between two calls, and how many bytes go there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from planetary.core.errors import LocalProtocolError, ResourceError, UserError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.runtime.device_program import DeviceProgram, Handle, Program, ResidentTensors, WrappedProgram
from planetary.runtime.pjrt_device import open_devices

W, G, NORM = TensorSpec("w", "f32", (3,)), TensorSpec("g", "f32", (3,)), TensorSpec("norm", "f32", ())
UPDATE = FunctionSpec((W, G), (W, NORM))


class TransferCounter(WrappedProgram):
    """Counts the bytes that go to a device and come back."""

    def __init__(self, program: DeviceProgram) -> None:
        super().__init__(program)
        self.uploaded = self.downloaded = 0

    def put(self, spec: TensorSpec, array: np.ndarray) -> Handle:
        self.uploaded += spec.nbytes
        return super().put(spec, array)

    def get(self, spec: TensorSpec, handle: Handle, into: np.ndarray | None = None) -> np.ndarray:
        self.downloaded += spec.nbytes
        return super().get(spec, handle, into)


class Adds(DeviceProgram):
    """A device whose only function writes w + g over w."""

    broken = False

    def __init__(self) -> None:
        super().__init__(Program(b"", {"update": UPDATE}), "an abacus")

    def put(self, spec: TensorSpec, array: np.ndarray) -> Any:
        return [array.copy()]

    def get(self, spec: TensorSpec, handle: Any, into: np.ndarray | None = None) -> np.ndarray:
        return handle[0].copy()

    def invoke(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        (w,), (g,) = arguments
        arguments[0].clear()  # a handle that is written over is of no use any more
        if self.broken:
            raise ResourceError("the device is gone")
        return [[w + g], [np.float32(np.abs(g).sum())]]


def ones(value: float = 1) -> np.ndarray:
    return np.full(3, value, np.float32)


def test_a_result_replaces_the_argument_of_its_name() -> None:
    assert UPDATE.replaced == (0,)
    assert FunctionSpec((G, W), (W, G)).replaced == (1, 0)
    assert FunctionSpec((W,), (NORM, W)).replaced == ()


def test_device_arrays_are_sent_once_and_read_on_demand() -> None:
    traffic = TransferCounter(Adds())
    held = ResidentTensors(traffic)
    start, gradient = ones(), ones(2)
    held.put({"w": start, "slope": gradient})
    for _ in range(4):
        assert held.call("update", {"g": "slope"}) == ("w", "norm")
    assert (traffic.uploaded, traffic.downloaded) == (24, 0)
    np.testing.assert_array_equal(held.get(["w"])["w"], ones(9))
    assert held.get(["w"])["w"] is held.get(["w"])["w"]
    assert (traffic.uploaded, traffic.downloaded) == (24, 12)
    held.put(held.get(["w"]))  # nothing new
    held.call("update", arrays={"g": gradient})
    assert (traffic.uploaded, traffic.downloaded) == (36, 12)
    np.testing.assert_array_equal(held.get(["w"])["w"], ones(11))
    np.testing.assert_array_equal(start, ones())
    held.drop(["w", "unknown"])
    with pytest.raises(LocalProtocolError, match="no tensor 'w'"):
        held.get(["w"])
    with pytest.raises(LocalProtocolError, match="arguments of update are missing, the first is 'w'"):
        held.call("update", {"g": "slope"})


def test_a_failed_call_leaves_what_the_host_has() -> None:
    device = Adds()
    held = ResidentTensors(device)
    held.put({"w": ones(), "g": ones()})
    held.call("update")
    before = held.get(["w"])
    device.broken = True
    with pytest.raises(ResourceError, match="gone"):
        held.call("update")
    assert held.get(["w"])["w"] is before["w"]
    device.broken = False
    held.call("update")
    np.testing.assert_array_equal(held.get(["w"])["w"], ones(3))


def test_tensors_of_other_shapes_are_refused() -> None:
    held = ResidentTensors(Adds())
    with pytest.raises(LocalProtocolError, match=r"tensor 'g' must be f32\[3\]"):
        held.call("update", arrays={"w": ones(), "g": np.zeros(2, np.float32)})
    held.put({"w": ones(), "g": ones()})
    held.call("update")
    with pytest.raises(LocalProtocolError, match=r"argument 'g' must be f32\[3\]; tensor 'norm' .* is f32\[\]"):
        held.call("update", {"g": "norm"})
    assert set(Adds()("update", {"w": ones(), "g": ones(), "more": ones()})) == {"w", "norm"}


def test_pjrt_gives_the_asked_devices_and_threads_or_refuses() -> None:
    (device,) = open_devices("pjrt:cpu")  # from now on JAX is in use
    assert device.platform == "cpu"
    with pytest.raises(UserError, match="cannot change to 97"):
        open_devices("pjrt:cpu", threads=97)
    with pytest.raises(ResourceError, match=r"cannot open the pjrt:cuda devices|wants 1 pjrt:cuda devices"):
        open_devices("pjrt:cuda", device_id=63)


def test_placed_tensors_stay_and_have_no_host_array() -> None:
    counter = TransferCounter(Adds())
    resident = ResidentTensors(counter)
    w, g = np.zeros(3, np.float32), np.full(3, 2, np.float32)
    resident.put({"w": g})
    resident.place([W, G], {"w": w, "g": g})
    assert counter.uploaded == 24
    resident.call("update")
    assert (counter.uploaded, counter.downloaded) == (24, 0)
    assert resident.get(["w"])["w"].tolist() == [2, 2, 2]
    with pytest.raises(LocalProtocolError, match="'g'"):
        resident.place([G], {"g": np.zeros(4, np.float32)})
