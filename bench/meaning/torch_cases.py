"""Every layer of `torch.nn` that takes one input: loss and gradients of the compiled form against PyTorch's own.

    python bench/meaning/torch_cases.py [--update] [NAME ...]

A layer stands between a trained shift of its input and fixed weights of its outputs, so that the gradients of its input
and of its parameters are compared, in evaluation mode and in training mode: on random numbers, and on numbers at which
activations have kinks or overflow. With `--update` the table goes into bench/results/meaning.md.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from planetary.compiler.autodiff.differentiate import value_and_gradients
from planetary.compiler.check import reference
from planetary.compiler.frontend.author import author_of
from planetary.compiler.frontend.export import export_loss
from planetary.core.errors import CompileError, UserError
from planetary.torch import from_torch

RESULTS = Path(__file__).parents[1] / "results" / "meaning.md"
START, END = "<!-- torch: start -->", "<!-- torch: end -->"
TOLERANCE = 2e-4  # of the largest number of a gradient
FLOOR = 0.05  # times the largest input: the scale of a gradient whose numbers are all smaller, which is rounding


@dataclass(frozen=True)
class Case:
    """A layer and its input.

    Attributes:
        make: makes the layer.
        shape: of the input.
        integers: the input's values are below it; 0: the input is of floats.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (2, 3, 6)
    integers: int = 0


def _encoder() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def _attention() -> nn.Module:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.attention(x, x, x)[0]

    return SelfAttention()


def _decoder(whole: bool) -> Callable[[], nn.Module]:
    class OfItself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
            self.decoder = nn.TransformerDecoder(layer, 2) if whole else layer

        def forward(self, x: Any) -> Any:
            return self.decoder(x, x)

    return OfItself


def _transformer() -> nn.Module:
    class OfItself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.transformer(x, x)

    return OfItself()


def _of_two(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The layer of two inputs, both made of one."""

    class OfTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make()

        def forward(self, x: Any) -> Any:
            return self.layer(x, x.flip(0) * 0.5)

    return OfTwo


def _loss(make: Callable[[], nn.Module], target: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """A loss against a fixed target."""

    class OfTarget(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = make()

        def forward(self, x: Any) -> Any:
            return self.loss(x, target(x))

    return OfTarget


def _cell(make: Callable[[], nn.Module]) -> Case:
    return Case(make, (2, 4))


def _classes(x: Any) -> Any:
    return torch.arange(x.shape[0]) % x.shape[1]


def _signs(x: Any) -> Any:
    return torch.arange(x.numel()).reshape(x.shape) % 2 * 2.0 - 1


def _half(x: Any) -> Any:
    return torch.full_like(x, 0.3)


def _ctc() -> nn.Module:
    class Ctc(nn.Module):
        def forward(self, x: Any) -> Any:
            lengths = torch.full((2,), 6, dtype=torch.long), torch.full((2,), 2, dtype=torch.long)
            return nn.CTCLoss()(x.log_softmax(-1), torch.tensor([[1, 2], [2, 1]]), *lengths)

    return Ctc()


def _unpool(k: int) -> Callable[[], nn.Module]:
    pool, back = getattr(nn, f"MaxPool{k}d"), getattr(nn, f"MaxUnpool{k}d")

    class Unpooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.back = pool(2, return_indices=True), back(2)

        def forward(self, x: Any) -> Any:
            return self.back(*self.pool(x))

    return Unpooled


def _triplet(loss: nn.Module) -> Callable[[], nn.Module]:
    class Triplet(nn.Module):
        def forward(self, x: Any) -> Any:
            return loss(x, x.flip(0) * 0.5, x * 0.25 - 1)

    return Triplet


def _triplet_of_two() -> nn.Module:
    class Embedded(nn.Module):
        def forward(self, x: Any) -> Any:
            return nn.CosineEmbeddingLoss()(x, x.flip(0) * 0.5 + 0.1, torch.tensor([1.0, -1.0, 1.0, -1.0]).to(x))

    return Embedded()


def _gaussian() -> nn.Module:
    class Gaussian(nn.Module):
        def forward(self, x: Any) -> Any:
            return nn.GaussianNLLLoss()(x, _half(x), x * x + 0.1)

    return Gaussian()


def _ranking() -> nn.Module:
    class Ranking(nn.Module):
        def forward(self, x: Any) -> Any:
            return nn.MarginRankingLoss(0.2)(x, x.flip(0) * 0.5, _signs(x).to(x))

    return Ranking()


def _probability() -> nn.Module:
    class Probability(nn.Module):
        def forward(self, x: Any) -> Any:
            return nn.BCELoss()(x.sigmoid(), _half(x))

    return Probability()


def _bilinear() -> nn.Module:
    return nn.Bilinear(5, 5, 3)


PICTURE, VOLUME = (2, 4, 8, 8), (1, 2, 6, 6, 6)
LINE = (2, 4, 8)
PLACES = {1: LINE, 2: PICTURE, 3: VOLUME}
WIDTH = {1: 4, 2: 4, 3: 2}

CASES: dict[str, Case] = {
    **{
        name: Case(getattr(nn, name))
        for name in (
            "CELU",
            "ELU",
            "GELU",
            "Hardshrink",
            "Hardsigmoid",
            "Hardswish",
            "Hardtanh",
            "Identity",
            "LeakyReLU",
            "LogSigmoid",
            "Mish",
            "PReLU",
            "RReLU",
            "ReLU",
            "ReLU6",
            "SELU",
            "SiLU",
            "Sigmoid",
            "Softplus",
            "Softshrink",
            "Softsign",
            "Tanh",
            "Tanhshrink",
            "Dropout",
            "AlphaDropout",
            "Flatten",
        )
    },
    "GLU": Case(nn.GLU),
    "Threshold": Case(lambda: nn.Threshold(0.5, -1.0)),
    "Softmax": Case(lambda: nn.Softmax(-1)),
    "Softmin": Case(lambda: nn.Softmin(-1)),
    "LogSoftmax": Case(lambda: nn.LogSoftmax(-1)),
    "Softmax2d": Case(nn.Softmax2d, PICTURE),
    "Linear": Case(lambda: nn.Linear(6, 4)),
    "Bilinear": Case(_of_two(_bilinear), (2, 5)),
    "LazyLinear": Case(lambda: nn.LazyLinear(4)),
    "Unflatten": Case(lambda: nn.Unflatten(1, (2, 2)), LINE),
    "Embedding": Case(lambda: nn.Embedding(16, 4, padding_idx=1), (2, 5), 16),
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(16, 4), (2, 5), 16),
    "LayerNorm": Case(lambda: nn.LayerNorm(6)),
    "RMSNorm": Case(lambda: nn.RMSNorm(6)),
    "GroupNorm": Case(lambda: nn.GroupNorm(2, 4), PICTURE),
    "LocalResponseNorm": Case(lambda: nn.LocalResponseNorm(2), PICTURE),
    "CrossMapLRN2d": Case(lambda: nn.CrossMapLRN2d(2), PICTURE),
    "ChannelShuffle": Case(lambda: nn.ChannelShuffle(2), PICTURE),
    "PixelShuffle": Case(lambda: nn.PixelShuffle(2), PICTURE),
    "PixelUnshuffle": Case(lambda: nn.PixelUnshuffle(2), PICTURE),
    "Fold": Case(lambda: nn.Fold((4, 4), 2, stride=1), (2, 8, 9)),
    "Unfold": Case(lambda: nn.Unfold(2), PICTURE),
    "Upsample": Case(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), PICTURE),
    "UpsamplingBilinear2d": Case(lambda: nn.UpsamplingBilinear2d(scale_factor=2), PICTURE),
    "UpsamplingNearest2d": Case(lambda: nn.UpsamplingNearest2d(scale_factor=2), PICTURE),
    "ZeroPad1d": Case(lambda: nn.ZeroPad1d(1), LINE),
    "ZeroPad2d": Case(lambda: nn.ZeroPad2d(1), PICTURE),
    "ZeroPad3d": Case(lambda: nn.ZeroPad3d(1), VOLUME),
    "FeatureAlphaDropout": Case(nn.FeatureAlphaDropout, PICTURE),
    "SyncBatchNorm": Case(lambda: nn.SyncBatchNorm(4), PICTURE),
    "RNN": Case(lambda: nn.RNN(6, 4, batch_first=True)),
    "GRU": Case(lambda: nn.GRU(6, 4, batch_first=True)),
    "LSTM": Case(lambda: nn.LSTM(6, 4, batch_first=True)),
    "RNNCell": _cell(lambda: nn.RNNCell(4, 3)),
    "GRUCell": _cell(lambda: nn.GRUCell(4, 3)),
    "LSTMCell": _cell(lambda: nn.LSTMCell(4, 3)),
    "Sequential": Case(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh())),
    "MultiheadAttention": Case(_attention, (2, 5, 8)),
    "TransformerEncoderLayer": Case(_encoder, (2, 5, 8)),
    "TransformerEncoder": Case(lambda: nn.TransformerEncoder(_encoder(), 2), (2, 5, 8)),
    "TransformerDecoderLayer": Case(_decoder(False), (2, 5, 8)),
    "TransformerDecoder": Case(_decoder(True), (2, 5, 8)),
    "Transformer": Case(_transformer, (2, 5, 8)),
    "CosineSimilarity": Case(_of_two(nn.CosineSimilarity), (4, 5)),
    "PairwiseDistance": Case(_of_two(nn.PairwiseDistance), (4, 5)),
    "AdaptiveLogSoftmaxWithLoss": Case(
        _loss(lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8]), lambda x: torch.arange(x.shape[0]) % 12), (12, 6)
    ),
    **{f"Conv{k}d": Case(lambda k=k: getattr(nn, f"Conv{k}d")(WIDTH[k], 4, 3, 2, 1), PLACES[k]) for k in PLACES},
    **{
        f"ConvTranspose{k}d": Case(
            lambda k=k: getattr(nn, f"ConvTranspose{k}d")(WIDTH[k], 4, 3, 2, 1, output_padding=1), PLACES[k]
        )
        for k in PLACES
    },
    **{f"LazyConv{k}d": Case(lambda k=k: getattr(nn, f"LazyConv{k}d")(4, 3), PLACES[k]) for k in PLACES},
    **{
        f"LazyConvTranspose{k}d": Case(lambda k=k: getattr(nn, f"LazyConvTranspose{k}d")(4, 3), PLACES[k])
        for k in PLACES
    },
    **{f"BatchNorm{k}d": Case(lambda k=k: getattr(nn, f"BatchNorm{k}d")(WIDTH[k]), PLACES[k]) for k in PLACES},
    **{f"LazyBatchNorm{k}d": Case(getattr(nn, f"LazyBatchNorm{k}d"), PLACES[k]) for k in PLACES},
    **{
        f"InstanceNorm{k}d": Case(lambda k=k: getattr(nn, f"InstanceNorm{k}d")(WIDTH[k], affine=True), PLACES[k])
        for k in PLACES
    },
    **{f"LazyInstanceNorm{k}d": Case(getattr(nn, f"LazyInstanceNorm{k}d"), PLACES[k]) for k in PLACES},
    **{f"AvgPool{k}d": Case(lambda k=k: getattr(nn, f"AvgPool{k}d")(3, 2, 1), PLACES[k]) for k in PLACES},
    **{f"MaxPool{k}d": Case(lambda k=k: getattr(nn, f"MaxPool{k}d")(3, 2, 1), PLACES[k]) for k in PLACES},
    **{f"LPPool{k}d": Case(lambda k=k: getattr(nn, f"LPPool{k}d")(2, 2), PLACES[k]) for k in PLACES},
    **{f"MaxUnpool{k}d": Case(_unpool(k), PLACES[k]) for k in PLACES},
    **{
        f"Adaptive{kind}Pool{k}d": Case(lambda k=k, kind=kind: getattr(nn, f"Adaptive{kind}Pool{k}d")(3), PLACES[k])
        for k in PLACES
        for kind in ("Avg", "Max")
    },
    **{
        f"FractionalMaxPool{k}d": Case(lambda k=k: getattr(nn, f"FractionalMaxPool{k}d")(2, 3), PLACES[k])
        for k in (2, 3)
    },
    **{f"Dropout{k}d": Case(getattr(nn, f"Dropout{k}d"), PLACES[k]) for k in PLACES},
    **{
        f"{kind}Pad{k}d": Case(
            lambda k=k, kind=kind: getattr(nn, f"{kind}Pad{k}d")(*((2, 1.5) if kind == "Constant" else (2,))), PLACES[k]
        )
        for k in PLACES
        for kind in ("Constant", "Reflection", "Replication", "Circular")
    },
    "BCELoss": Case(_probability, (3, 4)),
    "BCEWithLogitsLoss": Case(_loss(nn.BCEWithLogitsLoss, _half), (3, 4)),
    "CTCLoss": Case(_ctc, (6, 2, 4)),
    "CosineEmbeddingLoss": Case(_triplet_of_two, (4, 5)),
    "CrossEntropyLoss": Case(_loss(lambda: nn.CrossEntropyLoss(label_smoothing=0.1), _classes), (4, 5)),
    "GaussianNLLLoss": Case(_gaussian, (4, 5)),
    "HingeEmbeddingLoss": Case(_loss(nn.HingeEmbeddingLoss, _signs), (4, 5)),
    "HuberLoss": Case(_loss(nn.HuberLoss, _half), (4, 5)),
    "KLDivLoss": Case(_loss(lambda: nn.KLDivLoss(reduction="batchmean"), _half), (4, 5)),
    "L1Loss": Case(_loss(nn.L1Loss, _half), (4, 5)),
    "MSELoss": Case(_loss(nn.MSELoss, _half), (4, 5)),
    "MarginRankingLoss": Case(_ranking, (4, 5)),
    "MultiLabelMarginLoss": Case(
        _loss(nn.MultiLabelMarginLoss, lambda x: torch.tensor([[1, 3, -1, 0, 2]] * x.shape[0])), (4, 5)
    ),
    "MultiLabelSoftMarginLoss": Case(_loss(nn.MultiLabelSoftMarginLoss, _half), (4, 5)),
    "MultiMarginLoss": Case(_loss(nn.MultiMarginLoss, _classes), (4, 5)),
    "NLLLoss": Case(_loss(nn.NLLLoss, _classes), (4, 5)),
    "NLLLoss2d": Case(_loss(nn.NLLLoss, lambda x: torch.zeros(2, 8, 8, dtype=torch.long)), PICTURE),
    "PoissonNLLLoss": Case(_loss(nn.PoissonNLLLoss, _half), (4, 5)),
    "SmoothL1Loss": Case(_loss(nn.SmoothL1Loss, _half), (4, 5)),
    "SoftMarginLoss": Case(_loss(nn.SoftMarginLoss, _signs), (4, 5)),
    "TripletMarginLoss": Case(_triplet(nn.TripletMarginLoss()), (4, 5)),
    "TripletMarginWithDistanceLoss": Case(_triplet(nn.TripletMarginWithDistanceLoss()), (4, 5)),
    "LinearCrossEntropyLoss": Case(
        _loss(lambda: nn.LinearCrossEntropyLoss(6, 5), lambda x: torch.arange(x.shape[0]) % 5), (4, 6)
    ),
}


NO_LAYERS = {
    "Buffer": "a tensor",
    "LinearCrossEntropyOptions": "options, no layer",
    "Container": "an old name without forward",
    "DataParallel": "several devices",
    "Module": "the base class",
    "ModuleDict": "a container without forward",
    "ModuleList": "a container without forward",
    "Parameter": "a tensor",
    "ParameterDict": "a container without forward",
    "ParameterList": "a container without forward",
    "RNNBase": "a base class without forward of its own",
    "RNNCellBase": "a base class without forward",
    "UninitializedBuffer": "a tensor",
    "UninitializedParameter": "a tensor",
}


class Weighted(nn.Module):
    """The sum of a layer's outputs with fixed weights; a trained shift is added to its input."""

    def __init__(self, layer: nn.Module, case: Case) -> None:
        super().__init__()
        self.layer = layer
        self.shift = None if case.integers else nn.Parameter(torch.zeros(case.shape))

    def forward(self, x: Any, _: Any) -> Any:
        output = self.layer(x if self.shift is None else x + self.shift)
        total = 0.0
        for k, one in enumerate(tree_leaves(output)):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                weights = torch.cos(torch.arange(one.numel(), dtype=one.dtype) + k).reshape(one.shape)
                total = total + (one * weights).sum()
        return total


def batches(case: Case) -> list[np.ndarray]:
    """Random numbers; numbers at kinks and ties; large ones."""
    rng = np.random.default_rng(0)
    if case.integers:
        return [rng.integers(0, case.integers, case.shape).astype(np.int32) for _ in range(2)]
    kinks = np.array([-6, -3, -1, -0.5, 0, 0.5, 1, 3, 6, 0.3, 0], np.float32)
    large = np.array([-200, -30, 30, 200, 0.25, -0.75], np.float32)
    return [
        rng.normal(size=case.shape).astype(np.float32) * 2,
        rng.choice(kinks, case.shape),
        rng.choice(large, case.shape),
    ]


def execute(text: str | bytes, values: list[np.ndarray]) -> list[np.ndarray]:
    """Run a StableHLO program with XLA."""
    program = reference._compile(text if isinstance(text, str) else text.decode(), jax.devices("cpu")[0])
    held = [jax.device_put(np.ascontiguousarray(one)) for one in values]
    return [np.asarray(one[0]) for one in program.execute_sharded(held).disassemble_into_single_device_arrays()]


def compare(name: str, *, training: bool) -> tuple[str, str]:
    """Return the outcome of a layer (`equal`, `refused`, `unclear` or `silent`) and a sentence."""
    case = CASES[name]
    torch.manual_seed(0)
    data = batches(case)
    blank = np.zeros(1, np.int32)
    layer = case.make()
    if any(isinstance(one, nn.parameter.UninitializedParameter) for one in layer.parameters()) or "Lazy" in name:
        layer(torch.from_numpy(data[0]))
    module = Weighted(layer, case).train(training)
    try:
        loss_fn, params, batch = from_torch(module, (data[0], blank))
        model = export_loss(loss_fn, params, batch)
        values = model.initial("param")
        held = {**values, **model.initial("buffer"), **model.initial("statistic")}
        places = [i for i, argument in enumerate(model.manifest.arguments) if argument.role == "param"]
        text = value_and_gradients(model.stablehlo, places)
    except (CompileError, UserError) as error:
        told = " ".join(str(error).split())
        helps = any(word in told for word in (".py:", "aten::", "at stablehlo", "higher-order"))
        return ("refused" if helps else "unclear"), told[:400]
    worst = 0.0
    author = author_of(loss_fn)
    assert author is not None
    keys = [np.array([0, 7], np.uint32)] * len(model.manifest.of_role("key"))
    ordered = [held[argument.name] for argument in model.manifest.arguments if argument.name in held]
    for k, x in enumerate(data):
        scale = 1.0 if case.integers else max(1.0, float(np.abs(x).max()))
        goal, wanted = author.loss_and_gradients(held, (x, blank, *keys))
        loss, *slopes = execute(text, [*ordered, x, blank, *keys])
        if not close(float(loss), goal):
            return "silent", f"batch {k}: the loss is {loss}, PyTorch's {goal}"
        largest = max(float(np.abs(one[np.isfinite(one)]).max(initial=0)) for one in wanted.values() if one is not None)
        for key, slope in zip(values, slopes, strict=True):
            expected = wanted[key]
            if expected is None:
                return "silent", f"{key} is trained and has no gradient in PyTorch"
            error = distance(slope, expected, max(FLOOR * scale, 1e-3 * largest))
            worst = max(worst, error)
            if error > TOLERANCE:
                place = np.unravel_index(np.nanargmax(np.abs(slope - expected)), slope.shape) if slope.shape else ()
                return "silent", (
                    f"batch {k}: gradient of {key} at {list(map(int, place))}: {slope[place]} for {expected[place]}"
                )
    return "equal", f"{worst:.0e}"


def close(a: float, b: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) == math.isnan(b)
    return a == b or abs(a - b) <= 1e-4 * max(1.0, abs(b))


def distance(found: np.ndarray, expected: np.ndarray, least: float) -> float:
    """Largest difference in units of the largest expected number, or of `least` if that is larger; infinite where one
    is NaN and the other is not.
    """
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    scale = max(float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0)), least, 1e-6)
    error = np.where(same, 0, np.abs(found - expected) / scale)
    return float("inf") if np.isnan(error).any() else float(np.max(error, initial=0))


def public_classes() -> list[str]:
    """Names of the public classes of `torch.nn`."""
    return sorted(n for n, one in vars(nn).items() if isinstance(one, type) and not n.startswith("_"))


def row(name: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """Return a layer's outcomes by mode, and print them."""
    warnings.filterwarnings("ignore")
    found = {}
    for mode in ("evaluation", "training"):
        try:
            found[mode] = compare(name, training=mode == "training")
        except Exception as error:  # noqa: BLE001 - a row of the table
            found[mode] = "unclear", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(name, *(f"{mode}: {outcome} ({text})" for mode, (outcome, text) in found.items()), sep="  ", flush=True)
    return name, found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    unlisted = [name for name in public_classes() if name not in CASES and name not in NO_LAYERS]
    if unlisted:
        print("torch.nn has classes without a case:", ", ".join(unlisted))
    start = time.monotonic()
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(row, given.names or sorted(CASES)))
    text = table(rows, time.monotonic() - start)
    print(text)
    if given.update:
        update(text)
    return any(one[mode][0] in ("silent", "unclear") for _, one in rows for mode in one) or bool(unlisted)


def table(rows: list[tuple[str, dict[str, tuple[str, str]]]], seconds: float) -> str:
    """Return the counts, and a line for each layer that is not equal."""
    lines = [
        f"`python bench/meaning/torch_cases.py --update`: torch {torch.__version__}, {platform.machine()}, "
        f"{seconds:.0f} s, {time.strftime('%Y-%m-%d')}. {len(rows)} layers; {len(NO_LAYERS)} public names of "
        f"`torch.nn` are none: {', '.join(f'{name} ({why})' for name, why in NO_LAYERS.items())}.",
        "",
        "| mode | layers | equal | refused with a line | error without a line | silently different |",
        "|---|---|---|---|---|---|",
    ]
    for mode in ("evaluation", "training"):
        outcomes = [found[mode][0] for _, found in rows]
        counts = [outcomes.count(kind) for kind in ("equal", "refused", "unclear", "silent")]
        lines.append(f"| {mode} | {len(rows)} | {' | '.join(map(str, counts))} |")
    lines += ["", "| layer | mode | outcome | why |", "|---|---|---|---|"]
    for name, found in rows:
        for mode, (outcome, text) in found.items():
            if outcome != "equal":
                short = text.replace("|", "/")
                for folder in (Path(torch.__file__).parents[1], Path(__file__).parents[2]):
                    short = short.replace(f"{folder}/", "")
                lines.append(f"| {name} | {mode} | {outcome} | {short} |")
    return "\n".join(lines)


def update(text: str) -> None:
    """Put the table between its marks in the results."""
    page = RESULTS.read_text() if RESULTS.exists() else "# Meaning\n"
    if START not in page:
        page += f"\n## Layers of PyTorch\n\n{START}\n{END}\n"
    before, _, rest = page.partition(START)
    RESULTS.write_text(f"{before}{START}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    sys.exit(main())
