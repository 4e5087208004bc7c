"""A sink in a user's file, which is the example of docs/extending.md, gets a run as a built-in one does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sink_story import line, run_in, send

from planetary.core.config import config_from_tables, load_config
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.monitor.sinks.sink_kinds import sink_of

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
TEXT = dict(re.findall(r"```python\n(?=# (\w+\.py))(.*?)```", PAGE, re.DOTALL))["my_sink.py"]


def test_an_own_sink_gets_the_rounds(tmp_path: Path) -> None:
    (tmp_path / "my_sink.py").write_text(TEXT)
    (tmp_path / "run.toml").write_text('[[sinks]]\nkind = "my_sink.py:Csv"\nfile = "own.csv"\n')
    config = load_config(tmp_path / "run.toml")
    (tmp_path / "again.toml").write_text(to_toml(config))
    (sink,) = load_config(tmp_path / "again.toml").sinks
    assert sink == config.sinks[0]
    send(sink_of(sink)[1], run_in(tmp_path), range(1, 3))
    assert (tmp_path / "own.csv").read_text() == f"1,{line(1).loss}\n2,{line(2).loss}\n"


def test_a_key_that_an_own_sink_lacks_is_refused_as_it_starts(tmp_path: Path) -> None:
    (tmp_path / "my_sink.py").write_text(TEXT)
    (sink,) = config_from_tables({"sinks": [{"kind": f"{tmp_path}/my_sink.py:Csv", "fiel": "x"}]}).sinks
    with pytest.raises(UserError, match="unknown key fiel; did you mean file"):
        sink_of(sink)
