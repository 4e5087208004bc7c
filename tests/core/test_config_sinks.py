"""`[[sinks]]`: tables of several kinds, as strictly checked as every other key."""

from __future__ import annotations

from pathlib import Path

import pytest

from planetary.core.config import apply_overrides, config_from_tables, load_config, overrides_between
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.monitor.sinks.mlflow_sink import MlflowSink
from planetary.monitor.sinks.tensorboard_sink import TensorboardSink
from planetary.monitor.sinks.wandb_sink import WandbSink
from planetary.monitor.sinks.webhook_sink import WebhookSink

FILE = """
[train]
rounds = 3

[[sinks]]
kind = "wandb"
project = "planets"

[[sinks]]
kind = "webhook"
url = "https://hooks.example/T0"
events = ["worker_lost", "stalled"]

[[sinks]]
kind = "tensorboard"
"""
SINKS = (
    WandbSink(project="planets"),
    WebhookSink(url="https://hooks.example/T0", events=("worker_lost", "stalled")),
    TensorboardSink(),
)


def test_tables_of_several_kinds_are_read_and_written(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(FILE)
    config = load_config(tmp_path / "run.toml")
    assert config.sinks == SINKS
    (tmp_path / "again.toml").write_text(to_toml(config))
    again = load_config(tmp_path / "again.toml")
    assert again.sinks == SINKS
    assert overrides_between(config, again) == []
    assert config_hash(config) == config_hash(config_from_tables({"train": {"rounds": 3}}))


def test_overrides_replace_the_whole_array() -> None:
    config = apply_overrides(config_from_tables({}), ['sinks=[{kind = "mlflow", uri = "x"}]'])
    assert config.sinks == (MlflowSink(uri="x"),)
    assert overrides_between(config_from_tables({}), config) == [
        'sinks=[{ kind = "mlflow", uri = "x", experiment = "planetary" }]'
    ]
    assert apply_overrides(config, ["sinks=[]"]).sinks == ()


@pytest.mark.parametrize(
    ("sinks", "words"),
    [
        (
            [{"kind": "wandbb"}],
            "sinks: kind: unknown sink 'wandbb'; did you mean wandb? There are mlflow, opentelemetry, tensorboard",
        ),
        ([{"project": "x"}], "found none"),
        ([{"kind": "wandb", "projekt": "x"}], 'sinks of kind "wandb": unknown key projekt; did you mean project?'),
        (
            [{"kind": "wandb", "project": ""}],
            "project: expected a string that is not empty, found '' (string)",
        ),
        ([{"kind": "webhook"}], "expected either url or url_env"),
        ([{"kind": "webhook", "url": "file:///etc/passwd"}], "url: expected http:// or https://"),
        (
            [{"kind": "webhook", "url": "http://x", "events": ["lost"]}],
            "events: expected an array whose values",
        ),
        ({"kind": "wandb"}, "sinks: expected tables [[sinks]], found"),
        (["wandb"], "sinks: expected a table [[sinks]], found 'wandb' (string)"),
    ],
)
def test_what_is_wrong_is_named(sinks: object, words: str) -> None:
    with pytest.raises(UserError) as caught:
        config_from_tables({"sinks": sinks})
    assert words in str(caught.value)


def test_a_key_of_the_array_cannot_be_set_alone() -> None:
    with pytest.raises(UserError, match="sinks is an array of tables"):
        config_from_tables({}, ["sinks.kind=wandb"])
