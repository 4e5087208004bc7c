"""The file of a gateway with several controllers: PCP's `gateway.json`, and the same keys in TOML.

PCP's keys without a counterpart are named in one warning (`compat.pcp`); other unknown keys are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import inspect

from planetary.compat.pcp.gateway_file import without_pcp
from planetary.core import decoding
from planetary.core.bounded_text import json_value, toml_tables
from planetary.core.config import is_gateway_file
from planetary.core.configuration.ranges import (
    Count,
    NotNegative,
    Port,
    Priority,
    Text,
    describe,
    field_infos,
    show_found,
)
from planetary.core.errors import UserError, did_you_mean
from planetary.core.printable import NAME_RULE, is_name
from planetary.site.model_process import PreparationLimits

CONTROLLERS = ("inference", "training", "rl")
"""In the order of their default priorities."""
PRIORITIES: Mapping[str, int] = {"inference": 100, "training": 0, "rl": 0}


class ControllerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`controllers.training`, `.rl` and `.inference`: the jobs of one kind."""

    enabled: bool = False  # the controller takes jobs
    config_path: str = ""  # configuration of the job it begins with, and of a submission without one; empty: none
    service_id: str = ""  # name of that job; empty: the run's
    workers: Count | None = None  # planned workers of the job of `config_path`; without: as its configuration says
    should_resume: bool = False  # resume an existing run of that job
    # default for jobs; without: 100 for inference, 0 for the others
    priority: Priority | None = None
    parallel: Count = 1  # jobs that run at once


class Controllers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`controllers`: which kinds of jobs the gateway takes."""

    training: ControllerOptions | None = None
    rl: ControllerOptions | None = None
    inference: ControllerOptions | None = None

    def of(self, name: str) -> ControllerOptions:
        """Return a controller; one that is not there is not enabled."""
        return getattr(self, name, None) or ControllerOptions()


BURST_S = 4.0
"""A client may have sent no request for so long, and then all of them at once."""


class Api(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`api`: where dashboard and control API listen."""

    host: str | None = None  # address; without: as `--gateway-host`
    port: Port | None = None  # TCP port; 0: any; without: as `--gateway-port`
    tls: bool = False  # HTTPS, with the certificate that workers see
    allow_unencrypted: bool = False  # plain HTTP beyond loopback: a proxy with TLS is in front
    # requests of one token, or without one of one address, on average; BURST_S seconds' worth at once. 0: no limit
    requests_per_s: NotNegative = 50.0
    token_env: str | None = None  # environment variable with the token that may do everything; without: none


class WorkerFabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`worker_fabric`: where workers connect."""

    host: str | None = None  # address; without: as `--host`
    port: Port | None = None  # TCP port; 0: any; without: as `--port`


WorkerRole = Literal["trainer", "server", "actor", "learner", "composer", "expert"]
"""Roles of workers, of all kinds of run a site hosts."""
Trust = Literal["full", "judged"]
DATA_SCHEME = "site://"
"""Prefix of data a site has under a name: `data.source = "site://corpus"`."""
ANY_DATA = "*"
"""In `SitePolicy.data_sets`: every data set of the site."""


class SitePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`federation.sites`: one site of a hub, and the jobs that may be placed there."""

    name: Text  # site name at the hub
    # "judged": nothing compares the results of a job at one site alone, so this site gets only jobs that accept it
    # (`needs.trust`)
    trust: Trust = "full"
    roles: tuple[WorkerRole, ...] = ()  # worker roles for jobs there; empty: all
    # of the site (site://NAME) that jobs placed there may read; "*": all; empty: none
    data_sets: tuple[str, ...] = (ANY_DATA,)
    # limit of a day's (UTC) traffic on the line to the hub, both ways, in 1e9 bytes; beyond it the site gets no further
    # job on that day. 0: any number
    gb_per_day: NotNegative = 0.0
    patience_s: NotNegative = 120.0  # longest absence of a site before its jobs are placed elsewhere


class Federation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`federation`: the hub that places jobs on this gateway, or, of a hub, the sites below."""

    enabled: bool | None = None  # link to `upstream`; without: where `upstream` is given
    upstream: str | None = None  # "HOST:PORT" of the hub; without: as `--hub`
    token_env: str | None = None  # environment variable with the hub's invite
    token_file: str | None = None  # file with it, in place of `token_env`; without: as `--hub-token-file`
    site: str = ""  # name of this gateway at the hub, as `--site`; empty: `gateway_id`
    data_sets: dict[str, str] = {}  # name -> path, folder, pattern or URL of data that jobs read as site://NAME
    sites: tuple[SitePolicy, ...] = ()  # hub only: sites that may join

    @property
    def hub(self) -> str:
        """Address ("HOST:PORT") of the hub that this gateway has a link to; "": it has none."""
        return (self.upstream or "") if self.enabled is not False else ""


class SiteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The top of the file: the gateway itself."""

    gateway_id: str  # gateway name
    lab_id: str = ""  # owner, for people
    controllers: Controllers = Controllers()
    api: Api = Api()
    worker_fabric: WorkerFabric = WorkerFabric()
    federation: Federation = Federation()
    preparation: PreparationLimits = PreparationLimits()
    runs_dir: str = "runs"  # folders of the jobs' runs, and the site's journal

    @property
    def token_env(self) -> str:
        """Name of the environment variable with the token that may do everything; "": none."""
        return self.api.token_env or ""


def is_site_file(path: Path) -> bool:
    """Whether a configuration file is one of a site rather than of a run. Raises `UserError` for no JSON or TOML."""
    tables = _tables(path)
    return is_gateway_file(tables)


def load_site(path: Path) -> SiteConfig:
    """Return the configuration in a file; paths in it are taken from the file's folder.

    Raises:
        UserError: it cannot be read, a key is unknown, or a value cannot be.
    """
    tables = _tables(path)
    config = _converted(without_pcp(tables, str(path)), path)
    for name in CONTROLLERS:
        controller = config.controllers.of(name)
        if controller.config_path and not _found(path, controller.config_path).exists():
            raise UserError(f"{path}: controllers.{name}.config_path: there is no {controller.config_path}")
    _check_federation(config.federation, path)
    replaced = {
        name: msgspec.structs.replace(one, config_path=str(_found(path, one.config_path)) if one.config_path else "")
        for name in CONTROLLERS
        if (one := getattr(config.controllers, name)) is not None
    }
    controllers = msgspec.structs.replace(config.controllers, **replaced)
    federation = config.federation
    sets = {name: _path_of(path, source) for name, source in federation.data_sets.items()}
    token_file = str(_found(path, federation.token_file)) if federation.token_file else None
    federation = msgspec.structs.replace(federation, data_sets=sets, token_file=token_file)
    runs = str((path.parent / config.runs_dir).absolute()) if "runs_dir" in tables else str(Path("runs").absolute())
    return msgspec.structs.replace(config, controllers=controllers, federation=federation, runs_dir=runs)


def _check_federation(federation: Federation, path: Path) -> None:
    where = f"{path}: federation"
    if federation.sites and federation.hub:
        raise UserError(
            f"{where}: sites makes this a hub and upstream = {federation.hub!r} a site of another one: leave one of "
            "the two out"
        )
    if federation.enabled and not federation.upstream:
        raise UserError(f'{where}.enabled: expected upstream = "HOST:PORT" of the hub with it, found none')
    if federation.token_env and federation.token_file:
        raise UserError(f"{where}: token_env and token_file both name the hub's invite: leave one of the two out")
    names = [site.name for site in federation.sites]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{where}.sites names {twice[0]} twice")
    for name in [*names, *federation.data_sets, *filter(None, [federation.site])]:
        if not is_name(name):
            raise UserError(f"{where}: {name[:80]!r} is no name: {NAME_RULE}")


def _path_of(path: Path, source: str) -> str:
    """Return a source of data as a job's configuration has it: a URL, "stdlib", or a whole path."""
    return source if "://" in source or source == "stdlib" else str(_found(path, source))


def _found(path: Path, name: str) -> Path:
    """Return a path written in a file: from the file's folder or, as PCP takes it, from the current one."""
    beside = path.parent / name
    return (beside if beside.exists() else Path(name)).absolute()


def _tables(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    tables = json_value(text, str(path)) if path.suffix == ".json" else toml_tables(text, str(path))
    if not isinstance(tables, dict):
        raise UserError(f"{path}: expected one object, found {type(tables).__name__}")
    return tables


def _converted(tables: Mapping[str, Any], path: Path) -> SiteConfig:
    given = _without_nothing(tables)
    try:
        return decoding.convert(given, SiteConfig)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        place = place.strip("`.")
        if "unknown field" in text:
            name = text.split("`")[1]
            known = sorted(_kind_at(place).__struct_fields__)
            shown = f"{place}.{name}" if place else name
            raise UserError(
                f"{path}: unknown key {shown}{did_you_mean(name, known)} Keys: {', '.join(known)}"
            ) from None
        place = place.removesuffix("[...]")  # a key of a table, which is not named
        section, _, key = re.sub(r"\[\d+\]$", "", place).rpartition(".")
        wanted = {name: field.type for name, field in field_infos(_kind_at(section)).items()}
        if key not in wanted or "missing" in text:
            raise UserError(f"{path}: {text}{f', in {place}' if place else ''}") from None
        kind, value = wanted[key], _value_at(given, place)
        if isinstance(kind, inspect.VarTupleType) and place.endswith("]"):
            kind = kind.item_type
        raise UserError(f"{path}: {place}: expected {describe(kind)}, found {show_found(value)}") from None


def _value_at(tables: Any, place: str) -> Any:
    """Return the value at a place such as `federation.sites[0].name`."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", place):
        tables = tables[name] if name else tables[int(index)]
    return tables


def _kind_at(place: str) -> type[msgspec.Struct]:
    kinds: Mapping[str, type[msgspec.Struct]] = {
        "": SiteConfig,
        "api": Api,
        "worker_fabric": WorkerFabric,
        "federation": Federation,
        "preparation": PreparationLimits,
        "federation.sites[...]": SitePolicy,
        "controllers": Controllers,
    }
    return kinds.get(re.sub(r"\[\d+\]", "[...]", place), ControllerOptions)


def _without_nothing(value: Any) -> Any:
    """Return tables without keys whose value is null, which count as absent."""
    if isinstance(value, Mapping):
        return {key: _without_nothing(inner) for key, inner in value.items() if inner is not None}
    return value
