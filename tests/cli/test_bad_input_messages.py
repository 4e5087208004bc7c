"""What a user reads who types something wrong: one paragraph, the documented exit code, and nothing was started."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from planetary.cli.exit_codes import EXIT_CODES
from planetary.cli.main import main
from planetary.core.errors import (
    ClosedError,
    CompileError,
    NumericsError,
    PeerError,
    PlanetaryError,
    ResourceError,
    TrustError,
    UserError,
)
from planetary.fleet.gateway.run_files import RunLock
from planetary.fleet.protocol.records import EndKind
from planetary.run.choice import new_run
from planetary.run.results import failure_of

GOOD = "[train]\nrounds = 3\n"
FILES = {
    "good.toml": GOOD,
    "key.toml": "[train]\nround = 3\n",
    "section.toml": "[trian]\nrounds = 3\n",
    "elsewhere.toml": "[train]\nlearning_rate = 0.1\n",
    "type.toml": '[train]\nrounds = "many"\n',
    "range.toml": "[train]\nrounds = 0\n",
    "syntax.toml": "[train\n",
    "mixture.toml": "[moe]\ncomposers = 2\n",
    "latent.toml": '[model]\nsource = "planetary.models.latent_moe:build"\n[moe]\ncomposers = 2\n',
    "latin.toml": "# caf\udce9\n",
    "broken.json": "{",
    "unknown.json": '{"learning_rat": 0.1}',
    "empty.token": "",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files above, as the current one."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "events.jsonl").write_text("{}\n")
    (tmp_path / "no-run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANETARY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # what is to be run
        ("train", ["give either a configuration file", "planetary train examples/stdlib.toml", "--resume RUN"]),
        ("train good.toml --resume taken", ["give either"]),
        ("train good.toml --checkpoint x", ["--checkpoint", "needs --resume RUN"]),
        ("gateway", ["give either --gateway-config FILE", "--resume RUN"]),
        ("gateway --gateway-config good.toml --checkpoint x", ["needs --resume RUN"]),
        ("train --resume nowhere", ["cannot resume nowhere", "config.toml is missing"]),
        ("train --resume no-run", ["it is no run folder"]),
        ("train good.toml --run-dir taken", ["taken already holds a run", "--resume taken", "another --run-dir"]),
        ("watch nowhere", ["there is no such folder"]),
        ("report no-run", ["is not a run folder", "events.jsonl"]),
        ("generate no-run --prompt x", ["is not a run folder"]),
        # configuration files
        ("train nowhere.toml", ["cannot read the configuration nowhere.toml: No such file"]),
        ("train no-run", ["cannot read the configuration no-run: Is a directory"]),
        ("train key.toml", ["key.toml: unknown key train.round; did you mean train.rounds?"]),
        ("train section.toml", ["unknown section 'trian'; did you mean [train]?"]),
        ("train elsewhere.toml", ["unknown key train.learning_rate; did you mean optimizer.learning_rate?"]),
        ("train type.toml", ["train.rounds: expected a whole number >= 1, found 'many' (string)"]),
        ("train range.toml", ["train.rounds: expected a whole number >= 1, found 0"]),
        ("train syntax.toml", ["syntax.toml is not valid TOML", "line 1"]),
        ("train latin.toml", ["latin.toml is not UTF-8 text"]),
        ("train broken.json", ["broken.json is not valid JSON"]),
        ("train unknown.json", ["unknown key learning_rat; did you mean learning_rate?"]),
        ("train good.toml --set train.round=3", ["unknown key train.round; did you mean train.rounds?"]),
        ("train good.toml --set rounds=3", ["expected section.key=value, e.g. --set train.rounds=3"]),
        ("train good.toml --set train.rounds=three", ["'three' is no TOML value"]),
        ("train good.toml --workers 0", ["fabric.workers: expected a whole number >= 1"]),
        # flags
        ("trian good.toml", ["there is no command 'trian'; did you mean 'train'?"]),
        ("train good.toml --round-s 3", ["train: there is no flag --round-s; did you mean --rounds?", "--help"]),
        ("train good.toml --xyzzy", ["there is no flag --xyzzy.", "`planetary train --help`"]),
        ("train good.toml again.toml", ["no argument 'again.toml' is expected there"]),
        ("train good.toml --workers many", ["--workers", "'many'"]),
        ("train good.toml --dashboard-port 70000", ["--dashboard-port", "70000"]),
        ("gateway --gateway-config good.toml --port -1", ["--port", "-1"]),
        (
            "gateway --gateway-config good.toml --set fabric.backend=cuda --set fabric.threads=2",
            ["fabric.backend, fabric.threads: only a run that starts its own workers", "--backend, --threads"],
        ),
        ("node-manager --host h --port 70000", ["--port", "70000"]),
        ("node-manager", ["the following arguments are required: --host"]),
        ("--xyzzy", ["there is no flag --xyzzy"]),
        # mixtures
        ("train mixture.toml", ['trains model.source = "planetary.models.latent_moe:build"', "nanochat"]),
        ("train latent.toml --set moe.composers=1", ["moe.composers = 1 leaves nothing to divide"]),
        ("train latent.toml --set moe.latent_every=1", ["set moe.latent_every to at least 2"]),
        ("gateway --gateway-config latent.toml --set moe.composers=1", ["moe.composers = 1 leaves nothing to divide"]),
        ("gateway --gateway-config latent.toml --set fabric.quorum=3", ["fabric.workers (2), found 3"]),
        ("train mixture.toml --baseline", ["--set moe={}", "--set train.batch_size=16"]),
        ("moe cost --model 30b", ["there is no shape '30b'", "20b, 176b", "moe-small", "give a configuration"]),
        ("moe cost mixture.toml --model 20b", ["either the configuration mixture.toml or --model 20b"]),
        ("moe cost good.toml", ['trains model.source = "planetary.models.latent_moe:build"', "nanochat"]),
        ("moe cost nowhere.toml", ["cannot read the configuration nowhere.toml"]),
        ("moe cost --set moe.rank=4", ["--set changes a configuration"]),
        ("moe cost --router-every 0", ["--router-every must be at least 1, found 0"]),
        ("moe cost --refresh-every 0", ["--refresh-every must be at least 1, found 0"]),
        ("moe cost --composers 0", ["expected numbers of at least 1", "'0'"]),
        ("moe cost --composers 4,300", ["300 composers cannot share the 256 experts", "at most 256"]),
        ("moe cost --rank 0", ["--rank must be at least 1, found 0"]),
        ("moe cost --rank 4 --delta-rank 8", ["--delta-rank 8 is above the rank 4", "at most 4"]),
        ("moe export nowhere -o merged", ["nowhere is no run folder and no saved training", "training.json"]),
        ("moe evaluate no-run", ["no-run is not a run folder"]),
        ("generate no-run --prompt x --experts mixed", ["expected real, surrogates or composer:N", "'mixed'"]),
        # joining
        ("node-manager --host h --scale 0 --plain-loopback", ["--scale expects at least 1 worker, found 0"]),
        ("node-manager --host h", ["no invite token", "`planetary invite`", "--token-file"]),
        ("node-manager --host h --token-file nowhere", ["cannot read the token file nowhere: No such file"]),
        ("node-manager --host h --token-file empty.token", ["no invite token"]),
        ("worker --connect h:1", ["no invite token"]),
        ("worker --connect gateway --plain-loopback", ["expected HOST:PORT", "found 'gateway'"]),
        ("supervisor --connect h:70000 --plain-loopback", ["expected HOST:PORT"]),
        ("node-manager --host h --plain-loopback --node-name a/b", ["--node-name takes letters", "'a/b'"]),
        ("invite --expires soon", ["--expires expects a duration such as 90s", "'soon'"]),
    ],
)
def test_wrong_input_is_named_in_one_paragraph(
    here: Path, capfd: pytest.CaptureFixture[str], line: str, words: list[str]
) -> None:
    before = sorted(path.name for path in here.iterdir())
    assert main(shlex.split(line)) == EXIT_CODES[UserError]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("planetary: ")
    assert err.count("\nplanetary: ") == 0
    assert "\n\n" not in err
    text = " ".join(err.split())
    for word in words:
        assert word in text
    # A node's name is made before its token is looked at; nothing else appears.
    assert [name for name in sorted(path.name for path in here.iterdir()) if name != "cache"] == before


def test_an_unreadable_configuration_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "good.toml").chmod(0)
    if os.access("good.toml", os.R_OK):
        pytest.skip("this user may read everything")
    assert main(["train", "good.toml"]) == EXIT_CODES[UserError]
    assert "cannot read the configuration good.toml: Permission denied" in capfd.readouterr().err


def test_a_malformed_token_is_a_matter_of_trust(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["node-manager", "--host", "h", "--token", "plt1.nonsense"]) == EXIT_CODES[TrustError]
    err = capfd.readouterr().err
    assert "was it copied whole?" in err
    assert "nonsense" not in err, "a token is a secret"


@pytest.mark.parametrize(
    ("kind", "cls", "advice"),
    [
        ("stopped", ClosedError, "planetary train --resume runs/x"),
        ("deserted", PeerError, "planetary train --resume runs/x"),
        ("peer", PeerError, "planetary train --resume runs/x"),
        ("compile", CompileError, "planetary train --resume runs/x"),
        ("data", UserError, "planetary train --resume runs/x"),
        ("resource", ResourceError, "planetary train --resume runs/x"),
        ("numerics", NumericsError, "start a new run"),
    ],
)
def test_a_run_that_does_not_finish_ends_with_its_own_class(
    kind: EndKind, cls: type[PlanetaryError], advice: str
) -> None:
    error = failure_of(kind, "what happened", Path("runs/x"))
    assert type(error) is cls
    assert str(error).startswith("what happened. ")
    assert advice in str(error)


# --- the folder of a new run ------------------------------------------------------------------------------------


def test_a_run_never_takes_the_folder_of_another(here: Path) -> None:
    (here / "runs" / "good").mkdir(parents=True)
    (here / "runs" / "good" / "events.jsonl").write_text("{}\n")
    config, folder = new_run(Path("good.toml"), [], None)
    assert folder == here / "runs" / "good-2"
    assert config.run.name == "good-2"


def test_what_a_failed_start_left_is_used_again(here: Path) -> None:
    folder = here / "runs" / "good"
    RunLock(folder).release()
    (folder / "logs").mkdir()
    (folder / "authority").mkdir()
    (folder / "payloads" / "probes").mkdir(parents=True)
    for name in ("config.toml", "step.json", "facts.json", "characters.json"):
        (folder / name).write_text("of a run that never began")
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder / name).touch()  # opened, and nothing was written
    assert new_run(Path("good.toml"), [], None)[1] == folder
    (folder / "notes.txt").write_text("somebody's")
    assert new_run(Path("good.toml"), [], None)[1] == here / "runs" / "good-2"


def test_the_folder_of_a_start_under_way_is_left_alone(here: Path) -> None:
    lock = RunLock(here / "runs" / "good")
    assert new_run(Path("good.toml"), [], None)[1] == here / "runs" / "good-2"
    with pytest.raises(ResourceError, match=rf"another gateway \(process {os.getpid()}\) is running the run"):
        RunLock(here / "runs" / "good")
    lock.release()
    assert new_run(Path("good.toml"), [], None)[1] == here / "runs" / "good"
