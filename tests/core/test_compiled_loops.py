"""`CompiledLoops` imports its module at the first `load`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from planetary.core.compiled_loops import CompiledLoops


def test_nothing_is_loaded_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_loops.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    loops = CompiledLoops("some_loops")
    assert loops.loaded is None
    assert "some_loops" not in sys.modules
    module = loops.load()
    assert module is not None
    assert module.ONE == 1
    assert loops.loaded is module is loops.load()
    monkeypatch.delitem(sys.modules, "some_loops")


@pytest.mark.parametrize(("line", "raises"), [("import numba.absent", False), ("import another_library", True)])
def test_only_an_absent_numba_is_no_error(
    line: str, raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_loops.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    loops = CompiledLoops("other_loops")
    if raises:
        with pytest.raises(ModuleNotFoundError, match="another_library"):
            loops.load()
    else:
        assert loops.load() is None
    assert loops.loaded is None
