from __future__ import annotations

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, write_checkpoint
from planetary.cli.main import main
from planetary.core.errors import NumericsError, UserError
from planetary.core.tensors import TensorSpec
from planetary.data.tokenizer import ByteTokenizer
from planetary.models import nanochat
from planetary.run.model.text_continuation import Sampling, continue_tokens, text_pieces
from planetary.run.model.trained_model import fill_tree, load_trained

OPTIONS = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "sequence_length": 16}


def successor(params: jax.Array, tokens: jax.Array) -> jax.Array:
    """Logits of a made-up model: after token t comes t + 1, or t + 2 with fewer chances."""
    vocabulary = params.shape[0]
    first = jax.nn.one_hot((tokens + 1) % vocabulary, vocabulary)
    second = jax.nn.one_hot((tokens + 2) % vocabulary, vocabulary)
    return 8.0 * first + 7.0 * second


def draw(count: int, prompt: list[int], **options: float) -> list[int]:
    sampling = msgspec.convert(options, Sampling)
    tokens = continue_tokens(successor, jnp.zeros(50), prompt, window=4, sampling=sampling)
    return list(itertools.islice(tokens, count))


def test_temperature_zero_takes_the_likeliest_token_also_beyond_the_window() -> None:
    assert draw(10, [7], temperature=0) == list(range(8, 18))
    assert draw(3, list(range(20)), temperature=0) == [20, 21, 22]


def test_equal_seeds_draw_equal_tokens_and_others_do_not() -> None:
    assert draw(30, [0], seed=1) == draw(30, [0], seed=1)
    assert draw(30, [0], seed=1) != draw(30, [0], seed=2)


def test_top_k_limits_what_can_be_drawn() -> None:
    hot = {"temperature": 100.0}
    steps = np.diff([0, *draw(40, [0], **hot, top_k=2)]) % 50
    assert set(steps) == {1, 2}
    assert draw(10, [0], **hot, top_k=1) == list(range(1, 11))
    assert set(np.diff([0, *draw(40, [0], **hot)]) % 50) - {1, 2}  # without the limit others come


def test_what_cannot_be_sampled_is_an_error() -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        draw(1, [])
    with pytest.raises(UserError, match="temperature"):
        Sampling(temperature=-1.0)
    with pytest.raises(UserError, match="top_k"):
        Sampling(top_k=-1)
    broken = continue_tokens(lambda p, t: p[t] * jnp.nan, jnp.ones((9, 9)), [1], window=4, sampling=Sampling())
    with pytest.raises(NumericsError, match="not finite"):
        next(broken)


def test_a_character_in_several_tokens_is_printed_whole() -> None:
    tokens = "aé☄b".encode()
    assert [piece for piece in text_pieces(tokens, ByteTokenizer()) if piece] == ["a", "é", "☄", "b"]


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert "".join(text_pieces(b"a\xffb\xe2", ByteTokenizer())) == "a\ufffdb\ufffd"


def test_a_tokenizer_that_marks_a_cut_character_is_waited_for() -> None:
    class Marking(ByteTokenizer):
        def decode(self, ids) -> bytes:  # type: ignore[no-untyped-def]
            return bytes(ids).decode("utf-8", "replace").encode()

    assert [piece for piece in text_pieces("aé".encode(), Marking()) if piece] == ["a", "é"]


def test_the_space_before_the_first_word_is_kept() -> None:
    class Stripping(ByteTokenizer):
        def decode(self, ids) -> bytes:  # type: ignore[no-untyped-def]
            return bytes(ids).removeprefix(b" ")

    assert "".join(text_pieces(b" mill", Stripping(), b"the")) == " mill"


# --- from a run folder
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    options = "".join(f"{key} = {value}\n" for key, value in OPTIONS.items())
    (tmp_path / "config.toml").write_text(f"[train]\nsequence_length = 16\n[model.options]\n{options}")
    _, params, _ = nanochat.build(**OPTIONS, seed=3)
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf, np.float32) + 0.01
        for path, leaf in leaves
    }
    info = CheckpointInfo(
        round=4,
        config_hash="",
        model="",
        model_digest="",
        param_specs=tuple(TensorSpec(name, "f32", array.shape) for name, array in arrays.items()),
        data_key="",
        controller=msgspec.Raw(b"{}"),
        random_state={},
    )
    write_checkpoint(tmp_path / "checkpoints", Checkpoint(info, arrays, arrays), keep=1)
    return tmp_path


def test_the_parameters_of_the_checkpoint_are_what_the_model_gets(run_folder: Path) -> None:
    model = load_trained(run_folder)
    _, params, _ = nanochat.build(**OPTIONS, seed=3)
    wanted = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32) + 0.01, params)
    assert jax.tree.structure(model.params) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, model.params, wanted)
    assert (model.round, model.window) == (4, 16)
    tokens = jnp.zeros((1, 16), jnp.int32)
    compiled = jax.jit(lambda params, tokens: nanochat.apply(params, tokens, n_head=2))  # as `logits` is: equal bits
    np.testing.assert_array_equal(model.logits(model.params, np.asarray(tokens)), compiled(wanted, tokens))


def test_the_command_prints_prompt_and_continuation_the_same_each_time(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for _ in range(2):
        assert main(["generate", str(run_folder), "--prompt", "def ", "--tokens", "20"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")
    assert len(texts[0]) > len("def \n")


def test_a_count_that_rounds_averaged_is_rounded() -> None:
    template = {"count": np.array(2, np.int32), "seen": np.array(True)}
    values = {"count": np.array(6.9999995, np.float32), "seen": np.array(0.25, np.float32)}
    filled = fill_tree(template, values, "model")
    assert (int(filled["count"]), bool(filled["seen"]), filled["count"].dtype) == (7, False, np.int32)


def test_a_checkpoint_of_other_code_is_refused() -> None:
    template = {"a": np.zeros(2, np.float32), "rope": np.ones(3, np.float32)}
    kept = fill_tree(template, {"a": np.ones(2, np.float32)}, "m:build")
    np.testing.assert_array_equal(kept["a"], [1, 1])
    np.testing.assert_array_equal(kept["rope"], [1, 1, 1])
    with pytest.raises(UserError, match=r"'b' that m:build no longer has"):
        fill_tree(template, {"b": np.ones(2, np.float32)}, "m:build")
    with pytest.raises(UserError, match=r"shape \[3\], m:build makes it \[2\]"):
        fill_tree(template, {"a": np.ones(3, np.float32)}, "m:build")


def test_a_folder_without_a_run_or_checkpoint_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "is not a run folder" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "config.toml").write_text("")
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "there is no checkpoint" in " ".join(capsys.readouterr().err.split())
