"""Each family of published models: scores, greedy texts and adapters are those of `transformers` and `peft`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from test_adapters import run_of as tuned_run
from test_adapters import tuned
from test_pretrained_models import BATCH, from_folder, loaded_whole, run_of

from installed_example import install_example
from planetary.core.config import config_from_tables
from planetary.core.configuration.family import families, family_of
from planetary.core.errors import UserError
from planetary.data.tokenizer import ByteTokenizer
from planetary.models.llama import LlamaConfig
from planetary.models.moe import MoeModelConfig
from planetary.run.model.adapter_export import export_adapter
from planetary.run.model.gguf_export import export_gguf
from planetary.run.model.pretrained_export import export_pretrained
from planetary.run.model.pretrained_files import keep_files
from planetary.run.model.served import load_folder, load_trained
from planetary.run.model.trained_model import fill_tree
from planetary.runs.rounds.preparation.run_model import model_of
from planetary.runs.serve.program.cache_kinds import PAGE
from planetary.runs.serve.program.call_context import GatheredContext, PagedContext, gather

SIZES = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64},
}
HEAD_OF_4 = {"head_dim": 4, "query_pre_attn_scalar": 9, "sliding_window": 5}
WIDE = {**SIZES, "hidden_size": 32}  # a quarter of a head's channels is a pair
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 5, "head_dim": 6}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 6}),
    "gemma2": ("Gemma2", {**SIZES, **HEAD_OF_4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**SIZES, **HEAD_OF_4, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3", {**SIZES, "sliding_window": 7, "pad_token_id": 0}),
    "phi3, longrope": (
        "Phi3",
        {
            **{**SIZES, "pad_token_id": 0, "max_position_embeddings": 256, "original_max_position_embeddings": 64},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
                **{"short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]},
            },
        },
    ),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in WIDE.items() if k != "num_key_value_heads"}),
    "gpt_neox, in turn": (
        "GPTNeoX",
        {**SIZES, "use_parallel_residual": False, "rotary_pct": 0.5, "hidden_act": "gelu_new"},
    ),
    "opt": (
        "OPT",
        {
            **{"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256},
            **{"max_position_embeddings": 64, "word_embed_proj_dim": 16},
        },
    ),
    "olmo2": ("Olmo2", {**SIZES, "pad_token_id": 0}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 6},
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 12)).astype(np.int32)
needs_transformers = pytest.mark.doors("torch", "transformers")


def published(folder: Path, kind: str, dtype: str = "float32") -> Any:
    """Write a folder with a random model of transformers, and return that model."""
    import torch
    import transformers

    name, options = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options, eos_token_id=None, bos_token_id=None)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.25)
    theirs = theirs.to(getattr(torch, dtype))
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    return theirs.float().eval()


def scores(theirs: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs(torch.from_numpy(tokens).long()).logits.numpy()


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """A folder of transformers has the same scores here, and what a run from it exports has them there."""
    theirs = published(tmp_path / "theirs", kind)
    expected = scores(theirs, TOKENS)
    served = load_folder(tmp_path / "theirs")
    np.testing.assert_allclose(np.asarray(served.logits(served.params, TOKENS)), expected, rtol=1e-4, atol=2e-5)
    config, model = from_folder(tmp_path / "theirs")
    params = model.initial("param")
    run, drawn = run_of(tmp_path / "run", config)
    own = load_trained(run)
    filled = fill_tree(own.params, params, config.model.source, whole=True)
    np.testing.assert_allclose(np.asarray(own.logits(filled, TOKENS)), expected, rtol=1e-4, atol=2e-5)
    assert drawn.keys() == params.keys()
    export_pretrained(run, tmp_path / "ours")
    back = loaded_whole(tmp_path / "ours", attn_implementation="eager")
    assert type(back) is type(theirs)
    np.testing.assert_allclose(np.asarray(own.logits(own.params, TOKENS)), scores(back, TOKENS), rtol=1e-4, atol=2e-5)


@needs_transformers
def test_long_texts_have_divisors_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text above the original length, which transformers turns by the long divisors."""
    name, options = KINDS["phi3, longrope"]
    rope = {**options["rope_parameters"], "original_max_position_embeddings": 8}
    kind = (name, {**options, "original_max_position_embeddings": 8, "rope_parameters": rope})
    monkeypatch.setitem(KINDS, "short", kind)
    theirs = published(tmp_path / "theirs", "short")
    assert load_folder(tmp_path / "theirs").window == 8
    config, model = from_folder(tmp_path / "theirs", sequence_length=12)
    run, _ = run_of(tmp_path / "run", config)
    own = load_trained(run)
    params = fill_tree(own.params, model.initial("param"), config.model.source, whole=True)
    found = np.asarray(own.logits(params, TOKENS))
    np.testing.assert_allclose(found, scores(theirs, TOKENS), rtol=1e-4, atol=2e-5)


@needs_transformers
def test_a_family_of_a_package_has_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's example, with a folder of transformers and one that a run exports."""
    install_example("my_family.py", "planetary.families: seed_oss = my_family:SeedOss", tmp_path, monkeypatch)
    monkeypatch.setitem(KINDS, "seed_oss", ("SeedOss", {**SIZES, "num_key_value_heads": 2, "head_dim": 6}))
    expected = scores(published(tmp_path / "theirs", "seed_oss"), TOKENS)
    served = load_folder(tmp_path / "theirs")
    np.testing.assert_allclose(np.asarray(served.logits(served.params, TOKENS)), expected, rtol=1e-4, atol=2e-5)
    config, _ = from_folder(tmp_path / "theirs")
    run, _ = run_of(tmp_path / "run", config)
    keep_files(config, run)
    own = load_trained(run)
    export_pretrained(run, tmp_path / "ours")
    back = loaded_whole(tmp_path / "ours", attn_implementation="eager")
    assert type(back).__name__ == "SeedOssForCausalLM"
    np.testing.assert_allclose(np.asarray(own.logits(own.params, TOKENS)), scores(back, TOKENS), rtol=1e-4, atol=2e-5)


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_a_folder_is_of_its_family(tmp_path: Path, kind: str) -> None:
    """Exported from the options alone, without the folder's `config.json`."""
    published(tmp_path / "theirs", kind)
    config, _ = from_folder(tmp_path / "theirs")
    data = msgspec.structs.replace(config.data, tokenizer="byte")
    model = msgspec.structs.replace(config.model, weights="", weights_optional=())
    run, _ = run_of(tmp_path / "run", msgspec.structs.replace(config, model=model, data=data))
    made = export_pretrained(run, tmp_path / "ours")
    own = load_trained(run)
    back = loaded_whole(tmp_path / "ours", attn_implementation="eager")
    np.testing.assert_allclose(np.asarray(own.logits(own.params, TOKENS)), scores(back, TOKENS), rtol=1e-4, atol=2e-5)
    assert made.architecture == type(back).__name__


def greedy(served: Any, prompt: np.ndarray, count: int) -> list[int]:
    """Continue a text by `count` tokens from a cache in pages: tokens in turn with and without a copy of it."""
    sizes, whole = served.sizes, 4
    pages = jnp.arange(1, whole + 1)[None]
    cache = jnp.zeros((whole + 1, 2 * sizes.layers, sizes.heads, PAGE, sizes.width))

    def call(kind: Any, tokens: Any, start: int, length: int, *more: Any) -> tuple[int, Any]:
        context = kind(tokens, jnp.array([start]), jnp.array([length]), pages, cache, *more)
        found = served.decode(served.params, tokens, context)
        return int(jnp.argmax(found[0, -1])), context.written()

    text = prompt.tolist()
    padded = jnp.zeros((1, -(-len(text) // PAGE) * PAGE), jnp.int32).at[0, : len(text)].set(prompt)
    token, cache = call(PagedContext, padded, 0, len(text))
    for place in range(len(text), len(text) + count - 1):
        text.append(token)
        copied = place % 2 == 0
        kind, more = (GatheredContext, gather(pages, cache)) if copied else (PagedContext, ())
        token, cache = call(kind, jnp.array([[token]], jnp.int32), place, 1, *more)
    return [*text, token]


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_from_pages_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """The prompt is longer than the window, and the text goes on over a page's end."""
    import torch

    theirs = published(tmp_path / "theirs", kind)
    served = load_folder(tmp_path / "theirs")
    prompt = np.random.default_rng(1).integers(0, 256, 20).astype(np.int32)
    with torch.no_grad():
        expected = theirs.generate(
            torch.from_numpy(prompt).long()[None], max_new_tokens=20, do_sample=False, pad_token_id=0
        )
    assert greedy(served, prompt, 20) == expected[0].tolist()


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_longer_texts_than_the_positions_are_refused(tmp_path: Path, kind: str) -> None:
    published(tmp_path / "theirs", kind)
    longest = KINDS[kind][1]["max_position_embeddings"]
    with pytest.raises(UserError, match=rf"n_position={longest} positions.* sequence_length={longest + 1}"):
        from_folder(tmp_path / "theirs", sequence_length=longest + 1)


@pytest.mark.slow
@pytest.mark.doors("torch", "transformers", "peft")
@pytest.mark.parametrize("kind", ["gemma2", "phi3", "gpt_neox", "opt", "olmo2", "mixtral"])
def test_adapters_have_the_same_scores_in_peft(tmp_path: Path, kind: str) -> None:
    """Out to peft and back. A mixture's experts and router are no linear layers there."""
    from peft import PeftModel

    theirs = published(tmp_path / "theirs", kind)
    plain = scores(theirs, TOKENS)
    adapter: dict[str, Any] = {"rank": 2, "alpha": 8.0}
    if kind == "mixtral":
        adapter["targets"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
        routed, _, _ = tuned_run(tmp_path / "routed", tuned(tmp_path / "theirs", rank=2, targets=["q_proj", "router"]))
        with pytest.raises(UserError, match=r"'layers\.0\.router\.weight' is no matrix of a linear layer"):
            export_adapter(routed, tmp_path / "adapter")
    run, _, params = tuned_run(tmp_path / "run", tuned(tmp_path / "theirs", **adapter))
    export_adapter(run, tmp_path / "adapter")
    own = load_trained(run)
    found = scores(PeftModel.from_pretrained(theirs, tmp_path / "adapter"), TOKENS)
    np.testing.assert_allclose(np.asarray(own.logits(own.params, TOKENS)), found, rtol=1e-4, atol=2e-5)
    assert np.abs(found - plain).max() > 0.05
    tables = {"model": {"source": str(tmp_path / "theirs")}, "train": BATCH, "data": {"source": "stdlib"}}
    again = config_from_tables({**tables, "adapter": {"start": str(tmp_path / "adapter")}})
    for name, value in model_of(again).start.items():
        np.testing.assert_array_equal(value, params[name], err_msg=name)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "llama", "sliding_window": 8}, "sliding_window is 8"),
        ({"model_type": "llama", "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"model_type": "llama", "num_experts": 8}, "num_experts is 8"),
        ({"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"model_type": "phi3", "rope_scaling": {"type": "dynamic"}}, "rotary positions of type 'dynamic'"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1, 2]}}, "'longrope' lack long_factor"),
        (
            {"model_type": "phi3", "original_max_position_embeddings": 1, "rope_scaling": {"type": "longrope"}},
            "take 2 tokens at least",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"model_type": "gemma2", "layer_types": ["chunked"] * 2}, "layer_types is"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            "rotary positions of layers with a window",
        ),
        ({"model_type": "gpt_neox", "hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"model_type": "gpt_neox", "attention_bias": False}, "attention_bias is False"),
        ({"model_type": "opt", "ffn_dim": 24, "do_layer_norm_before": False}, "do_layer_norm_before is False"),
        ({"model_type": "opt", "ffn_dim": 24, "word_embed_proj_dim": 8}, "word_embed_proj_dim is 8"),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ],
)
def test_keys_that_would_change_numbers_are_refused(changed: dict[str, Any], text: str) -> None:
    family = next(family for family in families() if family.name == changed["model_type"])
    with pytest.raises(UserError, match=text):
        family.options({**SIZES, **changed})


JUNK: list[Any] = ["x", -1, 0, 10**30, 1.5, float("nan"), True, None, [], ["x"], {}, {"x": 1}]


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_junk_in_a_key_is_an_error_of_the_user(family: Any) -> None:
    sizes = dict.fromkeys(family.sizes.values(), 4)
    options = {**dict.fromkeys(family.sizes, 4), **family.plain, **family.form}
    options |= {name: absent for name, (_, absent) in family.keys.items()}
    options |= {"n_kv_head": 2, "rope_base": 1e4, "sequence_length": 8, "score_scale": 0.5}
    if family.name in {"opt", "gpt_neox"}:
        options["activation"] = "relu"
    whole = family.published({**options, "head_size": 4})
    assert family.describes(family.options({**sizes, **whole}))
    for key in whole:
        for value in JUNK:
            with contextlib.suppress(UserError):
                family.options({**sizes, **whole, key: value})


def test_plain_options_are_the_defaults_of_the_models() -> None:
    for source, config in (("llama", LlamaConfig()), ("moe", MoeModelConfig())):
        own = msgspec.json.decode(msgspec.json.encode(config))
        plain = next(one for one in families() if one.source == f"planetary.models.{source}:build").plain
        assert {name: own[name] for name in plain} == plain


def test_names_go_to_the_family_and_back() -> None:
    own = {
        "gpt_neox": ("model.layers.3.self_attn.qkv_proj.bias", "gpt_neox.layers.3.attention.query_key_value.bias"),
        "opt": ("model.norm.weight", "model.decoder.final_layer_norm.weight"),
        "mixtral": ("layers.1.experts.up", "model.layers.1.block_sparse_moe.experts.*.w3.weight"),
        "gpt2": ("h.0.ln_1.bias", "transformer.h.0.ln_1.bias"),
    }
    for family in families():
        if family.name in own:
            name, stored = own[family.name]
            assert family.stored_name(name) == stored
            assert family.own_place(stored.replace("*", "2")) == (name, 2 if "*" in stored else None)
    found = family_of("planetary.models.llama:build", {"window": 4})
    assert found is not None
    assert found.name == "mistral"


# --- GGUF -------------------------------------------------------------------------------------------------------

GGUF_SIZES = {  # those that files of the architecture can say
    "gemma2": {"query_pre_attn_scalar": 4},
    "gemma3": {"query_pre_attn_scalar": 4, "layer_types": ["sliding_attention"] * 2},
}
PLAIN_SIZES = {  # those that transformers reads from a file
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen3": {"head_dim": 128},
    "gemma2": {
        **{"query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 4096},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
    "gemma3": {"query_pre_attn_scalar": 256, "head_dim": 256, "layer_types": ["sliding_attention"] * 2},
    "phi3": {"sliding_window": None},
}
GGUF_KINDS = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]


def gguf_of(place: Path, kind: str, options: dict[str, Any]) -> tuple[Path, Any]:
    """Export a run from a random model of transformers as a GGUF file; return it with the run's model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, kind, (KINDS[kind][0], {**KINDS[kind][1], **options}))
        published(place / "theirs", kind)
    config, _ = from_folder(place / "theirs")
    run, _ = run_of(place / "run", config)
    keep_files(config, run)
    export_gguf(run, place / "model.gguf")
    return place / "model.gguf", load_trained(run)


@needs_transformers
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_a_gguf_file_has_the_scores_of_its_run(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are rounded to 16 bits. A run may start from the file as from a folder."""
    monkeypatch.setenv("PLANETARY_CACHE", str(tmp_path / "cache"))
    file, own = gguf_of(tmp_path, kind, GGUF_SIZES.get(kind, {}))
    served = load_folder(file)
    expected = np.asarray(own.logits(own.params, TOKENS))
    np.testing.assert_allclose(np.asarray(served.logits(served.params, TOKENS)), expected, rtol=0.02, atol=0.02)
    assert served.tokenizer.encode(b"abc").tolist() == list(b"abc")
    config, model = from_folder(file)
    assert config.model.weights == str(file)
    run, _ = run_of(tmp_path / "again", config)
    keep_files(config, run)
    made = export_pretrained(run, tmp_path / "out")
    assert made.no_tokenizer == ""
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"tokenizer.json", "config.json"}
    params = model.initial("param")
    np.testing.assert_allclose(params["model.norm.weight"], served.params["model"]["norm"]["weight"], rtol=1e-6)


@pytest.mark.doors("torch", "transformers", "gguf")
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_a_gguf_file_has_the_same_scores_in_transformers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by the package of llama.cpp as well."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("PLANETARY_CACHE", str(tmp_path / "cache"))
    file, _ = gguf_of(tmp_path, kind, PLAIN_SIZES.get(kind, {}))
    served = load_folder(file)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, attn_implementation="eager", dtype=torch.float32
    )
    found = np.asarray(served.logits(served.params, TOKENS))
    np.testing.assert_allclose(found, scores(theirs.eval(), TOKENS), rtol=1e-4, atol=2e-5)
    read = {one.name: one.data.astype(np.float32).reshape(one.shape[::-1]) for one in GGUFReader(file).tensors}
    np.testing.assert_array_equal(read["token_embd.weight"], served.params["model"]["embed_tokens"]["weight"])
