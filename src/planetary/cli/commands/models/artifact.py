"""`planetary artifact`: list, check and clear away the compiled steps that this machine keeps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planetary.cli.command_table import action_parser, command_parser
from planetary.cli.exit_codes import EXIT_OK

if TYPE_CHECKING:
    from planetary.artifacts.store import BlobStore
    from planetary.compiler.backends.artifact_manifest import ArtifactManifest
    from planetary.core.step import StepSpec
    from planetary.runtime.executor import Executor

_CACHE_HELP = "compiled steps (default: $PLANETARY_CACHE, else ~/.cache/planetary)"
_SHORTEST = 4  # hex digits of a digest that name an artifact


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser = command_parser(
        subparsers,
        "artifact",
        description="""
            Compiled training steps, and the programs of mixtures, are kept under the sha256 of their bytes, each with
            a manifest: what it was made from and for, the compiler and its flags, and what its functions take and
            return. ARTIFACT is a file, or the first digits of a digest.
        """,
        examples=[
            "planetary artifact show",
            "planetary artifact verify 3f2a9c",
            "planetary artifact gc --unused-for 30d --dry-run",
        ],
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = _action(actions, "show", "list the artifacts, or print one's manifest", "planetary artifact show 3f2a9c")
    show.add_argument("artifact", nargs="?", metavar="ARTIFACT", help="default: list all")
    show.add_argument("--json", action="store_true", help="print JSON and nothing else")
    verify = _action(
        actions,
        "verify",
        "check an artifact's bytes, label and manifest, and, where it runs here, what it computes of random numbers "
        "against XLA",
        "planetary artifact verify step.vmfb",
    )
    verify.add_argument("artifact", metavar="ARTIFACT", help="a file, or the first digits of a digest")
    gc = _action(
        actions,
        "gc",
        "remove what was not used for a while, artifacts of another compiler version, and leftovers",
        "planetary artifact gc --dry-run",
    )
    gc.add_argument("--unused-for", default="30d", metavar="TIME", help="such as 24h or 30d (default: %(default)s)")
    gc.add_argument("--dry-run", action="store_true", help="list the removals, and remove nothing")
    return parser


def _action(actions: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    parser = action_parser(actions, name, summary, example)
    parser.add_argument("--cache", type=Path, metavar="DIR", help=_CACHE_HELP)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from planetary.artifacts.store import BlobStore
    from planetary.core.places import cache_folder

    store = BlobStore(cache_folder(args.cache) / "blobs")
    if args.action == "gc":
        return _gc(store, args)
    if args.action == "verify":
        return _verify(store, args.artifact)
    return _show(store, args.artifact, args.json) if args.artifact else _list(store, args.json)


# --- show ---------------------------------------------------------------------------------------------------


def _manifests(store: BlobStore) -> list[ArtifactManifest]:
    from planetary.fleet.preparation.artifact_list import manifests

    return manifests(store)


def _list(store: BlobStore, as_json: bool) -> int:
    import msgspec

    from planetary.monitor.human_numbers import count, size

    manifests = _manifests(store)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(manifests), indent=2).decode())
        return EXIT_OK
    rows = [("digest", "model", "parameters", "target", "size", "compiler", "verified")]
    rows += [
        (
            m.artifact[:12],
            m.signature.model,
            count(m.spec.param_count) if m.spec is not None else "-",
            f"{m.backend}:{m.target}",
            size(m.nbytes),
            f"IREE {m.compiler}" if m.compiler else "-",
            "yes" if _report(store, m.artifact) is not None else "no",
        )
        for m in manifests
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print(f"{len(manifests)} artifact{'' if len(manifests) == 1 else 's'} in {store.root}")
    return EXIT_OK


def _report(store: BlobStore, artifact: str) -> Any:
    from planetary.compiler.check.verification_report import read_report

    return read_report(store, artifact)


def _find(store: BlobStore, text: str) -> tuple[bytes, str, ArtifactManifest | None]:
    """Return an artifact's bytes, digest, and manifest if the store has it."""
    from planetary.artifacts.store import digest_of
    from planetary.compiler.backends.artifact_manifest import read_manifest
    from planetary.core.errors import ResourceError, UserError

    path = Path(text)
    if path.is_file():
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ResourceError(f"cannot read {path}: {error.strerror or error}") from error
        digest = digest_of(data)
        return data, digest, read_manifest(store, digest)
    wanted = text.lower()
    if len(wanted) < _SHORTEST or set(wanted) - set("0123456789abcdef"):
        raise UserError(
            f"there is no file {text!r}, and it is no digest: expected at least {_SHORTEST} hex digits; "
            "`planetary artifact show` lists the artifacts"
        )
    found = [manifest for manifest in _manifests(store) if manifest.artifact.startswith(wanted)]
    if len(found) != 1:
        which = ", ".join(manifest.artifact[:16] for manifest in found) or "none"
        raise UserError(f"{text!r} names {len(found)} artifacts of {store.root} ({which}), expected exactly one")
    return store.get(found[0].artifact), found[0].artifact, found[0]


def _show(store: BlobStore, text: str, as_json: bool) -> int:
    import msgspec

    from planetary.core.artifact_label import read_label
    from planetary.core.errors import UserError
    from planetary.monitor.human_numbers import count, size

    data, digest, manifest = _find(store, text)
    if manifest is None:
        label = read_label(data)
        if as_json:
            print(msgspec.json.encode({"artifact": digest, "label": label}).decode())
            return EXIT_OK
        print(f"sha256 {digest}, {size(len(data))}")
        print(f"made for {label.backend}:{label.target} {label.features} by IREE {label.iree}")
        print(f"from StableHLO {label.stablehlo}; its manifest is not in {store.root}")
        return EXIT_OK
    report = _report(store, digest)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"manifest": manifest, "verified": report}), indent=2).decode())
        return EXIT_OK
    spec, program = manifest.spec, manifest.program
    if manifest.artifact != digest:
        raise UserError(f"the manifest of {digest[:12]} is about {manifest.artifact[:12]}")
    if spec is not None:
        print(f"{spec.model}: {count(spec.param_count)} parameters")
    elif program is not None:
        print(f"{program.model}: {len(program.functions)} functions that are called one by one")
    print(f"sha256     {digest}, {size(manifest.nbytes)}")
    print(f"made for   {manifest.backend}:{manifest.target} {manifest.features}".rstrip())
    print(f"made by    {f'IREE {manifest.compiler} {chr(32).join(manifest.flags)}' if manifest.compiler else 'export'}")
    print(f"made from  StableHLO {manifest.signature.stablehlo_digest}")
    print(f"verified   {report.summary if report is not None else 'no'}")
    for note in manifest.notes if report is None else ():
        print(f"computes   {note}")
    for name, function in program.functions.items() if program is not None else ():
        print(f"  {name}: {len(function.arguments)} arguments, {len(function.results)} results")
    if spec is None:
        return EXIT_OK
    for role, tensors in (("param", spec.params), ("buffer", spec.buffers), ("state", spec.opt_state)):
        for tensor in tensors:
            print(f"  {role:<7}{tensor.dtype}{list(tensor.shape)} {tensor.name}")
    for tensor in spec.batch:
        print(f"  batch  {tensor.dtype}{list(tensor.shape)} {tensor.name}")
    return EXIT_OK


# --- verify -------------------------------------------------------------------------------------------------


def _verify(store: BlobStore, text: str) -> int:
    import os

    from planetary.core.artifact_label import read_label
    from planetary.core.errors import TrustError, UserError

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    data, digest, manifest = _find(store, text)
    if manifest is None:
        raise UserError(
            f"{text} has the sha256 {digest}, of which {store.root} has no manifest: nothing says what it should "
            "compute; compile the model here (`planetary compile`) and compare the digests"
        )
    if manifest.compiler:
        label = read_label(data)
        for what, found, expected in (
            ("backend", label.backend, manifest.backend),
            ("target", label.target, manifest.target),
            ("CPU", label.features, manifest.features),
            ("compiler", label.iree, manifest.compiler),
            ("StableHLO", label.stablehlo, manifest.signature.stablehlo_digest),
        ):
            if found != expected:
                raise TrustError(f"{text} is not what its manifest says: {what} is {found!r}, expected {expected!r}")
    portable = store.get(manifest.signature.stablehlo_digest)
    print(f"bytes, label and manifest agree: sha256 {digest}")
    print(_execute(manifest, data, portable))
    return EXIT_OK


def _execute(manifest: ArtifactManifest, data: bytes, portable: bytes) -> str:
    """Run a step on random numbers, if the artifact runs here, and return a line about the results."""
    import tempfile

    import numpy as np

    from planetary.compiler.backends.iree import Artifact
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.check.verify import runs_here, verify_artifact
    from planetary.compiler.step.train_step import TrainStep
    from planetary.core.tensors import host_dtype
    from planetary.fleet.preparation.program_compiling import compared, reference_from_xla
    from planetary.runtime.executor import open_executor
    from planetary.runtime.host import host_features

    spec = manifest.spec
    backend = "pjrt:cpu" if manifest.backend == "pjrt" else manifest.backend
    target, local = Target(backend, manifest.target, manifest.features), Target("cpu", "host", host_features())
    if not runs_here(target, local):
        return f"it was made for {backend}:{manifest.target}, which is not this machine's CPU, and was not run"
    if manifest.program is not None:
        if target.is_pjrt:
            return "XLA runs it as it is; there is nothing to compare it with"
        reference = reference_from_xla(portable, manifest.program)
        found = compared(reference, manifest.program, data, manifest.artifact, target)
        return f"all functions on random numbers: {found.summary}"
    assert spec is not None
    rng = np.random.default_rng(0)
    buffers = {b.name: rng.standard_normal(b.shape).astype(host_dtype(b.dtype)) for b in spec.buffers}
    with tempfile.TemporaryDirectory(prefix="planetary-artifact-") as folder:
        path = Path(folder) / "artifact"

        def open_runner(artifact: Artifact, spec: StepSpec) -> Executor:
            path.write_bytes(artifact.data)  # not always `data`: the search for a wrong operation compiles pieces
            return open_executor(path, spec, backend=artifact.target.backend)

        report = verify_artifact(
            TrainStep("", spec, portable),
            Artifact(data, manifest.artifact, "", target, cached=True),
            open_runner,
            params={p.name: p.zeros() for p in spec.params},
            buffers=buffers,
            local=local,
        )
    return f"a step on random numbers: {report.summary}"


# --- gc -----------------------------------------------------------------------------------------------------


def _gc(store: BlobStore, args: argparse.Namespace) -> int:
    from planetary.artifacts.collect import find_garbage
    from planetary.cli.option_values import seconds
    from planetary.compiler.backends.pipeline import compiler_version
    from planetary.monitor.human_numbers import size

    unused = seconds(args.unused_for, "--unused-for")
    outdated = {m.artifact for m in _manifests(store) if m.compiler and m.compiler != compiler_version()}
    garbage = find_garbage(store, unused_s=unused, outdated=outdated)
    if not args.dry_run:
        garbage.remove()
    verb = "would be removed from" if args.dry_run else "removed from"
    print(f"{len(garbage.blobs)} files ({size(garbage.nbytes)}) and {len(garbage.links)} links {verb} {store.root}")
    return EXIT_OK
