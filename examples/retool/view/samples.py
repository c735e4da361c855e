"""A sample of a file as the page shows it: its facts, and its response in segments that say who wrote what.

    raw sample --read--> Shown --advantages--> what each weighs in training

Contract. Files of other versions of vime or of this plugin lack fields or have others: whatever is missing or not what
it should be is None or empty, and is counted in `gaps`, so that the page can say what it could not show.

Turns, programs and observations are read by the plugin's own readers, so the page shows the program that ran.
"""

from __future__ import annotations

import bisect
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from retool.actions import Action, Code, ToolCall, read_action
from retool.advantages import normalize
from retool.blocks import scan
from retool.chat import CODE_TOOL, IM_END, IM_START, find_observations
from retool.metrics import OUTCOMES, is_unreadable
from view.load import Raw
from view.tokens import Vocabulary

MAX_PROBLEM_CHARS = 2000  # in the table, where it is shown whole on hover
MAX_PROGRAMS = 500  # told apart in a segment; a model that repeats itself writes many more
MAX_NUMBER = 1e15  # a larger one is no reward and no number of seconds


class Call(NamedTuple):
    kind: str
    seconds: float | None
    outcome: str


class Part(NamedTuple):
    """A stretch of a segment. `kind` is "prose", "program", or "ran" for the program that the loop ran."""

    kind: str
    text: str


class Segment(NamedTuple):
    """A stretch of the response. `kind` is one of KINDS; `call` numbers the call that an observation answers."""

    kind: str
    text: str
    call: int | None = None
    parts: tuple[Part, ...] = ()


# "model": trained on. "masked": the model's, not trained on. "observation": a tool's output or the loop's own words,
# in its frame. "hallucinated": looks like an observation, but the model wrote it.
KINDS = ("model", "masked", "observation", "hallucinated")


@dataclass(frozen=True)
class Shown:
    index: int | None
    group: int | None
    dataset: str  # "" where the file does not say it
    prompt: str  # as the model read it where that is known, else its messages
    problem: str  # the last user turn, in one line
    label: str
    prediction: str
    score: float | None
    right: bool | None
    lost: bool  # not trained on
    removed: bool
    aborted: bool
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
    if mask is None or len(mask) != length:
        gaps["loss_mask"] += 1
        mask = None
    log_probs = _numbers(raw.get("rollout_log_probs"))
    if log_probs is None or len(log_probs) != length:
        gaps["rollout_log_probs"] += 1
        log_probs = None
    pieces = None
    prompt = _prompt_text(raw)
    ids = _ids(raw.get("tokens"))
    if ids is None or not 0 <= length <= len(ids):
        gaps["tokens"] += 1
    elif vocabulary:
        start = len(ids) - length
        prompt = "".join(vocabulary.pieces(ids[:start])) or prompt
        pieces = vocabulary.pieces(ids[start:])
    metadata = raw.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    retool = metadata.get("retool")
    if not isinstance(retool, dict):
        gaps["metadata of the plugin"] += 1
        retool = {}
    recorded = retool.get("calls")
    calls = [_call(call) for call in recorded if isinstance(call, dict)] if isinstance(recorded, list) else []
    stretches = _by_mask(pieces, mask) if pieces is not None and mask else _by_frames(response)
    segments = list(_with_parts(stretches, prompt, {CODE_TOOL, *(call.kind for call in calls)}))
    status = str(raw.get("status") or "")
    score, right, prediction = _reward(raw.get("reward"), gaps)
    removed, aborted = bool(raw.get("remove_sample")), status == "aborted"
    return Shown(
        index=_integer(raw.get("index")),
        group=_integer(raw.get("group_index")),
        dataset=next((value for key in ("dataset", "data_source") if isinstance(value := metadata.get(key), str)), ""),
        prompt=prompt,
        problem=_problem(raw.get("prompt")),
        label="" if raw.get("label") is None else str(raw["label"]),
        prediction=prediction,
        score=score,
        right=right,
        lost=removed or aborted or (mask is not None and not any(mask)),
        removed=removed,
        aborted=aborted,
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


def _call(call: dict[str, Any]) -> Call:
    return Call(str(call.get("kind") or "tool"), _number(call.get("seconds")), str(call.get("outcome") or "other"))


def _reward(reward: Any, gaps: Counter[str]) -> tuple[float | None, bool | None, str]:
    """(score, whether it is right, the prediction); of a number, the number."""
    if isinstance(reward, dict):
        right, prediction = reward.get("acc"), reward.get("pred")
        return (
            _number(reward.get("score")),
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


def _problem(prompt: Any) -> str:
    if isinstance(prompt, list):
        asked = [_content(message) for message in prompt if _role(message) == "user"] or [_content(m) for m in prompt]
        prompt = asked[-1] if asked else ""
    if not isinstance(prompt, str):
        return ""
    asked = [text for role, text in messages(prompt) if role == "user"] or [prompt]
    return " ".join(asked[-1][: 2 * MAX_PROBLEM_CHARS].split())[:MAX_PROBLEM_CHARS]


def messages(prompt: str) -> list[tuple[str, str]]:
    """(role, text) of a prompt in ChatML, without the open turn at its end; else the whole text, as the user's."""
    if not prompt.startswith(IM_START):
        return [("user", prompt)]
    found = []
    for turn in prompt.split(IM_START):
        role, _, text = turn.partition("\n")
        if turn.strip():
            found.append((role, text.rstrip().removesuffix(IM_END)))
    while len(found) > 1 and found[-1][0] == "assistant" and not re.sub("</?think>", "", found[-1][1]).strip():
        found.pop()
    return found or [("", prompt)]


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


def _by_frames(response: str, inside: str = "observation", outside: str = "model") -> Iterator[Segment]:
    """The response in segments, observations told apart by their frames. A frame in a program that the model wrote is
    data of the program."""
    programs = [block for block in scan(response, over=True).blocks if block.kind != "hallucinated"]
    starts = [block.start for block in programs]
    position = 0
    for observation in find_observations(response):
        before = bisect.bisect_left(starts, observation.start) - 1
        if inside == "hallucinated" and before >= 0 and programs[before].end > observation.start:
            continue
        if position < observation.start:
            yield Segment(outside, response[position : observation.start])
        yield Segment(inside, response[observation.start : observation.end], parts=(Part("prose", observation.body),))
        position = observation.end
    if position < len(response):
        yield Segment(outside, response[position:])


def _by_mask(pieces: Sequence[str], mask: Sequence[int]) -> Iterator[Segment]:
    """The same, by what is trained on: a frame that the model itself wrote is no observation."""
    start = 0
    for end in [*(i for i in range(1, len(mask)) if bool(mask[i]) != bool(mask[i - 1])), len(mask)]:
        text = "".join(pieces[start:end])
        yield from _by_frames(text, "hallucinated") if mask[start] else _by_frames(text, outside="masked")
        start = end


_THOUGHT_MARKS = re.compile(rf"<think>|</think>|{re.escape(IM_START)}")


def _with_parts(segments: Iterable[Segment], prompt: str, tools: Collection[str]) -> Iterator[Segment]:
    """The model's segments with their programs, and each observation of a call with the call's number: they come in
    the same order."""
    call = 0
    in_thought = prompt.rstrip().endswith("<think>")
    for segment in segments:
        if segment.kind in ("model", "masked"):
            segment = segment._replace(parts=tuple(_parts(segment.text, in_thought, tools)))
        elif segment.kind == "observation" and not _is_unreadable(segment):
            segment = segment._replace(call=call)
            call += 1
        yield segment
        if marks := _THOUGHT_MARKS.findall(segment.text):
            in_thought = marks[-1] == "<think>"


def _parts(text: str, in_thought: bool, tools: Collection[str]) -> Iterator[Part]:
    """Prose and programs, in order: a call of another tool and one that cannot be read are shown as programs too."""
    acted: Action | None = read_action(text, tools=tools, in_thought=in_thought).action
    position = 0
    for block in scan(text, over=True, in_thought=in_thought).blocks[:MAX_PROGRAMS]:
        if block.kind == "hallucinated":
            continue
        written = text[block.start : block.end]
        action = read_action(written, over=True, tools=tools).action
        ran = isinstance(action, Code | ToolCall) and action == acted
        acted = None if ran else acted
        yield Part("prose", text[position : block.start])
        yield Part("ran" if ran else "program", _program(action, written))
        position = block.end
    yield Part("prose", text[position:])


def _program(action: Action, written: str) -> str:
    if isinstance(action, Code):
        return action.source
    if isinstance(action, ToolCall):
        return f"{action.name} {json.dumps(action.arguments, ensure_ascii=False, indent=2)}"
    return written


def _is_unreadable(segment: Segment) -> bool:
    return all(map(is_unreadable, find_observations(segment.text)))


def _outcomes(calls: list[Call], segments: list[Segment]) -> list[str]:
    found = []
    for segment in segments:
        if segment.kind == "observation":
            known = segment.call is not None and segment.call < len(calls)
            found.append(
                calls[segment.call].outcome if known else "unreadable" if segment.call is None else "other"  # type: ignore[index]
            )
    answered = sum(segment.call is not None for segment in segments)
    found += [call.outcome for call in calls[answered:]]
    return [outcome if outcome in (*OUTCOMES, "unreadable") else "other" for outcome in found]


# ---------------------------------------------------------------------------------------------------------------------
# Advantages
# ---------------------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """What a dump does not say of how its rewards became advantages: vime's arguments and the plugin's setting."""

    advantage_estimator: str = "grpo"
    grpo_std_normalization: bool = True
    rewards_normalization: bool = True
    advantage_spread: str = "accuracy"


class _Scored(SimpleNamespace):
    """A sample as `normalize` reads it."""

    Status = SimpleNamespace(ABORTED="aborted")


def advantages(samples: Sequence[Shown], rule: Rule = Rule()) -> list[float | None]:  # noqa: B008, which is frozen
    """What the plugin gives vime to train on; None where a sample has no score or no group."""
    scored = {
        place: _Scored(
            group_index=sample.group,
            reward={"score": sample.score} | ({} if sample.right is None else {"acc": sample.right}),
            remove_sample=sample.removed,
            status="aborted" if sample.aborted else "",
            loss_mask=sample.mask,
            response_length=sample.tokens,
        )
        for place, sample in enumerate(samples)
        if sample.score is not None and sample.group is not None
    }
    arguments = SimpleNamespace(**rule._asdict(), n_samples_per_prompt=1, reward_key="score")
    _, rewards = normalize(arguments, scored.values(), rule.advantage_spread)
    found = dict(zip(scored, rewards, strict=True))
    return [found.get(place) for place in range(len(samples))]
