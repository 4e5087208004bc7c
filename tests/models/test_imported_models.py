"""Models written with other libraries: the examples export, and their gradients are those libraries' own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from stablehlo_interpreter import interpret

from planetary.artifacts.store import BlobStore
from planetary.compiler.autodiff.differentiate import differentiate
from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check.verify import verify_artifact
from planetary.compiler.frontend.export import Model, export_model, find_builder
from planetary.compiler.step.train_step import build_train_step
from planetary.core.errors import UserError
from planetary.runtime.host import host_features
from planetary.runtime.iree_executor import IreeExecutor

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "sequence_length": 8, "batch_size": 2}
MLP = {"width": 8, "context": 3, "vocab_size": 32, "sequence_length": 8, "batch_size": 2}


def missing(*libraries: str) -> Any:
    absent = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed")


MODELS = [
    pytest.param("flax_gpt", GPT, marks=missing("flax"), id="flax"),
    pytest.param("equinox_mlp", MLP, marks=missing("equinox"), id="equinox"),
    pytest.param("torch_gpt", GPT, marks=missing("torch", "torchax"), id="torch"),
]


def source(example: str, function: str = "build") -> str:
    return f"{EXAMPLES / example}.py:{function}"


def batch() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 32, (2, 8)).astype(np.int32) for _ in range(2)]


def exported_gradient(model: Model, data: list[np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    params = model.initial("param")
    text = differentiate(model.stablehlo, range(len(params)))
    loss = interpret(model.text, [*params.values(), *data])[0]
    return float(loss), dict(zip(params, interpret(text, [*params.values(), *data, np.float32(1)]), strict=True))


def assert_gradients_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    # One scale for all: some are zero but for rounding, such as that of a bias of the keys.
    scale = max(np.abs(value).max() for value in expected.values())
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6 * scale, err_msg=name)


@pytest.mark.parametrize(("example", "options"), MODELS[:2])
@pytest.mark.slow
def test_a_jax_librarys_model_keeps_its_loss_and_gradient(example: str, options: dict[str, int]) -> None:
    loss_fn, params, _ = find_builder(source(example))(**options)
    data = batch()
    lowered = jax.jit(jax.value_and_grad(loss_fn)).lower(params, *data).as_text()
    expected_loss, *expected = interpret(lowered, [*jax.tree.leaves(params), *data])
    model = export_model(source(example), options)
    loss, gradients = exported_gradient(model, data)
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    assert_gradients_equal(gradients, dict(zip(gradients, expected, strict=True)))
    assert not model.manifest.of_role("buffer")


@missing("torch", "torchax")
def test_a_pytorch_model_keeps_its_names_loss_and_gradient() -> None:
    import torch

    data = batch()
    make, next_token_loss = (find_builder(source("torch_gpt", name)) for name in ("make", "next_token_loss"))
    module = make(**{name: value for name, value in GPT.items() if name != "batch_size"}, seed=3)
    tokens, targets = (torch.from_numpy(array) for array in data)
    expected = next_token_loss(module(tokens), targets)
    expected.backward()
    model = export_model(source("torch_gpt"), {**GPT, "seed": 3})
    loss, gradients = exported_gradient(model, data)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_gradients_equal(gradients, {n: p.grad.numpy() for n, p in sorted(module.named_parameters())})
    assert "head.weight" not in gradients  # tied to the embedding: one parameter
    logits = find_builder(source("torch_gpt", "logits"))(model.initial("param"), data[0], **GPT)
    np.testing.assert_allclose(logits, module(tokens).detach().numpy(), rtol=1e-4, atol=1e-5)


@missing("torch", "torchax")
def test_a_module_may_return_its_own_loss() -> None:
    import torch

    from planetary.compiler.frontend.export import export_loss
    from planetary.models.torch_module import from_torch

    class Regression(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(3, 1)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return ((self.line(x) * self.scale - y) ** 2).mean()

    module = Regression()
    x, y = np.ones((4, 3), np.float32), np.zeros((4, 1), np.float32)
    model = export_loss(*from_torch(module, (x, y)))
    assert [spec.name for spec in model.manifest.of_role("param")] == ["line.bias", "line.weight"]
    found = interpret(model.text, [*model.initial("param").values(), x, y])[0]
    assert found == pytest.approx(module(torch.from_numpy(x), torch.from_numpy(y)).item(), rel=1e-5)
    with pytest.raises(UserError, match=r"expected a torch\.nn\.Module, found int"):
        from_torch(3, (x, y))


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from planetary.models.torch_module import torch_function

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match="pip install torch torchax"):
        torch_function(None)


@pytest.mark.compiles
@pytest.mark.parametrize(("example", "options"), MODELS)
def test_the_compiled_step_is_the_references(example: str, options: dict[str, int], tmp_path: Path) -> None:
    model = export_model(source(example), options)
    step = build_train_step(model)
    store = BlobStore(tmp_path)
    host = Target("cpu", "host", host_features())
    report = verify_artifact(
        step,
        compile_artifact(step, host, store),
        lambda artifact, spec: IreeExecutor(store.path(artifact.digest), spec),
        params=model.initial("param"),
        buffers=model.initial("buffer"),
        local=host,
    )
    assert report.worst_error < 1
