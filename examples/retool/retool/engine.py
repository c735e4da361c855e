r"""The wire: vLLM's POST /inference/v1/generate, and nothing else knows it.

    request(post, url, payload, headers) --> JSON --> parse_choice, usage --> Completion

Contract: ids go out and ids come back; nothing is tokenized here. `post` is vime's HTTP client, handed in by the caller,
who looks it up at each call. Whatever is wrong is an exception: EngineRefused where the set-up is wrong and the run must
stop, EngineError where one episode is lost. An abort is an ordinary answer.

Invariant: a log-prob is the engine's own or there is none; zeros invented here would bend the importance ratio.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

Post = Callable[..., Awaitable[dict[str, Any]]]  # (url, payload, max_retries=60, headers=None) -> parsed JSON


class EngineError(RuntimeError):
    """The engine failed or answered nonsense: the episode is lost, the run goes on."""


class EngineRefused(RuntimeError):
    """The engine refuses requests of this form: the set-up is wrong and the run must stop."""


class Completion(NamedTuple):
    token_ids: list[int]
    log_probs: list[float]  # one for each id, or none at all for an abort
    meta: dict[str, Any]  # what Sample.append_response_tokens takes as meta_info

    @property
    def finish_reason(self) -> str:
        """ "stop", "length" or "abort"."""
        return str(self.meta["finish_reason"]["type"])


_REFUSALS = {
    400: "The prompt may be longer than the engine takes: start it with --max-model-len (vime: --vllm-max-model-len) "
    "of at least the rollout's context limit, {limit} tokens here.",
    403: "vLLM from 0.3x on serves this endpoint only if it is started with --enable-scale-out (vime: "
    "--vllm-enable-scale-out).",
    404: "Either the engine serves another model than {model!r} (start it with this --served-model-name), or it is "
    "too old for /inference/v1/generate.",
}
_engine_answered = threading.Event()


def forget_engine() -> None:
    """Take the next request for the first one of this process; for tests."""
    _engine_answered.clear()


async def complete(post: Post, router: str, payload: dict[str, Any], headers: dict[str, str] | None) -> Completion:
    """Continue the ids of a request.

    Args:
        post: vime's HTTP client.
        router: HOST:PORT.
        payload: {"model", "token_ids", "sampling_params"}.
        headers: of the request, or None.

    Raises:
        EngineRefused: the engine refused the request and has never answered this process.
        EngineError: any other failure, and an answer that cannot be used.
    """
    output = await _request(post, f"http://{router}/inference/v1/generate", payload, headers)
    try:
        token_ids, log_probs, meta = parse_choice(output["choices"][0])
        meta |= _usage(output)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"the engine's answer cannot be read: {error!r}") from error
    if meta["finish_reason"]["type"] != "abort" and len(log_probs) != len(token_ids):
        raise EngineError("the engine's answer has no usable log-prob for every token")
    return Completion(token_ids, log_probs, meta)


async def _request(post: Post, url: str, payload: dict[str, Any], headers: dict[str, str] | None) -> dict[str, Any]:
    """vime's `post` repeats every error for a minute, a refusal too: so the first try is a single one."""
    try:
        try:
            output = await post(url, payload, max_retries=1, headers=headers)
        except Exception as error:
            if _http_status(error) in _REFUSALS:
                raise
            output = await post(url, payload, headers=headers)
    except Exception as error:
        message = f"{url} failed: {error}"
        refusal = _REFUSALS.get(_http_status(error) or 0)
        if refusal:
            limit = len(payload["token_ids"]) + payload["sampling_params"]["max_tokens"]
            said = getattr(getattr(error, "response", None), "text", "")
            message += f" {said} " + refusal.format(model=payload["model"], limit=limit)
            if not _engine_answered.is_set():
                raise EngineRefused(message) from error
        raise EngineError(message) from error
    _engine_answered.set()
    return output


def _http_status(error: BaseException | None) -> int | None:
    """The status of an HTTP error, also where Ray wrapped it."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def parse_choice(choice: dict[str, Any]) -> tuple[list[int], list[float], dict[str, Any]]:
    """What one choice of the engine's answer says.

    Returns:
        (token ids, log-probs, meta). The log-probs are [] where one is missing, null, NaN or infinite. meta holds
        finish_reason {"type": "stop" | "length" | "abort"} and what else the choice carries, under the keys that vime's
        Sample reads.
    """
    token_ids = [int(token) for token in choice.get("token_ids") or []]
    content = (choice.get("logprobs") or {}).get("content") or []
    given = [item.get("logprob") if isinstance(item, dict) else None for item in content]
    usable = len(given) == len(token_ids) and all(_is_finite(value) for value in given)

    finish = choice.get("finish_reason")
    finish = finish.get("type") if isinstance(finish, dict) else finish
    if finish in ("abort", "cancelled", "error"):
        finish = "abort"
    meta: dict[str, Any] = {"finish_reason": {"type": finish if finish in ("length", "abort") else "stop"}}
    if choice.get("weight_versions"):
        meta["weight_version"] = str(choice["weight_versions"][-1]["version"])
    if choice.get("routed_experts") is not None:
        import numpy  # only runs that replay routing need it

        raw = base64.b64decode(choice["routed_experts"], validate=True)
        meta["routed_experts"] = numpy.load(io.BytesIO(raw), allow_pickle=False)
    if choice.get("sampling_mask") is not None:
        kept = choice["sampling_mask"]
        meta["top_p_token_ids"] = list(itertools.chain.from_iterable(kept))
        meta["top_p_token_offsets"] = list(itertools.accumulate(map(len, kept), initial=0))
    return token_ids, [float(value or 0.0) for value in given] if usable else [], meta


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _usage(output: dict[str, Any]) -> dict[str, Any]:
    """What the answer says beside its choice, under the keys that vime's Sample reads; only what it says."""
    usage = output.get("usage") or {}
    speculation = (output.get("metrics") or {}).get("speculative_decoding") or {}
    found = {
        "weight_version": output.get("weight_version"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "spec_accept_token_num": speculation.get("num_accepted_draft_tokens"),
        "spec_draft_token_num": speculation.get("num_draft_tokens"),
        "spec_verify_ct": speculation.get("num_spec_steps"),
    }
    return {name: value for name, value in found.items() if value is not None}
