"""Models on groups of devices of their own: who is asked for what, and what is done again when one of them is lost."""

import pytest

from flows.checks import check
from flows.post_train import post_train

from .algorithm_runs import changed, ledger_of
from .conftest import FakePool, Killed, target

PLACEMENT = {
    "values": {"roles": ["critic"], "parallel": {"data_parallel_size": 2}},
    "frozen": {"roles": ["reference"], "parallel": {"tensor_parallel_size": 2}},
}


@pytest.fixture
def placed(config, pool):
    """PPO with a reference, each model on devices of its own."""
    pool.others = new_pools()
    loss = {**config.loss.model_dump(mode="json"), "kl": {"coef": 0.1}}
    return changed(config, {"estimator": "gae"}, loss=loss, placement=PLACEMENT)


def new_pools():
    return {"default-values": FakePool(role="critic"), "default-frozen": FakePool(role="reference")}


def groups(pool):
    return {"actor": pool.current, "values": pool.others["default-values"], "frozen": pool.others["default-frozen"]}


def operations(pool):
    return {op for op, _ in pool.executed}


def digests(config):
    ledger = ledger_of(config)
    stages = ("rollout", "reference", "values", "advantage", "update")
    return {(stage, step): ledger.get(stage, step).digest for stage in stages for step in ledger.committed(stage)}


def test_each_group_builds_and_does_what_its_models_need(placed, pool):
    post_train.fn(placed)
    of = groups(pool)
    specs = {name: next(args["spec"] for op, _, args in group.requests if op == "load") for name, group in of.items()}
    built = {
        name: {part for part in ("model", "reference", "critic", "generation") if spec[part] is not None}
        for name, spec in specs.items()
    }
    assert built == {"actor": {"model", "generation"}, "values": {"critic"}, "frozen": {"reference"}}
    assert specs["values"]["parallel"]["data_parallel_size"] == specs["frozen"]["parallel"]["tensor_parallel_size"] == 2
    assert operations(of["actor"]) == {"describe", "load", "generate", "update", "save"}
    assert operations(of["values"]) == {"describe", "load", "annotate", "update", "save"}
    assert operations(of["frozen"]) == {"describe", "load", "annotate"}
    assert of["actor"].trained == of["values"].trained and len(of["values"].trained) == 3
    names = [entry.path for entry in ledger_of(placed).get("checkpoint", 3).files]
    assert names == ["actor-00000.safetensors", "critic-00000.safetensors"]
    assert all(group.released == [1] for group in of.values())


def test_placement_changes_nothing_that_is_computed(placed, pool):
    post_train.fn(placed)
    apart = digests(placed)
    together = placed.model_copy(update={"placement": {}, "experiment": "together"})
    post_train.fn(together)
    assert digests(together).keys() == apart.keys()
    metrics = [ledger_of(config).get("update", 2).metrics for config in (placed, together)]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("group", ["actor", "values"])
@pytest.mark.parametrize("lost", [None, "actor", "values", "frozen"])
def test_killed_at_one_groups_part_of_an_update(placed, pool, group, when, lost):
    """Whatever the other group has done of the update by then, both end with each update once."""
    dying = groups(pool)[group]

    def kill(op, args, at):
        if (op, target(args), at) == ("update", 1, when):
            dying.on_operation = lambda *_: None
            raise Killed

    dying.on_operation = kill
    with pytest.raises(Killed):
        post_train.fn(placed)
    if lost == "actor":
        pool.current = FakePool()
    elif lost is not None:
        pool.others[f"default-{lost}"] = FakePool(role={"values": "critic", "frozen": "reference"}[lost])
    post_train.fn(placed)
    of = groups(pool)
    assert [version for version, *_ in of["actor"].trained] == [0, 1, 2]
    assert of["actor"].trained == of["values"].trained
    loads = sum(n for (op, _), n in of["frozen"].executed.items() if op == "load")
    assert loads == 1  # a group that trains nothing keeps its weights from attempt to attempt
    if lost in (None, "frozen"):  # nobody's weights were lost, so nothing was trained twice
        assert {n for (op, _), n in of["actor"].executed.items() if op == "update"} == {1}


def test_groups_are_given_back_when_one_cannot_be_had(placed, pool):
    def busy(run, holder, wait_s):
        raise ConnectionError("in use")

    pool.others["default-values"].lease = busy  # the last one that is asked for
    with pytest.raises(ConnectionError):
        post_train.fn(placed)
    assert pool.current.released == pool.others["default-frozen"].released == [1]


def test_wrong_placements_are_refused_all_at_once(placed):
    bad = placed.model_dump(mode="json")
    bad["placement"] = {
        "actor": {"roles": ["critic"]},
        "a": {"roles": ["critic"], "parallel": {"tensor_parallel_size": 3}},
        "b": {"roles": ["reference"], "parallel": {"pipeline_parallel_size": 5}},
        "x" * 40: {"roles": ["critic"]},
    }
    bad["loss"]["kl"]["coef"] = 0.0
    _, violations = check(type(placed).model_validate(bad))
    told = "\n".join(str(violation) for violation in violations)
    assert "placement.actor: a group is named" in told and f"placement.{'x' * 40}: a group is named" in told
    assert "placement.b.roles: this run has no reference" in told
    assert told.count("critic is placed 3 times") == 3


def test_a_placed_model_must_fit_into_its_groups_layout(placed):
    fits = placed.model_dump(mode="json")
    fits["placement"]["values"]["parallel"] = {"tensor_parallel_size": 3}
    _, violations = check(type(placed).model_validate(fits))
    (violation,) = violations
    assert violation.keys == ("critic.model",) and "3" in violation.message
