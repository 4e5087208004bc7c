"""A real federation of real processes: sites and the hub are cut off and killed, and every token counts once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from federation_schedules import history_of, merged_tokens

from planetary.artifacts.jsonl import read_json_lines
from planetary.fleet.protocol.records import WorkerJoined
from planetary.runs.federation.records import SiteRoundsRecord, VersionAdopted, WentAlone
from planetary.runs.rounds.records import RoundMerged, RoundsResumed
from planetary.testing.shaped_relay import RelayRoute, ShapedRelay
from waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[3]
SITES = ("amber", "brass", "coral")
WORKERS, ROUNDS = 2, 40
SHARED = (
    "model.options.n_layer=1",
    "model.options.n_head=2",
    "model.options.n_embd=32",
    "train.batch_size=2",
    "train.sequence_length=16",
    "train.inner_steps=40",
    "train.target_minutes=0",
    "optimizer.learning_rate=0.003",
    "optimizer.warmup_steps=2",
    "optimizer.schedule=constant",
    "eval.batches=2",
    "eval.every=50",
    "fabric.threads=1",
    "sync.compression=none",
    "sync.broadcast_compression=none",
    "sync.start_compression=none",
)


class Member:
    """The process of a hub or of a site, and the journal in its run folder."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder, self._log = folder, folder.with_suffix(".log")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "planetary.cli.main", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def journal(self) -> list[SiteRoundsRecord]:
        path = self.folder / "events.jsonl"
        return list(read_json_lines(path, SiteRoundsRecord)) if path.exists() else []

    def wait_for(self, wanted: Callable[[SiteRoundsRecord], bool]) -> None:
        """Wait until the journal has such a record."""
        wait_until(lambda: any(map(wanted, self.journal)), "the record", said=self._said, process=self.process)

    def finished(self, round_: int) -> Callable[[SiteRoundsRecord], bool]:
        return lambda record: isinstance(record, RoundMerged) and record.round >= round_

    def finish(self) -> None:
        assert self.process.wait(HANG_S) == 0, self._said()

    def _said(self) -> str:
        return f"{self.journal[-3:]}\n{self._log.read_text()[-3000:]}"

    def close(self) -> None:
        """End whatever is left of it."""
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGKILL)
            psutil.wait_procs(family, timeout=HANG_S)
        self.process.wait()


class Federation:
    """A hub behind a relay for its last site, which the relay can cut off."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.relayed = folder, free_port(), free_port()
        self.relay = self._open_relay()
        self.sites: dict[str, Member] = {}
        settings = [f"--set={one}" for one in SHARED]
        stdlib = str(ROOT / "examples" / "stdlib.toml")
        names = ", ".join(f'{{ name = "{name}" }}' for name in SITES)
        self.hub = self._start_hub(
            f"--gateway-config={stdlib}",
            f"--run-dir={folder / 'hub'}",
            *settings,
            f"--set=federation.sites=[{names}]",
            "--set=federation.every_rounds=2",
            f"--set=train.rounds={ROUNDS}",
            "--set=outer.learning_rate=0.8",
            "--set=outer.momentum=0.5",
            "--set=outer.merge=mean",
        )
        invite = folder / "hub-state" / "newest-invite.txt"
        wait_until(invite.exists, "the hub's invite", said=(folder / "hub.log").read_text)
        for name in SITES:  # the others find the step compiled, and come late
            self.sites[name] = Member(
                folder / name,
                "train",
                stdlib,
                f"--run-dir={folder / name}",
                f"--cache={folder / 'cache'}",
                *settings,
                f"--set=run.name={name}",
                f"--set=federation.hub=127.0.0.1:{self.relayed if name == SITES[-1] else self.port}",
                f"--set=federation.token_file={invite}",
                "--set=federation.patience_s=5",
                f"--set=fabric.workers={WORKERS}",
                "--set=train.rounds=4000",
                "--set=outer.learning_rate=1.0",
                "--set=outer.momentum=0.0",
                "--set=outer.merge=mean",
            )
            self.sites[SITES[0]].wait_for(lambda record: isinstance(record, WorkerJoined))

    def _start_hub(self, *arguments: str) -> Member:
        shared = (f"--state={self.folder / 'hub-state'}", f"--cache={self.folder / 'cache'}", "--gateway-port=0")
        return Member(self.folder / "hub", "federation-hub", *arguments, *shared, f"--port={self.port}")

    def kill_hub(self) -> None:
        """kill -9, and resume."""
        self.hub.close()
        self.hub = self._start_hub(f"--resume={self.folder / 'hub'}")

    def _open_relay(self) -> ShapedRelay:
        relay = ShapedRelay()
        relay.listen({"": RelayRoute(("127.0.0.1", self.port))}, port=self.relayed)
        return relay

    def cut(self) -> None:
        """Cut the last site off."""
        self.relay.close()

    def heal(self) -> None:
        """Let it connect again."""
        self.relay = self._open_relay()

    def close(self) -> None:
        for member in (*self.sites.values(), self.hub):
            member.close()
        self.relay.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.processes
@pytest.mark.slow
def test_three_sites_lose_the_hub_twice_and_one_is_cut_off(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    try:
        hub, away = federation.hub, federation.sites[SITES[-1]]
        hub.wait_for(hub.finished(2))
        federation.kill_hub()
        hub = federation.hub
        hub.wait_for(hub.finished(4))

        federation.cut()
        away.wait_for(lambda record: isinstance(record, WentAlone))
        alone_from = away.journal[-1].t
        hub.wait_for(hub.finished(6))
        federation.heal()
        away.wait_for(lambda record: isinstance(record, VersionAdopted) and record.carried > 0)

        federation.kill_hub()
        hub = federation.hub
        hub.finish()
        for site in federation.sites.values():
            site.finish()

        journal = hub.journal
        assert sum(isinstance(record, RoundsResumed) for record in journal) == 2
        rounds = [r for r in history_of(journal) if isinstance(r, RoundMerged)]
        assert [r.round for r in rounds] == list(range(1, ROUNDS + 1))
        merged = merged_tokens(journal)
        assert sorted(merged) == list(SITES)
        assert rounds[-1].tokens_total == sum(merged.values())
        for name, site in federation.sites.items():
            own = [r for r in site.journal if isinstance(r, RoundMerged)]
            assert merged[name] <= own[-1].tokens_total
            assert own[-1].tokens_total == own[-1].round * WORKERS * 40 * 2 * 16
        carried = [r for r in away.journal if isinstance(r, VersionAdopted) and r.carried > 0]
        assert carried[0].t > alone_from
        assert rounds[-1].loss < rounds[0].loss - 0.3
    finally:
        federation.close()
