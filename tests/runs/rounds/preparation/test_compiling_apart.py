"""What the gateway hears from the process that compiles and verifies, however that process ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.pipeline import LATEST_CHOICE
from planetary.compiler.step.step_module import TrainStep
from planetary.core.errors import CompileError
from planetary.core.step import StepSpec
from planetary.fleet.preparation import compiling
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact, compile_apart


def outcome(
    monkeypatch: pytest.MonkeyPatch, answers: Sequence[PublishedArtifact | str], code: int | None, tmp_path: Path
) -> PublishedArtifact:
    """Run `compile_apart` with a child that gives these answers and exits with `code`; None: never."""

    class Fake:
        @classmethod
        async def start(cls, command: Sequence[str], **options: Any) -> Fake:
            for answer in answers:
                given = (
                    compiling.CompileAnswer(None, answer)
                    if isinstance(answer, str)
                    else compiling.CompileAnswer(answer)
                )
                compiling.give_answer(Path(command[-1]), given)
            Path(options["log"]).write_text("Segmentation fault\n")
            return cls()

        async def wait(self) -> int:
            if code is None:
                raise TimeoutError
            return code

        def kill_group(self) -> None:
            pass

    monkeypatch.setattr(compiling, "Child", Fake)
    spec = StepSpec("m", (), (), (), (), "d" * 64)
    prepared = compiling.ModelToCompile(TrainStep("", spec, b""), {}, {})
    return asyncio.run(compile_apart(prepared, CompileTarget("vulkan", "baseline", ""), tmp_path))


PUBLISHED = PublishedArtifact("ab" * 32, 10, "agrees")


def test_the_last_answer_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert outcome(monkeypatch, [PUBLISHED], 0, tmp_path) == PUBLISHED
    with pytest.raises(CompileError, match=r"^it is wrong; the tanh$"):
        outcome(monkeypatch, ["it is wrong", "it is wrong; the tanh"], 0, tmp_path)


def test_what_was_published_needs_no_process_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    made = PublishedArtifact(store.put(b"artifact"), 8, "agrees")
    assert outcome(monkeypatch, [made], 0, tmp_path) == made
    assert outcome(monkeypatch, [], -11, tmp_path) == msgspec.structs.replace(made, cached=True)
    store.link(LATEST_CHOICE, store.put(b"other flags"))  # as `planetary tune` does
    with pytest.raises(CompileError, match="SIGSEGV"):
        outcome(monkeypatch, [], -11, tmp_path)
    assert outcome(monkeypatch, [made], 0, tmp_path) == made
    store.path(made.digest).write_bytes(b"damaged")
    with pytest.raises(CompileError, match="SIGSEGV"):
        outcome(monkeypatch, [], -11, tmp_path)


@pytest.mark.parametrize("code", [-11, None])
def test_refusal_outlives_a_crashed_or_slow_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int | None
) -> None:
    with pytest.raises(CompileError, match=r"^it is wrong$"):
        outcome(monkeypatch, ["it is wrong"], code, tmp_path)


def test_without_an_answer_the_end_of_the_process_is_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"killed by SIGSEGV; its last words: Segmentation fault"):
        outcome(monkeypatch, [], -11, tmp_path)
    with pytest.raises(CompileError, match="did not end within 3600 s"):
        outcome(monkeypatch, [], None, tmp_path)


def test_a_refusal_is_logged_while_the_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has refused and still searches; it ends only once the refusal was logged."""

    class Searching:
        def __init__(self, folder: Path) -> None:
            self.logged = asyncio.Event()
            compiling.give_answer(folder, compiling.CompileAnswer(None, "it is wrong.", searching=True))

        @classmethod
        async def start(cls, command: Sequence[str], **options: Any) -> Searching:
            made = cls(Path(command[-1]))

            def warning(text: str, *values: object) -> None:
                heard.append(text % values)
                made.logged.set()

            monkeypatch.setattr(compiling.log, "warning", warning)
            return made

        async def wait(self) -> int:
            await self.logged.wait()
            return 0

        def kill_group(self) -> None:
            pass

    heard: list[str] = []
    monkeypatch.setattr(compiling, "Child", Searching)
    monkeypatch.setattr(compiling, "_LOOK_EVERY_S", 0.01)
    spec = StepSpec("m", (), (), (), (), "d" * 64)
    prepared = compiling.ModelToCompile(TrainStep("", spec, b""), {}, {})
    with pytest.raises(CompileError, match=r"^it is wrong\. The search .* did not end\.$"):
        asyncio.run(compile_apart(prepared, CompileTarget("vulkan", "baseline", ""), tmp_path))
    assert heard == ["it is wrong. Searching for the operation that is wrong, for at most 5 minutes"]
