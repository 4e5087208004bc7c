"""A tokenizer as a `tokenizer.json`: the same text is the same ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from planetary.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer

TEXT = "def f(x):\n\treturn 'é€' \u00ad\x00\x7f  # end\r\n"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer(TEXT + "zß")], ids=["byte", "char"])
def test_a_tokenizer_can_be_read_by_the_library(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer.to_json())
    read = load_tokenizer(str(path))
    assert read.vocab_size == tokenizer.vocab_size
    ids = tokenizer.encode(TEXT.encode())
    assert read.encode(TEXT.encode()).tolist() == ids.tolist()
    assert read.decode(ids.tolist()) == TEXT.encode()
    assert read.to_json() == path.read_bytes()


def test_every_byte_has_a_letter_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(ByteTokenizer().to_json())
    text = "".join(map(chr, range(0x800)))  # all bytes that UTF-8 has, but for those of longer characters
    assert load_tokenizer(str(path)).encode(text.encode()).tolist() == list(text.encode())
