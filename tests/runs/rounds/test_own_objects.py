"""Objects of a user's file take part in a run: each example of docs/extending.md, in simulated time."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fault_schedules import LIMIT_S, recorded_deltas
from small_training import small_policy, small_training

from planetary.artifacts.checkpoint import load_latest
from planetary.artifacts.durable_files import DISK
from planetary.artifacts.jsonl import read_json_lines
from planetary.artifacts.store import BlobStore
from planetary.core.config import config_from_tables
from planetary.core.configuration.own_files import own_files
from planetary.core.errors import RemoteProtocolError, UserError
from planetary.core.extension_points import CODECS, SCHEDULES
from planetary.core.registry import files_of
from planetary.core.schedules import Schedule
from planetary.fleet.gateway.run_files import CHECKPOINTS, METRICS, keep_code
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import RunFinished
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.records import ContributionsJudged, LeaseAssigned, ParametersSent, RoundMerged
from planetary.runs.rounds.worker.role import load_code
from planetary.simulation.rounds.cluster import SimCluster

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n(?=# (\w+\.py))(.*?)```", PAGE, re.DOTALL))
PLAIN = ("outer.momentum=0", "outer.learning_rate=1", "outer.merge=mean", "outer.loss_rise=0")


def run(folder: Path, *given: str, seed: int = 1) -> SimCluster:
    """Train four rounds of two workers with the page's files in `folder`."""
    for name, text in EXAMPLES.items():
        (folder / name).write_text(text)
    cluster = SimCluster(seed, small_training(rounds=4, workers=2, given=(*PLAIN, *given)), 2, ())
    with recorded_deltas(cluster):
        assert cluster.run(LIMIT_S), f"hangs: {cluster.waits_for}"
    assert [r for r in cluster.journal if isinstance(r, RunFinished)]
    return cluster


def of(cluster: SimCluster, kind: type) -> list:
    return [record for record in cluster.journal if isinstance(record, kind)]


def bytes_up(cluster: SimCluster) -> int:
    return sum(line.bytes_up for line in read_json_lines(cluster.folder / "run" / METRICS, RoundMetrics))


def test_every_example_is_short() -> None:
    assert EXAMPLES
    assert {name: text.count("\n") for name, text in EXAMPLES.items() if text.count("\n") > 40} == {}


def test_an_own_codec_makes_the_bytes_of_updates(tmp_path: Path) -> None:
    """A tensor of a worker's delta has one magnitude, and the run's folder has the text."""
    coded = run(tmp_path, f"sync.compression={tmp_path}/my_codec.py:Ternary")
    assert coded.received
    assert {
        len(np.unique(np.abs(values[values != 0]))) for delta in coded.received.values() for values in delta.values()
    } == {1}
    plain = run(tmp_path, "sync.compression=float32")
    assert bytes_up(coded) < bytes_up(plain)
    assert (coded.folder / "run" / "code" / "my_codec.py").read_text() == EXAMPLES["my_codec.py"]


def test_an_own_topology_decides_who_trains(tmp_path: Path) -> None:
    """Two workers take turns, where the star has both train in each round."""
    sampled = run(tmp_path, f"sync.topology={tmp_path}/my_topology.py:Sampled")
    trained = {(lease.round, lease.worker) for lease in of(sampled, LeaseAssigned)}
    assert [round_ for round_, _ in sorted(trained)] == [1, 2, 3, 4]
    assert len({worker for _, worker in trained}) == 2
    both = {(lease.round, lease.worker) for lease in of(run(tmp_path), LeaseAssigned)}
    assert len(both) == 8


def test_an_own_codec_sends_versions_too(tmp_path: Path) -> None:
    own = f"{tmp_path}/my_codec.py:Ternary"
    cluster = run(tmp_path, f"sync.compression={own}", f"sync.broadcast_compression={own}")
    assert len(of(cluster, RoundMerged)) == 4


def final(cluster: SimCluster) -> dict[str, np.ndarray]:
    """Return the parameters of the last checkpoint."""
    return dict(load_latest(cluster.folder / "run" / CHECKPOINTS).params)


def test_an_own_outer_optimizer_takes_the_step(tmp_path: Path) -> None:
    """All coordinates of a tensor of one block move equally far, from the start to the end of the only round."""
    cluster = run(tmp_path, f"outer.optimizer={tmp_path}/my_outer.py:Signed", "train.rounds=1")
    started = cluster.training.prepared.params
    for name, values in final(cluster).items():
        moved = np.abs(values - started[name])
        np.testing.assert_allclose(moved, moved.reshape(-1)[0], rtol=1e-5)


def test_workers_of_a_ring_take_the_step_of_an_own_optimizer(tmp_path: Path) -> None:
    """All of them come to one state, whose digest the gateway compares."""
    cluster = run(tmp_path, "sync.topology=ring", f"outer.optimizer={tmp_path}/my_outer.py:Signed", "train.rounds=2")
    assert [record.round for record in of(cluster, RoundMerged)] == [1, 2]


def test_workers_relay_by_an_own_merge_rule(tmp_path: Path) -> None:
    """A worker that merged otherwise would have another digest, and fail."""
    own = f"outer.merge={tmp_path}/my_rule.py:Nearest"
    cluster = run(tmp_path, own, "sync.compression=sign", "sync.broadcast_compression=relay")
    assert {record.form for record in of(cluster, ParametersSent)} >= {"relay"}


def test_an_own_merge_rule_makes_the_result(tmp_path: Path) -> None:
    """A round of the rule is no longer than one of the mean; the journal names the file's digest."""
    own = run(tmp_path, f"outer.merge={tmp_path}/my_rule.py:Nearest")
    plain = run(tmp_path, "outer.merge=mean")
    assert of(own, RoundMerged)[0].delta_norm < of(plain, RoundMerged)[0].delta_norm
    assert {record.rule.partition("@")[0] for record in of(own, ContributionsJudged)} == {"my_rule.py:Nearest"}


def test_an_own_overlap_begins_the_leases(tmp_path: Path) -> None:
    own = f"sync.overlap={tmp_path}/my_overlap.py:EveryOther"
    cluster = run(tmp_path, own, "sync.compression=float32")
    ahead = {record.version: bool(record.ahead) for record in of(cluster, LeaseAssigned) if record.version}
    assert ahead == {version: version % 2 == 0 for version in ahead}
    assert len(ahead) > 1


def test_an_own_judge_refuses_by_its_reason(tmp_path: Path) -> None:
    cluster = run(tmp_path, f"outer.judge={tmp_path}/my_judge.py:ByLoss", "train.rounds=1")
    reasons = [measure.refused for one in of(cluster, ContributionsJudged) for measure in one.measures]
    assert [reason for reason in reasons if reason.startswith("its loss is 12.5")]
    assert "" in reasons


def test_workers_fetch_the_text_of_an_own_schedule(tmp_path: Path) -> None:
    """They compute the rate of each step, and would fail without the file."""
    cluster = run(tmp_path, f"optimizer.schedule={tmp_path}/my_schedule.py:Steps")
    assert (cluster.folder / "run" / "code" / "my_schedule.py").read_text() == EXAMPLES["my_schedule.py"]
    pinned = SCHEDULES.pin(f"{tmp_path}/my_schedule.py:Steps")
    policy = msgspec.structs.replace(small_policy(rounds=1, workers=1), schedule=Schedule(kind=pinned))
    assert [file.file for file in policy.code] == ["my_schedule.py"]


def test_what_an_own_object_declares_is_checked(tmp_path: Path) -> None:
    """The file is not run to read the configuration, so that its needs are checked as the run starts."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
    config = config_from_tables({}, [f"sync.overlap={tmp_path}/my_overlap.py:EveryOther", "outer.merge=mean"])
    with pytest.raises(UserError, match=r"sync.compression: expected a codec with sync.overlap = "):
        own_files(config, "the configuration")
    config = config_from_tables({}, [f"outer.merge={tmp_path}/my_rule.py:Nearest", "outer.trimmed=0.3"])
    with pytest.raises(UserError, match=r"outer.trimmed: expected 0.2 .* only trimmed_mean"):
        own_files(config, "the configuration")


def test_a_worker_that_runs_no_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my_codec.py").write_text(EXAMPLES["my_codec.py"])
    pinned = CODECS.pin(f"{tmp_path}/my_codec.py:Ternary")
    policy = small_policy(rounds=1, workers=1)
    policy = msgspec.structs.replace(policy, compression=rm.Compression(up=pinned))
    hello = m.Hello(
        role="worker",
        protocol=m.FABRIC.version,
        software="test",
        token="",
        worker="a/0",
        node="a",
        pid=1,
        backend="cpu",
        target="host",
        iree_version=policy.iree_version,
    )
    refusal = policy.refuse(hello)
    assert refusal is not None
    assert (refusal.code, "my_codec.py" in refusal.reason, "--allow-code" in refusal.reason) == ("code", True, True)
    assert policy.refuse(msgspec.structs.replace(hello, runs_code=True)) is None


def test_a_run_goes_on_with_the_same_text_only(tmp_path: Path) -> None:
    path = tmp_path / "my_codec.py"
    path.write_text(EXAMPLES["my_codec.py"])
    store, folder = BlobStore(tmp_path / "blobs"), tmp_path / "run"
    pinned = files_of([CODECS.pin(f"{path}:Ternary")])
    keep_code(folder, pinned, store, DISK)
    keep_code(folder, pinned, store, DISK)
    assert store.get(pinned[0].digest) == path.read_bytes()
    path.write_text(EXAMPLES["my_codec.py"] + "# changed\n")
    with pytest.raises(UserError, match="is not the file that the run began with"):
        keep_code(folder, files_of([CODECS.pin(f"{path}:Ternary")]), store, DISK)


@pytest.mark.parametrize(("name", "error"), [("my_codec.py:Ternary", UserError), ("", RemoteProtocolError)])
def test_a_worker_refuses_code_by_itself(tmp_path: Path, name: str, error: type[Exception]) -> None:
    """Neither a text without the flag nor a path of the worker's machine is run, whatever the gateway sends."""
    path = tmp_path / "loud.py"
    path.write_text("raise SystemExit(3)")
    codec = f"{name}@{'0' * 64}" if name else f"{path}:Any"
    with pytest.raises(error):
        load_code([codec], files_of([codec]), BlobStore(tmp_path), allowed=False)
