"""Operations on results of runs: checkpoints and compiled artifacts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path
from typing import Annotated

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from planetary.artifacts.checkpoint import CheckpointEntry, list_checkpoints
from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.artifact_manifest import ArtifactManifest
from planetary.compiler.check.verification_report import read_report
from planetary.fleet.gateway.run_files import CHECKPOINTS
from planetary.fleet.preparation.artifact_list import manifests
from planetary.monitor.run_folder import read_events
from planetary.site.api.group import SiteGroup
from planetary.site.api.views import (
    ArtifactHistory,
    ArtifactList,
    ArtifactUse,
    ArtifactView,
    CheckpointFile,
    CheckpointList,
    CheckpointView,
)
from planetary.site.site import Site
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError
from planetary.web.router import BYTES, Media, operation

SHORTEST_DIGEST = 6


class CheckpointOperations(SiteGroup):
    """Checkpoints of a job's run: list and download."""

    @operation("GET", "/v1/jobs/{job}/checkpoints", group="checkpoints", scope=Scope.READ, refuses=(404,))
    async def list_checkpoints(self, job: str) -> CheckpointList:
        """List the checkpoints of a job's run."""
        found = await asyncio.to_thread(_checkpoints, Path(self._job(job).folder) / CHECKPOINTS)
        return CheckpointList(checkpoints=tuple(view for view, _ in found))

    @operation(
        "GET",
        "/v1/jobs/{job}/checkpoints/{round}/{file}",
        group="checkpoints",
        scope=Scope.READ,
        refuses=(404, 416),
    )
    async def download_checkpoint_file(
        self, job: str, round: str, file: str, request: Request
    ) -> Annotated[Response, Media(BYTES), Media(BYTES, 206), Media("multipart/byteranges", 206)]:
        """Download a file of a checkpoint; ranges of bytes, too."""
        found = await asyncio.to_thread(_checkpoints, Path(self._job(job).folder) / CHECKPOINTS)
        wanted = next((one for one in found if str(one[0].round) == round), None)
        if wanted is None:
            kept = ", ".join(str(view.round) for view, _ in found) or "none"
            message = f"the job {job} has no checkpoint of round {round}; there are: {kept}"
            raise ApiError(404, message, code="no_checkpoint")
        view, path = wanted
        files = [one.name for one in view.files]
        if file not in files:
            raise ApiError(404, f"there is no file {file!r} in it; there are: {', '.join(files)}", code="no_file")
        return await _download_of(path / file, request, f"{job}-round-{round}-{file}")


class ArtifactOperations(SiteGroup):
    """Compiled steps and programs of this gateway, and which ones a run published."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._store = BlobStore(site.options.cache / "blobs")

    @operation("GET", "/v1/artifacts", group="artifacts", scope=Scope.READ, refuses=(404,))
    async def list_artifacts(self) -> ArtifactList:
        """List compiled steps and programs."""
        return ArtifactList(artifacts=tuple(await asyncio.to_thread(self._read)))

    @operation("GET", "/v1/artifacts/{artifact}", group="artifacts", scope=Scope.READ, refuses=(404,))
    async def get_artifact(self, artifact: str) -> ArtifactView:
        """Return one; the beginning of its digest is enough."""
        wanted = artifact.lower()
        found = [one for one in await asyncio.to_thread(self._read) if one.artifact.startswith(wanted)]
        if len(wanted) < SHORTEST_DIGEST or len(found) != 1:
            raise ApiError(
                404,
                f"{wanted!r} names {len(found)} artifacts: expected {SHORTEST_DIGEST} or more hex digits of one",
                code="artifact_not_found",
            )
        return found[0]

    @operation("GET", "/v1/jobs/{job}/artifacts", group="artifacts", scope=Scope.READ, refuses=(404,))
    async def list_job_artifacts(self, job: str) -> ArtifactHistory:
        """List the artifacts that a job's run published."""
        events = await asyncio.to_thread(read_events, Path(self._job(job).folder))
        return ArtifactHistory(
            history=tuple(
                ArtifactUse(
                    job_id=job,
                    at=event["t"],
                    artifact=event["digest"],
                    backend=event["backend"],
                    target=event["target"],
                    verified=event.get("verified", ""),
                )
                for event in events
                if event["event"] == "artifact_published"
            )
        )

    def _read(self) -> list[ArtifactView]:
        return [self._view(manifest) for manifest in manifests(self._store)]

    def _view(self, manifest: ArtifactManifest) -> ArtifactView:
        report = read_report(self._store, manifest.artifact)
        return ArtifactView(
            artifact=manifest.artifact,
            model=manifest.signature.model,
            backend=manifest.backend,
            target=manifest.target,
            features=manifest.features,
            nbytes=manifest.nbytes,
            compiler=manifest.compiler,
            stablehlo=manifest.signature.stablehlo_digest,
            verified=report.summary if report is not None else "",
        )


def _checkpoints(folder: Path) -> list[tuple[CheckpointView, Path]]:
    """Return the checkpoints in a folder with their places, but for one that is removed meanwhile. In a thread."""
    found = []
    for entry in list_checkpoints(folder):
        with contextlib.suppress(FileNotFoundError):
            found.append((_checkpoint(entry), entry.path))
    return found


_RANGES = re.compile(r"bytes=\s*(\d+-\d*|-\d+)(\s*,\s*(\d+-\d*|-\d+))*\s*")


async def _download_of(path: Path, request: Request, filename: str) -> Response:
    """Return the response with a file, or with the parts of it that are asked for. A malformed range is ignored.

    Raises `ApiError` for a file removed meanwhile (404), and a range beyond the end (416).
    """
    try:
        found = await asyncio.to_thread(os.stat, path)
    except FileNotFoundError:
        raise ApiError(404, f"{path.name} was removed just now, with its checkpoint", code="no_checkpoint") from None
    asked = request.headers.get("range", "")
    parts = re.findall(r"(\d*)-(\d*)", asked) if _RANGES.fullmatch(asked) else []
    if not parts or any(first and last and int(first) > int(last) for first, last in parts):
        request.scope["headers"] = [pair for pair in request.scope["headers"] if pair[0] != b"range"]
    elif any(int(first) >= found.st_size if first else not int(last) for first, last in parts):
        raise ApiError(
            416,
            f"the file has {found.st_size} bytes, and {asked!r} has none of them",
            code="range",
            headers={"content-range": f"bytes */{found.st_size}"},
        )
    return FileResponse(path, media_type=BYTES, filename=filename, stat_result=found)


def _checkpoint(entry: CheckpointEntry) -> CheckpointView:
    files = sorted(path for path in entry.path.iterdir() if path.is_file())
    return CheckpointView(
        round=entry.round,
        written_at=entry.path.stat().st_mtime,
        files=tuple(CheckpointFile(name=path.name, nbytes=path.stat().st_size) for path in files),
    )
