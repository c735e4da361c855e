"""One sample while it is rolled out: its limits, its turns and calls, and the one writer of its tokens.

Contract: `record` is the only way by which tokens reach a sample; ids, loss mask, log-probs and text move together, in
vime's own `Sample.append_response_tokens`, which refuses what would get out of step. Sampled tokens are trained on,
observations are not. Samples and tokenizers are vime's, used as they come: this module imports neither.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from retool.actions import Action
from retool.chat import Frame, neutralize, shorten
from retool.engine import EngineError

MIN_BODY_CHARS = 64  # of an observation: cut further, nothing but the note of what is left out remains
ANSWER_TOKENS = 64  # that a long observation leaves to the turn after it: an answer fits


class EndReason(Enum):
    """Why an episode ended, for `sample.metadata["retool"]["end_reason"]`, and the status that its sample gets."""

    ANSWER = "answer", "COMPLETED"
    LENGTH = "length", "TRUNCATED"  # the response budget, observations included, is used up
    CONTEXT = "context", "TRUNCATED"  # the context limit is reached
    TURN_CAP = "turn_cap", "TRUNCATED"
    CALL_CAP = "call_cap", "TRUNCATED"
    ABORT = "abort", "ABORTED"  # vime or the engine ended the request, or vime the task
    INFRASTRUCTURE_ERROR = "infrastructure_error", "ABORTED"

    status: str  # a name in vime's Sample.Status

    def __new__(cls, text: str, status: str) -> EndReason:
        member = object.__new__(cls)
        member._value_ = text
        member.status = status
        return member


class Limits(NamedTuple):
    """In tokens. `context` bounds prompt + response (None: no bound), `response` everything after the prompt."""

    context: int | None
    response: int

    def room(self, sample: Any) -> int:
        return min(self._in_context(sample), self._in_response(sample))

    def binding(self, sample: Any) -> EndReason:
        """Which limit is met first."""
        in_context = self._in_context(sample) < self._in_response(sample)
        return EndReason.CONTEXT if in_context else EndReason.LENGTH

    def _in_response(self, sample: Any) -> int:
        return self.response - int(sample.response_length)

    def _in_context(self, sample: Any) -> int:
        return sys.maxsize if self.context is None else self.context - len(sample.tokens)


class CallRecord(NamedTuple):
    """One call of a tool, for `sample.metadata["retool"]["calls"]`. Sizes in characters."""

    kind: str
    seconds: float
    outcome: str  # tool_sandbox.ToolOutput's outcome, "ok" where a tool of the user's says none
    input_chars: int
    output_chars: int


class Turn(NamedTuple):
    """What the model said until it was the loop's turn, or, with `cut_by`, the reason why it is to say no more."""

    text: str
    action: Action
    cut_by: EndReason | None = None


@dataclass
class Episode:
    """What the stages share while one sample is rolled out."""

    args: Any
    sample: Any
    state: Any
    params: dict[str, Any]
    limits: Limits
    turns: int = 0
    hallucinated: int = 0
    calls: list[CallRecord] = field(default_factory=list)

    @property
    def aborting(self) -> bool:
        """Whether vime aborts the rollout."""
        return bool(getattr(self.state, "aborted", False))


def reset(sample: Any) -> None:
    """Forget an earlier attempt: a sample that comes back after an abort brings all of it along."""
    fresh = {
        "response": "",
        "response_length": 0,
        "loss_mask": [],
        "rollout_log_probs": [],
        "rollout_top_p_token_ids": None,
        "rollout_top_p_token_offsets": None,
        "rollout_routed_experts": None,
        "teacher_log_probs": None,
        "weight_versions": [],
        "reward": None,
        "remove_sample": False,
        "non_generation_time": 0.0,
        "status": sample.Status.PENDING,
        "tool_call_count": 0,
    }
    for name, value in fresh.items():
        setattr(sample, name, value)
    for name in ("prefix_cache_info", "spec_info"):
        if hasattr(sample, name):
            setattr(sample, name, type(getattr(sample, name))())
    sample.metadata = {key: value for key, value in (sample.metadata or {}).items() if key != "retool"}


def record(
    episode: Episode, ids: list[int], text: str, log_probs: list[float] | None, meta: dict[str, Any] | None
) -> None:
    """The one writer of tokens: ids, mask, log-probs and text move together. EngineError for meta that does not fit."""
    try:
        episode.sample.append_response_tokens(
            episode.args, tokens=ids, log_probs=log_probs, trainable=log_probs is not None, meta_info=meta, text=text
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise EngineError(f"the engine's answer does not fit the sample: {error}") from error


def append_observation(episode: Episode, around: Frame, body: str) -> None:
    tokenizer, room = episode.state.tokenizer, episode.limits.room(episode.sample)
    bare = len(encode(tokenizer, "".join(around)))
    text, ids = _fit_observation(tokenizer, around, neutralize(body), max(bare, room - ANSWER_TOKENS))
    record(episode, ids, text, None, None)


def _fit_observation(tokenizer: Any, around: Frame, body: str, room: int) -> tuple[str, list[int]]:
    """The framed observation in at most `room` ids, its body cut to fit. The bare frame must fit."""
    kept = len(body)
    while True:
        text = around.before + (shorten(body, kept) if kept else "") + around.after
        ids = encode(tokenizer, text)
        if len(ids) <= room or kept == 0:
            return text, ids
        kept = kept * room // (len(ids) + 1) if kept > MIN_BODY_CHARS else 0


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
