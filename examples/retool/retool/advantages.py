r"""Advantages in groups of samples of one prompt, which no lost sample bends.

    samples --by group_index--> groups --without the untrained--> (reward - mean) / (std + 1e-6), or 0 for all

Contract (vime's --custom-reward-post-process-path): (raw rewards, rewards), one each per sample, in order. Where no
sample is lost, all groups are whole and each has spread, they are what vime itself computes. vime's own takes the
whole batch for one group once group sizes differ, and lets a lost sample's reward of 0 into the mean.

Invariants. A sample that is not trained on gets 0 and changes nobody's reward; a lost one has the mean of the others
as its raw reward, so that vime's `rollout/raw_reward` is theirs. What a group cannot be compared in is not trained on:
fewer than two samples left, or, with the spread judged by accuracy, all right or all wrong. There the reward for
calling the tool would be all the difference, and dividing by its standard deviation would make it as large as that
between a right answer and a wrong one.

Samples and arguments are vime's, used as they come: this module imports neither vime nor torch.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from retool.handover import flatten, has_usable_reward, is_lost, is_trained_on, with_the_mean_for_lost

SPREADS = ("accuracy", "score")
GROUP_ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")  # vime normalizes rewards for these
STD_ESTIMATORS = ("grpo", "gspo", "cispo")
EPSILON = 1e-6  # vime's
GROUP_KINDS = ("mixed", "all_right", "all_wrong", "lost")


def check_spread(spread: Any) -> None:
    """ValueError if there is no such one."""
    if spread not in SPREADS:
        raise ValueError(f"advantage_spread is {spread!r}; it must be one of {', '.join(SPREADS)}")


def normalize(args: Any, samples: Iterable[Any], spread: str) -> tuple[list[float], list[float]]:
    """Rewards as advantages, by the rules of vime's arguments.

    Args:
        args: vime's; `advantage_estimator`, `rewards_normalization`, `grpo_std_normalization`, `n_samples_per_prompt`
            and `reward_key` are read.
        samples: the samples of a rollout, or lists of them to any depth.
        spread: by what a group is seen to have spread: "accuracy", or "score" for vime's behavior, where any
            difference in the score is one.

    Returns:
        (raw rewards, rewards), each as long as there are samples.

    Raises:
        ValueError: `spread` is no such name, a sample that is trained on has no usable reward, or vime would fail on a
            batch in which no sample is trained on.
    """
    check_spread(spread)
    flat = list(flatten(samples))
    trained = [is_trained_on(sample) for sample in flat]
    lost = [is_lost(sample) for sample in flat]
    raw = [0.0 if gone else _reward(args, sample) for sample, gone in zip(flat, lost, strict=True)]
    raw = with_the_mean_for_lost(raw, lost)
    if flat and not any(trained) and getattr(args, "normalize_advantages", False):
        raise ValueError("no sample of this rollout can be trained on, which vime's --normalize-advantages fails on")
    if args.advantage_estimator not in GROUP_ESTIMATORS or not args.rewards_normalization:
        return raw, [value if kept else 0.0 for value, kept in zip(raw, trained, strict=True)]

    divide = args.advantage_estimator in STD_ESTIMATORS and args.grpo_std_normalization
    rewards = [0.0] * len(flat)
    for members in _groups(flat, args.n_samples_per_prompt):
        left = [index for index in members if trained[index]]
        if _kind(args, [flat[index] for index in left], spread) != "mixed":
            continue
        mean = math.fsum(raw[index] for index in left) / len(left)
        centered = {index: raw[index] - mean for index in left}
        scale = 1.0
        if divide:
            scale = math.sqrt(math.fsum(value * value for value in centered.values()) / (len(left) - 1)) + EPSILON
        for index, value in centered.items():
            rewards[index] = value / scale
    return raw, rewards


def group_kind(args: Any, group: Iterable[Any], spread: str) -> str:
    """One of GROUP_KINDS: "mixed" if `normalize` would train on the group, else the reason why not."""
    return _kind(args, [sample for sample in flatten(group) if is_trained_on(sample)], spread)


def _kind(args: Any, trained: list[Any], spread: str) -> str:
    by_accuracy = spread == "accuracy"
    return kind_of([_accuracy(args, one) if by_accuracy else _reward(args, one) for one in trained])


def kind_of(judged: Sequence[float]) -> str:
    """One of GROUP_KINDS, by what tells right from wrong (above 0 or not) in the samples that are trained on."""
    if len(judged) < 2:
        return "lost"
    if len(set(judged)) > 1:
        return "mixed"
    return "all_right" if judged[0] > 0 else "all_wrong"


def _reward(args: Any, sample: Any) -> float:
    if not has_usable_reward(args, sample):
        raise ValueError(
            f"the reward of sample {getattr(sample, 'index', None)} cannot be trained on: {sample.reward!r:.200}"
        )
    return float(sample.reward[args.reward_key] if args.reward_key else sample.reward)


def _accuracy(args: Any, sample: Any) -> float:
    """Whether an answer was right; the reward itself where it came from a function that does not say it."""
    reward = _reward(args, sample)
    return float(sample.reward["acc"]) if isinstance(sample.reward, dict) and "acc" in sample.reward else reward


def _groups(samples: list[Any], size: int) -> list[list[int]]:
    """The indices of each group. Samples that no data source numbered stand in the order of their groups, as vime has
    it, if they are whole groups; else they are one."""
    groups: dict[Any, list[int]] = {}
    unnumbered = [index for index, sample in enumerate(samples) if getattr(sample, "group_index", None) is None]
    whole = len(unnumbered) % size == 0
    for index, sample in enumerate(samples):
        if getattr(sample, "group_index", None) is not None:
            groups.setdefault(("numbered", sample.group_index), []).append(index)
    for place, index in enumerate(unnumbered):
        groups.setdefault(("unnumbered", place // size if whole else 0), []).append(index)
    return list(groups.values())


# What vime's advantages are computed from: a list each, with an entry per sample.
_PER_SAMPLE = (
    "rollout_log_probs log_probs ref_log_probs rewards values response_lengths loss_masks total_lengths".split()
)


def without_untrained(vimes: Callable[[Any, dict[str, Any]], None], args: Any, rollout_data: dict[str, Any]) -> None:
    """vime's own advantages of the samples that have a trained token, and zeros for the others.

    Args:
        vimes: vime's `compute_advantages_and_returns`, which fills in "advantages" and "returns".
        args: vime's.
        rollout_data: a training rank's, with "kl" filled in; "advantages" and "returns" are set.
    """
    kl = rollout_data["kl"]
    kept = [index for index, mask in enumerate(rollout_data["loss_masks"]) if mask.sum() > 0]
    advantages, returns = ([one.new_zeros(one.shape) for one in kl] for _ in range(2))
    if kept:
        # The rest of vime's function follows where it called this one.
        own = dict(custom_advantage_function_path=None, normalize_advantages=False, use_opd=False)
        part = {name: [rollout_data[name][i] for i in kept] for name in _PER_SAMPLE if rollout_data.get(name)}
        vimes(Namespace(**{**vars(args), **own}), part)
        for place, index in enumerate(kept):
            advantages[index], returns[index] = part["advantages"][place], part["returns"][place]
    rollout_data["advantages"], rollout_data["returns"] = advantages, returns
