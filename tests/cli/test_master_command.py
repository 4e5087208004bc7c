"""`planetary master` as a process: with tokens, plainly, and asked for what cannot be."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from planetary.cli.main import main
from planetary.collectives import Communicator
from planetary.core.errors import PeerError, TrustError
from waiting import HANG_S

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def master(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "planetary.cli.main", "master", "--listen=127.0.0.1:0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"listens on (\S+)\.$", process.stdout.readline())
        assert found, process.communicate(timeout=HANG_S)
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def test_it_leads_a_ring_of_invited_peers_and_ends_on_a_signal(tmp_path: Path) -> None:
    with master(f"--state={tmp_path}") as (process, address):
        with pytest.raises((TrustError, PeerError)), Communicator(address, timeout_s=10):
            pass
        token = (tmp_path / "newest-invite.txt").read_text().strip()
        with Communicator(address, token=token, timeout_s=10) as peer:
            peer.update_topology()
            array = np.arange(5, dtype=np.float32)
            peer.all_reduce(array)
            np.testing.assert_array_equal(array, np.arange(5))
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 0


def test_loopback_needs_no_token_and_journal_survives_kill_9(tmp_path: Path) -> None:
    journal = tmp_path / "master.journal"
    with (
        master("--plain-loopback", f"--journal={journal}") as (process, address),
        Communicator(address, timeout_s=10) as peer,
    ):
        peer.update_topology()
        assert peer.world_size == 1
        process.kill()
        process.wait(HANG_S)
    assert journal.stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen=0.0.0.0:0", "--plain-loopback"], "without TLS"),
        (["--listen=nonsense", "--plain-loopback"], "expected an address such as"),
        (["--plain-loopback", "--grace=soon"], "--grace expects a duration"),
    ],
)
def test_what_cannot_be_is_an_error(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["master", *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["master", "--help"])
    assert "planetary master --listen 0.0.0.0:48148" in capsys.readouterr().out
