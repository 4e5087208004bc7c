"""A compiled training step on this machine's CPU, checked as a gateway does before it publishes the artifact."""

from __future__ import annotations

from pathlib import Path

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check.verification_report import VerifyReport
from planetary.compiler.check.verify import verify_artifact
from planetary.compiler.frontend.export import Model
from planetary.compiler.step.step_module import TrainStep
from planetary.runtime.executor import open_executor
from planetary.runtime.host import host_features


def checked(model: Model, step: TrainStep, folder: Path) -> VerifyReport:
    store, host = BlobStore(folder), Target("cpu", "host", host_features())
    return verify_artifact(
        step,
        compile_artifact(step, host, store),
        lambda artifact, spec: open_executor(store.path(store.put(artifact.data)), spec, backend="cpu"),
        params=model.initial("param"),
        buffers=model.initial("buffer"),
        local=host,
    )
