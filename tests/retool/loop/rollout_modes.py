"""Runs vime's own rollout functions with this plugin over an engine or a sandbox that is at fault, each in a process.

    python rollout_modes.py WORKDIR MODE:FAULT ...

The tests read what it leaves: for every pair WORKDIR/MODE:FAULT.log with all that the process wrote, and one JSON
object on stdout with its exit status and the seconds it took, -1 for a process that had to be killed. Everything is
imported once and then forked. Needs VIME_ROOT, as the tests that call it do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import generate_with_retool as plugin
import tool_sandbox
from scripted import ScriptedEngine, Turn, call, make_args

from vime.rollout import fully_async_rollout, vllm_rollout
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.utils import http_utils
from vime.utils.eval_config import EvalDatasetConfig

MAX_SECONDS = float(os.environ.get("MAX_SECONDS", "90"))
AT_ONCE = 3  # most of the time they wait
GROUPS, GROUP_SIZE = 6, 8


def arguments(workdir: Path, port: int, **changes):
    """What vime's parser would give, as far as these functions read it."""
    prompts = workdir / "prompts.jsonl"
    checkpoint = os.environ["RETOOL_QWEN3_TOKENIZER"]
    fixed = dict(
        vllm_router_port=port,
        hf_checkpoint=checkpoint,
        rollout_batch_size=GROUPS,
        over_sampling_batch_size=GROUPS,
        n_samples_per_prompt=GROUP_SIZE,
        vllm_server_concurrency=GROUPS * GROUP_SIZE,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=4096,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        rollout_seed=1,
        rollout_shuffle=False,
        rollout_global_dataset=True,
        rollout_max_prompt_len=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        dynamic_sampling_filter_path=None,
        buffer_filter_path=None,
        vllm_dp_size=1,
        mask_offpolicy_in_partial_rollout=False,
        custom_generate_function_path="generate_with_retool.generate",
        custom_rm_path="generate_with_retool.reward_func",
        ci_test=False,
        dump_details=None,
        prompt_data=str(prompts),
        input_key="prompt",
        label_key="label",
        metadata_key="metadata",
        tool_key=None,
        multimodal_keys=None,
        apply_chat_template=False,
        apply_chat_template_kwargs={},
        eval_max_prompt_len=None,
        eval_reward_key=None,
        eval_datasets=[
            EvalDatasetConfig(
                name="held-out",
                path=str(workdir / "held_out.jsonl"),
                input_key="prompt",
                label_key="label",
                n_samples_per_eval_prompt=8,
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                max_response_len=4096,
            )
        ],
    )
    return make_args(**{**fixed, **changes})


def write_prompts(workdir: Path) -> None:
    """As many rows that the one which is always refused does not make a run of nothing but failures."""
    rows = [json.dumps({"prompt": f"What is {n} + 1?", "label": str(n + 1)}) + "\n" for n in range(32)]
    (workdir / "prompts.jsonl").write_text("".join(rows))
    (workdir / "held_out.jsonl").write_text("".join(rows[:8]))


# ---------------------------------------------------------------------------------------------------------------------
# Faults: each takes the place of something, and returns the engine
# ---------------------------------------------------------------------------------------------------------------------


def sampled(text: str) -> list[int]:
    return plugin.GenerateState(None).tokenizer(text, add_special_tokens=False)["input_ids"]


def engine_of(turn: Turn) -> ScriptedEngine:
    return ScriptedEngine(lambda payload, index: turn, sampled)


ANSWER = Turn("Answer: \\boxed{1}<|im_end|>")


def refuses() -> ScriptedEngine:
    return engine_of(Turn(status=403, body='{"detail":\n"not served"}'))


def no_log_probs() -> ScriptedEngine:
    return engine_of(Turn(ANSWER.text, log_probs=None))


def dead() -> ScriptedEngine:
    engine = engine_of(ANSWER)
    engine.close()
    return engine


def sandbox() -> ScriptedEngine:
    async def fail(code):
        raise tool_sandbox.SandboxError("no worker starts here")

    tool_sandbox.tool_registry.python_sandbox.execute_code = fail
    return engine_of(Turn(call("print(1)")))


def prompt() -> ScriptedEngine:
    render = plugin.render_prompt

    def bad_row(prompt, tools, *more):
        if " 7 + 1" in prompt:
            raise ValueError("row 7 has no prompt")
        return render(prompt, tools, *more)

    plugin.render_prompt = bad_row
    return engine_of(ANSWER)


def aborts() -> ScriptedEngine:
    return engine_of(Turn("x", finish="abort"))


def refuses_one() -> ScriptedEngine:
    """One prompt, for ever. Later than it answers others: a refusal before any answer is the set-up's fault."""

    def script(payload, index):
        refused = " 7 + 1" in plugin.GenerateState(None).tokenizer.decode(payload["token_ids"])
        return Turn(status=400, body="this one is too long", delay=0.5) if refused else ANSWER

    return ScriptedEngine(script, sampled)


def old_vime() -> ScriptedEngine:
    del plugin.Sample.append_response_tokens
    return engine_of(ANSWER)


def reward() -> ScriptedEngine:
    def broken(sample):
        raise TypeError("no reward for this label")

    plugin._score = broken
    return engine_of(ANSWER)


FAULTS = dict(
    refuses=refuses,
    no_log_probs=no_log_probs,
    dead=dead,
    aborts=aborts,
    refuses_one=refuses_one,
    sandbox=sandbox,
    prompt=prompt,
    old_vime=old_vime,
    reward=reward,
    none=lambda: engine_of(ANSWER),
)
ROLLOUTS = {"none": 1, "refuses_one": 8}  # after so many a run that is to go on has done so


# ---------------------------------------------------------------------------------------------------------------------
# Modes: each calls vime as its driver does, until that raises
# ---------------------------------------------------------------------------------------------------------------------


def sync(args, data_source) -> None:
    for rollout_id in range(args.rollouts):
        vllm_rollout.generate_rollout(args, rollout_id, data_source)
        time.sleep(0.2)  # a training step


def evaluation(args, data_source) -> None:
    vllm_rollout.generate_rollout(args, 0, data_source, evaluation=True)


def fully_async(args, data_source) -> None:
    try:
        for rollout_id in range(args.rollouts):
            fully_async_rollout.generate_rollout_fully_async(args, rollout_id, data_source)
    except Exception:
        print(json.dumps({"kept": all_groups_are_back(data_source)}), flush=True)
        raise


def all_groups_are_back(data_source) -> bool:
    """Whether every group that was handed out lies in the buffer again; the worker takes them out once a second."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if data_source.get_buffer_length() == data_source.sample_group_index:
            return True
        time.sleep(0.01)
    return False


MODES = dict(sync=sync, evaluation=evaluation, fully_async=fully_async)


def run(workdir: Path, mode: str, fault: str) -> None:
    engine = FAULTS[fault]()
    args = arguments(workdir, engine.port, rollouts=ROLLOUTS.get(fault, 40))
    if fault == "dead":
        args.n_samples_per_prompt = 4  # fewer lost at a time than the window of failures takes
    if fault == "refuses_one":
        args.vllm_server_concurrency = GROUPS  # a group that comes back is begun again at once, not after many others
    plugin.GenerateState(args).args = args
    http_utils.init_http_client(args)
    MODES[mode](args, RolloutDataSourceWithBuffer(args))


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------


def forked(workdir: Path, pair: str) -> SimpleNamespace:
    child = os.fork()
    if child == 0:
        log = os.open(workdir / f"{pair}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 0
        try:
            run(workdir, *pair.split(":"))
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return SimpleNamespace(pair=pair, pid=child, started=time.monotonic())


def ended(child: SimpleNamespace) -> dict | None:
    """What became of it, None while it runs."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    seconds = time.monotonic() - child.started
    if pid:
        return {"pair": child.pair, "seconds": seconds, "status": os.waitstatus_to_exitcode(status)}
    if seconds > MAX_SECONDS:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        return {"pair": child.pair, "seconds": -1, "status": -9}
    return None


def main() -> None:
    workdir, waiting = Path(sys.argv[1]), sys.argv[2:]
    write_prompts(workdir)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    plugin.GenerateState(arguments(workdir, 1))
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    running: list[SimpleNamespace] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(forked(workdir, waiting.pop(0)))
        time.sleep(0.02)
        for child in list(running):
            if result := ended(child):
                running.remove(child)
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
