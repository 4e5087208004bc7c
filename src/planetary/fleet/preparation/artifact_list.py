"""The artifacts of a store, by their manifests."""

from __future__ import annotations

from planetary.artifacts.collect import links
from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.artifact_manifest import KEY, ArtifactManifest, read_manifest


def manifests(store: BlobStore) -> list[ArtifactManifest]:
    """Return the manifests of artifacts that are there, by model and target."""
    keys = [link.key for link in links(store) if link.key.startswith(KEY)]
    found = [read_manifest(store, key.removeprefix(KEY)) for key in keys]
    there = [manifest for manifest in found if manifest is not None and store.has(manifest.artifact)]
    return sorted(there, key=lambda m: (m.signature.model, m.backend, m.target, m.artifact))
