"""One sample of a rollout file as the page shows it, whatever version of vime or of the plugin wrote it.

Contract: `read` never raises. A field that is missing or is not what it should be is None or empty, and is counted in
`gaps`, so that the page can say what it could not show.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from retool.chat import IM_END, IM_START, find_observations
from retool.metrics import OUTCOMES, is_unreadable
from view.load import Raw
from view.tokens import Vocabulary

MAX_PREVIEW_CHARS = 200
EPSILON = 1e-6  # vime's
MAX_NUMBER = 1e15  # a larger one is no reward and no number of seconds


class Call(NamedTuple):
    kind: str
    seconds: float | None
    outcome: str


class Segment(NamedTuple):
    """A stretch of the response. `kind` is one of KINDS; `call` numbers the call that an observation answers."""

    kind: str
    text: str
    call: int | None = None


# "model": trained on. "masked": the model's, not trained on. "observation": a tool's output or the loop's own words, in
# its frame. "hallucinated": looks like an observation, but the model wrote it.
KINDS = ("model", "masked", "observation", "hallucinated")


@dataclass(frozen=True)
class Shown:
    index: int | None
    group: int | None
    prompt: str  # as the model read it where that is known, else its messages
    preview: str
    label: str
    prediction: str
    score: float | None
    right: bool | None
    lost: bool  # not trained on
    end_reason: str
    turns: int | None
    calls: list[Call]
    outcomes: list[str]  # of the calls and of unreadable turns, in order
    hallucinated: int
    segments: list[Segment]
    pieces: list[str] | None  # the response, a text per token
    mask: list[int] | None  # of the response's tokens; 1: trained on
    log_probs: list[float] | None
    tokens: int
    observed: int | None  # tokens that are not trained on


def read(raw: Raw, vocabulary: Vocabulary | None, gaps: Counter[str]) -> Shown:
    """The sample, ready to be shown; what it lacks is counted in `gaps`."""
    response = raw["response"]
    length = raw.get("response_length")
    mask = _numbers(raw.get("loss_mask"))
    if type(length) is not int:
        length = len(mask or [])
    ids = _ids(raw.get("tokens"))
    if mask is None or len(mask) != length:
        gaps["loss_mask"] += 1
        mask = None
    log_probs = _numbers(raw.get("rollout_log_probs"))
    if log_probs is None or len(log_probs) != length:
        gaps["rollout_log_probs"] += 1
        log_probs = None
    pieces = None
    prompt = _prompt_text(raw)
    if ids is None or not 0 <= length <= len(ids):
        gaps["tokens"] += 1
    elif vocabulary:
        start = len(ids) - length
        prompt = "".join(vocabulary.pieces(ids[:start])) or prompt
        pieces = vocabulary.pieces(ids[start:])
    retool = _retool(raw, gaps)
    calls = [_call(call) for call in retool.get("calls") or [] if isinstance(call, dict)]
    segments = _number_calls(_by_mask(pieces, mask) if pieces is not None and mask else _by_frames(response))
    status = str(raw.get("status") or "")
    score, right, prediction = _reward(raw.get("reward"), gaps)
    return Shown(
        index=_integer(raw.get("index")),
        group=_integer(raw.get("group_index")),
        prompt=prompt,
        preview=_preview(raw.get("prompt")),
        label="" if raw.get("label") is None else str(raw["label"]),
        prediction=prediction,
        score=score,
        right=right,
        lost=bool(raw.get("remove_sample")) or status == "aborted" or (mask is not None and not any(mask)),
        end_reason=str(retool.get("end_reason") or status or "unknown"),
        turns=_integer(retool.get("turns")),
        calls=calls,
        outcomes=_outcomes(calls, segments),
        hallucinated=_integer(retool.get("hallucinated_outputs")) or 0,
        segments=segments,
        pieces=pieces,
        mask=mask,
        log_probs=log_probs,
        tokens=length,
        observed=None if mask is None else len(mask) - sum(map(bool, mask)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Fields
# ---------------------------------------------------------------------------------------------------------------------


def _retool(raw: Raw, gaps: Counter[str]) -> dict[str, Any]:
    metadata = raw.get("metadata")
    retool = metadata.get("retool") if isinstance(metadata, dict) else None
    if not isinstance(retool, dict):
        gaps["metadata of the plugin"] += 1
        return {}
    return retool


def _call(call: dict[str, Any]) -> Call:
    seconds = call.get("seconds")
    return Call(
        kind=str(call.get("kind") or "tool"),
        seconds=_number(seconds),
        outcome=str(call.get("outcome") or "other"),
    )


def _reward(reward: Any, gaps: Counter[str]) -> tuple[float | None, bool | None, str]:
    """(score, whether it is right, the prediction); of a number, the number."""
    if isinstance(reward, dict):
        score, right, prediction = reward.get("score"), reward.get("acc"), reward.get("pred")
        return (
            _number(score),
            None if right is None else bool(right),
            "" if prediction is None else str(prediction),
        )
    if _number(reward) is None:
        gaps["reward"] += 1
    return _number(reward), None, ""


def _prompt_text(raw: Raw) -> str:
    payload = raw.get("payload_text")
    if isinstance(payload, str) and payload:
        return payload.removesuffix(raw["response"])
    prompt = raw.get("prompt")
    if isinstance(prompt, list):
        return "".join(f"{IM_START}{_role(message)}\n{_content(message)}{IM_END}\n" for message in prompt)
    return prompt if isinstance(prompt, str) else ""


_LAST_USER = re.compile(rf".*{re.escape(IM_START)}user\n(.*?)(?:{re.escape(IM_END)}|$)", re.DOTALL)


def _preview(prompt: Any) -> str:
    """The problem: the last user turn."""
    if isinstance(prompt, list):
        asked = [_content(message) for message in prompt if _role(message) == "user"] or [_content(m) for m in prompt]
        prompt = asked[-1] if asked else ""
    if not isinstance(prompt, str):
        return ""
    if rendered := _LAST_USER.match(prompt):
        prompt = rendered[1]
    return " ".join(prompt[: 4 * MAX_PREVIEW_CHARS].split())[:MAX_PREVIEW_CHARS]


def _role(message: Any) -> str:
    return str(message.get("role") or "") if isinstance(message, dict) else ""


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _number(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    return float(value) if usable else None


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _numbers(value: Any) -> list[Any] | None:
    """The list, if it is one of numbers alone."""
    return value if isinstance(value, list) and set(map(type, value)) <= {int, float, bool} else None


def _ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and set(map(type, value)) <= {int} else None


# ---------------------------------------------------------------------------------------------------------------------
# The transcript
# ---------------------------------------------------------------------------------------------------------------------


def _by_frames(response: str, inside: str = "observation", outside: str = "model") -> list[Segment]:
    """The response in segments, observations told apart by their frames."""
    segments, position = [], 0
    for observation in find_observations(response):
        segments.append(Segment(outside, response[position : observation.start]))
        segments.append(Segment(inside, response[observation.start : observation.end]))
        position = observation.end
    segments.append(Segment(outside, response[position:]))
    return [segment for segment in segments if segment.text]


def _by_mask(pieces: Sequence[str], mask: Sequence[int]) -> list[Segment]:
    """The same, by what is trained on: a frame that the model itself wrote is no observation."""
    segments: list[Segment] = []
    start = 0
    for end in [*(i for i in range(1, len(mask)) if bool(mask[i]) != bool(mask[i - 1])), len(mask)]:
        text = "".join(pieces[start:end])
        segments += _by_frames(text, "hallucinated", "model") if mask[start] else _by_frames(text, outside="masked")
        start = end
    return segments


def _number_calls(segments: Iterable[Segment]) -> list[Segment]:
    """Each observation of a call with the number of the call: they come in the same order."""
    numbered, call = [], 0
    for segment in segments:
        if segment.kind == "observation" and not _is_unreadable(segment):
            segment = segment._replace(call=call)
            call += 1
        numbered.append(segment)
    return numbered


def _is_unreadable(segment: Segment) -> bool:
    return all(map(is_unreadable, find_observations(segment.text)))


def _outcomes(calls: list[Call], segments: list[Segment]) -> list[str]:
    found = []
    for segment in segments:
        if segment.kind == "observation":
            known = segment.call is not None and segment.call < len(calls)
            found.append(calls[segment.call].outcome if known else "unreadable" if segment.call is None else "other")  # type: ignore[index]
    answered = sum(segment.call is not None for segment in segments)
    found += [call.outcome for call in calls[answered:]]
    return [outcome if outcome in (*OUTCOMES, "unreadable") else "other" for outcome in found]


# ---------------------------------------------------------------------------------------------------------------------
# Groups
# ---------------------------------------------------------------------------------------------------------------------


def advantages(samples: Sequence[Shown]) -> list[float | None]:
    """GRPO's advantage of each sample in its group, by the plugin's default rules: (score - mean) / standard deviation.

    Samples that are not trained on get 0 and are left out of both, and so does a whole group in which fewer than two
    are left, or all are right or all wrong. None where a sample has no score or no group.
    """
    groups: dict[int | None, list[Shown]] = {}
    for sample in samples:
        if sample.score is not None and not sample.lost:
            groups.setdefault(sample.group, []).append(sample)
    return [_advantage(sample, groups.get(sample.group, [])) for sample in samples]


def _advantage(sample: Shown, group: Sequence[Shown]) -> float | None:
    if sample.score is None or sample.group is None:
        return None
    if sample.lost or len({other.score if other.right is None else other.right for other in group}) < 2:
        return 0.0
    scores = [other.score for other in group if other.score is not None]
    mean = math.fsum(scores) / len(scores)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
    return (sample.score - mean) / (deviation + EPSILON)
