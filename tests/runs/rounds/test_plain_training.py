"""One worker, outer rate 1 and no momentum is plain training, bit for bit, through the whole fabric."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from planetary.artifacts.checkpoint import load_latest
from planetary.artifacts.store import BlobStore
from planetary.core.config import apply_overrides, load_config
from planetary.core.configuration.toml import to_toml
from planetary.data.reader import batches, read_slice
from planetary.fleet.preparation.compile_process import compile_and_verify
from planetary.fleet.preparation.compiling import CompileTarget
from planetary.runs.rounds.preparation.preparation import prepare_run
from planetary.runs.rounds.preparation.training_options import schedule_of
from planetary.runtime.executor import open_executor
from planetary.runtime.host import host_features
from waiting import HANG_S

ROOT = Path(__file__).parents[3]
TINY = [
    "model.options.n_layer=1",
    "model.options.n_head=2",
    "model.options.n_embd=32",
    "train.batch_size=2",
    "train.sequence_length=16",
    "train.inner_steps=3",
    "train.rounds=40",
    "train.target_minutes=1",
    "optimizer.warmup_steps=20",
    "outer.learning_rate=1.0",
    "outer.momentum=0.0",
    "fabric.workers=1",
    "fabric.threads=1",
    "eval.batches=2",
    "sync.compression=none",
    "sync.broadcast_compression=none",
    "sync.start_compression=none",
    "outer.merge=mean",
]


@pytest.mark.processes
def test_one_worker_equals_plain_training(tmp_path: Path) -> None:
    """The run is fitted to one minute: 4 of its 40 rounds, the shortest budget, on any machine."""
    given = tmp_path / "given.toml"
    given.write_text(to_toml(apply_overrides(load_config(ROOT / "examples" / "stdlib.toml"), TINY)))
    command = [sys.executable, "-m", "planetary.cli.main", "train", str(given)]
    ended = subprocess.run(
        [*command, f"--run-dir={tmp_path / 'run'}", f"--cache={tmp_path / 'cache'}"],
        check=True,
        timeout=HANG_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "its length will be fitted to this machine" in ended.stdout
    assert "training 384 tokens in 4 rounds (budget tenth)" in ended.stdout
    trained = load_latest(tmp_path / "run" / "checkpoints")

    config = load_config(tmp_path / "run" / "config.toml")
    assert (config.train.rounds, config.train.target_minutes, config.optimizer.warmup_steps) == (4, 0, 2)
    prepared = prepare_run(config, tmp_path / "cache", lambda _: None)
    published = compile_and_verify(
        prepared.step.portable,
        prepared.step.spec,
        CompileTarget("cpu", "host", host_features()),
        params=prepared.params,
        buffers=prepared.buffer_values,
        cache=tmp_path / "cache",
    )
    store = BlobStore(tmp_path / "cache" / "blobs")
    executor = open_executor(store.verified_path(published.digest), prepared.step.spec, backend="cpu")
    executor.load(prepared.params, prepared.buffer_values, None)
    order, schedule, step = prepared.data.order(config), schedule_of(config, config.total_inner_steps), 0
    for lease in range(config.train.rounds):
        tokens = read_slice(order.locate(lease))
        for batch in batches(tokens, config.train.batch_size, config.train.sequence_length):
            executor.train_step(step, schedule.rate(step), batch)
            step += 1
    plain = executor.read_params()
    executor.close()

    assert step == 12
    assert trained.info.round == 4
    assert set(plain) == set(trained.params)
    for name, expected in plain.items():
        np.testing.assert_array_equal(trained.params[name], expected, err_msg=name)
        assert not np.array_equal(expected, prepared.params[name]), f"{name} was not trained at all"
