from __future__ import annotations

import numpy as np
import pytest

from planetary.compiler.frontend.manifest import (
    Argument,
    Init,
    Manifest,
    bare_manifest,
    check_manifest,
    check_signature,
    initial_value,
    manifest_from_json,
)
from planetary.core.errors import CompileError, UserError
from planetary.core.tensors import to_host_dtype

SIGNATURE = [("f32", (4, 8)), ("f32", (8,)), ("i32", (2, 4)), ("i32", (2, 4))]


def test_a_manifest_survives_json() -> None:
    manifest = Manifest(
        model="m",
        arguments=(
            Argument("w", "f32", (2, 3), "param", Init("normal", 0.02)),
            Argument("rope", "f32", (4,), "buffer", Init("stored")),
            Argument("x", "i32", (2,), "input"),
            Argument("y", "i32", (2,), "target"),
        ),
        seed=3,
        source="a:b",
        options={"n": 1},
    )
    assert manifest_from_json(manifest.to_json()) == manifest
    assert [spec.name for spec in manifest.of_role("input", "target")] == ["x", "y"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "cannot read"),
        (b'{"model": "m"}', "arguments"),
        (b'{"model": "m", "arguments": [], "colour": 1}', "colour"),
        (b'{"model": "m", "arguments": [], "version": 9}', "version"),
        (b'{"model": "m", "arguments": []}', "no parameter"),
    ],
)
def test_a_wrong_manifest_says_what_is_wrong(data: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        manifest_from_json(data)


def test_a_bare_models_last_two_arguments_are_data() -> None:
    manifest = bare_manifest("m", SIGNATURE)
    assert [a.role for a in manifest.arguments] == ["param", "param", "input", "target"]
    assert [a.init.kind for a in manifest.arguments] == ["normal", "constant", "none", "none"]


def test_roles_are_overridden_by_name_or_pattern() -> None:
    manifest = bare_manifest("m", SIGNATURE, {"arg[12]": "buffer", "arg2": "input"})
    assert [a.role for a in manifest.arguments] == ["param", "buffer", "input", "target"]
    with pytest.raises(UserError, match="matches no argument"):
        bare_manifest("m", SIGNATURE, {"weights": "buffer"})
    with pytest.raises(UserError, match="unknown role"):
        bare_manifest("m", SIGNATURE, {"arg0": "frozen"})  # type: ignore[dict-item]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_bare_model_without_parameters_is_refused(count: int) -> None:
    with pytest.raises(UserError, match="no parameter"):
        bare_manifest("m", SIGNATURE[:count])


def test_integers_cannot_be_trained_and_names_are_unique() -> None:
    with pytest.raises(UserError, match=r"'arg0'.*cannot be trained"):
        bare_manifest("m", [("i32", (2,)), ("f32", (2,)), ("f32", (2,))])
    twice = Argument("w", "f32", (), "param")
    with pytest.raises(UserError, match="two arguments"):
        check_manifest(Manifest("m", (twice, twice)))


def test_the_signature_must_be_the_manifests() -> None:
    manifest = bare_manifest("m", SIGNATURE)
    check_signature(manifest, SIGNATURE)
    with pytest.raises(CompileError, match="lists 4 arguments, main takes 3"):
        check_signature(manifest, SIGNATURE[:3])
    with pytest.raises(CompileError, match=r"'arg1' is f32\[8\].*f32\[9\]"):
        check_signature(manifest, [SIGNATURE[0], ("f32", (9,)), *SIGNATURE[2:]])


def test_drawn_values_depend_on_seed_and_name_alone() -> None:
    argument = Argument("w", "f32", (64, 64), "param", Init("normal", 0.02))
    one = initial_value(argument, {}, 0)
    np.testing.assert_array_equal(one, initial_value(argument, {}, 0))
    assert (one != initial_value(argument, {}, 1)).any()
    assert (one != initial_value(Argument("v", "f32", (64, 64), "param", Init("normal", 0.02)), {}, 0)).any()
    assert one.std() == pytest.approx(0.02, rel=0.05)
    assert abs(one.mean()) < 1e-3
    ones = initial_value(Argument("g", "f32", (3,), "param", Init("constant", 1.0)), {}, 0)
    np.testing.assert_array_equal(ones, np.ones(3, np.float32))


def test_a_stored_value_must_be_there_and_fit() -> None:
    argument = Argument("table", "f32", (2,), "buffer", Init("stored"))
    with pytest.raises(UserError, match="no stored value"):
        initial_value(argument, {}, 0)
    with pytest.raises(UserError, match=r"must be f32\[2\]"):
        initial_value(argument, {"table": np.zeros(3, np.float32)}, 0)


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    values = np.array([1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.0e38], np.float32)
    import jax.numpy as jnp

    np.testing.assert_array_equal(to_host_dtype(values, "bf16"), values.astype(jnp.bfloat16).view(np.uint16))
