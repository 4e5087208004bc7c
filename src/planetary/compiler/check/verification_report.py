"""Reports on checks of artifacts, and their place in a cache."""

from __future__ import annotations

import contextlib

import msgspec

from planetary.compiler.backends.artifact_manifest import ArtifactCache
from planetary.core import decoding
from planetary.core.errors import TrustError

_KEY = "verified 2 "


class VerifyReport(msgspec.Struct, frozen=True):
    """The findings of a check."""

    digest: str  # digest of the requested artifact
    checked: str  # digest of the artifact that was run
    target: str  # target of the artifact that was run, e.g. "cpu host"
    stand_in: bool  # the artifact cannot run here; a CPU build of the same operations was checked instead
    loss: float | None  # loss of the random batch; None: the artifact is no train step
    worst_tensor: str
    worst_error: float  # fraction of the accepted error
    seconds: float
    against: str = "XLA"  # the execution the artifact agrees with
    notes: tuple[str, ...] = ()  # deviations of both from the model's arithmetic

    @property
    def summary(self) -> str:
        """One sentence for people."""
        what = f"its CPU build ({self.target}) stands in and" if self.stand_in else f"the artifact ({self.target})"
        found = (
            f"{what} agrees with {self.against}: the worst tensor, {self.worst_tensor}, is at {self.worst_error:.1%} "
            "of the accepted error"
        )
        return ". ".join([found, *self.notes])


def write_report(store: ArtifactCache, report: VerifyReport) -> None:
    """Remember a report under the digest of the artifact that was asked about."""
    store.link(_KEY + report.digest, store.put(msgspec.json.encode(report)))


def read_report(store: ArtifactCache, artifact: str) -> VerifyReport | None:
    """Return the earlier report on an artifact; None if nothing was, or the report is damaged."""
    digest = store.resolve(_KEY + artifact)
    if digest is None:
        return None
    with contextlib.suppress(TrustError, msgspec.DecodeError):
        return decoding.from_json(store.get(digest), VerifyReport)
    return None
