"""Advantages: vime's own where nothing was lost, and nobody's changed where something was."""

import ast
import math
import os
from pathlib import Path
from types import SimpleNamespace

import generate_with_retool as plugin
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from retool import advantages

from vime.utils.types import Sample

RIGHT, WRONG = 1.0, -1.0


def make_args(**changes):
    values = dict(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=True,
        n_samples_per_prompt=8,
        rollout_batch_size=1,
        reward_key="score",
    )
    return SimpleNamespace(**{**values, **changes})


def sample(score, group=0, **changes):
    made = Sample(group_index=group, response_length=2, loss_mask=[1, 0], status=Sample.Status.COMPLETED)
    made.reward = {"score": score, "acc": score > 0, "pred": ""}
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def lost(group=0):
    reward = {"score": 0.0, "acc": False, "pred": ""}
    return sample(0.0, group, reward=reward, remove_sample=True, status=Sample.Status.ABORTED)


def rewards(samples, spread="accuracy", **args):
    raw, normalized = advantages.normalize(make_args(**args), samples, spread)
    assert len(raw) == len(normalized)
    return normalized


@pytest.mark.parametrize("spread", advantages.SPREADS)
@pytest.mark.parametrize("score", [WRONG, RIGHT])
def test_a_lost_sample_among_equals_changes_nothing(score, spread):
    assert rewards([sample(score) for _ in range(7)] + [lost()], spread) == [0.0] * 8


def test_the_rewards_that_vime_logs_are_the_samples_own():
    without = sample(0.0, reward=None, remove_sample=True)
    raw, _ = advantages.normalize(make_args(), [sample(RIGHT), lost(), sample(WRONG), without], "accuracy")
    assert raw == [RIGHT, 0.0, WRONG, 0.0]


LOST = {
    "removed": dict(remove_sample=True),
    "aborted": dict(status=Sample.Status.ABORTED),
    "masked": dict(loss_mask=[0, 0]),
    "empty": dict(loss_mask=[], response_length=0),
    "empty without a mask": dict(loss_mask=None, response_length=0),
    "aborted by vime": dict(status=Sample.Status.ABORTED, reward=None),
}


@pytest.mark.parametrize("changes", LOST.values(), ids=LOST.keys())
@pytest.mark.parametrize("estimator", [*advantages.GROUP_ESTIMATORS, "ppo", "reinforce_plus_plus"])
def test_the_others_get_what_they_get_without_the_lost_one(changes, estimator):
    others = [sample(RIGHT), sample(WRONG), sample(-0.9), sample(RIGHT, loss_mask=None, response_length=1)]
    one_lost = [*others[:2], sample(-0.6, **changes), *others[2:]]
    alone = rewards(others, advantage_estimator=estimator)
    together = rewards(one_lost, advantage_estimator=estimator)
    assert together[2] == 0.0 and together[:2] + together[3:] == alone
    assert len(set(alone)) == 3


def test_groups_are_told_by_their_index_whatever_their_sizes():
    groups = [[sample(RIGHT, 5), sample(WRONG, 5)], [sample(RIGHT, 9), sample(WRONG, 9), sample(WRONG, 9)]]
    expected = [rewards(group) for group in groups]
    mixed = [groups[1][0], groups[0][0], groups[1][1], groups[0][1], groups[1][2]]
    assert rewards(mixed) == [expected[1][0], expected[0][0], expected[1][1], expected[0][1], expected[1][2]]
    assert rewards(groups) == expected[0] + expected[1]  # nested, as a generate function may return them
    assert rewards([[groups[0][0], [groups[0][1]]], groups[1]]) == expected[0] + expected[1]


class Bare(SimpleNamespace):
    """A sample of a class that knows no groups."""

    Status = Sample.Status


def test_samples_without_an_index_stand_in_whole_groups_or_are_one():
    scores = [RIGHT, WRONG, WRONG, WRONG]
    numbered = [sample(score, index // 2) for index, score in enumerate(scores)]
    unnumbered = [sample(score, None) for score in scores]
    assert rewards(unnumbered, n_samples_per_prompt=2) == rewards(numbered)
    assert rewards(unnumbered, n_samples_per_prompt=3) == rewards([sample(score) for score in scores])
    bare = [Bare(**{k: v for k, v in vars(one).items() if k != "group_index"}) for one in unnumbered]
    assert rewards(bare, n_samples_per_prompt=2) == rewards(numbered)


def test_a_group_that_cannot_be_compared_trains_nothing():
    assert rewards([sample(RIGHT), lost(), lost()]) == [0.0] * 3
    assert rewards([lost(), lost()]) == [0.0] * 2
    assert rewards([]) == []
    assert rewards([sample(RIGHT)], n_samples_per_prompt=1) == [0.0]  # vime's own is NaN


def test_the_tool_bonus_alone_is_no_spread():
    wrong = [sample(score) for score in (-1.1, -1.0, -0.9, -0.6)]
    assert rewards(wrong) == [0.0] * 4
    assert max(rewards(wrong, "score")) > 1.0  # vime's behavior
    unsaid = [sample(0, reward=score) for score in (-1.1, -1.0)]  # a reward of another function
    assert rewards(unsaid, reward_key=None)[1] > 0


def test_the_setting(monkeypatch):
    wrong = [sample(score) for score in (-1.1, -1.0, -0.9, -0.6)]
    assert plugin.normalize_rewards(make_args(), wrong) == ([-1.1, -1.0, -0.9, -0.6], [0.0] * 4)
    monkeypatch.setitem(plugin.TOOL_CONFIGS, "advantage_spread", "score")
    assert plugin.normalize_rewards(make_args(), wrong)[1][-1] > 1.0
    monkeypatch.setitem(plugin.TOOL_CONFIGS, "advantage_spread", "luck")
    with pytest.raises(ValueError, match="advantage_spread is 'luck'.*accuracy, score"):
        plugin.normalize_rewards(make_args(), wrong)


def test_a_reward_that_is_missing_is_an_error():
    with pytest.raises(ValueError, match="reward of sample 3 cannot be trained on: None"):
        rewards([sample(RIGHT), sample(RIGHT, reward=None, index=3)])


def test_the_raw_rewards_of_the_lost_leave_the_mean_of_the_others():
    """vime's rollout/raw_reward is the mean of all."""
    overlong = sample(WRONG, remove_sample=True, metadata={"retool": {"untrained": "overlong"}})
    raw, normalized = advantages.normalize(
        make_args(), [sample(RIGHT), lost(), sample(WRONG), lost(1), overlong], "accuracy"
    )
    assert (
        raw == pytest.approx([RIGHT, -1 / 3, WRONG, -1 / 3, WRONG]) and normalized[4] == 0
    )  # it was wrong all the same
    assert advantages.normalize(make_args(), [lost()], "accuracy") == ([0.0], [0.0])
    with pytest.raises(ValueError, match="normalize-advantages"):
        advantages.normalize(make_args(normalize_advantages=True), [lost()], "accuracy")


WRONGS = [sample(score) for score in (-1.1, -1.0, -0.9, -0.6)]


@pytest.mark.parametrize(
    "group, kind, by_score",
    [
        ([sample(RIGHT), sample(WRONG)], "mixed", "mixed"),
        ([sample(RIGHT)] * 3 + [lost()], "all_right", "all_right"),
        (WRONGS, "all_wrong", "mixed"),
        ([sample(RIGHT), sample(WRONG, remove_sample=True), lost()], "lost", "lost"),
        ([[sample(RIGHT)], [sample(WRONG), lost()]], "mixed", "mixed"),
        ([sample(RIGHT), sample(WRONG, loss_mask=[0, 0])], "lost", "lost"),
    ],
)
def test_a_group_is_kept_if_it_is_trained_on(monkeypatch, group, kind, by_score):
    for spread, expected in (("accuracy", kind), ("score", by_score)):
        monkeypatch.setitem(plugin.TOOL_CONFIGS, "advantage_spread", spread)
        found = plugin.keep_group(make_args(), group)
        assert found.keep is (expected == "mixed") and found.reason == (None if found.keep else expected)
        assert found.keep == any(plugin.normalize_rewards(make_args(), group)[1])


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, {}, {"score": None}, {"score": "high"}, 1.0, {"acc": 1}])
def test_a_reward_that_cannot_be_used_loses_its_sample(caplog, reward):
    batch = [sample(RIGHT), sample(WRONG), sample(WRONG, reward=reward, index=7), sample(RIGHT, 1), sample(WRONG, 1)]
    raw, normalized = plugin.normalize_rewards(make_args(), batch)
    assert batch[2].remove_sample and batch[2].metadata["retool"]["untrained"] == "no_reward"
    assert (
        normalized[2] == 0
        and normalized[:2] == rewards([sample(RIGHT), sample(WRONG)])
        and all(map(math.isfinite, raw))
    )
    assert batch[2].reward["score"] == 0 and "sample 7 of group 0" in caplog.text
    with pytest.raises(ValueError, match="2 of 3 samples have no reward .*the first of them sample 8 of group 0"):
        plugin.normalize_rewards(make_args(), [sample(RIGHT), *(sample(0, reward=reward, index=i) for i in (8, 9))])


@pytest.mark.parametrize("acc", [math.nan, None, "yes"])
def test_an_accuracy_that_cannot_be_used_loses_its_sample(acc):
    batch = [sample(RIGHT), sample(WRONG), sample(0, reward={"score": 1.0, "acc": acc})]
    assert plugin.normalize_rewards(make_args(), batch)[1][2] == 0 and batch[2].remove_sample


def test_a_lost_sibling_of_a_fan_out_is_no_type_error():
    """vime gives none of them a reward then, and its own metrics read all."""
    aborted = sample(0, reward=None, status=Sample.Status.ABORTED, rollout_id=5)
    fan_out = [sample(RIGHT, reward=None, rollout_id=5), aborted]
    batch = [sample(RIGHT, rollout_id=3), sample(WRONG, rollout_id=4), *fan_out]
    assert plugin.keep_group(make_args(), [batch[:1], batch[1:2], fan_out]).keep
    assert plugin.normalize_rewards(make_args(), batch)[1][2:] == [0, 0] and all(one.remove_sample for one in fan_out)
    assert [one.reward["score"] for one in batch] == [RIGHT, WRONG, 0, 0]


@pytest.fixture(scope="module")
def vimes():
    """vime's own post-processing, taken from its source: importing its module needs what only a trainer has."""
    root = os.environ.get("VIME_ROOT")
    if not root:
        pytest.skip("VIME_ROOT names no vime checkout to compare with")
    torch = pytest.importorskip("torch", reason="vime computes advantages with torch, which is not installed here")
    source = (Path(root) / "vime" / "ray" / "rollout.py").read_text()
    tree = ast.parse(source)
    [function] = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_post_process_rewards"
    ]
    names = {"torch": torch, "Sample": Sample}
    exec(compile(ast.Module([function], []), "vime", "exec"), names)

    def post_process(args, samples):
        manager = SimpleNamespace(args=args, custom_reward_post_process_func=None)
        return names["_post_process_rewards"](manager, samples)

    post_process.knows = lambda estimator: f'"{estimator}"' in ast.get_source_segment(source, function)
    return post_process


SCORES = st.sampled_from([RIGHT, -1.1, -1.05, -1.0, -0.95, -0.6])


@settings(max_examples=200)
@given(
    groups=st.integers(2, 5).flatmap(
        lambda size: st.lists(st.lists(SCORES, min_size=size, max_size=size), min_size=1, max_size=4)
    ),
    estimator=st.sampled_from([*advantages.GROUP_ESTIMATORS, "ppo", "reinforce_plus_plus"]),
    normalization=st.booleans(),
    std=st.booleans(),
    spread=st.sampled_from(advantages.SPREADS),
)
def test_whole_groups_get_vimes_own(vimes, groups, estimator, normalization, std, spread):
    assume(vimes.knows(estimator) or estimator not in advantages.GROUP_ESTIMATORS)  # June's does not know cispo
    args = make_args(
        advantage_estimator=estimator,
        rewards_normalization=normalization,
        grpo_std_normalization=std,
        n_samples_per_prompt=len(groups[0]),
        rollout_batch_size=len(groups),
    )
    samples = [sample(score, index) for index, group in enumerate(groups) for score in group]
    expected_raw, expected = vimes(args, samples)
    raw, mine = advantages.normalize(args, samples, spread)
    assert raw == expected_raw
    has_spread = [len({score > 0 for score in group} if spread == "accuracy" else set(group)) > 1 for group in groups]
    for index, (one, other) in enumerate(zip(mine, expected, strict=True)):
        if not normalization or estimator not in advantages.GROUP_ESTIMATORS or has_spread[index // len(groups[0])]:
            assert one == pytest.approx(other, abs=1e-4)
        else:
            assert one == 0.0


def test_vimes_own_bends_the_others(vimes):
    """What the plugin's is for; if vime mends it, this says so."""
    _, wrong = vimes(make_args(), [sample(WRONG) for _ in range(7)] + [lost()])
    _, right = vimes(make_args(), [sample(RIGHT) for _ in range(7)] + [lost()])
    assert wrong[0] == pytest.approx(-0.3535, abs=1e-3) and right[0] == pytest.approx(0.3535, abs=1e-3)
