"""`planetary generate`: continue a text with the newest checkpoint of a run."""

from __future__ import annotations

import argparse
import codecs
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import command_parser
from planetary.cli.errors import EXIT_OK

if TYPE_CHECKING:
    from planetary.data.tokenizer import Tokenizer


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "generate",
        description="""
            Continue a text with the newest checkpoint of a run. The text is printed as it is
            drawn. Equal arguments print equal text.
        """,
        examples=[
            "planetary generate runs/stdlib --prompt 'def '",
            "planetary generate runs/stdlib --prompt 'import ' --tokens 500 --temperature 0.6 --seed 7",
            "planetary generate runs/parallax-tiny --experts composer:0 --prompt 'def '",
            "planetary generate merged --checkpoint merged/merged.safetensors --prompt 'def '",
        ],
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--prompt", required=True, help='text to continue; "-" reads it from standard input')
    parser.add_argument(
        "--tokens", type=int, default=256, metavar="N", help="most tokens to draw (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="lower is more predictable, 0 always takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw from the K likeliest tokens only (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="not the newest one: its folder, or a safetensors file"
    )
    parser.add_argument(
        "--experts",
        default="real",
        metavar="WHICH",
        help="of a mixture over composers, in its newest state: real, surrogates in place of all of them, or "
        "composer:N, that composer's own with surrogates in place of the others (default: %(default)s)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.core.errors import UserError

    if args.tokens < 1:
        raise UserError(f"--tokens must be at least 1, found {args.tokens}")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt

    import itertools

    from planetary.cli.sampling import Sampling, continue_tokens
    from planetary.cli.trained_model import load_trained

    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, seed=args.seed)
    model = load_trained(args.run, args.checkpoint, args.experts)
    ids = [int(token) for token in model.tokenizer.encode(prompt.encode())]
    size = model.tokenizer.vocab_size  # a model may have more tokens than there is text for

    def logits(params: Any, tokens: Any) -> Any:
        return model.logits(params, tokens)[..., :size]

    drawn = continue_tokens(logits, model.params, ids, window=model.window, sampling=sampling)
    end = model.tokenizer.end_of_document
    until_end = itertools.takewhile(lambda token: token != end, itertools.islice(drawn, args.tokens))
    sys.stdout.write(prompt)
    for piece in text_pieces(until_end, model.tokenizer):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return EXIT_OK


def text_pieces(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield text as tokens arrive. A character that is spread over several tokens is held back until it is
    whole.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ids: list[int] = []
    given = 0
    data = b""
    for token in tokens:
        ids.append(token)
        # Some tokenizers join words differently depending on what follows, so the whole is decoded each time.
        data = tokenizer.decode(ids)
        whole = len(data) - len(_unfinished(data))
        if whole > given:
            yield decoder.decode(data[given:whole])
            given = whole
    yield decoder.decode(data[given:], final=True)


def _unfinished(data: bytes) -> bytes:
    """Return the replacement characters at the end of decoded text, which stand for a character cut in
    two.
    """
    mark = "\ufffd".encode()
    end = len(data)
    while data[:end].endswith(mark):
        end -= len(mark)
    return data[end:]
