from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planetary.core.config import apply_overrides, load_config, overrides_between
from planetary.core.configuration.derived import chosen_rule
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.keys import FIELDS
from planetary.core.configuration.ranges import describe
from planetary.core.configuration.schema import Config, OuterConfig, config_from_json
from planetary.core.configuration.sections import section_struct
from planetary.core.configuration.toml import to_toml, toml_document
from planetary.core.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(tmp_path: Path, text: str, name: str = "trial.toml") -> Config:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return load_config(tmp_path / name)


def test_an_empty_file_gives_the_defaults_and_its_own_name(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert config.run.name == "trial"
    expected = msgspec.structs.replace(Config(), outer=OuterConfig(**chosen_rule(Config().train.rounds)))
    assert msgspec.structs.replace(config, run=Config().run) == expected
    assert (config.outer.learning_rate, config.outer.momentum) == (1.0, 0.0)
    assert config.train.inner_state == "persist"


def test_values_are_taken_and_token_counts_follow(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "train = { rounds = 3, inner_steps = 5, batch_size = 2, sequence_length = 7 }\noptimizer.warmup_steps = 1",
    )
    assert config.tokens_per_batch == 2 * 8
    assert config.tokens_per_slice == 5 * 2 * 8
    assert config.targets_per_slice == 5 * 2 * 7
    assert config.total_inner_steps == 15


@pytest.mark.parametrize(
    ("text", "found", "meant"),
    [
        ("[train]\ninner_step = 5", "train.inner_step", "train.inner_steps"),
        ("[train]\nlearning_rate = 0.1", "train.learning_rate", "optimizer.learning_rate"),
        ("[otimizer]\nbeta1 = 0.9", "'otimizer'", "[optimizer]"),
        ("rounds = 5", "'rounds'", "[train] rounds"),
        ("[fabric]\nworker = 3", "fabric.worker;", "fabric.workers"),
    ],
)
def test_an_unknown_key_names_the_file_the_key_and_the_nearest(
    tmp_path: Path, text: str, found: str, meant: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert "trial.toml" in message
    assert found in message
    assert f"did you mean {meant}?" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nrounds = 0", ["train.rounds", "expected a whole number >= 1", "found 0 (whole number)"]),
        ("[train]\nrounds = 'ten'", ["train.rounds", "a whole number >= 1", "found 'ten' (string)"]),
        ("[train]\nrounds = true", ["train.rounds", "found true (boolean)"]),
        ("[train]\nrounds = 2.0", ["train.rounds", "found 2.0 (number)"]),
        ("[outer]\nmomentum = 1.0", ["outer.momentum", "a finite number >= 0 and < 1"]),
        ("[outer]\nlearning_rate = nan", ["outer.learning_rate", "a finite number > 0", "found nan"]),
        ("[outer]\nlearning_rate = inf", ["outer.learning_rate", "found inf"]),
        ("[optimizer]\nschedule = 'stairs'", ["unknown schedule 'stairs'", "constant, inverse-sqrt, cosine"]),
        ("[optimizer]\nnesterov = false", ["the key optimizer.nesterov was removed: momentum is always Nesterov's"]),
        ("[data]\nshuffle_leases = 1", ["data.shuffle_leases", "true or false", "found 1 (whole number)"]),
        ("[optimizer]\nno_decay = 'x'", ["optimizer.no_decay", "an array whose values are a string", "found 'x'"]),
        ("[train]\nremat = 'some'", ["train.remat", '"none", "blocks" or a string of bytes', "found 'some'"]),
        ("[train]\nbatch_size = 6\nmicro_batches = 4", ["train.micro_batches", "a divisor", "(6)", "found 4"]),
        ("[model]\nroles = { x = 'weight' }", ["model.roles", 'one of "buffer"', "(table)"]),
        ("[run]\nseed = -1", ["run.seed", "a whole number >= 0 and < 4294967296"]),
        ("[data]\nsource = ''", ["data.source", "a string that is not empty"]),
        ("train = 3", ["expected a section [train]", "found 3"]),
        ("[fabric]\nquorum = 3\nworkers = 2", ["fabric.quorum", "fabric.workers (2)", "found 3"]),
        ("[run]\nname = '../x'", ["run.name", "expected the name of one folder", "found '../x'"]),
        ("[train", ["trial.toml is not valid TOML"]),
    ],
)
def test_a_wrong_value_names_key_expected_and_found(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    for word in [*words, "trial.toml"]:
        assert word in str(caught.value)


def test_a_whole_number_is_a_number(tmp_path: Path) -> None:
    config = load(tmp_path, "[outer]\nlearning_rate = 1\nmomentum = 0")
    assert isinstance(config.outer.learning_rate, float)
    assert config.outer.learning_rate == 1.0


def test_missing_and_undecodable_files_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b"[run]\nname = '\xe9'")
    with pytest.raises(UserError, match=r"latin\.toml is not UTF-8"):
        load_config(tmp_path / "latin.toml")


def test_every_key_has_words_for_what_it_takes() -> None:
    texts = {describe(field.type) for fields in FIELDS.values() for field in fields.values()}
    assert all(texts)
    assert "a whole number >= 0 and <= 65535" in texts


# --- paths --------------------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_file_and_names_are_left_alone(tmp_path: Path) -> None:
    config = load(tmp_path, '[model]\nsource = "m.py:build"\n[data]\nsource = "d/x.txt"\ntokenizer = "t.json"')
    assert config.model.source == f"{tmp_path}/m.py:build"
    assert config.data.source == str(tmp_path / "d/x.txt")
    assert config.data.tokenizer == str(tmp_path / "t.json")
    weights = load(tmp_path, '[model]\nweights = "w.safetensors"').model.weights
    assert weights == str(tmp_path / "w.safetensors")
    assert load(tmp_path, "[model]\noptions = {}").model.weights == ""
    for name in ("stdlib", "https://example.org/tokens.u16", "/abs/x.txt"):
        assert load(tmp_path, f'[data]\nsource = "{name}"').data.source == name
    assert load(tmp_path, '[model]\nsource = "my.package.models:gpt"').model.source == "my.package.models:gpt"


def test_override_paths_are_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = apply_overrides(Config(), ["data.source=here.txt", "model.source=net.mlir"])
    assert config.data.source == str(tmp_path / "here.txt")
    assert config.model.source == str(tmp_path / "net.mlir")


# --- overrides ----------------------------------------------------------------------------------------------


def test_overrides_are_typed_and_later_ones_win() -> None:
    config = apply_overrides(
        Config(),
        [
            "train.rounds=3",
            "train.rounds = 4",
            "outer.momentum=0",
            "run.name=first try",
            'fabric.host="0.0.0.0"',
            "model.options.n_layer=2",
            "model.options.kind=wide",
            "model.options.deep.er=[1, 2]",
            "model.roles.x=buffer",
        ],
    )
    assert config.train.rounds == 4
    assert config.outer.momentum == 0.0
    assert config.run.name == "first try"
    assert config.fabric.host == "0.0.0.0"
    assert config.model.options == {"n_layer": 2, "kind": "wide", "deep": {"er": [1, 2]}}
    assert config.model.roles == {"x": "buffer"}
    assert Config().model.options == {}  # nothing leaks into the defaults


def test_overriding_changes_nothing_in_the_original() -> None:
    original = apply_overrides(Config(), ["model.options={ deep = { er = [1] } }"])
    changed = apply_overrides(original, ["model.options.deep.er=2"])
    assert changed.model.options == {"deep": {"er": 2}}
    assert original.model.options == {"deep": {"er": [1]}}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.rounds", "expected section.key=value"),
        ("rounds=3", "expected section.key=value"),
        ("train.round=3", "did you mean train.rounds?"),
        ("trian.rounds=3", "did you mean [train]?"),
        ("train.rounds=many", "is no TOML value"),
        ("train.rounds=-1", "setting train.rounds=-1: train.rounds: expected a whole number >= 1"),
        ("train.rounds.x=1", "is a single value"),
        ("model.options.a=<>", "is no TOML value"),
        ("fabric.quorum=7", "fabric.quorum: expected at most fabric.workers (2)"),
        ("sync.overlap=async", 'sync.compression: expected a codec with sync.overlap = "async" and sync.topology'),
        (
            "sync.overlap=on",
            "sync.overlap: unknown overlap 'on'; did you mean none? There are none, async, eager, streaming, decoupled",
        ),
        ("sync.overlap=decoupled", 'sync.compression: expected a codec with sync.overlap = "decoupled", found "none"'),
        ("sync.fragments=3", 'sync.fragments: expected 1 with sync.overlap = "none", found 3'),
        ("sync.grace_steps=3", 'sync.grace_steps: expected 1.0 with sync.overlap = "none", found 3.0'),
    ],
)
def test_wrong_overrides_are_named(override: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        apply_overrides(Config(), [override])


def test_rocm_is_hip_in_a_file_and_in_an_override(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model.source = "m:f"\n[fabric]\nbackend = "rocm"\n')
    assert load_config(path).fabric.backend == "hip"
    assert apply_overrides(Config(), ["fabric.backend=rocm"]).fabric.backend == "hip"


def test_overlap_needs_deltas() -> None:
    ring = ["sync.topology=ring", "sync.overlap=async"]
    assert apply_overrides(Config(), ring).sync.overlap == "async"
    with pytest.raises(UserError, match=r'sync\.precision: expected "f32" with sync\.overlap = "async"'):
        apply_overrides(Config(), [*ring, "sync.precision=f64"])
    star = ["sync.overlap=eager", "sync.compression=int8"]
    assert apply_overrides(Config(), star).sync.overlap == "eager"


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("[train]\nrounds = 'ten'", "train.rounds=2"),
        ("[fabric]\nquorum = 3\nworkers = 2", "fabric.workers=4"),
        ("[optimizer]\nschedule = 'stairs'", "optimizer.schedule=linear"),
        ("[train]\nbatch_size = 6\nmicro_batches = 4", "train.micro_batches=3"),
        ("[run]\nname = '../x'", "run.name=x"),
    ],
)
def test_an_override_repairs_a_file(tmp_path: Path, text: str, override: str) -> None:
    (tmp_path / "trial.toml").write_text(text)
    with pytest.raises(UserError, match=r"trial\.toml"):
        load_config(tmp_path / "trial.toml")
    section, key = override.split("=", maxsplit=1)[0].split(".")
    config = load_config(tmp_path / "trial.toml", [override])
    assert str(getattr(getattr(config, section), key)) == override.split("=")[1]


def test_an_override_does_not_hide_another_mistake_in_the_file(tmp_path: Path) -> None:
    for text in ("[train]\nround = 3", "train = 3", "[eval]\nevery = 0"):
        (tmp_path / "trial.toml").write_text(text)
        with pytest.raises(UserError, match=r"trial\.toml: "):
            load_config(tmp_path / "trial.toml", ["train.rounds=2"])


def test_overrides_of_a_file_keep_its_tables_and_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "t.toml").write_text("[data]\nsource = 'd.txt'\n[model]\noptions = { a = 1, b = { c = 2 } }")
    config = load_config(tmp_path / "t.toml", ["model.options.b.d=3", "data.tokenizer=t.json", "run.seed=4"])
    assert config.model.options == {"a": 1, "b": {"c": 2, "d": 3}}
    assert config.data.source == str(tmp_path / "d.txt")
    assert config.data.tokenizer == str(tmp_path / "elsewhere" / "t.json")
    assert (config.run.name, config.run.seed) == ("t", 4)


def test_compiled_model_sets_the_batch_unless_the_file_does(tmp_path: Path) -> None:
    """A compiled model decides the shape of its batch unless the file does."""
    assert load(tmp_path, "[model]\nsource = 'm.mlir'").train.batch_size == 0
    given = load(tmp_path, "[model]\nsource = 'm.mlir'\n[train]\nbatch_size = 3").train
    assert (given.batch_size, given.sequence_length) == (3, 0)
    assert load(tmp_path, "[model]\nsource = 'm.py:build'").train.batch_size == 8


def test_overrides_that_only_agree_together_are_accepted() -> None:
    assert apply_overrides(Config(), ["fabric.quorum=3", "fabric.workers=4"]).fabric.quorum == 3


# --- writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stdlib.toml", "nanochat-92m.toml", "pcp/experiment.json"])
def test_examples_load_and_round_trip(tmp_path: Path, name: str) -> None:
    config = load_config(EXAMPLES / name)
    assert load(tmp_path, to_toml(config), "config.toml") == config
    assert config_hash(config) == config_hash(load_config(tmp_path / "config.toml"))


values = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), values, max_size=4))
def test_whatever_toml_can_hold_reads_back_equal(options: dict) -> None:
    import tomllib

    assert tomllib.loads(toml_document({"model": {"options": options}}))["model"]["options"] == options


def test_what_toml_cannot_hold_is_refused() -> None:
    with pytest.raises(UserError, match="NoneType cannot be written"):
        toml_document({"model": {"options": None}})


# --- identity -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=1",
        "train.inner_steps=99",
        "train.inner_state=reset",
        "optimizer.beta2=0.5",
        "optimizer.name=lion",
        'optimizer.no_decay=["*gain*"]',
        "train.precision=bf16",
        "outer.momentum=0.5",
        "data.held_out_fraction=0.5",
        "data.sampling=fifo",
        "data.source=other.txt",
        "model.options.n_layer=2",
        "model.weights=pretrained.safetensors",
    ],
)
def test_the_hash_sees_what_decides_the_mathematics(override: str) -> None:
    assert config_hash(apply_overrides(Config(), [override])) != config_hash(Config())


def test_the_hash_sees_the_ring_and_its_overlap() -> None:
    ring, star = ["sync.topology=ring"], ["sync.compression=float32"]
    settings = ([], ring, [*ring, "sync.overlap=async"], star, [*star, "sync.overlap=async"])
    assert len({config_hash(apply_overrides(Config(), overrides)) for overrides in settings}) == 5


@pytest.mark.parametrize(
    "override",
    [
        "run.name=x",
        "run.dir=/tmp",
        "train.rounds=99",
        "fabric.workers=7",
        "fabric.latency_budget_s=9",
        "fabric.backend=cuda",
        "checkpoint.keep=9",
        "eval.batches=1",
        "data.delivery=gateway",
        "data.max_epochs=3",
        "train.micro_batches=4",
        "train.remat=blocks",
    ],
)
def test_the_hash_ignores_everything_else(override: str) -> None:
    assert config_hash(apply_overrides(Config(), [override])) == config_hash(Config())


def test_hash_ignores_moved_data() -> None:
    here, there = (apply_overrides(Config(), [f"data.source={folder}/x.txt"]) for folder in ("/a", "/b/c"))
    assert config_hash(here) == config_hash(there)


@pytest.mark.parametrize(
    "given",
    [
        ("optimizer.schedule=constant", "optimizer.final_fraction=0.2"),
        ("optimizer.name=adamw", "optimizer.momentum=0.5"),
        ("optimizer.name=sgd", "optimizer.beta1=0.5"),
        ("optimizer.name=lion", "optimizer.epsilon=0.5"),
    ],
)
def test_an_option_of_another_object_is_refused(given: tuple[str, str]) -> None:
    with pytest.raises(UserError, match=f"{given[1].partition('=')[0]}: expected .*only .* use"):
        apply_overrides(Config(), given)


# --- derived limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.1, 2.0, 60.0])
def test_time_limits_keep_their_order_at_every_budget(budget: float) -> None:
    limits = apply_overrides(Config(), [f"fabric.latency_budget_s={budget}"]).timings
    assert 3 * limits.heartbeat_s < limits.silent_after_s  # three lost heartbeats are survived
    assert limits.restart_first_s < limits.restart_limit_s
    assert limits.silent_after_s < limits.grace_s < limits.restart_limit_s
    assert limits.shutdown_s <= 2.5 * budget


def test_short_run_shortens_its_warmup_and_reports_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "[train]\nrounds = 4\ninner_steps = 10\n[optimizer]\nwarmup_steps = 50"
    assert load(tmp_path, text).optimizer.warmup_steps == 8
    assert "optimizer.warmup_steps: 8 instead of 50, because the run has only 40 inner steps" in caplog.text
    caplog.clear()
    config = load_config(EXAMPLES / "stdlib.toml")
    assert apply_overrides(config, ["train.rounds=1000"]).optimizer.warmup_steps == config.optimizer.warmup_steps
    assert not caplog.text
    one_step = apply_overrides(config, ["train.rounds=1", "train.inner_steps=1"])
    assert one_step.optimizer.warmup_steps == 0
    assert "0 instead of" in caplog.text


def test_settings_between_configurations_make_one_the_other() -> None:
    before = Config()
    settings = [
        "train.rounds=7",
        "data.max_epochs=2",
        'fabric.backend="auto"',
        "optimizer.no_decay=['*a*']",
        "model.options={ n_layer = 2, names = ['x'] }",
        "run.name=it's",
    ]
    after = apply_overrides(before, settings)
    between = overrides_between(before, after)
    assert len(between) == len(settings)
    assert apply_overrides(before, between) == after
    assert overrides_between(after, after) == []


def test_a_child_process_reads_whole_sections_of_kinds() -> None:
    """msgspec's own decoding gives a kind's section as the empty base of all sections."""
    tables = {"federation": {"sites": [{"name": "paris"}]}, "rl": {"lag": 3}, "moe": {"composers": 4}}
    for section, table in tables.items():
        config = Config().having(msgspec.convert(table, section_struct(section)))
        assert config_from_json(msgspec.json.encode(config)) == config
