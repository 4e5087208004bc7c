"""Payloads on a disk, in memory, and in stores that fail."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from payload_cases import LIFETIMES, check_damage, check_lifetimes, check_payloads

from planetary.artifacts.payload_store import Collected, PayloadStore
from planetary.core.errors import ResourceError, UserError
from planetary.simulation.fake_clock import FakeClock


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "payloads") if request.param == "folder" else "memory://payloads"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_payloads_come_back_by_their_digest(url: str) -> None:
    check_payloads(PayloadStore(url, LIFETIMES))


def test_payloads_live_as_long_as_their_kind(url: str) -> None:
    check_lifetimes(PayloadStore(url, LIFETIMES))


def test_a_damaged_payload_is_not_used(url: str) -> None:
    check_damage(PayloadStore(url, LIFETIMES), url.replace("memory:/", ""))


def test_putting_again_renews_the_lifetime(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path, LIFETIMES)
    name = store.put("sketch", b"x")
    digest = name.partition("/")[2]
    path = tmp_path / "sketch" / digest[:2] / digest
    leftover = path.with_name(".new-abc")
    leftover.write_bytes(b"half")
    (tmp_path / "a text that is no payload").write_text("stays")
    for old in (path, leftover):
        os.utime(old, (1e9, 1e9))
    store.put("sketch", b"x")
    assert store.collect() == Collected(1, 4, 1)
    assert not leftover.exists()
    assert store.get(name) == b"x"
    assert (tmp_path / "a text that is no payload").exists()


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kinds of payloads are lower-case words"):
        PayloadStore(tmp_path, {"probes": 1.0})
    with pytest.raises(UserError, match="above 0 s"):
        PayloadStore(tmp_path, {"sketch": 0.0})
    with pytest.raises(UserError, match="no-such-protocol"):
        PayloadStore("no-such-protocol://x", LIFETIMES)
    store = PayloadStore(tmp_path, LIFETIMES)
    with pytest.raises(UserError, match="the kinds are sketch, checkpoint"):
        store.put("model", b"")
    with pytest.raises(UserError, match=r"found '\.\./secret'"):
        store.get("../secret")
    with pytest.raises(UserError, match=r"never put there or was removed$"):
        store.get("checkpoint/" + 64 * "0")
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write"):
        PayloadStore(tmp_path / "file", LIFETIMES).check()


class Failing(MemoryFileSystem):
    """A store in memory whose next operations fail."""

    protocol = "failing"
    cachable = False
    errors: ClassVar[list[Exception]] = []

    def _maybe(self) -> None:
        if self.errors:
            raise self.errors.pop(0)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self._maybe()
        return super().cat_file(path, *args, **kwargs)

    def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._maybe()
        return super().pipe_file(path, *args, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._maybe()
        return super().info(path, **kwargs)


class Waits:
    """Pauses that end at once, on a clock that they advance."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.pauses: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.advance_to(self.clock.monotonic() + seconds)


@pytest.fixture
def waits() -> Waits:
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.errors.clear()
    MemoryFileSystem.store.clear()
    return Waits()


def failing(waits: Waits, patience_s: float = 10) -> PayloadStore:
    return PayloadStore("failing://p", LIFETIMES, patience_s=patience_s, clock=waits.clock, sleep=waits)


def test_failing_store_is_tried_again_with_growing_pauses(waits: Waits) -> None:
    store = failing(waits)
    Failing.errors += [OSError("connection reset") for _ in range(5)]
    name = store.put("sketch", b"x")
    assert waits.pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2])
    Failing.errors.append(TimeoutError())
    assert store.get(name) == b"x"


def test_outage_is_logged_at_its_beginning_and_its_end(waits: Waits, caplog: pytest.LogCaptureFixture) -> None:
    store = failing(waits)
    Failing.errors += [OSError("connection reset") for _ in range(5)]
    with caplog.at_level("INFO", "planetary.artifacts.payload_store"):
        name = store.put("sketch", b"x")
        store.get(name)
    begin, end = caplog.messages
    assert "failing://p failed at writing sketch/" in begin
    assert begin.endswith("connection reset; trying again for up to 10 s")
    assert end == "the payload store failing://p answers again after 6.2 s"


def test_absent_store_is_given_up_after_the_patience(waits: Waits) -> None:
    store = failing(waits)
    name = store.put("sketch", b"x")
    Failing.errors += [OSError("network unreachable") for _ in range(50)]
    with pytest.raises(ResourceError, match=r"reading sketch/.*… \(6 attempts in 6\.2 s\): network unreachable"):
        store.get(name)
    Failing.errors.clear()
    Failing.errors += [OSError("network unreachable") for _ in range(50)]
    with pytest.raises(ResourceError, match="looking for"):
        store.has(name)  # not "no"


def test_no_second_attempt_where_waiting_does_not_help(waits: Waits) -> None:
    """At start and where waiting does not help there is no second attempt."""
    store = failing(waits)
    Failing.errors.append(OSError("no route"))
    with pytest.raises(ResourceError, match="failing://p failed at writing a probe: no route; check the URL"):
        store.check()
    Failing.errors.append(PermissionError("Access Denied"))
    with pytest.raises(ResourceError, match="Access Denied; check the credentials"):
        store.put("sketch", b"x")
    Failing.errors.append(FileNotFoundError("The specified bucket does not exist"))
    with pytest.raises(ResourceError, match="create the bucket"):
        store.put("sketch", b"x")
    assert waits.pauses == []
    Failing.errors.append(KeyError("a bug"))
    with pytest.raises(KeyError):
        store.put("sketch", b"x")


def test_a_password_in_the_url_is_not_shown() -> None:
    assert PayloadStore("memory://user:secret@host/p", {"sketch": math.inf}).url == "memory://host/p"
