"""The commands that look at runs, make tokens and export models."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

from planetary.cli.main import main
from planetary.cli.option_values import key_values, seconds
from planetary.core.errors import PeerError, UserError
from planetary.core.places import default_state_folder
from planetary.fleet.gateway.invites import read_invites
from planetary.fleet.protocol.kind_reader import FORMAT
from planetary.monitor.dashboard import Dashboard
from planetary.net.authority import Authority
from planetary.net.invite import read, verify
from planetary.run.results import write_results
from planetary.run.status_source import status_source
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.training_status import TrainingStatus


def event(name: str, t: float, **fields: object) -> str:
    return json.dumps({"event": name, "t": t, **fields}) + "\n"


@pytest.fixture
def ended_run(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    worker = {"worker": "n/0", "pid": 1, "node": "n"}
    lease = {"lease": 0, "task": 0, "round": 1, **worker}
    (folder / "events.jsonl").write_text(
        event(
            "run_started", 10.0, kind="rounds", format=FORMAT, run="demo", rounds=1, config_hash="", model="", params=8
        )
        + event("worker_joined", 10.5, **worker, backend="cpu", target="host")
        + event("round_started", 11.0, round=1, version=0, workers=1)
        + event("lease_assigned", 11.0, **lease)
        + event("delta_accepted", 20.0, **lease, tokens=100, loss=2.5, seconds=9.0)
        + event(
            "round_finished",
            20.0,
            round=1,
            workers=1,
            tokens=100,
            tokens_total=100,
            loss=2.5,
            seconds=9.0,
            compute_fraction=0.8,
            durable=False,
        )
        + event("eval_finished", 20.5, version=1, loss=2.4, batches=1)
        + event("run_finished", 21.0, round=1, ok=True, reason="done")
    )
    line = RoundMetrics(
        round=1,
        loss=2.5,
        eval_loss=2.4,
        tokens=100,
        tokens_total=100,
        seconds=9.0,
        workers=1,
        inner_steps=5,
        bytes_up=32,
        bytes_down=32,
        tokens_per_s=11.1,
        compute_fraction=0.8,
    )
    (folder / "metrics.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    return folder


def output(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_watch_on_a_pipe_prints_the_status_once(ended_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--once"]):
        assert main(["watch", str(ended_run), *flags]) == 0
        lines = output(capsys).splitlines()
        assert lines[0].startswith("run ")
        assert ": finished, round 1 of 1" in lines[0]
        assert "training loss 2.5000, held-out loss 2.4000" in lines


def test_watch_follows_a_run_to_its_end_and_stops(ended_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(ended_run), "--follow"]) == 0
    lines = output(capsys).splitlines()
    assert lines[-1] == "finished"
    assert any(line.startswith("round 1/1: train loss 2.5000, eval loss 2.4000") for line in lines)


def test_watch_reads_a_dashboard(ended_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Dashboard(status_source(str(ended_run))) as dashboard:
        assert main(["watch", dashboard.url, "--json"]) == 0
    assert msgspec.json.decode(output(capsys), type=TrainingStatus) == status_source(str(ended_run))()


def test_watch_says_what_is_wrong_with_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "absent")]) == 2
    assert main(["watch", "http://127.0.0.1:1/"]) == 6
    assert "is the run still going" in " ".join(capsys.readouterr().err.split())


def test_a_page_that_is_no_status_is_an_error() -> None:
    def broken() -> TrainingStatus:
        raise UserError("damaged")

    with Dashboard(broken) as dashboard, pytest.raises(PeerError, match="503"):
        status_source(dashboard.url)()


def test_a_growing_folder_gives_new_statuses(ended_run: Path) -> None:
    journal = ended_run / "events.jsonl"
    whole = journal.read_text()
    journal.write_text(whole.rpartition('{"event": "run_finished"')[0])
    read = status_source(str(ended_run))
    assert read().state == "training"
    assert read() is read()
    journal.write_text(whole)
    assert read().state == "finished"


def test_results_do_not_need_matplotlib(
    ended_run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    write_results(ended_run)
    assert (ended_run / "report.json").exists()
    assert not (ended_run / "loss.png").exists()
    assert "matplotlib is not installed" in caplog.text


def test_report_writes_both_files(ended_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(ended_run)]) == 0
    assert output(capsys).split() == [str(ended_run / "report.json"), str(ended_run / "loss.png")]
    report = json.loads((ended_run / "report.json").read_text())
    assert report["outcome"] == "finished"
    assert report["traffic"]["ratio_to_dense"] == 1.0
    assert (ended_run / "loss.png").stat().st_size > 10_000
    assert main(["report", str(ended_run), "--json"]) == 0
    assert json.loads(output(capsys)) == report


def test_invite_is_accepted_by_its_own_gateway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANETARY_STATE", str(tmp_path / "state"))
    assert default_state_folder() == tmp_path / "state"
    before = time.time()
    assert main(["invite", "--expires", "2h"]) == 0
    token = output(capsys).strip()
    authority = Authority.open(tmp_path / "state", before)
    invite = verify(token, authority.invite_secret, authority.fingerprint, role="worker", now=before)
    assert before + 7199 <= invite.expires <= time.time() + 7200
    assert main(["invite", "--expires", "soon"]) == 2


def test_invites_are_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANETARY_STATE", str(tmp_path / "state"))
    assert main(["invite", "--list"]) == 0
    assert output(capsys).strip() == "No invites were made here."
    assert main(["invite"]) == 0
    assert main(["invite", "--for", "gpu-box", "--expires", "never"]) == 0
    anybody, personal = (read(token) for token in output(capsys).split())
    assert (anybody.node, personal.node, personal.expires) == ("", "gpu-box", 0)
    assert main(["invite", "--revoke", personal.id[:6]]) == 0
    assert personal.id in output(capsys)
    assert main(["invite", "--list"]) == 0
    head, first, second = output(capsys).splitlines()
    assert head.split() == ["ID", "MADE", "FOR", "STATE"]
    assert first.startswith(anybody.id)
    assert "any node" in first
    assert "good until" in first
    assert second.startswith(personal.id)
    assert "gpu-box" in second
    assert "revoked" in second
    invites = read_invites(tmp_path / "state", time.time())
    assert personal.id in invites
    assert anybody.id not in invites
    if os.name == "posix":
        assert (tmp_path / "state" / "invites.jsonl").stat().st_mode & 0o777 == 0o600
    for wrong in (["--revoke", "zz"], ["--revoke", ""], ["--for", "a b"]):
        assert main(["invite", *wrong]) == 2
    assert "no invite of the list" in capsys.readouterr().err
    assert main(["invite", "--revoke", "0123456789ab"]) == 0  # made elsewhere, or by a gateway's start
    assert "0123456789ab" in read_invites(tmp_path / "state", time.time())


def test_a_running_gateway_sees_what_is_revoked_meanwhile(tmp_path: Path) -> None:
    running, command = (read_invites(tmp_path, 0.0) for _ in range(2))
    name = read(command.issue(1.0)).id
    assert name not in running
    assert name in running.issued
    command.revoke(name, 2.0)
    assert name in running


def test_durations_and_options() -> None:
    assert [seconds(text, "--t") for text in ("90s", "1.5m", "24h", "7d")] == [90, 90, 86400, 604800]
    for wrong in ("", "5", "0s", "-1h", "1w"):
        with pytest.raises(UserError, match="--t expects a duration"):
            seconds(wrong, "--t")
    assert key_values(["n=4", "name=gpt", "on=true", "sizes=[1, 2]", "eq=a=b"], "--set") == {
        "n": 4,
        "name": "gpt",
        "on": True,
        "sizes": [1, 2],
        "eq": "a=b",
    }
    with pytest.raises(UserError, match="KEY=VALUE"):
        key_values(["n"], "--set")


MODEL = """
import jax.numpy as jnp
import numpy as np

def build(width=3):
    def loss(params, x, y):
        return jnp.mean((x @ params["w"] + params["shift"] - y) ** 2)
    params = {"w": np.ones((width, 1), np.float32), "shift": np.zeros(1, np.float32)}
    return loss, params, (np.zeros((2, width), np.float32), np.zeros((2, 1), np.float32))
"""


def test_export_writes_a_model_that_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from planetary.compiler.frontend.export import load_model

    (tmp_path / "line.py").write_text(MODEL)
    source, folder = f"{tmp_path / 'line.py'}:build", tmp_path / "out"
    command = ["export", source, "-o", str(folder), "--set", "width=5", "--role", "shift=buffer", "--text"]
    assert main(command) == 0
    assert "5 parameters in 1 tensors" in output(capsys)
    model = load_model(folder)
    assert [(spec.name, spec.shape) for spec in model.manifest.of_role("param")] == [("w", (5, 1))]
    assert [spec.name for spec in model.manifest.of_role("buffer")] == ["shift"]
    assert "stablehlo.dot_general" in (folder / "model.stablehlo.txt").read_text()

    assert main(command) == 2
    assert "already holds a model" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--force"]) == 0
