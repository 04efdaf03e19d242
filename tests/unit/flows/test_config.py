"""A configuration is checked once, before anything starts, and everything wrong with it is listed at once."""

import json
from pathlib import Path

import pytest

from flows.config import PostTrainConfig, SFTConfig
from flows.loading import ConfigError, apply_overrides, load_config, read_recipe


@pytest.fixture
def recipe(tmp_path, values):
    """Writes a YAML recipe; JSON is YAML."""

    def write(**changes):
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({**values, **changes}))
        return path

    return write


def violations(path, *overrides, model=PostTrainConfig):
    with pytest.raises(ConfigError) as caught:
        load_config(model, path, overrides)
    return caught.value.violations


def test_a_valid_recipe_with_overrides(recipe):
    config = load_config(
        PostTrainConfig,
        recipe(),
        ["optimizer.lr=1e-5", "parallel.tensor_parallel_size=2", "experiment=2024-01-01", "model.precision=float32"],
    )
    assert config.optimizer.lr == 1e-5
    assert config.parallel.world_size == 2
    assert config.experiment == "2024-01-01"
    assert config.samples_per_step == 6


def test_everything_wrong_is_listed_at_once(recipe):
    found = violations(
        recipe(generation={"samples_per_prompt": 1, "temprature": 0.7}, algorithm={"mini_batch_size": 4}),
        "optimizer.lr=-1",
        "total_steps=many",
        "nonsense.key=1",
        "parallel.tensor_parallel_size=3",
        "reward.function=exakt",
        "model.path=/nowhere/model",
    )
    for part in (
        "generation.temprature: unknown key (did you mean temperature?)",
        "nonsense: unknown key",
        "optimizer.lr: input should be greater than 0, not -1",
        "total_steps: input should be a valid integer, unable to parse string as an integer, not 'many'",
        "generation.samples_per_prompt: must be at least 2: grpo compares",
        "algorithm.mini_batch_size: 4 does not divide the 3 samples of a step",
        "reward.function: unknown reward function 'exakt' (did you mean 'exact'?)",
        "model.path: no model folder /nowhere/model",
    ):
        assert [line for line in found if line.startswith(part)], (part, found)
    assert len(found) == 8


@pytest.mark.parametrize(
    "override, message",
    [
        ("generation.temperature=0", "generation.temperature: must be above 0 for training"),
        ("generation.max_model_len=65", "generation.max_model_len: 65 is beyond the model's context of 64 tokens"),
        ("generation.max_response_tokens=64", "generation.max_response_tokens: 64 leaves no room for a prompt"),
        ("generation.max_response_tokens=59", "data: 10 prompts do not fit into the 5 tokens"),
        ("parallel.tensor_parallel_size=4", "parallel: tensor_parallel_size 4 does not divide num_key_value_heads 2"),
        ("parallel.sequence_parallel=true", "parallel: sequence_parallel needs tensor_parallel_size > 1"),
        ("parallel.pipeline_parallel_size=9", "parallel: 2 layers cannot be divided over 9 pipeline chunks"),
        (
            "parallel.expert_parallel_size=2",
            "parallel: expert_parallel_size 2 x expert_tensor_parallel_size 1 does not",
        ),
        ("parallel.virtual_pipeline_size=2", "parallel: a virtual pipeline needs pipeline_parallel_size > 1"),
        ("parallel.pipeline_layers=[1,2]", "parallel: pipeline_layers [1, 2] must be 1 positive numbers that sum to"),
        ("generation.tensor_parallel_size=2", "generation: generation.tensor_parallel_size 2 x"),
        ("generation.pipeline_parallel_size=2", "generation: generation.tensor_parallel_size 1 x"),
        ("validation=null", "evaluate_every: needs validation.data"),
        ("validation.samples_per_prompt=2", "validation.samples_per_prompt and validation.temperature: greedy answers"),
        ("optimizer.schedule=cosine", "optimizer.decay_steps: is needed by optimizer.schedule 'cosine'"),
        ("loss.name=sft", "loss.name: sft learns from demonstrations"),
        ("loss.name=gspo", "loss.aggregation: gspo has one number a sequence"),
        ("loss.name=nowhere:loss", "loss.name: "),
        ("loss.correction.low=3", "loss.correction.low and loss.correction.high: no weight lies between them"),
        ("algorithm.estimator=gpro", "algorithm.estimator: unknown advantage estimator 'gpro' (did you mean 'grpo'?)"),
        ("reward.function=reasoning_gym", "reward.function and data.task: 'reasoning_gym' scores only prompts of"),
        ("experiment=../escape", "experiment: run name '../escape' cannot be used"),
        ("root=nope://bucket", "root: cannot open 'nope://bucket'"),
        ("data.answer_column=gold", "data: "),
    ],
)
def test_combinations_that_cannot_work(recipe, override, message):
    found = violations(recipe(), override)
    assert [line for line in found if line.startswith(message)], found


def test_a_reference_model_is_checked_if_one_is_needed(recipe, tmp_path):
    assert load_config(PostTrainConfig, recipe(), ["reference.model.path=/nowhere"]).reference.model.path == "/nowhere"
    found = violations(recipe(), "loss.kl.coef=0.1", "reference.model.path=/nowhere")
    assert [line for line in found if line.startswith("reference.model.path: no model folder /nowhere")], found


def test_the_training_prompts_are_not_held_out(recipe, prompt_file):
    found = violations(recipe(validation={"data": {"path": str(prompt_file)}}))
    assert found == ["validation.data: is the training data; held-out prompts need another file, or another seed"]


def test_prompts_that_are_dropped_need_not_fit(recipe):
    overrides = ["generation.max_response_tokens=59", "data.overlong=drop"]
    assert load_config(PostTrainConfig, recipe(), overrides).data.overlong == "drop"


def test_empty_prompt_file(recipe, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (line,) = violations(recipe(data={"path": str(tmp_path / "empty.jsonl")}))
    assert line.startswith("data: ") and "empty.jsonl" in line


def test_unsupported_architecture(recipe, tmp_path, model_folder):
    folder = tmp_path / "mamba"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_text(file.read_text().replace('"llama"', '"mamba"'))
    (line,) = violations(recipe(), f"model.path={folder}")
    assert line.startswith("model.path: ") and "'mamba' is not supported" in line


def test_a_group_of_one_is_allowed_to_an_estimator_of_the_users_own(recipe, tmp_path):
    (tmp_path / "mine.py").write_text("def raw(batch, config):\n    return batch.rewards\n")
    overrides = [f"algorithm.estimator={tmp_path}/mine.py:raw", "generation.samples_per_prompt=1"]
    assert load_config(PostTrainConfig, recipe(), overrides).samples_per_step == 3


def test_warm_start_configuration(recipe, values):
    shared = {key: value for key, value in values.items() if key != "prompts_per_step"}
    path = recipe()
    path.write_text(json.dumps({**shared, "demonstrations_per_step": 4}))
    found = violations(path, "prompts_per_step=3", model=SFTConfig)
    assert found == [
        "prompts_per_step: unknown key (did you mean demonstrations_per_step?)",
        "fit.mini_batch_size: is more than demonstrations_per_step (4)",
    ]
    assert load_config(SFTConfig, path, ["fit.mini_batch_size=4"]).fit.mini_batch_size == 4


def test_required_parts_are_named():
    found = violations(None)
    assert {"model: is required", "data: is required"} == set(found)


@pytest.mark.parametrize(
    "text, message",
    [("a: [", "is not valid YAML"), ("- 1", "must hold a mapping"), ("seed: 1\nseed: 2", "key 'seed' is given twice")],
)
def test_broken_recipes(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_recipe(path)


def test_missing_recipe(tmp_path):
    with pytest.raises(ConfigError, match="cannot read .*absent.yaml: No such file"):
        read_recipe(tmp_path / "absent.yaml")


def test_yaml_as_people_write_it(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("when: 2024-01-01\nflag: true\n")
    assert read_recipe(path) == {"when": "2024-01-01", "flag": True}


def test_overrides_are_typed_and_make_their_sections():
    result = apply_overrides({"a": {"b": 1}}, ["a.c=true", "d.e=null", "a.b=text", "f=[1, 2]", "g="])
    assert result == {"a": {"b": "text", "c": True}, "d": {"e": None}, "f": [1, 2], "g": None}


def test_broken_overrides_are_all_named():
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"a": 1}, ["novalue", "a.b=1", "x=[", ".=1"])
    assert [line.split(":")[0] for line in caught.value.violations] == [
        "--set novalue",
        "--set a.b=1",
        "--set x=[",
        "--set .=1",
    ]


def test_shipped_recipes_have_no_unknown_keys():
    recipes = [read_recipe(path) for path in Path("flows/recipes").glob("*.yaml")]
    assert recipes
    for recipe in recipes:
        (SFTConfig if "demonstrations_per_step" in recipe else PostTrainConfig).model_validate(recipe)


def test_the_form_has_no_untitled_numbers():
    """Prefect makes its form of this schema: every own field has a title."""
    for model in (PostTrainConfig, SFTConfig):
        untitled = [
            name for name, field in model.model_fields.items() if field.annotation in (int, str) and not field.title
        ]
        assert untitled == []
