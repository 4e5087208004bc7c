"""An example of `docs/extending.md` as a package that is installed, with an entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def install_example(file: str, point: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the example that begins with `# file`, of at most 40 lines; `point`: "group: name = module:Class"."""
    example = PAGE.read_text().partition(f"```python\n# {file}")[2].partition("\n")[2].partition("```")[0]
    assert 0 < example.count("\n") <= 40
    group, _, entry = point.partition(": ")
    info = place / f"{Path(file).stem}-1.0.dist-info"
    info.mkdir()
    (place / file).write_text(example)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {Path(file).stem}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    monkeypatch.syspath_prepend(place)
