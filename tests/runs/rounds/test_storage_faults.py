"""What a disk can do wrong to the gateway and to workers of a simulated run, one thing at a time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
from fault_schedules import LIMIT_S, ROUNDS, WORKERS, check, check_no_finished_round_was_lost
from small_training import SmallTraining, small_training

from planetary.artifacts.jsonl import JsonLinesWriter, read_json_lines
from planetary.artifacts.store import BlobStore
from planetary.core.errors import LocalProtocolError, PlanetaryError, ResourceError, UserError
from planetary.fleet.controller.controller import RunPhase
from planetary.fleet.gateway.run_files import CONFIG, LOCK, RunLock
from planetary.fleet.protocol.records import WorkerLost
from planetary.machine.journal import replay
from planetary.runs.rounds.records import CheckpointWritten, LeaseAssigned, RoundMerged, RoundsRecord, RoundsResumed
from planetary.runs.rounds.state import ControllerState, contradiction
from planetary.simulation.disk import SimulatedDisk, SimulatedFiles, flip_bit
from planetary.simulation.event_loop import ProcessKilled
from planetary.simulation.faults import Fault, FaultKind
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.world import World

MODES = pytest.mark.parametrize("mode", [{}, {"ring": True}, {"overlap": True}], ids=["star", "ring", "overlap"])
ONE_MODE_AT_ONCE = pytest.mark.parametrize(
    "mode",
    [{}, *(pytest.param({mode: True}, marks=pytest.mark.slow) for mode in ("ring", "overlap"))],
    ids=["star", "ring", "overlap"],
)
"""`make test` has the star."""


def of(cluster: SimCluster, *kinds: type[RoundsRecord]) -> list:
    return [record for record in cluster.journal if isinstance(record, kinds)]


def calm(seed: int = 0, **mode: bool) -> SimCluster:
    cluster = SimCluster(seed, small_training(rounds=ROUNDS, workers=WORKERS, **mode), WORKERS)
    assert cluster.run(LIMIT_S)
    return cluster


def struck(*faults: Fault, **mode: bool) -> SimCluster:
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS, **mode), WORKERS, faults)
    assert cluster.run(LIMIT_S)
    check(cluster)
    return cluster


@pytest.mark.slow
@ONE_MODE_AT_ONCE
def test_a_checkpoint_does_not_outlive_the_records_of_its_round(mode: dict[str, bool]) -> None:
    """The power goes between the checkpoint of a round and the record of its end: what was not synced is lost."""
    [written] = [r for r in of(calm(**mode), CheckpointWritten) if r.round == 3]
    marks = []
    for before_s in (0.001, 0.02, 0.05, 0.12):
        cluster = struck(Fault(written.t - before_s, "cut_power"), **mode)
        assert cluster.struck == ["cut_power"]
        marks += [record.mark.round for record in of(cluster, RoundsResumed)]
    assert set(marks) == {2, 3}  # the first of them had the checkpoint, the last had not


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 4), marks=pytest.mark.slow)], ids=str)
@ONE_MODE_AT_ONCE
def test_lying_disk_costs_journal_lines_and_no_parameters(mode: dict[str, bool], seeds: range) -> None:
    """It said that it had synced, and had not: the checkpoint is what the run goes on from, whatever lines are gone."""
    lost = 0
    for seed in seeds:  # how much is left of what was not synced is up to chance
        [written] = [r for r in of(calm(seed, **mode), CheckpointWritten) if r.round == 3]
        cluster = SimCluster(seed, small_training(rounds=ROUNDS, workers=WORKERS, **mode), WORKERS)
        cluster.disk.lies = True
        cluster.world.at(written.t + 0.001, lambda it=cluster: it.strike(Fault(0.0, "cut_power")))
        assert cluster.run(LIMIT_S)
        assert cluster.finished is not None
        assert cluster.finished.ok
        [resumed] = of(cluster, RoundsResumed)
        before = cluster.journal[: cluster.journal.index(resumed)]
        lost += not [r for r in before if isinstance(r, CheckpointWritten) and r.round == 3]
        assert resumed.mark.round == 3
        assert contradiction(cluster.controller.state) == ""
        assert [r.round for r in of(cluster, RoundMerged)][-3:] == [4, 5, 6]
    assert lost


def test_a_torn_line_is_cut_off_and_nothing_before_it_is_lost() -> None:
    [finished] = [r for r in of(calm(), RoundMerged) if r.round == 3]
    cluster = struck(Fault(finished.t - 0.001, "torn_write"))
    assert cluster.struck == ["torn_write"]
    assert [record.mark.round for record in of(cluster, RoundsResumed)] == [3]


def test_gateway_without_journal_space_resumes_with_room() -> None:
    """A gateway without space for its journal fails and goes on when there is some."""
    cluster = struck(Fault(8.0, "no_space", seconds=5.0))
    assert "no_space" in cluster.struck
    assert len(of(cluster, RoundsResumed)) >= 1
    gateways = [process for process in cluster.world.processes if process.name.startswith("gateway")]
    assert [process.status for process in gateways[:2]] == [7, 7]  # it is started in vain while the disk is full
    assert gateways[-1].status == 0


def test_a_run_folder_on_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    world = World(0)
    disk, process = SimulatedDisk(world.random, lambda kind: None, world.clock), world.process("p", "n")
    disk.no_space = True
    with pytest.raises(ResourceError, match="No space left on device"):
        RunLock(tmp_path, disk.of(process))
    disk.make_room()
    RunLock(tmp_path, disk.of(process)).release()
    assert (tmp_path / LOCK).read_text() == ""


def artifact_of(cluster: SimCluster) -> bytes:
    """Return the bytes that its training makes of the step, in a store of its own."""
    assert isinstance(cluster.training, SmallTraining)
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(Path(folder))
        return store.get(cluster.training.artifact(store, cluster.training.spec))


def test_a_damaged_blob_is_fetched_again() -> None:
    cluster = struck(Fault(5.0, "flip_blob", worker=1), Fault(5.1, "kill_worker", worker=1))
    assert cluster.struck == ["flip_blob", "kill_worker"]
    assert [record.worker for record in of(cluster, WorkerLost)] == ["node-1/0"]
    for node in cluster.nodes:
        [blob] = node.cached()
        assert blob.read_bytes() == artifact_of(cluster)


def test_a_damaged_blob_at_the_gateway_is_never_sent() -> None:
    """Its run ends with the reason, or goes on without the worker that needs it; then it is made again."""
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS), WORKERS)

    def damage() -> None:
        [blob] = (cluster.folder / "cache" / "blobs").glob("blobs/*/*")
        flip_bit(blob, cluster.world.random)
        for path in cluster.nodes[1].cached():
            path.unlink()
        cluster.nodes[1].kill_worker()

    cluster.world.at(6.0, damage)
    cluster.world.at(20.0, lambda: cluster.strike(Fault(0.0, "kill_gateway")))
    assert cluster.run(LIMIT_S)
    check(cluster)
    for node in cluster.nodes:
        assert [path.read_bytes() for path in node.cached()] in ([], [artifact_of(cluster)])


def test_a_resumed_run_uses_no_number_of_a_lost_task() -> None:
    """The power cut takes the records of tasks that workers still run: later tasks have other numbers."""
    [first] = [r for r in of(calm(), LeaseAssigned) if r.lease == 3]
    cluster = struck(Fault(first.t + 0.1, "cut_power"))
    [resumed] = of(cluster, RoundsResumed)
    after = cluster.journal[cluster.journal.index(resumed) :]
    assert min(r.task for r in after if isinstance(r, LeaseAssigned)) > 1000


def test_killed_process_returns_its_lock_and_writes_no_more(tmp_path: Path) -> None:
    world = World(0)
    disk = SimulatedDisk(world.random, lambda kind: None, world.clock)
    first, second = world.process("first", "n"), world.process("second", "n")
    RunLock(tmp_path, disk.of(first))
    writer = JsonLinesWriter(tmp_path / "lines.jsonl", disk.of(first))
    writer.append({"a": 1})
    with pytest.raises(ResourceError, match="another gateway"):
        RunLock(tmp_path, disk.of(second))
    first.kill()
    with pytest.raises(ProcessKilled):
        writer.append({"a": 2})
    RunLock(tmp_path, disk.of(second)).release()
    assert (tmp_path / "lines.jsonl").read_bytes() == b'{"a":1}\n'


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill_gateway", "kill_worker"])
def test_a_process_can_be_killed_at_any_of_its_steps(kind: FaultKind) -> None:
    """Every few hundred callbacks of the event loop, whatever it was doing."""
    training = small_training(rounds=2, workers=2)
    total = 0

    def count() -> None:
        nonlocal total
        total += 1

    assert SimCluster(0, training, 2).run(LIMIT_S, count)
    for step in range(50, total, total // 12):
        cluster = SimCluster(0, training, 2)
        left = step

        def kill(cluster: SimCluster = cluster) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                cluster.strike(Fault(0.0, kind))

        assert cluster.run(LIMIT_S, kill), cluster.waits_for
        assert cluster.struck == [kind]
        assert cluster.controller.state.round == 2


def test_a_contradiction_is_found_and_explained() -> None:
    cluster = calm()
    controller = cluster.controller
    controller.validate()
    controller.state.ledger.held.append(0)
    with pytest.raises(LocalProtocolError, match=r"the ledger has the leases .* as held, the rounds under way have"):
        controller.validate()
    controller.state.ledger = msgspec.structs.replace(controller.state.ledger, next=1, returned=[5], held=[])
    with pytest.raises(LocalProtocolError, match="the ledger of leases is damaged"):
        controller.validate()
    controller.phase = RunPhase.RUNNING
    with pytest.raises(LocalProtocolError, match="running, and its journal says done"):
        controller.validate()


def test_memory_is_bounded_after_every_event() -> None:
    """A gateway that would keep a version more than it needs is found at the event after which it does."""
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS), WORKERS)

    def keep_all() -> None:
        cluster.parameters.keep = lambda versions: None

    cluster.world.at(2.0, keep_all)
    with pytest.raises(AssertionError, match="the gateway keeps the parameters of 5 rounds"):
        cluster.run(LIMIT_S)
    versions, results = calm().most_kept
    assert 2 <= versions <= 4
    assert 1 <= results <= 2 * (WORKERS + 1)


def test_a_wait_without_a_deadline_is_found() -> None:
    """A controller that forgets when a worker is stuck, or how long to wait for one, contradicts itself."""
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS), WORKERS)

    def forget() -> None:
        cluster.controller.training.wait = lambda worker: None

    cluster.world.at(5.0, forget)
    with pytest.raises(LocalProtocolError, match="worker node-0/0 has a task and no deadline"):
        cluster.run(LIMIT_S)
    deserted = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS), 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(calm().controller.membership), "desertion_deadline", None)
        with pytest.raises(LocalProtocolError, match="no worker is connected, and nothing ends the wait for one"):
            deserted.run(LIMIT_S)


@MODES
def test_a_doubled_line_of_a_journal_is_named_wherever_it_is(mode: dict[str, bool], tmp_path: Path) -> None:
    """A copy of the run folder was put together wrongly; a resumed run says which line to remove."""
    lines = [msgspec.json.encode(record) for record in calm(**mode).journal]
    path = tmp_path / "events.jsonl"
    for number in range(1, len(lines) + 1):
        path.write_bytes(b"\n".join([*lines[:number], *lines[number - 1 :], b""]))
        with pytest.raises(UserError, match=f"line {number + 1} repeats line {number}"):
            replay(read_json_lines(path, RoundsRecord), ControllerState(), path)


@pytest.mark.parametrize("skipped", ["none", pytest.param("new checkpoint", marks=pytest.mark.slow), "checkpoints"])
def test_checkpoint_outlasts_a_power_cut_by_synced_folders(skipped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated disk forgets names in folders that were not synced, so that a folder left out shows."""
    synced = SimulatedFiles.sync_folder

    def sync_folder(self: SimulatedFiles, path: Path) -> None:
        if path.name.startswith(".writing-") if skipped == "new checkpoint" else path.name == skipped:
            return
        synced(self, path)

    monkeypatch.setattr(SimulatedFiles, "sync_folder", sync_folder)
    lost = 0
    for seed in range(6):
        cluster = SimCluster(seed, small_training(rounds=ROUNDS, workers=WORKERS), WORKERS)

        def cut(cluster: SimCluster = cluster) -> None:
            cluster.strike(Fault(0.0, "cut_power"))

        cluster.world.at(12.0, cut)
        try:
            assert cluster.run(LIMIT_S)
            assert "cut_power" in cluster.struck
            check_no_finished_round_was_lost(cluster)
        except (AssertionError, PlanetaryError):
            lost += 1
    assert (lost > 0) == (skipped != "none")


def test_a_cut_configuration_is_not_resumed_with_defaults() -> None:
    cluster = SimCluster(0, small_training(rounds=ROUNDS, workers=WORKERS), WORKERS)
    path = cluster.run_folder / CONFIG

    def cut() -> None:
        assert cluster.kill_gateway()
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[: len(lines) // 2]))

    cluster.world.at(8.0, cut)
    with pytest.raises(UserError, match=r"config.toml does not end with the line .* was cut"):
        cluster.run(LIMIT_S)
