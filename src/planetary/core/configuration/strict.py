"""From plain tables to a typed `Config`: nothing unknown, nothing of the wrong type, nothing out of range.

The rules come from the types in `schema`; this file only words the errors.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from planetary.core.bounded_text import toml_tables
from planetary.core.configuration.outer_rule import ADAM_RATE, MOST_ADAM_RATE, RULE_KEYS, chosen_adam, chosen_rule
from planetary.core.configuration.ranges import ExtensionPoint, convert_value, describe, extension_of, show_found
from planetary.core.configuration.schema import ALIASES, Config, DataConfig, OuterConfig, SyncConfig
from planetary.core.configuration.sinks import WebhookSink
from planetary.core.errors import UserError, did_you_mean
from planetary.core.extension_points import EXTENSION_POINTS
from planetary.core.printable import one_line

log = logging.getLogger(__name__)


def _struct_fields(struct: type[msgspec.Struct]) -> dict[str, inspect.Field]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.name: field for field in info.fields}


def _section_type(section: inspect.Field) -> type[msgspec.Struct]:
    assert isinstance(section.type, inspect.StructType)
    return section.type.cls


MOST_NAME = 255
"""Bytes of a file's name; no file system has longer ones."""
WARMUP_SHARE = 5
"""A warm-up too long for the run becomes one part in so many of the run."""

SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    name: _section_type(field)
    for name, field in _struct_fields(Config).items()
    if isinstance(field.type, inspect.StructType)
}
"""Section name -> type, in the order of the file."""


def _kinds_of(entries: inspect.Field) -> dict[str, type[msgspec.Struct]]:
    assert isinstance(entries.type, inspect.VarTupleType)
    assert isinstance(entries.type.item_type, inspect.UnionType)
    structs = [kind for kind in entries.type.item_type.types if isinstance(kind, inspect.StructType)]
    return {str(struct.tag): struct.cls for struct in structs}


LISTS: Mapping[str, Mapping[str, type[msgspec.Struct]]] = {
    name: _kinds_of(field) for name, field in _struct_fields(Config).items() if name not in SECTIONS
}
"""Name of an array of tables -> the tables' types by their `kind`."""

FIELDS: Mapping[str, Mapping[str, inspect.Field]] = {name: _struct_fields(struct) for name, struct in SECTIONS.items()}
"""Section name -> key -> type and default of the key."""


EXTENSION_KEYS: Mapping[tuple[str, str], ExtensionPoint] = {
    (section, key): point
    for section, fields in FIELDS.items()
    for key, field in fields.items()
    if (point := extension_of(field.type)) is not None
}
"""Section and key -> the kind of object the key names."""


def _meant_key(section: str, key: str) -> str:
    """The same word in another section beats a similar one in this section."""
    elsewhere = [f"{name}.{key}" for name, fields in FIELDS.items() if key in fields]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return did_you_mean(key, list(FIELDS[section]), f"{section}.{{}}")


def check_known(section: str, key: str | None, origin: str) -> None:
    """Raise `UserError` unless `section` (and `key` in it, when given) exists; `origin` says where it was
    written.
    """
    if section in LISTS and key is None:
        return
    if section in LISTS:
        raise UserError(f'{origin}: {section} is an array of tables: {section} = [{{ kind = "…", … }}]')
    if section not in SECTIONS:
        homes = [f"[{name}] {section}" for name, fields in FIELDS.items() if section in fields]
        meant = f"; did you mean {homes[0]}?" if homes else did_you_mean(section, list(SECTIONS), "[{}]")
        raise UserError(f"{origin}: unknown section {section!r}{meant} Sections: {', '.join(SECTIONS)}")
    if key is not None and key not in FIELDS[section]:
        raise UserError(
            f"{origin}: unknown key {section}.{key}{_meant_key(section, key)} "
            f"Keys of [{section}]: {', '.join(FIELDS[section])}"
        )


def expects_text(section: str, key: str) -> bool:
    """Whether the value of a known key is a string."""
    kind = FIELDS[section][key].type
    return isinstance(kind.type if isinstance(kind, inspect.Metadata) else kind, inspect.StrType | inspect.LiteralType)


def takes_table(section: str, key: str) -> bool:
    """Whether the value of a known key is a table."""
    return isinstance(FIELDS[section][key].type, inspect.DictType)


def check_value(section: str, key: str, value: object, origin: str) -> Any:
    """Return `value` as the type the known key takes, or raise `UserError` with the expected type or range."""
    kind = FIELDS[section][key].type
    wanted = next(field.type for field in msgspec.structs.fields(SECTIONS[section]) if field.name == key)
    if isinstance(value, str):
        value = ALIASES.get((section, key), {}).get(value, value)
    try:
        found = convert_value(value, wanted)
    except ValueError:  # msgspec's own error is one
        raise UserError(f"{origin}: {section}.{key}: expected {describe(kind)}, found {show_found(value)}") from None
    if (point := extension_of(kind)) is not None:
        _check_object(point, found, f"{origin}: {section}.{key}")
    return found


def _check_object(point: ExtensionPoint, name: str, where: str) -> None:
    """Raise `UserError` for a name no object has. A file is not run: a configuration is only read here."""
    registry = EXTENSION_POINTS[point.kind]
    try:
        registry.check_name(name, point.also)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if name in point.also or not point.having:
        return
    declared = registry.declared(name)
    if declared is not None and not getattr(declared, point.having):
        able = [one for one, kind in registry.built_in.items() if getattr(kind, point.having)]
        known = ", ".join(f'"{one}"' for one in (*point.also, *able))
        raise UserError(
            f'{where}: expected {known}, or another {registry.kind} that declares {point.having}, found "{name}"'
        )


def value_from_text(section: str, key: str, text: str, origin: str) -> Any:
    """Return the value of a known key a text stands for, as `--set` and flags have it; quotes may be left out.

    Raises:
        UserError: it is of another type, or out of range; `origin` is where it was written.
    """
    return check_value(section, key, text_value(text.strip(), expects_text(section, key), False, origin), origin)


def text_value(text: str, wants_text: bool, free: bool, origin: str) -> object:
    """Return the TOML value a text stands for; quotes may be left out if `wants_text`, of a word if `free`."""
    quoted = text[:1] in {'"', "'"}
    if wants_text and not quoted:
        return text
    try:
        return toml_tables(f"value = {text}", origin)["value"]
    except UserError:
        if free and re.fullmatch(r"[A-Za-z_./~][\w./:~-]*", text):
            return text
        raise UserError(f"{origin}: {text!r} is no TOML value; strings need quotes: '\"{text}\"'") from None


def check_entries(name: str, value: object, origin: str) -> tuple[Any, ...]:
    """Return an array of tables as the structs that their kinds name, or raise `UserError`."""
    if not isinstance(value, list | tuple):
        raise UserError(f"{origin}: {name}: expected tables [[{name}]], found {show_found(value)}")
    return tuple(_check_entry(name, LISTS[name], entry, origin) for entry in value)


def _check_entry(name: str, kinds: Mapping[str, type[msgspec.Struct]], entry: object, origin: str) -> msgspec.Struct:
    if not isinstance(entry, Mapping):
        raise UserError(f"{origin}: {name}: expected a table [[{name}]], found {show_found(entry)}")
    kind = entry.get("kind", "")
    if kind not in kinds:
        found = f'found "{kind}"' if kind else "found none"
        raise UserError(f"{origin}: {name}: expected a kind, one of {', '.join(kinds)}; {found}")
    struct, values = kinds[kind], {}
    fields = _struct_fields(struct)
    for key, value in entry.items():
        if key == "kind":
            continue
        if key not in fields:
            raise UserError(
                f'{origin}: {name} of kind "{kind}": unknown key {key}{did_you_mean(key, list(fields))} '
                f"Its keys: {', '.join(fields)}"
            )
        wanted = next(field.type for field in msgspec.structs.fields(struct) if field.name == key)
        try:
            values[key] = convert_value(value, wanted)
        except ValueError:
            raise UserError(
                f'{origin}: {name} of kind "{kind}": {key}: expected {describe(fields[key].type)}, '
                f"found {show_found(value)}"
            ) from None
    return struct(**values)


def build_config(tables: Mapping[str, object], origin: str) -> Config:
    """Turn plain tables into a `Config`; absent keys get their defaults, and the warm-up is fitted to the run.

    Args:
        tables: section -> key -> value, as `tomllib` returns it.
        origin: where the values were written (a file's name, `"--set"`), for error texts.

    Raises:
        UserError: naming the first key that is unknown (and the nearest known one), of the wrong type, out of
            range, or in contradiction with another.
    """
    sections: dict[str, Any] = {}
    for section, table in tables.items():
        check_known(section, None, origin)
        if section in LISTS:
            sections[section] = check_entries(section, table, origin)
            continue
        if not isinstance(table, Mapping):
            raise UserError(f"{origin}: {section}: expected a section [{section}], found {show_found(table)}")
        values = {}
        for key, value in table.items():
            check_known(section, key, origin)
            values[key] = check_value(section, key, value, origin)
        sections[section] = SECTIONS[section](**values)
    config = _with_outer_rule(Config(**sections), tables.get("outer", {}))
    _check_together(config, origin)
    return with_fitting_warmup(config, config.total_inner_steps)


def _check_together(config: Config, origin: str) -> None:
    """Check the rules that involve several keys."""
    if config.fabric.quorum > config.fabric.workers:
        raise UserError(
            f"{origin}: fabric.quorum: expected at most fabric.workers ({config.fabric.workers}), found "
            f"{config.fabric.quorum}: such a round could never be closed by its quorum"
        )
    codec, down = config.sync.compression, config.sync.broadcast_compression
    if (overlap := config.sync.overlap) in ("eager", "async") and config.sync.topology == "star" and codec == "none":
        raise UserError(
            f'{origin}: sync.overlap: expected "none" with sync.compression = "none", found "{overlap}": workers '
            "begin at different places then, and end parameters do not tell how far they moved; set sync.compression, "
            'for example to "float32"'
        )
    _check_streaming(config, origin)
    if overlap != "none" and config.sync.topology == "ring" and config.sync.precision != "f32":
        raise UserError(
            f'{origin}: sync.overlap: expected "none" with sync.precision = "{config.sync.precision}", found '
            f'"{overlap}": '
            "that precision sums end parameters, and with overlap the next step is not taken from where they began; "
            'leave out sync.precision, or set it to "f32"'
        )
    plain = config.sync.topology == "ring" and config.sync.precision == "f32" and config.outer.merge == "mean"
    if config.sync.ring_compression != "none" and not plain:
        raise UserError(
            f'{origin}: sync.ring_compression: expected "none", found "{config.sync.ring_compression}": a ring '
            'quantises float32 deltas only; set sync.topology = "ring", sync.precision = "f32" and outer.merge = "mean"'
        )
    if config.outer.merge == "rda" and config.sync.topology == "ring" and config.sync.precision != "f32":
        raise UserError(
            f'{origin}: outer.merge: expected "mean" with sync.precision = "{config.sync.precision}", found "rda": '
            "that precision sums end parameters, whose directions are not known; leave out sync.precision, or set it "
            'to "f32"'
        )
    if codec != "none" and config.sync.topology != "star":
        raise UserError(
            f'{origin}: sync.compression: expected "none" with sync.topology = "{config.sync.topology}", found '
            f'"{codec}": only the star compresses; set sync.topology = "star", or begin with --preset ring'
        )
    if down != "none" and codec == "none":
        raise UserError(
            f'{origin}: sync.broadcast_compression: expected "none" with sync.compression = "none", found "{down}": '
            "end parameters of workers that have not all of the parameters would lose the rest; set sync.compression, "
            'for example to "float32"'
        )
    _check_relay(config, origin)
    _check_outer_optimizer(config, origin)
    if config.sync.compression == "sparse" and config.outer.merge in ("median", "trimmed_mean"):
        raise UserError(
            f'{origin}: outer.merge: expected "senders", "mean", "rda" or "centred_clipping" with sync.compression = '
            f'"sparse", found "{config.outer.merge}": most numbers of most workers are 0, and so would be the result'
        )
    radial = config.outer.merge == "rda" and config.sync.topology == "star"
    if overlap == "eager" and config.outer.merge != "mean" and not radial:
        raise UserError(
            f'{origin}: outer.merge: expected "mean", or in a star "rda", with sync.overlap = "eager", found '
            f'"{config.outer.merge}": a worker cannot tell its own part of it before the others\''
        )
    if config.outer.merge not in ("mean", "rda") and config.sync.topology != "star":
        raise UserError(
            f'{origin}: outer.merge: expected "mean" or "rda" with sync.topology = "{config.sync.topology}", found '
            f'"{config.outer.merge}": the workers of a ring sum their shares, and no worker sees one of them alone; '
            'set sync.topology = "star"'
        )
    name = config.run.name
    if name in {".", ".."} or "/" in name or "\\" in name or one_line(name) != name or len(name.encode()) > MOST_NAME:
        raise UserError(
            f"{origin}: run.name: expected the name of one folder, found {show_found(name)}; the place of "
            "the run folders is run.dir"
        )
    for sink in config.sinks:
        if isinstance(sink, WebhookSink) and bool(sink.url) == bool(sink.url_env):
            raise UserError(f'{origin}: sinks of kind "webhook": expected either url or url_env')
        if isinstance(sink, WebhookSink) and sink.url and not sink.url.startswith(("http://", "https://")):
            raise UserError(f'{origin}: sinks of kind "webhook": url: expected http:// or https://')
    _check_sources(config, origin)
    _check_federation(config, origin)
    if config.fabric.leases != "equal" and config.sync.overlap in ("streaming", "decoupled"):
        raise UserError(
            f'{origin}: fabric.leases: expected "equal" with sync.overlap = "{config.sync.overlap}", found '
            f'"{config.fabric.leases}": '
            "a fragment is mixed in after a fixed number of a lease's steps"
        )
    if config.train.batch_size % config.train.micro_batches:
        raise UserError(
            f"{origin}: train.micro_batches: expected a divisor of train.batch_size ({config.train.batch_size}), found "
            f"{config.train.micro_batches}: the parts of a batch must be equal"
        )


def _check_relay(config: Config, origin: str) -> None:
    sync, outer = config.sync, config.outer
    if sync.start_compression != "none" and (sync.compression == "none" or sync.overlap in ("streaming", "decoupled")):
        raise UserError(
            f'{origin}: sync.start_compression: expected "none" with sync.compression = "{sync.compression}" and '
            f'sync.overlap = "{sync.overlap}", found "{sync.start_compression}": a start in a codec is for '
            "workers that send deltas of all parameters"
        )
    if sync.broadcast_compression != "relay":
        return
    if sync.overlap not in ("none", "eager"):
        raise UserError(
            f'{origin}: sync.broadcast_compression: expected a codec or "none" with sync.overlap = "{sync.overlap}", '
            'found "relay": workers take the outer step from all updates of a whole round; set sync.overlap = "eager"'
        )
    if outer.optimizer != "nesterov":
        raise UserError(
            f'{origin}: sync.broadcast_compression: expected a codec or "none" with outer.optimizer = '
            f'"{outer.optimizer}", found "relay": workers take the outer step themselves, and newcomers would not have '
            "the moments; leave out outer.optimizer"
        )
    if outer.momentum != 0.0:
        raise UserError(
            f'{origin}: sync.broadcast_compression: expected a codec or "none" with outer.momentum = '
            f'{outer.momentum}, found "relay": workers take the outer step themselves, and newcomers would not have '
            'the velocity; set outer.momentum = 0.0, as with outer.merge = "rda"'
        )


def _check_outer_optimizer(config: Config, origin: str) -> None:
    outer, default = config.outer, OuterConfig()
    if outer.optimizer != "adam":
        for key in ("beta2", "epsilon"):
            if (found := getattr(outer, key)) != getattr(default, key):
                raise UserError(
                    f"{origin}: outer.{key}: expected {getattr(default, key)} with outer.optimizer = "
                    f'"{outer.optimizer}", found {found}: only adam uses it'
                )
        return
    if outer.learning_rate > MOST_ADAM_RATE:
        raise UserError(
            f'{origin}: outer.learning_rate: expected at most {MOST_ADAM_RATE} with outer.optimizer = "adam", found '
            f"{outer.learning_rate}: a coordinate moves about so far in a round, whatever the delta is; with nesterov "
            f"it is a part of a delta. Leave it out for {ADAM_RATE}"
        )
    if config.sync.overlap == "eager":
        raise UserError(
            f'{origin}: outer.optimizer: expected "nesterov" with sync.overlap = "eager", found "adam": a worker '
            "begins at its own part of the outer step, and a step that is divided by a root has no part of one worker"
        )


def _check_streaming(config: Config, origin: str) -> None:
    sync, default = config.sync, SyncConfig()
    users = {**dict.fromkeys(("fragments", "delay", "mixing"), ("streaming", "decoupled"))}
    users |= dict.fromkeys(("grace_factor", "grace_steps"), ("decoupled",))
    for key, overlaps in users.items():
        if sync.overlap not in overlaps and (found := getattr(sync, key)) != getattr(default, key):
            raise UserError(
                f'{origin}: sync.{key}: expected {getattr(default, key)} with sync.overlap = "{sync.overlap}", '
                f"found {found}: only {' and '.join(overlaps)} use it"
            )
    if sync.overlap not in ("streaming", "decoupled"):
        return
    if sync.topology != "star":
        raise UserError(
            f'{origin}: sync.overlap: expected "none", "eager" or "async" with sync.topology = "{sync.topology}", '
            f'found "{sync.overlap}": the workers of a ring have one outer state; set sync.topology = "star"'
        )
    if sync.overlap == "decoupled" and sync.compression == "none":
        raise UserError(
            f'{origin}: sync.overlap: expected "none" or "streaming" with sync.compression = "none", found '
            '"decoupled": end parameters of a worker that missed a version would undo it; set sync.compression, for '
            'example to "float32"'
        )
    if sync.delay > config.train.inner_steps:
        raise UserError(
            f"{origin}: sync.delay: expected at most train.inner_steps ({config.train.inner_steps}), found "
            f"{sync.delay}: a fragment is taken before the next one is sent"
        )
    if sync.fragments == 1 and sync.mixing == 0 and sync.delay == config.train.inner_steps:
        raise UserError(
            f"{origin}: sync.delay: expected fewer than train.inner_steps ({config.train.inner_steps}) with "
            "sync.fragments = 1 and sync.mixing = 0: the shared parameters would replace all that a lease has trained"
        )


def chosen_values(config: Config) -> dict[str, Any]:
    """Return the keys whose absent values were derived from others: "section.key" -> the value that reading gave it."""
    outer = _with_outer_rule(msgspec.structs.replace(config, outer=OuterConfig()), {}).outer
    chosen = {f"outer.{key}": getattr(outer, key) for key in RULE_KEYS}
    chosen["optimizer.warmup_steps"] = config.total_inner_steps // WARMUP_SHARE
    if ":" not in config.model.source:  # a compiled model has its own shape
        chosen |= {"train.batch_size": 0, "train.sequence_length": 0}
    return chosen


def _with_outer_rule(config: Config, given: object) -> Config:
    """Return `config` with the outer step for the run's length, unless the given table `[outer]` fixes one."""
    summed_ends = config.sync.topology == "ring" and config.sync.precision != "f32"
    replace, keys = msgspec.structs.replace, given.keys() if isinstance(given, Mapping) else set()
    rounds = config.train.rounds // config.sync.fragments
    if config.outer.optimizer == "adam":
        return replace(config, outer=replace(config.outer, **chosen_adam(rounds, keys)))
    if RULE_KEYS & keys or summed_ends or config.sync.overlap == "async" or config.moe.composers:
        return config
    chosen = chosen_rule(rounds)
    if chosen and config.sync.overlap == "eager":  # a worker's own part of a mean is known, of a mean direction not
        chosen["merge"] = "mean"
    return replace(config, outer=replace(config.outer, **chosen))


def _check_sources(config: Config, origin: str) -> None:
    data = config.data
    if not data.sources:
        return
    if data.source != DataConfig().source:
        raise UserError(
            f"{origin}: data.source and data.sources are both given: put {data.source} among the sources, or leave one "
            "of the two out"
        )
    if data.sampling != "random":
        raise UserError(
            f'{origin}: data.sampling: expected "random" with data.sources, found "{data.sampling}": a mixture has '
            "no order of its own"
        )
    names = [one.source for one in data.sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{origin}: data.sources names {twice[0]} twice: give it once, with the sum of its weights")
    if not all(math.isfinite(one.weight) for one in data.sources):
        raise UserError(f"{origin}: data.sources: expected weights that are finite numbers > 0")


def _check_federation(config: Config, origin: str) -> None:
    federation = config.federation
    if not federation.sites and not federation.hub:
        return
    where = f"{origin}: federation"
    if federation.sites and federation.hub:
        raise UserError(
            f"{where}: sites makes this a hub and hub = {federation.hub!r} a site of another one: leave one of the two "
            "out"
        )
    names = [site.name for site in federation.sites]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{where}.sites names {twice[0]} twice")
    divided = [site for site in federation.sites if site.data == "part"]
    parts = max(sum(not site.part for site in divided), *(site.part for site in divided), 0)
    if 0 < federation.parts < parts:
        raise UserError(
            f"{where}.parts: expected at least {parts}, one for each site that trains a part of the data, found "
            f"{federation.parts}"
        )


def with_fitting_warmup(config: Config, total: int) -> Config:
    """Return `config` with a shorter warm-up where the run, of `total` inner steps, would end within it; warns."""
    warmup = config.optimizer.warmup_steps
    if warmup < total:
        return config
    fitting = total // WARMUP_SHARE
    log.warning(
        "optimizer.warmup_steps: %d instead of %d, because the run has only %d inner steps and the learning rate would "
        "never reach its peak",
        fitting,
        warmup,
        total,
    )
    replace = msgspec.structs.replace
    return replace(config, optimizer=replace(config.optimizer, warmup_steps=fitting))
