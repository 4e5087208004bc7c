"""`planetary plan`: predict the cost of each preset on a cluster; after a run, compare prediction and measurement."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.option_values import rate, short_seconds
from planetary.core import decoding
from planetary.core.extension_points import TOPOLOGIES

if TYPE_CHECKING:
    from planetary.sync.plan import Cluster

COLUMNS = ("up", "down", "waits", "used", "a day", "worker", "gateway")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "plan",
        description="""
            Predict the cost of each synchronisation preset on a cluster: bytes, utilisation, memory, the loss that was
            published and the loss in our own runs, each with its source, and which one is recommended. Pure arithmetic;
            nothing is started. With --run: the prediction for a finished run beside its measurement.
        """,
        examples=[
            "planetary plan --params 1e9 --workers 16 --bandwidth 100Mbit --rtt 80ms --step-time 2s",
            "planetary plan --params 1e9 --workers 16 --measured links.json --step-time 2s --price 1.5",
            "planetary plan --run runs/stdlib --bandwidth 1Gbit --rtt 1ms",
        ],
    )
    parser.add_argument("--params", type=float, metavar="N", help="parameters of the model, e.g. 1e9")
    parser.add_argument("--workers", type=int, metavar="M", help="workers that train at once")
    parser.add_argument("--bandwidth", metavar="RATE", help="of each worker's link each way, e.g. 100Mbit")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="links as `planetary doctor --save FILE` found them; flags win"
    )
    parser.add_argument("--gateway-bandwidth", metavar="RATE", help="of the gateway's link (default: as the workers')")
    parser.add_argument("--rtt", metavar="TIME", help="round trip to the gateway (default: as measured, else 50ms)")
    parser.add_argument("--step-time", metavar="TIME", help="of an inner step, e.g. 2s or 300ms")
    parser.add_argument("--inner-steps", type=int, default=0, metavar="H", help="in place of each preset's own")
    parser.add_argument("--price", type=float, default=0.0, metavar="P", help="of a worker and hour")
    parser.add_argument("--run", dest="folder", type=Path, metavar="RUN", help="a run folder to compare with")
    parser.add_argument("--json", action="store_true", help="print the predictions as JSON and nothing else")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.cli.exit_codes import EXIT_OK
    from planetary.core.errors import UserError
    from planetary.sync.plan import Cluster

    if args.folder is not None:
        return _compare(args)
    for name in ("params", "workers", "step_time"):
        if getattr(args, name) is None:
            raise UserError(f"plan: --{name.replace('_', '-')} is missing; or name a finished run with --run")
    cluster = Cluster(
        params=args.params,
        workers=args.workers,
        step_s=short_seconds(args.step_time, "--step-time"),
        price_per_worker_hour=args.price,
        **_links(args),
    )
    _predict(args, cluster)
    return EXIT_OK


def _links(args: argparse.Namespace) -> dict[str, float]:
    """Return the links of a `Cluster`: by flags, else as measured. Raises `UserError`."""
    from planetary.core.errors import UserError

    if args.measured is None and args.bandwidth is None:
        raise UserError("plan: --bandwidth is missing; or give links that were measured with --measured FILE")
    links = {"rtt_s": 0.05} if args.measured is None else _measured(args.measured)
    if args.bandwidth is not None:
        links |= {"bandwidth": rate(args.bandwidth, "--bandwidth"), "upload": 0.0, "ring_bandwidth": 0.0}
    if args.rtt is not None:
        links |= {"rtt_s": short_seconds(args.rtt, "--rtt"), "ring_rtt_s": 0.0}
    if args.gateway_bandwidth is not None:
        links["gateway_bandwidth"] = rate(args.gateway_bandwidth, "--gateway-bandwidth")
    return {"gateway_bandwidth": links["bandwidth"], **links}


def _measured(path: Path) -> dict[str, float]:
    import msgspec

    from planetary.core.errors import UserError
    from planetary.run.doctor.findings import Measurements

    try:
        found = decoding.from_json(path.read_bytes(), Measurements)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"plan: {path} is no file of `planetary doctor --save`: {error}") from None
    if not (found.up and found.down) and not found.ring_rate:
        raise UserError(
            f"plan: {path} has no measured link: give `planetary doctor` the gateway's address, or --master"
        )
    return {
        "bandwidth": found.down or found.ring_rate,
        "upload": found.up,
        "rtt_s": found.rtt_s or found.ring_rtt_s,
        "ring_bandwidth": found.ring_rate,
        "ring_rtt_s": found.ring_rtt_s,
    }


def _predict(args: argparse.Namespace, cluster: Cluster) -> None:
    import msgspec

    from planetary.core.configuration.presets import PRESETS
    from planetary.sync.plan import plan, predict

    found, recommended = plan(cluster)
    best = next(one for one in found if recommended.startswith(f"{one.preset}:"))
    if args.inner_steps:
        found = [predict(preset, cluster, inner_steps=args.inner_steps) for preset in PRESETS.values()]
    if args.json:
        print(msgspec.json.encode({"presets": found, "recommended": recommended, "preset": best.preset}).decode())
        return
    _print(found, cluster)
    print(f"\nrecommended: {recommended}")
    print(
        f"  train.inner_steps {best.inner_steps}, {best.fragments} fragment{'s' * (best.fragments > 1)}, "
        f"{best.bits_up:.3g} bits a number up and {best.bits_down:.3g} down"
    )
    print(f"  published loss against data-parallel training: {best.gap} ({best.source})")
    print(f"  measured here: {_measured_loss(best)}")
    if cluster.price_per_worker_hour:
        cost = cluster.workers * 24 * cluster.price_per_worker_hour
        waits = cost * (1 - best.utilisation)
        print(f"cost: {cost:,.2f} a day for {cluster.workers} workers, {waits:,.2f} of it while they wait")


def _print(found: list[Any], cluster: Cluster) -> None:
    from planetary.monitor import human_numbers as human

    print(f"{'preset':14}{'H':>5}" + "".join(f"{name:>10}" for name in COLUMNS))
    for one in found:
        print(
            f"{one.preset:14}{one.inner_steps:5}{human.size(one.up):>10}{human.size(one.down):>10}"
            f"{human.duration(one.wait_s):>10}{human.percent(one.utilisation):>10}"
            f"{human.size(one.bytes_per_day(cluster.workers)):>10}{human.size(one.worker_memory):>10}"
            f"{human.size(one.gateway_memory):>10}"
        )
    print(
        "\nup, down: of a worker and round; waits: of a round; used: part of the time that workers train; a day: bytes"
        "\nof all links; worker, gateway: memory beside the step. Loss: published, against data-parallel training; and"
        "\nmeasured here on small models in short runs, against averages in float32 with as many steps between two:"
    )
    for one in found:
        print(f"  {one.preset}: {one.gap} ({one.source}); here {_measured_loss(one)}")


def _measured_loss(one: Any) -> str:
    return one.measured_in if one.measured is None else f"{one.measured:+.2f} % ({one.measured_in})"


def _compare(args: argparse.Namespace) -> int:
    from statistics import median

    from planetary.cli.exit_codes import EXIT_OK
    from planetary.core.config import load_config
    from planetary.core.configuration.presets import Preset
    from planetary.core.errors import UserError
    from planetary.core.registry import file_of
    from planetary.fleet.gateway.run_files import CONFIG
    from planetary.monitor import human_numbers as human
    from planetary.monitor.run_folder import load_history
    from planetary.runs.mixture.config import MoeConfig
    from planetary.sync.plan import Cluster, predict

    history, config = load_history(args.folder), load_config(args.folder / CONFIG)
    lines = [line for line in history.metrics if line.contributions and line.round > 1]
    if config.of(MoeConfig).composers or not lines:
        raise UserError(f"plan: {args.folder} has no second round of a run in rounds that could be compared")
    workers = round(median(line.workers for line in lines))
    # Where leases follow speeds, a round has as many steps in all as where they are equal.
    each = config.train.inner_steps
    steps = [sum(c.seconds or 0.0 for c in line.contributions) / (each * len(line.contributions)) for line in lines]
    sync = config.sync
    for key in ("compression", "broadcast_compression", "overlap"):
        if file_of(value := getattr(sync, key)) is not None:
            raise UserError(
                f"plan: sync.{key} = {value}: the costs of a class in a file are not known without running it"
            )
    settings: dict[str, str | int | float] = {
        "sync.topology": sync.topology,
        "sync.overlap": sync.overlap,
        "sync.compression": sync.compression,
        "sync.broadcast_compression": sync.broadcast_compression,
        "sync.fragments": sync.fragments,
        "sync.delay": sync.delay,
        "train.inner_steps": config.train.inner_steps,
    }
    started = [event for event in history.events if event.get("event") == "run_started"]
    params = float(started[0]["params"]) if started else 0.0
    cluster = Cluster(
        params=params,
        workers=workers,
        step_s=median(steps),
        price_per_worker_hour=args.price,
        **_links(args),
    )
    found = predict(Preset("diloco", "", "", settings), cluster)
    ring = TOPOLOGIES.find(sync.topology).in_ring
    up = median(line.bytes_ring if ring else line.bytes_up for line in lines)
    pairs = [
        ("bytes sent by workers, a round", workers * found.up, up, human.size),
        ("seconds a round", found.compute_s + found.wait_s, median(line.seconds for line in lines), human.duration),
        ("utilisation", found.utilisation, median(line.compute_fraction for line in lines), human.percent),
    ]
    if not ring:
        down = median(line.bytes_down for line in lines)
        pairs.insert(1, ("bytes sent to workers, a round", workers * found.down, down, human.size))
    print(f"{args.folder}: {len(lines)} rounds of {workers} workers, {params:,.0f} parameters, medians\n")
    print(f"{'':34}{'predicted':>12}{'measured':>12}{'ratio':>8}")
    for name, predicted, measured, show in pairs:
        print(f"{name:34}{show(predicted):>12}{show(measured):>12}{measured / predicted if predicted else 0:8.2f}")
    print(f"\nthe presets on these machines, with steps of {human.brief(cluster.step_s)}:\n")
    _predict(args, cluster)
    return EXIT_OK
