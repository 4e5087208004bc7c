"""A run of a model with dropout and running statistics, resumed, is a plain loop with the documented keys."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import planetary
from planetary.artifacts.store import BlobStore
from planetary.data.reader import batches, read_slice
from planetary.fleet.preparation.compile_process import compile_and_verify
from planetary.fleet.preparation.compiling import CompileTarget
from planetary.runs.rounds.preparation.preparation import prepare_run
from planetary.runs.rounds.preparation.training_options import schedule_of
from planetary.runtime.executor import open_executor
from planetary.runtime.host import host_features

MODEL = """
import jax, jax.numpy as jnp, numpy as np

def build(batch_size, sequence_length):
    keys = jax.random.split(jax.random.key(1))
    params = {
        "embed": jax.random.normal(keys[0], (256, 16)) * 0.1,
        "bias": jnp.zeros((sequence_length, 16)),
        "head": jax.random.normal(keys[1], (16, 256)) * 0.1,
        "norm": {"mean": jnp.zeros(16), "var": jnp.ones(16)},
    }

    def loss_fn(params, tokens, targets, *, key=None):
        bias, norm = params["bias"], params["norm"]
        if key is not None:
            bias = jnp.where(jax.random.bernoulli(key, 0.5, bias.shape), 2 * bias, 0.0)
        x = params["embed"][tokens] + bias
        now = norm if key is None else {"mean": x.mean((0, 1)), "var": x.var((0, 1))}
        x = (x - now["mean"]) / jnp.sqrt(now["var"] + 1e-2)
        scores = jax.nn.log_softmax(x @ params["head"])
        new = {name: 0.9 * norm[name] + 0.1 * now[name] for name in norm}
        return -jnp.take_along_axis(scores, targets[..., None], -1).mean(), {"norm": new}

    batch = np.zeros((batch_size, sequence_length), np.int32)
    return loss_fn, params, (batch, batch)
"""


@pytest.mark.processes
def test_dropout_and_statistics_equal_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dropout.py").write_text(MODEL)
    plain_sync = {"compression": "none", "broadcast_compression": "none", "start_compression": "none"}
    tables = {
        "run": {"seed": 11},
        "model": {"source": f"{tmp_path / 'dropout.py'}:build"},
        "train": {"rounds": 2, "inner_steps": 3, "batch_size": 4, "sequence_length": 32, "micro_batches": 2},
        "optimizer": {"weight_decay": 0.0, "warmup_steps": 2, "schedule": "constant"},
        "outer": {"learning_rate": 1.0, "momentum": 0.0, "merge": "mean"},
        "eval": {"batches": 1},
        "sync": plain_sync,
        "fabric": {"threads": 1},
    }
    cache = tmp_path / "cache"
    run = planetary.train(tables, workers=1, cache=cache)
    run = run.resume(rounds=4, workers=1, cache=cache)
    trained = run.params()

    config = run.config
    prepared = prepare_run(config, cache, lambda _: None)
    published = compile_and_verify(
        prepared.step.portable,
        prepared.step.spec,
        CompileTarget("cpu", "host", host_features()),
        params=prepared.params,
        buffers=prepared.buffer_values,
        cache=cache,
    )
    executor = open_executor(
        BlobStore(cache / "blobs").verified_path(published.digest), prepared.step.spec, backend="cpu"
    )
    executor.load(prepared.params, prepared.buffer_values, None)
    order, schedule, step = prepared.data.order(config), schedule_of(config, config.total_inner_steps), 0
    for lease in range(4):
        for batch in batches(read_slice(order.locate(lease)), 4, 32):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(11), lease), step)
            words = [jax.random.key_data(jax.random.fold_in(key, part)) for part in range(2)]
            executor.train_step(step, schedule.rate(step), [*batch, np.concatenate(words)])
            step += 1
    plain = executor.read_params()
    executor.close()

    assert step == 12
    for name, expected in plain.items():
        np.testing.assert_array_equal(trained[name], expected, err_msg=name)
    assert (trained["bias"] != 0).all(), "part of the bias was never trained"
    assert not np.array_equal(trained["norm.var"], np.ones(16)), "the statistics did not change"
