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

from retool.chat import Observation, find_observations
from retool.episode import EndReason

OUTCOMES = (
    *("ok", "error", "syntax_error", "empty", "timeout", "memory", "too_long", "crashed", "refused", "invalid"),
    "not_found",
)

# By which a refusal is counted under its own name: what math models ask for, and what an allowed list may be widened by.
REFUSED_MODULES = ("numpy", "sympy", "scipy", "pandas", "matplotlib", "sys", "os", "time", "networkx", "mpmath")
CALL_BUCKETS = (("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3_to_4", 3, 4), ("5_to_8", 5, 8), ("9_or_more", 9, math.inf))

_UNREADABLE = "Your previous action is invalid"  # how the loop's own observation of an unreadable turn begins
_REFUSED = "Error: not allowed: "
_REFUSED_MODULE = re.compile(r"\bmodule '([^'\s]{1,100})'(?:, reached through '[^'\s]{1,100}',)? is not available")

METRICS = (
    "accuracy",
    "reward",
    *(f"reward_by_calls/{name}" for name, _, _ in CALL_BUCKETS),
    "samples_with_calls",
    "calls_per_sample",
    "turns_per_sample",
    "call_seconds/p50",
    "call_seconds/p95",
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
    turns: int
    calls: list[Mapping[str, Any]]
    hallucinated: int
    observations: list[Observation]
    score: float | None  # None for a sample that is not trained on
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
        **_calls(records),
        **_refused_modules(records),
        **_shares("end_reason", Counter(record.end_reason for record in records), [r.value for r in EndReason]),
        **_mean("observation_tokens", sum(r.observed_tokens for r in records), sum(r.tokens for r in records)),
        "hallucinated_outputs": sum(record.hallucinated for record in records) / len(records),
        "infrastructure_errors": sum(r.end_reason == EndReason.INFRASTRUCTURE_ERROR.value for r in records),
    }


def _read(sample: Any) -> _Record:
    retool = sample.metadata["retool"]
    mask = sample.loss_mask or []
    score = accurate = None
    if not sample.remove_sample:
        score, accurate = _reward(sample.reward)
    return _Record(
        end_reason=retool["end_reason"],
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
    """(score, whether it is right); a reward that is one number, of a reward function of the user's, has no accuracy."""
    if isinstance(reward, Mapping):
        score, accurate = reward.get("score"), reward.get("acc")
        return (None if score is None else float(score)), (None if accurate is None else bool(accurate))
    return (None if reward is None else float(reward)), None


def _rewards(records: Sequence[_Record]) -> dict[str, float]:
    right = [record.accurate for record in records if record.accurate is not None]
    scored = [(len(record.calls), record.score) for record in records if record.score is not None]
    found = _mean("accuracy", sum(right), len(right))
    found |= _mean("reward", sum(score for _, score in scored), len(scored))
    for name, least, most in CALL_BUCKETS:
        scores = [score for calls, score in scored if least <= calls <= most]
        found |= _mean(f"reward_by_calls/{name}", sum(scores), len(scores))
    return found


def _calls(records: Sequence[_Record]) -> dict[str, float]:
    calls = [call for record in records for call in record.calls]
    seconds = sorted(call["seconds"] for call in calls)
    outcomes = Counter(call["outcome"] if call["outcome"] in OUTCOMES else "other" for call in calls)
    outcomes["unreadable"] = sum(
        is_unreadable(observation) for record in records for observation in record.observations
    )
    found = {
        "samples_with_calls": sum(bool(record.calls) for record in records) / len(records),
        "calls_per_sample": len(calls) / len(records),
        "turns_per_sample": sum(record.turns for record in records) / len(records),
        **_shares("outcome", outcomes, (*OUTCOMES, "unreadable", "other")),
    }
    if seconds:
        found |= {"call_seconds/p50": percentile(seconds, 50), "call_seconds/p95": percentile(seconds, 95)}
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
