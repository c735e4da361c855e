#!/usr/bin/env python3
"""Check an SFT or RL launch of vime, print its command and run it. retool_qwen3_4b_sft.sh and ..._rl.sh call it.

    python3 main.py {sft,rl} THE_SCRIPTS_FLAGS ... -- FURTHER_FLAGS ...

    settings -> checks -> model arguments -> vime's own parser -> command -> checkpoint -> Ray

Contract: nothing is started, written or converted before every check has passed, each fault one line. With DRY_RUN=1
the commands are printed and nothing else happens; what is missing of data, checkpoints or tools is a warning there.
Further flags win over the script's own. The exit code is the job's own. The wandb key is only tested for being set.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is started by its path

from launch import checkpoints, checks, local_ray, ray_job
from launch.checks import Finding, missing, problem, warning
from launch.settings import DEFAULT_MODEL, DEFAULT_ROPE_THETA, PLUGIN, Launch, Settings, read_settings
from retool.processes import Stopped, raise_on_stop_signals
from retool.supervise import LaunchError


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    end = arguments.index("--")
    stage, own, further = arguments[0], arguments[1:end], arguments[end + 1 :]
    try:
        launch = prepare(read_settings(stage, further, environ), own, further)
    except Stopped as stopped:
        return stopped.exit_code
    except (LaunchError, OSError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 1
    show(launch)
    sys.stdout.flush()
    if launch.settings.dry_run:
        return 0
    return (ray_job if launch.settings.ray_address else local_ray).run(launch)


def prepare(settings: Settings, own: Sequence[str], further: Sequence[str]) -> Launch:
    """Check everything.

    Raises:
        LaunchError: what is wrong, one fault a line.
    """
    report(settings, checks.machine(settings))
    report(settings, checks.paths(settings))
    model = model_arguments(settings)
    words = [
        *["--actor-num-nodes", settings.nodes, "--actor-num-gpus-per-node", settings.gpus],
        *model,
        *["--hf-checkpoint", settings.hf_checkpoint, "--ref-load", settings.ref_load],
        *["--load", settings.save, "--save", settings.save],
        *(word for data in settings.data for word in (*data.flag.split(), data.path)),
        *own,
        *wandb_arguments(settings),
        *further,
    ]
    report(settings, checks.command(settings, words))
    report(settings, ask_vime(settings, words))
    conversion = []
    if settings.ref_made and not checkpoints.is_whole(settings.ref_load):
        converter = os.path.join(settings.vime, "tools", "convert_hf_to_torch_dist.py")
        conversion = ["python3", converter, *model, "--hf-checkpoint", settings.hf_checkpoint]
    job = ["python3", os.path.join(settings.vime, settings.stage.train_script), *words]
    return Launch(settings, job_environment(settings), conversion, job)


def report(settings: Settings, findings: Iterable[Finding]) -> None:
    """Print what does not stop the launch, and raise what does."""
    stopping = []
    for kind, text in findings:
        if kind == "problem" or (kind == "missing" and not settings.dry_run):
            stopping.append(text)
        elif kind == "note":
            print(f"# {text}")
        else:
            print(f"warning: {text}", file=sys.stderr)
    if stopping:
        raise LaunchError("\n".join(stopping))


def model_arguments(settings: Settings) -> list[str]:
    """The flags of vime's model script with the checkpoint's own rope theta, where some of the scripts say another.

    That the two describe one model, rope theta included, vime's parser checks.
    """
    config = checkpoints.read_config(settings.hf_checkpoint)
    theta = checkpoints.rope_theta(config or {})
    if config is None and settings.model_script == DEFAULT_MODEL:
        theta = DEFAULT_ROPE_THETA
    elif config is not None and theta is None:
        raise LaunchError(f"{settings.hf_checkpoint}/config.json: no rope theta in it; download the checkpoint again")
    environment = {**settings.environ, **({"MODEL_ARGS_ROTARY_BASE": theta} if theta else {})}
    script = os.path.join(settings.vime, "scripts", "models", f"{settings.model_script}.sh")
    program = 'set -euo pipefail; source "$1" >&2; printf "%s\\0" "${MODEL_ARGS[@]}"'
    done = subprocess.run(["bash", "-c", program, "bash", script], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"MODEL_SCRIPT: {script} fails: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    words = done.stdout.split("\0")[:-1]
    return words if not theta or "--rotary-base" in words else [*words, "--rotary-base", theta]


def ask_vime(settings: Settings, words: Sequence[str]) -> list[Finding]:
    """What vime's own parser has against the command, before anything is converted or started."""
    ready = checkpoints.read_config(settings.hf_checkpoint) is not None
    if ready and not checkpoints.is_whole(settings.ref_load):
        words = [*words, "--ref-load", settings.hf_checkpoint]  # vime asks only whether the folder is there
    done = run_parser(["all" if ready else "flags", *words], {**settings.environ, **job_environment(settings)})
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip() or f"exit code {done.returncode}"
        return [problem(f"vime's parser of arguments ended without an answer: {said.splitlines()[-1]}")]
    if answer["unavailable"]:
        text = f"vime's parser of arguments does not start here ({answer['unavailable']})"
        if settings.ray_address:
            return [warning(f"{text}, so the flags are checked only when the job has started")]
        return [missing(f"{text}; activate the environment that vime is installed in")]
    return [problem(line) for line in answer["problems"]]


def run_parser(words: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["python3", str(PLUGIN / "launch" / "ask_vime.py"), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )


def job_environment(settings: Settings) -> dict[str, str]:
    """What the job's processes have in their environment, also on a cluster that was started without it."""
    environ = settings.environ
    paths = [str(PLUGIN), settings.vime, settings.megatron]
    if not settings.ray_address and environ.get("PYTHONPATH"):
        paths.append(environ["PYTHONPATH"])
    nvls = environ.get("NCCL_NVLS_ENABLE") or str(int(nvlink_found(environ)))
    forwarded = (name for name in environ if name == "RETOOL_ALLOWED_MODULES" or name.startswith("RETOOL_SANDBOX"))
    return {
        "PYTHONPATH": ":".join(paths),
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_NVLS_ENABLE": nvls,
        **settings.stage.environment,
        **{name: environ[name] for name in sorted(forwarded)},
    }


def nvlink_found(environ: Mapping[str, str]) -> bool:
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return False
    topology = subprocess.run([program, "topo", "-m"], env=dict(environ), capture_output=True, text=True).stdout
    return any(word.startswith("NV") and word[2:].isdigit() for word in topology.split())


def wandb_arguments(settings: Settings) -> list[str]:
    if not settings.wandb:
        return []
    project, group = (settings.environ.get(f"WANDB_{name}") for name in ("PROJECT", "GROUP"))
    group = group or f"qwen3-4b-retool-{settings.stage.name}"
    return ["--use-wandb", "--wandb-project", project or "retool-vime", "--wandb-group", group]


def show(launch: Launch) -> None:
    """Print the commands as a shell reads them back, one flag with its values a line."""
    settings = launch.settings
    where = "on a Ray of its own"
    if settings.ray_address:
        where = f"as a job on the Ray cluster at {settings.ray_address}"
    environment = ["env", *(f"{name}={value}" for name, value in launch.environment.items())]
    if launch.conversion:
        print(f"# Megatron checkpoint {settings.ref_load}, made from {settings.hf_checkpoint}")
        print(as_typed([*environment, *launch.conversion, "--save", settings.ref_load]))
    print(f"# {settings.stage.train_script} {where}")
    if settings.wandb and not settings.ray_address:
        print("# WANDB_KEY=*** in the environment, which wandb reads as WANDB_API_KEY")
    print(as_typed([*environment, *launch.job]))


def as_typed(words: Sequence[str]) -> str:
    breaks = (" \\\n    " if word.startswith("--") or word == "python3" else " " for word in words)
    return "".join(space + shlex.quote(word) for space, word in zip(breaks, words, strict=True)).strip()


if __name__ == "__main__":
    raise_on_stop_signals()  # while vime is asked as well, which takes some seconds
    sys.exit(main(sys.argv[1:], os.environ))
