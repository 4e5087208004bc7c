"""A mixture as on several machines: the gateway and a node manager in processes that do not end with each other."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import psutil
from killable_run import ROOT, Event, kill

from planetary.artifacts.jsonl import JsonLinesTail, read_json_lines
from planetary.run.processes.announcement import Announcement, read_announcement
from planetary.runs.mixture.records import MixtureRecord
from waiting import HANG_S, wait_until

Role = Literal["composer", "expert worker", "gateway"]


class SplitMixture:
    """A mixture on several machines, followed through the run's journal.

    Args:
        folder: where the run and everything else is put.
        cache: prepared data and compiled programs.
        example: file below examples/.
        overrides: keys of its configuration.
        workers: processes of the node manager.
    """

    def __init__(self, folder: Path, cache: Path, example: str, overrides: Sequence[str], workers: int) -> None:
        self.run, self._folder, self._cache = folder / "run", folder, cache
        self.killed: Counter[Role] = Counter()
        self.events: list[Event] = []
        folder.mkdir(exist_ok=True)
        self._log = (folder / "gateway.log").open("ab")
        new = [f"--gateway-config={ROOT / 'examples' / example}", f"--run-dir={self.run}", "--port=0"]
        self._gateway = self._start_gateway(*new, *(f"--set={override}" for override in overrides))
        self._tail = JsonLinesTail(self.run / "events.jsonl", dict)
        token = folder / "token"
        token.write_text(self._announced.token)
        self._node = self._start(
            "node-manager",
            f"--host={self._announced.host}",
            f"--port={self._announced.port}",
            f"--scale={workers}",
            f"--token-file={token}",
            f"--logs={folder / 'logs'}",
            "--node-name=n",
        )

    def news(self) -> list[Event]:
        """Return the events since the last call."""
        found = self._tail.poll()
        self.events += found
        return found

    def finished(self) -> bool:
        """Whether the gateway has ended; it must have ended well."""
        code = self._gateway.poll()
        assert code in {None, 0}, f"the gateway ended with {code}: {self.tail_of_log()}"
        return code is not None

    def kill_one(self, role: Role, number: int) -> bool:
        """Kill -9 a live process of a role, `number` choosing among several; return False where there is none.

        A gateway is started again at once, on the same port. Workers are started again by their supervisors.
        """
        if role == "gateway":
            kill(self._gateway.pid)
            self._gateway.wait()
            port = f"--port={self._announced.port}"
            self._gateway = self._start_gateway(f"--resume={self.run}", port)
            self._tail = JsonLinesTail(self.run / "events.jsonl", dict)
            self.events.clear()
        else:
            pids = self._pids(role)
            if not pids:
                return False
            kill(pids[number % len(pids)])
        self.killed[role] += 1
        return True

    def records(self) -> list[MixtureRecord]:
        """Return the whole journal."""
        return list(read_json_lines(self.run / "events.jsonl", MixtureRecord))

    def tail_of_log(self) -> str:
        """Return the end of the gateway's log."""
        return (self._folder / "gateway.log").read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End everything that is left."""
        for process in (self._node, self._gateway):
            if process.poll() is None:
                family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                for one in family:
                    one.kill()
                psutil.wait_procs(family, timeout=HANG_S)
            process.wait()
        self._log.close()

    def _pids(self, role: Role) -> list[int]:
        """Live workers that compose, or that compose nothing, in the order of their names."""
        self.news()
        alive = {p.pid for p in psutil.Process(self._node.pid).children(recursive=True) if p.is_running()}
        owners, pids = {}, {}
        for event in self.events:
            if event["event"] == "shard_granted":
                owners[event["shard"]] = event["worker"]
            if event["event"] == "worker_joined":
                pids[event["worker"]] = event["pid"]
        composing = set(owners.values())
        return [pid for w, pid in sorted(pids.items()) if pid in alive and (w in composing) == (role == "composer")]

    def _start_gateway(self, *flags: str) -> subprocess.Popen[bytes]:
        path = self._folder / "announcement"
        path.unlink(missing_ok=True)
        process = self._start("gateway", *flags, f"--announce={path}", "--gateway-port=0")
        found = wait_until(
            lambda: read_announcement(path), "the gateway listens", said=self.tail_of_log, process=process
        )
        assert found is not None
        self._announced: Announcement = found
        return process

    def _start(self, command: str, *flags: str) -> subprocess.Popen[bytes]:
        state = f"--state={self._folder / command}"
        line = [sys.executable, "-m", "planetary.cli.main", command, f"--cache={self._cache}", state, *flags]
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
