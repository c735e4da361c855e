r"""The wire: vLLM's POST /inference/v1/generate, and nothing else knows it.

    request(post, url, payload, headers) --> JSON --> parse_choice, usage --> Completion

Contract: ids go out and ids come back; nothing is tokenized here. `post` is vime's HTTP client, handed in by the
caller, who looks it up at each call. Whatever is wrong is an exception: EngineRefused where the set-up is wrong and
the run must stop, EngineError where one episode is lost. An abort is an ordinary answer.

Invariant: a log-prob is the engine's own, of the token that was sampled, or there is none; zeros invented here would
bend the importance ratio, and so would the number that an engine sends in the place of one it does not have.
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

NO_LOG_PROB = -9999.0  # what vLLM sends, JSON having no NaN, for a log-prob that is NaN, infinite or missing
MAX_START_ATTEMPTS = 6  # a second apart, of a request where nothing has ever answered; later vime's own 60 hold
MAX_SAID = 500  # characters of an engine's own words in a message
MAX_LOG_PROB = 1e-3  # what rounding makes of log 1; kept as it comes, since the trainer's own numbers round alike


class EngineError(RuntimeError):
    """The engine failed or answered nonsense: the episode is lost, the run goes on."""


class EngineRefused(RuntimeError):
    """The engine refuses requests of this form: the set-up is wrong and the run must stop."""


class Completion(NamedTuple):
    token_ids: list[int]
    log_probs: list[float]  # one for each id
    meta: dict[str, Any]  # what Sample.append_response_tokens takes as meta_info

    @property
    def finish_reason(self) -> str:
        """ "stop", "length" or "abort"."""
        return str(self.meta["finish_reason"]["type"])


class ScoreCentering(NamedTuple):
    """vime's --use-score-centering needs the sampler's distribution beside each log-prob: its `top_k` most likely
    tokens, or, where top-p cuts it to few (`top_k` is None), all of them."""

    top_k: int | None

    @property
    def log_probs(self) -> int:
        """How many the engine is asked for at each position; the sampled token's may not be among the most likely."""
        return 1 if self.top_k is None else self.top_k + 1

    def read(
        self, choice: dict[str, Any], token_ids: list[int], log_probs: list[float]
    ) -> tuple[dict[str, Any], list[float]]:
        """What vime's Sample takes as meta_info, and the log-probs in the same distribution."""
        import numpy  # only runs with score centering need it

        if self.top_k is not None:
            heads = [
                _most_likely(item.get("top_logprobs") or [], self.top_k) for item in choice["logprobs"]["content"]
            ]
            ids = numpy.asarray([[token for token, _ in head] for head in heads], dtype=numpy.int32)
            values = numpy.asarray([[value for _, value in head] for head in heads], dtype=numpy.float32)
            return {"score_centering_topk": (ids, values)}, log_probs
        kept, scores = choice.get("sampling_mask"), choice.get("sampling_mask_logprobs")
        if not kept or not scores or [len(row) for row in kept] != [len(row) for row in scores]:
            raise ValueError("it needs the tokens that top-p kept, and a log-prob for each of them")
        sampled = [float(row[ids.index(token)]) for token, ids, row in zip(token_ids, kept, scores, strict=True)]
        ids = numpy.asarray(list(itertools.chain.from_iterable(kept)), dtype=numpy.int32)
        values = numpy.asarray(list(itertools.chain.from_iterable(scores)), dtype=numpy.float32)
        offsets = numpy.asarray(list(itertools.accumulate(map(len, kept), initial=0)), dtype=numpy.int32)
        return {"score_centering_top_p": (ids, offsets, values)}, sampled


def _most_likely(entries: list[dict[str, Any]], count: int) -> list[tuple[int, float]]:
    found = {_token_of(entry): float(entry["logprob"]) for entry in entries}
    head = sorted(((token, value) for token, value in found.items() if type(token) is int), key=lambda pair: -pair[1])
    if len(head) < count:
        raise ValueError(f"it needs the {count} most likely tokens at each position, and got {len(head)}")
    return head[:count]


_REFUSALS = {
    400: "The prompt may be longer than the engine takes: start it with --max-model-len (vime: --vllm-max-model-len) "
    "of at least the rollout's context limit, {limit} tokens here.",
    403: "vLLM from 0.3x on serves this endpoint only if it is started with --enable-scale-out (vime: "
    "--vllm-enable-scale-out).",
    404: "Either the engine serves another model than {model!r} (start it with this --served-model-name), or it is "
    "too old for /inference/v1/generate.",
}
_NO_REFUSALS = (408, 425, 429)  # client errors that pass
_engine_answered = threading.Event()
_sets_missing = threading.Event()  # of a request with top-p


def forget_engine() -> None:
    """Take the next request for the first one of this process; for tests."""
    _engine_answered.clear()
    _sets_missing.clear()


def sends_top_p_sets() -> bool:
    """Whether the engine says which tokens top-p kept; as long as none has answered, that it will."""
    return not _sets_missing.is_set()


async def complete(
    post: Post,
    router: str,
    payload: dict[str, Any],
    headers: dict[str, str] | None,
    vocabulary: int | None = None,
    centering: ScoreCentering | None = None,
) -> Completion:
    """Continue the ids of a request.

    Args:
        post: vime's HTTP client.
        router: HOST:PORT.
        payload: {"model", "token_ids", "sampling_params"}.
        headers: of the request, or None.
        vocabulary: how many ids there are, None if that is not known.
        centering: what of the sampler's distribution is to be kept.

    Returns:
        The completion. An abort whose numbers cannot be used has no tokens.

    Raises:
        EngineRefused: the engine refused the request and has never answered this process.
        EngineError: any other failure, and an answer that cannot be used.
    """
    output = await _request(post, f"http://{router}/inference/v1/generate", payload, headers)
    try:
        token_ids, log_probs, meta, fault = _read_choice(output["choices"][0])
        meta |= _usage(output)
        meta |= _weight_versions(output)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"the engine's answer cannot be read: {error!r}") from error
    if output["choices"][0].get("finish_reason") == "error":  # asked again it may say so for ever
        raise EngineError("the engine failed on this request: its finish_reason is error")
    if token_ids and "top_p_token_ids" not in meta and payload["sampling_params"].get("top_p", 1.0) != 1.0:
        _sets_missing.set()
    limit = payload["sampling_params"]["max_tokens"]
    if len(token_ids) > limit:
        fault = f"it has {len(token_ids)} tokens where {limit} were allowed"
    elif vocabulary and token_ids and max(token_ids) >= vocabulary:
        fault = f"token id {max(token_ids)} is outside the vocabulary of {vocabulary}"
    elif centering and token_ids and not fault:
        try:
            distribution, log_probs = centering.read(output["choices"][0], token_ids, log_probs)
            meta |= distribution
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            fault = f"score centering cannot read it: {error}"
    if fault and meta["finish_reason"]["type"] != "abort":
        raise EngineError(f"the engine's answer cannot be trained on: {fault}")
    return Completion([], [], meta) if fault else Completion(token_ids, log_probs, meta)


async def _request(post: Post, url: str, payload: dict[str, Any], headers: dict[str, str] | None) -> dict[str, Any]:
    """vime's `post` repeats every error for a minute, a refusal too: so the first try is a single one."""
    try:
        try:
            output = await post(url, payload, max_retries=1, headers=headers)
        except Exception as error:
            status = _http_status(error)
            if _is_refusal(status):
                raise
            if status is None and not _engine_answered.is_set():  # a wrong address, or an engine that did not start
                output = await post(url, payload, max_retries=MAX_START_ATTEMPTS - 1, headers=headers)
            else:
                output = await post(url, payload, headers=headers)
    except Exception as error:
        message = f"{url} failed: {error or repr(error)}"
        status = _http_status(error)
        if status is not None and _is_refusal(status):
            limit = len(payload["token_ids"]) + payload["sampling_params"]["max_tokens"]
            said = getattr(getattr(error, "response", None), "text", "")[:MAX_SAID]
            message += f" {said} " + _REFUSALS.get(status, "").format(model=payload["model"], limit=limit)
            if not _engine_answered.is_set():
                raise EngineRefused(_one_line(message)) from error
        raise EngineError(_one_line(message)) from error
    _engine_answered.set()
    return output


def _is_refusal(status: int | None) -> bool:
    return status is not None and 400 <= status < 500 and status not in _NO_REFUSALS


def _one_line(message: str) -> str:
    """The cause of a run's end must be readable in its last log line."""
    return " ".join(message.split())


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
        (token ids, log-probs, meta). The log-probs are [] where one of them cannot be used. meta holds
        finish_reason {"type": "stop" | "length" | "abort"} and what else the choice carries, under the keys that
        vime's Sample reads.
    """
    token_ids, log_probs, meta, _ = _read_choice(choice)
    return token_ids, log_probs, meta | _weight_versions({"choices": [choice]})


def _read_choice(choice: dict[str, Any]) -> tuple[list[int], list[float], dict[str, Any], str | None]:
    """`parse_choice`, and what is wrong with the log-probs if something is."""
    token_ids = list(choice.get("token_ids") or [])
    for token in token_ids:
        if type(token) is not int or token < 0:  # a bool is an int, too
            raise ValueError(f"{token!r} is no token id")
    log_probs, fault = _log_probs(token_ids, (choice.get("logprobs") or {}).get("content") or [])

    finish = choice.get("finish_reason")
    finish = finish.get("type") if isinstance(finish, dict) else finish
    if finish in ("abort", "cancelled", "error"):
        finish = "abort"
    meta: dict[str, Any] = {"finish_reason": {"type": finish if finish in ("length", "abort") else "stop"}}
    if choice.get("routed_experts") is not None:
        import numpy  # only runs that replay routing need it

        raw = base64.b64decode(choice["routed_experts"], validate=True)
        meta["routed_experts"] = numpy.load(io.BytesIO(raw), allow_pickle=False)
    if choice.get("sampling_mask") is not None:
        kept = choice["sampling_mask"]
        meta["top_p_token_ids"] = list(itertools.chain.from_iterable(kept))
        meta["top_p_token_offsets"] = list(itertools.accumulate(map(len, kept), initial=0))
    return token_ids, log_probs, meta, fault


def _log_probs(token_ids: list[int], items: list[Any]) -> tuple[list[float], str | None]:
    """The log-probs of the sampled tokens, or [] and what is wrong with them."""
    if len(items) != len(token_ids):
        return [], f"it has {len(items) or 'no'} log-probs for {len(token_ids)} tokens"
    if _all_usable(token_ids, items):
        return [float(item["logprob"]) for item in items], None
    values: list[float] = []
    for position, (token, item) in enumerate(zip(token_ids, items, strict=True)):
        value: Any = item.get("logprob") if isinstance(item, dict) else None
        if fault := _log_prob_fault(value) or _wrong_token(item, token):
            return [], f"log-prob {position + 1} of {len(items)} {fault}"
        values.append(float(value))
    return values, None


def _all_usable(token_ids: list[int], items: list[Any]) -> bool:
    """Whether nothing is wrong, said in a few passes at C's speed: one by one the checks cost more than the rest of a
    turn. False where it takes a closer look to say."""
    try:
        values = [item["logprob"] for item in items]
        named = [item.get("token_id") for item in items]
        if values and named[0] is None:
            texts = [item["token"] for item in items]
            right = texts == [f"token_id:{token}" for token in token_ids]
        else:
            right = named == token_ids and {*map(type, named)} <= {int}
        # NaN compares as neither, and stays in a sum
        bounded = not values or (NO_LOG_PROB < min(values) and max(values) <= MAX_LOG_PROB)
        return right and {*map(type, values)} <= {int, float} and bounded and not math.isnan(sum(values))
    except (TypeError, KeyError, AttributeError):
        return False


def _log_prob_fault(value: Any) -> str | None:
    if value is None:
        return "is missing"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is {value!r:.40}, not a number"
    if value <= NO_LOG_PROB:
        return f"is {value!r:.40}, which stands for one that the engine does not have"
    if value > MAX_LOG_PROB:
        return f"is {value!r:.40}, and so of a probability above 1"
    return "is NaN" if math.isnan(value) else None


def _wrong_token(item: dict[str, Any], token: int) -> str | None:
    named = _token_of(item)
    if named is None or (named == token and not isinstance(named, bool)):
        return None
    return f"belongs to token {named!r:.40}, not to {token}, which was sampled"


def _token_of(item: dict[str, Any]) -> Any:
    """Engines name the token of a log-prob by its id, in a field of its own or in the place of its text."""
    named = item.get("token_id")
    if named is None and str(item.get("token")).startswith("token_id:"):
        named = item["token"].removeprefix("token_id:")
        return int(named) if named.isdecimal() else named
    return named


def _usage(output: dict[str, Any]) -> dict[str, Any]:
    """What the answer says beside its choice, under the keys that vime's Sample reads; only what it says."""
    usage = output.get("usage") or {}
    found = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    }
    speculation = (output.get("metrics") or {}).get("speculative_decoding") or {}
    for name, spellings in _SPECULATION.items():
        found[name] = next((speculation[key] for key in spellings if speculation.get(key) is not None), None)
    return {name: value for name, value in found.items() if value is not None}


# By engines of different ages.
_SPECULATION = {
    "spec_accept_token_num": ("num_accepted_draft_tokens", "num_accepted_tokens"),
    "spec_draft_token_num": ("num_draft_tokens",),
    "spec_verify_ct": ("num_spec_steps", "num_verify_steps"),
}


def _weight_versions(output: dict[str, Any]) -> dict[str, Any]:
    """Which weights sampled the tokens: one version, and before it the earlier ones of a request that went on over an
    update of the weights. The oldest decides how stale a sample is, so none may be dropped."""
    versions = [span["version"] for span in output["choices"][0].get("weight_versions") or []]
    if output.get("weight_version") is not None:
        versions.append(output["weight_version"])
    *earlier, last = dict.fromkeys(map(str, versions)) or [None]
    found = {"weight_version": last, "earlier_weight_versions": earlier}
    return {name: value for name, value in found.items() if value}
