"""The control of the toy: RL as it is, except that the rewards say nothing.

`--custom-reward-post-process-path trainer.control.shuffled` deals the advantages of each group out anew among its
episodes. Whatever a model gains under it, it did not gain from the rewards.
"""

from __future__ import annotations

import random
from typing import Any

from generate_with_retool import normalize_rewards


def shuffled(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """The plugin's rewards, and its advantages in an order that has nothing to do with the episodes of the group."""
    raw, advantages = normalize_rewards(args, samples)
    groups: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(sample.group_index, []).append(place)
    for group, places in groups.items():
        dealt = [advantages[place] for place in places]
        random.Random(f"{args.rollout_seed} {group}").shuffle(dealt)
        for place, advantage in zip(places, dealt, strict=True):
            advantages[place] = advantage
    return raw, advantages
