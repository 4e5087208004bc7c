"""What travels of a reference execution finds a wrong element, and is small."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest

from planetary.core.errors import TrustError
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec, to_host_dtype
from planetary.core.trials import step as step_trial
from planetary.core.trials.deviations import worst_of
from planetary.core.trials.step import (
    ParameterValues,
    StepReference,
    Trial,
    decode_reference,
    draw_trial,
    encode_reference,
    make_reference,
    values_of,
)

WIDE = (200, 300)
SPEC = StepSpec(
    "made up",
    (TensorSpec("w", "f32", WIDE), TensorSpec("scale", "f32", (8,)), TensorSpec("half", "bf16", WIDE)),
    (),
    (TensorSpec("adam.mean.w", "f32", WIDE), TensorSpec("adam.count", "i32", ())),
    (TensorSpec("tokens", "i64", (4, 8)), TensorSpec("targets", "ui16", (4, 8)), TensorSpec("x", "f32", (4,))),
    "5" * 64,
)
Arrays = dict[str, np.ndarray]


def _params() -> Arrays:
    rng = np.random.default_rng(0)
    ones = np.ones(8, np.float32)
    return {
        "w": rng.standard_normal(WIDE, np.float32) * np.float32(0.1),
        "scale": ones,
        "half": to_host_dtype(rng.uniform(2.0, 3.0, WIDE).astype(np.float32), "bf16"),
    }


def _drawn() -> Trial:
    return draw_trial(SPEC, values_of(SPEC, _params()), {})


def _results(trial: Trial, noise: float = 0.0) -> Arrays:
    """An update of the parameters, with so much relative noise in it, as another compiler leaves."""
    rng = np.random.default_rng(1 if noise else 2)
    updates = np.random.default_rng(3)

    def moved(array: np.ndarray) -> np.ndarray:
        update = np.float32(0.01) * updates.standard_normal(array.shape, np.float32)
        return array + update * (1 + np.float32(noise) * rng.standard_normal(array.shape, np.float32))

    half = (trial.params["half"].astype(np.uint32) << 16).view(np.float32)
    return {
        "w": moved(trial.params["w"]),
        "scale": moved(trial.params["scale"]),
        "half": to_host_dtype(moved(half), "bf16"),
        "adam.mean.w": moved(trial.opt_state["adam.mean.w"]),
        "adam.count": trial.opt_state["adam.count"] + 1,
        "loss": np.asarray(4.0, np.float32),
        "eval_loss": np.asarray(4.0, np.float32),
        "grad_norm": np.asarray(1.0, np.float32),
    }


def _reference(trial: Trial) -> StepReference:
    values = values_of(SPEC, _params())
    return make_reference(SPEC, values, trial.before, _results(trial), factor_rounding=2.0**-23, against="XLA")


@pytest.fixture(params=["changes", "sums"])
def reference(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StepReference:
    """With every element, and with sums over blocks of 256."""
    if request.param == "sums":
        monkeypatch.setattr(step_trial, "REFERENCE_BYTES", 4 * (2 * 235 + 235))
    return _reference(_drawn())


def _errors(reference: StepReference, found: Arrays) -> dict[str, float]:
    """As a worker finds them, from the bytes alone."""
    sent = decode_reference(encode_reference(reference), SPEC)
    return sent.errors(SPEC, draw_trial(SPEC, sent.values, {}).before, found)


def test_inputs_are_the_same_bits_on_every_machine() -> None:
    values = {"scale": ParameterValues(exact=np.ones(8, "<f4").tobytes())}
    values |= dict.fromkeys(("w", "half"), ParameterValues(quantiles=(-1.0, -0.25, 0.5, 1.5)))
    trial = draw_trial(SPEC, values, {})
    data = b"".join(array.tobytes() for array in (*trial.params.values(), *trial.opt_state.values(), *trial.batch))
    assert hashlib.sha256(data).hexdigest()[:16] == "fc5f69b90009cf2c"
    assert [array.dtype for array in trial.batch] == [np.int64, np.uint16, np.float32]
    assert 0 <= trial.batch[0].min() <= trial.batch[0].max() < 100


def test_integers_reach_the_last_row() -> None:
    spec = msgspec.structs.replace(SPEC, table_rows=(50_000, 7, 0))
    values = values_of(spec, _params())
    tokens, targets, _ = draw_trial(spec, values, {}).batch
    assert 40_000 < tokens.max() < 50_000
    assert targets.max() == 6


@pytest.mark.parametrize("rows", [(1,), (1, 1, 1, 1), (5, -1, 0)])
def test_rows_of_another_batch_are_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(msgspec.ValidationError, match="table_rows"):
        msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(SPEC) | {"table_rows": rows}), type=StepSpec)


def test_parameters_keep_the_range_of_their_initial_values() -> None:
    params = _drawn().params
    half = (params["half"].astype(np.uint32) << 16).view(np.float32)
    assert 1.9 < half.min() < half.max() < 3.1
    np.testing.assert_allclose(params["scale"], 1, atol=0.08)
    assert 0.09 < params["w"].std() < 0.12


def test_rounding_is_accepted(reference: StepReference) -> None:
    assert worst_of(_errors(reference, _results(_drawn())))[1] == 0
    assert 0 < worst_of(_errors(reference, _results(_drawn(), noise=1e-5)))[1] < 0.3


@pytest.mark.parametrize("name", ["w", "scale", "adam.mean.w"])
def test_one_wrong_element_is_refused_by_name(reference: StepReference, name: str) -> None:
    found = _results(_drawn())
    found[name].reshape(-1)[5] += 0.01
    assert worst_of(_errors(reference, found))[0] == name
    assert worst_of(_errors(reference, found))[1] > 1
    found[name].reshape(-1)[5] = np.nan
    assert worst_of(_errors(reference, found)) == (name, np.inf)


def test_swapped_updates_are_refused(reference: StepReference) -> None:
    """A plain sum over a block would not notice."""
    trial = _drawn()
    found = _results(trial)
    change = (found["w"] - trial.params["w"]).reshape(-1)
    for start in range(0, 2048, 256):
        first = start + int(np.argmax(change[start : start + 256]))
        other = start + int(np.argmin(change[start : start + 256]))
        wrong, gap = found["w"].reshape(-1), change[first] - change[other]
        wrong[first], wrong[other] = wrong[first] - gap, wrong[other] + gap
    assert _errors(reference, found)["w"] > 1


def test_large_results_travel_as_sums(reference: StepReference) -> None:
    block = reference.tensors["w"].block
    assert reference.tensors["scale"].block == 1
    assert len(reference.tensors["w"].changes) == 4 * -(-60000 // block)
    if block > 1:
        assert len(encode_reference(reference)) < 16_000


def test_what_is_no_reference_of_the_step_is_refused(reference: StepReference) -> None:
    data = encode_reference(reference)
    with pytest.raises(TrustError, match="cannot be read"):
        decode_reference(data[:-7], SPEC)
    other = StepSpec("other", SPEC.params, (), SPEC.opt_state, SPEC.batch, "6" * 64)
    with pytest.raises(TrustError, match="the job is about 666666666666"):
        decode_reference(data, other)
    wider = (TensorSpec("w", "f32", (200, 400)), *SPEC.params[1:])
    with pytest.raises(TrustError, match="lack tensor 'w'"):
        decode_reference(data, StepSpec("wider", wider, (), SPEC.opt_state, SPEC.batch, "5" * 64))
