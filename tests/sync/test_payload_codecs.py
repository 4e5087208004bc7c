"""Codecs of updates: equal values give equal bytes, errors have bounds, and what is dropped is sent later."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from planetary.collectives.reduction import quantise
from planetary.core.errors import NumericsError, ProtocolError, UserError
from planetary.core.extension_points import CODECS
from planetary.core.tensors import TensorSpec
from planetary.sync.codecs import tensor_codec
from planetary.sync.codecs.dense import Exponents
from planetary.sync.codecs.sparse import TopK, _chunks, _largest
from planetary.sync.payload import LEAST_COMPILED, PayloadForm, compile_loops, payload_digest

SPECS = (
    TensorSpec("m", "f32", (130, 200)),
    TensorSpec("v", "f32", (100,)),
    TensorSpec("t", "bf16", (3, 5, 70)),
    TensorSpec("s", "f32", ()),
    TensorSpec("none", "f32", (0,)),
)
ODD = (
    TensorSpec("tiles", "f32", (192, 256)),
    TensorSpec("long", "f32", (3 * 4096 + 777,)),
    TensorSpec("odd", "f32", (129, 1)),
    TensorSpec("one", "f32", (1,)),
)
NAMES = tuple(CODECS.built_in)


def draw(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {s.name: np.asarray(random.standard_normal(s.shape) * 0.01, np.float32) for s in SPECS}


def decoded(form: PayloadForm, payload: np.ndarray) -> dict[str, np.ndarray]:
    return form.decode(payload, payload_digest(payload))


@pytest.mark.parametrize("name", NAMES)
def test_payload_has_its_shapes_size_and_repeatable_bytes(name: str) -> None:
    form, values = PayloadForm(name, SPECS), draw(0)
    payload = form.encode(values)
    assert payload.shape == form.spec.shape
    assert payload.tobytes() == form.encode({k: v.copy() for k, v in reversed(values.items())}).tobytes()
    for spec in SPECS:
        assert decoded(form, payload)[spec.name].shape == spec.shape


def test_float32_keeps_every_bit() -> None:
    form, values = PayloadForm("float32", SPECS), draw(1)
    payload, residual = form.compress(values, None)
    assert residual is None
    assert all(decoded(form, payload)[name].tobytes() == values[name].tobytes() for name in values)


@pytest.mark.parametrize(
    ("name", "most"), [("bf16", 2**-8), ("int8", 0.02), ("int4", 0.35), ("fp4", 0.35), ("sign", 0.61)]
)
def test_dense_codecs_err_within_their_steps(name: str, most: float) -> None:
    form, values = PayloadForm(name, SPECS), draw(2)
    found = decoded(form, form.encode(values))["m"]
    assert np.linalg.norm(found - values["m"]) < most * np.linalg.norm(values["m"])


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    form = PayloadForm(name, SPECS)
    found = decoded(form, form.encode({spec.name: np.zeros(spec.shape, np.float32) for spec in SPECS}))
    assert all((array == 0).all() for array in found.values())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("float32", "sparse")])
def test_sent_and_kept_together_are_all_updates(name: str) -> None:
    """With β = 1 nothing is lost: the sum of what was sent and the last residual is the sum of the updates."""
    form, residual = PayloadForm(name, SPECS), None
    sent = dict.fromkeys(("m", "v", "t"), 0.0)
    for seed in range(8):
        payload, residual = form.compress(draw(seed), residual)
        sent = {key: total + decoded(form, payload)[key].astype(np.float64) for key, total in sent.items()}
    assert residual is not None
    for key, total in sent.items():
        np.testing.assert_allclose(
            total + residual[key], sum(draw(seed)[key].astype(np.float64) for seed in range(8)), atol=1e-6
        )


def test_what_the_sparse_codec_drops_is_sent_later() -> None:
    """Of 4,096 equal updates 64 go at a time; the feedback gives every index its turn within 64 rounds."""
    spec = (TensorSpec("w", "f32", (64, 64)),)
    form, residual, ever = PayloadForm("sparse", spec), None, np.zeros((64, 64), bool)
    update = {"w": np.ones((64, 64), np.float32)}
    for _ in range(64):
        payload, residual = form.compress(update, residual)
        ever |= decoded(form, payload)["w"] != 0
    assert ever.all()


def test_sparse_updates_are_146_times_smaller_than_float32() -> None:
    spec = TensorSpec("w", "f32", (1024, 1024))
    assert 4 * spec.size / TopK().nbytes(spec) == pytest.approx(146.3, abs=0.2)
    assert 4 * spec.size / TopK(128).nbytes(spec) == pytest.approx(73.1, abs=0.2)


@given(rows=hnp.arrays(np.float32, (3, 32), elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5])))
def test_the_largest_are_those_of_a_stable_sort(rows: np.ndarray) -> None:
    """Ties go to the lowest index, zeros of both signs included."""
    expected = np.sort(np.argsort(-np.abs(rows), axis=1, kind="stable")[:, :5], axis=1)
    assert _largest(rows, 5).tolist() == expected.tolist()
    kernels = tensor_codec.LOOPS.load()
    assert kernels is not None
    spec, found = TensorSpec("w", "f32", (96,)), np.empty((3, 5), np.uint16)
    left, grid = np.empty(spec.size, np.float32), (0, 3, 1, 1, 32, 32)
    numbers = np.empty((3, 5), np.float32)
    given = *tensor_codec.CodecInput(rows).flat(), np.float32(1), left
    assert kernels.largest_compress(given, grid, (found, numbers))
    assert found.tolist() == expected.tolist()
    assert numbers.tobytes() == np.take_along_axis(rows, expected, axis=1).tobytes()


@pytest.mark.parametrize(
    "shape", [(64, 64), (130, 200), (3, 5, 70), (100,), (64,), (1,), (), (1, 1), (7, 300), (300, 7)]
)
def test_chunks_cover_every_number_once(shape: tuple[int, ...]) -> None:
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    back, seen = np.full(shape, -1, np.float32), []
    for chunks in _chunks(shape):
        rows = chunks.cut(values)
        assert rows.shape == (chunks.count, chunks.length)
        seen += rows.reshape(-1).tolist()
        chunks.paste(rows, back)
    assert back.tobytes() == values.tobytes()
    assert sorted(seen) == values.reshape(-1).tolist()


def test_exponents_round_to_the_nearest_power_of_two() -> None:
    values = np.array([8, 7, 6, 5.9, -4, 3, -2.9, 0.125, 0.0626, 0.0624, 0.0], np.float32)
    spec = TensorSpec("w", "f32", values.shape)
    codec, out = Exponents(), np.empty(Exponents().nbytes(spec), np.uint8)
    codec.encode(values, out)
    assert codec.decode(spec, out).tolist() == [8, 8, 8, 4, -4, 4, -2, 0.125, 0.125, 0, 0]


@given(
    ratio=st.sampled_from([2.0**power * step for power in range(-9, 0) for step in (1, 1.5)]), ulps=st.integers(-2, 2)
)
def test_exponents_change_half_way_between_two_levels(ratio: float, ulps: int) -> None:
    near = np.float32(ratio)
    for _ in range(abs(ulps)):
        near = np.nextafter(near, np.float32(np.sign(ulps)))
    levels = np.array([0, *(2.0**power for power in range(-6, 1))])
    expected = levels[int(np.searchsorted((levels[1:] + levels[:-1]) / 2, near, side="right"))]
    form = PayloadForm("fp4", (TensorSpec("w", "f32", (2,)),))
    values = {"w": np.array([3, 3 * near], np.float32)}
    if values["w"][1] / np.float32(3) == near:  # else the quotient is another number
        assert decoded(form, form.encode(values))["w"].tolist() == [3, 3 * expected]
    values = {"w": np.array([-1, near], np.float32)}
    assert decoded(form, form.encode(values))["w"].tolist() == [-1, expected]


def hard(seed: int) -> dict[str, np.ndarray]:
    """Zeros of both signs, denormals, ties, numbers half-way between two codes, and a few that are very large."""
    random = np.random.default_rng(seed)
    kinds = np.array([0.0, -0.0, 1e-42, -1e-45, 0.5, -0.5, 0.375, 1.00390625, 3e30, -9e37], np.float32)
    return {
        name: np.where(random.random(values.shape) < 0.3, random.choice(kinds, values.shape), values)
        for name, values in some(seed).items()
    }


def some(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {spec.name: random.standard_normal(spec.shape).astype(np.float32) for spec in (*SPECS, *ODD)}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "sign")) for n in NAMES])
def test_kernels_and_numpy_have_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads, residuals and decoded numbers, with and without a residual before and a base."""
    form = PayloadForm(name, (*SPECS, *ODD))
    befores, bases = (None, some(4), hard(4)), (None, some(5))
    cases = [(update, before, base) for update in (some(3), hard(3)) for before in befores for base in bases]
    assert tensor_codec.LOOPS.load() is not None
    assert quantise.LOOPS.load() is not None
    found = [form.compress(*case) for case in cases]
    numbers = [decoded(form, payload) for payload, _ in found]
    monkeypatch.setattr(tensor_codec, "compiled", lambda: None)
    monkeypatch.setattr(quantise, "compiled", lambda: None)
    for case, (payload, left), values in zip(cases, found, numbers, strict=True):
        expected, expected_left = form.compress(*case)
        assert payload.tobytes() == expected.tobytes()
        assert same_bits(values, decoded(form, payload))
        assert (left is None and expected_left is None) or same_bits(left or {}, expected_left or {})


@pytest.mark.parametrize("name", NAMES)
def test_no_loop_is_compiled_in_a_round(name: str) -> None:
    """Whatever the arrays are: read-only, of no contiguous memory, parts at odd places, with feedback and base."""
    compile_loops([name], [TensorSpec("large", "f32", (LEAST_COMPILED,))])
    loops = [
        loop
        for module in (tensor_codec.compiled(), quantise.compiled())
        for loop in vars(module).values()
        if hasattr(loop, "signatures")
    ]
    known = [list(loop.signatures) for loop in loops]
    assert any(known)
    form, update, base = PayloadForm(name, (*ODD, *SPECS)), some(3), some(4)
    update["m"] = np.asfortranarray(update["m"])
    update["v"].flags.writeable = False
    payload, residual = form.compress(update, None, base)
    form.compress(update, residual)
    payload.flags.writeable = False
    decoded(form, payload)
    assert [list(loop.signatures) for loop in loops] == known


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_waits_for_no_compilation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba is not even imported for it."""

    def refuse() -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(tensor_codec.LOOPS, "load", refuse)
    monkeypatch.setattr(quantise.LOOPS, "load", refuse)
    compile_loops([name], [TensorSpec("small", "f32", (LEAST_COMPILED - 1,))])
    with pytest.raises(AssertionError, match="loaded"):
        compile_loops([name], [TensorSpec("large", "f32", (LEAST_COMPILED,))])


def same_bits(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    return list(found) == list(expected) and all(found[name].tobytes() == expected[name].tobytes() for name in found)


@pytest.mark.parametrize("with_numba", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_infinite_numbers_are_refused_with_and_without_numba(
    name: str, with_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the update, in the feedback, in their sum, and in bfloat16's rounding."""
    if with_numba:
        tensor_codec.LOOPS.load()
        quantise.LOOPS.load()
    else:
        monkeypatch.setattr(tensor_codec, "compiled", lambda: None)
        monkeypatch.setattr(quantise, "compiled", lambda: None)
    spec = TensorSpec("w", "f32", (65, 67))
    form, fine = PayloadForm(name, [spec]), np.full(spec.shape, 1e-3, np.float32)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        broken = fine.copy()
        broken[64, 66] = bad
        with pytest.raises(NumericsError, match="update: tensor 'w' contains NaN"):
            form.compress({"w": broken}, None)
        if form.lossy:
            with pytest.raises(NumericsError, match="error feedback of tensor 'w' contains NaN"):
                form.compress({"w": fine}, {"w": broken})
    large = np.full(spec.shape, 3e38, np.float32)
    if form.lossy:
        with pytest.raises(NumericsError, match="too large"):
            form.compress({"w": large}, {"w": large})
    if name == "bf16":
        with pytest.raises(NumericsError, match="too large"):
            form.compress({"w": np.full(spec.shape, np.finfo(np.float32).max)}, None)


@pytest.mark.parametrize("largest", [1.0, 1e3, 1e38])
def test_signs_leave_at_most_the_same_part_of_any_update(largest: float) -> None:
    """36 % of the energy (1 − 2/π, Vargaftik et al. 2021), and no more where one number in a hundred has nearly all."""
    random, spec = np.random.default_rng(5), TensorSpec("w", "f32", (64, 1024))
    values = random.standard_normal(spec.shape).astype(np.float32)
    values *= np.where(random.random(spec.shape) < 0.01, np.float32(largest), np.float32(1))
    form = PayloadForm("sign", [spec])
    found = decoded(form, form.encode({"w": values}))["w"].astype(np.float64)
    left = np.sum(np.square(found - values)) / np.sum(np.square(values.astype(np.float64)))
    assert 0.3 < left < 1 - 2 / np.pi + 0.005
    assert 4 * spec.size / form.spec.size == pytest.approx(31.75, abs=0.02)


def test_error_feedback_of_signs_stays_small() -> None:
    """Rotated anew each time, it does not gather: fixed signs leave several times as much after 64 rounds."""
    spec = TensorSpec("w", "f32", (16, 1024))
    form, residual = PayloadForm("sign", [spec]), None
    updates = (np.random.default_rng(6).standard_normal((64, *spec.shape)) ** 3).astype(np.float32)
    for update in updates:
        _, residual = form.compress({"w": update}, residual)
    assert residual is not None
    assert np.linalg.norm(residual["w"]) < np.linalg.norm(updates[-1])


@pytest.mark.parametrize("name", NAMES)
def test_truncated_and_altered_payloads_are_refused(name: str) -> None:
    form = PayloadForm(name, SPECS)
    payload = form.encode(draw(4))
    digest = payload_digest(payload)
    with pytest.raises(ProtocolError, match=r"expected \d+ bytes"):
        form.decode(payload[:-1], digest)
    altered = payload.copy()
    altered[len(altered) // 2] ^= 1
    with pytest.raises(ProtocolError, match="it was altered"):
        form.decode(altered, digest)


def test_bytes_that_no_sender_makes_are_refused() -> None:
    """A digest proves nothing about a sender that lies: numbers and places are checked as well."""
    sparse = PayloadForm("sparse", (TensorSpec("w", "f32", (100,)),))
    payload = sparse.encode({"w": np.ones(100, np.float32)})
    payload[16:19] = 255
    with pytest.raises(ProtocolError, match="not ascending"):
        decoded(sparse, payload)
    payload[:16] = 255
    with pytest.raises(ProtocolError, match="NaN"):
        decoded(sparse, payload)


@pytest.mark.parametrize("with_numba", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_stand_for_nan_are_refused(name: str, with_numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_numba:
        monkeypatch.setattr(tensor_codec, "compiled", lambda: None)
        monkeypatch.setattr(quantise, "compiled", lambda: None)
    form = PayloadForm(name, (TensorSpec("w", "f32", (9,)),))
    payload = form.encode({"w": np.ones(9, np.float32)})
    begin = 4 if name == "sign" else 0  # behind its seed
    payload[begin : begin + 8] = 255
    with pytest.raises(ProtocolError, match=r"tensor 'w'.* NaN"):
        decoded(form, payload)


def test_a_nan_in_the_error_feedback_is_named() -> None:
    form = PayloadForm("int4", SPECS)
    residual = {spec.name: np.zeros(spec.shape, np.float32) for spec in SPECS}
    residual["v"][3] = np.nan
    with pytest.raises(NumericsError, match="error feedback of tensor 'v' contains NaN"):
        form.compress(draw(5), residual)
    with pytest.raises(NumericsError, match="update: tensor 'v' contains NaN"):
        form.compress({**draw(5), "v": residual["v"]}, None)


def test_an_unknown_codec_is_named_with_those_that_are_known() -> None:
    with pytest.raises(
        UserError, match=r"unknown codec 'zip'\. There are float32, bf16, int8, int4, fp4, sign, sparse;"
    ):
        PayloadForm("zip", SPECS)
