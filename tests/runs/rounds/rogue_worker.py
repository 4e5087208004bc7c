"""A worker that speaks the protocol and then misbehaves: what a broken or hostile peer looks like to a gateway."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping

import numpy as np

from planetary.core.errors import PlanetaryError
from planetary.core.step import StepSpec
from planetary.fleet.protocol import messages as m
from planetary.net.client import Trust, connect
from planetary.net.connection import Connection
from planetary.net.handshake import say_hello
from planetary.net.identity import Identity
from planetary.net.invite import read
from planetary.net.network import TCP, MakeProtocol, Network, TcpNetwork
from planetary.run.processes.announcement import Announcement
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.messages import ROUNDS
from planetary.runtime.host import target_features
from planetary.runtime.iree_device import iree_version
from planetary.version import __version__
from planetary.wire.frames import Kind, encode_prefix
from planetary.wire.limits import MAX_CHUNK_BYTES

PATIENCE_S = 60.0  # of a rogue for its gateway


def hello(name: str, token: str, **changes: object) -> m.Hello:
    fields: dict[str, object] = {
        "role": "worker",
        "protocol": rm.ROUNDS.version,
        "software": __version__,
        "token": token,
        "worker": f"{name}/0",
        "node": name,
        "pid": os.getpid(),
        "backend": "cpu",
        "target": "host",
        "target_features": target_features("cpu", "host"),
        "iree_version": iree_version(),
    }
    greeting = m.Hello(**{**fields, **changes})  # type: ignore[arg-type]
    return Identity(os.urandom(32)).sign(greeting, read(token).authority_fingerprint) if token else greeting


async def knock(announced: Announcement, greeting: m.Hello, token: str | None = None) -> m.Welcome | m.Refused:
    """Say hello as soon as the gateway is ready, and leave."""
    while True:
        connection = await dial(announced, token)
        try:
            answer = await say_hello(connection, greeting, 10.0)
        finally:
            connection.abort()
        if not (isinstance(answer, m.Refused) and answer.retry):
            return answer
        await asyncio.sleep(0.1)


class OpenNetwork(TcpNetwork):
    """Keeps the transport that it opened last, to write bytes on it that no `Connection` would."""

    transport: asyncio.Transport

    async def dial(self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Transport:
        self.transport = await super().dial(make, host, port, tls)
        return self.transport


async def dial(announced: Announcement, token: str | None = None, network: Network = TCP) -> Connection:
    token = announced.token if token is None else token
    trust = Trust(token) if token else Trust.plain_loopback()
    return await connect(announced.host, announced.port, trust, ROUNDS, network=network)


class Rogue:
    """One misbehaving worker, named after its misbehaviour. `run` returns how the gateway got rid of it."""

    def __init__(self, behaviour: str, announced: Announcement) -> None:
        self.name = f"rogue-{behaviour}"
        self.tasks = 0
        self._behaviour = behaviour
        self._network = OpenNetwork()
        self._announced = announced
        self._spec: StepSpec | None = None
        self._params: Mapping[str, np.ndarray] = {}

    async def run(self, ready: asyncio.Event) -> str:
        async with asyncio.timeout(PATIENCE_S):
            connection = await self._admitted()
            try:
                while True:
                    received = await connection.receive()
                    message = received.message
                    match message:
                        case rm.TrainingJob():
                            self._spec = message.spec
                            await connection.send(rm.Ready(artifact=message.artifact, opt_state_round=0))
                            ready.set()
                        case rm.Parameters():
                            self._params = received.tensors
                        case rm.TrainTask():
                            self.tasks += 1
                            await self._answer(connection, message)
                        case rm.EvalTask():
                            sorry = m.TaskFailed(task=message.task, kind="resource", reason="a rogue evaluates nothing")
                            await connection.send(sorry)
                        case m.Shutdown():
                            return message.reason
            except PlanetaryError as error:
                return str(error)
            finally:
                connection.abort()

    async def _admitted(self) -> Connection:
        while True:
            connection = await dial(self._announced, network=self._network)
            answer = await say_hello(connection, hello(self.name, self._announced.token), 10.0)
            if isinstance(answer, m.Welcome):
                return connection
            connection.abort()
            assert answer.retry, answer.reason
            await asyncio.sleep(0.1)

    async def _answer(self, connection: Connection, task: rm.TrainTask) -> None:
        assert self._spec is not None
        first = self._spec.params[0].name
        ends = {name: np.array(array) for name, array in self._params.items()}
        batch, length = self._spec.batch[0].shape
        result = rm.TrainResult(
            task=task.task,
            round=task.round,
            steps=task.steps,
            tokens=task.steps * batch * length,
            loss=1.0,
            grad_norm=1.0,
            seconds=0.1,
        )
        match self._behaviour:
            case "nan":
                ends[first].flat[3] = np.nan
            case "inf":
                ends[first].flat[3] = -np.inf
            case "shape":
                ends[first] = ends[first][:-1]
            case "dtype":
                ends[first] = ends[first].astype(np.float64)
            case "missing":
                del ends[first]
            case "tokens":
                result = rm.TrainResult(**{**_fields(result), "tokens": result.tokens * 100})
            case "unknown":
                ends["backdoor"] = ends.pop(first)
            case "huge":
                ends[first] = np.zeros(64 << 20, np.uint8)
            case "surplus":
                ends["backdoor"] = ends[first]
            case "truncated" | "corrupted" | "oversized" | "garbage":
                await self._send_raw(connection)
                return
        await connection.send(result, ends)

    async def _send_raw(self, connection: Connection) -> None:
        """Write bytes that are no whole, sound frame behind everything that was sent so far."""
        payload = b'{"type":"Goodbye","id":99,"reason":"not me"}'
        prefix = encode_prefix(ROUNDS.version, Kind.CONTROL, b"", payload)
        match self._behaviour:
            case "truncated":
                data = prefix + payload[:10]
            case "corrupted":
                data = prefix + payload.replace(b"not", b"n0t")
            case "oversized":
                data = encode_prefix(ROUNDS.version, Kind.CHUNK, b"x", _Long(MAX_CHUNK_BYTES + 1))  # type: ignore[arg-type]
            case _:
                data = b"\x00" * 64
        transport = self._network.transport
        transport.write(data)
        if self._behaviour == "truncated":
            transport.close()


class _Long(bytes):
    """Bytes that say they are many."""

    def __new__(cls, length: int) -> _Long:
        made = super().__new__(cls)
        made.length = length
        return made

    length: int

    def __len__(self) -> int:
        return self.length


def _fields(message: rm.TrainResult) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}
