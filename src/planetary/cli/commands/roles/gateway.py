"""`planetary gateway`: the run, or the controllers of several, that workers on other machines connect to."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from planetary.cli.command_table import command_parser
from planetary.cli.exit_codes import EXIT_OK
from planetary.cli.option_values import WORKER_PORT, port
from planetary.client import API_HOST, API_PORT
from planetary.core.printable import command_line

if TYPE_CHECKING:
    from planetary.core.configuration.schema import Config
    from planetary.run.processes.announcement import Announcement
    from planetary.run.processes.local_run import GatewayStart
    from planetary.site.config import Api, SiteConfig
    from planetary.site.gateway_process import HostOptions
    from planetary.site.placement.hub_link import HubLinkOptions

_SWITCHES = ("api_tls", "allow_unencrypted", "plain_loopback")
_OF_WORKERS = ("fabric.backend", "fabric.target", "fabric.island", "fabric.threads")
_HUB_FLAGS = {
    "--hub": "federation.hub",
    "--hub-token-file": "federation.token_file",
    "--site": "federation.site",
}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    from planetary.cli.key_flags import add_key_flags

    parser = command_parser(
        subparsers,
        "gateway",
        description="""
            Coordinate a run: prepare the data, compile the training step for whatever hardware joins, hand out
            leases, take the outer steps, write checkpoints. Workers connect to --port; people look at
            http://GATEWAY_HOST:GATEWAY_PORT/, where the control API is, too. With a file of controllers
            (gateway_id, controllers) it takes jobs, one after or beside the other, over shared workers.
        """,
        examples=[
            "planetary gateway --gateway-config examples/stdlib.toml --host 0.0.0.0",
            "planetary gateway --resume runs/stdlib",
            "planetary gateway --gateway-config gateway.toml   # controllers.training, .inference, .rl",
            "planetary gateway --gateway-config examples/stdlib.toml --hub hub.example:8090 --hub-token-file hub.txt",
        ],
    )
    add_gateway_flags(parser, WORKER_PORT, API_PORT)
    add_key_flags(parser, _HUB_FLAGS)
    return parser


def add_gateway_flags(parser: argparse.ArgumentParser, default_port: int, default_api_port: int) -> None:
    """Add the flags every gateway has; the two ports are those it has by default."""
    from planetary.cli.key_flags import add_key_flag
    from planetary.cli.run_flags import add_folder_flags, add_preset_flag

    parser.add_argument(
        "--gateway-config",
        type=Path,
        metavar="FILE",
        help="configuration of a run (TOML or experiment.json), or of controllers (TOML or gateway.json)",
    )
    add_folder_flags(parser)
    add_preset_flag(parser)
    add_key_flag(parser, "--host", "fabric.host")
    parser.add_argument(
        "--port", type=port, help=f"port that workers connect to (default: fabric.port, else {default_port})"
    )
    parser.add_argument("--gateway-host", help=f"address of dashboard and control API (default: {API_HOST})")
    parser.add_argument(
        "--gateway-port",
        type=port,
        help="port of dashboard and control API, as PCP calls it; workers connect to --port (default: "
        f"{default_api_port}; 0: any)",
    )
    parser.add_argument(
        "--api-tls",
        action="store_true",
        help="dashboard and control API over HTTPS, with the certificate that workers see (planetary token prints "
        "its fingerprint with each token)",
    )
    parser.add_argument(
        "--allow-unencrypted",
        action="store_true",
        help="dashboard and control API over plain HTTP on another address than loopback, behind a proxy with TLS",
    )
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="certificate authority and invites (default: ~/.planetary/gateway)"
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help="prepared data and compiled steps")
    parser.add_argument("--plain-loopback", action="store_true", help="no TLS and no tokens; loopback addresses only")
    parser.add_argument("--announce", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.cli.run_flags import with_preset

    if not is_site(args):
        args.set = with_preset(args, "gateway", [*args.set, *_settings(args)], args.gateway_config)
    return run_gateway(args, HostedAs("gateway", WORKER_PORT, API_PORT, _join_as_worker))


def start(file: Path) -> int:
    """Run the gateway of a run on this machine alone, as its child."""
    from planetary.cli.logs import log_to_stderr
    from planetary.fleet.shell.starts import read_start
    from planetary.run.processes.local_run import GatewayStart

    started = read_start(file, GatewayStart)
    log_to_stderr("gateway", verbose=False)
    try:
        _run_started(started)
    except Exception as error:
        _report_to_parent(Path(started.announce), error)
        raise
    return EXIT_OK


def _run_started(start: GatewayStart) -> None:
    import asyncio
    from functools import partial

    from planetary.core.bounded_text import toml_tables
    from planetary.core.config import config_from_tables
    from planetary.fleet.gateway.gateway import GatewayOptions
    from planetary.run.choice import new_run
    from planetary.run.kinds import kind_of
    from planetary.run.processes.announcement import write_announcement
    from planetary.site.gateway_process import HostOptions, host_run

    tables, folder = toml_tables(start.config, "the run's configuration"), Path(start.folder)
    config = config_from_tables(tables) if start.resume else new_run(tables, [], folder)[0]
    kind = kind_of(config)
    kind.check(config)
    options = GatewayOptions(
        folder=folder,
        cache=Path(start.cache),
        host=config.fabric.host,
        port=config.fabric.port,
        resume=start.resume,
        resume_from=Path(start.checkpoint) if start.checkpoint else None,
        forgive=start.forgive,
        local_threads=start.local_threads,
        again=command_line(kind.command, "--resume", folder),
    )
    host = HostOptions(
        state=folder / "authority",
        plain=start.plain,
        api_host=API_HOST,
        api_port=start.dashboard_port,
        ends_with_parent=True,
    )
    asyncio.run(host_run(config, options, host, partial(write_announcement, Path(start.announce))))


class HostedAs(NamedTuple):
    """The differences between the commands that run a gateway."""

    role: str  # name in the log
    port: int  # default port for peers
    api_port: int  # default port of the control API
    # host, port and file of the invite (None: none is needed) -> the command with which others join
    join: Callable[[str, int, Path | None], str]
    no_sites: str = ""  # error of a file with controllers and without sites; "": it needs none


def _settings(args: argparse.Namespace) -> list[str]:
    """Return the settings that flags are short for."""
    from planetary.cli.key_flags import settings_of

    _check_hub_flags(args)
    return settings_of(args, _HUB_FLAGS)


def _check_hub_flags(args: argparse.Namespace) -> None:
    from planetary.core.errors import UserError

    if args.hub is None and (args.hub_token_file is not None or args.site is not None):
        raise UserError("gateway: --hub-token-file and --site need --hub HOST:PORT, the address of the hub")


def run_gateway(args: argparse.Namespace, hosted: HostedAs) -> int:
    """Run a gateway with the flags of `add_gateway_flags`."""
    from planetary.cli.logs import log_to_stderr

    log_to_stderr(hosted.role, verbose=getattr(args, "debug", False))
    try:
        _run(args, hosted)
    except Exception as error:
        if args.announce is not None:
            _report_to_parent(args.announce, error)
        raise
    return EXIT_OK


def _run(args: argparse.Namespace, hosted: HostedAs) -> None:
    import asyncio
    from functools import partial

    from planetary.core.errors import UserError
    from planetary.core.places import cache_folder
    from planetary.fleet.gateway.gateway import GatewayOptions
    from planetary.run.kinds import kind_of
    from planetary.site.config import Api
    from planetary.site.gateway_process import host_run

    if is_site(args):
        _run_site(args, hosted)
        return
    config, folder = _what_to_run(args)
    kind = kind_of(config)
    kind.check(config)
    if not kind.keeps_state and (args.checkpoint is not None or args.forgive):
        raise UserError(f"gateway: --checkpoint and --forgive have no effect on {kind.name}: leave them out")
    if args.resume is None:
        _refuse_keys_of_workers(config)
    _warn_of_loopback(args)
    options = GatewayOptions(
        folder=folder,
        cache=cache_folder(args.cache),
        host=config.fabric.host,
        port=args.port if args.port is not None else config.fabric.port or hosted.port,
        resume=args.resume is not None,
        resume_from=args.checkpoint,
        forgive=tuple(args.forgive),
        again=_resume_command(args, hosted, folder),
    )
    host = _host_options(args, API_HOST, hosted.api_port, Api())
    asyncio.run(host_run(config, options, host, partial(_listening, args, hosted)))


def _host_options(args: argparse.Namespace, host: str, port: int, api: Api) -> HostOptions:
    from planetary.site.gateway_process import HostOptions

    return HostOptions(
        state=_state(args),
        plain=args.plain_loopback,
        api_host=args.gateway_host or host,
        api_port=args.gateway_port if args.gateway_port is not None else port,
        requests_per_s=api.requests_per_s,
        api_tls=args.api_tls or api.tls,
        api_unencrypted=args.allow_unencrypted or api.allow_unencrypted,
    )


def is_site(args: argparse.Namespace) -> bool:
    """Whether the gateway's file is one of a site or of a hub that places jobs, and not of one run."""
    from planetary.site.config import is_site_file

    return args.gateway_config is not None and args.gateway_config.is_file() and is_site_file(args.gateway_config)


def _run_site(args: argparse.Namespace, hosted: HostedAs) -> None:
    """Run a gateway with several controllers."""
    import asyncio
    from functools import partial

    from planetary.core.errors import UserError
    from planetary.core.places import cache_folder
    from planetary.site.config import load_site
    from planetary.site.gateway_process import host_site
    from planetary.site.site import SiteOptions

    for flag in ("resume", "checkpoint", "set", "preset", "run_dir"):
        if getattr(args, flag):
            raise UserError(
                f"gateway: --{flag.replace('_', '-')} is for one run, and {args.gateway_config} has controllers: "
                "submit jobs (planetary jobs submit), which have configurations of their own"
            )
    config = _with_hub_flags(load_site(args.gateway_config), args)
    fabric, api, federation = config.worker_fabric, config.api, config.federation
    if hosted.no_sites and not federation.sites:
        raise UserError(hosted.no_sites)
    if args.forgive and not federation.sites:
        raise UserError("gateway: --forgive names sites of a hub, and the file has no federation.sites")
    site = SiteOptions(
        name=config.gateway_id,
        folder=Path(config.runs_dir),
        cache=cache_folder(args.cache),
        host=args.host or fabric.host or "127.0.0.1",
        port=args.port if args.port is not None else fabric.port or hosted.port,
        controllers=config.controllers,
        link=_link_of(config, cache_folder(args.cache)) if federation.hub else None,
        data_sets=federation.data_sets,
        policies=federation.sites,
        forgive=tuple(args.forgive),
        preparation=config.preparation,
    )
    port_ = hosted.api_port if api.port is None else api.port
    host = _host_options(args, api.host or API_HOST, port_, api)
    asyncio.run(host_site(config, site, host, partial(_listening, args, hosted)))


def _with_hub_flags(config: SiteConfig, args: argparse.Namespace) -> SiteConfig:
    """Return the file of a site with the hub's flags. Raises `UserError`."""
    import msgspec

    from planetary.core.errors import UserError

    if getattr(args, "hub", None) is None:
        if hasattr(args, "hub"):
            _check_hub_flags(args)
        return config
    if config.federation.sites:
        raise UserError("gateway: --hub makes this a site, and the file has federation.sites, which make it a hub")
    federation = msgspec.structs.replace(config.federation, enabled=True, upstream=args.hub)
    if args.site is not None:
        federation = msgspec.structs.replace(federation, site=args.site)
    if args.hub_token_file is not None:
        token = str(Path(args.hub_token_file).absolute())
        federation = msgspec.structs.replace(federation, token_file=token, token_env=None)
    return msgspec.structs.replace(config, federation=federation)


def _link_of(config: SiteConfig, cache: Path) -> HubLinkOptions:
    """Return where the hub of a site is, with the invite and the identity. Raises `UserError`."""
    import os

    from planetary.core.configuration.schema import FabricConfig, Timings
    from planetary.core.errors import UserError
    from planetary.runs.federation.site.uplink import hub_address, hub_invite_in
    from planetary.site.placement.hub_link import HubLinkOptions

    federation = config.federation
    name = federation.site or config.gateway_id
    token = hub_invite_in(federation.token_file or "")
    if federation.token_env:
        token = os.environ.get(federation.token_env, "")
        if not token:
            raise UserError(
                f"federation.token_env names the environment variable {federation.token_env} for the hub's invite, and "
                "it is not set"
            )
    key = cache / "sites" / name / "identity.key"
    address = hub_address(federation.hub, token, key, Timings(FabricConfig().latency_budget_s).connect_s)
    return HubLinkOptions(address=address, name=name)


def _what_to_run(args: argparse.Namespace) -> tuple[Config, Path]:
    from planetary.core.errors import UserError
    from planetary.run.choice import new_run, resumed_run

    if (args.gateway_config is None) == (args.resume is None):
        raise UserError("gateway: give either --gateway-config FILE for a new run or --resume RUN")
    if args.checkpoint is not None and args.resume is None:
        raise UserError("gateway: --checkpoint says where to resume from, so it needs --resume RUN")
    if args.forgive and args.resume is None:
        raise UserError("gateway: --forgive lifts bans of a run that goes on, so it needs --resume RUN")
    # In the run, so a resumed gateway listens where workers dial.
    listens = [] if args.host is None else [f"fabric.host={args.host}"]
    listens += [f"fabric.port={args.port}"] if args.port and args.announce is None else []
    if args.resume is not None:
        return resumed_run(args.resume, [*args.set, *listens], args.checkpoint)
    return new_run(args.gateway_config, [*args.set, *listens], args.run_dir)


def _refuse_keys_of_workers(config: Config) -> None:
    """Raise `UserError` for keys of the workers that a local run starts. A hub passes its keys on to the sites."""
    from planetary.core.configuration.derived import set_keys
    from planetary.core.errors import UserError

    if any(section.merges_other_runs for section in config.kinds.values()):
        return
    if found := [key for key in set_keys(config) if key in _OF_WORKERS]:
        flags = ", ".join(f"--{key.removeprefix('fabric.')}" for key in found)
        raise UserError(
            f"gateway: {', '.join(found)}: only a run that starts its own workers (planetary train) has an "
            f"effect of it. The workers of a gateway are started with `planetary node-manager`, and {flags} there: "
            "leave it out"
        )


def _warn_of_loopback(args: argparse.Namespace) -> None:
    """Warn where a resumed gateway listens on loopback alone, and the run's workers were let in from elsewhere."""
    import logging

    from planetary.core.config import load_config
    from planetary.fleet.gateway.run_files import CONFIG
    from planetary.net.addresses import is_local_name

    if args.resume is None or args.host is None or not is_local_name(args.host):
        return
    before = load_config(args.resume / CONFIG).fabric.host
    if not is_local_name(before):
        logging.getLogger(__name__).warning(
            "this gateway listens on %s, this machine alone, and the run was on %s: workers of other machines cannot "
            "connect (--host %s)",
            args.host,
            before,
            before,
        )


def _resume_command(args: argparse.Namespace, hosted: HostedAs, folder: Path) -> str:
    """Return the command that resumes the run."""
    words: list[object] = [hosted.role, "--resume", folder]
    for name in ("gateway_host", "gateway_port", "state", "cache"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", value.absolute() if isinstance(value, Path) else value]
    words += [f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(args, name)]
    return command_line(*words)


def _listening(args: argparse.Namespace, hosted: HostedAs, announced: Announcement) -> None:
    """Tell the parent process, or the operator, where workers connect."""
    from planetary.artifacts.store import write_atomically
    from planetary.run.processes.announcement import write_announcement

    if args.announce is not None:
        write_announcement(args.announce, announced)
        return
    token_file = None
    if announced.token:
        token_file = _state(args) / "newest-invite.txt"
        write_atomically(token_file, f"{announced.token}\n".encode())
    _print_how_to_join(announced, token_file, hosted)


def _state(args: argparse.Namespace) -> Path:
    from planetary.core.places import default_state_folder

    return (args.state or default_state_folder()).absolute()


def _report_to_parent(announcement: Path, error: BaseException) -> None:
    from planetary.cli.exit_codes import error_class_of, exit_code_of, explain
    from planetary.run.processes.announcement import Failure, write_failure

    write_failure(announcement, Failure(error_class_of(exit_code_of(error)).__name__, explain(error)))


def _join_as_worker(host: str, port: int, token_file: Path | None) -> str:
    trust = ("--token-file", token_file) if token_file is not None else ("--plain-loopback",)
    return command_line("node-manager", "--host", host, "--port", port, "--scale", 1, *trust)


def _print_how_to_join(announced: Announcement, token_file: Path | None, hosted: HostedAs) -> None:
    from planetary.net.addresses import own_address

    reach = announced.host if announced.host not in ("", "0.0.0.0", "::") else own_address() or "ADDRESS"
    print(f"run folder   {announced.folder}")
    print("\n".join(f"{'' if at else 'dashboard':<13}{line}" for at, line in enumerate(announced.page)))
    print(f"invite       {token_file if token_file is not None else 'none needed on this machine'}")
    print(f"join with    {hosted.join(reach, announced.port, token_file)}", flush=True)
