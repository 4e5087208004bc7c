"""Frozen parameters and adapters: the step, the values of a run, and folders of `peft` in both directions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from planetary.artifacts.adapter_folder import read_adapter
from planetary.artifacts.store import BlobStore
from planetary.compiler import ir
from planetary.compiler.check.meaning import check_meaning
from planetary.compiler.check.reference import run_reference, temporary_memory
from planetary.compiler.frontend.adapters import adapted
from planetary.compiler.frontend.export import Model, export_loss, export_model
from planetary.compiler.frontend.narrow_base import narrowed
from planetary.compiler.frontend.weights import frozen
from planetary.compiler.step.train_step import build_train_step
from planetary.core.adapters import merged_values
from planetary.core.config import config_from_tables
from planetary.core.configuration.schema import Config
from planetary.core.configuration.step_options import StepOptions
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.core.tensors import TensorSpec
from planetary.models.zoo import ZOO
from planetary.run.model.adapter_export import export_adapter
from planetary.run.model.pretrained_export import export_pretrained
from planetary.run.model.served import load_folder, load_trained
from planetary.run.model.trained_model import tree_names
from planetary.runs.rounds.preparation.preparation import check_frozen
from planetary.runs.rounds.preparation.prepared_steps import StepRecord, check_untrained, keep_record
from planetary.runs.rounds.preparation.run_model import model_of
from planetary.runs.rounds.preparation.run_step import record_of, write_record
from planetary.runs.rounds.preparation.training_options import step_options
from saved_parameters import save_parameters

BATCH = {"batch_size": 2, "sequence_length": 8}
MODELS = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 256, "n_position": 16},
    "llama": {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_hidden": 24, "vocab_size": 256},
}
PLAIN = StepOptions(optimizer="sgd", momentum=0.0, weight_decay=0.0, clip_norm=0.0)
TOKENS: Any = np.random.default_rng(0).integers(0, 256, (2, 8)).astype(np.int32)


def config_of(name: str, **sections: Any) -> Config:
    model = {"source": ZOO[name].source, "options": MODELS[name], **sections.pop("model", {})}
    return config_from_tables({"model": model, "train": BATCH, "data": {"source": "stdlib"}, **sections})


def small_model(loss: Callable[..., jax.Array] | None = None, inputs: int = 6, outputs: int = 9) -> Model:
    """Return a model with an embedding, two numbered blocks with [in, out] and [out, in] matrices, and a head."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3 if inputs < 32 else 0.2, shape).astype(np.float32)

    def block() -> dict[str, Any]:
        return {"up": {"kernel": drawn(inputs, outputs), "bias": drawn(outputs)}, "down": drawn(inputs, outputs)}

    params = {"wte": {"weight": drawn(11, inputs)}, "blocks": [block(), block()], "head": drawn(inputs, 11)}
    return export_loss(loss or small_loss, params, (TOKENS % 11, TOKENS % 11), name="small")


def small_loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    x = params["wte"]["weight"][tokens]
    for block in params["blocks"]:
        x = x + jnp.tanh(x @ block["up"]["kernel"] + block["up"]["bias"]) @ block["down"].T
    chosen = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(chosen, targets[..., None], -1))


def every_operation(function: Any) -> list[Any]:
    found: list[Any] = []
    ir.walk(function, found.append)
    return found


def trained(model: Model, steps: int) -> tuple[dict[str, np.ndarray], list[float]]:
    """Train with our compiled graph on the reference; return the parameters and the losses."""
    step = build_train_step(model, PLAIN)
    params, buffers, losses = model.start, model.initial("buffer"), []
    state = [np.zeros(spec.shape, np.float32) for spec in step.spec.opt_state]
    kinds = ["f32"] * (len(params) + len(state) + 2)
    for number in range(steps):
        rest = [np.int32(number), np.float32(0.3), TOKENS % 11, TOKENS % 11]
        given = [*params.values(), *buffers.values(), *state, *map(np.asarray, rest)]
        found = run_reference(step.portable, "train_step", given, kinds)
        params = dict(zip(params, found, strict=False))
        state, losses = found[len(params) : -2], [*losses, float(found[-2])]
    return params, losses


def check_training(model: Model, base: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray]) -> None:
    """Five steps of adapters equal those of a plain JAX loop over matrices of `base`, and lower the loss."""

    def loss(adapters: dict[str, jax.Array]) -> jax.Array:
        def block(i: int) -> dict[str, Any]:
            up = adapters[f"blocks.{i}.up.lora_B.kernel"] @ adapters[f"blocks.{i}.up.lora_A.kernel"]
            down = adapters[f"blocks.{i}.down.lora_B"] @ adapters[f"blocks.{i}.down.lora_A"]
            kernel = base[f"blocks.{i}.up.kernel"] + 3.0 * up.T
            return {
                "up": {"kernel": kernel, "bias": base[f"blocks.{i}.up.bias"]},
                "down": base[f"blocks.{i}.down"] + 3.0 * down,
            }

        params = {"wte": {"weight": base["wte.weight"]}, "blocks": [block(0), block(1)], "head": base["head"]}
        return small_loss(params, TOKENS % 11, TOKENS % 11)

    expected, losses = {name: jnp.asarray(value) for name, value in start.items()}, []
    for _ in range(5):
        value, slopes = jax.value_and_grad(loss)(expected)
        expected = {name: one - 0.3 * slopes[name] for name, one in expected.items()}
        losses.append(float(value))
    found, own = trained(model, 5)
    np.testing.assert_allclose(own, losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        assert not np.array_equal(found[name], start[name]), name


# --- the step ---------------------------------------------------------------------------------------------------


def test_adapters_train_as_in_a_plain_jax_loop() -> None:
    model = adapted(small_model(), rank=2, alpha=6.0, targets=(), seed=3)
    shapes = {name: value.shape for name, value in model.start.items()}
    assert shapes == {
        "blocks.0.down.lora_A": (2, 9),
        "blocks.0.down.lora_B": (6, 2),
        "blocks.0.up.lora_A.kernel": (2, 6),
        "blocks.0.up.lora_B.kernel": (9, 2),
        "blocks.1.down.lora_A": (2, 9),
        "blocks.1.down.lora_B": (6, 2),
        "blocks.1.up.lora_A.kernel": (2, 6),
        "blocks.1.up.lora_B.kernel": (9, 2),
    }
    assert set(model.initial("buffer")) == {a.name for a in small_model().manifest.arguments if a.role == "param"}
    assert check_meaning(model).author == "framework"
    check_training(model, model.initial("buffer"), model.start)


@pytest.mark.slow
def test_no_gradient_of_a_whole_matrix_is_computed() -> None:
    """Products have an adapted matrix's shape only where a called function takes the matrix."""

    def called(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        whole = jax.jit(lambda up: jnp.tanh(params["wte"]["weight"][tokens] @ up), inline=False)
        return jnp.mean(whole(params["blocks"][0]["up"]["kernel"])) + small_loss(params, tokens, targets)

    for loss, whole_matrix in ((small_loss, False), (called, True)):
        changed = adapted(small_model(loss), rank=2, alpha=6.0, targets=(), seed=3)
        assert check_meaning(changed).author == "framework"
        step = build_train_step(changed, PLAIN)
        with ir.new_context():
            module = ir.parse_module(step.portable)
            operations = [op for function in ir.functions(module).values() for op in every_operation(function)]
            shapes = [ir.shape_of(op.results[0]) for op in operations if op.name == "stablehlo.dot_general"]
        assert any(shape in {(6, 9), (9, 6)} for shape in shapes) == whole_matrix


def test_adapters_start_as_in_peft_and_change_nothing() -> None:
    plain, model = small_model(), adapted(small_model(), rank=4, alpha=8.0, targets=("up", "head"), seed=3)
    start = model.start
    assert list(start) == [
        *(f"blocks.{i}.up.lora_{part}.kernel" for i in (0, 1) for part in "AB"),
        *("head.lora_A", "head.lora_B"),
    ]
    bound = 6**-0.5
    assert all(not value.any() for name, value in start.items() if "lora_B" in name)
    assert 0.7 * bound < np.abs(start["head.lora_A"]).max() <= bound
    merged = merged_values(model.adapters, {**model.initial("buffer"), **start})
    for name, value in plain.start.items():
        np.testing.assert_array_equal(merged[name], value, err_msg=name)
    again, other = (adapted(plain, rank=4, alpha=8.0, targets=("head",), seed=seed).start for seed in (3, 4))
    np.testing.assert_array_equal(again["head.lora_A"], start["head.lora_A"])
    assert not np.array_equal(other["head.lora_A"], start["head.lora_A"])


@pytest.mark.parametrize("bits", [8, 4])
def test_base_in_blocks_trains_as_its_values_in_jax(bits: int) -> None:
    """Losses and adapters of five steps equal a plain loop over the matrices that the blocks stand for."""
    plain = adapted(small_model(inputs=32, outputs=64), rank=2, alpha=6.0, targets=(), seed=3)
    model = narrowed(plain, bits)
    assert check_meaning(model).author == "framework"
    narrow = {one.spec.name for one in model.narrow}
    assert narrow == {f"blocks.{i}.{n}" for i in (0, 1) for n in ("up.kernel", "down")}
    held = {name: value.nbytes for name, value in model.initial("buffer").items()}
    of_blocks = sum(nbytes for name, nbytes in held.items() if name.endswith((".codes", ".scales")))
    assert of_blocks == 4 * 32 * 64 * (bits + 1) // 8  # a scale of 32 bits for 32 numbers
    base = model.base
    for name, value in plain.initial("buffer").items():
        error = np.linalg.norm(base[name] - value) / np.linalg.norm(value)
        assert 0 < error < {8: 0.007, 4: 0.1}[bits] if name in narrow else error == 0, name

    check_training(model, base, plain.start)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_base_in_blocks_is_never_whole_in_a_step(bits: int) -> None:
    """A step takes no more memory beside its arguments than one over float32, but for one matrix and its copy."""
    options = {"n_layer": 6, "n_head": 2, "n_kv_head": 2, "n_embd": 128, "n_hidden": 384, "vocab_size": 64}
    model = export_model(ZOO["llama"].source, {**options, "batch_size": 1, "sequence_length": 16})
    plain = adapted(model, rank=2, alpha=4.0, targets=(), seed=0)
    narrow = narrowed(plain, bits)
    whole = sum(one.spec.nbytes for one in narrow.narrow)
    largest = max(one.spec.nbytes for one in narrow.narrow)
    before, after = (temporary_memory(build_train_step(one, PLAIN)) for one in (plain, narrow))
    assert whole > 20 * largest
    assert after - before < 4 * largest


def test_base_without_whole_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"adapter\.base: the model small has no float32 matrix in numbered blocks"):
        narrowed(adapted(small_model(), rank=2, alpha=4.0, targets=(), seed=0), 8)


@pytest.mark.slow
def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model = frozen(small_model(), ("wte.*", "*.bias"))
    step = build_train_step(model, StepOptions(optimizer="adamw"))
    held = {"wte.weight", "blocks.0.up.bias", "blocks.1.up.bias"}
    assert {spec.name for spec in step.spec.buffers} == held
    assert not held & {spec.name for spec in step.spec.params}
    assert not any(name in spec.name for name in held for spec in step.spec.opt_state)
    assert check_meaning(model).author == "framework"
    found, _ = trained(model, 3)

    def loss(params: Any) -> jax.Array:
        tree = {"wte": {"weight": params["wte.weight"]}, "head": params["head"]}
        tree["blocks"] = [
            {"up": {n: params[f"blocks.{i}.up.{n}"] for n in ("kernel", "bias")}, "down": params[f"blocks.{i}.down"]}
            for i in (0, 1)
        ]
        return small_loss(tree, TOKENS % 11, TOKENS % 11)

    expected = {name: jnp.asarray(value) for name, value in small_model().start.items()}
    for _ in range(3):
        slopes = jax.grad(loss)(expected)
        expected = {name: v if name in held else v - 0.3 * slopes[name] for name, v in expected.items()}
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("wpe.*",), r"model\.freeze: 'wpe\.\*' matches nothing, and no parameter; did you mean wte\?"),
        (("wte.weigth",), r"did you mean wte\.weight\?"),
        (("tokens",), r"matches the input 'tokens', and no parameter"),
        (("*",), r"model\.freeze: \* leaves no parameter of small to train"),
    ],
)
def test_wrong_frozen_patterns_are_refused(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        frozen(small_model(), patterns)


@pytest.mark.parametrize(
    ("rank", "targets", "message"),
    [
        (7, (), r"adapter\.rank: expected at most 6, the smaller dimension of 'blocks\.0\.down' \[6, 9\], found 7"),
        (2, ("q_proj",), r"'q_proj' matches no parameter\. The model's matrices are blocks\.0\.down, "),
        (2, ("upp",), r"'upp' matches no parameter; did you mean up\?"),
        (2, ("*.bias",), r"'\*\.bias' matches no trained matrix: 'blocks\.0\.up\.bias' is f32\[9\]"),
    ],
)
def test_wrong_adapters_are_refused(rank: int, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        adapted(small_model(), rank=rank, alpha=1.0, targets=targets, seed=0)


def test_model_without_blocks_asks_for_targets() -> None:
    params = {"w": np.ones((3, 3), np.float32)}
    model = export_loss(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, (np.ones((2, 3), np.float32),), name="flat")
    with pytest.raises(UserError, match=r"no linear layer in numbered blocks; name the matrices to adapt\. It has w"):
        adapted(model, rank=1, alpha=1.0, targets=(), seed=0)
    assert list(adapted(model, rank=1, alpha=1.0, targets=("w",), seed=0).start) == ["w.lora_A", "w.lora_B"]


@pytest.mark.parametrize(
    ("name", "inputs_first"),
    [
        *(("gpt2", True), ("nanochat", True), ("llama", False), ("moe", None), ("latent_moe", None)),
        *(("mamba2", False), ("vit", False)),
    ],
)
def test_every_family_of_the_zoo_takes_adapters(name: str, inputs_first: bool | None) -> None:
    """The default targets are matrices of blocks; the graph says which dimension has the inputs. None: some of both."""
    model = export_model(ZOO[name].source, ZOO[name].options("tiny"))
    found = adapted(model, rank=2, alpha=4.0, targets=(), seed=0).adapters
    assert found
    assert not any("router" in one.target for one in found)
    assert inputs_first is None or {one.inputs_first for one in found} == {inputs_first}


def test_keys_without_a_rank_are_refused() -> None:
    with pytest.raises(UserError, match=r"adapter\.rank: expected at least 1 with other keys of \[adapter\]"):
        config_of("gpt2", adapter={"targets": ["c_attn"]})


# --- a run's values ---------------------------------------------------------------------------------------------


def run_of(folder: Path, config: Config) -> tuple[Path, Model, dict[str, np.ndarray]]:
    """Write a run's folder with random trained parameters; return it with model and parameters."""
    model, rng = model_of(config), np.random.default_rng(1)
    params = {k: rng.normal(0, 0.2, v.shape).astype(np.float32) for k, v in model.start.items()}
    save_parameters(folder, params, 3)
    (folder / "config.toml").write_text(to_toml(config))
    step = build_train_step(model, step_options(config))
    record = keep_record(
        BlobStore(folder / "blobs"),
        config,
        step_options(config),
        portable=step.portable,
        spec=step.spec,
        params=model.start,
        buffers=model.initial("buffer"),
        notes=(),
        meaning=None,
        limits={},
        read=(),
    )
    write_record(folder, record)
    return folder, model, params


def base_folder(folder: Path, name: str, seed: int = 2) -> Path:
    """Write a pretrained folder with random weights."""
    run, _, _ = run_of(folder.parent / f"{folder.name}-run-{seed}", config_of(name, run={"seed": seed}))
    export_pretrained(run, folder)
    return folder


def tuned(base: Path, /, **adapter: Any) -> Config:
    """Return the configuration of a run with adapters of a pretrained folder."""
    tables = {"model": {"source": str(base)}, "train": BATCH, "data": {"source": "stdlib"}}
    return config_from_tables({**tables, "adapter": {"rank": 4, "alpha": 8.0, **adapter}})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "base"), [("gpt2", "f32"), ("llama", "f32"), ("gpt2", "int4"), ("llama", "int8")])
def test_adapters_are_merged_in_every_use_of_the_model(tmp_path: Path, name: str, base: str) -> None:
    run, model, params = run_of(tmp_path / "run", tuned(base_folder(tmp_path / "base", name), base=base))
    expected = merged_values(model.adapters, {**model.base, **params})
    assert bool(model.narrow) == (base != "f32")
    assert not set(expected) & set(params)
    for loaded in (load_trained(run), load_folder(run)):
        found = dict(zip(tree_names(loaded.params), jax.tree.leaves(loaded.params), strict=True))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)
    export_pretrained(run, tmp_path / "merged")
    merged = load_folder(tmp_path / "merged")
    np.testing.assert_array_equal(merged.logits(merged.params, TOKENS), loaded.logits(loaded.params, TOKENS))


@pytest.mark.slow
def test_base_in_blocks_is_tuned_as_far_as_the_whole_one(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "llama")
    losses = {form: trained(model_of(tuned(base, alpha=32.0, base=form)), 40)[1] for form in ("f32", "int8", "int4")}
    gains = {form: found[0] - found[-1] for form, found in losses.items()}
    assert gains["f32"] > 0.5
    assert gains["int8"] == pytest.approx(gains["f32"], rel=0.03)
    assert gains["int4"] == pytest.approx(gains["f32"], rel=0.2)


@pytest.mark.parametrize(("change", "refused"), [({"adapter": {"rank": 2}}, True), ({}, False)])
def test_run_goes_on_with_its_own_base_only(tmp_path: Path, change: dict[str, Any], refused: bool) -> None:
    """A step made again has other buffers: those of a run without adapters are tables, which a new step may change."""
    config = config_of("gpt2", **change)
    run, _, _ = run_of(tmp_path / "run", config)
    own = record_of(run / "step.json", StepRecord)
    assert own is not None
    check_frozen(config, own, own)
    changed = msgspec.structs.replace(own, frozen={**own.frozen, "wte.weight": "0"})
    before = msgspec.structs.replace(own, frozen={**own.frozen, "wte.weight": "1"})
    if refused:
        with pytest.raises(UserError, match=r"trained with other values of 'wte\.weight', which it does not train"):
            check_frozen(config, before, changed)
    else:
        check_frozen(config, before, changed)


def test_base_beyond_a_blob_is_refused() -> None:
    """The worker would end the connection at the blob, without a word of the model."""
    specs = [TensorSpec(f"blocks.{i}", "f32", (1 << 16, 1 << 14)) for i in range(5)]
    check_untrained("large", specs[:4])
    with pytest.raises(UserError, match=r"tensors of large that are not trained take 20\.0 GiB.* at most 16 GiB"):
        check_untrained("large", specs)


def test_changed_base_is_refused_with_its_first_tensor(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "llama")
    run, _, _ = run_of(tmp_path / "run", tuned(base))
    export_adapter(run, tmp_path / "adapter")
    path = base / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last tensor of the file
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"'model\.norm\.weight' of .*base has other values than when .*run was"):
        load_trained(run)
    with pytest.raises(UserError, match=r"trained with another base: 'model\.norm\.weight' has other values here"):
        model_of(tuned(base, start=str(tmp_path / "adapter")))


def test_adapter_of_a_base_in_blocks_wants_the_same(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "llama")
    run, _, _ = run_of(tmp_path / "run", tuned(base, base="int8"))
    export_adapter(run, tmp_path / "adapter")
    model_of(tuned(base, base="int8", start=str(tmp_path / "adapter")))
    with pytest.raises(UserError, match=r"'model\.layers\.0\.\S+' has other values here \(.*adapter\.base"):
        model_of(tuned(base, start=str(tmp_path / "adapter")))


@pytest.mark.parametrize("name", MODELS)
def test_exported_adapter_is_a_start(tmp_path: Path, name: str) -> None:
    base = base_folder(tmp_path / "base", name)
    run, _, params = run_of(tmp_path / "run", tuned(base))
    made = export_adapter(run, tmp_path / "adapter")
    assert (made.round, made.param_count) == (3, sum(value.size for value in params.values()))
    tables = {"model": {"source": str(base)}, "train": BATCH, "data": {"source": "stdlib"}}
    config = config_from_tables({**tables, "adapter": {"start": str(tmp_path / "adapter")}})
    assert (config.adapter.rank, config.adapter.alpha) == (4, 8.0)
    start = model_of(config).start
    assert start.keys() == params.keys()
    for key, value in params.items():
        np.testing.assert_array_equal(start[key], value, err_msg=key)
    with pytest.raises(UserError, match="already holds an adapter"):
        export_adapter(run, tmp_path / "adapter")
    with pytest.raises(UserError, match=r"adapter\.rank is 3, and .* says 4: leave it out"):
        config_from_tables({**tables, "adapter": {"start": str(tmp_path / "adapter"), "rank": 3}})
    with pytest.raises(UserError, match=r"lacks .*one of \d+: it is an adapter of other matrices"):
        model_of(tuned(base, start=str(tmp_path / "adapter"), targets=["*"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': adapters here are of the type 'LORA'"),
        ({"use_dora": True}, "use_dora is True: adapters here are plain changes of matrices"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"r": "4"}, "r is '4': expected a whole number"),
        ({"lora_alpha": None}, "lora_alpha is None: expected a number above 0"),
        ({"target_modules": "all-linear"}, "target_modules is 'all-linear': expected a list"),
    ],
)
def test_adapters_of_other_kinds_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    published = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**published, **change}))
    with pytest.raises(UserError, match=message):
        config_of("gpt2", adapter={"start": str(tmp_path)})


NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self, held=False):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 8)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.head = torch.nn.Linear(8, 256)
        self.blocks[0].weight.requires_grad_(not held)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)
"""


@pytest.mark.doors("torch", "torchax")
def test_adapters_of_a_pytorch_module_go_back_into_it(tmp_path: Path) -> None:
    from planetary.torch import load_into

    (tmp_path / "net.py").write_text(NET)
    tables = {"train": BATCH, "data": {"source": "stdlib"}, "adapter": {"rank": 2}}
    config = config_from_tables({**tables, "model": {"source": f"{tmp_path / 'net.py'}:Net"}})
    run, model, params = run_of(tmp_path / "run", config)
    assert [(one.module, one.inputs_first) for one in model.adapters] == [("blocks.0", False), ("blocks.1", False)]
    assert check_meaning(model).author == "framework"
    expected = merged_values(model.adapters, {**model.initial("buffer"), **params})
    scope: dict[str, Any] = {}
    exec(NET, scope)
    module = scope["Net"]()
    assert load_into(module, run) == 3
    for name, parameter in module.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), expected[name], err_msg=name)
    held = config_from_tables(
        {**tables, "model": {"source": f"{tmp_path / 'net.py'}:Net", "options": {"held": True}}},
    )
    assert [one.module for one in model_of(held).adapters] == ["blocks.1"]
    with pytest.raises(UserError, match=r"'blocks\.0' matches no"):
        model_of(msgspec.structs.replace(held, adapter=msgspec.structs.replace(held.adapter, targets=("blocks.0",))))


MIXTURE = """
import torch


class Mixture(torch.nn.Module):
    def __init__(self, chosen):
        super().__init__()
        self.chosen = chosen
        self.gate = torch.nn.Linear(8, 4, bias=False)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        shares = torch.softmax(self.gate(x), -1)
        if self.chosen > 1:
            weights, places = torch.topk(shares, self.chosen, -1)
        else:
            weights, places = shares.amax(-1, keepdim=True), shares.argmax(-1, keepdim=True)
        shares = torch.zeros_like(shares).scatter(-1, places, weights)
        return sum(shares[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Net(torch.nn.Module):
    def __init__(self, chosen):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 8)
        self.blocks = torch.nn.ModuleList([Mixture(chosen) for _ in range(2)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x @ self.embed.weight.T
"""


@pytest.mark.slow
@pytest.mark.doors("torch", "torchax")
@pytest.mark.parametrize("chosen", [1, 2])
def test_routers_are_found_by_what_they_do(tmp_path: Path, chosen: int) -> None:
    """Whatever they are called; named ones are adapted."""
    (tmp_path / "net.py").write_text(MIXTURE)
    model = {"source": f"{tmp_path / 'net.py'}:Net", "options": {"chosen": chosen}}
    tables = {"train": BATCH, "data": {"source": "stdlib"}, "model": model}
    found = model_of(config_from_tables({**tables, "adapter": {"rank": 2}})).adapters
    assert {one.module for one in found} == {f"blocks.{i}.experts.{j}" for i in range(2) for j in range(4)}
    named = model_of(config_from_tables({**tables, "adapter": {"rank": 2, "targets": ["gate"]}})).adapters
    assert [one.module for one in named] == ["blocks.0.gate", "blocks.1.gate"]


# --- peft -------------------------------------------------------------------------------------------------------

needs_peft = pytest.mark.doors("torch", "transformers", "peft")


@needs_peft
@pytest.mark.parametrize("name", MODELS)
def test_exported_adapter_has_the_same_scores_in_peft(tmp_path: Path, name: str) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = base_folder(tmp_path / "base", name)
    run, _, _ = run_of(tmp_path / "run", tuned(base))
    export_adapter(run, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    own = load_trained(run)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS).long()).logits.numpy()
        plain = AutoModelForCausalLM.from_pretrained(base)(torch.from_numpy(TOKENS).long()).logits.numpy()
    np.testing.assert_allclose(np.asarray(own.logits(own.params, TOKENS)), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - plain).max() > 0.1


@needs_peft
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scaled", [False, True])
def test_adapter_of_peft_has_the_same_scores_here(tmp_path: Path, name: str, scaled: bool) -> None:
    """Scaled: by the root of the rank (`use_rslora`)."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = base_folder(tmp_path / "base", name)
    torch.manual_seed(0)
    chosen = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj", "down_proj"]}[name]
    wanted = LoraConfig(r=3, lora_alpha=5, target_modules=chosen, use_rslora=scaled, task_type="CAUSAL_LM")
    theirs: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), wanted)
    with torch.no_grad():
        for part, parameter in theirs.named_parameters():
            if "lora_B" in part:
                parameter.normal_(std=0.2)
        expected = theirs.eval()(torch.from_numpy(TOKENS).long()).logits.numpy()
    theirs.save_pretrained(tmp_path / "theirs")
    tables = {"model": {"source": str(base)}, "train": BATCH, "data": {"source": "stdlib"}}
    config = config_from_tables({**tables, "adapter": {"start": str(tmp_path / "theirs")}})
    model = model_of(config)
    run, _, _ = run_of(tmp_path / "run", config)
    save_parameters(run, model.start, 4)
    own = load_trained(run)
    np.testing.assert_allclose(np.asarray(own.logits(own.params, TOKENS)), expected, rtol=1e-4, atol=1e-5)


@needs_peft
@pytest.mark.parametrize("name", MODELS)
def test_adapters_train_as_in_peft(tmp_path: Path, name: str) -> None:
    """Five steps of plain descent from the same adapters end with equal losses and adapters."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = base_folder(tmp_path / "base", name)
    run, model, params = run_of(tmp_path / "run", tuned(base))
    export_adapter(run, tmp_path / "adapter")
    theirs: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter", is_trainable=True
    )
    targets, losses = np.roll(TOKENS, -1, 1), []
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.05)
    for _ in range(5):
        scores = theirs(torch.from_numpy(TOKENS).long()).logits
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.from_numpy(targets).long().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    theirs.save_pretrained(tmp_path / "trained")
    names = {s: own for one in model.adapters for own, s in one.stored_names(_stored(name)).items()}
    _, expected = read_adapter(tmp_path / "trained", names)

    step = build_train_step(model, PLAIN)
    own, kinds = params, ["f32"] * (len(params) + len(step.spec.opt_state) + 2)
    state = [np.zeros(spec.shape, np.float32) for spec in step.spec.opt_state]
    for number, wanted in enumerate(losses):
        rest = [np.int32(number), np.float32(0.05), TOKENS, targets]
        given = [*own.values(), *model.initial("buffer").values(), *state, *map(np.asarray, rest)]
        found = run_reference(step.portable, "train_step", given, kinds)
        own, state = dict(zip(own, found, strict=False)), found[len(own) : -2]
        assert float(found[-2]) == pytest.approx(wanted, rel=1e-4)
    for key, value in expected.items():
        np.testing.assert_allclose(own[key], value, rtol=1e-3, atol=1e-5, err_msg=key)


def _stored(name: str) -> Any:
    return (lambda own: f"transformer.{own}") if name == "gpt2" else str
