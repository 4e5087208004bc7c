from __future__ import annotations

import hashlib
import mmap
import os
import threading
from pathlib import Path

import pytest

from planetary.artifacts.store import BlobStore, write_atomically
from planetary.core.errors import ResourceError, TrustError, UserError


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "store")


def test_a_blob_is_found_under_its_sha256(store: BlobStore) -> None:
    digest = store.put(b"hello")
    assert digest == hashlib.sha256(b"hello").hexdigest()
    assert store.has(digest)
    assert store.get(digest) == b"hello"
    assert store.verified_path(digest).read_bytes() == b"hello"
    assert store.mapped(digest) == b"hello"


def test_damaged_blob_is_not_mapped(store: BlobStore) -> None:
    digest = store.put(b"hello")
    store.path(digest).write_bytes(b"hellO")
    with pytest.raises(TrustError, match="is damaged"):
        store.mapped(digest)
    assert not store.has(digest)


def test_an_absent_blob_is_a_clear_error(store: BlobStore) -> None:
    digest = hashlib.sha256(b"nothing").hexdigest()
    assert not store.has(digest)
    with pytest.raises(UserError, match=digest[:12]):
        store.get(digest)


@pytest.mark.parametrize("name", ["", "abc", "../../etc/passwd", "g" * 64, "A" * 64])
def test_only_digests_name_blobs(store: BlobStore, name: str) -> None:
    with pytest.raises(UserError, match="sha256"):
        store.path(name)


def test_a_flipped_byte_is_refused_and_the_blob_can_be_put_again(store: BlobStore) -> None:
    digest = store.put(b"hello")
    store.path(digest).write_bytes(b"hellp")
    with pytest.raises(TrustError, match="damaged"):
        store.get(digest)
    assert not store.has(digest)
    assert store.put(b"hello") == digest
    assert store.get(digest) == b"hello"


def test_a_truncated_blob_is_replaced_by_the_next_put(store: BlobStore) -> None:
    digest = store.put(b"hello")
    store.path(digest).write_bytes(b"he")
    store.put(b"hello")
    assert store.get(digest) == b"hello"


def test_mapped_file_keeps_its_bytes_when_its_name_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "module"
    write_atomically(path, b"first")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        write_atomically(path, b"second, longer")
        assert mapped[:] == b"first"
    assert path.read_bytes() == b"second, longer"


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="free some space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_link_names_a_blob_until_it_names_another(store: BlobStore) -> None:
    assert store.resolve("key") is None
    one, two = store.put(b"one"), store.put(b"two")
    store.link("key", one)
    assert store.resolve("key") == one
    assert store.resolve("other key") is None
    store.link("key", two)
    assert store.resolve("key") == two


def test_a_link_to_a_missing_blob_or_a_damaged_link_is_absent(store: BlobStore) -> None:
    digest = store.put(b"one")
    store.link("key", digest)
    store.path(digest).unlink()
    assert store.resolve("key") is None
    store.put(b"one")
    assert store.resolve("key") == digest
    link = next((store.root / "links").iterdir())
    link.write_text(digest[:10])
    assert store.resolve("key") is None


def test_many_writers_of_one_blob_agree(store: BlobStore) -> None:
    data = os.urandom(1 << 16)
    found: list[bytes] = []

    def write_and_read() -> None:
        found.append(store.get(store.put(data)))

    threads = [threading.Thread(target=write_and_read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [data] * 8
