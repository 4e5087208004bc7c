"""What may be cleared from a store, and what may not."""

from __future__ import annotations

import os
from pathlib import Path

from planetary.artifacts.collect import find_garbage, links
from planetary.artifacts.store import BlobStore

DAY = 86_400.0


def _aged(path: Path, now: float, age: float) -> None:
    os.utime(path, (now - age, now - age))


def test_what_was_not_used_for_long_goes_with_its_links(tmp_path: Path) -> None:
    store, now = BlobStore(tmp_path), 1e9
    old, new = store.put(b"old"), store.put(b"new")
    store.link("key of old", old)
    store.link("key of new", new)
    _aged(store.path(old), now, 31 * DAY)
    _aged(store.path(new), now, 29 * DAY)
    garbage = find_garbage(store, unused_s=30 * DAY, now=now)
    assert garbage.blobs == (store.path(old),)
    assert garbage.nbytes == 3
    assert store.has(old)  # looking removes nothing
    garbage.remove()
    garbage.remove()  # what is gone is gone
    assert not store.has(old)
    assert [link.key for link in links(store)] == ["key of new"]
    assert store.resolve("key of new") == new


def test_reading_counts_as_use(tmp_path: Path) -> None:
    store, now = BlobStore(tmp_path), 1e9
    digest = store.put(b"read yesterday")
    os.utime(store.path(digest), (now - DAY, now - 90 * DAY))
    assert find_garbage(store, unused_s=30 * DAY, now=now).blobs == ()


def test_outdated_blobs_unfinished_files_and_broken_links_go(tmp_path: Path) -> None:
    store, now = BlobStore(tmp_path), 1e9
    outdated, kept = store.put(b"of another compiler"), store.put(b"kept")
    store.link("damaged", kept)
    damaged = next((tmp_path / "links").iterdir())
    damaged.write_text("not a digest")
    store.link("fine", kept)
    old, fresh = store.path(kept).parent / ".new-old", store.path(kept).parent / ".new-fresh"
    for path, age in ((old, 2 * DAY), (fresh, 60.0), (store.path(outdated), 60.0), (store.path(kept), 60.0)):
        path.touch()
        _aged(path, now, age)
    garbage = find_garbage(store, unused_s=30 * DAY, outdated={outdated}, now=now)
    assert set(garbage.blobs) == {old, store.path(outdated)}
    assert garbage.links == (damaged,)
