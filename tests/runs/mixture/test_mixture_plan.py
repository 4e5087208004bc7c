"""Plans of configurations, and refusals, each with one message."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixture_stage import MixtureStage, make_plan

from planetary.core.config import apply_overrides, load_config
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.schema import Config
from planetary.core.configuration.step_options import StepOptions
from planetary.core.configuration.toml import to_toml
from planetary.core.errors import UserError
from planetary.core.schedules import Schedule
from planetary.core.tensors import TensorSpec
from planetary.runs.mixture import start as mixture_start
from planetary.runs.mixture.checks import check_mixture
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.plan import model_of, training_of, warnings_of

EXAMPLES = Path(__file__).parents[3] / "examples"


def config(*overrides: str, example: str = "parallax-tiny") -> Config:
    return apply_overrides(load_config(EXAMPLES / f"{example}.toml"), overrides)


def refusal(*overrides: str) -> str:
    given = config(*overrides)
    with pytest.raises(UserError) as error:
        training_of(given, model_of(given), StepOptions(), Schedule())
    return str(error.value)


def test_model_of_a_user_is_not_divided() -> None:
    """So its gradients need no comparison here: docs/meaning.md."""
    assert 'whose experts can be divided; found "own:build"' in refusal("model.source=own:build")


def test_examples_are_four_composers_with_and_without_offload() -> None:
    direct, offload = config(), config(example="parallax-offload")
    plain = training_of(direct, model_of(direct), StepOptions(), Schedule())
    assert (plain.composers, plain.batch_size, plain.sketches, plain.acceptance) == (4, 16, "none", None)
    helped = training_of(offload, model_of(offload), StepOptions(), Schedule())
    assert (helped.sketches, helped.precision) == ("owner", "4bit")
    assert helped.acceptance is not None
    assert model_of(direct).batch_size == 4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["moe.router_every=1", "moe.pace=lockstep"],
            "router_every = 1 in lock step averages gradients inside every step",
        ),
        (["moe.router_every=16"], "set moe.latent_every to at least 16 and moe.backbone_every to at least 16"),
        (
            ["moe.latent_every=1"],
            "moe.latent_every ≤ moe.backbone_every; found 2, 1, 8: set moe.latent_every to at least 2",
        ),
        (["moe.latent_every=9"], "found 2, 9, 8: set moe.backbone_every to at least 9"),
        (["moe.backbone_fragments=9"], "moe.backbone_fragments between 1 and moe.backbone_every = 8, found 5 and 9"),
        (["moe.delta_rank=1", "moe.refresh_form=4bit"], "set moe.delta_rank = 0, or moe.refresh_form"),
        (
            ["moe.rank=128", "moe.expert_workers=1", "fabric.workers=5", "moe.fitted_by=expert-workers"],
            "copies of experts of width 128, which are not fitted",
        ),
        (["fabric.quorum=3", "moe.pace=lockstep"], 'moe.pace = "lockstep" waits for all composers'),
        (["outer.merge=median"], 'found "median" and "nesterov"'),
        (["fabric.workers=9", "fabric.quorum=9"], "set fabric.quorum to at most moe.composers = 4"),
        (["fabric.workers=3"], "set fabric.workers to at least 4, found 3"),
        (["moe.expert_workers=2"], "4 composers and 2 expert workers are 6 workers"),
        (["moe.composers=17", "fabric.workers=17"], "17, but the model has 16 experts per layer"),
        (["model.options.n_active=17"], "n_active=17 experts per token, but n_expert=16"),
        (["model.source=planetary.models.nanochat:build"], 'model.source = "planetary.models.latent_moe:build"'),
        (["moe.replicas=5"], "moe.replicas to at most moe.composers = 4"),
        (["moe.replicas=2", "moe.expert_workers=1", "fabric.workers=5"], "Set moe.replicas = 1 (experts then survive"),
        (["train.precision=f16"], 'train.precision = "f32" or "bf16"'),
        (["moe.fitted_by=expert-workers"], "needs expert workers, and surrogates that they fit"),
        (["moe.composers=1"], "moe.composers to at least 2, or to 0"),
        (["moe.redundant=0.5", "moe.expert_workers=1", "fabric.workers=5"], "moe.expert_workers to at least 2"),
        (["model.options.n_expert=many"], "n_expert"),
    ],
)
def test_impossible_configurations_are_refused_with_their_keys(overrides: list[str], words: str) -> None:
    assert words in refusal(*overrides)


def test_unequal_shards_and_full_surrogates_are_warned_of() -> None:
    """Unequal shards and surrogates as large as experts are allowed and warned of."""
    given = config("moe.composers=3", "moe.rank=128", "moe.delta_rank=30")
    assert training_of(given, model_of(given), StepOptions(), Schedule()).delta_rank == 30
    shards, rank, changes = warnings_of(given, model_of(given))
    assert "moe.delta_rank = 30: changes of that rank are no smaller" in changes
    assert shards == "16 experts on 3 composers: shards are not equal, they have 5 or 6 experts of a layer"
    assert "moe.rank = 128 is not below" in rank
    assert warnings_of(config(), model_of(config())) == []


def test_keys_set_the_work_and_the_checks_of_expert_workers() -> None:
    keys = ["inner_steps=3", "trust=0.5", "sketch_fraction=0.25", "norm_ratio=0.2", "spectral_ratio=0.3"]
    keys += ["redundant=0.1", "audited=0.2"]
    outer = ["outer.learning_rate=0.9", "outer.momentum=0.4"]
    given = config(*outer, *(f"moe.{key}" for key in keys), example="parallax-offload")
    training = training_of(given, model_of(given), StepOptions(), Schedule())
    assert training.acceptance == Policy(2, 0.2, 0.3, redundant=0.1, audited=0.2)
    assert (training.inner_steps, training.trust, training.sketch_fraction) == (3, 0.5, 0.25)
    assert (training.merge.radial, training.merge.rate, training.merge.momentum) == (True, 0.9, 0.4)
    often = config("moe.router_every=1", "moe.latent_every=1", "moe.fit_steps=4")
    training = training_of(often, model_of(often), StepOptions(), Schedule())
    assert (training.cadence.router, training.cadence.latent, training.fit.steps) == (1, 1, 4)
    assert check_mixture(given) == []
    alone = config(*(f"moe.{key}" for key in keys))
    assert training_of(alone, model_of(alone), StepOptions(), Schedule()).acceptance is None
    (warning,) = check_mixture(alone)
    assert warning == (
        "moe.expert_workers = 0 leaves these keys without effect: moe.sketch_fraction, moe.inner_steps, moe.trust, "
        "moe.norm_ratio, moe.spectral_ratio, moe.redundant, moe.audited"
    )


@pytest.mark.parametrize(
    ("overrides", "choice", "keys"),
    [
        (
            ["expert_workers=0", "sketches=all", "precision=f32", "window=1"],
            "expert_workers",
            "sketches precision window",
        ),
        (["expert_workers=0", "update_form=4bit", "update_keep=0.2"], "expert_workers", "update_form update_keep"),
        (["update_keep=0.2"], 'moe.update_form = "exact"', "update_keep"),
        (["rank=0", "detach=false", "delta_rank=2", "fit_steps=2"], "moe.rank = 0", "detach delta_rank fit_steps"),
        (["pace=lockstep", "window=3"], 'moe.pace = "lockstep"', "window"),
    ],
)
def test_keys_that_have_no_effect_are_warned_of_by_name(overrides: list[str], choice: str, keys: str) -> None:
    (warning,) = check_mixture(config(*(f"moe.{one}" for one in overrides), example="parallax-offload"))
    assert choice in warning
    assert warning.endswith(f" {', '.join(f'moe.{key}' for key in keys.split())}")


def test_an_example_with_one_key_changed_is_not_warned_of() -> None:
    for overrides in (["expert_workers=0"], ["update_form=topk", "update_keep=0.2"], ["rank=0"]):
        assert check_mixture(config(*(f"moe.{one}" for one in overrides), example="parallax-offload")) == []


def test_two_owners_double_slots_and_merge_by_shard(
    tmp_path: Path,
) -> None:
    """With two owners a composer has twice the slots and experts are merged in a fragment per shard."""
    plan = make_plan(tmp_path, steps=4, composers=3, batch_size=6, replicas=2)
    assert plan.slots == 2
    assert [slots[0].tolist() for slots in plan.held_slots] == [[0, 2], [0, 1], [1, 2]]
    dense, experts = [TensorSpec("head", "f32", (4,))], [TensorSpec("up", "f32", (2, 3, 5))]
    fragments = plan.fragments(dense, experts)
    assert fragments[Tier.BACKBONE, 0] == ("head",)
    assert fragments[Tier.EXPERTS, 1] == ("layers.0.experts.up.1",)
    assert [plan.takes_part(0, (Tier.EXPERTS, shard)) for shard in range(3)] == [True, False, True]
    assert plan.takes_part(0, (Tier.BACKBONE, 0))
    once = make_plan(tmp_path, steps=4)
    assert not [key for key in once.fragments(dense, experts) if key[0] is Tier.EXPERTS]


def test_the_hash_is_about_the_mathematics_and_a_file_reads_back(tmp_path: Path) -> None:
    given = config()
    assert config_hash(given) == config_hash(config("moe.store=/elsewhere", "train.rounds=80"))
    assert config_hash(given) != config_hash(config("moe.rank=4"))
    assert config_hash(given) == config_hash(config("moe.replicas=1")) != config_hash(config("moe.replicas=2"))
    assert config_hash(config(example="parallax-offload")) == config_hash(
        config("moe.expert_workers=3", "fabric.workers=7", example="parallax-offload")
    )
    (tmp_path / "run.toml").write_text(to_toml(given))
    assert load_config(tmp_path / "run.toml").of(MoeConfig) == given.of(MoeConfig)


def test_state_too_large_to_send_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_start, "MAX_PAYLOAD_BYTES", 1 << 12)
    with pytest.raises(UserError, match=r"the state of a shard takes .* more than moe.composers = 2"):
        MixtureStage(tmp_path, make_plan(tmp_path, steps=4))
