"""The one place that writes a sample's tokens: ids, loss mask, log-probs and text move together.

Contract: sampled tokens are trained on, observations are not. What vime's own `Sample.append_response_tokens` would
let get out of step it refuses, which is an EngineError here. Samples are vime's, used as they come.
"""

from __future__ import annotations

from typing import Any

from retool.engine import EngineError


def start(sample: Any, prompt_ids: list[int]) -> None:
    """Begin afresh: a sample that comes back after an abort brings all of its earlier attempt along."""
    fresh = {
        "tokens": prompt_ids,
        "response": "",
        "response_length": 0,
        "loss_mask": [],
        "rollout_log_probs": [],
        "rollout_top_p_token_ids": None,
        "rollout_top_p_token_offsets": None,
        "rollout_top_p_log_probs": None,
        "rollout_topk_token_ids": None,
        "rollout_topk_log_probs": None,
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


def append(
    args: Any, sample: Any, ids: list[int], text: str, log_probs: list[float] | None, meta: dict[str, Any] | None
) -> None:
    """Add to a response.

    Args:
        args: vime's.
        sample: whose response it is.
        ids: may be none.
        text: what they decode to.
        log_probs: one for each id; None for an observation, which is not trained on.
        meta: what else the engine's answer says of them, under the keys that vime's Sample reads.

    Raises:
        EngineError: they do not fit the sample.
    """
    if ids and meta:
        # vime's Sample takes one version of the weights for a request, the last.
        sample.weight_versions += meta.get("earlier_weight_versions", [])
        # An observation before anything was sampled got no top-p sets, since nobody knew yet that the engine sends
        # some. With score centering vime makes up for it.
        sets = "top_p_token_ids" in meta and "score_centering_top_p" not in meta
        if sets and sample.rollout_top_p_token_ids is None and not any(sample.loss_mask):
            sample.rollout_top_p_token_ids = []
            sample.rollout_top_p_token_offsets = [0] * (sample.response_length + 1)
    try:
        sample.append_response_tokens(
            args, tokens=ids, log_probs=log_probs, trainable=log_probs is not None, meta_info=meta, text=text
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise EngineError(f"the engine's answer does not fit the sample: {error}") from error


def decode_again(sample: Any, tokenizer: Any, first_id: int, first_character: int) -> str:
    """The text of the ids from `first_id` on, put in the place of what the response holds from `first_character` on: a
    character may have been cut between two requests."""
    text = str(tokenizer.decode(sample.tokens[first_id:], skip_special_tokens=False))
    sample.response = sample.response[:first_character] + text
    return text


def take_back(sample: Any, ids: list[int], text: str) -> None:
    """Take an observation, which these ids and this text are, off the end of a response."""
    kept = sample.response_length - len(ids)
    sample.response_length = kept
    sample.tokens = sample.tokens[: len(sample.tokens) - len(ids)]
    sample.response = sample.response[: len(sample.response) - len(text)]
    if sample.rollout_top_p_token_offsets is not None:  # of the sets' ids an observation has none
        sample.rollout_top_p_token_offsets = sample.rollout_top_p_token_offsets[: kept + 1]
    for name in ("loss_mask", "rollout_log_probs", "rollout_topk_token_ids", "rollout_topk_log_probs"):
        if getattr(sample, name, None) is not None:
            setattr(sample, name, getattr(sample, name)[:kept])


def take_back_unseen(sample: Any, tokenizer: Any) -> None:
    """Take the observations off the end of a response, after which nothing was sampled."""
    count = next((place for place, trained in enumerate(reversed(sample.loss_mask)) if trained), 0)
    if count:
        ids = sample.tokens[-count:]
        take_back(sample, ids, str(tokenizer.decode(ids, skip_special_tokens=False)))


def count_the_last_prompt_token(sample: Any) -> None:
    """As the response of a sample that has none, for what needs one; it is not trained on."""
    sample.response_length, sample.loss_mask, sample.rollout_log_probs = 1, [0], [0.0]
