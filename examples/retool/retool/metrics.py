"""What a rollout says about tool use, in numbers: from finished samples to {name: value}.

    samples --summarize--> {"accuracy": 0.41, "outcome/timeout": 0.02, ...} --generate_with_retool--> vime's trackers

Contract: `summarize` reads samples and changes nothing. A number without anything to average over is left out, so a
curve has a gap there and no false zero. The names are bounded, whatever a model writes: METRICS lists every one, and
docs/metrics.md says them to the reader.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from retool.advantages import GROUP_KINDS, kind_of
from retool.chat import Observation, find_observations
from retool.episode import EndReason
from retool.handover import OVERLONG, REASONS

OUTCOMES = (
    *("ok", "error", "syntax_error", "empty", "timeout", "memory", "too_long", "crashed", "refused", "invalid"),
    "not_found",
)

# By which a refusal is counted under its own name: what math models ask for, and what an allowed list may be widened
# by.
REFUSED_MODULES = ("numpy", "sympy", "scipy", "pandas", "matplotlib", "sys", "os", "time", "networkx", "mpmath")
CALL_BUCKETS = (("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3_to_4", 3, 4), ("5_to_8", 5, 8), ("9_or_more", 9, math.inf))

_UNREADABLE = "Your previous action is invalid"  # how the loop's own observation of an unreadable turn begins
_REFUSED = "Error: not allowed: "
_REFUSED_MODULE = re.compile(r"\bmodule '([^'\s]{1,100})'(?:, reached through '[^'\s]{1,100}',)? is not available")

_TRUNCATED = {reason.value for reason in EndReason if reason.status == "TRUNCATED"}
_LOST_BY_MACHINES = (EndReason.INFRASTRUCTURE_ERROR.value, EndReason.ENGINE_ABORT.value)

METRICS = (
    "accuracy",
    "reward",
    *(f"{what}_by_calls/{name}" for what in ("reward", "accuracy") for name, _, _ in CALL_BUCKETS),
    *(f"groups/{kind}" for kind in GROUP_KINDS),
    *(f"untrained/{reason}" for reason in REASONS),
    "samples_with_calls",
    "calls_per_sample",
    "turns_per_sample",
    *(f"{what}_seconds/p{percent}" for what in ("queue", "run") for percent in (50, 95)),
    "tool_seconds_per_sample",
    "repaired_errors",
    "response_tokens/right",
    "response_tokens/wrong",
    "truncated_right",
    *(f"outcome/{outcome}" for outcome in (*OUTCOMES, "unreadable", "other")),
    *(f"refused_module/{module}" for module in (*REFUSED_MODULES, "other", "none")),
    *(f"end_reason/{reason.value}" for reason in EndReason),
    "observation_tokens",
    "hallucinated_outputs",
    "infrastructure_errors",
)


class _Record(NamedTuple):
    """What the metrics take from one sample."""

    end_reason: str
    untrained: str | None
    group: Any
    turns: int
    calls: list[Mapping[str, Any]]
    hallucinated: int
    observations: list[Observation]
    score: float | None  # None for a sample that was lost
    accurate: bool | None
    tokens: int
    observed_tokens: int


def summarize(samples: Iterable[Any]) -> dict[str, float]:
    """The metrics of one rollout, or of one evaluation data set.

    Args:
        samples: vime's, rolled out by `generate` and scored by `reward_func`. Those that another generate function
            rolled out, without "retool" in their metadata, are passed over.

    Returns:
        A value per name of METRICS, as far as there is something to average over.
    """
    records = [_read(sample) for sample in samples if (sample.metadata or {}).get("retool")]
    if not records:
        return {}
    return {
        **_rewards(records),
        **_groups(records),
        **{f"untrained/{reason}": sum(r.untrained == reason for r in records) / len(records) for reason in REASONS},
        **_lengths(records),
        **_calls(records),
        **_refused_modules(records),
        **_shares("end_reason", Counter(record.end_reason for record in records), [r.value for r in EndReason]),
        **_mean("observation_tokens", sum(r.observed_tokens for r in records), sum(r.tokens for r in records)),
        "hallucinated_outputs": sum(record.hallucinated for record in records) / len(records),
        "infrastructure_errors": sum(r.end_reason in _LOST_BY_MACHINES for r in records),
    }


def _read(sample: Any) -> _Record:
    retool = sample.metadata["retool"]
    mask = sample.loss_mask or []
    score, accurate, untrained = None, None, retool.get("untrained")
    if not sample.remove_sample or untrained == OVERLONG:
        score, accurate = _reward(sample.reward)
    return _Record(
        end_reason=retool["end_reason"],
        untrained=untrained,
        group=getattr(sample, "group_index", None),
        turns=retool["turns"],
        calls=retool["calls"],
        hallucinated=retool["hallucinated_outputs"],
        observations=find_observations(sample.response or ""),
        score=score,
        accurate=accurate,
        tokens=len(mask),
        observed_tokens=len(mask) - sum(mask),
    )


def _reward(reward: Any) -> tuple[float | None, bool | None]:
    """(score, whether it is right); a reward that is one number, of a reward function of the user's, has no
    accuracy."""
    if isinstance(reward, Mapping):
        score, accurate = reward.get("score"), reward.get("acc")
        return (None if score is None else float(score)), (None if accurate is None else bool(accurate))
    return (None if reward is None else float(reward)), None


def _rewards(records: Sequence[_Record]) -> dict[str, float]:
    right = [(len(record.calls), float(record.accurate)) for record in records if record.accurate is not None]
    scored = [(len(record.calls), record.score) for record in records if record.score is not None]
    found: dict[str, float] = {}
    for name, values in (("accuracy", right), ("reward", scored)):
        found |= _mean(name, sum(value for _, value in values), len(values))
        for bucket, least, limit in CALL_BUCKETS:
            inside = [value for calls, value in values if least <= calls <= limit]
            found |= _mean(f"{name}_by_calls/{bucket}", sum(inside), len(inside))
    return found


def _groups(records: Sequence[_Record]) -> dict[str, float]:
    """Shares of the groups, by what tells right from wrong in them; none in an evaluation, where vime numbers none."""
    groups: dict[Any, list[float]] = {}
    for record in records:
        if record.group is not None:
            judged = groups.setdefault(record.group, [])
            value = record.score if record.accurate is None else float(record.accurate)
            if value is not None and not record.untrained:
                judged.append(value)
    return _shares("groups", Counter(kind_of(judged) for judged in groups.values()), GROUP_KINDS)


def _lengths(records: Sequence[_Record]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, accurate in (("right", True), ("wrong", False)):
        tokens = [record.tokens for record in records if record.accurate is accurate]
        found |= _mean(f"response_tokens/{name}", sum(tokens), len(tokens))
    truncated = [
        record.accurate for record in records if record.accurate is not None and record.end_reason in _TRUNCATED
    ]
    return found | _mean("truncated_right", sum(truncated), len(truncated))


def _calls(records: Sequence[_Record]) -> dict[str, float]:
    calls = [call for record in records for call in record.calls]
    outcomes = Counter(call["outcome"] if call["outcome"] in OUTCOMES else "other" for call in calls)
    outcomes["unreadable"] = sum(
        is_unreadable(observation) for record in records for observation in record.observations
    )
    # Of the calls that went wrong, whether the next one of the sample went well.
    repairs = [
        place + 1 < len(record.calls) and record.calls[place + 1]["outcome"] == "ok"
        for record in records
        for place, call in enumerate(record.calls)
        if call["outcome"] != "ok"
    ]
    found = {
        "samples_with_calls": sum(bool(record.calls) for record in records) / len(records),
        "calls_per_sample": len(calls) / len(records),
        "turns_per_sample": sum(record.turns for record in records) / len(records),
        "tool_seconds_per_sample": sum(call["seconds"] for call in calls) / len(records),
        **_mean("repaired_errors", sum(repairs), len(repairs)),
        **_shares("outcome", outcomes, (*OUTCOMES, "unreadable", "other")),
    }
    queued = sorted(call.get("queued", 0.0) for call in calls)
    ran = sorted(call["seconds"] - call.get("queued", 0.0) for call in calls)
    for name, seconds in (("queue", queued), ("run", ran)):
        found |= {f"{name}_seconds/p{percent}": percentile(seconds, percent) for percent in (50, 95) if seconds}
    return found


def _refused_modules(records: Sequence[_Record]) -> dict[str, float]:
    """Of the refused calls, the share that asked for a module; a call may ask for several."""
    refusals = [o.body for record in records for o in record.observations if o.body.startswith(_REFUSED)]
    counts: Counter[str] = Counter()
    for body in refusals:
        packages = {module.split(".")[0] for module in _REFUSED_MODULE.findall(body)}
        counts.update({name if name in REFUSED_MODULES else "other" for name in packages} or {"none"})
    names = (*REFUSED_MODULES, "other", "none") if refusals else ()
    return {f"refused_module/{name}": counts[name] / len(refusals) for name in names}


def is_unreadable(observation: Observation) -> bool:
    """Whether it answers a turn without a readable action, and no call."""
    return not observation.tag or observation.body.startswith(_UNREADABLE)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest of the values, in order and not none, that at least so many percent of them do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _shares(prefix: str, counts: Counter[str], names: Iterable[str]) -> dict[str, float]:
    total = sum(counts.values())
    return {f"{prefix}/{name}": counts[name] / total for name in names} if total else {}


def _mean(name: str, total: float, count: int) -> dict[str, float]:
    return {name: total / count} if count else {}
