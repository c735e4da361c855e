"""What one turn asks of the engine: vime's arguments and the state of a sample, as a request.

Contract: pure. The ids are the sample's own, all of them; the dict of sampling parameters that vime hands out, which
samples may share, is not changed. What vime does in functions of its own (the mapping of parameters, the checks of
score centering) is handed in, since not every vime has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from retool.engine import ScoreCentering


class Request(NamedTuple):
    router: str  # HOST:PORT
    payload: dict[str, Any]
    headers: dict[str, str] | None
    centering: ScoreCentering | None
    known_rows: int  # of expert rows that the sample has, so that the engine sends those after them


class VimeHooks(NamedTuple):
    """Functions of vime's, None where this vime does not have them."""

    mapping: Callable[[dict[str, Any]], dict[str, Any]] | None  # of sampling parameters to the engine's
    check_centering: Callable[[Any, dict[str, Any]], Any] | None  # refuses parameters that do not go with it


def build(args: Any, sample: Any, params: dict[str, Any], room: int, hooks: VimeHooks) -> Request:
    """The request that continues the sample's ids by at most `room` tokens.

    Args:
        args: vime's.
        sample: vime's, its ids being the prompt's and the response's so far.
        params: vime's sampling parameters, whose bounds are those of the whole response.
        room: in tokens.
        hooks: what this vime brings along.

    Raises:
        RuntimeError: score centering in a vime that has none.
        ValueError: sampling parameters that do not go with it.
    """
    params = {**params, "max_new_tokens": room}
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = min(room, max(0, params["min_new_tokens"] - sample.response_length))
    if params.get("seed") is not None and sample.response_length:
        params["seed"] = _later_seed(params["seed"], sample.response_length)
    centering = None
    if getattr(args, "use_score_centering", False):  # vime itself switches it off in evaluation
        if hooks.check_centering is None:
            raise RuntimeError("--use-score-centering needs vime.utils.score_centering, which this vime does not have")
        hooks.check_centering(args, params)
        centering = ScoreCentering(args.score_centering_top_k if args.rollout_top_p == 1 else None)
    body = sampling_params(params, hooks.mapping, centering.log_probs if centering else 1)
    known_rows = _known_expert_rows(args, sample)
    if known_rows:
        body["routed_experts_prompt_start"] = known_rows
    headers = None
    session_id = getattr(sample, "session_id", None)
    if session_id and getattr(args, "router_policy", None) == "consistent_hash":
        headers = {"x-session-id": session_id}  # all turns meet their KV cache on one engine
    payload = {"model": args.hf_checkpoint, "token_ids": list(sample.tokens), "sampling_params": body}
    return Request(f"{args.vllm_router_ip}:{args.vllm_router_port}", payload, headers, centering, known_rows)


def with_stops(params: dict[str, Any], tags: tuple[str, ...], turn_end: int) -> dict[str, Any]:
    """vime's sampling parameters, with the stop tags and the token that ends a turn of the chat format: an engine
    stops by itself only at the end token of the checkpoint, which may be another one."""
    stop = params.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    stop_ids = params.get("stop_token_ids") or ()
    return {
        **params,
        "stop": list(dict.fromkeys((*stop, *tags))),
        "stop_token_ids": list(dict.fromkeys((*stop_ids, turn_end))),
    }


def _later_seed(seed: int, position: int) -> int:
    """The seed of a request that continues a response of `position` tokens; the first one keeps the sample's.

    An engine begins its random stream anew with each request: with one seed for all of them (vime sends one per sample
    with --vllm-enable-deterministic-inference) the i-th tokens of all turns would be drawn with the same numbers.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {position}".encode(), digest_size=4).digest(), "big") >> 1


def abort_mode(args: Any) -> str | None:
    """How newer vime is to end a sample that it has no use for: "request" cancels its task, None has the engines end
    their requests and give back what they sampled.

    A cancelled request loses its turn, so with --partial-rollout engines end them: vime keeps a group only if
    something of an aborted sample is there. So they do with --use-distributed-post: a Ray actor posts the requests
    then, and a cancelled task reaches neither it nor the engine, which would go on.
    """
    given_back = getattr(args, "partial_rollout", False) or getattr(args, "use_distributed_post", False)
    return None if given_back else "request"


def _known_expert_rows(args: Any, sample: Any) -> int:
    """A vime that cannot take a part of the rows gets all of them anew each time."""
    if not getattr(args, "use_rollout_routing_replay", False) or not sample.response_length:
        return 0
    count = getattr(sample, "get_rollout_routed_experts_length", None)
    return int(count()) if count else 0


# vime's own sampling parameters: what its mapping does not hand to the engine, it leaves out on purpose.
_VIMES_PARAMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_token_ids": "stop_token_ids",
    "seed": "seed",
    "repetition_penalty": "repetition_penalty",
    "stop": None,
    "skip_special_tokens": None,
    "no_stop_trim": None,
    "spaces_between_special_tokens": None,
    "custom_params": None,
}


def sampling_params(
    params: dict[str, Any], vimes_mapping: Callable[[dict[str, Any]], dict[str, Any]] | None, log_probs: int
) -> dict[str, Any]:
    """vime's sampling parameters as the engine's.

    Args:
        params: vime's; those that this module does not know are passed on as they come.
        vimes_mapping: vime's own, None where this vime has none: it knows what this vime's engine can do.
        log_probs: how many at each position.
    """
    if vimes_mapping is not None:
        body = dict(vimes_mapping(params))
    else:
        body = {name: params[key] for key, name in _VIMES_PARAMS.items() if name and params.get(key) is not None}
        if body.get("top_k") == 0:  # vime's "no limit" is -1 or 0, the engine's only -1
            del body["top_k"]
    for name, value in params.items():
        if name not in _VIMES_PARAMS and value is not None:
            body.setdefault(name, value)
    # Stop strings match the text that the engine decodes: with special tokens skipped a tag that a tokenizer marks as
    # special would never be seen. The log-probs are the rollout's; without them nothing can be trained on.
    return body | {
        "stop": params["stop"],
        "stop_token_ids": params["stop_token_ids"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": log_probs,
    }
