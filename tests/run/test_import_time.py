"""What `import planetary` and `planetary --help` do not load. Their durations are measured in bench/import_time.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("numpy", "jax", "jaxlib", "iree", "msgspec", "capnp", "cryptography", "asyncio", "rich", "matplotlib")


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after `statement`."""
    script = f"import sys\n{statement}\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_import_planetary_loads_nothing_but_itself() -> None:
    ours = {name for name in loaded_by("import planetary") if name.split(".")[0] == "planetary"}
    assert ours == {"planetary", "planetary.version"}
    assert not loaded_by("import planetary") & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_loads_no_numeric_library(arguments: list[str]) -> None:
    """A command's own help reads the schema for the keys that its flags set."""
    run = f"from planetary.cli.main import main\ntry: main({arguments})\nexcept SystemExit: pass"
    schema = {"msgspec"} if "train" in arguments else set()
    assert not loaded_by(run) & (set(HEAVY) - schema)


def test_a_public_name_loads_its_module_when_it_is_used() -> None:
    loaded = loaded_by("import planetary\nplanetary.train")
    assert "planetary.run.train" in loaded
    assert not loaded & {"jax", "jaxlib", "iree.compiler", "matplotlib"}


def test_public_names_are_listed_and_others_are_errors() -> None:
    import planetary

    assert set(planetary.__all__) <= set(dir(planetary))
    for name in planetary.__all__:
        assert getattr(planetary, name) is not None
    with pytest.raises(AttributeError, match="public are"):
        planetary.nothing_of_the_kind  # noqa: B018
