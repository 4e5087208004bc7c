"""The file of a site: PCP's keys, unknown ones, and what cannot be."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from planetary.cli.main import main
from planetary.core.errors import UserError
from planetary.site.config import ControllerOptions, Federation, SitePolicy, is_site_file, load_site
from planetary.site.site import SiteOptions

PCP: dict[str, Any] = {
    "gateway_id": "lab-alpha-gateway",
    "lab_id": "lab-alpha",
    "graph_backend": "memory",
    "global_controller_endpoint": None,
    "api": {"host": "127.0.0.1", "port": 18010},
    "worker_fabric": {"host": "127.0.0.1", "port": 8080},
    "federation": {"enabled": False, "upstream": None, "token_env": "HUB_TOKEN", "heartbeat_interval_ms": 5000},
    "api_token_env": "PCP_GATEWAY_API_TOKEN",
    "internal_api_token_env": "PCP_GATEWAY_INTERNAL_TOKEN",
}


def hub(*sites: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"federation": {"sites": list(sites), **more}}


def written(folder: Path, **more: Any) -> Path:
    path = folder / "gateway.json"
    path.write_text(json.dumps({**PCP, **more}))
    return path


def test_pcps_file_loads_and_names_once_what_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "experiment.json").write_text("{}")
    training = {"enabled": True, "config_path": "experiment.json", "api": {"port": 1}, "no_dashboard": True}
    hub = {"federation_hub_endpoint": "hub:1"}
    path = written(tmp_path, controllers={"training": training}, neo4j={"uri": "bolt://x", "user": "u"}, **hub)
    with caplog.at_level(logging.WARNING):
        config = load_site(path)
    assert is_site_file(path)
    assert (config.gateway_id, config.lab_id, config.token_env) == (
        "lab-alpha-gateway",
        "lab-alpha",
        PCP["api_token_env"],
    )
    assert (config.api.port, config.worker_fabric.port, config.federation.enabled) == (18010, 8080, False)
    chosen = config.controllers.of("training")
    assert (chosen.enabled, chosen.config_path) == (True, str(tmp_path / "experiment.json"))
    assert config.controllers.of("rl") == ControllerOptions()
    (warning,) = [record.getMessage() for record in caplog.records]
    for key in ("neo4j", "internal_api_token_env", "controllers.*.api", "federation_hub_endpoint"):
        assert key in warning
    for key in ("graph_backend", "no_dashboard", "federation.enabled", "federation.token_env"):
        assert key not in warning


def test_the_same_keys_in_toml_with_folders_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text("")
    path = tmp_path / "gateway.toml"
    path.write_text(
        'gateway_id = "x"\nruns_dir = "here"\n[controllers.inference]\nenabled = true\npriority = 5\n'
        'config_path = "serve.toml"\n'
    )
    config = load_site(path)
    assert config.runs_dir == str(tmp_path / "here")
    assert config.controllers.of("inference").config_path == str(tmp_path / "serve.toml")
    assert config.controllers.of("inference").priority == 5


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"gatway": 1}, "unknown key gatway; did you mean gateway_id?"),
        ({"controllers": {"trainin": {}}}, "unknown key controllers.trainin; did you mean training?"),
        ({"controllers": {"rl": {"enabld": True}}}, "unknown key controllers.rl.enabld; did you mean enabled?"),
        (
            {"controllers": {"training": {"parallel": 0}}},
            "controllers.training.parallel: expected a whole number >= 1, found 0",
        ),
        (
            {"controllers": {"training": {"config_path": "no.toml"}}},
            "controllers.training.config_path: there is no no.t",
        ),
        ({"gateway_id": 7}, "gateway_id: expected a string, found 7 (whole number)"),
        ({"api": {"port": 70000}}, "api.port: expected a whole number >= 0 and <= 65535, found 70000"),
        (hub({"name": "a", "role": []}), "unknown key federation.sites[0].role; did you mean roles?"),
        (
            hub({"name": "a", "roles": ["dancer"]}),
            'roles[0]: expected one of "actor", "composer", "expert", "learner", "server", "trainer", found',
        ),
        (
            hub({"name": "a", "gb_per_day": -1}),
            "federation.sites[0].gb_per_day: expected a finite number >= 0, found -1",
        ),
        (
            hub({"name": "a", "patience_s": -1}),
            "federation.sites[0].patience_s: expected a finite number >= 0, found -1",
        ),
        (hub({"name": "a", "trust": "half"}), 'federation.sites[0].trust: expected one of "full", "judged", found'),
        (hub({"roles": []}), "missing required field `name`, in federation.sites[0]"),
        ({"federation": {"data_sets": {"a": 1}}}, "federation.data_sets: expected a table whose values are a string"),
        (hub({"name": "a"}, {"name": "a"}), "federation.sites names a twice"),
        (hub({"name": "a b"}), "'a b' is no name: 1 to 128 of the letters"),
        (hub({"name": "a"}, upstream="hub:1"), "sites makes this a hub and upstream = 'hub:1' a site of another one"),
        ({"federation": {"enabled": True}}, 'federation.enabled: expected upstream = "HOST:PORT"'),
        (
            {"federation": {"upstream": "h:1", "token_env": "A", "token_file": "b"}},
            "token_env and token_file both name the hub's invite",
        ),
        ({"federation": {"data_sets": {"my notes": "x"}}}, "'my notes' is no name"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        load_site(written(tmp_path, **more))
    assert text in str(error.value)


def test_a_link_to_a_hub_needs_an_upstream_and_is_cut_by_enabled(tmp_path: Path) -> None:
    def loaded(**federation: Any) -> Federation:
        return load_site(written(tmp_path, federation=federation)).federation

    assert loaded().hub == ""
    assert loaded(upstream="hub:8090").hub == "hub:8090"
    assert loaded(upstream="hub:8090", enabled=True).hub == "hub:8090"
    assert loaded(upstream="hub:8090", enabled=False).hub == ""
    (tmp_path / "notes.txt").write_text("x")
    sets = {"notes": "notes.txt", "web": "s3://bucket/*.parquet", "code": "stdlib"}
    assert loaded(data_sets=sets).data_sets == {**sets, "notes": str(tmp_path / "notes.txt")}
    (policy,) = loaded(sites=[{"name": "paris"}]).sites
    assert policy == SitePolicy(name="paris", roles=(), data_sets=("*",), gb_per_day=0.0, patience_s=120.0)


def test_the_hubs_flags_stand_for_keys_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[SiteOptions] = []

    async def host(config: Any, site: SiteOptions, *_: Any) -> None:
        started.append(site)

    monkeypatch.setattr("planetary.site.gateway_process.host_site", host)
    path, token = tmp_path / "gateway.toml", tmp_path / "invite.txt"
    path.write_text('gateway_id = "lab"\n')
    flags = [f"--gateway-config={path}", f"--cache={tmp_path / 'cache'}", f"--state={tmp_path / 'state'}"]
    assert main(["gateway", *flags, "--hub=127.0.0.1:8090", "--site=paris"]) == 0
    (site,) = started
    assert site.link is not None
    assert (site.link.address.host, site.link.address.port, site.link.name) == ("127.0.0.1", 8090, "paris")
    assert main(["gateway", *flags]) == 0
    assert started[-1].link is None
    assert main(["gateway", *flags, "--hub=hub:1", f"--hub-token-file={token}"]) == 2  # there is no such file
    assert main(["gateway", *flags, "--site=paris"]) == 2
    assert main(["federation-hub", *flags]) == 2
    assert len(started) == 2


def test_a_configuration_of_a_run_is_none_of_a_site(tmp_path: Path) -> None:
    for name, text in (("experiment.json", '{"model_path": "x.mlir"}'), ("run.toml", "[train]\nrounds = 3\n")):
        (tmp_path / name).write_text(text)
        assert not is_site_file(tmp_path / name)
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        is_site_file(tmp_path / "torn.json")
