r"""What the trainer gets of a finished sample that it is not to learn from.

    sample --lose--> lost: removed from the loss, reward 0, replay data whole; no number of the rollout counts it
    sample --mask--> masked: removed from the loss, its reward stays and is counted

Contract: a sample without a trained token, or without a usable reward, changes nobody's advantage and breaks no batch,
whatever vime's estimator asks of it. `sample.metadata["retool"]["untrained"]` says why, one of REASONS. Samples are
vime's, used as they come: this module does not import vime.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

from retool import ledger, replay_data, reward
from retool.episode import EndReason, Episode

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # at a sample that a fully asynchronous rollout starts again after each infrastructure error
OVERLONG = "overlong"
REASONS = ("nothing_sampled", "engine_abort", "infrastructure_error", "no_reward", OVERLONG)


def flatten(samples: Iterable[Any]) -> Iterator[Any]:
    """A generate function may return several samples for one."""
    for sample in samples:
        if isinstance(sample, list | tuple):
            yield from flatten(sample)
        else:
            yield sample


def is_trained_on(sample: Any) -> bool:
    if sample.remove_sample or sample.status == type(sample).Status.ABORTED:
        return False
    return sample.response_length > 0 if sample.loss_mask is None else any(sample.loss_mask)


def is_lost(sample: Any) -> bool:
    """Whether its reward says nothing: it is not trained on, and not because it is too long."""
    record = (getattr(sample, "metadata", None) or {}).get("retool") or {}
    return not is_trained_on(sample) and record.get("untrained") != OVERLONG


def is_given_up(sample: Any) -> bool:
    """Whether `lose` made it harmless."""
    return bool(sample.remove_sample) and is_lost(sample)


def with_the_mean_for_lost(values: list[Any], lost: list[bool]) -> list[Any]:
    """The mean of the others in the place of each lost one's value, so that the mean of all is theirs; 0 if there are
    no others."""
    known = [float(value) for value, gone in zip(values, lost, strict=True) if not gone]
    mean = math.fsum(known) / len(known) if known else 0.0
    return [mean if gone else value for value, gone in zip(values, lost, strict=True)]


def hand_over(episode: Episode, end: EndReason, overlong: Any, top_p_sets: bool, failure: Exception | None) -> None:
    """Make a sample whose episode ended harmless in whatever batch vime puts it, if nothing is to be learned from it.

    Args:
        episode: whose sample has its record in the metadata.
        end: not ABORT: what becomes of what vime aborts is its own affair.
        overlong: TOOL_CONFIGS["overlong"]; None in evaluation, where nothing is trained on.
        top_p_sets: whether the engine sends top-p sets.
        failure: the infrastructure error that ended it, if one did.
    """
    args, sample = episode.args, episode.sample
    record = sample.metadata["retool"]
    if end.status == "ABORTED":
        lose(args, sample, end.value, top_p_sets)
    elif overlong is not None:
        record["budget_left"] = max(0, episode.limits.room(sample))
        if not replay_data.has_expert_rows(args, sample):  # nothing was sampled after the last observations
            ledger.take_back_unseen(sample, episode.state.tokenizer)
            sample.payload_text = episode.prompt + sample.response
        if not is_trained_on(sample):
            lose(args, sample, "nothing_sampled", top_p_sets)
        elif overlong == "mask" and end in (EndReason.LENGTH, EndReason.CONTEXT):
            mask(sample, OVERLONG)
    if end is EndReason.INFRASTRUCTURE_ERROR:
        record["failed_attempts"] = episode.failed_attempts + 1
        if record["failed_attempts"] >= MAX_ATTEMPTS:
            logger.warning("sample %s is given up: it failed %s times: %s", sample.index, MAX_ATTEMPTS, failure)
            sample.status = sample.Status.FAILED  # an ABORTED one would be started again


def lose(args: Any, sample: Any, reason: str, top_p_sets: bool = True) -> None:
    """Make a sample train nothing and break nothing.

    Args:
        args: vime's.
        sample: its ids, mask and log-probs being in step.
        reason: one of REASONS.
        top_p_sets: whether the engine sends top-p sets, see `replay_data.fill_in`.
    """
    mask(sample, reason)
    keys = {getattr(args, name, None) for name in ("reward_key", "eval_reward_key")} - {None}
    sample.reward = {**dict.fromkeys(keys, 0.0), **reward.lost()} if keys else 0.0
    if getattr(args, "advantage_estimator", None) == "ppo" and not sample.response_length:
        ledger.count_the_last_prompt_token(sample)  # vime's PPO writes each reward on the last token of a response
    replay_data.fill_in(args, sample, top_p_sets)


def mask(sample: Any, reason: str) -> None:
    """Take a sample out of the loss and out of its group's mean."""
    sample.remove_sample = True
    sample.metadata = sample.metadata or {}
    sample.metadata.setdefault("retool", {})["untrained"] = reason


def settle(args: Any, samples: Iterable[Any], max_share: float) -> None:
    """Lose the samples of a batch whose reward cannot be used: NaN or infinite, of a reward function of the user's, or
    None, which vime also leaves on the others of a fan-out in which one was aborted.

    Args:
        args: vime's; `reward_key` is read.
        samples: vime's, or lists of them to any depth.
        max_share: of the batch, how many may be unusable by the fault of the reward function.

    Raises:
        ValueError: more are; the message names one of them.
    """
    flat = list(flatten(samples))
    aborted = {_execution(sample) for sample in flat if sample.status == type(sample).Status.ABORTED}
    unusable = [sample for sample in flat if is_trained_on(sample) and not has_usable_reward(args, sample)]
    faults = [sample for sample in unusable if sample.reward is not None or _execution(sample) not in aborted]
    if faults:
        one = faults[0]
        message = (
            f"{len(faults)} of {len(flat)} samples have no reward that can be trained on, the first of them sample "
            f"{one.index} of group {one.group_index}: {one.reward!r:.200} (--reward-key {args.reward_key})"
        )
        if len(faults) > max_share * len(flat):
            raise ValueError(message)
        logger.warning("%s; they are lost and will not be trained on", message)
    for sample in flat:
        if not is_trained_on(sample) and (sample.reward is None or not sample.remove_sample):
            unusable.append(sample)  # aborted in a generate function of the user's
    for sample in unusable:
        lose(args, sample, "no_reward")


def has_usable_reward(args: Any, sample: Any) -> bool:
    found = sample.reward
    try:
        values = [found[args.reward_key] if args.reward_key else found]
        if isinstance(found, dict) and "acc" in found:
            values.append(found["acc"])
        return all(value is not None and math.isfinite(value) for value in values)
    except (TypeError, ValueError, KeyError, OverflowError):
        return False


def _execution(sample: Any) -> tuple[Any, ...]:
    """What the samples have in common that one run of a generate function fans out into."""
    return sample.group_index, getattr(sample, "rollout_id", None)


# ---------------------------------------------------------------------------------------------------------------------
# Overlong samples (DAPO, Yu et al. 2025, 3.4): TOOL_CONFIGS["overlong"]
# ---------------------------------------------------------------------------------------------------------------------


def check_overlong(setting: Any) -> None:
    """ValueError if it is none of "wrong", "mask" and a number of tokens."""
    is_tokens = isinstance(setting, int) and not isinstance(setting, bool) and setting > 0
    if setting not in ("wrong", "mask") and not is_tokens:
        raise ValueError(f'overlong is {setting!r}; it must be "wrong", "mask" or a number of tokens above 0')


def overlong_penalty(budget_left: int | None, setting: Any) -> float:
    """What a sample's score loses: nothing as long as `setting` tokens of its budget are left, 1 when none is, and in
    between in proportion.

    Args:
        budget_left: tokens; None in evaluation, which has no penalty.
        setting: TOOL_CONFIGS["overlong"].
    """
    if budget_left is None or isinstance(setting, str):
        return 0.0
    return 1.0 - min(setting, max(0, budget_left)) / setting
