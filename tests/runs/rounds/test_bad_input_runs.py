"""Whole commands, as a user types them, with something wrong: what is said, the exit code, and what is kept."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_input_support import Ended, events, gateway, node_flags, run, started, write_config

from planetary.artifacts.checkpoint import load_latest, verify_checkpoint
from planetary.cli import exit_codes
from planetary.core.errors import (
    ClosedError,
    CompileError,
    NumericsError,
    PeerError,
    ResourceError,
    TrustError,
    UserError,
)
from planetary.net.authority import Authority
from planetary.net.invite import mint
from waiting import HANG_S, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.compiles]

CODE = exit_codes.EXIT_CODES


def train(folder: Path, cache: Path, *arguments: object) -> Ended:
    return run("train", *arguments, f"--cache={cache}", cwd=folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """The folder of a run of 3 rounds, with checkpoints of rounds 2 and 3. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("finished")
    ended = train(folder, shared_cache, write_config(folder))
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


# --- before the run begins ------------------------------------------------------------------------------------


def test_failed_start_tells_the_cause_and_frees_its_folder(tmp_path: Path, shared_cache: Path) -> None:
    (tmp_path / "junk.mlir").write_text("this is no StableHLO")
    config = write_config(tmp_path)
    ended = train(tmp_path, shared_cache, config, "--set=model.source=junk.mlir")
    assert ended.code == CODE[CompileError]
    assert "junk.mlir: cannot parse the model" in ended.said
    ended = train(tmp_path, shared_cache, config, "--set=data.source=nowhere.txt")
    assert ended.code == CODE[UserError]
    assert "cannot read the training data" in ended.said
    assert "nowhere.txt: No such file" in ended.said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"], "nothing was begun, nothing is numbered"


def test_a_port_in_use_names_its_holder(tmp_path: Path, shared_cache: Path) -> None:
    config = write_config(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        workers = train(tmp_path, shared_cache, config, f"--set=fabric.port={port}")
        dashboard = train(tmp_path, shared_cache, config, f"--dashboard-port={port}")
    for ended in (workers, dashboard):
        assert ended.code == CODE[ResourceError]
        assert f"127.0.0.1:{port}" in ended.said
        assert "choose another port" in ended.said
        if Path("/proc/net/tcp").exists():
            assert f"process {os.getpid()}" in ended.said


def test_a_run_folder_has_one_gateway(tmp_path: Path, shared_cache: Path) -> None:
    config = write_config(tmp_path)
    with gateway(config, tmp_path, shared_cache, plain=True) as (first, announced):
        wait_until(lambda: events(tmp_path / "run"), "the run began", process=first)
        second = run("gateway", f"--resume={tmp_path / 'run'}", "--port=0", "--gateway-port=0", cwd=tmp_path)
        third = train(tmp_path, shared_cache, f"--resume={tmp_path / 'run'}")
        for ended in (second, third):
            assert ended.code == CODE[ResourceError]
            assert f"another gateway (process {first.pid}) is running the run" in ended.said
        again = train(tmp_path, shared_cache, config, f"--run-dir={tmp_path / 'run'}")
        assert again.code == CODE[UserError]
        assert "already holds a run" in again.said
        # The first one never noticed.
        with started("node-manager", *node_flags(announced, tmp_path, shared_cache), cwd=tmp_path) as node:
            assert first.wait(60) == 0, (tmp_path / "gateway.log").read_text()
            assert node.wait(20) == 0
    assert events(tmp_path / "run")[-1]["ok"]


def test_pcps_experiment_runs(tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_config(tmp_path)
    experiment = {
        "model_path": "planetary.models.nanochat:build",
        "data_path": "corpus.txt",
        "learning_rate": 0.003,
        "batch_size": 2,
        "block_size": 16,
        "tau": 3,
        "outer_loop_steps": 2,
        "nesterov_momentum": 0.9,
        "wandb_project": "planets",
        "wandb_run_name": "pcp",
    }
    (tmp_path / "experiment.json").write_text(json.dumps(experiment))
    size = ["--set=model.options.n_layer=1", "--set=model.options.n_head=2", "--set=model.options.n_embd=32"]
    ended = train(tmp_path, shared_cache, "experiment.json", *size, "--workers=1", "--json")
    assert ended.code == 0, ended.err
    *before, last = events(tmp_path / "runs" / "pcp")
    assert (last["event"], last["ok"]) == ("run_finished", True)
    assert [one["round"] for one in before if one["event"] == "round_finished"] == [1, 2]


# --- who may join -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[tuple[Path, list[str]]]:
    """A gateway with TLS that waits for workers: its folder, and the flags that lead to it."""
    folder = tmp_path_factory.mktemp("waiting")
    with gateway(write_config(folder), folder, shared_cache) as (process, announced):
        wait_until(lambda: events(folder / "run"), "the run began", process=process)
        yield folder, [f"--host={announced.host}", f"--port={announced.port}"]


def test_node_managers_end_with_what_is_wrong_with_their_token(waiting: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, address = waiting
    own = Authority.open(folder / "state", time.time())
    other = Authority.open(tmp_path / "state", time.time())
    expired = mint(own.invite_secret, own.fingerprint, expires=time.time() - 7200)
    forged = mint(other.invite_secret, own.fingerprint)
    foreign = mint(other.invite_secret, other.fingerprint)
    good = mint(own.invite_secret, own.fingerprint)
    for token, words in (
        (expired, "expired 2 hours ago; ask for a new one"),
        (forged, "was not made by this gateway; make one there with `planetary invite`"),
        (foreign, "is not the gateway that the invite token is for"),
        (good[:-8], "malformed"),
        ("hello", "malformed: expected 'plt1.'"),
    ):
        ended = run("node-manager", *address, f"--token={token}", f"--state={tmp_path / 'node'}", cwd=tmp_path)
        assert ended.code == CODE[TrustError], ended.err
        assert words in " ".join(ended.err.split())
        assert "plt1.ey" not in ended.err, "a token is a secret"


def test_a_plain_worker_learns_that_the_gateway_wants_tls(waiting: tuple[Path, list[str]], tmp_path: Path) -> None:
    _, (host, port) = waiting
    connect = f"--connect={host.partition('=')[2]}:{port.partition('=')[2]}"
    state = f"--state={tmp_path / 'node'}"
    ended = run("worker", connect, "--plain-loopback", "--give-up-after=0.5", state, cwd=tmp_path)
    assert ended.code == CODE[PeerError]
    assert "if it is a gateway with TLS, an invite token is needed" in ended.said


# --- while it runs ------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_workers_and_the_run(tmp_path: Path, shared_cache: Path) -> None:
    config = write_config(tmp_path, optimizer__learning_rate="1e30", optimizer__warmup_steps=0)
    ended = train(tmp_path, shared_cache, config)
    assert ended.code == CODE[NumericsError], ended.err
    assert "no usable worker is left" in ended.said
    assert "at inner step 2 of 3" in ended.said
    assert "A lower optimizer.learning_rate" in ended.said
    journal = events(tmp_path / "runs" / "tiny")
    failed = [e for e in journal if e["event"] == "task_failed"]
    assert failed
    assert {(e["worker"], e["kind"], e["step"]) for e in failed} == {("local/0", "numerics", 2)}
    last = journal[-1]
    assert (last["event"], last["ok"], last["kind"]) == ("run_finished", False, "numerics")
    assert not [e for e in journal if e["event"] in ("delta_accepted", "round_finished")]


def test_stopped_gateway_says_how_to_go_on_and_keeps_its_nodes(tmp_path: Path, shared_cache: Path) -> None:
    config = write_config(tmp_path, train__rounds=100_000)
    with gateway(config, tmp_path, shared_cache, plain=True) as (process, announced):
        flags = node_flags(announced, tmp_path, shared_cache)
        with started("node-manager", *flags, cwd=tmp_path) as node:

            def two_rounds() -> bool:
                return sum(e["event"] == "round_finished" for e in events(tmp_path / "run")) >= 2

            wait_until(two_rounds, "two rounds", process=process)
            process.terminate()
            assert process.wait(HANG_S) == CODE[ClosedError]
            assert node.poll() is None, "it dials until the gateway is back"
    log = (tmp_path / "gateway.log").read_text()
    assert f"planetary gateway --resume {tmp_path / 'run'}" in " ".join(log.split())
    assert "Traceback" not in log
    finished = [e["round"] for e in events(tmp_path / "run") if e["event"] == "round_finished"]
    assert load_latest(tmp_path / "run" / "checkpoints").info.round == finished[-1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own for checkpoints that holds two of them and not three."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    if shutil.which("mount") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can make a small file system")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "planetary-test", str(folder)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_run_on_a_full_disk_pauses_until_there_is_room(tmp_path: Path, shared_cache: Path, small_disk: Path) -> None:
    folder = tmp_path / "run"
    config = write_config(tmp_path, train__rounds=5, fabric__latency_budget_s=0.5, checkpoint__keep=2)
    arguments = ("train", config, f"--run-dir={folder}", f"--cache={shared_cache}")
    with started(*arguments, cwd=tmp_path, log=tmp_path / "train.log") as process:
        wait_until(lambda: any(e["event"] == "run_paused" for e in events(folder)), "a pause", process=process)
        assert verify_checkpoint(small_disk / "round-000002") == ""
        subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
        assert process.wait(HANG_S) == 0, (tmp_path / "train.log").read_text()
    journal, told = events(folder), (tmp_path / "train.log").read_text()
    failed = [e for e in journal if e["event"] == "checkpoint_failed"]
    assert [e["round"] for e in failed] == [3, 4]
    assert "No space left on device; the checkpoint of round 2 stays valid" in failed[0]["reason"]
    assert [e["round"] for e in journal if e["event"] == "checkpoint_written"] == [1, 2, 4, 5]
    assert [e["round"] for e in journal if e["event"] == "round_finished"] == [1, 2, 3, 4, 5]
    assert load_latest(small_disk).info.round == 5
    assert "up to 5 are on the disk at once" in told
    assert "the run will pause when a checkpoint does not fit" in told
    assert "The run pauses until there is room; the newest is of round 2" in told
    assert "checkpoints are written again, beginning with that of round 4" in told


def test_a_full_disk_at_the_end_is_no_success_and_no_loss(tmp_path: Path, shared_cache: Path, small_disk: Path) -> None:
    """The disk becomes full after the start, and the one checkpoint is that of the last round."""
    folder, ballast = tmp_path / "run", small_disk / "ballast"
    config = write_config(tmp_path, train__rounds=5, fabric__latency_budget_s=0.5, checkpoint__every=5)
    arguments = ("train", config, f"--run-dir={folder}", f"--cache={shared_cache}")
    with started(*arguments, cwd=tmp_path, log=tmp_path / "train.log") as process:
        wait_until(lambda: events(folder), "the start", process=process)
        ballast.write_bytes(bytes(550_000))
        assert process.wait(HANG_S) == CODE[ResourceError], (tmp_path / "train.log").read_text()
    told = " ".join((tmp_path / "train.log").read_text().split())
    assert "the result of the last one could not be kept; round 0 is the newest that is" in told
    assert "make room" in told
    assert [e["round"] for e in events(folder) if e["event"] == "round_finished"] == [1, 2, 3, 4, 5]

    # A start without room for one is refused; with room the run goes on from its newest checkpoint.
    refused = train(tmp_path, shared_cache, f"--resume={folder}")
    assert refused.code == CODE[ResourceError]
    assert "make room there" in refused.said
    ballast.unlink()
    ended = train(tmp_path, shared_cache, f"--resume={folder}")
    assert ended.code == 0, ended.err
    assert [e["mark"]["round"] for e in events(folder) if e["event"] == "run_resumed"] == [0]
    assert load_latest(small_disk).info.round == 5


# --- going on -----------------------------------------------------------------------------------------------------


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def test_damaged_checkpoint_is_refused_and_the_previous_works(copied: Path, shared_cache: Path) -> None:
    checkpoints, file = copied / "runs" / "tiny" / "checkpoints", "params.safetensors"
    flip_a_byte(checkpoints / "round-000003" / file)
    before = sorted(checkpoints.rglob("*"))
    refused = train(copied, shared_cache, "--resume=runs/tiny", "--rounds=4")
    assert refused.code == CODE[TrustError]
    assert f"round-000003 is damaged: {file} has sha256" in refused.said
    offer = refused.said.rpartition("--checkpoint ")[2].split(" ")[0].rstrip(".")
    assert offer == str(checkpoints / "round-000002")
    assert sorted(checkpoints.rglob("*")) == before, "nothing is removed while a person has not decided"

    ended = train(copied, shared_cache, "--resume=runs/tiny", "--rounds=4", f"--checkpoint={offer}")
    assert ended.code == 0, ended.err
    resumed = [e for e in events(copied / "runs" / "tiny") if e["event"] == "run_resumed"]
    assert [e["mark"]["round"] for e in resumed] == [2]
    assert load_latest(checkpoints).info.round == 4
    assert verify_checkpoint(checkpoints / "round-000003") == "", "it was trained and written again"


def test_without_an_intact_checkpoint_nothing_is_offered(copied: Path, shared_cache: Path) -> None:
    for checkpoint in (copied / "runs" / "tiny" / "checkpoints").iterdir():
        flip_a_byte(checkpoint / "params.safetensors")
    ended = train(copied, shared_cache, "--resume=runs/tiny", "--rounds=4")
    assert ended.code == CODE[TrustError]
    assert "No other checkpoint in this folder is intact" in ended.said


def test_a_damaged_compiled_step_is_built_again(copied: Path, shared_cache: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    # Other tests' processes write to the cache meanwhile: an unfinished file may be gone before it is copied.
    shutil.copytree(shared_cache, cache, ignore=shutil.ignore_patterns(".new-*"))
    for blob in (cache / "blobs" / "blobs").rglob("*"):
        if blob.is_file():
            flip_a_byte(blob)
    ended = train(copied, cache, "--resume=runs/tiny", "--rounds=4")
    assert ended.code == 0, ended.err
    assert load_latest(copied / "runs" / "tiny" / "checkpoints").info.round == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("optimizer.learning_rate=0.1", "train.rounds=4"), "optimizer.learning_rate = 0.1 (it has "),
        (("optimizer.learning_rate=0.1",), "nothing to resume in runs/tiny: all its 3 rounds are trained"),
        (("train.rounds=2",), "with train.rounds = 2: 3 rounds are trained"),
    ],
)
def test_a_resumed_run_is_the_same_run(copied: Path, shared_cache: Path, changes: tuple[str, ...], words: str) -> None:
    ended = run(
        "gateway",
        "--resume=runs/tiny",
        *(f"--set={change}" for change in changes),
        f"--cache={shared_cache}",
        "--plain-loopback",
        "--port=0",
        "--gateway-port=0",
        cwd=copied,
    )
    assert ended.code in (CODE[TrustError], CODE[UserError])
    assert words in ended.said


def test_a_damaged_journal_is_refused_by_line(copied: Path, shared_cache: Path) -> None:
    journal = copied / "runs" / "tiny" / "events.jsonl"
    lines = journal.read_text().splitlines()
    lines[4] = lines[4][:20]
    journal.write_text("\n".join(lines) + "\n")
    ended = train(copied, shared_cache, "--resume=runs/tiny", "--rounds=4")
    assert ended.code == CODE[UserError]
    assert "events.jsonl" in ended.said
    assert "line 5" in ended.said
