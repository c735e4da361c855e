"""vime's rollout half: the shared state, the mapping of parameters, and generation followed by the reward."""

from __future__ import annotations

import asyncio
import inspect
import uuid

from vime.rollout.base_types import RolloutFnTrainOutput
from vime.utils.async_utils import run
from vime.utils.http_utils import get_rollout_num_engines
from vime.utils.misc import load_function
from vime.utils.types import Sample


def get_model_url(args, model_name, endpoint="/inference/v1/generate"):
    routers = getattr(args, "vllm_model_routers", None) or {}
    host, port = routers.get(model_name, (args.vllm_router_ip, args.vllm_router_port))
    return f"http://{host}:{port}{endpoint}"


class GenerateState:
    """One for the process, made from the first ``args`` it is asked with."""

    _instance = None

    def __new__(cls, args):
        if cls._instance is None:
            from transformers import AutoTokenizer

            state = super().__new__(cls)
            state.args = args
            state.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
            state.semaphore = asyncio.Semaphore(args.vllm_server_concurrency * get_rollout_num_engines(args))
            state.sampling_params = dict(
                temperature=args.rollout_temperature,
                top_p=args.rollout_top_p,
                top_k=args.rollout_top_k,
                max_new_tokens=args.rollout_max_response_len,
                stop=args.rollout_stop,
                stop_token_ids=args.rollout_stop_token_ids,
                skip_special_tokens=args.rollout_skip_special_tokens,
                no_stop_trim=True,
                spaces_between_special_tokens=False,
            )
            if getattr(args, "vllm_enable_deterministic_inference", False):
                state.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
            state.aborted = False
            cls._instance = state
        return cls._instance


def _build_inference_sampling_params(sampling_params):
    body = {
        "max_tokens": sampling_params["max_new_tokens"],
        "temperature": sampling_params["temperature"],
        "top_p": sampling_params["top_p"],
        "logprobs": 1,
    }
    top_k = sampling_params.get("top_k")
    if top_k is not None and (top_k > 0 or top_k == -1):
        body["top_k"] = top_k
    if sampling_params.get("stop"):
        body["stop"] = sampling_params["stop"]
        if sampling_params.get("no_stop_trim"):
            body["include_stop_str_in_output"] = True
    if sampling_params.get("stop_token_ids"):
        body["stop_token_ids"] = sampling_params["stop_token_ids"]
    for name in ("seed", "skip_special_tokens"):
        if sampling_params.get(name) is not None:
            body[name] = sampling_params[name]
    return body


async def generate_and_rm(args, sample, sampling_params, evaluation=False):
    if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        generate = load_function(sample.generate_function_path or args.custom_generate_function_path)
        extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(generate).parameters else {}
        sample = await generate(args, sample, sampling_params, **extra)
    if sample.status != Sample.Status.ABORTED and sample.reward is None:
        sample.reward = await load_function(sample.custom_rm_path or args.custom_rm_path)(args, sample)
    return sample


async def generate_and_rm_group(args, group, sampling_params, evaluation=False):
    for sample in group:
        sample.session_id = sample.session_id or str(uuid.uuid4())
    seeds = getattr(GenerateState(args), "group_sampling_seeds", None)
    params = [sampling_params | ({"seed": seeds[i]} if seeds else {}) for i in range(len(group))]
    tasks = [generate_and_rm(args, *pair, evaluation) for pair in zip(group, params, strict=True)]
    return await asyncio.gather(*tasks)


async def _generate_rollout(args, get_samples):
    state = GenerateState(args)
    groups = get_samples(args.rollout_batch_size)
    done = await asyncio.gather(*(generate_and_rm_group(args, group, state.sampling_params) for group in groups))
    return sorted(done, key=lambda group: group[0].index)


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    return RolloutFnTrainOutput(samples=run(_generate_rollout(args, data_source.get_samples)))
