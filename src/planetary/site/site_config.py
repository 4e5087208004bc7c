"""The file of a gateway with several controllers: PCP's `gateway.json`, and the same keys in TOML.

Keys of PCP's that nothing here corresponds to are named in one warning; others that are not known are errors.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import inspect

from planetary.core.configuration.ranges import Count, Port, describe, show_found
from planetary.core.errors import UserError, did_you_mean

log = logging.getLogger(__name__)

CONTROLLERS = ("inference", "training", "rl")
"""In the order of their default priorities."""
PRIORITIES: Mapping[str, int] = {"inference": 100, "training": 0, "rl": 0}


class ControllerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`controllers.training`, `.rl` and `.inference`: the jobs of one kind."""

    enabled: bool = False  # whether it takes jobs
    config_path: str = ""  # configuration of the job that it begins with, and of a submission without one; empty: none
    service_id: str = ""  # name of that job; empty: the run's
    workers: Count | None = None  # that the job of `config_path` is to have; without: as its configuration says
    should_resume: bool = False  # whether that job goes on with a run that is there
    priority: int | None = None  # of its jobs, unless they say otherwise; without: 100 for inference, 0 for the others
    parallel: Count = 1  # jobs that run at once
    api: dict[str, Any] | None = None  # PCP's, without effect
    no_dashboard: bool | None = None  # PCP's, without effect
    backend: str | None = None  # PCP's, without effect


class Controllers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`controllers`: which kinds of jobs the gateway takes."""

    training: ControllerOptions | None = None
    rl: ControllerOptions | None = None
    inference: ControllerOptions | None = None

    def of(self, name: str) -> ControllerOptions:
        """Return a controller; one that is not there is not enabled."""
        return getattr(self, name, None) or ControllerOptions()


class Api(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`api`: where dashboard and control API listen."""

    host: str | None = None  # address; without: as `--gateway-host`
    port: Port | None = None  # TCP port; 0: any; without: as `--gateway-port`
    tls: bool = False  # HTTPS, with the certificate that workers see
    token_env: str | None = None  # environment variable with the token that may do everything; without: none
    internal_token_env: str | None = None  # PCP's, without effect


class WorkerFabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`worker_fabric`: where workers connect."""

    host: str | None = None  # address; without: as `--host`
    port: Port | None = None  # TCP port; 0: any; without: as `--port`


class Federation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`federation`: PCP's keys of a hub, without effect: a job's configuration names its hub (`federation.hub`)."""

    enabled: bool = False  # without effect
    upstream: str | None = None  # without effect
    token_env: str | None = None  # without effect
    heartbeat_interval_ms: int = 5000  # without effect


class SiteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The top of the file: the gateway itself."""

    gateway_id: str  # its name
    lab_id: str = ""  # of its owner, for people
    controllers: Controllers = Controllers()
    api: Api = Api()
    worker_fabric: WorkerFabric = WorkerFabric()
    federation: Federation = Federation()
    api_token_env: str | None = None  # as `api.token_env`, which counts where both are given
    runs_dir: str = "runs"  # folders of the jobs' runs, and the site's journal
    graph_backend: Literal["memory", "neo4j"] | None = None  # PCP's, without effect
    policy_store_path: str | None = None  # PCP's, without effect
    neo4j: dict[str, Any] | None = None  # PCP's, without effect
    sharing_defaults: dict[str, Any] | None = None  # PCP's, without effect
    federation_hub_endpoint: str | None = None  # PCP's, without effect
    internal_api_token_env: str | None = None  # PCP's, without effect
    global_controller_endpoint: str | None = None  # PCP's, without effect
    custom_extensions: Any = None  # PCP's, without effect

    @property
    def token_env(self) -> str:
        """Name of the environment variable with the token that may do everything; "": none."""
        return self.api.token_env or self.api_token_env or ""


_GRAPH = "there is no knowledge graph here"
NO_EFFECT: Mapping[str, str] = {
    "graph_backend": _GRAPH,
    "policy_store_path": _GRAPH,
    "neo4j": _GRAPH,
    "sharing_defaults": _GRAPH,
    "custom_extensions": "extensions are Python packages here",
    "internal_api_token_env": "controllers are parts of this process and need no token for each other",
    "api.internal_token_env": "controllers are parts of this process and need no token for each other",
    "global_controller_endpoint": "a job's configuration names its hub: federation.hub",
    "federation_hub_endpoint": "a job's configuration names its hub: federation.hub",
    "federation.upstream": "a job's configuration names its hub: federation.hub",
    "federation.enabled": "a job's configuration names its hub: federation.hub",
    "controllers.*.api": "controllers answer on the gateway's own port",
    "controllers.*.no_dashboard": "the dashboard is a page of the gateway's own port",
    "controllers.*.backend": "workers say which backend they have",
}
"""Key -> why it has no effect."""
_SAME_HERE: Mapping[str, Any] = {
    "graph_backend": "memory",
    "federation.enabled": False,
    "controllers.*.no_dashboard": True,
}


def is_site_file(path: Path) -> bool:
    """Whether a configuration file is one of a site rather than of a run. Raises `UserError` for no JSON or TOML."""
    tables = _tables(path)
    return "gateway_id" in tables or "controllers" in tables


def load_site(path: Path) -> SiteConfig:
    """Return the configuration in a file; paths in it are taken from the file's folder.

    Raises:
        UserError: it cannot be read, a key is unknown, or a value cannot be.
    """
    tables = _tables(path)
    config = _converted(tables, path)
    _warn(tables, path)
    for name in CONTROLLERS:
        controller = config.controllers.of(name)
        if controller.config_path and not _found(path, controller.config_path).exists():
            raise UserError(f"{path}: controllers.{name}.config_path: there is no {controller.config_path}")
    replaced = {
        name: msgspec.structs.replace(one, config_path=str(_found(path, one.config_path)) if one.config_path else "")
        for name in CONTROLLERS
        if (one := getattr(config.controllers, name)) is not None
    }
    controllers = msgspec.structs.replace(config.controllers, **replaced)
    runs = str((path.parent / config.runs_dir).absolute()) if "runs_dir" in tables else str(Path("runs").absolute())
    return msgspec.structs.replace(config, controllers=controllers, runs_dir=runs)


def _found(path: Path, name: str) -> Path:
    """Return a path that was written in a file: from its folder or, as PCP takes it, from the current one."""
    beside = path.parent / name
    return (beside if beside.exists() else Path(name)).absolute()


def _tables(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    try:
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(tables, dict):
        raise UserError(f"{path}: expected one object, found {type(tables).__name__}")
    return tables


def _converted(tables: Mapping[str, Any], path: Path) -> SiteConfig:
    given = _without_nothing(tables)
    try:
        return msgspec.convert(given, SiteConfig)
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
        section, _, key = place.rpartition(".")
        wanted = {field.name: field.type for field in _fields_of(_kind_at(section))}
        if key not in wanted or "missing" in text:
            raise UserError(f"{path}: {text}") from None
        value: Any = given
        for part in place.split("."):
            value = value[part]
        raise UserError(f"{path}: {place}: expected {describe(wanted[key])}, found {show_found(value)}") from None


def _fields_of(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _kind_at(place: str) -> type[msgspec.Struct]:
    kinds: Mapping[str, type[msgspec.Struct]] = {
        "": SiteConfig,
        "api": Api,
        "worker_fabric": WorkerFabric,
        "federation": Federation,
        "controllers": Controllers,
    }
    return kinds.get(place, ControllerOptions)


def _without_nothing(value: Any) -> Any:
    """Return tables without keys whose value is null, which count as absent."""
    if isinstance(value, Mapping):
        return {key: _without_nothing(inner) for key, inner in value.items() if inner is not None}
    return value


def _warn(tables: Mapping[str, Any], path: Path) -> None:
    given = dict(tables)
    for section in ("api", "federation"):
        given |= {f"{section}.{key}": value for key, value in (tables.get(section) or {}).items()}
    for controller in (tables.get("controllers") or {}).values():
        given |= {f"controllers.*.{key}": value for key, value in (controller or {}).items()}
    reasons: dict[str, list[str]] = {}
    for key, why in NO_EFFECT.items():
        value = given.get(key)
        if value is not None and value != _SAME_HERE.get(key):
            reasons.setdefault(why, []).append(key)
    if reasons:
        log.warning("%s: no effect: %s", path, "; ".join(f"{', '.join(keys)} ({why})" for why, keys in reasons.items()))
