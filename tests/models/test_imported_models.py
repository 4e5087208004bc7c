"""Models written with other libraries: the examples export, and their gradients are those libraries' own."""

from __future__ import annotations

import runpy
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from stablehlo_interpreter import interpret

from checked_step import checked
from installed_example import install_example
from planetary.compiler.autodiff.differentiate import differentiate
from planetary.compiler.frontend.export import Model, export_model, find_builder
from planetary.compiler.frontend.framework import ModuleBuilder
from planetary.compiler.step.train_step import build_train_step
from planetary.core.config import config_from_tables
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.runs.rounds.preparation.options import builder_options
from saved_parameters import save_parameters

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "sequence_length": 8, "batch_size": 2}
MLP = {"width": 8, "context": 3, "vocab_size": 32, "sequence_length": 8, "batch_size": 2}


MODELS = [
    pytest.param("flax_gpt:build", GPT, id="flax"),
    pytest.param("equinox_mlp:build", MLP, id="equinox"),
    pytest.param("torch_gpt:TorchGpt", GPT, marks=pytest.mark.doors("torch", "torchax"), id="torch"),
]


def source(example: str) -> str:
    file, _, name = example.partition(":")
    return f"{EXAMPLES / file}.py:{name}"


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


@pytest.mark.doors("torch", "torchax")
def test_a_pytorch_model_keeps_its_names_loss_and_gradient() -> None:
    import torch
    from torch.nn.functional import cross_entropy

    data = batch()
    torch.manual_seed(3)
    made = runpy.run_path(str(EXAMPLES / "torch_gpt.py"))["TorchGpt"]
    module = made(**{name: value for name, value in GPT.items() if name != "batch_size"})
    tokens, targets = (torch.from_numpy(array) for array in data)
    expected = cross_entropy(module(tokens).flatten(0, 1), targets.flatten().long())
    expected.backward()
    model = export_model(source("torch_gpt:TorchGpt"), {**GPT, "seed": 3})
    loss, gradients = exported_gradient(model, data)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_gradients_equal(gradients, {n: p.grad.numpy() for n, p in sorted(module.named_parameters())})
    assert "head.weight" not in gradients  # tied to the embedding: one parameter
    builder = find_builder(source("torch_gpt:TorchGpt"))
    assert isinstance(builder, ModuleBuilder)
    logits = builder.logits(model.initial("param"), data[0], **GPT)
    np.testing.assert_allclose(logits, module(tokens).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_framework_of_a_package_has_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's example: a file names a module of Equinox itself; loss, gradient and scores are Equinox's own."""
    equinox: Any = pytest.importorskip("equinox")
    install_example("my_framework.py", "planetary.frameworks: equinox = my_framework:Equinox", tmp_path, monkeypatch)
    (tmp_path / "net.py").write_text(
        "import equinox, jax\n"
        "class Net(equinox.Module):\n"
        "    embed: equinox.nn.Embedding\n"
        "    head: equinox.nn.Linear\n"
        "    def __call__(self, tokens):\n"
        "        return jax.vmap(lambda token: self.head(self.embed(token)))(tokens)\n"
        "one, two = jax.random.split(jax.random.key(0))\n"
        "net = Net(equinox.nn.Embedding(32, 8, key=one), equinox.nn.Linear(8, 32, key=two))\n"
    )
    data, shape = batch(), {"batch_size": 2, "sequence_length": 8}
    model = export_model(f"{tmp_path}/net.py:net", shape)
    loss, gradients = exported_gradient(model, data)
    net = runpy.run_path(str(tmp_path / "net.py"))["net"]

    def own(net: Any) -> Any:
        scores = jax.nn.log_softmax(jax.vmap(net)(data[0]))
        return -np.float32(1 / 16) * sum(scores[i, j, data[1][i, j]] for i in range(2) for j in range(8))

    expected, own_gradients = equinox.filter_value_and_grad(own)(net)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(equinox.filter(own_gradients, equinox.is_inexact_array))]
    for (name, found), leaf in zip(gradients.items(), leaves, strict=True):
        np.testing.assert_allclose(found, leaf, rtol=1e-4, atol=1e-6, err_msg=name)
    builder = find_builder(f"{tmp_path}/net.py:net")
    assert isinstance(builder, ModuleBuilder)
    _, params, _ = builder(**shape)
    np.testing.assert_allclose(builder.logits(params, data[0]), jax.vmap(net)(data[0]), rtol=1e-5)


@pytest.mark.doors("torch", "torchax")
def test_a_module_may_return_its_own_loss() -> None:
    import torch

    from planetary.compiler.frontend.export import export_loss
    from planetary.torch import from_torch

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


NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=16, vocab_size=256):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.head(torch.relu(self.embedding(tokens)))


class Sum(Net):
    def forward(self, tokens):
        return super().forward(tokens).sum()


def make():
    return Net()


net = Net(width=8)
"""
LOSS = """

def loss(output, target):
    return 2 * nn.functional.cross_entropy(output.flatten(0, 1), target.flatten().long())
"""


@pytest.mark.doors("torch", "torchax")
def test_plain_module_gets_the_next_token_loss_or_its_own(tmp_path: Path) -> None:
    """A plain module is a model with the next token loss or the file's own."""
    import torch

    (tmp_path / "net.py").write_text(NET)
    options = {"batch_size": 2, "sequence_length": 5, "seed": 3}
    model = export_model(f"{tmp_path / 'net.py'}:Net", {**options, "width": 24})
    shapes = {spec.name: spec.shape for spec in model.manifest.of_role("param")}
    assert shapes == {"embedding.weight": (256, 24), "head.bias": (256,), "head.weight": (256, 24)}
    params = model.initial("param")
    again = export_model(f"{tmp_path / 'net.py'}:Net", {**options, "width": 24}).initial("param")
    other = export_model(f"{tmp_path / 'net.py'}:Net", {**options, "width": 24, "seed": 4}).initial("param")
    np.testing.assert_array_equal(again["head.weight"], params["head.weight"])
    assert (other["head.weight"] != params["head.weight"]).any()
    inputs, targets = np.arange(10, dtype=np.int32).reshape(2, 5), np.arange(1, 11, dtype=np.int32).reshape(2, 5)
    found = float(interpret(model.text, [*params.values(), inputs, targets])[0])
    hidden = np.maximum(params["embedding.weight"][inputs], 0)
    scores = torch.from_numpy(hidden @ params["head.weight"].T + params["head.bias"])
    wanted = torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.from_numpy(targets).flatten().long())
    assert found == pytest.approx(float(wanted), rel=1e-5)
    made = export_model(f"{tmp_path / 'net.py'}:net", options)
    assert {spec.name: spec.shape for spec in made.manifest.of_role("param")}["head.weight"] == (256, 8)
    (tmp_path / "own.py").write_text(NET + LOSS)
    own = export_model(f"{tmp_path / 'own.py'}:Net", {**options, "width": 24})
    assert float(interpret(own.text, [*params.values(), inputs, targets])[0]) == pytest.approx(2 * found, rel=1e-5)


@pytest.mark.doors("torch", "torchax")
@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("make", {}, UserError, r"found Net\. A framework's module is named itself: its class, as in net\.py:Net"),
        ("Net", {"wdith": 3}, UserError, r"does not take the options \['wdith'\]"),
        (
            "Sum",
            {},
            UserError,
            r"takes scores \[batch, sequence, vocabulary\] .* the module returns shape \[\]; put a f",
        ),
    ],
)
def test_what_cannot_be_a_model_says_what_can(
    tmp_path: Path, name: str, options: dict[str, int], error: type[Exception], text: str
) -> None:
    (tmp_path / "net.py").write_text(NET)
    with pytest.raises(error, match=text):
        export_model(f"{tmp_path / 'net.py'}:{name}", options)


@pytest.mark.doors("torch", "torchax")
def test_trained_weights_go_back_into_the_module(tmp_path: Path) -> None:
    import torch

    from planetary.torch import load_into

    trained = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(2, np.float32)}
    save_parameters(tmp_path, trained)
    module = torch.nn.Linear(3, 2)
    assert load_into(module, tmp_path) == 1
    np.testing.assert_array_equal(module.weight.detach().numpy(), trained["weight"])
    half = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    load_into(half, tmp_path)
    assert half.weight.dtype is torch.bfloat16
    for wrong, text in (
        (torch.nn.Linear(2, 2), r"'weight' has shape \[2, 3\] in the run, \[2, 2\] in the module"),
        (torch.nn.Linear(3, 2, bias=False), "the module has no parameter 'bias'"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2)), "the module has no parameter 'bias'"),
    ):
        before = [p.clone() for p in wrong.parameters()]
        with pytest.raises(UserError, match=text):
            load_into(wrong, tmp_path)
        assert all((p == q).all() for p, q in zip(wrong.parameters(), before, strict=True)), "it was changed"
    with pytest.raises(UserError, match=r"expected a torch.nn.Module"):
        load_into(3, tmp_path)


@pytest.mark.doors("torch", "torchax")
def test_a_frozen_parameter_goes_back_into_the_module(tmp_path: Path) -> None:
    """With the value that the run has, and not with that of a module made anew."""
    import torch

    from planetary.torch import load_into

    (tmp_path / "net.py").write_text(NET)
    frozen = {"embedding.weight": "buffer"}
    tables = {"model": {"source": f"{tmp_path / 'net.py'}:Net", "roles": frozen}, "train": {"sequence_length": 8}}
    config = config_from_tables(tables)
    (tmp_path / "config.toml").write_text(to_toml(config))
    options = builder_options(config, config.model.source)
    model = export_model(config.model.source, options, roles=config.model.roles)
    params = model.initial("param")
    save_parameters(tmp_path, params)
    module = torch.nn.Sequential(OrderedDict(embedding=torch.nn.Embedding(256, 16), head=torch.nn.Linear(16, 256)))
    load_into(module, tmp_path)
    found = {name: value.detach().numpy() for name, value in module.named_parameters()}
    for name, value in {**params, **model.initial("buffer")}.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from planetary.torch import torch_function

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pip install 'planetary-compute\[torch\]'"):
        torch_function(None)


@pytest.mark.compiles
@pytest.mark.parametrize(("example", "options"), MODELS)
def test_the_compiled_step_is_the_references(example: str, options: dict[str, int], tmp_path: Path) -> None:
    model = export_model(source(example), options)
    assert checked(model, build_train_step(model), tmp_path).worst_error < 1
