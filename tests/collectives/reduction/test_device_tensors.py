"""Tensors on a device, with a stand-in whose memory the host cannot read: PyTorch's copies are the only way."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from real_ring import ring, together

from planetary.collectives import ReduceOp, SharedState
from planetary.collectives.reduction.elements import Flat, element_type
from planetary.compat import pccl
from planetary.core.errors import UserError

torch = pytest.importorskip("torch")


class OnDevice(torch.Tensor):  # type: ignore[misc, name-defined]
    """A tensor of device "meta", with numbers that only `copy_` reaches."""

    copies: list[str]

    @staticmethod
    def __new__(cls: Any, numbers: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, device="meta")
        made.numbers, made.copies = numbers.clone(), []
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "detach":
            alias = OnDevice(args[0].numbers)
            alias.numbers, alias.copies = args[0].numbers, args[0].copies
            return alias
        if name == "copy_":
            target, source = args[:2]
            (target if isinstance(target, OnDevice) else source).copies.append(
                "written" if isinstance(target, OnDevice) else "read"
            )
            to, of = (one.numbers if isinstance(one, OnDevice) else one for one in (target, source))
            to.copy_(of)
            return target
        raise AssertionError(f"{name} of a tensor on a device")


def on_device(numbers: np.ndarray) -> Any:
    return OnDevice(torch.from_numpy(numbers))


def test_the_host_cannot_read_the_stand_in() -> None:
    tensor = on_device(np.arange(3, dtype=np.float32))
    with pytest.raises((RuntimeError, TypeError, AssertionError)):
        tensor.numpy()
    with pytest.raises((RuntimeError, TypeError, AssertionError)):
        tensor + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "float16"])
def test_a_flat_copy_goes_to_the_device_again(dtype: str) -> None:
    tensor = OnDevice(torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)))
    flat = Flat(tensor, writable=True)
    assert flat.copied
    assert flat.shape == (2, 3)
    assert tensor.copies == ["read"]
    plain = Flat(tensor.numbers, writable=True)
    assert flat.dtype == plain.dtype == element_type(tensor)
    np.testing.assert_array_equal(flat.flat, plain.flat)
    flat.flat[...] = flat.flat[::-1].copy()
    assert tensor.numbers[0, 0] == 0
    flat.write_back()
    assert tensor.numbers[0, 0] == 5
    assert tensor.copies == ["read", "written"]


def test_the_element_type_needs_no_copy() -> None:
    tensor = on_device(np.zeros(4, np.float32))
    assert element_type(tensor) == "f32"
    assert not tensor.copies


def test_an_element_type_without_a_wire_format_is_named() -> None:
    with pytest.raises(UserError, match="complex64"):
        Flat(OnDevice(torch.zeros(2, dtype=torch.complex64)), writable=True)


def test_a_tensor_without_numbers_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be copied from its device"):
        Flat(torch.empty(3, device="meta"), writable=True)


def test_tensors_of_other_libraries_come_through_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = on_device(np.ones(4, np.float32))

    class Foreign:
        """As CuPy's: no `__array__`, which would read the device behind the user's back."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    monkeypatch.setattr(sys.modules["torch"], "from_dlpack", lambda _: tensor)
    flat = Flat(Foreign(), writable=True)
    flat.flat[...] = 3
    flat.write_back()
    assert tensor.numbers.tolist() == [3, 3, 3, 3]


def test_peers_on_devices_and_on_cpus_reduce_to_the_same_bits() -> None:
    values = [np.random.default_rng(i).standard_normal(30_000).astype(np.float32) for i in range(2)]

    def reduced(device: tuple[bool, bool]) -> list[bytes]:
        with ring(2, connections=2, piece_bytes=1 << 14) as (_, peers):

            def work(i: int) -> bytes:
                tensor = on_device(values[i]) if device[i] else torch.from_numpy(values[i].copy())
                assert peers[i].all_reduce(tensor, op=ReduceOp.AVG) is tensor
                return (tensor.numbers if device[i] else tensor).numpy().tobytes()

            return together(work, 2)

    expected = reduced((False, False))
    assert reduced((True, True)) == reduced((True, False)) == expected


def test_a_state_on_a_device_has_the_digest_of_one_on_the_cpu() -> None:
    numbers = np.arange(1000, dtype=np.float32)
    tensor = on_device(numbers)
    there, here = SharedState({"w": tensor}), SharedState({"w": numbers})
    assert there.entries("blake2b") == here.entries("blake2b")
    tensor.numbers += 1
    there.refresh()
    assert there.entries("blake2b") != here.entries("blake2b")


def test_a_joining_peer_gets_the_state_onto_its_device() -> None:
    with ring(2, connections=1) as (_, peers):
        tensors = [on_device(np.full(100, 1.0 + i, np.float32)) for i in range(2)]
        states = [SharedState({"w": tensors[i]}, revision=1 - i) for i in range(2)]
        together(lambda i: peers[i].sync_shared_state(states[i]), 2)
        assert tensors[0].numbers.tolist() == tensors[1].numbers.tolist() == [1.0] * 100


def test_pccl_takes_tensors_of_a_device() -> None:
    info = pccl.TensorInfo("w", on_device(np.ones(3, np.float32)), device_type=pccl.DeviceType.CUDA)
    assert pccl.SharedState([info]).revision == 0
    with pytest.raises(ValueError, match="give the tensor itself"):
        pccl.TensorInfo("w", 4096, numel=3, dtype=pccl.DataType.FLOAT, device_type=pccl.DeviceType.CUDA)
