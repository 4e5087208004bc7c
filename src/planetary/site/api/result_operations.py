"""Operations on results of runs: checkpoints and compiled artifacts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from planetary.artifacts.checkpoint import CheckpointEntry, list_checkpoints
from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.artifact_manifest import ArtifactManifest
from planetary.compiler.check.verification_report import read_report
from planetary.fleet.gateway.run_files import CHECKPOINTS, EVENTS
from planetary.fleet.preparation.artifact_list import manifests
from planetary.monitor.run_folder import load_history
from planetary.site.api.job_operations import job_of
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
from planetary.web.operations import BYTES, Operation

SHORTEST_DIGEST = 6


class CheckpointOperations:
    """Checkpoints of a job's run: list and download."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def operations(self) -> Sequence[Operation]:
        read = partial(Operation, method="GET", group="checkpoints", scope=Scope.READ, refuses=(404,))
        return (
            read(
                path="/v1/jobs/{job}/checkpoints",
                name="list_checkpoints",
                text="List the checkpoints of a job's run.",
                handler=self._list,
                answer=CheckpointList,
            ),
            read(
                path="/v1/jobs/{job}/checkpoints/{round}/{file}",
                name="download_checkpoint_file",
                text="Download a file of a checkpoint; ranges of bytes, too.",
                handler=self._download,
                answer=BYTES,
                others=((206, BYTES), (206, "multipart/byteranges")),
                refuses=(404, 416),
            ),
        )

    async def _list(self, request: Request) -> CheckpointList:
        folder = Path(job_of(self._site, request).folder) / CHECKPOINTS
        found = await asyncio.to_thread(_checkpoints, folder)
        return CheckpointList(checkpoints=tuple(view for view, _ in found))

    async def _download(self, request: Request) -> Response:
        job, round_, name = job_of(self._site, request), request.path_params["round"], request.path_params["file"]
        folder = Path(job.folder) / CHECKPOINTS
        found = await asyncio.to_thread(_checkpoints, folder)
        wanted = next((one for one in found if str(one[0].round) == round_), None)
        if wanted is None:
            kept = ", ".join(str(view.round) for view, _ in found) or "none"
            raise ApiError(
                404, f"the job {job.job} has no checkpoint of round {round_}; there are: {kept}", code="no_checkpoint"
            )
        view, path = wanted
        files = [file.name for file in view.files]
        if name not in files:
            raise ApiError(404, f"there is no file {name!r} in it; there are: {', '.join(files)}", code="no_file")
        return await _download_of(path / name, request, f"{job.job}-round-{round_}-{name}")


class ArtifactOperations:
    """Compiled steps and programs of this gateway, and which ones a run published."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._store = BlobStore(site.options.cache / "blobs")

    def operations(self) -> Sequence[Operation]:
        read = partial(Operation, method="GET", group="artifacts", scope=Scope.READ, refuses=(404,))
        return (
            read(
                path="/v1/artifacts",
                name="list_artifacts",
                text="List compiled steps and programs.",
                handler=self._list,
                answer=ArtifactList,
            ),
            read(
                path="/v1/artifacts/{artifact}",
                name="get_artifact",
                text="Return one; the beginning of its digest is enough.",
                handler=self._show,
                answer=ArtifactView,
            ),
            read(
                path="/v1/jobs/{job}/artifacts",
                name="list_job_artifacts",
                text="List the artifacts that a job's run published.",
                handler=self._history,
                answer=ArtifactHistory,
            ),
        )

    async def _list(self, request: Request) -> ArtifactList:
        return ArtifactList(artifacts=tuple(await asyncio.to_thread(self._read)))

    async def _show(self, request: Request) -> ArtifactView:
        wanted = request.path_params["artifact"].lower()
        found = [one for one in await asyncio.to_thread(self._read) if one.artifact.startswith(wanted)]
        if len(wanted) < SHORTEST_DIGEST or len(found) != 1:
            raise ApiError(
                404,
                f"{wanted!r} names {len(found)} artifacts: expected {SHORTEST_DIGEST} or more hex digits of one",
                code="artifact_not_found",
            )
        return found[0]

    async def _history(self, request: Request) -> ArtifactHistory:
        job = job_of(self._site, request)
        if not (Path(job.folder) / EVENTS).exists():
            return ArtifactHistory(history=())
        history = await asyncio.to_thread(load_history, Path(job.folder))
        return ArtifactHistory(
            history=tuple(
                ArtifactUse(
                    job_id=job.job,
                    at=event["t"],
                    artifact=event["digest"],
                    backend=event["backend"],
                    target=event["target"],
                    verified=event.get("verified", ""),
                )
                for event in history.events
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
