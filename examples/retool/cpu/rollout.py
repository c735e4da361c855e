"""The rollout: vime's own, over samples made here, watched from outside while it fills them in place."""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import itertools
import logging
import os
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

from cpu.options import TEMPERATURE, RunError
from cpu.problems import Problem, with_examples
from cpu.report import console, count, is_finished, progress_display, say
from cpu.servers import Engine, Server, check_alive
from cpu.storage import SampleFile
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)

CONCURRENCY = 16  # samples in flight: more only wait on a few cores
CORE_SECONDS = 20  # that the packaged model takes for a sample of up to 512 tokens


def vime_arguments(engine: Engine, options: argparse.Namespace, groups: int) -> argparse.Namespace:
    """vime's arguments, as its parser would leave them, as far as its rollout reads them."""
    return argparse.Namespace(
        hf_checkpoint=engine.model,
        vllm_router_ip=engine.host,
        vllm_router_port=engine.port,
        vllm_server_concurrency=CONCURRENCY,
        vllm_dp_size=1,
        vllm_enable_deterministic_inference=True,  # a seed for each sample of a problem
        rollout_num_engines=1,
        rollout_num_gpus=1,  # this and the next: what vime before July 2026 counts its engines from
        rollout_num_gpus_per_engine=1,
        rollout_seed=options.seed,
        rollout_global_dataset=True,
        rollout_batch_size=groups,
        over_sampling_batch_size=groups,
        n_samples_per_prompt=options.samples,
        rollout_temperature=TEMPERATURE,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=options.max_tokens,
        rollout_max_context_len=engine.context,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        custom_generate_function_path="generate_with_retool.generate",
        custom_rm_path="generate_with_retool.reward_func",
        reward_key="score",
        rm_type=None,
        group_rm=False,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        use_distributed_post=False,
        ci_test=False,
    )


def make_samples(problems: list[Problem], per_problem: int, examples: bool) -> list[list[Any]]:
    """vime's samples, a group for each problem; with `examples`, the worked examples go before each."""
    from vime.utils.types import Sample

    numbers = itertools.count()
    return [
        [
            Sample(
                group_index=group,
                index=next(numbers),
                prompt=with_examples(problem.prompt) if examples else copy.deepcopy(problem.prompt),
                label=cast(Any, problem.label),  # vime annotates a string, and passes on what its data holds
            )
            for _ in range(per_problem)
        ]
        for group, problem in enumerate(problems)
    ]


def check_lengths(groups: list[list[Any]], problems: list[Problem], engine: Engine) -> None:
    """RunError that names the line of a prompt that leaves no room for a response."""
    from retool.chat import render_prompt
    from tool_sandbox import tool_registry
    from transformers import AutoTokenizer

    tokenizer, tools = AutoTokenizer.from_pretrained(engine.model), tool_registry.get_tool_specs()
    for problem, group in zip(problems, groups, strict=True):
        try:
            text = render_prompt(group[0].prompt, tools)
        except ValueError as error:
            raise RunError(f"{problem.where}: {error}") from error
        length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if length >= engine.context:
            raise RunError(
                f"{problem.where}: the prompt has {length} tokens with its system message, tools and worked examples, "
                f"and the engine's context of {engine.context} tokens has no room for a response"
            )


def estimate(samples: int, max_tokens: int) -> str:
    """How long the packaged model takes for so many samples on this machine's cores, in words."""
    cores = len(os.sched_getaffinity(0))
    minutes = samples * CORE_SECONDS * min(1, max_tokens / 512) / cores / 60
    return f"about {max(1, round(minutes))} minute{'s' if minutes >= 1.5 else ''} on {cores} core{'s' if cores > 1 else ''}"


def start_rollout(arguments: argparse.Namespace, groups: list[list[Any]]) -> concurrent.futures.Future:
    """vime's rollout over the groups, in a thread: its samples are filled in place while it runs.

    Returns:
        A future that is done when the rollout is over, with its exception if it failed.
    """
    from vime.rollout.vllm_rollout import generate_rollout
    from vime.utils.http_utils import init_http_client

    source = SimpleNamespace(get_samples=lambda count: groups[:count], add_samples=lambda aborted: None)
    outcome: concurrent.futures.Future = concurrent.futures.Future()

    def work() -> None:
        try:
            init_http_client(arguments)
            outcome.set_result(generate_rollout(arguments, 0, source))
        except BaseException as error:
            logger.exception("the rollout failed")
            outcome.set_exception(error)

    # A daemon: what it waits for may never come once the run is being stopped.
    threading.Thread(target=work, name="rollout", daemon=True).start()
    return outcome


def watch(outcome: concurrent.futures.Future, samples: list[Any], servers: list[Server], file: SampleFile) -> None:
    """Until the rollout is over: show where it is, write what is finished, and see that the servers live.

    Raises:
        RunError: the rollout failed, a server ended, or the file cannot be written.
    """
    unwritten = list(samples)
    started = said = time.monotonic()
    with progress_display(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task("rollout", total=len(samples), detail="")
        while True:
            over = bool(concurrent.futures.wait([outcome], timeout=0.25).done)
            for sample in [sample for sample in unwritten if is_finished(sample)]:
                file.write(sample)
                unwritten.remove(sample)
            counts, now = count(samples), time.monotonic()
            detail = f"{counts}, {counts.tokens / (now - started):.0f} tokens/s"
            progress.update(task, completed=counts.done, detail=detail)
            if not console.is_terminal and (over or now - said > 15):
                say(f"  {counts.done}/{len(samples)} done, {detail}")
                said = now
            if over:
                break
            for server in servers:
                check_alive(server, "during the rollout")
    if error := outcome.exception():
        deadline = time.monotonic() + 3  # an engine that fails answers with errors before it ends
        while servers and time.monotonic() < deadline:
            for server in servers:
                check_alive(server, "during the rollout")
            time.sleep(0.1)
        raise RunError(f"the rollout failed: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
