"""The constants every kind of run has: admission, jobs and limits. All times in seconds."""

from __future__ import annotations

import msgspec

from planetary.core.registry import PinnedFile
from planetary.fleet.protocol.messages import Hello, Refused
from planetary.runtime.backends import is_pjrt
from planetary.wire.message import Message


class FabricPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy of every kind of run: admission, jobs and limits."""

    run: str
    local: bool = False  # workers start with the run, on one machine: no replacements will come
    startup_grace_s: float  # how long processes of workers may take to start, and an artifact to load
    abandon_after_s: float  # the run fails when no worker was connected for this long; 0: never
    max_strikes: int = 3  # consecutive failed tasks after which a worker is not used any more
    heartbeat_s: float
    silent_after_s: float
    iree_version: str  # compiler version

    @property
    def loaded(self) -> str:
        """Name of the artifact that workers load, for users."""
        return "the training step"

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of workers in this run, by the names that operators choose from; empty: there is one role only."""
        return ()

    @property
    def code(self) -> tuple[PinnedFile, ...]:
        """Files of the user with classes that workers use."""
        return ()

    def job(self, artifact: str, reference: str) -> Message:
        """Return a worker's job once the artifact exists; `reference`: digest of the reference results."""
        raise NotImplementedError

    def refuse(self, hello: Hello) -> Refused | None:
        """Refuse a worker that is not fit for this kind of run; None where it is. Its name and key are in order."""
        if self.code and not hello.runs_code:
            files = [file.file for file in self.code]
            return Refused(
                code="code",
                reason=f"this run has code of its own, {', '.join(files)}, and worker {hello.worker} runs no code of "
                "the gateway: start it with --allow-code if you trust the gateway's operator with this account, or "
                "install the code as a package on all machines (docs/extending.md)",
                kind="data",
            )
        # A PJRT worker loads versioned StableHLO, which every later release reads.
        if is_pjrt(hello.backend) or hello.iree_version == self.iree_version:
            return None
        if not self.iree_version:
            return Refused(
                code="iree",
                reason=f"worker {hello.worker} runs backend {hello.backend!r}, and the gateway has no compiler for it: "
                "install iree-base-compiler there, of the worker's version, or start the worker with a PJRT backend "
                "(--backend pjrt:cpu or pjrt:cuda)",
            )
        return Refused(
            code="iree",
            reason=f"compiled modules do not load across IREE versions: the gateway compiles with "
            f"{self.iree_version} and worker {hello.worker} runs {hello.iree_version or 'none'}; upgrade "
            f"{_older(hello.iree_version, self.iree_version)}",
        )

    def may_fetch(self, digest: str, artifact: str, reference: str) -> bool:
        """Whether a worker with this job is sent a blob; no other blob leaves the gateway."""
        return digest in (artifact, reference) and bool(digest)


def _older(worker: str, gateway: str) -> str:
    """Which side has the older version, as the object of the sentence "upgrade ..."."""

    def key(version: str) -> list[int]:
        return [int(part) if part.isdigit() else 0 for part in version.split(".")]

    if key(worker) < key(gateway):
        return f"iree-base-runtime on the worker to {gateway}"
    return f"iree-base-compiler on the gateway to {worker}"
