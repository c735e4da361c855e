r"""Advantages in groups of samples of one prompt, which no lost sample bends.

    samples --by group_index--> groups --without the lost--> (reward - mean) / (std + 1e-6), or 0 for the whole group

Contract (vime's --custom-reward-post-process-path): (raw rewards, rewards), one each per sample, in order. Where no
sample is lost, all groups are whole and each has spread, they are what vime itself computes. vime's own takes the whole
batch for one group once group sizes differ, and lets a lost sample's reward of 0 into the mean.

Invariants. A lost sample gets 0 and changes nobody's reward. What a group cannot be compared in is not trained on: fewer
than two samples left, or, with the spread judged by accuracy, all right or all wrong. There the reward for calling the
tool would be all the difference, and dividing by its standard deviation would make it as large as that between a right
answer and a wrong one.

Samples and arguments are vime's, used as they come: this module imports neither vime nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

SPREADS = ("accuracy", "score")
GROUP_ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")  # vime normalizes rewards for these
STD_ESTIMATORS = ("grpo", "gspo", "cispo")
EPSILON = 1e-6  # vime's


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
        ValueError: `spread` is no such name.
    """
    if spread not in SPREADS:
        raise ValueError(f"advantage_spread is {spread!r}; it must be one of {', '.join(SPREADS)}")
    flat = list(_flatten(samples))
    trained = [_is_trained_on(sample) for sample in flat]
    raw = [
        _reward(args, sample) if kept else _reward_of_lost(args, sample)
        for sample, kept in zip(flat, trained, strict=True)
    ]
    if args.advantage_estimator not in GROUP_ESTIMATORS or not args.rewards_normalization:
        return raw, [value if kept else 0.0 for value, kept in zip(raw, trained, strict=True)]

    divide = args.advantage_estimator in STD_ESTIMATORS and args.grpo_std_normalization
    rewards = [0.0] * len(flat)
    for members in _groups(flat, args.n_samples_per_prompt):
        left = [index for index in members if trained[index]]
        judged = [_accuracy(flat[index], raw[index]) if spread == "accuracy" else raw[index] for index in left]
        if len(set(judged)) < 2:
            continue
        mean = math.fsum(raw[index] for index in left) / len(left)
        centered = {index: raw[index] - mean for index in left}
        scale = 1.0
        if divide:
            scale = math.sqrt(math.fsum(value * value for value in centered.values()) / (len(left) - 1)) + EPSILON
        for index, value in centered.items():
            rewards[index] = value / scale
    return raw, rewards


def _flatten(samples: Iterable[Any]) -> Iterator[Any]:
    """A generate function may return several samples for one."""
    for sample in samples:
        if isinstance(sample, list | tuple):
            yield from _flatten(sample)
        else:
            yield sample


def _is_trained_on(sample: Any) -> bool:
    if sample.remove_sample or sample.status == type(sample).Status.ABORTED:
        return False
    return sample.response_length > 0 if sample.loss_mask is None else any(sample.loss_mask)


def _reward(args: Any, sample: Any) -> float:
    return float(sample.reward[args.reward_key] if args.reward_key else sample.reward)


def _reward_of_lost(args: Any, sample: Any) -> float:
    return 0.0 if sample.reward is None else _reward(args, sample)


def _accuracy(sample: Any, reward: float) -> Any:
    """Whether an answer was right; the reward itself where it came from a function that does not say it."""
    return sample.reward["acc"] if isinstance(sample.reward, dict) and "acc" in sample.reward else reward


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
