"""The file of a site: PCP's keys, unknown ones, and what cannot be."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from planetary.core.errors import UserError
from planetary.site.site_config import ControllerOptions, is_site_file, load_site

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
        ({"graph_backend": "sql"}, 'graph_backend: expected one of "memory", "neo4j", found'),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as error:
        load_site(written(tmp_path, **more))
    assert text in str(error.value)


def test_a_configuration_of_a_run_is_none_of_a_site(tmp_path: Path) -> None:
    for name, text in (("experiment.json", '{"model_path": "x.mlir"}'), ("run.toml", "[train]\nrounds = 3\n")):
        (tmp_path / name).write_text(text)
        assert not is_site_file(tmp_path / name)
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        is_site_file(tmp_path / "torn.json")
