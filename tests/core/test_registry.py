"""An object of one's own is found as a built-in one is, and a file's class means the same text everywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from planetary.core.errors import LocalProtocolError, UserError
from planetary.core.extension_points import CODECS, EXTENSION_POINTS, FAMILIES, FRAMEWORKS, SINKS, WEIGHT_FILES
from planetary.core.registry import file_of, pinned_file
from planetary.core.user_code import barred

CODEC = """
import numpy as np
from planetary.extend import Codec

class Halves(Codec):
    lossy = False
    def nbytes(self, spec): return 4 * spec.size
    def encode(self, values, out): out.view("<f4")[:] = values.reshape(-1)
    def decode(self, spec, data): return data.view("<f4").reshape(spec.shape).copy()
"""


def test_every_built_in_class_has_the_interface_of_its_kind() -> None:
    for registry in (*EXTENSION_POINTS.values(), FAMILIES, FRAMEWORKS, SINKS, WEIGHT_FILES):
        assert all(registry.find(name).__dict__["name"] == name for name in registry.built_in)
        assert registry.built_in


def test_an_unknown_name_gets_the_nearest_and_all() -> None:
    with pytest.raises(UserError, match=r"did you mean sparse\? There are float32, bf16, .*planetary.codecs"):
        CODECS.find("sparce")


def test_a_class_of_a_file_is_pinned_by_its_text(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(CODEC)
    pinned = CODECS.pin(f"{path}:Halves")
    assert (file := pinned_file(pinned)) is not None
    assert (file.file, file_of(pinned)) == ("own.py", None)
    before = CODECS.find(pinned)
    path.write_text(CODEC.replace("4 * spec.size", "8 * spec.size"))
    assert CODECS.find(pinned) is before
    assert CODECS.find(f"{path}:Halves") is not before
    assert CODECS.pin("sign") == "sign"


def test_a_pinned_file_that_was_not_loaded_is_not_looked_for(tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError, match="was not loaded here"):
        CODECS.find(f"own.py:Halves@{'0' * 64}")


def test_a_file_is_not_run_to_read_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "loud.py"
    path.write_text("raise SystemExit(3)")
    CODECS.check_name(f"{path}:Any")
    assert CODECS.declared(f"{path}:Any") is None
    with pytest.raises(UserError, match=r"loud.py failed while it was loaded: it called exit\(3\)"):
        CODECS.find(f"{path}:Any")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no class; expected a class derived from planetary.extend.Codec"),
        ("class Own: pass", "no Codec"),
        ("from planetary.extend import Codec\nclass Own(Codec): pass", "the class lacks decode, encode, nbytes"),
        ("import beside\nclass Own: pass", "line 1: it imports beside from its own folder"),
        ("from .beside import x", "line 1: it imports a module from its own folder"),
        ("class Own(", "SyntaxError"),
        ("1 / 0", r"ZeroDivisionError.*own.py@.*:1"),
    ],
)
def test_a_file_that_is_no_codec_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(UserError, match=words):
        CODECS.find(f"{tmp_path}/own.py:Own")


def test_code_that_is_barred_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODEC + "# barred")
    with barred("a reason"), pytest.raises(LocalProtocolError, match="a reason"):
        CODECS.find(f"{tmp_path}/own.py:Halves")


def test_an_entry_point_of_a_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package.py").write_text(CODEC)
    info = tmp_path / "own_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[planetary.codecs]\nhalves = own_package:Halves\nsign = own_package:Halves\nbroken = own_package:Nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert CODECS.find("halves") is sys.modules["own_package"].Halves
    assert CODECS.pin("halves") == "halves"
    assert CODECS.names()[-2:] == ["broken", "halves"]
    assert CODECS.find("sign") is CODECS.built_in["sign"]
    with pytest.raises(UserError, match="entry point own_package:Nothing cannot be loaded"):
        CODECS.find("broken")
