r"""Multi-turn rollouts with a Python tool for vime: the turn loop and the reward, as vime calls them.

    --custom-generate-function-path generate_with_retool.generate
    --custom-rm-path generate_with_retool.reward_func --reward-key score
    --custom-reward-post-process-path generate_with_retool.normalize_rewards
    --custom-rollout-log-function-path generate_with_retool.log_rollout_data
    --custom-eval-rollout-log-function-path generate_with_retool.log_eval_rollout_data
    --dynamic-sampling-filter-path generate_with_retool.keep_group, where groups are filtered
    --custom-advantage-function-path generate_with_retool.compute_advantages, for reinforce_plus_plus

Data flows one way; each arrow is one function:

    sample.prompt --render_prompt--> ids --complete--> turn --read_action--> action --_act--> observation --+
                                      ^                                                                   |
                                      +-------------------- retool/ledger.py, the one writer of tokens <---+

Contract (vime's rollout): `generate` is awaited once per sample under vime's own semaphore, fills the sample and
returns it; `reward_func` scores it by the last box in the assistant's prose.

Invariants, on every way out, a cancellation at any await included:
- Token in, token out. The ids of a request begin with the ids of the request before it and its output; what the model
  sampled is never tokenized again, only observations are encoded.
- len(loss_mask) == len(rollout_log_probs) == response_length and tokens == prompt ids + response ids. The mask is 1 on
  sampled tokens, 0 on observations.
- A mistake of the model becomes an observation. After an infrastructure error (EngineError, SandboxError) the sample
  is ABORTED and never trained on; many of them stop the run. Nor is one in which nothing was sampled.

How the model is spoken to is retool/chat.py, what it says retool/actions.py, what a turn asks of the engine
retool/request.py, the wire retool/engine.py, what ends a run retool/failures.py, the reward retool/reward.py, the
tools tool_sandbox.py. This module is the only one that imports vime.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable
from contextlib import nullcontext
from typing import Any

from retool import (
    actions,
    advantages,
    engine,
    failures,
    handover,
    ledger,
    observations,
    request,
    reward,
    startup,
    tracking,
)
from retool.actions import Action, Answer, Code, Incomplete, Invalid, ToolCall
from retool.chat import (
    CODE_TOOL,
    IM_END,
    IM_START,
    Frame,
    format_conversation_with_tools,
    frame,
    neutralize,
    render_prompt,
    split_prompt,
)
from retool.engine import EngineError, EngineRefused
from retool.episode import (
    ANSWER_TOKENS,
    CallRecord,
    EndReason,
    Episode,
    Limits,
    Turn,
    append_observation,
    begin_turn,
    close,
    encode,
    frame_ids,
    frame_length,
    keep_partial_turn,
    record_turn,
    refuse_unsupported,
    resumable,
    resume,
    template_prefix,
    until_aborted,
    vocabulary,
    within_turn,
)
from retool.failures import TooManyFailures
from tool_sandbox import TOOL_CONFIGS, SandboxError, tool_registry

# Looked up in this module whenever they are called, so that whoever replaces them here is obeyed.
try:
    from vime.rollout import vllm_rollout
    from vime.rollout.filter_hub.base_types import DynamicFilterOutput
    from vime.rollout.rm_hub.math_dapo_utils import compute_score
    from vime.rollout.vllm_rollout import GenerateState
    from vime.utils.http_utils import post
    from vime.utils.types import Sample
except ImportError as error:
    raise ImportError(
        f"the retool plugin runs inside vime, and importing vime failed ({error}). Put a vime checkout on the path: "
        'export PYTHONPATH="$VIME_ROOT:$VIME_ROOT/examples/retool:$PYTHONPATH" with VIME_ROOT naming the checkout. '
        "Without vime, examples/retool/rollout_on_cpu.sh shows real rollouts."
    ) from error

try:
    from vime.observability.trace_utils import trace_span  # vime from September 2026 on
except ImportError:
    try:
        from vime.utils.trace_utils import trace_span
    except ImportError:

        def trace_span(sample, name, attrs=None):
            return nullcontext()


try:
    from vime.utils.score_centering import score_centering_request  # vime from October 2026 on
except ImportError:
    score_centering_request = None


__all__ = [
    "CODE_STOPS",
    "EndReason",
    "EngineError",
    "EngineRefused",
    "GenerateState",
    "Sample",
    "TOOL_CONFIGS",
    "TooManyFailures",
    "compute_advantages",
    "execute_predictions",
    "format_conversation_with_tools",
    "generate",
    "keep_group",
    "log_eval_rollout_data",
    "log_rollout_data",
    "normalize_rewards",
    "post",
    "postprocess_predictions",
    "postprocess_responses",
    "reward_func",
    "split_prompt",
    "tool_registry",
]

logger = logging.getLogger(__name__)

CODE_STOPS = actions.STOP_TAGS
MAX_REQUESTS_PER_TURN = 8  # a model that repeats a closing tag inside a string would otherwise ask for thousands


# ---------------------------------------------------------------------------------------------------------------------
# The episode
# ---------------------------------------------------------------------------------------------------------------------


def generate(args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Awaitable[Sample]:
    """Roll out one sample: turns of the model and observations, until an answer or a limit ends it.

    Args:
        args: vime's.
        sample: filled in place; `sample.metadata` gains "retool": why the episode ended, its turns, and a record per
            tool call.
        sampling_params: vime's, left untouched; `max_new_tokens` bounds the whole response.
        evaluation: whether nothing is trained on the sample, so that the limits of training do not apply.

    Returns:
        The sample. An infrastructure error in its episode makes it ABORTED.

    Raises:
        EngineRefused: the set-up is wrong.
        TooManyFailures: infrastructure errors keep coming.
        ValueError: the prompt cannot be used.
        RuntimeError: this vime is too old, or a feature that was asked for is not supported.
    """
    # Newer vime reads it when it has called this function, before the coroutine's first step.
    generate.abort_mode = request.abort_mode(args)  # type: ignore[attr-defined]
    return _generate(args, sample, sampling_params, evaluation)


@failures.ends_the_run(gives_sample_back=True)
async def _generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool) -> Any:
    episode = _open_episode(args, sample, sampling_params, evaluation)
    end, failure = EndReason.ABORT, None  # what holds if the task is cancelled at an await below
    try:
        while True:
            turn = await _sample_turn(episode)
            around = frame(getattr(turn.action, "dialect", None), turn.text.endswith(IM_END), episode.template_prefix)
            if reason := _end_reason(episode, turn, around):
                end = reason
                break
            observation = await _act(episode, turn.action)
            # A call that was cut is made again; one that finished is not, where the episode is continued.
            if observation is None or (episode.aborting and not episode.continued):
                end = EndReason.ABORT
                break
            if not append_observation(episode, around, observation, turn.text):
                end = episode.limits.binding(sample)
                break
    except (EngineError, SandboxError) as error:
        failure = error
        end = EndReason.ABORT if episode.aborting else EndReason.INFRASTRUCTURE_ERROR
    finally:
        close(episode, end)
    if end is not EndReason.ABORT:
        _hand_over(episode, end, evaluation, failure)
    return sample


def _open_episode(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool) -> Episode:
    refuse_unsupported(sample)
    state: Any = GenerateState(args)
    tools = tool_registry.get_tool_specs()
    if not evaluation:
        length = lambda prompt: len(encode(state.tokenizer, render_prompt(prompt, tools)))  # noqa: E731
        startup.check_once(args, TOOL_CONFIGS, length)
    template_kwargs = getattr(sample, "apply_chat_template_kwargs", None) or {}
    template_kwargs = (getattr(args, "apply_chat_template_kwargs", None) or {}) | template_kwargs
    prefix = template_prefix(state.tokenizer, template_kwargs)
    try:
        prompt = render_prompt(sample.prompt, tools, prefix)
    except ValueError as error:
        field = getattr(args, "input_key", None)
        raise ValueError(
            f"row {getattr(sample, 'index', None)} of the prompts, field {field!r} (--input-key): {error}"
        ) from error
    _start_workers()
    params = request.with_stops(sampling_params, CODE_STOPS, frame_ids(state.tokenizer).end)
    limits = Limits.of(args, params["max_new_tokens"], evaluation)
    episode = Episode(args, sample, state, params, limits, prompt, prefix)
    episode.failed_attempts = ((sample.metadata or {}).get("retool") or {}).get("failed_attempts", 0)
    record = resumable(sample) if episode.continued else None
    if record:
        resume(episode, record)
    else:
        ledger.start(sample, encode(state.tokenizer, prompt))
        episode.pending_prefix = prefix if prompt.endswith(prefix) else ""
        begin_turn(episode)
    # For code written for earlier versions of this example.
    sample.payload_text = prompt
    sample.payload_has_system = f"{IM_START}system" in prompt
    sample.payload_has_tools = "<tools>" in prompt
    return episode


@functools.cache
def _start_workers() -> None:
    """Once per process: the first call is not to wait for a worker that loads numpy or sympy."""
    tool_registry.python_sandbox.preload()


async def _sample_turn(episode: Episode) -> Turn:
    """The turn that comes next, or what an abort had left of it and the rest.

    One request, and more only while the stop tag that ended it closes no call: in a string, in prose, in a thought.
    """
    sample, limits = episode.sample, episode.limits
    text, reading = sample.response[episode.text_start :], None
    while not episode.turn_over:
        room, binding = limits.room(sample), limits.binding(sample)
        if room <= 0:
            return Turn(text, cut_by=binding)
        if episode.aborting:
            return Turn(text, cut_by=EndReason.ABORT)
        with trace_span(sample, "retool_turn", attrs={"turn": episode.turns, "max_new_tokens": room}):
            completion = await _complete(episode, room)
        if completion.finish_reason == "abort":
            keep_partial_turn(episode, completion)
            return Turn(text, cut_by=EndReason.ABORT if episode.aborting else EndReason.ENGINE_ABORT)
        text = record_turn(episode, *completion)
        if completion.finish_reason == "length":
            return Turn(text, cut_by=binding)
        over = not text.endswith(CODE_STOPS)  # by the end token of the checkpoint, whatever that is
        reading = actions.read_action(episode.pending_prefix + text, over, tool_registry.tools)
        episode.requests += 1
        incomplete = isinstance(reading.action, Incomplete) and completion.token_ids
        episode.turn_over = not incomplete or episode.requests == MAX_REQUESTS_PER_TURN
    if reading is None or isinstance(reading.action, Incomplete):
        reading = actions.read_action(episode.pending_prefix + text, over=True, tools=tool_registry.tools)
    episode.hallucinated_here = reading.hallucinated
    return Turn(text, reading.action)


async def _complete(episode: Episode, room: int) -> engine.Completion:
    """Continue the sample's ids by at most `room` tokens."""
    hooks = request.VimeHooks(
        getattr(vllm_rollout, "_build_inference_sampling_params", None),  # private, so it may be missing
        score_centering_request,
    )
    asked = request.build(episode.args, episode.sample, episode.params, room, hooks)
    known_ids = vocabulary(episode.state.tokenizer)
    completion = await engine.complete(post, asked.router, asked.payload, asked.headers, known_ids, asked.centering)
    if asked.known_rows:
        completion.meta["routed_experts_start_len"] = asked.known_rows
    return within_turn(completion, frame_ids(episode.state.tokenizer))


def _end_reason(episode: Episode, turn: Turn, around: Frame) -> EndReason | None:
    """Why this turn is the last, None if one follows. Without a turn after it an action is not executed: nobody would
    see its output."""
    if turn.cut_by:
        return turn.cut_by
    if isinstance(turn.action, Answer):
        return EndReason.ANSWER
    if not isinstance(turn.action, Invalid) and episode.sample.tool_call_count >= TOOL_CONFIGS["max_tool_calls"]:
        return EndReason.CALL_CAP
    if episode.turns >= TOOL_CONFIGS["max_turns"]:
        return EndReason.TURN_CAP
    if episode.limits.room(episode.sample) <= frame_length(episode.state.tokenizer, around) + ANSWER_TOKENS:
        return episode.limits.binding(episode.sample)
    return None


async def _act(episode: Episode, action: Action) -> str | None:
    """The observation's body, and a record of the call if the action is one; None if an abort of vime's cut it."""
    if not isinstance(action, Code | ToolCall):
        return await _observe(action)
    sample = episode.sample
    sample.tool_call_count += 1
    given = action.source if isinstance(action, Code) else str(action.arguments)
    started = time.monotonic()
    with trace_span(sample, "retool_tool_call", attrs={"tool": action.name}):
        output = await until_aborted(episode, _observe(action))
    seconds = time.monotonic() - started
    sample.non_generation_time += seconds
    if output is None:
        return None
    shown = _shown(output, action.dialect)
    outcome, queued = getattr(output, "outcome", "ok"), round(getattr(output, "queued", 0.0), 6)
    episode.calls.append(CallRecord(action.name, round(seconds, 6), outcome, len(given), len(shown), queued))
    return shown


async def _observe(action: Action) -> str:
    """What the tool, or the loop itself, answers to an action. SandboxError is an infrastructure error."""
    if isinstance(action, Code | ToolCall):
        return await tool_registry.execute_tool(action.name, action.arguments)
    assert isinstance(action, Invalid), "an answer ends the episode, and an incomplete turn goes on"
    return (
        f"Your previous action is invalid: {action.problem}. To run Python, call {CODE_TOOL} with the code; "
        "to answer, write `Answer: \\boxed{...}`."
    )


def _shown(output: str, dialect: actions.Dialect | None) -> str:
    return observations.shown(output, dialect, TOOL_CONFIGS["max_output_chars"])


def _hand_over(episode: Episode, end: EndReason, evaluation: bool, failure: Exception | None) -> None:
    """Make what is not to be trained on harmless, and count what the engine or the sandbox lost."""
    if end is EndReason.ENGINE_ABORT:
        failure = EngineError("the engine ended the request (finish_reason abort), though vime aborts nothing")
    overlong = None if evaluation else TOOL_CONFIGS["overlong"]
    handover.hand_over(episode, end, overlong, engine.sends_top_p_sets(), failure)
    failures.count(failure, TOOL_CONFIGS["max_failure_rate"], in_a_row_only=end is EndReason.ENGINE_ABORT)


# ---------------------------------------------------------------------------------------------------------------------
# The reward
# ---------------------------------------------------------------------------------------------------------------------


@failures.ends_the_run()
async def reward_func(
    args, sample: Sample | list[Sample] | None = None, samples: list[Sample] | None = None, **kwargs
) -> reward.Reward | list[reward.Reward]:
    """The reward of a sample, see retool/reward.py; an ABORTED one scores 0, since it is not trained on.

    Args:
        args: vime's.
        sample: the sample, or the list of them that vime passes at this place with --group-rm.
        samples: that list under the name that vime gives it.

    Returns:
        A reward, or as many as there are samples in the list.

    Raises:
        TypeError: what came is neither.
    """
    given = sample if samples is None else samples
    if (sample is None) == (samples is None):
        raise TypeError("reward_func takes one of sample and samples, and both or neither came")
    if isinstance(given, list | tuple):
        return [_score(one) for one in given]
    return _score(given)


def _score(sample: Any) -> reward.Reward:
    if not isinstance(sample, Sample):
        raise TypeError(f"reward_func scores a Sample of vime's or a list of them, not {type(sample).__name__}")
    if sample.status == Sample.Status.ABORTED or handover.is_given_up(sample):
        return reward.lost()
    response, record = sample.response or "", (sample.metadata or {}).get("retool")
    calls = reward.calls_that_ran(record["calls"]) if record else getattr(sample, "tool_call_count", 0)
    prompt = str(getattr(sample, "payload_text", None) or sample.prompt).removesuffix(response)
    found = reward.score_response(
        response,
        sample.label,
        calls,
        compute_score,
        bonus=TOOL_CONFIGS["tool_bonus"],
        cut=sample.status == Sample.Status.TRUNCATED,
        in_thought=prompt.rstrip().endswith("<think>"),
    )
    found["score"] -= handover.overlong_penalty((record or {}).get("budget_left"), TOOL_CONFIGS["overlong"])
    return found


def normalize_rewards(args, samples: list[Sample] | list[list[Sample]]) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards) for --custom-reward-post-process-path: a lost sample changes nobody's advantage.

    See retool/advantages.py; TOOL_CONFIGS["advantage_spread"] says which groups are trained on.
    """
    handover.settle(args, samples, TOOL_CONFIGS["max_failure_rate"])
    return advantages.normalize(args, samples, TOOL_CONFIGS["advantage_spread"])


def keep_group(args, samples: list[Sample] | list[list[Sample]], **kwargs) -> DynamicFilterOutput:
    """Whether a group trains anything, for --dynamic-sampling-filter-path; vime counts the others by the reason."""
    handover.settle(args, samples, 1.0)
    kind = advantages.group_kind(args, samples, TOOL_CONFIGS["advantage_spread"])
    return DynamicFilterOutput(keep=kind == "mixed", reason=None if kind == "mixed" else kind)


def compute_advantages(args, rollout_data: dict[str, Any]) -> None:
    """For --custom-advantage-function-path: vime's own advantages, and zeros where no token is trained on."""
    from vime.backends.megatron_utils.loss import compute_advantages_and_returns  # there in a trainer alone

    advantages.without_untrained(compute_advantages_and_returns, args, rollout_data)


# ---------------------------------------------------------------------------------------------------------------------
# The names under which code written for earlier versions of this example reads a turn and an engine's answer
# ---------------------------------------------------------------------------------------------------------------------

_parse_vllm_choice = engine.parse_choice


def postprocess_predictions(text: str) -> tuple[str | None, Any]:
    """("code", source), ("answer", what the box holds), ("tool", {"name", "arguments"}), or (None, "")."""
    action = actions.read_action(text, tools=tool_registry.tools).action
    if isinstance(action, Code):
        return "code", action.source
    if isinstance(action, Answer):
        return "answer", action.content
    if isinstance(action, ToolCall):
        return "tool", {"name": action.name, "arguments": action.arguments}
    return None, ""


def postprocess_responses(text: str) -> str:
    """The text up to the end of its last complete action; the whole text if it has none."""
    return text[: actions.complete_actions_end(text)]


async def execute_predictions(text: str) -> tuple[str, bool]:
    """(observation in its frame, done) for a whole turn; ("", True) for an answer. SandboxError as execute_tool."""
    action = actions.read_whole_turn(text, tool_registry.tools).action
    if isinstance(action, Answer):
        return "", True
    dialect = getattr(action, "dialect", None)
    around = frame(dialect, turn_ended=text.endswith(IM_END))
    return around.before + neutralize(_shown(await _observe(action), dialect)) + around.after, False


# ---------------------------------------------------------------------------------------------------------------------
# The metrics of docs/metrics.md
# ---------------------------------------------------------------------------------------------------------------------


def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool:
    """Log the plugin's metrics of a training rollout, as "rollout/retool/..."; False: vime's own are to follow."""
    handover.settle(args, samples, TOOL_CONFIGS["max_failure_rate"])  # vime's own read every reward
    if not getattr(args, "load_debug_rollout_data", None):  # logged when they were rolled out; vime skips its own too
        tracking.log("rollout", rollout_id, args, {"rollout/retool/": samples})
    return False


def log_eval_rollout_data(rollout_id, args, data, extra_metrics) -> bool:
    """Log them per evaluation data set, as "eval/NAME/retool/..."; False: vime's own are to follow.

    In vime's list of rewards each lost sample gets the mean of the others, so that its `eval/NAME` is the accuracy of
    those that were not lost.
    """
    for found in data.values():
        if "samples" in found:
            lost = [sample.remove_sample for sample in found["samples"]]
            found["rewards"] = handover.with_the_mean_for_lost(found["rewards"], lost)
    by_prefix = {f"eval/{name}/retool/": found.get("samples") or [] for name, found in data.items()}
    tracking.log("eval", rollout_id, args, by_prefix)
    return False
