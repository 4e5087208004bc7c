"""Small language models in PyTorch, exported to StableHLO by torch-mlir, in the form that PCP trains.

The exported function is `main(parameters…, buffers…, i64[B,T] tokens, i64[B,T] targets) -> f32 loss`: weights are
arguments, everything else that the module holds becomes a `dense_resource`. `planetary train` takes the file as it
is (see docs/models.md).

    pip install torch==2.13.0 torch-mlir==20261001 ml_dtypes
    python examples/pcp/export_models.py example        # examples/pcp/model.mlir
    python examples/pcp/export_models.py tests          # tests/compiler/torch_exports/*.mlir, *.npz
    python examples/pcp/export_models.py nanochat out.mlir --depth 4 --width 256 --vocab 65536 --block 128 --batch 1
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
TEST_DATA = HERE.parents[1] / "tests" / "compiler" / "torch_exports"


@dataclass(frozen=True)
class Shape:
    """What a model is exported for."""

    depth: int = 1
    width: int = 16
    heads: int = 2
    groups: int = 0  # heads of keys and values; 0: as many as of queries
    vocab: int = 32
    block: int = 8
    batch: int = 2
    dtype: str = "f32"  # of the weights: "f32" or "bf16"
    statistics: str = "f32"  # of RMSNorm's mean: "f32" or "f64"
    tables: str = "constant"  # rotary tables: "constant" or "argument"

    @property
    def head(self) -> int:
        return self.width // self.heads


# --- parts --------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε), with a scale or without one; the mean is taken in the shape's `statistics`."""

    def __init__(self, shape: Shape, scaled: bool) -> None:
        super().__init__()
        self.wide = {"f32": torch.float32, "f64": torch.float64}[shape.statistics]
        self.weight = nn.Parameter(torch.ones(shape.width)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.wide)
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return normed if self.weight is None else normed * self.weight


def rotary_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cos and sin of position / 10000^(2i/head), of shape [block, head / 2]."""
    rates = 10000.0 ** (-torch.arange(0, shape.head, 2).float() / shape.head)
    angles = torch.outer(torch.arange(shape.block).float(), rates)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head, [B, T, heads, head], by the angles of its position."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [B, heads, T, head], with the softmax in float32."""
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    mask = torch.tril(torch.ones(q.shape[-2], q.shape[-2]))
    # The lowest finite bf16 survives the sums of a softmax; with f32 scores, minus infinity is as PyTorch has it.
    low = float("-inf") if scores.dtype == torch.float32 else -65504.0
    scores = scores.masked_fill(mask == 0, low)
    return F.softmax(scores.float(), dim=-1).to(v.dtype) @ v


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))


class Attention(nn.Module):
    """Self-attention: rotary or not, with normed queries and keys or not, in groups or not."""

    def __init__(self, shape: Shape, rotary: bool, normed: bool) -> None:
        super().__init__()
        self.shape, self.rotary, self.normed = shape, rotary, normed
        self.groups = shape.groups or shape.heads
        self.queries = nn.Linear(shape.width, shape.width, bias=False)
        self.keys = nn.Linear(shape.width, self.groups * shape.head, bias=False)
        self.values = nn.Linear(shape.width, self.groups * shape.head, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)
        self.norm = RMSNorm(dataclasses.replace(shape, width=shape.head), scaled=False)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape
        q = self.queries(x).view(batch, length, self.shape.heads, self.shape.head)
        k = self.keys(x).view(batch, length, self.groups, self.shape.head)
        v = self.values(x).view(batch, length, self.groups, self.shape.head)
        if self.rotary:
            q, k = rotated(q, *tables), rotated(k, *tables)
        if self.normed:
            q, k = self.norm(q), self.norm(k)
        if self.groups < self.shape.heads:
            repeats = self.shape.heads // self.groups
            k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.output(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two linear maps with a function between them: "gelu", "relu" or "relu2"."""

    def __init__(self, shape: Shape, function: str, bias: bool = False) -> None:
        super().__init__()
        self.function = function
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=bias)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = F.gelu(h) if self.function == "gelu" else F.relu(h).square() if self.function == "relu2" else F.relu(h)
        return self.down(h)


class GatedMLP(nn.Module):
    """SiLU(a) * b."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.up = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.down = nn.Linear(3 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, norms: tuple[nn.Module, nn.Module], attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.first, self.attention, self.second, self.mlp = norms[0], attention, norms[1], mlp

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.first(x), tables)
        return x + self.mlp(self.second(x))


# --- models -------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Embedding, blocks, head; the loss is the mean cross-entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        cos, sin = rotary_tables(shape)
        if shape.dtype == "bf16":
            cos, sin = cos.bfloat16(), sin.bfloat16()
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        return cross_entropy(self.logits(self.last(x)), targets)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


class NanoGPT(Model):
    """LayerNorm, learned positions, GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.positions = nn.Embedding(shape.block, shape.width)
        self.last = nn.LayerNorm(shape.width)
        norms = [(nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)) for _ in range(shape.depth)]
        self.blocks = nn.ModuleList(
            Block(pair, Attention(shape, False, False), MLP(shape, "gelu", bias=True)) for pair in norms
        )

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))


class RoPE(Model):
    """LayerNorm, rotary positions, ReLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.last = nn.LayerNorm(shape.width)
        norms = [(nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)) for _ in range(shape.depth)]
        self.blocks = nn.ModuleList(Block(pair, Attention(shape, True, False), MLP(shape, "relu")) for pair in norms)


class NanoChat(Model):
    """RMSNorm without scales, rotary positions, normed queries and keys, ReLU², logits capped by 15·tanh(x/15)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.first = RMSNorm(shape, scaled=False)
        self.last = RMSNorm(shape, scaled=False)
        norms = [(RMSNorm(shape, scaled=False), RMSNorm(shape, scaled=False)) for _ in range(shape.depth)]
        self.blocks = nn.ModuleList(Block(pair, Attention(shape, True, True), MLP(shape, "relu2")) for pair in norms)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.first(self.embedding(tokens))

    def logits(self, x: Tensor) -> Tensor:
        return 15 * torch.tanh(self.head(x) / 15)


class Qwen(Model):
    """Scaled RMSNorm, rotary positions, grouped heads, gated SiLU, the embedding as the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.head.weight = self.embedding.weight
        self.last = RMSNorm(shape, scaled=True)
        norms = [(RMSNorm(shape, scaled=True), RMSNorm(shape, scaled=True)) for _ in range(shape.depth)]
        self.blocks = nn.ModuleList(Block(pair, Attention(shape, True, False), GatedMLP(shape)) for pair in norms)


MODELS = {"nanogpt": NanoGPT, "rope": RoPE, "nanochat": NanoChat, "qwen": Qwen}

# --- export -------------------------------------------------------------------------------------------------


class Stateless(nn.Module):
    """The model as a function of its weights and its data."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *arguments: Tensor) -> Tensor:
        given = dict(zip(self.names, arguments[:-2], strict=True))
        return torch.func.functional_call(self.model, given, arguments[-2:])


def exported(kind: str, shape: Shape) -> tuple[str, list[str]]:
    """Return the StableHLO text of a model's loss, and the names of its leading arguments."""
    from torch_mlir import fx

    torch.manual_seed(0)
    model = MODELS[kind](shape)
    if shape.dtype == "bf16":
        model.to(torch.bfloat16)
    state = dict(model.named_parameters())
    if shape.tables == "argument":
        state |= dict(model.named_buffers())
    data = [torch.zeros((shape.batch, shape.block), dtype=torch.int64) for _ in range(2)]
    wrapped = Stateless(model, list(state))
    module = fx.export_and_import(wrapped, *state.values(), *data, output_type="stablehlo", func_name="main")
    return f"{module.operation}\n", list(state)


def expected(kind: str, shape: Shape) -> dict[str, np.ndarray]:
    """Return PyTorch's loss and gradients, by argument, at the weights and data that `numbers` gives."""
    torch.manual_seed(0)
    model = MODELS[kind](shape)
    if shape.dtype == "bf16":
        model.to(torch.bfloat16)
    weights = dict(model.named_parameters())
    drawn, tokens, targets = numbers([tuple(weight.shape) for weight in weights.values()], shape)
    for weight, values in zip(weights.values(), drawn, strict=True):
        weight.data = torch.from_numpy(values).to(weight.dtype)
    if kind == "qwen":
        model.head.weight = model.embedding.weight
    loss = model(torch.from_numpy(tokens), torch.from_numpy(targets))
    loss.backward()
    gradients = {f"arg{i}": weight.grad.float().numpy() for i, weight in enumerate(weights.values())}
    return {"loss": loss.detach().float().numpy(), **gradients}


def numbers(shapes: list[tuple[int, ...]], shape: Shape) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Return weights, tokens and targets that anybody can draw again."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(size).astype(np.float32) * np.float32(0.3) for size in shapes]
    tokens, targets = (rng.integers(0, shape.vocab, (shape.batch, shape.block)) for _ in range(2))
    return weights, tokens, targets


TESTS = {
    "nanogpt_f32": ("nanogpt", Shape()),
    "nanogpt_bf16": ("nanogpt", Shape(dtype="bf16")),
    "nanochat_d1_f64": ("nanochat", Shape(statistics="f64")),
    "nanochat_d2_bf16": ("nanochat", Shape(depth=2, dtype="bf16", statistics="f64")),
    "rope": ("rope", Shape()),
    "rope_arguments": ("rope", Shape(tables="argument")),
    "qwen": ("qwen", Shape(heads=4, groups=2, statistics="f64")),
}
EXAMPLE = ("nanochat", Shape(depth=2, width=64, heads=4, vocab=256, block=64, batch=8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*MODELS, "example", "tests"])
    parser.add_argument("out", nargs="?", type=Path)
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = parser.parse_args()
    if given.model == "tests":
        TEST_DATA.mkdir(exist_ok=True)
        wanted = {TEST_DATA / f"{name}.mlir": case for name, case in TESTS.items()}
    elif given.model == "example":
        wanted = {HERE / "model.mlir": EXAMPLE}
    else:
        if given.out is None:
            parser.error("name the file to write")
        options = {field.name: getattr(given, field.name) for field in dataclasses.fields(Shape)}
        wanted = {given.out: (given.model, Shape(**options))}
    for path, (kind, shape) in wanted.items():
        text, names = exported(kind, shape)
        path.write_text(text)
        if given.model == "tests":
            np.savez_compressed(path.with_suffix(".npz"), **expected(kind, shape))
        print(f"{path}: {len(text)} bytes; arguments: {', '.join(names)}")


if __name__ == "__main__":
    main()
