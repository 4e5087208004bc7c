"""A PyTorch module keeps its meaning: the compiled gradient is autograd's, or an error names the line."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planetary.compiler.autodiff.differentiate import differentiate
from planetary.compiler.check.meaning import check_meaning
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend import torch_operators
from planetary.compiler.frontend.author import author_of
from planetary.compiler.frontend.export import Model, export_loss
from planetary.core.errors import CompileError, UserError

torch: Any = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional

pytestmark = pytest.mark.doors("torch", "torchax")

WORDS, ROWS, STEPS, WIDTH = 16, 2, 6, 8


class Net(nn.Module):
    """Scores [rows, steps, words] of tokens; `middle` is what a case is about."""

    def __init__(self, middle: Callable[[Any, Any], Any], more: Callable[[Any], None] = lambda net: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.side, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.middle = middle
        more(self)

    def forward(self, tokens: Any) -> Any:
        return self.out(self.middle(self, self.table(tokens)))


class Quarters(torch.autograd.Function):
    """Rounds to quarters; its gradient is a formula of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, slope: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return slope * torch.cos(ctx.saved_tensors[0])


def frozen(net: Any) -> None:
    net.table.weight.requires_grad_(False)


def hooked(net: Any) -> None:
    net.side.weight.register_hook(lambda slope: slope * 3)


def attention(net: Any) -> None:
    net.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)


def normed(net: Any) -> None:
    net.side = nn.utils.parametrizations.weight_norm(net.side)


def without_gradient(net: Any, x: Any) -> Any:
    with torch.no_grad():
        gate = torch.sigmoid(net.side(x))
        with torch.enable_grad():
            again = net.out(x).mean()
    return x * gate + again


def write_without_gradient(net: Any, x: Any) -> Any:
    y = net.side(x) + x
    with torch.no_grad():
        y.mul_(2)
    z = y + 1
    z.detach()[0].add_(1)
    return z * 2


def hook_in_forward(net: Any, x: Any) -> Any:
    y = net.side(x)
    y.register_hook(lambda slope: slope * 3)
    return y


def write_through_views(net: Any, x: Any) -> Any:
    y = x.clone()
    y.view(ROWS * STEPS, WIDTH)[0] = 7.0
    y.transpose(0, 1)[1].mul_(2)
    y[..., 1:3].add_(net.side(x)[..., :2])
    return y


def masked(net: Any, x: Any) -> Any:
    scores = x @ x.transpose(1, 2) / math.sqrt(WIDTH)
    mask = torch.triu(torch.ones(STEPS, STEPS, dtype=torch.bool), 1)
    positions = torch.arange(x.shape[1]).float()[:, None] * torch.tensor([0.1, 0.2] * 4)
    return functional.softmax(scores.masked_fill(mask, float("-inf")), -1) @ (x + positions)


def by_index(net: Any, x: Any) -> Any:
    made = torch.empty_like(x)
    made.copy_(x)
    return made.index_add_(1, torch.tensor([0, 2]), x[:, :2])


def several_heads(net: Any, x: Any) -> Any:
    mask = nn.Transformer.generate_square_subsequent_mask(STEPS)
    return net.heads(x, x, x, attn_mask=mask, need_weights=False)[0]


def compiled(net: Any) -> None:
    net.side = torch.compile(net.side)


def detached_in_place(net: Any, x: Any) -> Any:
    y = net.side(x) * x
    z = y + x
    y.detach_()
    return z * y


def with_ties(x: Any) -> Any:
    """Many elements are equal, or zero; the gradient passes as if none were rounded."""
    coarse = torch.round(x * 2) / 2
    return x - (x - coarse).detach()


RISING = torch.arange(float(WIDTH))
TIES: dict[str, Callable[[Any], Any]] = {
    "abs": lambda x: x.abs() + functional.l1_loss(x, torch.zeros_like(x)),
    "max_dim": lambda x: x.max(-1, keepdim=True).values + x.max(1).values[:, None],
    "min_dim": lambda x: x.min(-1, keepdim=True).values,
    "max_and_amax": lambda x: x.max() + x.amax(1, keepdim=True) + torch.maximum(x, x.flip(-1)),
    "sort": lambda x: x.sort(-1).values * RISING + x.sort(dim=1, descending=True, stable=True).values * RISING,
    "median": lambda x: x.median() + x.median(-1, keepdim=True).values,
    "cummax": lambda x: x.cummax(1).values * RISING + x.cummin(-1).values * RISING,
    "fmax": lambda x: torch.fmax(x, x.flip(-1)) * RISING + torch.fmin(x, x.flip(-1)),
    "std": lambda x: (x * 0).std(-1, keepdim=True) + x.std(1, keepdim=True) + x.std(),
    "atan2": lambda x: torch.atan2(x, x.flip(-1)),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "batched_solve": lambda x: torch.linalg.solve(x @ x.transpose(1, 2) + 3 * torch.eye(STEPS), x),
}

CASES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], None]]] = {
    **{f"ties_{name}": (lambda net, x, f=f: x + f(with_ties(x)), lambda net: None) for name, f in TIES.items()},
    "torch_compile": (lambda net, x: net.side(x), compiled),
    "detached_in_place": (detached_in_place, lambda net: None),
    "frozen": (lambda net, x: net.side(x), frozen),
    "detached": (lambda net, x: x + net.side(x).detach() + x.data, lambda net: None),
    "data_of_a_parameter": (lambda net, x: net.side(x) + net.side.bias.data, lambda net: None),
    "no_grad": (without_gradient, lambda net: None),
    "straight_through": (lambda net, x: x + (torch.round(x * 4) / 4 - x).detach(), lambda net: None),
    "views": (write_through_views, lambda net: None),
    "made_in_forward": (masked, lambda net: None),
    "by_index": (by_index, lambda net: None),
    "attention": (several_heads, attention),
    "weight_norm": (lambda net, x: net.side(x), normed),
    "custom_function": (lambda net, x: Quarters.apply(net.side(x)), lambda net: None),
    "hook": (lambda net, x: net.side(x), hooked),
    "hook_in_forward": (hook_in_forward, lambda net: None),
    "write_without_gradient": (write_without_gradient, lambda net: None),
}


def loss_of(scores: Any, targets: Any) -> Any:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten().long())


def batch() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, WORDS, (ROWS, STEPS)).astype(np.int32) for _ in range(2)]


def imported(module: Any, data: list[np.ndarray]) -> Model:
    from planetary.torch import from_torch

    return export_loss(*from_torch(module, data, loss_of))


def compiled_gradients(model: Model, data: list[np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    params, buffers = model.initial("param"), model.initial("buffer")
    values = [{**params, **buffers}[a.name] for a in model.manifest.arguments if a.role in ("param", "buffer")]
    places = [i for i, a in enumerate(model.manifest.arguments) if a.role == "param"]
    # By XLA: in four of the cases the reference interpreter of StableHLO gives other gradients than XLA and PyTorch.
    program = differentiate(model.stablehlo, places)
    slopes = run_reference(program, "main", [*values, *data, np.float32(1)], ["f32"] * len(places))
    (loss,) = run_reference(model.stablehlo, "main", [*values, *data], ["f32"])
    return float(loss), dict(zip(params, slopes, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradient_is_autograds(case: str) -> None:
    net, data = Net(*CASES[case]), batch()
    gradient_is_autograds(net, imported(net, data), data)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_attention_by_tiles_has_autograds_gradient(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_operators, "WHOLE", STEPS - 1)

    def two_heads(net: Net, x: Any) -> Any:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            heads, net.side(x).unflatten(-1, (2, -1)).transpose(1, 2), heads, is_causal=causal, scale=0.7
        )
        return mixed.transpose(1, 2).flatten(2)

    net, data = Net(two_heads), batch()
    model = imported(net, data)
    assert b"planetary.attention" in model.stablehlo
    gradient_is_autograds(net, model, data)


@pytest.mark.slow
def test_attention_to_broadcast_keys_is_no_work_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_operators, "WHOLE", STEPS - 1)

    def one_key_for_all(net: Net, x: Any) -> Any:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        key = net.side(x).unflatten(-1, (2, -1))[:1].transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, key, heads)
        return mixed.transpose(1, 2).flatten(2)

    net, data = Net(one_key_for_all), batch()
    model = imported(net, data)
    assert b"planetary.attention" not in model.stablehlo
    gradient_is_autograds(net, model, data)


def gradient_is_autograds(net: Net, model: Model, data: list[np.ndarray]) -> None:
    tokens, targets = map(torch.from_numpy, data)
    with torch.compiler.set_stance("force_eager"):
        wanted = loss_of(net(tokens), targets)
    wanted.backward()
    loss, slopes = compiled_gradients(model, data)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    expected = {name: one.grad.numpy() for name, one in net.named_parameters() if one.grad is not None}
    assert slopes.keys() == expected.keys()
    scale = max(np.abs(one).max() for one in expected.values())
    for name, one in expected.items():
        np.testing.assert_allclose(slopes[name], one, rtol=1e-4, atol=1e-6 * scale, err_msg=name)


@pytest.mark.slow
def test_state_in_python_is_refused() -> None:
    """Such a model's own gradients change from call to call: no tolerance may be taken from that."""
    calls = []

    def counting(net: Any, x: Any) -> Any:
        calls.append(1)
        return net.side(x) * len(calls)

    with pytest.raises(CompileError, match=r"at one call and .* at the next, .*keeps a state that is"):
        check_meaning(imported(Net(counting).train(), batch()))


@pytest.mark.slow
def test_untrained_parameters_are_kept_and_named() -> None:
    def more(net: Any) -> None:
        net.large = nn.Parameter(torch.randn(600, 500), requires_grad=False)
        net.unused = nn.Parameter(torch.ones(3))

    net = Net(lambda net, x: x + net.large[0, :WIDTH], more)
    model = imported(net, batch())
    assert [spec.name for spec in model.manifest.of_role("buffer")] == ["large"]
    np.testing.assert_array_equal(model.initial("buffer")["large"], net.large.numpy())
    assert "unused" not in model.initial("param")
    (note,) = [note for note in model.manifest.notes if "unused" in note]
    assert note.startswith("PyTorch gives no gradient to side.bias, side.weight, unused ")


@pytest.mark.slow
def test_ignored_targets_are_left_out_as_in_pytorch() -> None:
    """Targets of -100, as chats have them: PyTorch's cross-entropy leaves them out by itself."""
    net, (tokens, targets) = Net(lambda net, x: net.side(x)), batch()
    targets[:, ::2] = -100
    model = imported(net, [tokens, targets])
    assert check_meaning(model, [tokens, targets]).author == "framework"
    loss, _ = compiled_gradients(model, [tokens, targets])
    counted = targets != -100
    scores = functional.log_softmax(net(torch.from_numpy(tokens)), -1).detach().numpy()
    assert loss == pytest.approx(-scores[counted, targets[counted]].mean(), rel=1e-5)


@pytest.mark.slow
def test_author_is_pytorch_in_double_precision() -> None:
    from planetary.torch import from_torch

    net, data = Net(lambda net, x: net.side(x).detach() + x), batch()
    loss_fn, params, _ = from_torch(net, data, loss_of)
    author = author_of(loss_fn)
    assert author is not None
    before = {name: one.clone() for name, one in net.state_dict().items()}
    given = {name: np.asarray(one, np.float64) for name, one in params.items()}
    loss, slopes = author.loss_and_gradients(given, data)
    double = Net(net.middle).double()
    wanted = loss_of(double(torch.from_numpy(data[0])), torch.from_numpy(data[1]))
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    assert "side.weight" not in params
    slope = slopes["table.weight"]
    assert slope is not None
    np.testing.assert_allclose(slope, double.table.weight.grad.numpy(), rtol=1e-9)
    assert all(p.grad is None for p in net.parameters())
    assert all((before[name] == one).all() for name, one in net.state_dict().items())


@pytest.mark.slow
def test_training_mode_draws_and_updates_as_pytorch_does() -> None:
    def more(net: Any) -> None:
        net.norm, net.drop, net.rest = nn.BatchNorm1d(STEPS), nn.Dropout(0.3), nn.AlphaDropout(0.2)
        net.register_buffer("seen", torch.zeros(()))
        net.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def middle(net: Any, x: Any) -> Any:
        net.seen = net.seen + x.mean().detach()
        return net.encoder(net.rest(net.norm(net.drop(x)))) + torch.rand_like(x)

    net, data = Net(middle, more), batch()
    model = imported(net, data)
    statistics = [spec.name for spec in model.manifest.of_role("statistic")]
    assert statistics == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "seen"]
    assert check_meaning(model).worst < 1e-4  # with the author's random numbers: those of the key
    assert model.manifest.results == ("loss", "evaluation", *statistics)
    assert len(model.manifest.of_role("key")) == 1


SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out, self.norm = nn.Embedding(16, 8), nn.Linear(8, 16), nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens):
        x = self.table(tokens)
        x = {line}
        return self.out(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("x + 1 if x.sum() > 0 else x", r"net\.py:14 in forward.*use torch\.where"),
        ("x * x.max().item()", r"net\.py:14 depends on the values.*`\.item\(\)`"),
        ("x + x[x > 0].sum()", r"net\.py:14.*boolean indexing"),
        (
            "x + torch.special.airy_ai(x.detach())",
            r"aten::special_airy_ai\.default at .*net\.py:14 has no form",
        ),
    ],
)
def test_what_cannot_be_compiled_names_its_line(tmp_path: Path, line: str, text: str) -> None:
    import runpy

    (tmp_path / "net.py").write_text(SOURCE.format(line=line))
    with pytest.raises(UserError, match=text):
        imported(runpy.run_path(str(tmp_path / "net.py"))["Net"](), batch())


SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "Phi3ForCausalLM": ("Phi3Config", {**GROUPED, "pad_token_id": 0}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SIZES),
    "OPTForCausalLM": (
        "OPTConfig",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "ffn_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 16,
        },
    ),
    "BertForMaskedLM": ("BertConfig", SIZES),
}


@pytest.mark.slow
@pytest.mark.doors("transformers")
@pytest.mark.parametrize("family", FAMILIES)
def test_family_of_transformers_keeps_its_gradient(family: str) -> None:
    import transformers

    from planetary.torch import from_torch

    config, options = FAMILIES[family]
    torch.manual_seed(0)
    module = getattr(transformers, family)(getattr(transformers, config)(**options)).eval()
    rng = np.random.default_rng(0)
    data = [rng.integers(1, 64, (2, 8)).astype(np.int32) for _ in range(2)]
    loss_fn, params, _ = from_torch(module, data, lambda output, target: loss_of(output.logits, target))
    model = export_loss(loss_fn, params, data)
    author = author_of(loss_fn)
    assert author is not None
    wanted, expected = author.loss_and_gradients(model.initial("param"), data)
    loss, slopes = compiled_gradients(model, data)
    assert loss == pytest.approx(wanted, rel=1e-5)
    scale = max(np.abs(one).max() for one in expected.values() if one is not None)
    for name, slope in slopes.items():
        one = expected[name]
        assert one is not None, f"{name} is trained and has no gradient in PyTorch"
        np.testing.assert_allclose(slope, one, rtol=1e-4, atol=2e-6 * scale, err_msg=name)
