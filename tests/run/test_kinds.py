"""A new kind of run is one file and one line; membership, journal, stalls and the end come with the bases."""

from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest
from toy_kind import PROTOCOL, Present, RollCall, Toy

from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.protocol import kind_table
from planetary.fleet.protocol import messages as m
from planetary.monitor.folder_status import status_of
from planetary.monitor.run_folder import load_history
from planetary.net.client import Trust, connect
from planetary.net.handshake import say_hello
from planetary.run import kinds
from planetary.run.simulate import simulation_of
from planetary.runs.rounds.training_status import TrainingStatus
from planetary.version import __version__


@pytest.fixture
def with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (Toy(), *kinds.all_kinds())
    monkeypatch.setattr(kinds, "all_kinds", lambda: found)
    reader = EntryPoint("toy", "toy_kind:READER", kind_table.GROUP)
    monkeypatch.setattr(kind_table, "entry_points", lambda group: [reader] if group == kind_table.GROUP else [])


def test_configuration_belongs_to_the_first_claiming_kind(with_toy: None) -> None:
    named = apply_overrides(Config(), ["run.name=toy"])
    assert kinds.kind_of(named).name == "toy"
    assert kinds.kind_of(Config()).name == "rounds"
    assert kinds.kind_of(apply_overrides(Config(), ['federation.sites=[{ name = "a" }]'])).name == "hub"
    assert kinds.kind_of(apply_overrides(Config(), ["federation.hub=127.0.0.1:8090"])).name == "site"
    assert kinds.kind_of(apply_overrides(Config(), ["serve.model=runs/x"])).name == "serving"
    assert kinds.kind_of(apply_overrides(Config(), ["rl.task=sort"])).name == "reinforcement"
    assert kinds.kind_of(apply_overrides(Config(), ["moe.composers=4", "fabric.workers=4"])).name == "mixture"


def test_kind_refuses_unsupported_keys_by_name(tmp_path: Path) -> None:
    toy, (serving, mixture, learned, hub, site, rounds) = Toy(), kinds.all_kinds()
    config = apply_overrides(Config(), ["moe.composers=4", "fabric.workers=4"])
    assert toy.check(config) == rounds.check(Config()) == []
    with pytest.raises(UserError, match=r"kind 'rounds' does not honour .*moe\.composers: moe\.composers = 0"):
        rounds.check(config)
    rounds.check_baseline(config)
    mixture.check_surrogates(tmp_path)
    for check in (toy.check_baseline, lambda config: simulation_of(toy, config, tmp_path)):
        with pytest.raises(UserError, match='kind "toy"'):
            check(config)
    with pytest.raises(UserError, match='kind "hub"'):
        hub.check_baseline(config)
    for kind in (hub, site):
        with pytest.raises(UserError, match=f'kind "{kind.name}"'):
            simulation_of(kind, config, tmp_path)
    with pytest.raises(UserError, match=r"train.batch_size=32"):
        mixture.check_baseline(config)
    for kind in (toy, serving, learned, rounds):
        with pytest.raises(UserError, match=r"no composers and no surrogates"):
            kind.check_surrogates(tmp_path)


async def answer(port: int, name: str) -> str:
    """Join as a worker, say the name that the job asks for, and return why the gateway ends the connection."""
    connection = await connect("127.0.0.1", port, Trust.plain_loopback(), PROTOCOL)
    greeting = m.Hello(
        role="worker",
        protocol=PROTOCOL.version,
        software=__version__,
        token="",
        worker=name,
        node=name,
        pid=1,
        backend="cpu",
        target="host",
        target_features="",
        iree_version="",
    )
    try:
        assert isinstance(await say_hello(connection, greeting, 10.0), m.Welcome)
        while True:
            message = (await connection.receive(10.0)).message
            if isinstance(message, RollCall):
                await connection.send(Present(name=name))
            elif isinstance(message, m.Shutdown):
                return message.reason
    finally:
        connection.abort()


async def whole_run(gateway: Gateway, names: tuple[str, ...]) -> tuple[bool, str, list[str]]:
    await gateway.start()
    run = asyncio.ensure_future(gateway.run())
    while gateway.controller is None:
        await asyncio.sleep(0)
    reasons = await asyncio.gather(*(answer(gateway.port, name) for name in names))
    end = await run
    return end.ok, end.reason, reasons


def test_toy_kind_runs_to_its_end_on_real_connections(with_toy: None, tmp_path: Path) -> None:
    config = apply_overrides(Config(), ["run.name=toy", "fabric.workers=2"])
    options = GatewayOptions(folder=tmp_path / "run", cache=tmp_path / "cache", host="127.0.0.1", port=0, resume=False)
    gateway = kinds.kind_of(config).gateway(config, options, Security())
    ok, reason, told = asyncio.run(asyncio.wait_for(whole_run(gateway, ("a/0", "b/0")), 30))
    assert (ok, reason) == (True, "all have answered")
    assert told == ["all have answered"] * 2
    journal = [msgspec.json.decode(line) for line in (tmp_path / "run" / "events.jsonl").read_bytes().splitlines()]
    events = [record["event"] for record in journal]
    assert (events[0], events[-1]) == ("run_started", "run_finished")
    assert sorted(record["name"] for record in journal if record["event"] == "answered") == ["a/0", "b/0"]
    assert events.count("worker_joined") == 2
    status = status_of(load_history(tmp_path / "run"))  # by the reader that the kind's package declares
    assert (status.state, [worker.name for worker in status.workers]) == ("finished", ["a/0", "b/0"])


def test_status_of_a_served_model_has_no_rounds(tmp_path: Path) -> None:
    """A kind without rounds shows none, whatever the default of `train.rounds`; a training shows those planned."""
    options = GatewayOptions(folder=tmp_path / "run", cache=tmp_path / "cache", host="127.0.0.1", port=0, resume=False)

    def planned(*keys: str) -> tuple[int, int] | None:
        config = apply_overrides(Config(), ["run.name=r", *keys])
        status = kinds.kind_of(config).gateway(config, options, Security()).status()
        return (status.rounds, status.inner_steps) if isinstance(status, TrainingStatus) else None

    assert planned("serve.model=gpt2") is None
    assert planned("train.rounds=7", "train.inner_steps=3") == (7, 3)
    assert planned("rl.task=reverse", "train.rounds=7", "train.inner_steps=3") == (7, 3)
