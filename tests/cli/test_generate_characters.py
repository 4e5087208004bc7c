"""`planetary generate` on runs whose tokens are characters, or tokens without text."""

from __future__ import annotations

from pathlib import Path

import pytest

from planetary.cli.exit_codes import EXIT_CODES
from planetary.cli.main import main
from planetary.compiler.frontend.export import find_builder
from planetary.core.errors import UserError
from planetary.data.tokenizer import CharTokenizer
from planetary.models.initial import flat_names
from saved_parameters import save_parameters

SOURCE = "planetary.models.gpt2:build"
SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 300}
TEXT = "zwölf Boxkämpfer"


def run_folder(folder: Path, data: str) -> Path:
    lines = "\n".join(f"{key} = {value}" for key, value in SIZES.items())
    (folder / "config.toml").write_text(
        f'[data]\n{data}\n[train]\nsequence_length = 16\n[model]\nsource = "{SOURCE}"\n[model.options]\n{lines}\n'
    )
    save_parameters(folder, flat_names(find_builder(SOURCE)(**SIZES, sequence_length=16)[1]))
    return folder


@pytest.mark.slow
def test_text_is_drawn_from_the_characters_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path, 'tokenizer = "char"')
    CharTokenizer(TEXT).save(run)
    assert main(["generate", str(run), "--prompt", "zö", "--tokens", "60", "--temperature", "5"]) == 0
    drawn = capsys.readouterr().out.strip("\n")
    assert drawn.startswith("zö")
    assert len(drawn) == 62
    assert set(drawn) <= set(TEXT)  # never one of the model's 285 tokens that stand for no character


def test_a_prompt_with_a_character_never_seen_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path, 'tokenizer = "char"')
    CharTokenizer(TEXT).save(run)
    assert main(["generate", str(run), "--prompt", "zwei"]) == EXIT_CODES[UserError]
    assert "the characters 'i' are not among the 15 that the training data has" in capsys.readouterr().err.replace(
        "\n", " "
    )


def test_a_run_without_its_characters_says_which_file_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path, 'tokenizer = "char"')
    assert main(["generate", str(run), "--prompt", "z"]) == EXIT_CODES[UserError]
    assert "characters.json" in capsys.readouterr().err


def test_tokens_without_text_need_their_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for data in ('source = "t.u16"', 'source = "t.bin"\ntokenizer = "u16"'):
        run = run_folder(tmp_path, data)
        assert main(["generate", str(run), "--prompt", "z"]) == EXIT_CODES[UserError]
        assert "tokenizer.json" in capsys.readouterr().err
