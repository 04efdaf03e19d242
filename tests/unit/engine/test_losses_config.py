"""What a loss's settings refuse, in words, without torch."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from engine.losses.config import DESCRIPTIONS, LossConfig, loss_problems


def test_defaults_and_every_name_have_no_problem():
    for name, entry in DESCRIPTIONS.items():
        mode = "seq-mean-token-mean" if entry.sequence else "token-mean"
        assert loss_problems(LossConfig(name=name, aggregation=mode)) == []


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValidationError, match="did you mean 'gspo'"):
        LossConfig(name="gpso")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (dict(name="gspo"), "aggregation"),
        (dict(name="gmpo", aggregation="token-sum"), "aggregation"),
        (dict(name="clip_cov", covariance={"low": 5, "high": 1}), "covariance.low"),
        (dict(kl={"coef": 0.1, "estimator": "full"}), "kl.estimator"),
        (dict(kl={"coef": 0.1, "estimator": "k1"}), "kl.estimator"),
        (dict(kl={"coef": 0.1, "estimator": "k3+", "weighted": True}), "kl.weighted"),
        (dict(kl={"target": 0.1}), "kl.target"),
        (dict(correction={"weights": "token-mask", "low": 3.0}), "correction.low"),
        (dict(correction={"weights": "token-truncate", "low": 0.5}), "correction.low"),
        (dict(correction={"normalize": True}), "correction.normalize"),
        (dict(correction={"geometric_low": 2.0, "geometric_high": 1.0}), "correction.geometric_low"),
        (dict(correction={"bypass": True, "weights": "token-mask"}), "correction.bypass"),
        (dict(name="sft", nll_coef=0.1), "nll_coef"),
        (dict(name="sft", correction={"bypass": True}), "correction"),
        (dict(name="no.such.module:loss"), "name"),
        (dict(name="engine.losses.kl:no_such_function"), "name"),
        (dict(name="engine.losses.aggregate:sequence_means"), "name"),
    ],
)
def test_what_does_not_belong_together(changes, key):
    (problem,) = loss_problems(LossConfig(**changes))
    assert problem.startswith(key)


@pytest.mark.parametrize(
    "changes",
    [
        dict(kl={"coef": 0.1, "estimator": "k1", "weighted": True}),
        dict(name="reinforce", correction={"bypass": True, "weights": "token-truncate"}),
        dict(correction={"bypass": True, "geometric_high": 1.01}),
        dict(name="engine.losses.clipped:ppo_loss"),
        dict(name="engine.losses.registry:ppo_loss"),
    ],
)
def test_what_does(changes):
    assert loss_problems(LossConfig(**changes)) == []


def test_names_settings_and_problems_need_no_torch():
    program = (
        "import sys; from engine.losses.config import DESCRIPTIONS, LossConfig, loss_problems;"
        "loss_problems(LossConfig(name='engine.losses.clipped:ppo_loss')); LossConfig.model_json_schema();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_form_can_offer_the_names():
    schema = LossConfig.model_json_schema()["properties"]["name"]
    assert schema["anyOf"][0]["enum"] == list(DESCRIPTIONS)
