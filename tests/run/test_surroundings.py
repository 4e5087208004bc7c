"""Containers, terminals, proxies and users as they are elsewhere."""

from __future__ import annotations

import io
import os
import stat
import sys
import urllib.request
from pathlib import Path

import pytest

from planetary.cli.main import main, spare_loopback
from planetary.core import places
from planetary.net import addresses
from planetary.net.addresses import is_local_name, own_address
from planetary.net.http_opener import opener_for
from planetary.runtime import host
from planetary.runtime.control_group import cpu_quota, free_memory

GIB = 1 << 30


def _group(folder: Path, own: str, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "own").write_text(own)
    return {"system": folder, "own": folder / "own"}


@pytest.mark.parametrize(
    ("own", "files", "cores", "memory"),
    [
        ("0::/", {"cpu.max": "150000 100000\n"}, 2, None),
        ("0::/", {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "5"}, None, None),
        ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "400000 100000"}, 1, None),
        ("0::/a/b", {"a/memory.max": f"{GIB}", "a/memory.current": f"{GIB // 2}"}, None, GIB // 2),
        (
            "0::/",
            {"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 5\ninactive_file 300\n"},
            None,
            400,
        ),
        ("0::/the/host's/path", {"cpu.max": "300000 100000"}, 3, None),  # the group itself is the root
        (
            "4:cpu,cpuacct:/x\n5:memory:/x\n",
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
                "memory/x/memory.limit_in_bytes": "4096",
                "memory/x/memory.usage_in_bytes": "96",
                "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}",
                "memory/memory.usage_in_bytes": "96",
            },
            1,
            4000,
        ),
        ("4:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None, None),
        ("nonsense", {}, None, None),
    ],
)
def test_limits_of_a_control_group(
    tmp_path: Path, own: str, files: dict[str, str], cores: int | None, memory: int | None
) -> None:
    places_ = _group(tmp_path, own, files)
    assert (cpu_quota(**places_), free_memory(**places_)) == (cores, memory)


def test_cores_and_memory_are_those_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_quota", lambda: 1)
    monkeypatch.setattr(host, "free_memory", lambda: 12345)
    assert host.usable_cores() == 1
    assert host.available_memory() == 12345


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "utf-8"])
@pytest.mark.parametrize(
    "words", [("--help",), ("train", "--help"), ("serve", "--help"), ("doctor", "--help"), ("no…such",)]
)
def test_output_fits_every_terminal(monkeypatch: pytest.MonkeyPatch, encoding: str, words: tuple[str, ...]) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    out.write("│ ↯ Δ Mühle 日 …")
    assert code in (0, 2)
    out.flush()
    assert "Mühle" in out.buffer.getvalue().decode(encoding) or encoding == "ascii"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_loopback_has_no_proxy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "corp.example")
    monkeypatch.delenv("NO_PROXY", raising=False)
    spare_loopback()
    spare_loopback()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "corp.example,localhost,127.0.0.1,::1,127.0.0.0/8"
    monkeypatch.delenv("no_proxy")
    monkeypatch.delenv("NO_PROXY")
    for url in ("http://127.0.0.1:1/", "http://127.9.9.9:1/", "http://[::1]:1/", "http://localhost:1/"):
        handlers = [one for one in opener_for(url).handlers if isinstance(one, urllib.request.ProxyHandler)]
        assert not any(getattr(one, "proxies", {}) for one in handlers)


def test_user_without_home_has_a_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PLANETARY_CACHE", raising=False)
    monkeypatch.delenv("PLANETARY_STATE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"planetary-{os.getuid()}"
    assert places.cache_folder(None) == folder / "cache" / "planetary"
    assert places.default_state_folder() == folder / "planetary" / "gateway"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "PLANETARY_CACHE" in caplog.text


@pytest.mark.parametrize("host_", ["localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_loopback_by_any_name(host_: str) -> None:
    assert is_local_name(host_)
    assert not is_local_name("0.0.0.0")
    assert not is_local_name("localhost.example.org")


def test_own_address_is_not_loopback() -> None:
    assert not (own_address() and addresses.is_loopback(own_address()))
