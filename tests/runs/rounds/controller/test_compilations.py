"""Each holder of an invite can ask for compilations: few at once, and few targets for one machine."""

from __future__ import annotations

import asyncio

from controller_bench import Bench

from planetary.core.clock import SystemClock
from planetary.fleet.controller.membership import MOST_TARGETS
from planetary.fleet.gateway.compilations import Compilations
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import WorkerRefused
from planetary.fleet.shell.shell import Background

CHIPS = ("sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121", "sm_90", "sm_100")


def join_with(bench: Bench, node: str, worker: int, target: str) -> None:
    hello = m.Hello(
        role="worker",
        protocol=m.FABRIC.version,
        software="test",
        token="",
        worker=f"{node}/{worker}",
        node=node,
        pid=worker,
        backend="cuda",
        target=target,
        iree_version=bench.policy.iree_version,
    )
    bench.tell(e.Received(1000 + len(bench.sent), hello))


def test_a_node_has_the_step_compiled_for_few_targets() -> None:
    bench = Bench(workers=2)
    for worker, chip in enumerate(CHIPS):
        join_with(bench, "greedy", worker, chip)
    refused = bench.records(WorkerRefused)
    assert [record.target for record in refused] == list(CHIPS[MOST_TARGETS:])
    assert "node greedy has had the step compiled for 8 targets: cuda:sm_120" in refused[0].reason
    join_with(bench, "greedy", 50, CHIPS[0])  # what is there already costs nothing
    join_with(bench, "other", 0, CHIPS[-1])
    assert len(bench.records(WorkerRefused)) == len(refused)


def test_the_gateway_compiles_for_one_target_at_once() -> None:
    async def run() -> tuple[list[int], list[str]]:
        under_way, seen, done = 0, [], []

        async def compile_for(target: CompileTarget) -> PublishedArtifact:
            nonlocal under_way
            under_way += 1
            seen.append(under_way)
            for _ in range(5):
                await asyncio.sleep(0)
            under_way -= 1
            if target.name == "sm_70":
                raise RuntimeError("the compiler died")
            return PublishedArtifact("d" * 64, 1, "verified")

        def post(event: e.Event) -> None:
            assert isinstance(event, e.Compiled | e.CompileFailed)
            done.append(f"{type(event).__name__} {event.target}")

        compilations = Compilations(compile_for, post, SystemClock(), Background())
        for chip in CHIPS[:4]:
            compilations.compile(e.Compile("cuda", chip, ""))
        assert len(compilations.compiling) == 4  # they are named while they wait
        while len(done) < 4:
            await asyncio.sleep(0)
        assert not compilations.compiling
        return seen, done

    seen, done = asyncio.run(run())
    assert max(seen) == 1
    assert sorted(done) == ["CompileFailed sm_70", "Compiled sm_60", "Compiled sm_75", "Compiled sm_80"]
