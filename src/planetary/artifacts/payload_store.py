"""Large payloads (sketches, surrogates, fragments, checkpoints) in any store that fsspec reaches.

A payload is bytes left by one participant for others: it is named by kind and sha256, `sketch/9f86d0…`, and lies at
`<url>/<kind>/<first two digits>/<sha256>`. The kind decides how long it lives. The store is a folder, or any URL such
as `s3://bucket/run`; S3-compatible servers are reached with the option `endpoint_url`, or with AWS_ENDPOINT_URL and the
other variables that AWS programs read.

`artifacts.store.BlobStore` is the local folder of compiled steps, which processes map into memory; this one is for
payloads that travel between machines.
"""

from __future__ import annotations

import datetime
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import fsspec.core
import msgspec

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.store import digest_of, write_atomically
from planetary.core.clock import Clock, SystemClock
from planetary.core.errors import PlanetaryError, ResourceError, TrustError, UserError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_NAME = re.compile(r"([a-z][a-z0-9-]*)/([0-9a-f]{64})")
_PROBES = "probes"
_UNFINISHED_S = 86_400.0  # files under construction are younger
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
# botocore waits a minute for a connection and tries five times by default; retrying is this module's.
_S3_OPTIONS = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 0}}}
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")  # file systems' names of it


class ListedPayload(msgspec.Struct, frozen=True):
    """The entry of a listing for one payload.

    Attributes:
        name: kind and sha256.
        nbytes: size of the payload.
        written: when it was last put, Unix seconds by the store's own clock.
    """

    name: str
    nbytes: int
    written: float


class Collected(msgspec.Struct, frozen=True):
    """The counts of a collection: payloads and unfinished files removed, and left."""

    removed: int
    removed_bytes: int
    left: int


class PayloadStore:
    """Content-addressed payloads behind a path or URL. All methods block: call them off the event loop.

    Args:
        url: a folder, or any fsspec URL.
        lifetimes: seconds by kind of payload; `math.inf`: until it is removed by name.
        options: of the file system, such as `endpoint_url`, `key` and `secret` for S3.
        patience_s: how long an operation is tried again while the store does not answer. One attempt on S3 takes 35 s
            at most; other file systems have limits of their own.
        clock: for the patience.
        sleep: between two attempts.
        durable: the operations on local files.

    Raises:
        UserError: the URL or a kind cannot be, or a package for this kind of URL is not installed.
    """

    def __init__(
        self,
        url: str | Path,
        lifetimes: Mapping[str, float],
        *,
        options: Mapping[str, Any] | None = None,
        patience_s: float = 30.0,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
        durable: DurableFiles = DISK,
    ) -> None:
        for kind, lifetime in lifetimes.items():
            if not re.fullmatch("[a-z][a-z0-9-]*", kind) or kind == _PROBES or not lifetime > 0:
                raise UserError(
                    f"kinds of payloads are lower-case words other than {_PROBES!r} with lifetimes above 0 s, found "
                    f"{kind!r} with {lifetime}"
                )
        self.url = re.sub("//[^/@]*@", "//", str(url))  # without a password
        self.lifetimes = dict(lifetimes)
        self._patience_s, self._clock, self._sleep = patience_s, clock or SystemClock(), sleep
        self._durable = durable
        s3 = str(url).startswith(("s3://", "s3a://"))
        self.options = dict(options or {})
        given = {**(_S3_OPTIONS if s3 else {}), **self.options}
        try:
            files, root = fsspec.core.url_to_fs(str(url), use_listings_cache=False, **given)
        except (ImportError, ValueError, TypeError) as error:
            hint = "; pip install 'planetary-compute[s3]'" if s3 and isinstance(error, ImportError) else ""
            raise UserError(f"cannot use {self.url} for payloads: {error}{hint}") from None
        self.files: Any = files  # the fsspec file system
        if s3:
            self.files.retries = 1
        self._root = str(root).rstrip("/")
        protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
        self._local = "file" in protocols

    def check(self) -> None:
        """Write, read and remove a small object, without patience: at start a wrong address is reported at once.

        Raises:
            ResourceError: the store does not answer, does not exist or refuses; the text names the operation.
        """
        self._probe(patient=False)

    def put(self, kind: str, data: bytes | bytearray | memoryview) -> str:
        """Store a payload and return the name. Storing it again renews the lifetime.

        Raises:
            UserError: there is no such kind.
            ResourceError: the store is full, refuses, or did not answer for too long.
        """
        if kind not in self.lifetimes:
            raise UserError(f"there are no payloads of kind {kind!r}; the kinds are {', '.join(self.lifetimes)}")
        name = f"{kind}/{digest_of(data)}"
        # Also where it is there already: otherwise a collection could take it from under the new publication.
        self._patiently(f"writing {_short(name)}", lambda: self._write(self._path(name), data))
        return name

    def get(self, name: str) -> bytes:
        """Return a payload.

        Raises:
            UserError: it is not there, or `name` is none.
            TrustError: the digest of the bytes differs from the name.
            ResourceError: the store refuses, or did not answer for too long.
        """
        path = self._path(name)
        try:
            data = self._patiently(f"reading {_short(name)}", lambda: self.files.cat_file(path), may_miss=True)
        except FileNotFoundError:
            lifetime = self.lifetimes.get(name.partition("/")[0], math.inf)
            why = "it was never put there or was removed"
            if lifetime < math.inf:
                why = f"it was never put there, was removed, or is older than the {lifetime:g} s that its kind lives"
            raise UserError(f"payload {_short(name)} is not in {self.url}: {why}") from None
        found = digest_of(data)
        if found != name.partition("/")[2]:
            raise TrustError(
                f"payload {_short(name)} in {self.url} is damaged: its {len(data)} bytes have sha256 {found[:12]}…; it "
                "is not used. Putting it again replaces it"
            )
        return data

    def has(self, name: str) -> bool:
        """Whether a payload is there; the content is checked by reads. Raises as `get` does."""
        path = self._path(name)
        try:
            self._patiently(f"looking for {_short(name)}", lambda: self.files.info(path), may_miss=True)
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a payload; one that is gone already is as good. Raises as `get` does."""
        self._remove(self._path(name), _short(name))

    def payloads(self) -> Iterator[ListedPayload]:
        """Yield all payloads, sorted by name. Raises `ResourceError` as `get` does."""
        for path, entry in sorted(self._found().items()):
            if (name := _name_at(path)) is not None:
                yield ListedPayload(name, int(entry["size"]), self._written(path, entry))

    def collect(self, keep: Collection[str] = (), *, now: float | None = None) -> Collected:
        """Remove payloads that are older than their kind lives, and leftovers of crashed writers.

        Any participant may do it at any time. Kinds that this store's user does not know are left alone.

        Args:
            keep: names that are still needed whatever their age, e.g. those in the syncer's journal.
            now: Unix time; default: the store's own clock, so a wrong clock here removes nothing too early.

        Raises:
            ResourceError: as `get`, or the store does not tell when objects were written.
        """
        now = self._probe(patient=True) if now is None else now
        needed = frozenset(keep)
        removed = size = left = 0
        for path, entry in sorted(self._found().items()):
            name = _name_at(path)
            if name is not None:
                lifetime = math.inf if name in needed else self.lifetimes.get(name.partition("/")[0], math.inf)
            elif f"/{_PROBES}/" in path or path.rpartition("/")[2].startswith(".new-"):
                lifetime = _UNFINISHED_S
            else:
                continue
            if lifetime < math.inf and now - self._written(path, entry) > lifetime:
                self._remove(path, path)
                removed, size = removed + 1, size + int(entry["size"])
            elif name is not None:
                left += 1
        return Collected(removed, size, left)

    # --- details --------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise UserError(f"expected a payload's name such as sketch/<sha256 in lower-case hex>, found {name!r}")
        return f"{self._root}/{parts[1]}/{parts[2][:2]}/{parts[2]}"

    def _write(self, path: str, data: bytes | bytearray | memoryview) -> None:
        if self._local:
            write_atomically(Path(path), data, self._durable)
        else:  # object stores show all of an object or nothing; elsewhere the digest tells a half-written one
            self.files.pipe_file(path, bytes(data))

    def _remove(self, path: str, shown: str) -> None:
        try:
            self._patiently(f"removing {shown}", lambda: self._unlink(path), may_miss=True)
        except FileNotFoundError:
            return

    def _unlink(self, path: str) -> None:
        if self._local:
            self._durable.remove_file(Path(path))
        else:
            self.files.rm_file(path)

    def _found(self) -> dict[str, dict[str, Any]]:
        try:
            return self._patiently("listing payloads", lambda: self.files.find(self._root, detail=True), may_miss=True)
        except FileNotFoundError:
            return {}

    def _probe(self, *, patient: bool) -> float:
        """Return the store's time, Unix seconds, after having written, read and removed an object there."""
        text = uuid.uuid4().hex.encode()
        path = f"{self._root}/{_PROBES}/{text.decode()}"
        self._patiently("writing a probe", lambda: self._write(path, text), patient=patient)
        found = self._patiently("reading a probe", lambda: self.files.cat_file(path), patient=patient)
        entry = self._patiently("looking at a probe", lambda: self.files.info(path), patient=patient)
        self._patiently("removing a probe", lambda: self._unlink(path), patient=patient)
        if found != text:
            raise ResourceError(f"the payload store {self.url} returned other bytes than were just written there")
        return self._written(path, entry)

    def _written(self, path: str, entry: Mapping[str, Any]) -> float:
        value = next((entry[key] for key in _TIMES if entry.get(key) is not None), None)
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value)
        if isinstance(value, datetime.datetime):
            return (value if value.tzinfo else value.replace(tzinfo=datetime.UTC)).timestamp()
        if value is None:
            raise ResourceError(f"{self.url} does not say when {path} was written, so lifetimes cannot be kept there")
        return float(value)

    def _patiently(
        self, doing: str, action: Callable[[], Result], *, may_miss: bool = False, patient: bool = True
    ) -> Result:
        """Run an operation, again with growing pauses while the store fails, and translate errors.

        With `may_miss`, FileNotFoundError is an answer and passes; otherwise the bucket or folder is missing.
        """
        began, attempts, pause = self._clock.monotonic(), 0, _FIRST_PAUSE_S
        while True:
            attempts += 1
            try:
                result = action()
                if attempts > 1:
                    log.info(
                        "the payload store %s answers again after %.1f s", self.url, self._clock.monotonic() - began
                    )
                return result
            except PlanetaryError as error:
                raise type(error)(f"the payload store {self.url} failed at {doing}: {error}") from error
            except FileNotFoundError as error:
                if may_miss:
                    raise
                raise self._failed(doing, error, "create the bucket or folder, or correct the URL") from error
            except PermissionError as error:
                raise self._failed(doing, error, "check the credentials and what they allow") from error
            except (TypeError, AttributeError, KeyError):
                raise  # a mistake of the program, not of the store
            except Exception as error:  # each file system has exceptions of its own; those of S3 are no OSErrors
                waited = self._clock.monotonic() - began
                if not patient or waited + pause > self._patience_s:
                    hint = "check the URL, the endpoint and the network"
                    tried = f" ({attempts} attempts in {waited:.1f} s)" if patient else ""
                    raise self._failed(doing + tried, error, hint) from error
                if attempts == 1:  # the reason belongs in the log of a waiting caller
                    log.warning("%s; trying again for up to %.0f s", self._failed(doing, error), self._patience_s)
                self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _failed(self, doing: str, error: Exception, hint: str = "") -> ResourceError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return ResourceError(
            f"the payload store {self.url} failed at {doing}: {reason}" + (f"; {hint}" if hint else "")
        )


def _name_at(path: str) -> str | None:
    parts = path.replace("\\", "/").split("/")[-3:]
    name = f"{parts[0]}/{parts[-1]}"
    return name if len(parts) == 3 and _NAME.fullmatch(name) and parts[1] == parts[2][:2] else None


def _short(name: str) -> str:
    return f"{name[: name.find('/') + 13]}…"
