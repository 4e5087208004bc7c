"""The copy of texts' pages on a worker's device is used for the next tokens of the same texts alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from planetary.core.errors import ResourceError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.runs.serve.loaded_model import GatheredSequences, LoadedModel
from planetary.runs.serve.messages import SERVING, ComputeCall, ServingJob
from planetary.runs.serve.program.cache_kinds import PAGE, NoCache
from planetary.runs.serve.program.shape import ServingShape, context_sizes_of, decode_name, prefill_name

TEXTS = GatheredSequences("decode_b2_p4", ((1, 2), (3,)), (20, 9))
NEXT = ComputeCall(
    call=1, function="decode_b2_p4", tokens=((5,), (6,)), starts=(20, 9), page_tables=((1, 2), (3,)), full=False
)


@pytest.mark.parametrize(
    ("changes", "serves"),
    [
        ({}, True),
        ({"tokens": ((7,), (8,))}, True),
        ({"page_tables": ((1, 2), (3, 9))}, True),  # a text got a further page
        ({"page_tables": ((1, 4), (3,))}, False),
        ({"page_tables": ((1,), (3,))}, False),
        ({"starts": (21, 9)}, False),
        ({"function": "decode_b2_p8"}, False),
        ({"tokens": ((5,),), "starts": (20,), "page_tables": ((1, 2),)}, False),
        ({"tokens": ((6,), (5,)), "starts": (9, 20), "page_tables": ((3,), (1, 2))}, False),
    ],
)
def test_the_copy_serves_the_next_call_of_its_texts(changes: dict[str, object], serves: bool) -> None:
    assert TEXTS.serves(msgspec.structs.replace(NEXT, **changes)) == serves


@pytest.mark.parametrize(
    ("start", "pages", "changed"),
    [(0, (4, 5), False), (0, (3,), True), (16, (1, 5), False), (0, (1, 5), True), (32, (1, 2, 7), False)],
)
def test_a_chunk_changes_the_copy_if_it_writes_to_a_page_of_it(
    start: int, pages: tuple[int, ...], changed: bool
) -> None:
    chunk = ComputeCall(
        call=1, function="prefill_s16_p4", tokens=((1,) * 16,), starts=(start,), page_tables=(pages,), full=False
    )
    assert TEXTS.is_changed_by(chunk) == changed


SMALL = ServingShape(
    vocabulary=9,
    window=8 * PAGE,
    pages=65,
    page_shape=(4, 2, PAGE, 8),
    batches=(1, 8),
    chunks=(PAGE,),
    context_sizes=(8,),
)


class Held:
    """A tensor on the device, which counts the bytes that live."""

    def __init__(self, device: Device, spec: TensorSpec) -> None:
        device.count(spec.nbytes)
        weakref.finalize(self, device.count, -spec.nbytes)


class Device:
    """Computes nothing, and fails in `fails` of its next calls."""

    device_name = "none"

    def __init__(self, shape: ServingShape) -> None:
        self._functions = shape.functions(())
        self.live = self.peak = self.fails = 0

    def count(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def signature(self, function: str) -> FunctionSpec:
        return self._functions[function]

    def put(self, spec: TensorSpec, values: np.ndarray) -> Held:
        return Held(self, spec)

    def get(self, spec: TensorSpec, handle: Held) -> np.ndarray:
        return spec.zeros()

    def invoke(self, function: str, arguments: Sequence[Held]) -> list[Held]:
        if self.fails:
            self.fails -= 1
            raise ResourceError("the device has no memory left")
        spec = self._functions[function]
        kept = spec.replaced
        return [
            arguments[kept[place]] if place < len(kept) else Held(self, result)
            for place, result in enumerate(spec.results)
        ]


def decoding(first_page: int) -> ComputeCall:
    pages = tuple((first_page + text,) for text in range(8))
    return ComputeCall(
        call=0, function=decode_name(8, 8), tokens=((1,),) * 8, starts=(5,) * 8, page_tables=pages, full=False
    )


def test_copy_of_other_texts_replaces_the_previous() -> None:
    device = Device(SMALL)
    model = LoadedModel(device, SMALL, {})  # type: ignore[arg-type]
    model.compute(decoding(1))
    peak = device.peak
    model.compute(decoding(9))
    assert peak > 1.5 * SMALL.cache.nbytes
    assert device.peak < peak + 0.1 * SMALL.cache.nbytes


@pytest.mark.parametrize("fails", [1, 2])
def test_a_device_that_fails_once_computes_again(fails: int) -> None:
    """The failed call has taken the cache, which it overwrites."""
    device = Device(SMALL)
    model = LoadedModel(device, SMALL, {})  # type: ignore[arg-type]
    model.compute(decoding(1))
    chunk = ComputeCall(
        call=0, function=prefill_name(PAGE, 8), tokens=((1, 2),), starts=(0,), page_tables=((1,),), full=False
    )
    device.fails = fails
    for call in (chunk, decoding(9))[:fails]:
        with pytest.raises(ResourceError, match="no memory left"):
            model.compute(call)
    model.compute(chunk)
    model.compute(decoding(1))


def test_job_of_a_deep_narrow_model_fits_into_a_message() -> None:
    """SmolLM2-135M in int8: 30 layers of seven matrices with scales, every function of a window of 1,024."""
    shape = ServingShape(
        vocabulary=49_152,
        window=1024,
        pages=364,
        page_shape=(60, 3, PAGE, 64),
        context_sizes=context_sizes_of(1024),
        hidden=576,
    )
    params = tuple(
        TensorSpec(f"blocks.{layer}.attention.projection_{number}.{part}", kind, (576, 576))
        for layer in range(30)
        for number in range(9)
        for part, kind in (("values", "i8"), ("scales", "f32"))
    )
    for memory in (shape.cache_kind, NoCache()):
        other = msgspec.structs.replace(shape, cache_kind=memory)
        assert other.params_of(other.functions(params)) == params
    job = ServingJob(
        run="r",
        artifact="a" * 64,
        reference="b" * 64,
        plan=ServingJob.plan_of(shape),
        weights="c" * 64,
        params=params,
        trial="d" * 64,
    )
    assert job.functions == shape.functions(params)
    assert len(SERVING.encode(job, SERVING.limits)) < 200_000
