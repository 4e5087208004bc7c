"""The settings of a tokenizer's folder: each line of the table in docs/data.md, compared with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from planetary.core.errors import UserError
from planetary.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from planetary.data.tokenizer_settings import read_settings

TEXT = "a <s>b</s> É<|im_start|> <extra> c" * 3
LETTERS = pre_tokenizers.ByteLevel.alphabet()


def plain() -> Tokenizer:
    """Return a byte-level tokenizer whose vocabulary has special words that are no added tokens, but for `<s>`."""
    words = [*sorted(LETTERS), "<s>", "</s>", "<|im_start|>", "<extra>"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    return made


def with_post_processor(made: Tokenizer) -> None:
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 256), ("</s>", 257)]
    )


def limited(made: Tokenizer) -> None:
    made.enable_truncation(4)
    made.enable_padding(length=200, pad_id=3)


def lower_case(made: Tokenizer) -> None:
    made.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])


def with_added(made: Tokenizer) -> None:
    made.add_tokens([AddedToken("b</s", lstrip=True, rstrip=True, normalized=False)])


def as_it_is(made: Tokenizer) -> None:
    pass


DECODER = {"258": {"content": "<|im_start|>", "special": True, "lstrip": False, "rstrip": True, "normalized": False}}
NEW = {"260": {"content": "é c", "special": False, "normalized": True, "single_word": False}}
CASES: dict[str, tuple[Callable[[Tokenizer], None], dict[str, dict[str, Any]]]] = {
    "nothing": (as_it_is, {}),
    "truncation and padding": (limited, {}),
    "post-processor": (with_post_processor, {}),
    "normalizer": (lower_case, {}),
    "added tokens": (with_added, {}),
    "add_bos_token": (as_it_is, {"tokenizer_config": {"add_bos_token": True, "bos_token": "<s>"}}),
    "no add_bos_token": (with_post_processor, {"tokenizer_config": {"add_bos_token": False, "bos_token": "<s>"}}),
    "add_eos_token": (as_it_is, {"tokenizer_config": {"add_eos_token": True, "eos_token": "</s>"}}),
    "a name of a token": (as_it_is, {"tokenizer_config": {"eos_token": "</s>"}}),
    "a name with flags": (
        as_it_is,
        {"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "</s>", "rstrip": True}}},
    ),
    "more special tokens": (as_it_is, {"tokenizer_config": {"extra_special_tokens": ["<extra>"]}}),
    "special tokens by names": (as_it_is, {"tokenizer_config": {"extra_special_tokens": {"x_token": "<extra>"}}}),
    "added_tokens_decoder": (as_it_is, {"tokenizer_config": {"added_tokens_decoder": DECODER}}),
    "a new token of the decoder": (as_it_is, {"tokenizer_config": {"added_tokens_decoder": NEW}}),
    "special_tokens_map": (as_it_is, {"tokenizer_config": {}, "special_tokens_map": {"eos_token": "</s>"}}),
    "special_tokens_map alone": (as_it_is, {"special_tokens_map": {"eos_token": "</s>"}}),
    "special_tokens_map beside a decoder": (
        as_it_is,
        {"tokenizer_config": {"added_tokens_decoder": DECODER}, "special_tokens_map": {"eos_token": "</s>"}},
    ),
    "added_tokens.json": (as_it_is, {"tokenizer_config": {}, "added_tokens": {"<extra>": 259}}),
    "split_special_tokens": (as_it_is, {"tokenizer_config": {"split_special_tokens": True}}),
    "clean_up_tokenization_spaces": (as_it_is, {"tokenizer_config": {"clean_up_tokenization_spaces": True}}),
    "a length": (as_it_is, {"tokenizer_config": {"model_max_length": 4, "padding_side": "left"}}),
}


def folder_of(folder: Path, case: str) -> Path:
    change, files = CASES[case]
    made = plain()
    change(made)
    (folder / "tokenizer.json").write_text(made.to_str())
    for name, value in files.items():
        is_config = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == "tokenizer_config" else {}
        (folder / f"{name}.json").write_text(json.dumps({**is_config, **value}))
    return folder


@pytest.mark.doors("transformers")
@pytest.mark.parametrize("case", CASES)
def test_a_folder_makes_the_tokens_of_transformers(case: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder_of(tmp_path, case))
    ours = load_tokenizer(str(tmp_path / "tokenizer.json"))
    inner = ours.encode(TEXT.encode()).tolist()
    assert inner == theirs(TEXT, add_special_tokens=False)["input_ids"]
    first, last = ours.added
    assert [*first, *inner, *last] == theirs(TEXT)["input_ids"]
    assert ours.decode(inner).decode() == theirs.decode(inner)
    written = JsonTokenizer(ours.to_json(), "written")  # alone, as an exported model has it
    if case != "split_special_tokens":  # which the library does not write
        assert written.encode(TEXT.encode()).tolist() == inner


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        ("truncation and padding", ["a", "Ġ", "<s>", "b"]),
        ("a name of a token", ["a", "Ġ", "<s>", "b", "</s>"]),
        ("more special tokens", ["<extra>", "Ġ", "c"]),
        ("added_tokens_decoder", ["<|im_start|>"]),
        ("special_tokens_map alone", ["</s>"]),
        ("added_tokens.json", ["<extra>"]),
    ],
)
def test_settings_have_their_effect_without_transformers(case: str, tokens: list[str], tmp_path: Path) -> None:
    made = load_tokenizer(str(folder_of(tmp_path, case) / "tokenizer.json"))
    library = plain()
    ids = [library.token_to_id(token) for token in tokens]
    found = made.encode(TEXT.encode()).tolist()
    assert any(found[i : i + len(ids)] == ids for i in range(len(found)))
    assert len(found) > 50


def test_settings_that_change_tokens_are_another_tokenizer(tmp_path: Path) -> None:
    digests = set()
    for case in ("nothing", "truncation and padding", "a name of a token", "added_tokens_decoder"):
        (tmp_path / case).mkdir()
        digests.add(load_tokenizer(str(folder_of(tmp_path / case, case) / "tokenizer.json")).digest)
    assert len(digests) == 4
    (tmp_path / "same").mkdir()
    same = folder_of(tmp_path / "same", "nothing")
    (same / "tokenizer_config.json").write_text('{"bos_token": "<s>", "pad_token": "absent"}')
    assert load_tokenizer(str(same / "tokenizer.json")).digest in digests


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('{"added_tokens_decoder": {"9": {"content": "<extra>"}}}', "has the id 259 for '<extra>', and the settings"),
        ('{"added_tokens_decoder": {"-1": {"content": "x"}}}', "'-1' is no id of a token"),
        ('{"added_tokens_decoder": {"9999999999999": {"content": "x"}}}', "is no id of a token"),
        ('{"added_tokens_decoder": {"3": "x"}}', "added_tokens_decoder has 'x' for 3: expected an added token"),
        ('{"added_tokens_decoder": []}', "added_tokens_decoder is list"),
        ('{"extra_special_tokens": 3}', "extra_special_tokens is int"),
        ("[1]", "expected a JSON object, found list"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_malformed_settings_are_named(settings: str, words: str, tmp_path: Path) -> None:
    folder_of(tmp_path, "nothing")
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(UserError, match=words):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_names_of_special_tokens_are_read(tmp_path: Path) -> None:
    assert dict(read_settings(folder_of(tmp_path, "special_tokens_map")).names) == {"eos_token": "</s>"}
    assert read_settings(tmp_path / "absent").names == ()


# --- malformed files ----------------------------------------------------------------------------------------


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(ByteTokenizer().to_json())
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is not a tokenizer.json"),
        (b"[" * 100_000, "is not a tokenizer.json"),
        (b"\xff\xfe", "is not a tokenizer.json"),
        (b"\xef\xbb\xbf{}", "is not a tokenizer.json"),
        (changed(lambda d: d["model"]["vocab"].update(zz=4_294_967_295)), "gives the token 'zz' the id 4294967295"),
        (changed(lambda d: d["model"]["vocab"].update(zz=2**40)), "is not a tokenizer.json"),
        (changed(lambda d: d["model"]["vocab"].update(zz=-1)), "is not a tokenizer.json"),
        (changed(lambda d: d["model"].update(merges=["qq zz"])), "is not a tokenizer.json"),
        (
            changed(
                lambda d: d.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"})
            ),
            "is not a tokenizer.json",
        ),
    ],
)
def test_a_malformed_file_is_an_error(raw: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words):
        JsonTokenizer(raw, "t")


def test_a_pattern_that_does_not_end_is_an_error() -> None:
    """The library panics, which is no `Exception` in Python."""
    bomb = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    made = JsonTokenizer(changed(lambda d: d.update(pre_tokenizer=bomb)), "t")
    with pytest.raises(UserError, match=r"the tokenizer t fails on the text that begins 'aaa"):
        made.encode(b"a" * 40 + b"b")
