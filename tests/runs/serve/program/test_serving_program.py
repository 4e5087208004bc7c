"""Functions with a paged cache compute what the whole forward pass does, for every model that says how it caches."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler.autodiff.differentiate import finish_module, load_for_differentiation
from planetary.core.tensors import TensorSpec
from planetary.models import gpt2, latent_moe, llama, mamba2, moe, nanochat
from planetary.models.context import CacheSizes, StateSizes, WholeText
from planetary.models.initial import flat_names
from planetary.runs.serve.program import program
from planetary.runs.serve.program.cache_kinds import KeyValueCache, RecurrentState
from planetary.runs.serve.program.program import serving_program
from planetary.runs.serve.program.shape import (
    CACHE,
    IDS,
    KEYS,
    PAGE,
    ROW,
    SCORE_IDS,
    SCORE_VALUES,
    SCORES,
    VALUES,
    ServingShape,
    context_sizes_of,
    gather_name,
)
from planetary.runtime.device_program import ResidentTensors, open_on_xla

WINDOW = 4 * PAGE
MODELS: list[Any] = [
    (nanochat, {}),
    pytest.param(gpt2, {"sequence_length": WINDOW}, marks=pytest.mark.slow),
    pytest.param(llama, {}, marks=pytest.mark.slow),
    pytest.param(llama, {"tie_embeddings": True, "n_kv_head": 1, "qkv_bias": True}, marks=pytest.mark.slow),
    pytest.param(llama, {"window": PAGE + 3, "score_cap": 2.0, "full_layers": (1,)}, marks=pytest.mark.slow),
    pytest.param(moe, {}, marks=pytest.mark.slow),
    pytest.param(latent_moe, {}, marks=pytest.mark.slow),
    pytest.param(mamba2, {}, marks=pytest.mark.slow),
    pytest.param(mamba2, {"n_tap": 1, "chunk": 64}, marks=pytest.mark.slow),
]


def model_of(module: ModuleType, changes: dict[str, Any]) -> tuple[dict[str, Any], Any, CacheSizes | StateSizes]:
    options = {**module.PRESETS["tiny"], "n_layer": 2, **changes}
    _, params, _ = module.build(**options)
    rng = np.random.default_rng(0)
    # Some matrices begin at zero, behind which nothing could be told from anything else.
    params = jax.tree.map(lambda leaf: np.asarray(leaf) + rng.normal(0, 0.1, np.shape(leaf)).astype(np.float32), params)
    return options, params, (module.state_sizes if module is mamba2 else module.cache_sizes)(**options)


class Device:
    """A program on XLA with its parameters and its cache."""

    def __init__(self, module: ModuleType, changes: dict[str, Any], element: str = "f32") -> None:
        options, self.params, self.sizes = model_of(module, changes)
        sizes = self.sizes
        self.decode = partial(module.decode, **options)
        names = flat_names(self.params)
        specs = tuple(TensorSpec(name, "f32", leaf.shape) for name, leaf in names.items())
        paged = isinstance(sizes, CacheSizes)
        self.shape = ServingShape(
            vocabulary=options["vocab_size"],
            window=WINDOW,
            pages=12,
            page_shape=(2 * sizes.layers, sizes.heads, PAGE, sizes.width) if paged else (sizes.numbers,),
            element=element,
            batches=(1, 2),
            chunks=(2 * PAGE,),
            context_sizes=context_sizes_of(WINDOW) if paged else (1,),
            cache_kind=KeyValueCache() if paged else RecurrentState(),
            hidden=options["n_embd"],
        )
        program = serving_program(self.decode, self.params, specs, self.shape)
        self.names, self.runner = names, open_on_xla(program, optimise=False)
        self.tensors = ResidentTensors(self.runner)
        self.tensors.put({name: np.asarray(leaf) for name, leaf in names.items()})
        self.tensors.put({CACHE: self.shape.cache.zeros()})

    def call(
        self,
        function: str,
        tokens: Any,
        start: Any,
        length: Any,
        pages: Any,
        *,
        going_on: bool = False,
        **more: Any,
    ) -> dict[str, np.ndarray]:
        """`going_on`: the texts are those of the decoding call before, whose copy of their pages is there."""
        pages = [one[: self.shape.context_sizes[0]] for one in pages]  # a state has one page
        given = {"tokens": tokens, "start": start, "length": length, "pages": pages, **more}
        arrays = {name: np.asarray(value, np.int32) for name, value in given.items()}
        if f"{KEYS}0" in {one.name for one in self.runner.signature(function).arguments}:
            recall = gather_name(*arrays["pages"].shape)
            if not going_on:
                self.tensors.call(recall, arrays={"pages": arrays["pages"]})
        self.tensors.call(function, arrays=arrays)
        return self.tensors.get([VALUES, IDS, ROW, *((SCORES, SCORE_VALUES, SCORE_IDS) if more else ())])

    def whole(self, tokens: list[int]) -> np.ndarray:
        text = jnp.asarray([tokens], jnp.int32)
        return np.asarray(jax.nn.log_softmax(self.decode(self.params, text, WholeText(text))[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("module", "changes"), MODELS)
def test_chunks_and_tokens_give_whole_log_probabilities(module: ModuleType, changes: dict[str, Any]) -> None:
    """Chunks and single tokens give the log probabilities of the whole text."""
    device = Device(module, changes)
    texts = np.random.default_rng(1).integers(0, device.shape.vocabulary, (2, WINDOW)).tolist()
    whole = [device.whole(text) for text in texts]
    pages = [[3, 9, 1, 5], [2, 4, 11, 7]]
    context_pages = device.shape.context_sizes[0]
    chunk = 2 * PAGE
    for text, mine, rows in zip(texts, pages, whole, strict=True):
        found = device.call(f"prefill_s{chunk}_p{context_pages}", [text[:chunk]], [0], [chunk], [mine])
        np.testing.assert_allclose(found[ROW][0], rows[chunk - 1], atol=2e-5)
        # A chunk that ends within a page: what stands after its end is not looked at.
        new = [*text[chunk : chunk + 5], *([1] * (chunk - 5))]
        found = device.call(f"prefill_s{chunk}_p{context_pages}", [new], [chunk], [5], [mine])
        np.testing.assert_allclose(found[ROW][0], rows[chunk + 4], atol=2e-5)
    for place in range(chunk + 5, WINDOW):
        new, starts = [[text[place]] for text in texts], [place, place]
        # Most tokens add to the copy of the pages; at some the copy is made again.
        going_on = place % 7 != 0 and place != chunk + 5
        found = device.call(f"decode_b2_p{context_pages}", new, starts, [1, 1], pages, going_on=going_on)
        for one in range(2):
            np.testing.assert_allclose(found[ROW][one], whole[one][place], atol=2e-5)
            best = np.argsort(-whole[one][place], kind="stable")[:5]
            np.testing.assert_allclose(found[VALUES][one][:5], whole[one][place][best], atol=2e-5)
            assert found[IDS][one][0] == best[0]

    check_scores(device, texts[0], whole[0])


def check_scores(device: Device, text: list[int], whole: np.ndarray) -> None:
    """A prompt is scored at all its places at once."""
    chunk, length = 2 * PAGE, 2 * PAGE + 5
    for start, end in ((0, chunk), (chunk, length)):
        new, following = text[start:end], text[start + 1 : end + 1]
        filled = [*new, *([1] * (chunk - len(new)))]
        targets = [*following, *([0] * (chunk - len(following)))]
        name = f"score_s{chunk}_p{device.shape.context_sizes[0]}"
        found = device.call(name, [filled], [start], [len(new)], [[3, 9, 1, 5]], targets=[targets])
        rows = whole[start:end]
        expected = rows[np.arange(len(new)), following]
        np.testing.assert_allclose(found[SCORES][0][: len(new)], expected, atol=2e-5)
        np.testing.assert_allclose(found[SCORE_VALUES][0][: len(new)], -np.sort(-rows)[:, :20], atol=2e-5)
        assert (found[SCORE_IDS][0][: len(new), 0] == rows.argmax(1)).all()
        np.testing.assert_allclose(found[ROW][0], rows[-1], atol=2e-5)


@pytest.mark.slow
def test_a_place_without_a_text_changes_no_page_but_the_first() -> None:
    device = Device(nanochat, {})
    context_pages = device.shape.context_sizes[0]
    device.call(f"prefill_s{2 * PAGE}_p{context_pages}", [[5] * 2 * PAGE], [0], [2 * PAGE], [[1, 2, 0, 0]])
    before = device.tensors.get([CACHE])[CACHE].copy()
    device.call(f"decode_b2_p{context_pages}", [[7], [0]], [2 * PAGE, 0], [1, 1], [[1, 2, 3, 0], [0, 0, 0, 0]])
    after = device.tensors.get([CACHE])[CACHE]
    changed = np.flatnonzero((before != after).any(axis=(1, 2, 3, 4)))
    assert changed.tolist() == [0, 3]


@pytest.mark.slow
def test_a_cache_of_sixteen_bits_is_close() -> None:
    device = Device(nanochat, {}, element="bf16")
    context_pages, text = device.shape.context_sizes[0], list(range(2 * PAGE))
    device.call(f"prefill_s{2 * PAGE}_p{context_pages}", [text], [0], [2 * PAGE], [[1, 2, 0, 0]])
    found = device.call(f"decode_b1_p{context_pages}", [[9]], [2 * PAGE], [1], [[1, 2, 3, 0]])
    np.testing.assert_allclose(found[ROW][0], device.whole([*text, 9])[-1], atol=0.1)


@pytest.mark.slow
def test_functions_are_those_the_derivatives_loader_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte: nothing that the rules of the derivative keep in a module stays in one without a derivative."""
    options, params, sizes = model_of(nanochat, {})
    assert isinstance(sizes, CacheSizes)
    specs = tuple(TensorSpec(name, "f32", leaf.shape) for name, leaf in flat_names(params).items())
    shape = ServingShape(
        vocabulary=options["vocab_size"],
        window=WINDOW,
        pages=12,
        page_shape=(2 * sizes.layers, sizes.heads, PAGE, sizes.width),
        batches=(1,),
        chunks=(2 * PAGE,),
        context_sizes=context_sizes_of(WINDOW),
        hidden=options["n_embd"],
    )
    build = partial(serving_program, partial(nanochat.decode, **options), params, specs, shape)
    found = build()
    monkeypatch.setattr(program, "load_forward", load_for_differentiation)
    monkeypatch.setattr(program, "finish_forward", finish_module)
    assert found.portable == build().portable


def test_a_copy_of_pages_is_no_larger_than_the_cache() -> None:
    shape = ServingShape(
        vocabulary=9, window=8 * PAGE, pages=17, page_shape=(4, 2, PAGE, 8), batches=(1, 4), context_sizes=(2, 8)
    )
    copied = {name for name in shape.functions(()) if name.startswith("gather")}
    assert copied == {"gather_b1_p2", "gather_b1_p8", "gather_b4_p2"}
    assert [spec.shape for spec in shape.gathered(4, 2)] == 2 * [(4, 2, 8, 2 * PAGE), (4, 2, 2 * PAGE, 8)]
    assert "gathered_keys.0" not in {one.name for one in shape.functions(())["decode_b4_p8"].arguments}
