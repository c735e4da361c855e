"""The rollout: vime's own, over samples made here, watched from outside while it fills them in place."""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import itertools
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cpu.options import EXAMPLE, TEMPERATURE, RunError
from cpu.problems import Problem, with_examples
from cpu.report import console, count, is_finished, progress_display
from cpu.servers import Engine, Server
from cpu.storage import SampleFile
from retool.processes import last_log_line
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)

STANDIN = EXAMPLE.parents[1] / "tests" / "retool" / "standin"
CONCURRENCY = 16  # samples in flight: more only wait on a few cores


def put_vime_on_path() -> str:
    """Which vime the run goes through, in words."""
    root = os.environ.get("VIME_ROOT")
    folder = Path(root) if root else STANDIN
    if not (folder / "vime" / "rollout" / "vllm_rollout.py").is_file():
        if root:
            raise RunError(f"VIME_ROOT={root} is no vime checkout: it has no vime/rollout/vllm_rollout.py")
        raise RunError(f"the stand-in for vime is not at {folder}: name a vime checkout in VIME_ROOT")
    sys.path.insert(0, str(folder))
    return (
        f"vime's own code in {folder}"
        if root
        else "the stand-in for vime in tests/retool/standin (VIME_ROOT is not set)"
    )


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


def start_rollout(arguments: argparse.Namespace, groups: list[list[Any]]) -> concurrent.futures.Future:
    """vime's rollout over the groups, in a thread: its samples are filled in place while it runs."""
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
    """Until the rollout is over: show where it is, write what is finished, and see that the servers live."""
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
                console.print(f"  {counts.done}/{len(samples)} done, {detail}")
                said = now
            if over:
                break
            for server in servers:
                if server.has_ended():
                    raise RunError(f"{server.name} ended: {last_log_line(server.log)} (log: {server.log})")
    if error := outcome.exception():
        raise RunError(f"the rollout failed: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
