r"""Multi-turn rollouts with a Python tool for vime: the turn loop and the reward, as vime calls them.

    --custom-generate-function-path generate_with_retool.generate
    --custom-rm-path generate_with_retool.reward_func --reward-key score
    --custom-rollout-log-function-path generate_with_retool.log_rollout_data
    --custom-eval-rollout-log-function-path generate_with_retool.log_eval_rollout_data

Data flows one way; each arrow is one function:

    sample.prompt --render_prompt--> ids --complete--> turn --read_action--> action --_act--> observation --+
                                      ^                                                                   |
                                      +-------------------- _record, the one writer of tokens <-----------+

Contract (vime's rollout): `generate` is awaited once per sample under vime's own semaphore, fills the sample and
returns it; `reward_func` scores it by the last box in the assistant's prose.

Invariants, on every way out, a cancellation at any await included:
- Token in, token out. The ids of a request begin with the ids of the request before it and its output; what the model
  sampled is never tokenized again, only observations are encoded.
- len(loss_mask) == len(rollout_log_probs) == response_length and tokens == prompt ids + response ids. The mask is 1 on
  sampled tokens, 0 on observations.
- A mistake of the model becomes an observation. An infrastructure error (EngineError, SandboxError) makes the sample
  ABORTED and is never trained on; many of them stop the run.

How the model is spoken to is retool/chat.py, what it says retool/actions.py, the wire retool/engine.py, the reward
retool/reward.py, the tools tool_sandbox.py. This module is the only one that knows vime.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Any

from retool import engine, failures, metrics, reward
from retool.actions import Action, Answer, Code, Incomplete, Invalid, ToolCall, complete_actions_end, read_action
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
from retool.episode import CallRecord, EndReason, Episode, Limits, Turn, append_observation, encode, record, reset
from retool.failures import TooManyFailures
from tool_sandbox import TOOL_CONFIGS, SandboxError, tool_registry

# Looked up in this module whenever they are called, so that whoever replaces them here is obeyed.
try:
    from vime.rollout import vllm_rollout
    from vime.rollout.rm_hub.math_dapo_utils import compute_score, normalize_final_answer
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


__all__ = [
    "CODE_STOPS",
    "EndReason",
    "EngineError",
    "EngineRefused",
    "GenerateState",
    "Sample",
    "TOOL_CONFIGS",
    "TooManyFailures",
    "execute_predictions",
    "format_conversation_with_tools",
    "generate",
    "log_eval_rollout_data",
    "log_rollout_data",
    "post",
    "postprocess_predictions",
    "postprocess_responses",
    "reward_func",
    "split_prompt",
    "tool_registry",
]

logger = logging.getLogger(__name__)

CODE_STOPS = ("</tool_call>", "</code>")  # so that nothing written after an action is trained on
MAX_REQUESTS_PER_TURN = 8  # a model that repeats a closing tag inside a string would otherwise ask for thousands


# ---------------------------------------------------------------------------------------------------------------------
# The episode
# ---------------------------------------------------------------------------------------------------------------------


async def generate(args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
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
    """
    episode = _open_episode(args, sample, sampling_params, evaluation)
    end, failure = EndReason.ABORT, None  # what holds if the task is cancelled at an await below
    try:
        while True:
            turn = await _sample_turn(episode)
            around = frame(getattr(turn.action, "dialect", None), turn_ended=turn.text.endswith(IM_END))
            if reason := _end_reason(episode, turn, around):
                end = reason
                break
            observation = await _act(episode, turn.action)
            if episode.aborting:
                end = EndReason.ABORT
                break
            append_observation(episode, around, observation)
    except (EngineError, SandboxError) as error:
        failure = error
        end = EndReason.ABORT if episode.aborting else EndReason.INFRASTRUCTURE_ERROR
    finally:
        _close_episode(episode, end)
    if end.status == "ABORTED" and not episode.aborting:
        _lose(sample)
    if end is not EndReason.ABORT:
        failures.count(failure, TOOL_CONFIGS["max_failure_rate"])
    return sample


# Newer vime ends a sample by cancelling its task instead of waiting for it.
generate.abort_mode = "request"  # type: ignore[attr-defined]


def _open_episode(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool) -> Episode:
    assert not getattr(
        args, "partial_rollout", False
    ), "retool cannot continue partial rollouts: start vime without --partial-rollout"
    if not hasattr(sample, "append_response_tokens"):
        raise RuntimeError("this vime is too old for retool: Sample.append_response_tokens (July 2026) is missing")
    if any(value is not None for value in (getattr(sample, "multimodal_inputs", None) or {}).values()):
        raise ValueError("retool handles text only, and the sample has multimodal inputs")
    state: Any = GenerateState(args)
    tools = tool_registry.get_tool_specs()
    prompt = render_prompt(sample.prompt, tools)
    reset(sample)
    sample.tokens = encode(state.tokenizer, prompt)
    sample.payload_text = prompt
    sample.payload_has_system = f"{IM_START}system" in prompt
    sample.payload_has_tools = "<tools>" in prompt

    params = dict(sampling_params)
    stop = params.get("stop") or []
    stop = [stop] if isinstance(stop, str) else list(stop)
    params["stop"] = stop + [tag for tag in CODE_STOPS if tag not in stop]
    return Episode(args, sample, state, params, _limits(args, params, evaluation))


def _limits(args: Any, params: dict[str, Any], evaluation: bool) -> Limits:
    if evaluation:  # nothing is trained on the sample, so what fits on a training GPU is no limit
        return Limits(getattr(args, "eval_max_context_len", None), params["max_new_tokens"])
    context = getattr(args, "rollout_max_context_len", None)
    if context is None and getattr(args, "max_tokens_per_gpu", None):
        context = (getattr(args, "context_parallel_size", None) or 1) * args.max_tokens_per_gpu
    return Limits(context, params["max_new_tokens"])


async def _sample_turn(episode: Episode) -> Turn:
    """One request, and more only while the stop tag that ended it stands inside an unfinished string."""
    sample, limits, tokenizer = episode.sample, episode.limits, episode.state.tokenizer
    ids: list[int] = []
    turn = Turn("", Invalid(""))
    hallucinated = 0
    for attempt in range(MAX_REQUESTS_PER_TURN):
        room, binding = limits.room(sample), limits.binding(sample)
        if room <= 0:
            return turn._replace(cut_by=binding)
        if episode.aborting:
            return turn._replace(cut_by=EndReason.ABORT)
        with trace_span(sample, "retool_turn", attrs={"turn": episode.turns, "max_new_tokens": room}):
            completion = await _complete(episode, room)
        if completion.finish_reason == "abort":
            return turn._replace(cut_by=EndReason.ABORT)
        said = tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        record(episode, completion.token_ids, said, completion.log_probs, completion.meta)
        episode.turns += attempt == 0
        if completion.finish_reason == "length":
            return turn._replace(cut_by=binding)
        ids += completion.token_ids
        text = tokenizer.decode(ids, skip_special_tokens=False) if attempt else said
        action, hallucinated = read_action(text, tools=tool_registry.tools)
        turn = Turn(text, action)
        if not isinstance(action, Incomplete) or not completion.token_ids:
            break
    if isinstance(turn.action, Incomplete):
        action, hallucinated = read_action(turn.text, over=True, tools=tool_registry.tools)
        turn = Turn(turn.text, action)
    episode.hallucinated += hallucinated
    return turn


async def _complete(episode: Episode, room: int) -> engine.Completion:
    """Continue the sample's ids by at most `room` tokens."""
    args, sample = episode.args, episode.sample
    params = {**episode.params, "max_new_tokens": room}
    if params.get("min_new_tokens"):  # a bound of the whole response, as max_new_tokens is
        params["min_new_tokens"] = min(room, max(0, params["min_new_tokens"] - sample.response_length))
    headers = None
    session_id = getattr(sample, "session_id", None)
    if session_id and getattr(args, "router_policy", None) == "consistent_hash":
        headers = {"x-session-id": session_id}  # all turns meet their KV cache on one engine
    payload = {
        "model": args.hf_checkpoint,
        "token_ids": list(sample.tokens),
        "sampling_params": _engine_sampling_params(params),
    }
    return await engine.complete(post, f"{args.vllm_router_ip}:{args.vllm_router_port}", payload, headers)


def _engine_sampling_params(params: dict[str, Any]) -> dict[str, Any]:
    """vime's sampling parameters as the engine's.

    vime's own mapping is used where this vime has it under its private name: it knows what this vime's engine can do.
    """
    vime_mapping = getattr(vllm_rollout, "_build_inference_sampling_params", None)
    if vime_mapping is not None:
        body = dict(vime_mapping(params))
    else:
        renamed = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        passed = ("temperature", "top_p", "top_k", "stop_token_ids", "seed", "repetition_penalty", *renamed)
        body = {renamed.get(name, name): params[name] for name in passed if params.get(name) is not None}
        if body.get("top_k") == 0:  # vime's "no limit" is -1 or 0, the engine's only -1
            del body["top_k"]
    # Stop strings match the text that the engine decodes: with special tokens skipped a tag that a tokenizer marks as
    # special would never be seen. The log-probs are the rollout's; without them nothing can be trained on.
    return body | {
        "stop": params["stop"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 1,
    }


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
    if episode.limits.room(episode.sample) <= len(encode(episode.state.tokenizer, "".join(around))):
        return episode.limits.binding(episode.sample)
    return None


async def _act(episode: Episode, action: Action) -> str:
    """The observation's body, and a record of the call if the action is one."""
    if not isinstance(action, Code | ToolCall):
        return await _observe(action)
    sample = episode.sample
    sample.tool_call_count += 1
    name, given = (CODE_TOOL, action.source) if isinstance(action, Code) else (action.name, str(action.arguments))
    started = time.monotonic()
    with trace_span(sample, "retool_tool_call", attrs={"tool": name}):
        output = await _observe(action)
    seconds = time.monotonic() - started
    sample.non_generation_time += seconds
    outcome = getattr(output, "outcome", "ok")
    episode.calls.append(CallRecord(name, round(seconds, 6), outcome, len(given), len(output)))
    return output


async def _observe(action: Action) -> str:
    """What the tool, or the loop itself, answers to an action. SandboxError is an infrastructure error."""
    if isinstance(action, Code):
        return await tool_registry.execute_tool(CODE_TOOL, {"code": action.source})
    if isinstance(action, ToolCall):
        return await tool_registry.execute_tool(action.name, action.arguments)
    assert isinstance(action, Invalid), "an answer ends the episode, and an incomplete turn goes on"
    return (
        f"Your previous action is invalid: {action.problem}. To run Python, call {CODE_TOOL} with the code; "
        "to answer, write `Answer: \\boxed{...}`."
    )


def _close_episode(episode: Episode, end: EndReason) -> None:
    sample = episode.sample
    sample.status = Sample.Status[end.status]
    sample.payload_text += sample.response
    sample.metadata["retool"] = {
        "end_reason": end.value,
        "turns": episode.turns,
        "calls": [call._asdict() for call in episode.calls],
        "hallucinated_outputs": episode.hallucinated,
    }


def _lose(sample: Any) -> None:
    """Not vime's own abort, so vime may put the sample into the batch as it is: it must neither train nor crash."""
    sample.remove_sample = True
    sample.reward = reward.lost()


# ---------------------------------------------------------------------------------------------------------------------
# The reward
# ---------------------------------------------------------------------------------------------------------------------


async def reward_func(args, sample: Sample | list[Sample], **kwargs) -> reward.Reward | list[reward.Reward]:
    """The reward of a sample, see retool/reward.py; an ABORTED one scores 0, since it is not trained on.

    A list of samples (--group-rm) gives a list as long.
    """
    if isinstance(sample, list):
        return [_score(one) for one in sample]
    return _score(sample)


def _score(sample: Sample) -> reward.Reward:
    if sample.status == Sample.Status.ABORTED:
        return reward.lost()
    scorer = reward.Scorer(compute_score, normalize_final_answer)
    return reward.score_response(sample.response or "", sample.label, getattr(sample, "tool_call_count", 0), scorer)


# ---------------------------------------------------------------------------------------------------------------------
# The names under which code written for earlier versions of this example reads a turn and an engine's answer
# ---------------------------------------------------------------------------------------------------------------------

_parse_vllm_choice = engine.parse_choice


def postprocess_predictions(text: str) -> tuple[str | None, Any]:
    """("code", source), ("answer", what the box holds), ("tool", {"name", "arguments"}), or (None, "")."""
    action = read_action(text, tools=tool_registry.tools).action
    if isinstance(action, Code):
        return "code", action.source
    if isinstance(action, Answer):
        return "answer", action.content
    if isinstance(action, ToolCall):
        return "tool", {"name": action.name, "arguments": action.arguments}
    return None, ""


def postprocess_responses(text: str) -> str:
    """The text up to the end of its last complete action; the whole text if it has none."""
    return text[: complete_actions_end(text)]


async def execute_predictions(text: str) -> tuple[str, bool]:
    """(observation in its frame, done) for a whole turn; ("", True) for an answer. SandboxError as execute_tool."""
    action = read_action(text, tools=tool_registry.tools).action
    if isinstance(action, Incomplete):
        action = read_action(text, over=True, tools=tool_registry.tools).action
    if isinstance(action, Answer):
        return "", True
    around = frame(getattr(action, "dialect", None), turn_ended=text.endswith(IM_END))
    return around.before + neutralize(await _observe(action)) + around.after, False


# ---------------------------------------------------------------------------------------------------------------------
# The metrics of docs/metrics.md
# ---------------------------------------------------------------------------------------------------------------------


def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool:
    """Log the plugin's metrics of a training rollout, as "rollout/retool/..."; False: vime's own are to follow."""
    if not getattr(args, "load_debug_rollout_data", None):  # logged when they were rolled out; vime skips its own too
        _log("rollout", rollout_id, args, {"rollout/retool/": samples})
    return False


def log_eval_rollout_data(rollout_id, args, data, extra_metrics) -> bool:
    """Log them per evaluation data set, as "eval/NAME/retool/..."; False: vime's own are to follow."""
    _log(
        "eval", rollout_id, args, {f"eval/{name}/retool/": found.get("samples") or [] for name, found in data.items()}
    )
    return False


def _log(kind: str, rollout_id: int, args, samples: dict[str, list[Sample]]) -> None:
    try:
        # Here, since they import wandb, which whoever only rolls out need not have.
        from vime.utils import logging_utils
        from vime.utils.metric_utils import compute_rollout_step

        found = {
            prefix + name: value for prefix in samples for name, value in metrics.summarize(samples[prefix]).items()
        }
        step_key = f"{kind}/step"
        logging_utils.log(args, found | {step_key: compute_rollout_step(args, rollout_id)}, step_key=step_key)
    except Exception:  # a number that cannot be had is not worth the run
        logger.exception("the plugin's metrics of %s %s could not be logged", kind, rollout_id)
