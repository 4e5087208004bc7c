"""Pairs of answers: what is stored of them, the first model's log-probabilities, and DPO's loss and gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from chat_support import MARKED, PLAIN, said, tokenizer_folder

from planetary.compiler.autodiff.differentiate import value_and_gradients
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import Model
from planetary.core.config import config_from_tables
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.data.chat.records import pair_of
from planetary.data.prepare import prepare
from planetary.data.prepared_data import PreparedData
from planetary.data.tokenizer import load_tokenizer
from planetary.models.zoo import ZOO
from planetary.runs.rounds.preparation import preference
from planetary.runs.rounds.preparation.preparation import prepare_run
from planetary.runs.rounds.preparation.run_model import model_of

LLAMA = {"n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32, "n_hidden": 64, "vocab_size": 400}
LENGTH = 40
TRAIN = {"batch_size": 2, "sequence_length": LENGTH, "rounds": 1, "inner_steps": 2}
PAIRS = [
    {"prompt": f"{n} + {n}?", "chosen": f"It is {2 * n}.", "rejected": "No idea" + "!" * (n % 3)} for n in range(40)
]


def config_of(
    folder: Path, pairs: list[dict[str, Any]] = PAIRS, *, template: str = MARKED["chatml"], **sections: Any
) -> Config:
    tokenizer = tokenizer_folder(folder / "model", template)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {"source": str(folder / "pairs.jsonl"), "format": "preference", "tokenizer": str(tokenizer)}
    tables = {
        "model": {"source": ZOO["llama"].source, "options": LLAMA},
        "data": {**data, "held_out_fraction": 0.2, **sections.pop("data", {})},
        "train": TRAIN,
        "fabric": {"workers": 1},
    }
    return config_from_tables({**tables, **sections})


def log_probabilities(params: Any, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return those of the answers with plain JAX, [n, 2]."""
    from planetary.models import llama

    rows = jax.nn.log_softmax(llama.logits(params, jnp.asarray(tokens.reshape(-1, LENGTH), jnp.int32), **LLAMA))
    wanted = targets.reshape(-1, LENGTH).astype(np.int32)
    chosen = jnp.take_along_axis(rows, jnp.maximum(wanted, 0)[..., None], -1)[..., 0]
    return np.asarray(jnp.where(wanted >= 0, chosen, 0.0).sum(-1)).reshape(-1, 2)


def columns_of(data: PreparedData) -> dict[str, np.ndarray]:
    assert data.layout is not None
    raw = np.concatenate([np.fromfile(file.url, np.uint8) for file in (data.train, data.held_out)])
    return {column.name: data.layout.column(raw, column.name) for column in data.layout.columns}


def nested(values: dict[str, Any], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: values[jax.tree_util.keystr(path, simple=True, separator=".")], tree
    )


def test_pairs_are_stored_with_their_answers_as_targets(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    data, tokenizer = prepare(config, tmp_path / "cache"), load_tokenizer(config.data.tokenizer)
    assert (data.train.count + data.held_out.count, data.elements, data.is_marked) == (40, "examples", False)
    columns = columns_of(data)
    seen = set()
    for tokens, targets in zip(columns["tokens"], columns["targets"], strict=True):
        texts = [tokenizer.decode(row[row >= 0].tolist()).decode() for row in targets]
        prompt = tokenizer.decode(tokens[0][targets[0] < 0].tolist()).decode()
        asked = prompt.split("user\n")[1].split("<|im_end|>")[0]
        seen.add((asked, *(text.removesuffix("<|im_end|>") for text in texts)))
        assert all(text.endswith("<|im_end|>") for text in texts)
    assert seen == {(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in PAIRS}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{}, {"rank": 2}, {"rank": 2, "base": "int8"}])
def test_reference_is_of_the_first_model_and_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: dict[str, Any]
) -> None:
    config = config_of(tmp_path, adapter=adapter)
    made = prepare_run(config, tmp_path / "cache", lambda _: None)
    columns, model = columns_of(made.data), model_of(config)
    values = model.base if adapter else model.start
    params = nested(values, template())
    expected = log_probabilities(params, columns["tokens"], columns["targets"])
    np.testing.assert_allclose(columns["reference"], expected, rtol=1e-5, atol=1e-4)
    assert (columns["reference"] < 0).all()

    def never(*_: Any) -> Any:
        raise AssertionError("computed again")

    monkeypatch.setattr(preference, "_scorer", never)
    again = prepare_run(config, tmp_path / "cache", lambda _: None)
    assert (again.data.key, again.data.train.digest) == (made.data.key, made.data.train.digest)
    assert made.data.key != prepare(config, tmp_path / "cache" / "data").key


def template() -> Any:
    """Return the parameters of the model as its function gives them."""
    from planetary.models import llama

    return llama.build(**LLAMA)[1]


def sizes() -> Any:
    """Return the configuration of the model in transformers."""
    import transformers

    made: Any = transformers.LlamaConfig
    return made(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=False,
    )  # fmt: skip


def loss_and_gradients(model: Model, params: dict[str, np.ndarray], batch: list[np.ndarray]) -> list[np.ndarray]:
    positions = [i for i, a in enumerate(model.manifest.arguments) if a.role == "param"]
    text = value_and_gradients(model.stablehlo, positions, 0)
    return run_reference(text, "main", [*params.values(), *batch], ["f32"] * (1 + len(params)))


@pytest.mark.doors("torch", "transformers")
def test_loss_and_gradient_equal_pytorch(tmp_path: Path) -> None:
    """Equation 7 of the paper in PyTorch, over the log-probabilities of two models of transformers."""
    import torch
    from transformers import LlamaForCausalLM

    config = config_of(tmp_path, data={"dpo_beta": 0.3})
    model, columns = model_of(config), columns_of(prepare(config, tmp_path / "cache"))
    first, policy = LlamaForCausalLM(sizes()).eval(), LlamaForCausalLM(sizes()).eval()
    rng, start = np.random.default_rng(0), model.start
    moved = {name: value + rng.normal(0, 0.02, value.shape).astype(np.float32) for name, value in start.items()}
    for net, values in ((first, start), (policy, moved)):
        net.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in values.items()})
    tokens, targets = (torch.from_numpy(columns[name][:2].astype(np.int64)) for name in ("tokens", "targets"))

    def score(net: Any) -> Any:
        rows = torch.log_softmax(net(tokens.reshape(-1, LENGTH)).logits, -1).reshape(2, 2, LENGTH, -1)
        chosen = rows.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return (chosen * (targets >= 0)).sum(-1)

    with torch.no_grad():
        reference = score(first)
    ratio = score(policy) - reference
    expected = -torch.nn.functional.logsigmoid(0.3 * (ratio[:, 0] - ratio[:, 1])).mean()
    expected.backward()
    batch = [columns["tokens"][:2].astype(np.int32), columns["targets"][:2].astype(np.int32), reference.numpy()]
    loss, *slopes = loss_and_gradients(model, moved, batch)
    assert abs(float(loss) - float(expected.detach())) < 1e-5
    named: dict[str, Any] = dict(policy.named_parameters())
    for name, slope in zip(moved, slopes, strict=True):
        wanted = named[name].grad.numpy()
        np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max(), err_msg=name)


MESSAGES = said("Hi", "Hello")


@pytest.mark.parametrize(
    ("record", "prompt", "answers"),
    [
        ({"prompt": "a?", "chosen": "b", "rejected": "c"}, "a?", ["b", "c"]),
        ({"prompt": said("a?"), "chosen": [MESSAGES[1]], "rejected": "c"}, "a?", ["Hello", "c"]),
        ({"chosen": MESSAGES, "rejected": said("Hi", "Go away")}, "Hi", ["Hello", "Go away"]),
    ],
)
def test_pairs_of_known_forms_are_read(record: dict[str, Any], prompt: str, answers: list[str]) -> None:
    pair = pair_of(record, "x")
    assert [chat.messages[0]["content"] for chat in pair] == [prompt] * 2
    assert [chat.messages[-1]["content"] for chat in pair] == answers
    assert [chat.turns for chat in pair] == [(1,), (1,)]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"line 1 has no 'rejected': a pair is prompt, chosen and rejected; it has "),
        ([], "expected an object with prompt, chosen and rejected, found list"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same, so neither is preferred"),
        ({"chosen": "b", "rejected": "c"}, "without a 'prompt': expected messages under 'chosen', found str"),
        (
            {"prompt": [{"role": "boss", "content": "a"}], "chosen": "b", "rejected": "c"},
            "chosen.* has the role 'boss'",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": said("Hi", "no", "why")},
            "'rejected' ends with a message of the u",
        ),
        ({"chosen": said("Hi", "a", "b", "c"), "rejected": said("Hi", "a")}, "rejected: expected messages"),
        ({"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}, "nothing here is trained"),
    ],
)
def test_malformed_pairs_are_refused(record: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pair_of(record, "line 1")


TOOL = {"role": "tool", "content": "42"}
TURNS: list[dict[str, Any]] = [
    {"chosen": said("a?", "b", "c?", "d", "e", "f"), "rejected": said("a?", "b", "c?", "no", "e", "no")},
    {"prompt": said("a?", "b", "c?"), "chosen": said("c?", "d", "e", "f")[1:], "rejected": "no"},
    {"prompt": "a?", "chosen": [*said("", "look")[1:], TOOL, *said("", "42")[1:]], "rejected": said("", "no")[1:]},
]
"""Each has a prompt, and 2 turns or 1 of the assistant in either answer."""


def test_answer_of_several_turns_trains_each_of_them() -> None:
    assert [[chat.turns for chat in pair_of(record, "x")] for record in TURNS] == [
        [(3, 5), (3, 5)],
        [(3, 5), (3,)],
        [(1, 3), (1,)],
    ]


@pytest.mark.doors("torch", "transformers")
@pytest.mark.parametrize("template", [MARKED["chatml"], PLAIN["chatml"]])
def test_several_turns_have_the_log_probability_of_pytorch(tmp_path: Path, template: str) -> None:
    """Tokens and the assistant's mask are transformers', the log-probabilities those of its Llama."""
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    config = config_of(tmp_path, TURNS * 5, template=template, train={**TRAIN, "sequence_length": 80})
    columns, start = columns_of(prepare_run(config, tmp_path / "cache", lambda _: None).data), model_of(config).start
    net = LlamaForCausalLM(sizes()).eval()
    net.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in start.items()})
    theirs: Any = PreTrainedTokenizerFast(tokenizer_file=config.data.tokenizer, bos_token="<s>", eos_token="</s>")
    prompts = [said("a?", "b", "c?"), said("a?", "b", "c?"), said("a?")]
    expected = []
    for record, prompt in zip(TURNS, prompts, strict=True):
        asked = theirs.apply_chat_template(prompt, chat_template=template, add_generation_prompt=True, return_dict=True)
        for name in ("chosen", "rejected"):
            side = said("", record[name])[1:] if isinstance(record[name], str) else record[name]
            chat = [*prompt, *side] if "prompt" in record else side
            known = theirs.apply_chat_template(
                chat, chat_template=MARKED["chatml"], return_dict=True, return_assistant_tokens_mask=True
            )
            ids, counted = (torch.tensor(known[key]) for key in ("input_ids", "assistant_masks"))
            counted[: len(asked["input_ids"])] = 0
            with torch.no_grad():
                rows = torch.log_softmax(net(ids[None, :-1]).logits[0], -1).gather(-1, ids[1:, None])[:, 0]
            expected.append(float((rows * counted[1:]).sum()))
    found = columns["reference"]
    assert len(found) == 15
    for pair in np.reshape(expected, (3, 2)):
        assert np.isclose(found, pair, rtol=1e-5, atol=1e-4).all(-1).sum() == 5


def test_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    """A text per turn would be taken for the other answer."""
    rewrites = PLAIN["chatml"].replace("m.content", "(m.content if loop.last else m.content | upper)", 1)
    with pytest.raises(UserError, match=r"pairs\.jsonl, line 1: the chat template changes earlier turns .* each turn"):
        prepare(config_of(tmp_path, TURNS, template=rewrites), tmp_path / "cache")


def test_long_pairs_are_left_out_and_only_long_ones_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = {"prompt": "a", "chosen": "b" * 99, "rejected": "c"}
    data = prepare(config_of(tmp_path, [*PAIRS, long]), tmp_path / "cache")
    assert data.train.count + data.held_out.count == 40
    assert "1 of 41 pairs are longer than train.sequence_length = 40, and are left out" in caplog.text
    with pytest.raises(UserError, match=r"every pair of .* is longer than train\.sequence_length = 40"):
        prepare(config_of(tmp_path, [long]), tmp_path / "cache")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"packing": True}, r"data\.packing: a pair of answers is an example by itself"),
        ({"format": "chat", "dpo_beta": 0.2}, r"data\.dpo_beta is for pairs of answers"),
    ],
)
def test_keys_that_pairs_do_not_go_with_are_refused(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(tmp_path, data=data)


def test_model_without_logits_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    graph = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, source="model.mlir"))
    with pytest.raises(UserError, match=r'data\.format = "preference" compares .* model\.mlir is a graph of a loss'):
        model_of(graph)
