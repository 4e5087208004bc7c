"""A served Llama in llama.cpp, for `bench/serving.py`: the same float32 weights through a GGUF file. Needs
`pip install gguf llama-cpp-python`, the second of which is compiled.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from planetary.models.llama import LlamaConfig
from planetary.runs.serve.program.served_model import ServedModel

_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: ServedModel, config: LlamaConfig, path: Path, stored: Any = None) -> None:
    """Write a Llama without tokenizer; `stored`: type of its matrices, None: float32."""
    import gguf  # pyright: ignore[reportMissingImports] - of the bench alone

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(model.window)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_hidden)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_vocab_size(model.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    for name, value in model.arrays().items():
        there, array = _stored(name, value, config)
        if stored is not None and array.ndim == 2:
            writer.add_tensor(there, gguf.quants.quantize(array, stored), raw_dtype=stored)
        else:
            writer.add_tensor(there, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(name: str, value: np.ndarray, config: LlamaConfig) -> tuple[str, np.ndarray]:
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside:
        return outside[name], value
    _, _, layer, *rest, _ = name.split(".")
    part = ".".join(rest)
    for projection, heads in (("self_attn.q_proj", config.n_head), ("self_attn.k_proj", config.n_kv_head)):
        if part == projection:  # there neighbouring channels are rotated together, here those half a head apart
            value = value.reshape(heads, 2, config.head_width // 2, -1).swapaxes(1, 2).reshape(value.shape)
    return f"blk.{layer}.{_BLOCK[part]}.weight", value


class LlamaCpp:
    """A model in llama.cpp that continues texts greedily, all of them in one batch a step.

    The library's own calls, without the Python package's class: its threads for batches would be all cores, and wait
    for each other in processor time. The context has as many positions as the texts need, its cache the default type.
    """

    def __init__(self, path: Path, texts: int, reach: int, threads: int) -> None:
        """`texts` of at most `reach` tokens each."""
        import llama_cpp  # pyright: ignore[reportMissingImports] - of the bench alone

        self._api: Any = llama_cpp
        self._texts = texts
        _silence(self._api)
        self._model = self._api.llama_model_load_from_file(str(path).encode(), self._api.llama_model_default_params())
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = texts * reach, texts
        params.n_batch = params.n_ubatch = max(32, texts)
        params.n_threads = params.n_threads_batch = threads
        self._context = self._api.llama_init_from_model(self._model, params)
        self._vocabulary = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._batch = self._api.llama_batch_init(max(32, texts), 0, 1)

    def continues(self, prompt: list[int], count: int) -> Callable[[], list[list[int]]]:
        """Return what continues each text by `count` tokens; the prompt but its last token is taken here, once."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        for text in range(self._texts):
            self._decode([(token, place, text) for place, token in enumerate(prompt[:-1])])

        def generate() -> list[list[int]]:
            memory = self._api.llama_get_memory(self._context)
            self._api.llama_memory_seq_rm(memory, -1, len(prompt) - 1, -1)
            last, found = [prompt[-1]] * self._texts, [[] for _ in range(self._texts)]
            for step in range(count):
                place = len(prompt) - 1 + step
                self._decode([(token, place, text) for text, token in enumerate(last)])
                logits = self._api.llama_get_logits(self._context)
                rows = np.ctypeslib.as_array(logits, shape=(self._texts, self._vocabulary))
                last = np.argmax(rows, axis=1).tolist()
                for text, token in enumerate(last):
                    found[text].append(token)
            return found

        return generate

    def _decode(self, tokens: list[tuple[int, int, int]]) -> None:
        """Take tokens, each with its position and its text; the logits of all are wanted."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, place, text) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, place
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, text, 1
        if (failed := self._api.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {failed}")


@functools.cache
def _silence(api: Any) -> Any:
    """Let llama.cpp log nothing; return the function that it calls, which must stay."""
    callback = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(callback, ctypes.c_void_p(0))
    return callback
