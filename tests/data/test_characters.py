"""The character tokenizer: made of the data, kept with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.data import prepare as prepare_module
from planetary.data import sources
from planetary.data.prepare import prepare
from planetary.data.prepared_data import PreparedData
from planetary.data.reader import read_slice
from planetary.data.tokenizer import CHARACTERS, CharTokenizer, load_tokenizer

TEXT = "zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, 😀!\n" * 60


def prepared(folder: Path, text: str | bytes, *overrides: str) -> PreparedData:
    (folder / "t.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    small = ["train.batch_size=2", "train.sequence_length=7", "train.inner_steps=2", "data.tokenizer=char"]
    config = apply_overrides(Config(), [f"data.source={folder / 't.txt'}", *small, *overrides])
    return prepare(config, folder / "cache")


def test_the_vocabulary_is_the_sorted_characters_of_the_data(tmp_path: Path) -> None:
    data = prepared(tmp_path, TEXT, "data.sampling=fifo")
    tokenizer = data.tokenizer
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.characters == "".join(sorted(set(TEXT)))
    assert data.vocab_size == len(set(TEXT))
    tokens = read_slice(data.train.slice(0, data.train.count))
    assert tokenizer.decode(tokens.tolist()).decode() == TEXT[: tokens.size]


def test_the_vocabulary_is_complete_however_the_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 7)  # cuts characters in two
    tokenizer = prepared(tmp_path, TEXT).tokenizer
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.characters == "".join(sorted(set(TEXT)))


def test_the_cache_has_the_tokenizer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(tmp_path, TEXT)
    monkeypatch.setattr(prepare_module, "build", None)  # calling it would fail
    second = prepared(tmp_path, TEXT)
    assert first.tokenizer is not None
    assert second.tokenizer is not None
    assert (second.key, second.tokenizer.digest) == (first.key, first.tokenizer.digest)


@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_what_is_encoded_decodes_to_itself(text: str) -> None:
    tokenizer = CharTokenizer(text)
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids.tolist()).decode() == text
    assert ids.dtype == np.uint32
    assert ids.max() < tokenizer.vocab_size == len(set(text))


def test_a_character_that_the_data_never_had_is_named() -> None:
    with pytest.raises(UserError, match=r"the characters 'xyä' are not among the 3 that the training data has"):
        CharTokenizer("abc").encode("ayxäb".encode())
    assert CharTokenizer("abc").decode([0, 99]).decode() == "a\ufffd"  # a model may have more ids than there is text


def test_text_that_is_not_utf8_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r't\.txt needs UTF-8 text: .*data\.tokenizer = "byte" takes any bytes'):
        prepared(tmp_path, b"caf\xe9\n" * 50)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_saved_tokenizer_is_the_same_one(tmp_path: Path) -> None:
    CharTokenizer("b\naü").save(tmp_path)
    assert load_tokenizer("char", tmp_path).digest == CharTokenizer("ü\nab").digest
    (tmp_path / CHARACTERS).write_text("{}")
    with pytest.raises(UserError, match=r"characters\.json is damaged"):
        load_tokenizer("char", tmp_path)
    with pytest.raises(UserError, match="cannot read the character tokenizer"):
        load_tokenizer("char", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is made of the training data"):
        load_tokenizer("char")
