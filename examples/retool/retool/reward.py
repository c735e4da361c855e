r"""The reward: DAPO's strict box (Yu et al. 2025) on the assistant's prose, with a nudge toward calling the tool.

    response --split_observations--> stretches --scan--> prediction --is_correct--> {"score", "acc", "pred"}

Contract: +1 for a right answer. A wrong one scores -1 + bonus * (calls - 2), at most MAX_WRONG_SCORE, so that a wrong
answer that tried the tool beats one that did not; only calls whose code ran are tries. No prompt, tool output, code,
thought or hallucinated output is ever scored. Time is linear in the response, and what is compared is bounded: it runs
on the event loop of the rollouts.

vime's scorer is handed in, since only generate_with_retool imports vime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

from retool.actions import is_over, read_answer
from retool.answers import label_text, same_answer
from retool.blocks import scan
from retool.chat import split_observations

MAX_SCORER_CHARS = 100  # the scorer looks at no more than so many characters at the end of what it is given
MAX_WRONG_SCORE = -0.6  # however many calls were made
NOT_RUN = frozenset({"refused", "syntax_error", "empty", "invalid", "not_found"})  # outcomes of calls that ran nothing


class Reward(TypedDict):
    score: float
    acc: bool
    pred: str  # what the scored box holds, "" without one


Scorer = Callable[..., dict[str, Any]]  # vime's compute_score: (text, label, strict_box_verify=True) -> {"acc", ...}


def lost() -> Reward:
    """Of a sample that is not trained on."""
    return {"score": 0.0, "acc": False, "pred": ""}


def calls_that_ran(calls: Iterable[Mapping[str, Any]]) -> int:
    """How many of an episode's call records are of code that ran, whatever came of it."""
    return sum(call["outcome"] not in NOT_RUN for call in calls)


def score_response(
    response: str,
    label: Any,
    calls: int,
    scorer: Scorer,
    *,
    bonus: float,
    cut: bool = False,
    in_thought: bool = False,
) -> Reward:
    """The reward of one response.

    Args:
        response: everything after the prompt, observations included.
        label: the right answer, as text or as a number of any kind; a missing one is never right.
        calls: how many ran, see `calls_that_ran`.
        scorer: vime's.
        bonus: what a wrong answer gains by each.
        cut: whether a limit ended the episode, see `prediction`.
        in_thought: whether the prompt ends inside a thought.
    """
    pred = prediction(response, cut, in_thought)
    if is_correct(pred, label, scorer):
        return {"score": 1.0, "acc": True, "pred": pred}
    return {"score": min(MAX_WRONG_SCORE, -1.0 + (calls - 2) * bonus), "acc": False, "pred": pred}


def prediction(response: str, cut: bool = False, in_thought: bool = False) -> str:
    """What the box of the last answer in the assistant's prose holds, "" without one: an answer is what the loop takes
    for one.

    Args:
        response: everything after the prompt, observations included.
        cut: whether a limit ended the episode, so that its last turn did not end by itself.
        in_thought: whether the prompt ends inside a thought.
    """
    pred = ""
    stretches = split_observations(response)
    for index, (text, goes_on) in enumerate(stretches):
        is_last = index + 1 == len(stretches)
        found = scan(text, over=True, in_thought=in_thought and (goes_on or index == 0))
        in_thought = found.in_thought
        if found.ends_thought:  # so what was said before was thought
            pred = ""
        answer = read_answer(found, over=not is_last or not cut or is_over(text))
        if answer is not None:
            pred = answer.content
    return pred


def is_correct(pred: str, label: Any, scorer: Scorer) -> bool:
    """Whether a prediction is right: to DAPO's strict scorer, or because it says the same, see retool/answers.py."""
    label = label_text(label)
    if not pred or not label:  # the scorer calls a missing box right where the label is missing too
        return False
    boxed = f"\\boxed{{{pred}}}"
    if len(boxed) <= MAX_SCORER_CHARS and scorer(boxed, label, strict_box_verify=True)["acc"]:
        return True
    return same_answer(pred, label)
