"""Packages that `import planetary`, `planetary --help` and the roles leave out; bench/import_time.py measures time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from waiting import HANG_S

HEAVY = ("numpy", "jax", "jaxlib", "iree", "msgspec", "capnp", "cryptography", "asyncio", "rich", "matplotlib")


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after `statement`."""
    script = f"import sys\n{statement}\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=True)
    return set(done.stdout.split())


def test_import_planetary_loads_nothing_but_itself() -> None:
    ours = {name for name in loaded_by("import planetary") if name.split(".")[0] == "planetary"}
    assert ours == {"planetary", "planetary.lazy_names", "planetary.version"}
    assert not loaded_by("import planetary") & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_loads_no_numeric_library(arguments: list[str]) -> None:
    """A command's own help reads the schema for the keys that its flags set."""
    run = f"from planetary.cli.main import main\ntry: main({arguments})\nexcept SystemExit: pass"
    schema = {"msgspec"} if "train" in arguments else set()
    assert not loaded_by(run) & (set(HEAVY) - schema)


def test_a_worker_loads_a_role_when_it_has_the_roles_job() -> None:
    """The loaders of all kinds of run are there; the code of a mixture, a policy or a served model is not, nor JAX."""
    loaded = loaded_by(
        "import planetary.fleet.worker.worker, planetary.runs.rounds.worker.role\n"
        "from planetary.run.kinds import all_kinds\nfor kind in all_kinds(): kind.worker_roles(), kind.protocol()"
    )
    assert {"planetary.runs.mixture.loader", "planetary.runs.rl.loader"} <= loaded
    roles = {"runs.mixture.composer.role", "runs.rl.role", "runs.serve.role"}
    assert not loaded & {f"planetary.{name}" for name in roles}
    heavy = ("jax", "jaxlib", "iree", "planetary.models", "planetary.compiler", "planetary.runs.mixture.training")
    assert not [name for name in loaded if name.startswith(tuple(f"{one}." for one in heavy)) or name in heavy]


def test_a_public_name_loads_its_module_when_it_is_used() -> None:
    loaded = loaded_by("import planetary\nplanetary.train")
    assert "planetary.run.train" in loaded
    assert not loaded & {"jax", "jaxlib", "iree.compiler", "matplotlib"}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import planetary.cli.node_flags", {"planetary.core.config", "planetary.collectives", "fsspec", "jax"}),
        (
            "import planetary.runs.rounds.worker.role",
            {"planetary.collectives.peer", "fsspec", "jax", "iree.compiler"},
        ),
        (
            "from planetary.run.kinds import worker_roles\nworker_roles()",
            {"planetary.collectives.peer", "jax", "jinja2"},
        ),
        (
            "import planetary.runs.rounds.gateway.gateway",
            {"planetary.collectives.master", "jax", "jaxlib", "iree.compiler"},
        ),
    ],
    ids=["node manager", "worker of a star", "loaders of all roles", "gateway of a star"],
)
def test_a_role_starts_without_packages_that_only_others_use(statement: str, absent: set[str]) -> None:
    assert not loaded_by(statement) & absent


def test_public_names_are_listed_and_others_are_errors() -> None:
    import planetary

    assert set(planetary.__all__) <= set(dir(planetary))
    for name in planetary.__all__:
        assert getattr(planetary, name) is not None
    with pytest.raises(AttributeError, match="public are"):
        planetary.nothing_of_the_kind  # noqa: B018
