"""Recipes are strict: what is wrong is named with file, line and field, before any work is done."""

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from apache_beam.options.pipeline_options import PipelineOptions
from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError

from rlhf.flows.cli.settings import every_setting
from rlhf.flows.graph.build import build
from rlhf.flows.recipe.field_paths import SYNONYMS
from rlhf.flows.recipe.model import Recipe
from rlhf.flows.recipe.reading import RECIPES, find_recipe, load_recipe
from rlhf.tuning.data import runners
from tests.flows.recipe.support import refused

BUILT_IN = sorted(p.stem for p in RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_recipe_loads_and_one_that_was_written_down_reads_back(name):
    loaded = load_recipe(name)
    assert loaded.name == name and loaded.description
    offline = ["preference.loss=simpo", "data.splits=[sft,preference,heldout]"]
    for sets in ([], offline if loaded.rl is None else ["rl.rollout.temperature=0.7"]):
        loaded = load_recipe(name, sets=sets)
        assert Recipe.model_validate_json(json.dumps(loaded.model_dump(mode="json"))) == loaded


def test_a_file_without_a_name_has_that_of_the_file_and_one_without_settings_is_refused(recipe):
    assert load_recipe(recipe("seed: 0\n")) == Recipe(name="mine")
    assert "the file holds no settings" in refused(recipe(""))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: x\nsft:\n  epochs: 1\n  learnin_rate: 3\n",
            "mine.yaml:4: sft.learnin_rate: unknown key; did you mean sft.optimizer.learning_rate?",
        ),
        ("rl:\n  rolout: {prompts: 3}\n", "mine.yaml:2: rl.rolout: unknown key; did you mean rollout?"),
        (
            "sft:\n  optimizer:\n    learning_rat: 0.1\n",
            "mine.yaml:3: sft.optimizer.learning_rat: unknown key; did you mean learning_rate?",
        ),
        (
            "rl:\n  score:\n    rewards:\n      a: {function: contains, wieght: 2}\n",
            "mine.yaml:4: rl.score.rewards.a.wieght: unknown key; did you mean weight?",
        ),
        ("sft: {lora: {r: 8}}\n", "sft.lora.r: unknown key; did you mean sft.lora.rank?"),
        ("rl: {num_generations: 8}\n", "rl.num_generations: unknown key; did you mean rl.rollout.completions?"),
        (
            "rl: {update: {scale_rewards: none}}\n",
            "rl.update.scale_rewards: unknown key; did you mean rl.update.normalisation?",
        ),
        (
            "rl: {update: {loss_type: dapo}}\n",
            "rl.update.loss_type: unknown key; did you mean rl.update.aggregation (TRL's grpo and dapo), or rl.up",
        ),
        ("preference: {loss_type: ipo}\n", "preference.loss_type: unknown key; did you mean preference.loss?"),
        (
            "sft: {lora: {lora_dropout: 0.1}}\n",
            "sft.lora.lora_dropout: unknown key; not supported; the page docs/explanation/not-here.md",
        ),
        ("sft:\n  epochs: two\n", "mine.yaml:2: sft.epochs: Input should be a valid integer (found 'two')"),
        ("sft: 3\n", "mine.yaml:1: sft: Input should be a mapping (found 3)"),
        ("seed: true\n", "mine.yaml:1: seed: Input should be a valid integer"),
        (
            "sft:\n  optimizer: {learning_rate: .inf}\n",
            "mine.yaml:2: sft.optimizer.learning_rate: Input should be a finite number",
        ),
        (
            "sft:\n  optimizer: {schedule: cosin}\n",
            "mine.yaml:2: sft.optimizer.schedule: Input should be 'constant', 'linear', 'cosine' or 'wsd'",
        ),
        ("name: Not A Name\n", "mine.yaml:1: name: String should match pattern"),
        ("- a\n- b\n", "mine.yaml: a recipe is a mapping of sections, found list"),
        ("sft: [1\n", "mine.yaml:2: not YAML: "),
        ("sft: {epochs: 1}\nseed: 1\nsft: {epochs: 2}\n", "the key 'sft' appears twice"),
        ("data: {source_args: {day: 2026-01-01}}\n", "mine.yaml:1: '2026-01-01' is a timestamp"),
        ("data: {source_args: {ratio: 1:30}}\n", "mine.yaml:1: 1:30 is 90 in YAML 1.1: put a text in quotes"),
        ("data: {source_args: {code: 010}}\n", "mine.yaml:1: 010 is 8 in YAML 1.1"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(recipe, text, message):
    assert message in refused(recipe(text))


def test_names_of_other_libraries_stand_for_settings_that_exist():
    places = [s.place for s in every_setting()]
    for name, ends in SYNONYMS.items():
        for end in ends.split():
            assert any(f".{place}".endswith(f".{end}") for place in places), f"{name}: there is no setting {end}"


def test_a_mistake_between_a_file_and_an_option_names_both(recipe):
    text = refused(recipe("rl:\n  rollout: {completions: 1}\n"), sets=["rl.update.clip_high=0.3"])
    assert "mine.yaml:1 with --set rl.update.clip_high: rl: rollout.completions is 1" in text


@pytest.mark.parametrize("sections", ["name: mine\n", "name: mine\nbase: {}\ndata: {}\n"])
def test_sections_that_are_left_out_run_or_not_as_the_page_says(recipe, sections):
    """docs/guides/recipes.md and README.md: some sections run only where they are given; null is not run."""
    left_out = load_recipe(recipe(sections))
    assert {n for n in Recipe.model_fields if left_out.settings(n) is None} == {
        "distill", "environment", "fork", "gate", "preference", "retention", "reward", "workers"
    }  # fmt: skip
    stages = [n.stage for n in build(left_out)]
    assert set(stages) == {"base", "prepare", "sft", "rollout", "score", "update", "evaluate", "export"}
    nothing = load_recipe(recipe(sections + "rl: null\nevaluate: null\nexport: null\n"))
    assert [n.stage for n in build(nothing)] == ["base", "prepare", "sft"]


def test_all_mistakes_are_told_at_once(recipe):
    text = refused(recipe("sft: {epoch: 1}\nrl: {round: 3}\nseed: -1\n"))
    assert [line.split(": ")[1] for line in text.splitlines()] == ["seed", "sft.epoch", "rl.round"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rl: {rollout: {completions: 1}}\n", "mine.yaml:1: rl: rollout.completions is 1, and grpo compares the"),
        ("sft: null\nrl: null\n", "sft, distill, preference, rl are all null: nothing would be trained"),
        ("distill: {teacher: preference}\n", "distill.teacher is preference, but the section preference is null"),
        ("sft: null\ndistill: {teacher: sft}\n", "distill.teacher is sft, but the section sft is null"),
        ("sft: null\ndistill: {teacher: base}\n", "distill.teacher is base, which is the policy itself"),
        ("distill: {beta: 0.3}\n", "beta has no meaning with divergence forward-kl; it belongs to jsd"),
        ("preference: {gamma: 1.0}\n", "gamma has no meaning with loss dpo; it belongs to simpo"),
        ("preference: {loss: kto, examples_per_step: 1}\n", "examples_per_step must be 2 or more"),
        ("preference: {}\ndata: {splits: [sft, prompts, heldout]}\n", "data.splits lacks 'preference'"),
        (
            "rl: {score: {rewards: {m: {function: reward_model}}}}\n",
            "rl.score.rewards.m asks for a reward model, but the section reward is null",
        ),
        (
            "environment: {name: guess}\nrl: {rollout: {stop: [a]}}\n",
            "rl.rollout.stop has no meaning with this section environment: leave it out",
        ),
        (
            "environment: {agent: [python, agent.py]}\nevaluate: {top_p: 0.9}\n",
            "evaluate.top_p has no meaning with this section environment: leave it out",
        ),
        (
            "rl: {update: {algorithm: ppo}}\n",
            "rl.update.algorithm is ppo, whose critic starts from the reward model: add reward, or set "
            "rl.update.critic.start: policy",
        ),
        (
            "rl: {rollout: {temperature: 0.7}, update: {temperature: 1.0}}\n",
            "update.temperature 1.0 differs from rollout.temperature 0.7",
        ),
        ("data: {splits: [prompts, heldout]}\n", "data.splits lacks 'sft', which a later section reads"),
        ("rl: {update: {constant: 5.0}}\n", "aggregation `constant` and a value for `constant` go together"),
        ("rl: {update: {algorithm: remax}, refills: 2}\n", "remax learns from those too: leave refills out"),
        (
            "rl: {score: {rewards: {a: {function: exact_match, clip: [1.0, 0.0]}}}}\n",
            "the first number must be below the second",
        ),
        (
            "rl: {update: {algorithm: remax}, score: {rewards: {a: {function: exact_match, normalise: group}}}}\n",
            "score.rewards.a.normalise: group centres by a group's own mean, and remax by the reward of",
        ),
        (
            "rl: {update: {algorithm: remax}, score: {rewards: {a: {function: exact_match, batch: group}}}}\n",
            "score.rewards.a.batch: group: the greedy completion, whose reward is the baseline of remax, is scored",
        ),
        (
            "rl: {refills: 1, score: {rewards: {a: {function: exact_match, batch: round}}}}\n",
            "score.rewards.a.batch: round: refills are sampled after the round is scored",
        ),
        ("rl: {score: {round_scale: true}}\n", "score.round_scale is set by the pipeline: leave it out"),
        ("rl: {score: {rewards: {}}}\n", "rewards is empty: name at least one reward"),
        ("rl: {rollout: {prompts: 8}, update: {prompts_per_step: 9}}\n", "update.prompts_per_step 9 is above rollout"),
        ("rl: {update: {clip_low: 2}}\n", "rl.update.clip_low: Input should be less than or equal to 1 (found 2)"),
        ("sft: {decay_steps: 2}\n", "sft.optimizer: decay_steps 2 is the step at which the schedule ends"),
        ("sft: {compute: {mesh: {data: 0}}}\n", "sft.compute.mesh.data: an axis has 1 or more devices, or -1"),
        ("sft: {compute: {mesh: {tensor: -1}}}\n", "sft.compute.mesh: fsdp and tensor are -1, and one axis"),
        ("rl: {rollout: {round: 3}}\n", "rollout.round is set by the pipeline: leave it out"),
        ("rl: {update: {prompt_limit: 9}}\n", "update.prompt_limit is set by the pipeline: leave it out"),
        ("rl: {update: {store_state: true}}\n", "update.store_state follows from rl.checkpoint_every and workers"),
    ],
)
def test_combinations_that_cannot_run_are_refused(recipe, text, message):
    found = refused(recipe(text))
    assert message in found
    assert "mine.yaml" in found


def test_a_loss_brings_its_defaults(recipe):
    loaded = load_recipe(recipe("preference: {loss: simpo, gamma: 0.4}\n"))
    assert (loaded.preference.beta, loaded.preference.gamma) == (2.0, 0.4)
    assert load_recipe(recipe("preference: {}\n")).preference.beta == 0.1
    kto = load_recipe(recipe("preference: {loss: kto}\ndata: {splits: [sft, labelled, prompts, heldout]}\n"))
    assert kto.preference.unpaired


def test_an_algorithm_brings_its_settings(recipe):
    loaded = load_recipe(recipe("rl: {update: {algorithm: dr-grpo}, rollout: {max_tokens: 32}}\n")).rl.update
    assert (loaded.normalisation, loaded.aggregation, loaded.constant) == ("none", "constant", 32.0)
    assert load_recipe(recipe("rl: {update: {algorithm: dapo}}\n")).rl.update.needs_reference is False
    again = Recipe.model_validate_json(
        json.dumps(load_recipe("smoke", sets=["rl.update={algorithm: dr-grpo}"]).model_dump(mode="json"))
    )
    assert again.rl.update.constant == 8.0


def test_a_step_of_a_small_round_takes_all_of_its_prompts(recipe):
    assert load_recipe(recipe("rl: {rollout: {prompts: 3}}\n")).rl.update.prompts_per_step == 3
    assert load_recipe(recipe("rl: {rollout: {prompts: 64}}\n")).rl.update.prompts_per_step == 8


@pytest.mark.parametrize("name", ["opo", "gpg"])
def test_an_algorithm_without_a_clip_takes_one_step_a_round(recipe, name):
    text = "rl: {rollout: {prompts: 64}, update: {algorithm: %s%s}}\n"
    loaded = load_recipe(recipe(text % (name, "")))
    assert loaded.rl.update.prompts_per_step == 64
    assert Recipe.model_validate_json(json.dumps(loaded.model_dump(mode="json"))) == loaded
    for more in (", prompts_per_step: 8", ", epochs: 2"):
        message = refused(recipe(text % (name, more)))
        assert f"{name} takes one optimizer step a round" in message and "prompts_per_step to 64" in message


def test_built_in_recipes_set_their_own_rates():
    """So that no default changes their results."""
    for path in RECIPES.glob("*.yaml"):
        written = yaml.safe_load(path.read_text())
        rl = written.get("rl") or {}
        sections = [written.get(name) for name in ("sft", "reward", "preference", "distill")] + [rl.get("update")]
        for section in filter(None, sections):
            assert "learning_rate" in section["optimizer"], path


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4", "+1e-4"])
def test_numbers_as_people_write_them(recipe, text):
    loaded = load_recipe(recipe(f"sft: {{optimizer: {{learning_rate: {text}}}}}\n"))
    assert loaded.sft.optimizer.learning_rate == 0.0001


def test_a_recipe_that_is_not_there(tmp_path):
    (tmp_path / "mine.yaml").touch()
    assert refused(str(tmp_path / "mine")).endswith(f"; did you mean {tmp_path / 'mine.yaml'}?")
    assert refused("smok") == f"no recipe 'smok'; built in are {', '.join(BUILT_IN)}; did you mean smoke?"
    assert refused(str(tmp_path / "x.yaml")) == f"recipe file {tmp_path}/x.yaml does not exist"
    assert find_recipe("smoke") == Path(RECIPES / "smoke.yaml")


def test_an_optimizer_given_in_part_keeps_the_other_defaults_of_its_stage(recipe):
    plain = load_recipe(recipe("reward: {}\n"))
    named = load_recipe(recipe("reward: {optimizer: {name: muon}}\n"), sets=["sft.optimizer.name=muon"])
    for before, after in ((plain.sft, named.sft), (plain.reward, named.reward)):
        kept = {"learning_rate", "schedule", "warmup_steps", "clip_norm"}
        assert after.optimizer.model_dump(include=kept) == before.optimizer.model_dump(include=kept)
        assert (after.optimizer.name, after.optimizer.beta1) == ("muon", 0.95)
    rl = load_recipe(
        recipe("""reward: {}
rl: {update: {algorithm: ppo, optimizer: {beta1: 0.8}, critic: {optimizer: {beta1: 0.7}}}}
""")
    ).rl.update
    assert (rl.optimizer.learning_rate, rl.critic.optimizer.learning_rate) == (1e-6, 1e-5)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["sft.epoch=2"], "--set sft.epoch: unknown key; did you mean epochs?"),
        (["sft=null", "rl=null"], ": sft, distill, preference, rl are all null: nothing would be trained"),
        (["data.source=/no/such/file.jsonl"], "--set data.source: source '/no/such/file.jsonl': no such file"),
        (["data.source=adition"], "--set data.source: unknown source 'adition' (did you mean 'addition'?)"),
        (["base.source=/no/such/model.gguf"], "--set base.source: /no/such/model.gguf does not exist"),
        (["distill={teacher: /no/such/model}"], "distill.teacher: /no/such/model does not exist"),
        (
            ["rl.score.rewards.exact.function=exact_mach"],
            "--set rl.score.rewards.exact.function: no reward function 'exact_mach'; did you mean exact_match?",
        ),
        (["rl.rollout.max_tokens=512"], "--set rl.rollout.max_tokens 512 leaves no room for a prompt: random:"),
        (["evaluate.judge=nothing_here:f"], "--set evaluate.judge: no module 'nothing_here' can be imported"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "plan"])
def test_a_recipe_that_cannot_run_ends_with_status_2_and_no_work(rlhf_here, tmp_path, verb, sets, message):
    words = [w for item in [*sets, f"store={tmp_path / 'store'}"] for w in ("--set", item)]
    done = rlhf_here(verb, "smoke", *(["--no-prefect"] if verb == "run" else []), *words, code=2)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["gate={}", "evaluate=null"], "gate decides by evaluations, and the section evaluate is null"),
        (["gate.first=rl"], "gate.first 'rl': expected an earlier policy of the run, or promote: promote, base, sft"),
        (["gate.first=preference"], "gate.first 'preference': expected an earlier policy"),
        (["gate.metric=pass_at_2"], "gate.metric 'pass_at_2' has no value for each problem"),
        (["gate.floors={scoer: 0.5}"], "gate.floors.scoer is no metric of an evaluation; did you mean score?"),
        (["gate.guards={mean_lenght: {most: 3}}"], "gate.guards.mean_lenght is no metric of an evaluation"),
        (["gate.guards={truncated: {}}"], "a guard without a bound guards nothing"),
        (["gate.confidence=1"], "gate.confidence"),
        (["gate.against=base"], "gate.against: unknown key"),
        (["gate={}", "data.new_since=champion"], "set start_from: champion"),
        (["start_from=Best"], "start_from"),
        (["data.runner.name=PrismRunner"], "no runner 'PrismRunner'"),
        (["data.runner.name=FlinkRuner"], "no runner 'FlinkRuner'; did you mean FlinkRunner"),
        (["data.runner.name=SparkRunner"], "set runner.scratch to a URL"),
        (["data.runner.name=SparkRunner", "data.runner.scratch=/tmp/x"], "set runner.scratch to a URL"),
        (["data.runner.options.flink_mastr=x"], "no pipeline option 'flink_mastr'; did you mean flink_master"),
        (["data.runner.options.use_public_ips=false"], "instead of setting false, or set no_use_public_ips"),
        (["data.runner.options.direct_num_workers=3"], "direct_num_workers follows from"),
    ],
)
def test_a_gate_that_could_not_decide_and_a_runner_that_cannot_work_are_named(sets, message):
    assert message in refused("smoke", sets=sets)


def test_metrics_of_an_evaluation_and_its_judges_have_bounds():
    judges = "evaluate.judges={safe: {function: matches, arguments: {pattern: a}}}"
    bounds = ["gate.floors={safe: 0.9, pass_at_2: 0.1}", "gate.guards={mean_length: {times: 1.5}, safe: {fall: 0.01}}"]
    recipe = load_recipe("smoke", sets=[judges, "gate.metric=safe", *bounds])
    assert recipe.gate.guards["mean_length"].times == 1.5 and recipe.gate.metric == "safe"
    assert load_recipe("smoke").gate is None


EXAMPLES = sorted((Path(__file__).parents[3] / "infra" / "runners").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_recipe_whose_options_beam_takes(path):
    data = load_recipe(str(path)).data
    runner = data.beam_runner()
    found = PipelineOptions(runners.flags_of(runner)).get_all_options()
    assert found["runner"] == runner.name == data.runner.name
    for name, value in data.runner.options.items():
        assert found[name] == value, name


def test_there_is_an_example_of_each_cluster():
    names = {load_recipe(str(path)).data.runner.name for path in EXAMPLES}
    assert names == set(runners.CLUSTERS) - {"PortableRunner"}


def test_workers_are_of_this_machine_alone():
    assert "counts processes of this machine" in refused(str(EXAMPLES[0]), sets=["data.workers=2"])


LOWER, UPPER = ("ge", "gt"), ("le", "lt")

FREE = {
    "data.seed": "a seed is any integer: what draws by it hashes it",
    "rl.score.rewards.*.weight": "a negative weight makes a penalty of a reward",
    "rl.update.environment_weight": "the weight of a reward, which may be a penalty",
    "gate.floors.*": "a metric may have any range",
    "gate.guards.*.most": "a metric may have any range",
    "gate.min_difference": "a policy may be let pass that is a little worse",
    "rl.score.rewards.*.clip": "a reward may have any range; that its ends are in order is checked",
}
"""Settings without a lower bound."""
ARGUMENTS = (
    *("source_args", "arguments", "tool_arguments", "judge_arguments", "algorithm_arguments", "options"),
    "chat_template_kwargs",
)
"""Mappings whose values belong to the function, task or program that takes them."""

SHARES = {
    "heldout_fraction", "sft_fraction", "max_dead_fraction", "max_failed_fraction", "near_duplicates", "end_fraction",
    "beta1", "beta2", "gamma", "lam", "on_policy", "label_smoothing", "ld_alpha", "clip_low", "importance_min",
}  # fmt: skip
"""Shares, probabilities and decays, by the last part of their place: none is above 1."""
WIDER = {"preference.gamma": "the target margin of simpo is a log-ratio"}
"""Settings that have the name of a share and are none."""


def numbers(kind: Any, place: str, bounds: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(place, constraints) of every number in a type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (int, float):
        yield place, bounds
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            if name not in ARGUMENTS:
                yield from numbers(field.annotation, f"{place}.{name}".lstrip("."), tuple(field.metadata))
    elif origin is Annotated:
        yield from numbers(arguments[0], place, bounds + arguments[1:])
    elif origin is dict or (origin is list and isinstance(arguments[0], type) and issubclass(arguments[0], BaseModel)):
        yield from numbers(arguments[-1], f"{place}.*")
    elif origin in (typing.Union, types.UnionType, list):
        for argument in arguments:
            yield from numbers(argument, place, bounds)


EVERY = dict(numbers(Recipe, ""))


def bound(constraints: tuple[Any, ...], names: tuple[str, ...]) -> Any:
    """The first bound of these names among constraints, which may be in a `Field`."""
    flat = [one for c in constraints for one in (c, *getattr(c, "metadata", ()))]
    return next((getattr(c, n) for c in flat for n in names if getattr(c, n, None) is not None), None)


def test_a_share_has_an_upper_bound_of_1():
    shares = {place for place in EVERY if place.rpartition(".")[2] in SHARES} - set(WIDER)
    assert {place.rpartition(".")[2] for place in shares} == SHARES
    assert all(bound(EVERY[place], UPPER) is not None and bound(EVERY[place], UPPER) <= 1 for place in shares)


def has_bounds(constraint: Any) -> bool:
    return any(hasattr(constraint, name) for name in (*LOWER, *UPPER)) or isinstance(constraint, AfterValidator)


def test_minus_2_is_refused_by_every_bound():
    taken = []
    assert len(EVERY) > 100
    for place, constraints in EVERY.items():
        limits = [one for c in constraints for one in (c, *getattr(c, "metadata", ())) if has_bounds(one)]
        kind: Any = Annotated[float, *limits] if limits else float
        try:
            TypeAdapter(kind).validate_python(-2.0)
            taken.append(place)
        except ValidationError:
            continue
    assert set(taken) == set(FREE)
