from __future__ import annotations

from pathlib import Path

from planetary.cli.main import build_parser
from planetary.core.config import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_reports_workload_has_its_global_batch_and_no_port() -> None:
    """The report's workload has its global batch and leaves the dashboard its port."""
    config = load_config(EXAMPLES / "nanochat-92m.toml")
    assert config.train.batch_size * config.fabric.workers == 8
    given = build_parser("gateway").parse_args(["gateway", "--gateway-config", "x.toml"])
    assert config.fabric.port != given.gateway_port
