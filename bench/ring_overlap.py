"""The ring with and without overlap: held-out loss, and the share of time that workers wait between rounds.

    python bench/ring_overlap.py                                   # 36 rounds of 40 inner steps of the example
    python bench/ring_overlap.py --inner-steps 10 --repeats 1
    python bench/ring_overlap.py --outer 0.7,0.0 --outer 0.5,0.0   # other outer optimizers (rate,momentum)
    python bench/ring_overlap.py --mbit 100 --delay-ms 20          # the workers 20 ms apart, 100 Mbit/s each way

Each run is one gateway and two workers on this machine, of one seed; runs of a setting alternate. With `--mbit` what
the workers send each other goes over sockets through `planetary.testing.shaped_relay`. A worker waits while it is in no
inner step, between the first `round_started` and the last `round_finished`. Held-out losses are those at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from planetary.artifacts.jsonl import read_json_lines
from planetary.core.configuration.presets import preset_of
from planetary.fleet.protocol.records import AnyRecord, DeltaAccepted, EvalFinished, RoundFinished, RoundStarted
from planetary.run.processes.announcement import read_announcement
from planetary.testing.shaped_relay import RelayRoute, ShapedRelay, TokenBucket, Way

CONFIG = Path(__file__).parents[1] / "examples" / "stdlib.toml"
WAYS = ("star", "none", "async")
WORKERS = 2
MBIT = 1e6 / 8  # bytes/s


class Found(msgspec.Struct):
    """What one run gave."""

    loss: float
    seconds: float  # from the first round's start to the last one's end
    waiting: float  # share of the workers' time


class Link(msgspec.Struct, frozen=True):
    """Between the two workers."""

    bytes_per_s: float
    delay_s: float


def run(way: str, settings: list[str], cache: Path, link: Link | None) -> Found:
    """Train once; `way` is the star, or the ring's `sync.overlap`."""
    plain = [f"--set={setting}" for setting in preset_of("ring").overrides(WORKERS)]
    ring = ["--set=sync.topology=star"] if way == "star" else [f"--set=sync.overlap={way}"]
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="planetary-bench-")))
        announced = scratch / "announcement"
        everywhere = ["--plain-loopback", f"--cache={cache}"]
        command = [sys.executable, "-m", "planetary.cli.main", "gateway", *everywhere, "--port=0", "--gateway-port=0"]
        folders = [f"--announce={announced}", f"--run-dir={scratch / 'run'}", f"--state={scratch / 'authority'}"]
        gateway = stack.enter_context(
            process([*command, *folders, f"--gateway-config={CONFIG}", *plain, *settings, *ring])
        )
        while (announcement := read_announcement(announced)) is None:
            if gateway.poll() is not None:
                raise SystemExit(f"the gateway ended with {gateway.returncode}")
            time.sleep(0.1)
        places = stack.enter_context(apart(link)) if link is not None else [""] * WORKERS
        for number, place in enumerate(places):
            command = [sys.executable, __file__, "worker", place, "worker", *everywhere, "--node-name=local"]
            where = [f"--connect=127.0.0.1:{announcement.port}", f"--state={scratch / 'workers'}"]
            stack.enter_context(process([*command, *where, f"--device-id={number}", "--threads=1"]))
        if gateway.wait() != 0:
            raise SystemExit(f"the run ended with exit code {gateway.returncode}")
        journal = list(read_json_lines(scratch / "run" / "events.jsonl", AnyRecord))
    began = next(r.t for r in journal if isinstance(r, RoundStarted))
    ended = [r for r in journal if isinstance(r, RoundFinished)][-1]
    busy = sum(r.seconds for r in journal if isinstance(r, DeltaAccepted))
    seconds = ended.t - began
    losses = {r.version: r.loss for r in journal if isinstance(r, EvalFinished)}
    return Found(losses[ended.round], seconds, 1 - busy / (WORKERS * seconds))


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended at the latest with the block."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            yield child
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            child.kill()


@contextlib.contextmanager
def apart(link: Link) -> Iterator[list[str]]:
    """Put a relay in front of each worker; yield the port of each, and where the other one reaches it."""
    with ShapedRelay() as relay, contextlib.ExitStack() as stack:
        places = []
        for _ in range(WORKERS):
            reserved = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = reserved.getsockname()[1]
            there, back = (Way(link.delay_s, link.bytes_per_s, (TokenBucket(link.bytes_per_s),)) for _ in range(2))
            places.append(f"{port},127.0.0.1:{relay.listen({'': RelayRoute(('127.0.0.1', port), there, back)})}")
        stack.pop_all().close()  # the workers take the ports
        yield places


def worker(place: str, arguments: list[str]) -> None:
    """Be a worker process, reachable by the other one at `place` ("port,host:port"; empty: as usual)."""
    from planetary.cli.main import main as command
    from planetary.collectives import Communicator
    from planetary.runs.rounds.worker import ring_peer

    if place:
        port, advertise = place.split(",")
        ring_peer.Communicator = functools.partial(  # type: ignore[misc,assignment]  # it takes no such options
            Communicator, data_port=int(port), advertise=advertise, transport="tcp"
        )
    sys.exit(command(arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--inner-steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--outer", action="append", help="rate,momentum; may be repeated")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[1:])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--mbit", type=float, help="Mbit/s between the workers, each way; default: no limit")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, with --mbit")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "planetary-bench")
    args = parser.parse_args()
    link = Link(args.mbit * MBIT, args.delay_ms / 1e3) if args.mbit else None
    print("| outer rate, momentum | way | held-out loss | seconds | waiting |")
    print("|---|---|---|---|---|")
    for outer in args.outer or ["1.0,0.0"]:
        rate, momentum = outer.split(",")
        values = {
            "train.rounds": args.rounds,
            "train.inner_steps": args.inner_steps,
            "optimizer.learning_rate": args.learning_rate,
            "eval.every": args.rounds,  # only after the last round
            "outer.learning_rate": rate,
            "outer.momentum": momentum,
        }
        settings = [f"--set={key}={value}" for key, value in values.items()]
        found: dict[str, list[Found]] = {way: [] for way in args.ways}
        for _ in range(args.repeats):
            for way in args.ways:
                found[way].append(run(way, settings, args.cache, link))
                print(outer, way, found[way][-1], file=sys.stderr, flush=True)
        for way, runs in found.items():
            assert len({one.loss for one in runs}) == 1, "the same run ended with another loss"
            seconds = statistics.median(one.seconds for one in runs)
            waiting = statistics.median(one.waiting for one in runs)
            print(f"| {outer} | {way} | {runs[0].loss:.4f} | {seconds:.1f} | {waiting:.1%} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        main()
