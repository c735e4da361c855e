"""One sample while it is rolled out: its limits, its turns and calls, and what is kept of it when it is aborted.

Contract: tokens reach the sample through retool/ledger.py alone. Samples and tokenizers are vime's, used as they come:
this module imports neither.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from retool import ledger, replay_data
from retool.actions import Action, Invalid
from retool.chat import IM_END, IM_START, OPEN_TURN, Frame, neutralize, read_template_prefix, shorten
from retool.engine import Completion

MIN_BODY_CHARS = 64  # of an observation: cut further, little but the note of what is left out would remain
ANSWER_TOKENS = 64  # that a long observation leaves to the turn after it: an answer fits
ABORT_TICK = 0.2  # seconds between looks at vime's flag while a tool runs: nothing tells when it is set


class EndReason(Enum):
    """Why an episode ended, for `sample.metadata["retool"]["end_reason"]`, and the status that its sample gets."""

    ANSWER = "answer", "COMPLETED"
    LENGTH = "length", "TRUNCATED"  # the response budget, observations included, is used up
    CONTEXT = "context", "TRUNCATED"  # the context limit is reached
    TURN_CAP = "turn_cap", "TRUNCATED"
    CALL_CAP = "call_cap", "TRUNCATED"
    ABORT = "abort", "ABORTED"  # vime aborts the rollout, or ended the task
    ENGINE_ABORT = "engine_abort", "ABORTED"  # the engine ended the request, and vime aborts nothing
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

    @classmethod
    def of(cls, args: Any, response: int, evaluation: bool) -> Limits:
        if evaluation:  # nothing is trained on the sample, so what fits on a training GPU is no limit
            return cls(getattr(args, "eval_max_context_len", None), response)
        context = getattr(args, "rollout_max_context_len", None)
        if context is None and getattr(args, "max_tokens_per_gpu", None):
            context = (getattr(args, "context_parallel_size", None) or 1) * args.max_tokens_per_gpu
        return cls(context, response)

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
    queued: float = 0.0  # of the seconds, before the call ran


class Turn(NamedTuple):
    """What the model said until it was the loop's turn, or, with `cut_by`, the reason why it is to say no more."""

    text: str
    action: Action = Invalid("")  # nothing was read of a turn that was cut
    cut_by: EndReason | None = None


@dataclass
class Episode:
    """What the stages share while one sample is rolled out."""

    args: Any
    sample: Any
    state: Any
    params: dict[str, Any]
    limits: Limits
    prompt: str
    template_prefix: str = ""  # what the checkpoint's template puts into an assistant turn before the model's own text
    pending_prefix: str = ""  # what of it, or of an open thought, stands before the turn that is sampled next
    turns: int = 0
    hallucinated: int = 0
    calls: list[CallRecord] = field(default_factory=list)
    # The turn that goes on: where its ids begin in `sample.tokens` and its text in `sample.response`, how many
    # requests it took so far, and whether nothing but its action is left to do.
    turn_start: int = 0
    text_start: int = 0
    requests: int = 0
    turn_over: bool = False
    hallucinated_here: int = 0  # in this turn, not yet in `hallucinated`
    shown: tuple[str, list[int]] = ("", [])  # the observation before this turn, text and ids
    failed_attempts: int = 0  # at this sample, by infrastructure errors in a row

    @property
    def continued(self) -> bool:
        """Whether an aborted sample is continued later, and not started afresh (vime's --partial-rollout)."""
        return bool(getattr(self.args, "partial_rollout", False))

    @property
    def aborting(self) -> bool:
        """Whether vime aborts the rollout."""
        return bool(getattr(self.state, "aborted", False))


def refuse_unsupported(sample: Any) -> None:
    """Raise, by name, for a sample that cannot be rolled out here."""
    if not hasattr(sample, "append_response_tokens"):
        raise RuntimeError("this vime is too old for retool: Sample.append_response_tokens (July 2026) is missing")
    if any(value is not None for value in (getattr(sample, "multimodal_inputs", None) or {}).values()):
        raise ValueError("retool handles text only, and the sample has multimodal inputs")


class SavedProgress(NamedTuple):
    """Where an aborted episode stands, beside its sample's own ids, mask and log-probs; in the metadata as plain
    data."""

    turns: int
    hallucinated: int
    turn_start: int
    text_start: int
    requests: int
    turn_over: bool
    pending_prefix: str
    observation: list[Any]  # text and ids of one that was put aside, see `interrupt`


SAVED_FIELDS = SavedProgress._fields[:-1]  # of an Episode, under the same names


def close(episode: Episode, end: EndReason) -> None:
    """Leave the sample with its status, and the record of its episode in `sample.metadata["retool"]`."""
    sample = episode.sample
    sample.status = sample.Status[end.status]
    continued = episode.continued and end in (EndReason.ABORT, EndReason.ENGINE_ABORT) and sample.response_length
    saved = interrupt(episode) if continued else None
    sample.payload_text = episode.prompt + sample.response
    sample.metadata["retool"] = {
        "end_reason": end.value,
        "turns": episode.turns,
        "calls": [call._asdict() for call in episode.calls],
        "hallucinated_outputs": episode.hallucinated + episode.hallucinated_here,
    }
    if saved:
        sample.metadata["retool"]["saved_progress"] = saved._asdict()


def interrupt(episode: Episode) -> SavedProgress:
    """Leave the sample as one to be continued.

    An observation at the end is put aside. The engine has not seen it, so it has no expert rows yet, and vime takes a
    sample that is short of rows for a broken one.
    """
    sample, (text, ids) = episode.sample, episode.shown
    saved = SavedProgress(**{name: getattr(episode, name) for name in SAVED_FIELDS}, observation=["", []])
    if ids and len(sample.tokens) == episode.turn_start:
        ledger.take_back(sample, ids, text)
        saved = saved._replace(observation=[text, ids])
    return saved


def resume(episode: Episode, record: dict[str, Any]) -> None:
    """Go on where an aborted attempt stopped, from its ids.

    A call that had finished is in the sample with its observation; one that was cut is not, and will be made again.

    Args:
        episode: a new one.
        record: what the attempt left in `sample.metadata["retool"]`.
    """
    sample, saved = episode.sample, SavedProgress(**record["saved_progress"])
    for name in SAVED_FIELDS:
        setattr(episode, name, getattr(saved, name))
    episode.calls = [CallRecord(**call) for call in record["calls"]]
    sample.tool_call_count = len(episode.calls)
    sample.reward, sample.remove_sample, sample.status = None, False, sample.Status.PENDING
    if saved.observation[1]:
        _show(episode, *saved.observation)


def resumable(sample: Any) -> dict[str, Any] | None:
    """The record of an aborted attempt, None if the sample has to be started afresh: it is new, or an infrastructure
    error lost it, or its ids, mask and log-probs are not those that the attempt left."""
    record = (sample.metadata or {}).get("retool") or {}
    if "saved_progress" not in record:
        return None
    length, saved = sample.response_length, SavedProgress(**record["saved_progress"])
    known = len(sample.tokens) + len(saved.observation[1])
    if length > len(sample.tokens) or saved.turn_start > known:
        return None
    if not len(sample.loss_mask or []) == len(sample.rollout_log_probs or []) == length:
        return None
    return dict(record)


def record_turn(episode: Episode, ids: list[int], log_probs: list[float], meta: dict[str, Any]) -> str:
    """Append what one request of a turn brought, and return the text of the turn so far."""
    sample = episode.sample
    goes_on = len(sample.tokens) > episode.turn_start
    episode.turns += not goes_on
    text = str(episode.state.tokenizer.decode(ids, skip_special_tokens=False))
    ledger.append(episode.args, sample, ids, text, log_probs, meta)
    if goes_on:
        text = ledger.decode_again(sample, episode.state.tokenizer, episode.turn_start, episode.text_start)
    return text


def keep_partial_turn(episode: Episode, completion: Completion) -> None:
    """What an aborted request brought, if the sample is continued later.

    Tokens at its end that began a stop string are left out: the engine looks for those in what it samples itself, and
    would not see one that it finishes. Without its expert rows, where they are replayed, nothing can be kept.
    """
    ids, kept, decode = completion.token_ids, len(completion.token_ids), episode.state.tokenizer.decode
    replayed = getattr(episode.args, "use_rollout_routing_replay", False)
    if not episode.continued or (replayed and "routed_experts" not in completion.meta):
        return
    said, stops = episode.sample.tokens[episode.turn_start :], episode.params["stop"]
    while kept and _begins_a_stop(str(decode(said + ids[:kept], skip_special_tokens=False)), stops):
        kept -= 1
    if kept:
        meta = replay_data.of_the_first(completion.meta, len(ids), kept)
        record_turn(episode, ids[:kept], completion.log_probs[:kept], meta)


def within_turn(completion: Completion, ids: FrameIds) -> Completion:
    """What of an engine's answer belongs to the turn: up to the first token of the chat format's frames that the model
    writes itself. The rest would be a turn of the user's in the model's own words, and trained on."""
    sampled = completion.token_ids
    first = min((sampled.index(one) for one in ids if one in sampled), default=len(sampled))
    kept = first + (sampled[first : first + 1] == [ids.end])
    if kept == len(sampled):
        return completion
    meta = replay_data.of_the_first(completion.meta, len(sampled), kept) | {"finish_reason": {"type": "stop"}}
    return Completion(sampled[:kept], completion.log_probs[:kept], meta)


def _begins_a_stop(text: str, stops: list[str]) -> bool:
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


async def until_aborted(episode: Episode, call: Coroutine[Any, Any, str]) -> str | None:
    """What a tool answers, None if vime aborts the rollout before: the call is then cancelled, which ends it."""
    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            if episode.aborting:
                return None
            await asyncio.wait({task}, timeout=ABORT_TICK)
        return task.result()
    except asyncio.CancelledError:
        if not (episode.continued and task.done() and not task.cancelled() and task.exception() is None):
            raise
        # It finished in the same step of the loop. Its observation is written first, or it would be made again.
        current = asyncio.current_task()
        assert current is not None
        current.cancel()  # takes effect at the next await
        return task.result()
    finally:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio reports it as missed
        task.cancel()


def append_observation(episode: Episode, around: Frame, body: str, said: str) -> bool:
    """Write what the model is shown after it said `said`; False where too little room is left to show anything of
    it."""
    room = episode.limits.room(episode.sample) - ANSWER_TOKENS
    fitting = _fit_observation(episode.state.tokenizer, around, neutralize(body), room)
    if fitting is None:
        return False
    _show(episode, *fitting)
    spoken = episode.pending_prefix + said
    if around.after.endswith(OPEN_TURN + episode.template_prefix):
        episode.pending_prefix = episode.template_prefix
    elif spoken.rfind("<think>") > spoken.rfind("</think>"):  # the turn goes on, and the thought in it
        episode.pending_prefix = "<think>\n"
    else:
        episode.pending_prefix = ""
    begin_turn(episode)
    return True


def _show(episode: Episode, text: str, ids: list[int]) -> None:
    ledger.append(episode.args, episode.sample, ids, text, None, None)
    episode.shown = (text, ids)


def begin_turn(episode: Episode) -> None:
    """What comes next is a turn of the model."""
    episode.turn_start, episode.text_start = len(episode.sample.tokens), len(episode.sample.response)
    episode.requests, episode.turn_over = 0, False
    episode.hallucinated += episode.hallucinated_here
    episode.hallucinated_here = 0


def _fit_observation(tokenizer: Any, around: Frame, body: str, room: int) -> tuple[str, list[int]] | None:
    """Text and ids of the framed observation in at most `room` ids, its body cut to fit; None if nothing of it
    does."""
    kept = len(body)
    while True:
        text = around.before + shorten(body, kept) + around.after
        ids = encode(tokenizer, text)
        if len(ids) <= room:
            return text, ids
        if kept <= MIN_BODY_CHARS:
            return None
        kept = max(MIN_BODY_CHARS, kept * max(room, 0) // (len(ids) + 1))


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer
# ---------------------------------------------------------------------------------------------------------------------


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class FrameIds(NamedTuple):
    start: int  # of <|im_start|>
    end: int  # of <|im_end|>


class _Known(NamedTuple):
    """What a tokenizer was asked once; a process has one tokenizer."""

    tokenizer: Any
    vocabulary: int | None
    frame_ids: FrameIds | None  # None where <|im_start|> or <|im_end|> is no token
    frames: dict[Frame, int]
    template_prefixes: dict[str, str]


_known = _Known(None, None, None, {}, {})


def vocabulary(tokenizer: Any) -> int | None:
    """How many ids there are, None if the tokenizer does not say."""
    return _ask(tokenizer).vocabulary


def frame_ids(tokenizer: Any) -> FrameIds:
    """Of the tokens between turns. ValueError if the tokenizer has no such tokens: its model could not end a turn."""
    ids = _ask(tokenizer).frame_ids
    if ids is None:
        raise ValueError(
            f"{IM_START} and {IM_END} are no tokens of this checkpoint's tokenizer, and retool speaks with models in "
            "that format alone. Start from a checkpoint of Qwen's family, or one that was trained with ChatML's tokens."
        )
    return ids


def frame_length(tokenizer: Any, around: Frame) -> int:
    """Of the bare frame of an observation, in tokens."""
    frames = _ask(tokenizer).frames
    if around not in frames:
        frames[around] = len(encode(tokenizer, "".join(around)))
    return frames[around]


def template_prefix(tokenizer: Any, template_kwargs: dict[str, Any]) -> str:
    """`read_template_prefix` of the tokenizer's template."""
    prefixes, key = _ask(tokenizer).template_prefixes, json.dumps(template_kwargs, sort_keys=True, default=str)
    if key not in prefixes:
        prefixes[key] = read_template_prefix(tokenizer, template_kwargs)
    return prefixes[key]


def _ask(tokenizer: Any) -> _Known:
    global _known
    known = _known
    if known.tokenizer is not tokenizer:  # threads may meet here: each goes on with what it has read itself
        try:
            size = len(tokenizer) or None
        except TypeError:
            size = None
        start, end = encode(tokenizer, IM_START), encode(tokenizer, IM_END)
        ids = FrameIds(start[0], end[0]) if len(start) == len(end) == 1 and start != end else None
        _known = known = _Known(tokenizer, size, ids, {}, {})
    return known
