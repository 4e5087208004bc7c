"""A gateway that serves a known model and its worker in one event loop, on real connections: a completion over HTTP."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from small_policy import SmallPolicy, SmallPolicyProgram, small_policy

from planetary.artifacts.packed_arrays import pack_arrays, unpack_arrays
from planetary.core.config import config_from_tables
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.preparation.compiling import PublishedArtifact
from planetary.fleet.protocol import messages as m
from planetary.fleet.shell.shell import Address
from planetary.fleet.worker.role import Role, WorkerOptions, Workplace
from planetary.fleet.worker.worker import WorkerShell
from planetary.runs.serve.gateway import PreparedServing, ServingSetup
from planetary.runs.serve.loaded_model import LoadedModel
from planetary.runs.serve.loader import ServingLoader
from planetary.runs.serve.messages import SERVING, WEIGHTS, ServingJob, ServingReady
from planetary.runs.serve.role import ServingRole
from waiting import HANG_S

LOCAL = "127.0.0.1"


class KnownSetup(ServingSetup):
    """Serves a table of logits; nothing is exported and nothing is compiled."""

    def __init__(self, policy: SmallPolicy) -> None:
        super().__init__(lambda _: policy.prepared.model, self._compile)
        self._policy = policy

    def prepare(self, gateway: Gateway[Any]) -> PreparedServing:
        prepared, self._store = self._policy.prepared, gateway.store
        weights = gateway.store.put(pack_arrays(WEIGHTS, None, prepared.model.arrays()))
        shape, program = prepared.shape.serving, self._policy.run.program
        return PreparedServing(gateway.config, prepared.model, shape, program, weights, "")

    async def _compile(self, *_: object) -> PublishedArtifact:
        return PublishedArtifact(self._policy.artifact(self._store), 1, "known")


class KnownLoader(ServingLoader):
    """Makes the production role around the known functions."""

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        assert isinstance(job, ServingJob)
        _, weights = unpack_arrays(place.store.get(job.weights), WEIGHTS)
        model = LoadedModel(SmallPolicyProgram(job.functions), job.shape, weights)
        ready = ServingReady(artifact=job.artifact, weights=job.weights, device="none", verified="known")
        return ServingRole(model, ready, place.send)


def complete(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a served model to a request for a completion, once its worker is ready."""
    return asyncio.run(_complete(folder, request))


async def _complete(folder: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    config = config_from_tables({"run": {"name": "served"}, "serve": {"model": "known", "port": 0}})
    (folder / "run").mkdir()
    options = GatewayOptions(folder=folder / "run", cache=folder / "cache", host=LOCAL, port=0, resume=False)
    serving_setup = KnownSetup(small_policy(rounds=1))
    gateway = Gateway(config, options, Security(), serving_setup)
    await gateway.start()
    worker = WorkerShell(
        WorkerOptions(
            address=Address(LOCAL, gateway.port, ""),
            name="node/0",
            node="node",
            backend="cpu",
            target="host",
            device_id=0,
            island=1,
            threads=1,
            cache=folder / "worker",
            state=folder / "state",
            give_up_s=0.0,
        ),
        SERVING,
        {ServingJob: KnownLoader()},
    )
    serving, working = asyncio.create_task(gateway.run()), asyncio.create_task(worker.work())
    try:
        while not serving_setup.is_ready:
            assert not serving.done()
            assert not working.done()
            await asyncio.sleep(0)
        return await asyncio.to_thread(_ask, f"{gateway.endpoint.rstrip('/')}/v1/completions", request)
    finally:
        gateway.stop("answered", for_good=True)
        await asyncio.gather(serving, working)


def _ask(url: str, request: Mapping[str, Any]) -> dict[str, Any]:
    post = urllib.request.Request(url, json.dumps(request).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(post, timeout=HANG_S) as answer:
        return json.load(answer)
