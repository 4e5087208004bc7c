"""A mixture's program is exported once; a change of its sources makes another, and a run keeps its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from chat_support import PLAIN, said, tokenizer_folder

from planetary.artifacts.store import BlobStore
from planetary.core.config import apply_overrides, load_config
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.runs.mixture.preparation import PreparedMixture, ProgramRecord, prepare_mixture
from planetary.runs.rounds.preparation import prepared_steps

EXAMPLE = Path(__file__).parents[4] / "examples" / "parallax-tiny.toml"
SMALL = (
    "model.options={ n_layer = 1, n_embd = 16, n_head = 2, n_kv_head = 2, n_expert = 4, n_active = 2, n_latent = 8, "
    "n_hidden = 16, vocab_size = 256 }",
    "train.batch_size=1",
    "train.sequence_length=8",
    "train.rounds=4",
    "train.inner_steps=4",
    "moe.composers=2",
    "moe.rank=2",
    "fabric.workers=2",
    "optimizer.name=sgd",
    "optimizer.beta1=0.9",  # the default: SGD has none, and the example sets another
    "optimizer.warmup_steps=2",
    "eval.batches=2",
)


class Folder:
    """Data and a cache; `prepare` returns what was prepared and whether the mixture was exported for it."""

    def __init__(self, root: Path) -> None:
        self.corpus, self.cache = root / "corpus.txt", root / "cache"
        self.corpus.write_text("the cat sat on the mat\n" * 800)

    def config(self, *overrides: str) -> Config:
        return apply_overrides(load_config(EXAMPLE), [*SMALL, f"data.source={self.corpus}", *overrides])

    def prepare(self, *overrides: str, own: ProgramRecord | None = None) -> tuple[PreparedMixture, bool]:
        stages: list[str] = []
        made = prepare_mixture(self.config(*overrides), self.cache, stages.append, own=own)
        return made, any(stage.startswith("exporting") for stage in stages)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_the_same_program_is_read_back_for_any_length_and_rate(folder: Folder) -> None:
    first, exported = folder.prepare()
    assert exported
    again, exported = folder.prepare("train.rounds=7", "optimizer.learning_rate=0.1", "optimizer.schedule=linear")
    assert not exported
    assert again.program == first.program
    assert again.record == first.record
    assert folder.prepare("moe.rank=3")[1]


def test_mixture_refuses_chats(folder: Folder, tmp_path: Path) -> None:
    chats = [{"messages": said(f"{n} + 1?", f"It is {n + 1}.")} for n in range(40)]
    folder.corpus.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    with pytest.raises(UserError, match=r"only what the assistant says is trained, and a mixture of composers"):
        folder.prepare("data.format=chat", f"data.tokenizer={tokenizer_folder(tmp_path / 'model', PLAIN['chatml'])}")


@pytest.mark.slow
def test_run_keeps_its_program_whatever_became_of_packages(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = folder.prepare()
    kept = msgspec.json.decode(msgspec.json.encode(first.record), type=ProgramRecord)
    monkeypatch.setattr(prepared_steps, "environment", lambda: "another package was installed")
    resumed, exported = folder.prepare(own=kept)
    assert not exported
    assert resumed.program == first.program
    assert folder.prepare()[1], "a new run"


def test_a_program_that_is_gone_is_made_again(folder: Folder) -> None:
    first, _ = folder.prepare()
    BlobStore(folder.cache / "blobs").path(first.record.digest).unlink()
    again, exported = folder.prepare(own=first.record)
    assert exported
    assert again.record.digest == first.record.digest


def test_a_gateway_that_reads_a_program_back_loads_no_jax(folder: Folder, tmp_path: Path) -> None:
    """A process of its own: this one has JAX."""
    folder.prepare()
    config = tmp_path / "run.toml"
    sets = [*SMALL, f"data.source={folder.corpus}"]
    config.write_text(EXAMPLE.read_text())
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from planetary.core.config import apply_overrides, load_config\n"
        "from planetary.runs.mixture.gateway import gateway\n"
        "from planetary.runs.mixture.preparation import prepare_mixture\n"
        f"config = apply_overrides(load_config({str(config)!r}), {sets!r})\n"
        f"prepare_mixture(config, Path({str(folder.cache)!r}), lambda text: None)\n"
        "print(sorted({'jax', 'jaxlib', 'iree.compiler'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
