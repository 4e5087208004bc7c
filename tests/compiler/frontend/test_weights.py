from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from planetary.artifacts.safetensors_file import read_safetensors
from planetary.compiler.frontend.export import Model, export_model
from planetary.compiler.frontend.weights import with_weights
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec, to_host_dtype
from planetary.models.zoo import ZOO


@pytest.fixture(scope="module")
def model() -> Model:
    return export_model(ZOO["gpt2"].source, ZOO["gpt2"].options("tiny"))


def values(model: Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(v.shape).astype(np.float32) for name, v in model.initial("param").items()}


def load(model: Model, path: Path, tensors: dict[str, np.ndarray], *optional: str) -> Model:
    save_file(tensors, path / "weights.safetensors")
    specs, arrays = read_safetensors(path / "weights.safetensors")
    return with_weights(model, specs, arrays, where="weights.safetensors", optional=optional)


def test_weights_are_found_by_name_and_the_graph_stays(model: Model, tmp_path: Path) -> None:
    given = values(model)
    assert "h.0.attn.c_attn.weight" in given  # the names of the published checkpoints
    loaded = load(model, tmp_path, given)
    assert loaded.digest == model.digest
    for name, value in loaded.initial("param").items():
        np.testing.assert_array_equal(value, given[name])


def test_floats_are_converted(model: Model, tmp_path: Path) -> None:
    given = values(model)
    half = load(model, tmp_path, {name: value.astype(np.float16) for name, value in given.items()})
    bits = {name: to_host_dtype(value, "bf16") for name, value in given.items()}
    specs = [TensorSpec(name, "bf16", value.shape) for name, value in given.items()]
    brain = with_weights(model, specs, bits, where="x")
    for name, value in given.items():
        np.testing.assert_array_equal(half.initial("param")[name], value.astype(np.float16).astype(np.float32))
        np.testing.assert_allclose(brain.initial("param")[name], value, rtol=2**-8)


def test_everything_that_does_not_fit_is_in_one_error(model: Model, tmp_path: Path) -> None:
    given = values(model)
    del given["ln_f.bias"]
    given["wte.weight"] = np.zeros((33, 16), np.float32)
    given["wpe.weight"] = np.zeros((8, 16), np.int32)
    given |= {f"h.{i}.attn.bias": np.zeros(1, np.float32) for i in range(6)}
    with pytest.raises(UserError) as caught:
        load(model, tmp_path, given)
    text = str(caught.value)
    assert "missing: ln_f.bias" in text
    assert "unknown to the model: h.0.attn.bias, h.1.attn.bias, h.2.attn.bias, h.3.attn.bias and 2 more" in text
    assert "wte.weight is f32[33, 16], not f32[32, 16]" in text
    assert "wpe.weight is i32[8, 16], not f32[8, 16]" in text
    assert "model.weights_optional" in text


def test_names_that_may_differ_are_listed_by_pattern(model: Model, tmp_path: Path) -> None:
    given = values(model)
    before = model.initial("param")["ln_f.bias"]
    del given["ln_f.bias"]
    given["h.0.attn.bias"] = np.zeros(1, np.float32)
    loaded = load(model, tmp_path, given, "h.*.attn.bias", "ln_f.*")
    np.testing.assert_array_equal(loaded.initial("param")["ln_f.bias"], before)
    np.testing.assert_array_equal(loaded.initial("param")["ln_f.weight"], given["ln_f.weight"])
