"""A model and a tokenizer that do not belong together, and losses without a gradient: found before any training."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from chat_support import PLAIN, said, tokenizer_folder

from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import NumericsError, UserError
from planetary.runs.rounds.preparation import model_checks
from planetary.runs.rounds.preparation.preparation import prepare_run

SHAPE = ["train.batch_size=2", "train.sequence_length=8", "train.inner_steps=2", "train.rounds=2", "eval.batches=1"]

MODELS = """
import jax, jax.numpy as jnp

def build(vocab=8, kind="gather", batch_size=2, sequence_length=8):
    key = jax.random.key(0)
    params = {"table": jax.random.normal(key, (vocab, 4)), "head": jnp.zeros((4, vocab))}
    def loss(params, tokens, targets):
        if kind == "gather":
            x = params["table"].at[tokens].get(mode="clip")
        elif kind == "fill":
            x = params["table"].at[tokens].get(mode="fill")
        elif kind == "small-targets":
            x = params["table"].at[tokens % vocab].get(mode="clip")
        elif kind == "hidden":
            x = params["table"].at[tokens.astype(jnp.float32).astype(jnp.int32)].get(mode="clip")
        else:
            x = jax.nn.one_hot(tokens, vocab) @ params["table"]
        logits = x @ params["head"]
        log_p = jax.nn.log_softmax(logits)
        if kind == "hidden":
            picked = log_p[..., 0] * (targets + 1)
        elif kind in ("gather", "small-targets"):
            picked = jnp.take_along_axis(log_p, targets[..., None], -1, mode="clip")
        else:
            picked = (log_p * jax.nn.one_hot(targets, vocab)).sum(-1)
        if kind == "flat":
            return jnp.sum(params["table"]) * 0 + 1.0
        if kind == "undefined":
            return jnp.log(jnp.sum(params["head"]) - 1) - picked.mean()
        if kind == "steep":
            return jnp.sqrt(jnp.sum(params["head"])) - picked.mean()
        if kind == "counted":
            return -(picked * (targets >= 0)).sum() / (targets >= 0).sum() + 0.1
        return -picked.mean()
    tokens = jnp.zeros((batch_size, sequence_length), jnp.int32)
    return loss, params, (tokens, tokens)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "text.txt").write_text("abcdefgh" * 100)
    return tmp_path


def configured(here: Path, kind: str, vocab: int, *overrides: str) -> Config:
    model = [f"model.source={here / 'models.py'}:build", f"model.options.kind={kind}", f"model.options.vocab={vocab}"]
    data = [f"data.source={here / 'text.txt'}", "data.tokenizer=char"]
    return apply_overrides(Config(), [*SHAPE, *model, *data, *overrides])


def prepare(here: Path, config: Config) -> list[str]:
    stages: list[str] = []
    prepare_run(config, here / "cache", stages.append)
    return stages


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gather", "fill", "one-hot"])
def test_a_model_of_the_tokenizers_size_passes(here: Path, kind: str) -> None:
    """Also one whose head starts at zero, so that its loss is the same for every token before it is perturbed."""
    prepare(here, configured(here, kind, 8))


@pytest.mark.parametrize(
    ("vocab", "kind"),
    [
        *((3, "gather"), (7, "gather"), (3, "fill"), (7, "one-hot"), (7, "small-targets"), (3, "hidden")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((7, "fill"), (3, "one-hot"), (3, "small-targets"))),
    ],
)
def test_tokenizer_larger_than_the_model_is_refused(here: Path, kind: str, vocab: int) -> None:
    """By the use of the tokens in the graph, or, where they go through floats on the way, by the loss."""
    with pytest.raises(UserError) as caught:
        prepare(here, configured(here, kind, vocab))
    text = str(caught.value)
    how = "its loss shows (argument tokens)" if kind == "hidden" else "the use of its argument t"
    assert f"has {vocab} tokens, as {how}" in text
    assert "the tokenizer 'char' has 8" in text
    assert f"ids from {vocab} on" in text


@pytest.mark.slow
def test_a_tokenizer_of_many_more_ids_is_refused(here: Path) -> None:
    with pytest.raises(UserError, match=r"has 5 tokens, as the use of .* 'byte' has 256: .* at least 256"):
        prepare(here, configured(here, "gather", 5, "data.tokenizer=byte"))


@pytest.mark.slow
def test_a_model_of_torch_mlir_shows_its_vocabulary(here: Path) -> None:
    (here / "text.txt").write_text("".join(chr(300 + n % 257) for n in range(9000)))
    model = Path(__file__).parents[4] / "examples" / "pcp" / "model.mlir"
    overrides = [f"model.source={model}", "train.batch_size=8", "train.sequence_length=64"]
    with pytest.raises(
        UserError, match=r"model\.mlir has 256 tokens, as the use of its argument arg14 .* 'char' has 257"
    ):
        prepare(here, configured(here, "gather", 8, *overrides))


@pytest.mark.slow
def test_half_precision_still_tells_tokens_apart(here: Path) -> None:
    prepare(here, configured(here, "gather", 8, "train.precision=bf16"))


def test_a_loss_without_a_gradient_is_an_error(here: Path) -> None:
    with pytest.raises(NumericsError, match=r"the loss is 1, but its gradient is zero for every parameter"):
        prepare(here, configured(here, "flat", 8))


def test_a_loss_that_is_not_finite_is_an_error(here: Path) -> None:
    with pytest.raises(NumericsError, match=r"before anything is trained: expected a finite loss, found nan"):
        prepare(here, configured(here, "undefined", 8))


def test_a_gradient_that_is_not_finite_is_an_error(here: Path) -> None:
    with pytest.raises(NumericsError, match=r"but the gradient's norm is (inf|nan): expected a finite number"):
        prepare(here, configured(here, "steep", 8))


def test_the_comparison_with_the_author_tries_the_first_batch(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss and gradient are those that the training step has."""
    judged: list[tuple[float, float]] = []
    monkeypatch.setattr(model_checks, "_judge", lambda source, loss, norm, scaled: judged.append((loss, norm)))
    config = configured(here, "gather", 8)
    prepare(here, config)
    shutil.rmtree(here / "cache" / "checks")
    prepare(here, config)  # the step is known, and was compared
    assert judged[0] == pytest.approx(judged[1], rel=1e-5)
    assert judged[0][0] == pytest.approx(math.log(8))  # the head starts at zero


@pytest.mark.slow
def test_what_passed_is_not_tried_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(here, "gather", 8)
    tried = "trying the model on the first batch"
    assert tried in prepare(here, config)
    assert tried not in prepare(here, config)
    assert tried in prepare(here, apply_overrides(config, ["run.seed=1"]))
    monkeypatch.setattr(model_checks, "LARGEST_COST", 1)
    assert tried not in prepare(here, apply_overrides(config, ["run.seed=2"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["counted", "gather", "fill", "one-hot"])
def test_loss_that_counts_what_is_no_target_is_refused(here: Path, kind: str) -> None:
    """A clamped row, a row of NaN, or a zero in the mean: none is a mean over the targets of chats."""
    chats = here / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": said(f"{n} + 1?", f"{n + 1}")}) + "\n" for n in range(40)))
    tokenizer = tokenizer_folder(here / "model", PLAIN["chatml"])
    config = configured(here, kind, 400, f"data.source={chats}", f"data.tokenizer={tokenizer}")
    if kind == "counted":
        prepare_run(config, here / "cache", lambda _: None)
        return
    with pytest.raises(UserError, match=r"tokens that are no targets .* and the loss of the model .* counts them"):
        prepare_run(config, here / "cache", lambda _: None)
