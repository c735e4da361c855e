r"""The reward: DAPO's strict box (Yu et al. 2025) on the assistant's prose, with a nudge toward calling the tool.

    response --split_observations--> assistant texts --last_box--> prediction --is_correct--> {"score", "acc", "pred"}

Contract: +1 for a right answer. A wrong one scores -1 + 0.05 * (calls - 2), at most MAX_WRONG_SCORE, so that a wrong
answer that tried the tool beats one that did not. No prompt, tool output, code or hallucinated output is ever scored.

vime's own scorer is handed in, since only generate_with_retool imports vime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

from retool.actions import last_box
from retool.chat import split_observations

MAX_SCORER_CHARS = 100  # the scorer looks at no more than so many characters at the end of what it is given
MAX_WRONG_SCORE = -0.6  # however many calls were made


class Reward(TypedDict):
    score: float
    acc: bool
    pred: str  # what the scored box holds, "" without one


class Scorer(NamedTuple):
    """vime's functions for DAPO's reward."""

    compute_score: Callable[..., dict[str, Any]]  # (text, label, strict_box_verify=True) -> {"acc", ...}
    normalize: Callable[[str], str]


def lost() -> Reward:
    """Of a sample that is not trained on."""
    return {"score": 0.0, "acc": False, "pred": ""}


def score_response(response: str, label: Any, tool_calls: int, scorer: Scorer) -> Reward:
    """The reward of one response.

    Args:
        response: everything after the prompt, observations included.
        label: the right answer, as text or as a number of any kind; a missing one is never right.
        tool_calls: calls that reached a tool.
        scorer: vime's functions.
    """
    pred = prediction(response)
    if is_correct(pred, label, scorer):
        return {"score": 1.0, "acc": True, "pred": pred}
    return {"score": min(MAX_WRONG_SCORE, -1.0 + (tool_calls - 2) / 2 * 0.1), "acc": False, "pred": pred}


def prediction(response: str) -> str:
    """What the last complete box in the assistant's prose holds, "" without one."""
    return next(filter(None, map(last_box, reversed(split_observations(response)))), "")


def is_correct(pred: str, label: Any, scorer: Scorer) -> bool:
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    label = "" if label is None else str(label).strip()
    if not pred or not label:  # the scorer calls a missing box right where the label is missing too
        return False
    boxed = f"\\boxed{{{pred}}}"
    if len(boxed) <= MAX_SCORER_CHARS and scorer.compute_score(boxed, label, strict_box_verify=True)["acc"]:
        return True
    return _normal_form(pred, scorer) == _normal_form(label, scorer)


def _normal_form(answer: str, scorer: Scorer) -> str:
    answer = scorer.normalize(answer.replace("{,}", ""))
    return (answer.lstrip("0") or "0") if answer.isascii() and answer.isdigit() else answer
