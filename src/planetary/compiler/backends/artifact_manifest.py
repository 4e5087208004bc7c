"""The manifest of a cached artifact: source, target, and the signature of the functions."""

from __future__ import annotations

import contextlib
from typing import Protocol

import msgspec

from planetary.core import decoding
from planetary.core.errors import TrustError
from planetary.core.step import ProgramSpec, StepSpec

KEY = "manifest "
"""The digest of an artifact behind this is the key of the manifest in a store."""


class ArtifactCache(Protocol):
    """Content-addressed blobs with keys that name them; `planetary.artifacts.store.BlobStore` is one."""

    def resolve(self, key: str) -> str | None:
        """Return the digest under `key`, if the blob exists."""
        ...

    def link(self, key: str, digest: str) -> None:
        """Let `key` name a blob."""
        ...

    def put(self, data: bytes) -> str:
        """Store a blob and return the digest."""
        ...

    def get(self, digest: str) -> bytes:
        """Return a blob."""
        ...


class ArtifactManifest(msgspec.Struct, frozen=True):
    """Describes one artifact. The portable StableHLO lies in the same store, under the digest in `spec`."""

    artifact: str  # sha256 of the bytes
    nbytes: int
    backend: str  # "cpu", "cuda", …; "pjrt" for the portable StableHLO itself
    target: str  # e.g. "host", "sm_80"
    features: str  # identifies the CPU of a "host" artifact
    compiler: str  # version of IREE's compiler; "" for "pjrt"
    flags: tuple[str, ...]  # compiler flags
    notes: tuple[str, ...] = ()  # deviations from the model's arithmetic, e.g. float64 in float32
    spec: StepSpec | None = None  # signature of a train step: names, shapes, element types and roles of the arguments
    program: ProgramSpec | None = None  # signatures of separate functions; exactly one of `spec` and `program` is set

    def __post_init__(self) -> None:
        """Raise `ValueError`, which decoding reports, unless there is exactly one signature."""
        if (self.spec is None) == (self.program is None):
            raise ValueError("an artifact's manifest has the signature of a train step or of a program")

    @property
    def signature(self) -> StepSpec | ProgramSpec:
        """The signature of the artifact's functions."""
        found = self.spec or self.program
        assert found is not None
        return found


def write_manifest(store: ArtifactCache, manifest: ArtifactManifest) -> None:
    """Put a manifest into the store, under the artifact's key."""
    store.link(KEY + manifest.artifact, store.put(msgspec.json.encode(manifest)))


def read_manifest(store: ArtifactCache, artifact: str) -> ArtifactManifest | None:
    """Return the manifest of an artifact; None if the store has none, or a damaged one."""
    digest = store.resolve(KEY + artifact)
    if digest is None:
        return None
    with contextlib.suppress(TrustError, msgspec.DecodeError):
        return decoding.from_json(store.get(digest), ArtifactManifest)
    return None
