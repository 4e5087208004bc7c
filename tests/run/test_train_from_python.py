"""A real run from Python: two workers in processes, stopped, resumed, read, and ended with the interpreter."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

import planetary
from planetary.core.errors import UserError
from planetary.fleet.protocol.kind_reader import FORMAT
from waiting import HANG_S

pytestmark = [pytest.mark.processes, pytest.mark.compiles]


def tables(folder: Path) -> dict[str, dict[str, object]]:
    words = ["def", "return", "for", "in", "import", "class", "self"]
    source = random.Random(0)
    (folder / "corpus.txt").write_text("\n".join(" ".join(source.choices(words, k=8)) for _ in range(4000)))
    return {
        "model": {"options": {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 256}},
        "data": {"source": str(folder / "corpus.txt")},
        "train": {"rounds": 2000, "inner_steps": 3, "batch_size": 2, "sequence_length": 16},
        "optimizer": {"learning_rate": 0.003, "warmup_steps": 2, "schedule": "constant"},
        "fabric": {"threads": 1},
        "eval": {"batches": 2},
    }


def test_a_run_from_python_is_stopped_resumed_and_generates(tmp_path: Path, shared_cache: Path) -> None:
    two_rounds: list[int] = []
    run = planetary.train(
        tables(tmp_path),
        run_dir=tmp_path / "run",
        workers=2,
        wait=False,
        cache=shared_cache,
        on_round=lambda metrics: two_rounds.append(metrics.round) if metrics.round <= 2 else run.stop(),
    )
    assert run.wait(HANG_S).status.state == "stopped"
    done = len(run.metrics)
    assert two_rounds == [1, 2]
    assert 3 <= done < 2000
    assert planetary.Run.open(run.folder).metrics == run.metrics

    run.resume(rounds=done + 2, cache=shared_cache)
    assert (run.status.state, len(run.metrics)) == ("finished", done + 2)
    assert {event["worker"] for event in run.events if event["event"] == "worker_joined"} == {"local/0", "local/1"}
    assert run.report().faults.resumes == 1
    assert run.checkpoint().info.round == done + 2
    assert sum(array.size for array in run.params().values()) == run.report().setup.params  # type: ignore[union-attr]
    text = run.generate("def ", 12, seed=1)
    assert text == run.generate("def ", 12, seed=1)
    assert text


def test_processes_of_a_run_end_with_the_interpreter(tmp_path: Path, shared_cache: Path) -> None:
    script = f"""
        import planetary, psutil, time
        run = planetary.train({tables(tmp_path)!r}, run_dir={str(tmp_path / "run")!r}, workers=2, wait=False,
                              cache={str(shared_cache)!r})
        while not run.metrics:
            time.sleep(0.05)
        print(*[process.pid for process in psutil.Process().children(recursive=True)])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 5, "gateway, node manager, supervisors and workers"
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert done.stderr == ""
    assert planetary.Run.open(tmp_path / "run").status.state == "stopped"


def test_stop_ends_a_run_that_another_program_carries(tmp_path: Path) -> None:
    started = {"kind": "rounds", "format": FORMAT, "run": "x", "rounds": 2, "config_hash": "", "model": "", "params": 8}
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "run_started", "t": 1.0, **started}) + "\n")
    script = """
        import signal, sys
        from pathlib import Path
        from planetary.fleet.gateway.run_files import RunLock

        lock = RunLock(Path(sys.argv[1]))
        print("locked", flush=True)
        signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        assert gateway.stdout.readline() == "locked\n"
        run = planetary.Run.open(tmp_path)
        assert run.under_way
        with pytest.raises(TimeoutError, match="goes on"):
            run.wait(0.01)
        with pytest.raises(UserError, match="it is under way"):
            run.resume()
        assert not run.stop().under_way
        assert gateway.wait(HANG_S) == -signal.SIGTERM
