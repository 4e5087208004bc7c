"""A model is compared with its whole forward pass, with its own parameters, before it is served."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType

import jax
import msgspec
import numpy as np
import pytest
from test_serving_program import WINDOW, Device

from planetary.core.errors import CompileError, TrustError
from planetary.data.tokenizer import ByteTokenizer
from planetary.models import mamba2, nanochat
from planetary.runs.serve.loaded_model import LoadedModel
from planetary.runs.serve.messages import ComputeCall
from planetary.runs.serve.model_check import check_model
from planetary.runs.serve.program.shape import CACHE, HIDDEN, ROW, SCORE_IDS, VALUES
from planetary.runs.serve.program.traced_model import TracedModel
from planetary.runs.serve.program.trial import decode_trial, encode_trial


@functools.cache
def loaded(module: ModuleType, element: str = "f32") -> tuple[Device, TracedModel, LoadedModel]:
    device = Device(module, {}, element)
    model = TracedModel(
        name="small",
        decode=device.decode,
        params=device.params,
        specs=(),
        sizes=device.sizes,
        vocabulary=device.shape.vocabulary,
        window=WINDOW,
        tokenizer=ByteTokenizer(),
    )
    weights = {name: np.asarray(leaf) for name, leaf in device.names.items()}
    return device, model, LoadedModel(device.runner, device.shape, weights)


@pytest.mark.slow
@pytest.mark.parametrize("module", [nanochat, mamba2])
def test_every_function_is_compared_and_every_defect_found(module: ModuleType) -> None:
    device, model, served = loaded(module)
    trial = decode_trial(encode_trial(model.trial(device.shape)), device.shape)
    called: list[str] = []

    def run(message: ComputeCall) -> Mapping[str, np.ndarray]:
        called.append(message.function)
        return served.compute(message)

    report = check_model(run, device.shape, trial, "this CPU")
    assert set(called) == {size.name for size in device.shape.calls}
    assert report.worst_error < 0.01

    def shifted(message: ComputeCall) -> Mapping[str, np.ndarray]:
        found = dict(served.compute(message))
        if HIDDEN in found:
            found[HIDDEN] = np.roll(found[HIDDEN], 1, axis=1)
        return found

    with pytest.raises(CompileError, match=r"score_.* sums the hidden states of tokens 0 to"):
        check_model(shifted, device.shape, trial, "this CPU")
    named = [size.name for size in device.shape.calls]
    kinds = {name.partition("_")[0]: name for name in named}
    for defect in sorted(named) if module is mamba2 else sorted(kinds.values()):  # the slow case takes all sizes

        def wrong(message: ComputeCall, defect: str = defect) -> Mapping[str, np.ndarray]:
            found = dict(served.compute(message))
            if message.function == defect:  # a likely token that is one place off
                found[VALUES], found[ROW] = found[VALUES].copy(), np.roll(found[ROW], 1, axis=1)
            return found

        with pytest.raises(CompileError, match=f"{defect} is .* nats away"):
            check_model(wrong, device.shape, trial, "this CPU")


@pytest.mark.slow
def test_decoding_that_writes_or_reads_wrong_pages_is_found() -> None:
    device, model, served = loaded(nanochat)
    trial = model.trial(device.shape)

    def lost(message: ComputeCall) -> Mapping[str, np.ndarray]:
        before = served.resident.get([CACHE])[CACHE].copy()
        found = served.compute(message)
        if message.function.startswith("decode"):
            served.resident.put({CACHE: before})  # the copy of the pages has the token
        return found

    def swapped(message: ComputeCall) -> Mapping[str, np.ndarray]:
        if message.function.startswith("decode_b2"):
            message = msgspec.structs.replace(message, page_tables=message.page_tables[::-1])
        return served.compute(message)

    def scored(message: ComputeCall) -> Mapping[str, np.ndarray]:
        found = dict(served.compute(message))
        if SCORE_IDS in found:
            found[SCORE_IDS] = found[SCORE_IDS][..., ::-1] + 1
        return found

    for wrong in (lost, swapped, scored):
        with pytest.raises(CompileError, match="the served model is wrong on this CPU"):
            check_model(wrong, device.shape, trial, "this CPU")


@pytest.mark.slow
def test_other_parameters_are_noticed() -> None:
    device, model, served = loaded(nanochat)
    changed = jax.tree.map(lambda leaf: leaf * 1.05, model.params)
    other = TracedModel(**{**vars(model), "params": changed}).trial(device.shape)
    with pytest.raises(CompileError, match="the served model is wrong on this CPU"):
        check_model(served.compute, device.shape, other, "this CPU")


@pytest.mark.slow
def test_a_rounded_cache_is_accepted_within_its_rounding() -> None:
    device, model, served = loaded(nanochat, "bf16")
    trial = model.trial(device.shape)
    assert 5e-3 <= trial.accepted < 0.5
    assert check_model(served.compute, device.shape, trial, "this CPU").worst_error > 0.01


def test_model_without_values_has_the_same_functions() -> None:
    device, model, _ = loaded(nanochat)
    first = device.shape.first_calls
    whole = model.program(device.shape, first)
    assert model.without_values().program(device.shape, first).digest == whole.digest
    assert set(whole.functions) == {"decode_b1_p4", "gather_b1_p4", "score_s32_p4"}


def test_a_trial_of_another_shape_is_refused() -> None:
    device, model, _ = loaded(nanochat)
    data = encode_trial(model.trial(device.shape))
    with pytest.raises(TrustError, match="cannot be read"):
        decode_trial(data[:-1], device.shape)
    with pytest.raises(TrustError, match="another shape"):
        decode_trial(data, msgspec.structs.replace(device.shape, vocabulary=40))
