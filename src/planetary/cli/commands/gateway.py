"""`planetary gateway`: the training controller that workers on other machines connect to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.errors import EXIT_OK
from planetary.cli.option_values import port

if TYPE_CHECKING:
    import ssl

    from planetary.core.config import Config
    from planetary.core.errors import PlanetaryError
    from planetary.fabric.gateway.gateway import Gateway
    from planetary.fabric.gateway.run_host import GatewayOptions
    from planetary.fabric.preparation.preparation import Prepared
    from planetary.fabric.protocol.records import EndKind
    from planetary.fabric.protocol.status import RunStatus
    from planetary.moe.gateway.mixture_gateway import MixtureGateway
    from planetary.moe.gateway.mixture_preparation import PreparedMixture
    from planetary.net.authority import Authority
    from planetary.net.handshake import TokenCheck

DEFAULT_PORT = 8080


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "gateway",
        description="""
            Coordinate a run: prepare the data, compile the training step for whatever hardware joins, hand out
            leases, take the outer steps, write checkpoints. Workers connect to --port; people look at
            http://GATEWAY_HOST:GATEWAY_PORT/.
        """,
        examples=[
            "planetary gateway --gateway-config examples/stdlib.toml --host 0.0.0.0",
            "planetary gateway --resume runs/stdlib",
        ],
    )
    parser.add_argument("--gateway-config", type=Path, metavar="FILE", help="configuration (TOML or experiment.json)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="with --resume: this checkpoint instead of the newest"
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--host", help="address that workers connect to (default: fabric.host, 127.0.0.1)")
    parser.add_argument("--port", type=port, help="port that workers connect to (default: fabric.port, else 8080)")
    parser.add_argument("--gateway-host", default="127.0.0.1", help="address of the dashboard (default: %(default)s)")
    parser.add_argument("--gateway-port", type=port, default=18010, help="its port (default: %(default)s; 0: any)")
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="certificate authority and invites (default: ~/.planetary/gateway)"
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help="prepared data and compiled steps")
    parser.add_argument("--plain-loopback", action="store_true", help="no TLS and no tokens; loopback addresses only")
    parser.add_argument("--announce", type=Path, help=argparse.SUPPRESS)
    # threads of each of the workers, which are all on this machine
    parser.add_argument("--local-threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import asyncio

    from planetary.cli.logs import log_to_stderr

    log_to_stderr("gateway", verbose=getattr(args, "debug", False))
    config, folder = _what_to_run(args)
    if config.moe.composers:
        from planetary.moe.plan.checked_config import check_mixture

        check_mixture(config)  # before a folder or a port is taken; preparing the run says what it warns of
    return asyncio.run(_run(args, config, folder))


def _what_to_run(args: argparse.Namespace) -> tuple[Config, Path]:
    from planetary.cli.run_choice import new_run, resumed_run
    from planetary.core.errors import UserError

    if (args.gateway_config is None) == (args.resume is None):
        raise UserError("gateway: give either --gateway-config FILE for a new run or --resume RUN")
    if args.checkpoint is not None and args.resume is None:
        raise UserError("gateway: --checkpoint says where to resume from, so it needs --resume RUN")
    if args.resume is not None:
        return resumed_run(args.resume, args.set)
    return new_run(args.gateway_config, args.set, args.run_dir)


async def _run(args: argparse.Namespace, config: Config, folder: Path) -> int:
    import asyncio
    import concurrent.futures

    from planetary.artifacts.store import write_atomically
    from planetary.cli.announcement import Announcement, write_announcement
    from planetary.cli.node_flags import cache_folder
    from planetary.cli.option_values import default_state_folder
    from planetary.core.clock import SystemClock
    from planetary.fabric.gateway.run_host import GatewayOptions
    from planetary.fabric.shell.child import end_with_parent, on_stop_signals
    from planetary.monitor.dashboard import Dashboard
    from planetary.net.authority import Authority
    from planetary.net.handshake import TokenCheck
    from planetary.net.invite import mint

    loop = asyncio.get_running_loop()
    tls = tokens = authority = None
    token = ""
    state = (args.state or default_state_folder()).absolute()
    if not args.plain_loopback:
        authority = Authority.open(state, SystemClock().wall())
        tls = authority.server_context()
        tokens = TokenCheck(secret=authority.invite_secret, authority_fingerprint=authority.fingerprint)
        token = mint(authority.invite_secret, authority.fingerprint, expires=SystemClock().wall() + 7 * 86400)
    port = args.port if args.port is not None else config.fabric.port or DEFAULT_PORT
    options = GatewayOptions(
        folder=folder,
        cache=cache_folder(args.cache),
        host=args.host or config.fabric.host,
        port=port,
        resume=args.resume is not None,
        resume_from=args.checkpoint,
        local_threads=args.local_threads,
    )
    gateway = _make(config, options, tls, tokens, authority)
    await gateway.start()

    last: list[RunStatus] = []

    def read_status() -> RunStatus:
        """Ask the event loop, which owns the state; in the moment when it ends, show what was last seen."""

        async def status() -> RunStatus:
            return gateway.status()

        try:
            last[:] = [asyncio.run_coroutine_threadsafe(status(), loop).result(timeout=10)]
        except (RuntimeError, TimeoutError, concurrent.futures.CancelledError):
            if not last:
                raise
        return last[0]

    with Dashboard(read_status, folder / "metrics.jsonl", host=args.gateway_host, port=args.gateway_port) as dashboard:
        on_stop_signals(gateway.stop)
        if args.end_with_parent:

            def orphaned() -> None:
                loop.call_soon_threadsafe(gateway.stop, "stopped: its parent process ended")

            end_with_parent(orphaned)
        if args.announce is not None:
            announcement = Announcement(options.host, gateway.port, dashboard.url, token, str(folder))
            write_announcement(args.announce, announcement)
        else:
            token_file = state / "newest-invite.txt"
            if token:
                write_atomically(token_file, f"{token}\n".encode())
            _print_how_to_join(options.host, gateway.port, dashboard.url, token_file if token else None, folder)
        try:
            end = await gateway.run(lambda prepared: _write_facts(gateway, prepared))
        finally:
            with_report(folder)
    if not end.ok:
        raise failure_of(end.kind, end.reason, folder)
    return EXIT_OK


def _make(
    config: Config,
    options: GatewayOptions,
    tls: ssl.SSLContext | None,
    tokens: TokenCheck | None,
    authority: Authority | None,
) -> Gateway | MixtureGateway:
    if config.moe.composers:
        from planetary.moe.gateway.mixture_gateway import MixtureGateway

        if options.resume_from is not None:
            from planetary.core.errors import UserError

            raise UserError("a mixture over composers goes on from its payloads, not from a checkpoint")
        return MixtureGateway(config, options, tls, tokens)
    from planetary.fabric.gateway.gateway import Gateway

    return Gateway(config, options, tls, tokens, authority=authority)


def failure_of(kind: EndKind, reason: str, folder: Path) -> PlanetaryError:
    """Return the error that a run which did not finish ends with; its class decides the exit code."""
    from planetary.core import errors

    again = f"planetary train --resume {folder}"
    match kind:
        case "stopped":
            return errors.ClosedError(f"{reason}. The run can go on: {again}")
        case "compile":
            return errors.CompileError(f"{reason}. What was trained before is kept; when this is mended: {again}")
        case "data":
            return errors.UserError(f"{reason}. What was trained before is kept; when the data is mended: {again}")
        case "resource":
            return errors.ResourceError(f"{reason}. What was trained before is kept; when there is enough: {again}")
        case "numerics":
            # Every try from the same state would end the same way, and another learning rate is another run.
            return errors.NumericsError(
                f"{reason}. Finished rounds are kept in {folder}; start a new run with other values"
            )
    return errors.PeerError(f"{reason}. The run can go on: {again}")


def with_report(folder: Path) -> None:
    """Write report.json and loss.png of whatever the run has come to; a run without an event has neither."""
    from planetary.monitor.picture import write_picture
    from planetary.monitor.report import build_report, write_report
    from planetary.monitor.run_folder import EVENTS, load_history

    if (folder / EVENTS).exists():
        history = load_history(folder)
        write_report(folder, build_report(history))
        write_picture(folder, history)


def _write_facts(gateway: Gateway | MixtureGateway, prepared: Prepared | PreparedMixture) -> None:
    from planetary.core.config import config_hash
    from planetary.data.bigram import bigram_baseline
    from planetary.data.tokenizer import CharTokenizer
    from planetary.monitor.run_folder import collect_facts, write_facts

    config = gateway.config
    if isinstance(prepared.data.tokenizer, CharTokenizer):
        prepared.data.tokenizer.save(gateway.options.folder)
    bigram = bigram_baseline(prepared.data, prepared.data.eval_chunks(config))
    facts = collect_facts(
        run=config.run.name,
        params=prepared.param_count,
        inner_steps=config.train.inner_steps,
        config_hash=config_hash(config),
        seed=config.run.seed,
        bigram_loss=bigram.loss,
    )
    write_facts(gateway.options.folder, facts)


def _print_how_to_join(host: str, port: int, dashboard: str, token_file: Path | None, folder: Path) -> None:
    reach = "this machine's address" if host in ("0.0.0.0", "::") else host
    trust = f"--token-file {token_file}" if token_file is not None else "--plain-loopback"
    print(f"run folder   {folder}")
    print(f"dashboard    {dashboard}")
    print(f"invite       {token_file if token_file is not None else 'none needed on this machine'}")
    print(f"join with    planetary node-manager --host {reach} --port {port} --scale 1 {trust}", flush=True)
