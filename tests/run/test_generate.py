from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_run import write_run

from planetary.cli.main import main
from planetary.core.errors import NumericsError, UserError
from planetary.core.tensors import TensorSpec
from planetary.data.tokenizer import ByteTokenizer
from planetary.models import nanochat
from planetary.models.initial import flat_names
from planetary.run.model.served import load_trained
from planetary.run.model.text_continuation import TextContinuation
from planetary.run.model.trained_model import fill_tree
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.http.text_assembly import TextAssembly
from planetary.runs.serve.loaded_model import LoadedModel
from planetary.runs.serve.local_sequences import LocalSequences
from planetary.runs.serve.program.traced_model import TracedModel
from planetary.runs.serve.scheduling.sampling import SamplingOptions, choice_seed
from planetary.runs.serve.scheduling.sequences import SequenceRequest, Token
from planetary.runtime.device_program import open_on_xla
from saved_parameters import save_parameters

OPTIONS = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "sequence_length": 16}
VOCABULARY = 50


def successor(params: jax.Array, tokens: jax.Array, context: Any) -> jax.Array:
    """Logits of a made-up model: after token t comes t + 1, or t + 2 with fewer chances."""
    first = jax.nn.one_hot((tokens + 1) % VOCABULARY, VOCABULARY)
    second = jax.nn.one_hot((tokens + 2) % VOCABULARY, VOCABULARY)
    return context.wanted(params[0] * (8.0 * first + 7.0 * second))


def made_up(size: float = 1.0, decode: Callable[..., jax.Array] = successor) -> TextContinuation:
    spec = TensorSpec("size", "f32", (1,))
    return TextContinuation(
        TracedModel(
            name="made-up",
            decode=decode,
            params=np.full(1, size, np.float32),
            specs=(spec,),
            sizes=None,
            vocabulary=VOCABULARY,
            window=16,
            tokenizer=ByteTokenizer(),
        )
    )


@pytest.fixture(scope="module")
def model() -> TextContinuation:
    return made_up()


def draw(model: TextContinuation, count: int, prompt: list[int], **options: Any) -> list[int]:
    return [token.token for token in model.tokens(prompt, SamplingOptions(**options), count)]


def test_likeliest_token_is_taken_beyond_the_window(model: TextContinuation) -> None:
    assert draw(model, 20, [7], temperature=0) == list(range(8, 28))
    assert draw(model, 3, list(range(20)), temperature=0) == [20, 21, 22]


def test_equal_seeds_draw_equal_tokens_and_others_do_not(model: TextContinuation) -> None:
    assert draw(model, 30, [0], seed=1) == draw(model, 30, [0], seed=1)
    assert draw(model, 30, [0], seed=1) != draw(model, 30, [0], seed=2)


def test_noise_does_not_repeat_where_the_context_is_full(model: TextContinuation) -> None:
    steps = np.diff(draw(model, 80, list(range(20)), temperature=2.0)) % VOCABULARY
    assert len(set(steps.tolist())) > 1


def test_top_k_limits_the_tokens_that_are_drawn(model: TextContinuation) -> None:
    hot = {"temperature": 2.0}
    assert set(np.diff([0, *draw(model, 40, [0], **hot, top_k=2)]) % VOCABULARY) == {1, 2}
    assert draw(model, 10, [0], **hot, top_k=1) == list(range(1, 11))
    assert set(np.diff([0, *draw(model, 40, [0], **hot)]) % VOCABULARY) - {1, 2}  # without the limit others come


def test_a_text_left_early_is_no_part_of_the_next_one(model: TextContinuation) -> None:
    options = SamplingOptions(temperature=0.0)
    assert [token.token for token in itertools.islice(model.tokens([3], options, 9), 2)] == [4, 5]
    assert draw(model, 2, [7], temperature=0) == [8, 9]


def test_impossible_requests_are_refused(model: TextContinuation) -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        model.continue_text("", SamplingOptions(), 1)
    with pytest.raises(UserError, match="1 or more, found 0"):
        model.continue_text("a", SamplingOptions(), 0)
    with pytest.raises(UserError, match="temperature"):
        SamplingOptions(temperature=-1.0)
    with pytest.raises(UserError, match="top_k"):
        SamplingOptions(top_k=-1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(temperature: float) -> None:
    with pytest.raises(NumericsError, match="not finite"):
        draw(made_up(np.nan), 1, [1], temperature=temperature)


def test_a_tokenizer_that_marks_a_cut_character_is_waited_for() -> None:
    class Marking(ByteTokenizer):
        def decode(self, ids) -> bytes:  # type: ignore[no-untyped-def]
            return bytes(ids).decode("utf-8", "replace").encode()

    assembly = TextAssembly(Marking())
    assert [assembly.add([Token(byte, -1.0)]).text for byte in "aé".encode()] == ["a", "", "é"]


def test_the_space_before_the_first_word_is_kept() -> None:
    class Stripping(ByteTokenizer):
        def decode(self, ids) -> bytes:  # type: ignore[no-untyped-def]
            return bytes(ids).removeprefix(b" ")

    assembly = TextAssembly(Stripping(), before=b"the")
    assert assembly.add([Token(byte, -1.0) for byte in b" mill"]).text + assembly.end().text == " mill"


# --- beside a server ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_generate_gives_the_text_of_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server's worker computes several choices at a time; the command computes one text after another."""
    write_run(tmp_path / "run", 1, seed=1, options={**OPTIONS, "sequence_length": 256})
    model = load_trained(tmp_path / "run")
    shape = model.shape(ServeConfig(batch=4))
    server = LocalSequences(
        LoadedModel(open_on_xla(model.program(shape)), shape, model.arrays()), shape, model.vocabulary
    )
    prompt, greedy = "def f(x):", {0: 0.0}
    for number in range(4):
        options = SamplingOptions(temperature=greedy.get(number, 0.8), seed=choice_seed(5, number))
        server.submit(SequenceRequest(number=number, prompt=tuple(prompt.encode()), most=40, options=options))
    served: dict[int, list[int]] = {number: [] for number in range(4)}
    for given in server.tokens():
        served[given.sequence] += [token.token for token in given.tokens]
    assert all(len(tokens) == 40 for tokens in served.values())
    command = ["generate", str(tmp_path / "run"), "--prompt", prompt, "--tokens", "40"]
    for number, tokens in served.items():
        temperature = str(greedy.get(number, 0.8))
        assert main([*command, "--temperature", temperature, "--seed", str(choice_seed(5, number))]) == 0
        assert capsys.readouterr().out == prompt + bytes(tokens).decode(errors="replace") + "\n"


# --- from a run folder
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    options = "".join(f"{key} = {value}\n" for key, value in OPTIONS.items())
    (tmp_path / "config.toml").write_text(f"[train]\nsequence_length = 16\n[model.options]\n{options}")
    _, params, _ = nanochat.build(**OPTIONS, seed=3)
    moved = {name: np.asarray(leaf, np.float32) + 0.01 for name, leaf in flat_names(params).items()}
    save_parameters(tmp_path, moved, 4)
    return tmp_path


@pytest.mark.slow
def test_checkpoint_parameters_reach_the_model(run_folder: Path) -> None:
    model = load_trained(run_folder)
    _, params, _ = nanochat.build(**OPTIONS, seed=3)
    wanted = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32) + 0.01, params)
    assert jax.tree.structure(model.params) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, model.params, wanted)
    assert (model.version, model.window) == (4, 16)
    tokens = jnp.zeros((1, 16), jnp.int32)
    expected = nanochat.apply(wanted, tokens, n_head=2)
    np.testing.assert_allclose(model.logits(model.params, tokens), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_command_prints_the_same_continuation_each_time(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
