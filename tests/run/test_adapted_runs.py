"""Real runs of adapters: each way of synchronisation carries them alone, and the base goes to each worker once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import planetary
from planetary.core.errors import UserError

pytestmark = [pytest.mark.processes, pytest.mark.compiles]

BASE = 31_904  # parameters behind the adapters, of four bytes
WAYS: dict[str, dict[str, Any]] = {
    "star": {},
    "codec": {"compression": "sign", "broadcast_compression": "relay", "start_compression": "int8"},
    "ring": {"topology": "ring"},
    "streaming": {"overlap": "streaming", "fragments": 2, "compression": "float32"},
}


def tables(folder: Path, **sections: Any) -> dict[str, Any]:
    words = ["def", "return", "for", "in", "import", "class", "self"]
    source = random.Random(0)
    (folder / "corpus.txt").write_text("\n".join(" ".join(source.choices(words, k=8)) for _ in range(4000)))
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_hidden": 48, "vocab_size": 256}
    return {
        "model": {"source": "planetary.models.llama:build", "options": sizes},
        "adapter": {"rank": 4, "targets": ["*_proj", "lm_head"]},
        "data": {"source": str(folder / "corpus.txt")},
        "train": {"rounds": 6, "inner_steps": 20, "batch_size": 2, "sequence_length": 16},
        "optimizer": {"learning_rate": 0.02, "warmup_steps": 2, "schedule": "constant"},
        "outer": {"optimizer": "nesterov", "learning_rate": 1.0, "momentum": 0.0, "merge": "mean"},
        "fabric": {"threads": 1},
        "eval": {"batches": 4},
        **sections,
    }


@pytest.mark.parametrize("way", WAYS)
def test_adapters_alone_are_synchronised(tmp_path: Path, shared_cache: Path, way: str) -> None:
    given = tables(tmp_path, sync=WAYS[way])
    run = planetary.train(given, run_dir=tmp_path / "run", workers=2, cache=shared_cache)
    assert run.status.state == "finished"
    names = run.params().keys()
    assert names
    assert all(".lora_A" in name or ".lora_B" in name for name in names)
    losses = [metrics.eval_loss for metrics in run.metrics if metrics.eval_loss is not None]
    assert losses[-1] < losses[0]
    assert sum(array.size for array in run.params().values()) == 4864
    for metrics in run.metrics[1:]:
        sent = max(metrics.bytes_up, metrics.bytes_down, metrics.bytes_ring) / 2  # each worker's
        assert sent < 4 * BASE / 2, f"round {metrics.round}"
    if way == "star":
        made = run.save_adapter(tmp_path / "adapter")
        assert (made.round, made.param_count, made.matrices) == (6, 4864, 15)
        text = run.generate("def ", 12, seed=1)
        run.resume(rounds=8, cache=shared_cache)
        assert (run.status.state, len(run.metrics)) == ("finished", 8)
        assert text


POLICY: dict[str, Any] = {
    "rl": {
        **{"task": "sort", "groups": 2, "completions": 4, "max_tokens": 8, "imitated_rounds": 2, "held_out": 4},
        **{"verified": 1.0, "kl": 0.01, "judges": 1, "equal": "keep", "learning_rate": 0.01},
    },
    "model": {
        "source": "planetary.models.gpt2:build",
        "options": {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_position": 16},
    },
    "adapter": {"rank": 2},
    "train": {"rounds": 6, "inner_steps": 1, "batch_size": 8, "sequence_length": 15},
    "optimizer": {"warmup_steps": 0},
    "outer": {"learning_rate": 1.0, "momentum": 0.0, "merge": "mean"},
    "fabric": {"workers": 2},
    "eval": {"every": 3},
}


def test_policy_learns_with_adapters(tmp_path: Path, shared_cache: Path) -> None:
    """Every rollout is computed again from the base and the adapters: workers sample with the merged weights."""
    run = planetary.train(POLICY, run_dir=tmp_path / "run", cache=shared_cache)
    assert run.status.state == "finished"
    assert {name.split(".lora_")[1] for name in run.params()} == {"A.weight", "B.weight"}
    assert all(array.any() for array in run.params().values()), "B has moved from zero"
    assert not any(event["event"] in {"texts_refused", "worker_banned"} for event in run.events)
    assert len(run.generate("3 1 2", 4, seed=1)) > 0
    before = run.params()
    run.resume(rounds=8, cache=shared_cache)
    assert (run.status.state, run.metrics[-1].round) == ("finished", 8)
    assert any((array != before[name]).any() for name, array in run.params().items())


def test_kinds_that_train_all_parameters_refuse_adapters(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"adapter\.rank: composers and owners train all parameters"):
        planetary.train({**tables(tmp_path), "moe": {"composers": 2}}, run_dir=tmp_path / "run")
    with pytest.raises(UserError, match=r"adapter\.rank: .*name the folder there, and not in rl\.start"):
        planetary.train({**tables(tmp_path), "rl": {"task": "sort", "start": str(tmp_path)}}, run_dir=tmp_path / "run")
