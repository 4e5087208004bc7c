"""Runs on examples of several arrays, of one worker, equal a plain loop over the same batches.

With the compiled step the loop gives the same bits; with JAX's own gradient and update the same numbers but for
rounding, as the compiled gradient sums in another order.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import column_models
import jax
import numpy as np
import pytest

import planetary
from planetary.artifacts.store import BlobStore
from planetary.core.errors import UserError
from planetary.core.example_layout import column_name
from planetary.core.tensors import host_dtype
from planetary.data.reader import read_slice
from planetary.models import gpt2, llama, vit
from planetary.runs.rounds.preparation.preparation import prepare_run
from planetary.runs.rounds.preparation.training_options import schedule_of
from planetary.runtime.executor import open_executor

pytestmark = pytest.mark.slow  # XLA compiles each training step

HERE = Path(__file__).parent
RATE, STEPS, ROUNDS, SEED, BATCH = 0.05, 3, 2, 7, 4
PLAIN = {
    "run": {"seed": SEED},
    "train": {"rounds": ROUNDS, "inner_steps": STEPS, "batch_size": BATCH},
    "optimizer": {
        "name": "sgd",
        "momentum": 0.0,
        "learning_rate": RATE,
        "warmup_steps": 0,
        "schedule": "constant",
        "weight_decay": 0.0,
        "clip_norm": 0.0,
    },
    "outer": {"learning_rate": 1.0, "momentum": 0.0, "merge": "mean"},
    "fabric": {"workers": 1},
    "eval": {"batches": 1},
}


def tables_of(model: Mapping[str, Any], data: Mapping[str, Any], **train: Any) -> dict[str, Any]:
    return {**PLAIN, "model": dict(model), "data": dict(data), "train": {**PLAIN["train"], **train}}


def plain_loop(loss_fn: Callable[..., Any], params: Any, batches: list[tuple[int, Any]], *, keyed: bool) -> Any:
    """Return the parameters and losses of gradient descent in JAX; batches with the lease that each is from."""

    @jax.jit
    def step(params: Any, batch: Any, key: Any) -> Any:
        options = {"key": key} if keyed else {}
        loss, slopes = jax.value_and_grad(lambda given: loss_fn(given, *batch, **options))(params)
        return loss, jax.tree.map(lambda value, slope: value - np.float32(RATE) * slope, params, slopes)

    losses = []
    for number, (lease, batch) in enumerate(batches):
        loss, params = step(params, batch, key_of(lease, number))
        losses.append(float(loss))
    return params, losses


def compiled_loop(done: planetary.Simulated, cache: Path) -> dict[str, np.ndarray]:
    """Return the parameters after the steps of a run, called one after the other with keys that JAX computes."""
    prepared = prepare_run(done.config, cache, lambda stage: None)
    spec, schedule = prepared.step.spec, schedule_of(done.config, done.config.total_inner_steps)
    executor = open_executor(BlobStore(cache / "blobs").path(spec.stablehlo_digest), spec, backend="pjrt:cpu")
    executor.load(prepared.params, prepared.buffer_values, None)
    for number, (lease, batch) in enumerate(batches_in(done, cache)):
        key = np.asarray(jax.random.key_data(key_of(lease, number))).astype(np.uint32)
        arrays = [batch[column_name(one)].astype(host_dtype(one.dtype)) for one in spec.batch]
        executor.train_step(number, schedule.rate(number), [*arrays, *([key] if spec.keys else [])])
    return executor.read_params()


def key_of(lease: int, step: int) -> jax.Array:
    run_key = jax.random.key(SEED, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(run_key, lease), step)


def batches_in(done: planetary.Simulated, cache: Path) -> list[tuple[int, dict[str, np.ndarray]]]:
    """Return the batches of a run by column, read without the package's reader, and the lease of each."""
    prepared = prepare_run(done.config, cache, lambda stage: None)
    columns = json.loads((prepared.data.folder / "prepared.json").read_text())["layout"]["columns"]
    row = np.dtype([(one["name"], host_dtype(one["dtype"]), tuple(one["shape"])) for one in columns])
    found = []
    for lease in range(ROUNDS):
        rows = read_slice(prepared.data.order(done.config).locate(lease)).view(row).reshape(STEPS, BATCH)
        found += [(lease, {name: np.ascontiguousarray(part[name]) for name in row.names or ()}) for part in rows]
    return found


def assert_equal(done: planetary.Simulated, cache: Path, params: Any, losses: list[float]) -> None:
    expected = [float(np.mean(losses[start : start + STEPS])) for start in range(0, len(losses), STEPS)]
    np.testing.assert_allclose(done.losses, expected, rtol=1e-6)
    for path, values in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_allclose(done.params[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    for name, values in compiled_loop(done, cache).items():
        np.testing.assert_array_equal(done.params[name], values, err_msg=name)


def test_regression_on_a_data_set_is_a_plain_loop(shared_cache: Path) -> None:
    source = {"source": f"{HERE / 'column_models.py'}:Points"}
    done = planetary.simulate(
        tables_of({"source": f"{HERE / 'column_models.py'}:regression"}, source), workers=1, cache=shared_cache
    )
    loss_fn, params, _ = column_models.regression(BATCH)
    batches = [(lease, (one["x"], one["y"], one["weight"])) for lease, one in batches_in(done, shared_cache)]
    assert_equal(done, shared_cache, *plain_loop(loss_fn, params, batches, keyed=False))


def test_diffusion_draws_noise_as_a_plain_loop(tmp_path: Path, shared_cache: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 4, 4)).astype(np.uint8)
    np.savez(tmp_path / "images.npz", label=rng.integers(0, 3, 50), image=images)
    done = planetary.simulate(
        tables_of({"source": f"{HERE / 'column_models.py'}:diffusion"}, {"source": str(tmp_path / "images.npz")}),
        workers=1,
        cache=shared_cache,
    )
    loss_fn, params, _ = column_models.diffusion(BATCH)
    batches = [(lease, (one,)) for lease, one in batches_in(done, shared_cache)]
    assert_equal(done, shared_cache, *plain_loop(loss_fn, params, batches, keyed=True))


def test_masked_language_model_is_a_plain_loop(tmp_path: Path, shared_cache: Path) -> None:
    rng = np.random.default_rng(1)
    np.save(tmp_path / "tokens.npy", rng.integers(0, 20, (50, 8)))
    np.save(tmp_path / "mask.npy", np.arange(8) < rng.integers(3, 9, (50, 1)))
    data = {"source": str(tmp_path), "columns": ["tokens", "mask"]}
    done = planetary.simulate(
        tables_of({"source": f"{HERE / 'column_models.py'}:masked"}, data), workers=1, cache=shared_cache
    )
    loss_fn, params, _ = column_models.masked(BATCH)
    batches = [(lease, (one["tokens"], one["mask"])) for lease, one in batches_in(done, shared_cache)]
    assert_equal(done, shared_cache, *plain_loop(loss_fn, params, batches, keyed=True))


def test_vision_transformer_on_labels_is_a_plain_loop(tmp_path: Path, shared_cache: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rng = np.random.default_rng(2)
    images, labels = rng.standard_normal((50, 8, 8, 3)), rng.integers(0, 5, 50)
    table = pyarrow.table({"name": ["x"] * 50, "images": images.tolist(), "labels": labels})
    parquet.write_table(table, tmp_path / "images.parquet")
    options = {**vit.PRESETS["tiny"], "batch_size": BATCH, "seed": SEED}
    data = {"source": str(tmp_path / "images.parquet"), "columns": ["images", "labels"]}
    done = planetary.simulate(
        tables_of({"source": "planetary.models.vit:build", "options": options}, data), workers=1, cache=shared_cache
    )
    loss_fn, params, _ = vit.build(**options)
    batches = [(lease, (one["images"], one["labels"])) for lease, one in batches_in(done, shared_cache)]
    assert_equal(done, shared_cache, *plain_loop(loss_fn, params, batches, keyed=False))


@pytest.mark.parametrize("model", [gpt2, llama])
def test_packed_transformer_is_a_plain_loop(tmp_path: Path, shared_cache: Path, model: Any) -> None:
    rng = np.random.default_rng(3)
    lines = ["".join(rng.choice(list("abcdef "), rng.integers(3, 40))) for _ in range(200)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    options = {**model.PRESETS["tiny"], "vocab_size": 256, "segments": True}
    options |= {"sequence_length": 24, "batch_size": BATCH, "seed": SEED}
    data = {"source": str(tmp_path / "texts.jsonl"), "packing": True}
    tables = tables_of({"source": f"{model.__name__}:build", "options": options}, data, sequence_length=24)
    done = planetary.simulate(tables, workers=1, cache=shared_cache)
    loss_fn, params, _ = model.build(**options)
    names = ("tokens", "segment_ids", "positions", "targets")
    batches = [
        (lease, tuple(one[name].astype(np.int32) for name in names)) for lease, one in batches_in(done, shared_cache)
    ]
    assert any(len(set(row)) > 2 for _, one in batches for row in one[1]), "no sequence has two documents"
    assert_equal(done, shared_cache, *plain_loop(loss_fn, params, batches, keyed=False))


TORCH = """
import numpy as np
import torch
from planetary.torch import from_torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(9, 12), torch.nn.Linear(14, 3)
    def forward(self, words, size, mask):
        read = self.table(words) * mask[..., None]
        mean = read.sum(1) / mask.sum(1, keepdim=True)
        return self.out(torch.cat([torch.tanh(mean), size], 1))

def loss(scores, label):
    return torch.nn.functional.cross_entropy(scores, label.long())

def make():
    torch.manual_seed(0)
    return Net()

def build(batch_size):
    words, size = np.zeros((batch_size, 5), np.int32), np.zeros((batch_size, 2), np.float32)
    mask, label = np.ones((batch_size, 5), np.float32), np.zeros(batch_size, np.int32)
    return from_torch(make(), (words, size, mask, label), loss)
"""


@pytest.mark.doors("torch", "torchax")
def test_module_of_three_tensors_is_trained_as_by_pytorch(tmp_path: Path, shared_cache: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(TORCH)
    own = runpy.run_path(str(tmp_path / "net.py"))
    rng = np.random.default_rng(4)
    mask = (np.arange(5) < rng.integers(1, 6, (50, 1))).astype(np.float16)  # is taken as float32
    words, size, label = rng.integers(0, 9, (50, 5)), rng.standard_normal((50, 2)), rng.integers(0, 3, 50)
    np.savez(tmp_path / "d.npz", label=label.astype(np.uint8), words=words, mask=mask, size=size)
    done = planetary.simulate(
        tables_of({"source": f"{tmp_path / 'net.py'}:build"}, {"source": str(tmp_path / "d.npz")}),
        workers=1,
        cache=shared_cache,
    )
    net = own["make"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    losses = []
    for _, one in batches_in(done, shared_cache):
        tensors = {name: torch.from_numpy(np.array(one[name])) for name in ("words", "size", "mask", "label")}
        optimizer.zero_grad()
        found = net(tensors["words"], tensors["size"], tensors["mask"].float())
        loss = own["loss"](found, tensors["label"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = {name: value.detach().numpy() for name, value in net.named_parameters()}
    assert set(done.params) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(done.params[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(done.losses, np.reshape(losses, (ROUNDS, STEPS)).mean(1), rtol=1e-5)


@pytest.mark.parametrize("topology", ["star", "ring"])
def test_examples_survive_faults_wherever_they_come_from(shared_cache: Path, topology: str) -> None:
    """Workers that are killed and a gateway that is resumed train each lease once; the gateway may send examples."""
    data = {"source": f"{HERE / 'column_models.py'}:Points", "delivery": "gateway"}
    tables = tables_of({"source": f"{HERE / 'column_models.py'}:regression"}, data)
    tables["train"]["rounds"] = 4
    settings = {"sync.topology": topology, "fabric.workers": 2, "fabric.quorum": 2, "fabric.leases": "equal"}
    faults = [planetary.Fault(2.0, "kill_worker", worker=1), planetary.Fault(3.0, "kill_gateway")]
    sent = planetary.simulate(tables, overrides=settings, faults=faults, cache=shared_cache)
    read = planetary.simulate(tables, overrides=settings | {"data.delivery": "path"}, cache=shared_cache)
    assert (sent.outcome, read.outcome) == ("finished", "finished")
    assert set(sent.faults) == {"kill_worker", "kill_gateway"}
    assert sum(line.tokens for line in sent.metrics) == sent.metrics[-1].tokens_total
    assert sent.metrics[-1].tokens_total == 4 * 2 * STEPS * BATCH
    for name, values in read.params.items():
        np.testing.assert_allclose(sent.params[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


LEAKY = """
import jax.numpy as jnp
from planetary.models import layers, llama
from planetary.models.context import WholeText

def build(**options):
    loss_fn, params, batch = llama.build(**options)
    config = loss_fn.keywords["config"]
    def leaky(params, tokens, segment_ids, positions, targets):
        scores = llama.forward(params, tokens, config, WholeText(tokens))
        return layers.cross_entropy(scores, targets)
    return leaky, params, batch
"""


def test_model_that_reads_another_document_is_refused(tmp_path: Path, shared_cache: Path) -> None:
    (tmp_path / "leaky.py").write_text(LEAKY)
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"text {number}"}) for number in range(300)))
    options = {**llama.PRESETS["tiny"], "vocab_size": 256, "segments": True, "batch_size": BATCH}
    data = {"source": str(tmp_path / "texts.jsonl"), "packing": True}
    model = {"source": f"{tmp_path / 'leaky.py'}:build", "options": options}
    with pytest.raises(UserError, match="scores for a document depend on the document before"):
        planetary.simulate(tables_of(model, data, sequence_length=8), workers=1, cache=shared_cache)
    small = {"source": "planetary.models.llama:build", "options": {**options, "vocab_size": 100}}
    with pytest.raises(UserError, match=r"the tokenizer has 256 tokens but the model was given .*vocab_size = 100"):
        planetary.simulate(tables_of(small, data, sequence_length=8), workers=1, cache=shared_cache)
    plain = {"source": "planetary.models.llama:build", "options": {**options, "segments": False}}
    with pytest.raises(UserError, match=r"the columns tokens: .*, segment_ids: .*, and the loss takes tokens: .*"):
        planetary.simulate(tables_of(plain, data, sequence_length=8), workers=1, cache=shared_cache)
