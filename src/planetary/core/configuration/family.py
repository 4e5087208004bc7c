"""Families of published models: their `config.json` as options of a model here and back, and the tensors' names.

A family is a table. What it does not name it does not have: a key of `config.json` that would change numbers and is not
in the table is refused (`_MATTERS`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from planetary.core.configuration.published_values import (
    ABSENT,
    read_number,
    read_rope,
    read_size,
    require_only,
    written_rope,
)
from planetary.core.extension_points import FAMILIES

_OFF: tuple[Any, ...] = (None, False)
_MATTERS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "lm_head_bias", "qk_layernorm"), _OFF),
    **dict.fromkeys(("use_qk_norm", "use_bidirectional_attention", "use_sliding_window", "alibi"), _OFF),
    **dict.fromkeys(("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), _OFF),
    **dict.fromkeys(
        ("query_pre_attn_scalar", "attention_multiplier", "no_rope_layers", "no_rope_layer_interval"), _OFF
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "quantization_config"), _OFF),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "logit_scale", "logits_scaling"), (None, 1, 1.0)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), (None, 1, 1.0)),
}
"""Keys of `config.json` that change numbers in some family -> values with which they do not."""


class Family:
    """One family of published models.

    Attributes:
        name: the `model_type` of `config.json`.
        architecture: class of `transformers`.
        source: function that builds the same model here.
        plain: its options that say which form the model has -> values of the plain form, their defaults.
        sizes: options -> keys with whole numbers, each needed.
        keys: other options -> their key, and its value where `config.json` has none.
        form: options that are the same in the whole family.
        free: more options that `read` may set.
        only: keys that may have these values alone; the first is written.
        names: own beginnings of tensors' names -> stored ones, specific ones first; `*` is a number. A stored one with
            a number more is one of a stack, which is one tensor here.
        turned: ends of own names of stacks whose parts are stored transposed.
        gates: parts of own names of matrices that are no linear layers in `transformers`, and get no adapters there.
        spare: patterns of stored tensors (own names) that are no parameters.
        theta: base of rotary positions without a key.
    """

    name: ClassVar[str]
    architecture: ClassVar[str]
    source: ClassVar[str]
    plain: ClassVar[Mapping[str, Any]] = {}
    sizes: ClassVar[Mapping[str, str]] = {
        "n_position": "max_position_embeddings",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "n_hidden": "intermediate_size",
        "vocab_size": "vocab_size",
    }
    keys: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "norm_epsilon": ("rms_norm_eps", 1e-6),
        "tie_embeddings": ("tie_word_embeddings", False),
    }
    form: ClassVar[Mapping[str, Any]] = {}
    free: ClassVar[frozenset[str]] = frozenset({"head_size", "rope_scaling"})
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_act": ("silu",)}
    names: ClassVar[Sequence[tuple[str, str]]] = ()
    turned: ClassVar[tuple[str, ...]] = ()
    gates: ClassVar[tuple[str, ...]] = ()
    spare: ClassVar[tuple[str, ...]] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
    theta: ClassVar[float] = 10_000.0

    def options(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `source` a `config.json` stands for.

        Raises:
            UserError: it asks for a feature the model here lacks.
        """
        require_only(published, self.only)
        options: dict[str, Any] = {own: read_size(published, name) for own, name in self.sizes.items()}
        for own, (name, absent) in self.keys.items():
            value = published.get(name, absent)
            if isinstance(absent, bool) or value is None:
                options[own] = value if value is None else bool(value)
            else:
                options[own] = read_size(published, name) if own == "window" else read_number(published, name, absent)
        options |= {**self.form, **self.read(published, options)}
        read = {*self.only, *self.sizes.values(), *(name for name, _ in self.keys.values())}
        read.update(self.published_only(options))
        require_only(published, {name: values for name, values in _MATTERS.items() if name not in read})
        return {name: value for name, value in options.items() if value != self.plain.get(name, ABSENT)}

    def published(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `config.json` of a model built with `options`, all of them."""
        return {
            **{name: options[own] for own, name in self.sizes.items() if own != "n_position"},
            self.sizes["n_position"]: options["n_position"] or options["sequence_length"],
            **{name: options[own] for own, (name, _) in self.keys.items()},
            **{name: values[0] for name, values in self.only.items()},
            **self.published_only(options),
        }

    def read(self, published: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that need more than a key; `options`: those that do not."""
        given = {name: value for name, value in published.items() if value is not None}
        found = {"n_kv_head": read_size({"num_key_value_heads": options["n_head"], **given}, "num_key_value_heads")}
        width = read_size(given, "head_dim") if "head_dim" in given else None
        found |= {"head_size": width} if width not in (None, options["n_embd"] // options["n_head"]) else {}
        return {**found, **read_rope(published, options["n_position"], self.theta)}

    def published_only(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that `read` reads."""
        return {
            "num_key_value_heads": options["n_kv_head"],
            "head_dim": options.get("head_size") or options["n_embd"] // options["n_head"],
            **written_rope(options),
        }

    def describes(self, options: Mapping[str, Any]) -> bool:
        """Whether a model that `source` builds with `options` is of this family."""
        free = {*self.free, *self.keys, *self.sizes}
        for name in {*self.plain, *self.form} - free:
            usual = self.form.get(name, self.plain.get(name))
            if options.get(name, self.plain.get(name, usual)) != usual:
                return False
        return True

    def unneeded(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return patterns of tensors (own names) that the weights may hold although they are no parameters here."""
        return (*self.spare, *((self.own_name("lm_head.weight"),) if options.get("tie_embeddings") else ()))

    def own_name(self, stored: str) -> str:
        """Return the parameter's name here, or the name of a layer's kind (`fc1`)."""
        return self.own_place(stored)[0]

    def own_place(self, stored: str) -> tuple[str, int | None]:
        """Return the parameter's name here, and the place in the stack it is a part of, if any."""
        for pattern, replacement in self._to_own:
            if match := pattern.match(stored):
                numbers = list(match.groups())
                own = replacement.replace("*", "{}")
                place = int(numbers.pop()) if len(numbers) > replacement.count("*") else None
                return own.format(*numbers) + stored[match.end() :], place
        return stored, None

    def stored_name(self, own: str) -> str:
        """Return the name that `save_pretrained` gives a parameter; `*` stands for the place in a stack."""
        for pattern, replacement in self._to_stored:
            if match := pattern.match(own):
                numbers = [*match.groups(), "*"]
                return replacement.replace("*", "{}").format(*numbers) + own[match.end() :]
        return own

    @cached_property
    def _to_own(self) -> list[tuple[re.Pattern[str], str]]:
        ends = [(stored.rpartition(".")[2], own.rpartition(".")[2]) for own, stored in self.names if "*" in own]
        return _patterns([(stored, own) for own, stored in self.names] + ends)

    @cached_property
    def _to_stored(self) -> list[tuple[re.Pattern[str], str]]:
        return _patterns(self.names)


def _patterns(names: Sequence[tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(re.escape(a).replace(r"\*", r"(\d+)") + r"(?=\.|$)"), b) for a, b in names]


def families() -> list[Family]:
    """Return the families that are known."""
    return [FAMILIES.find(name)() for name in FAMILIES.names()]


def family_of(source: str, options: Mapping[str, Any], name: str = "") -> Family | None:
    """Return the family of a model that `source` builds with `options`; None: there is none.

    Several may describe it: the one of this `name` is then preferred.
    """
    found = [family for family in families() if family.source == source and family.describes(options)]
    return next((family for family in found if family.name == name), found[0] if found else None)
