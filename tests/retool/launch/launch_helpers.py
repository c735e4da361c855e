"""What the tests of the launch scripts share: a fake vime tree, running a script over it, reading a printed command.

The fake tree has spaces in its path. Its training script writes down what it was given, so that the runs against real
Ray see what a job sees.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "retool"
SECRET = "0123456789abcdef-wandb-secret"
QWEN3_4B = """MODEL_ARGS=(
   --num-layers 36
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
)
"""
CONVERTER = """
import os, sys, time
from pathlib import Path
save = Path(sys.argv[sys.argv.index("--save") + 1])
(save / "release").mkdir(parents=True)
(save / "release" / "argv").write_text(repr(sys.argv[1:] + [os.environ["PYTHONPATH"]]))
if os.environ.get("FAKE_CONVERSION") == "hangs":
    (save / "pid").write_text(str(os.getpid()))
    (save / "pid").rename(save.parent / "converting")
    time.sleep(600)
if os.environ.get("FAKE_CONVERSION") != "cut short":
    (save / "latest_checkpointed_iteration.txt").write_text("release")
sys.exit(3 if os.environ.get("FAKE_CONVERSION") == "fails" else 0)
"""
TRAIN = """
import json, os, subprocess, sys, time, urllib.error, urllib.request
from pathlib import Path
if "FAKE_REPORT" not in os.environ:
    sys.exit(0)
report = Path(os.environ["FAKE_REPORT"])
import ray
ray.init()

@ray.remote
class Worker:
    def look(self):
        # an engine that a framework starts detached, out of reach of Ray's own shutdown
        detached = subprocess.Popen(["sleep", "600"], start_new_session=True)
        import generate_marker
        return os.getpid(), detached.pid, dict(os.environ), generate_marker.__file__

worker = Worker.options(runtime_env={"env_vars": {"ACTOR_ONLY": "1"}}).remote()
pid, detached, environment, marker = ray.get(worker.look.remote())
command_lines = []
for entry in Path("/proc").iterdir():
    if entry.name.isdigit():
        try:
            command_lines.append((entry / "cmdline").read_text())
        except OSError:
            pass
dashboard = ray._private.worker.global_worker.node.address_info["webui_url"]
try:
    stranger = urllib.request.urlopen(f"http://{dashboard}/api/version").status
except urllib.error.HTTPError as error:
    stranger = error.code
partial = report.with_suffix(".partial")
partial.write_text(json.dumps({
    "argv": sys.argv[1:], "pids": [os.getpid(), pid, detached], "environment": environment, "marker": marker,
    "command_lines": command_lines, "stranger": [ray.__version__, stranger],
    "gcs": ray.get_runtime_context().gcs_address,
}))
partial.rename(report)
if os.environ.get("FAKE_OUTPUT"):  # what breaks a stream of log lines
    sys.stdout.buffer.write(b"\\xff not UTF-8\\n" + b"x" * 5_000_000 + b"\\n")
    sys.stdout.flush()
    time.sleep(10)
    print("the end", flush=True)
while "--sleep" in sys.argv and not (report.parent / "go on").exists():
    time.sleep(0.1)
sys.exit(int(os.environ.get("FAKE_EXIT", "0")))
"""

# The flags that the tests pass, as vime's parser would define them.
ARGUMENTS = """
parser.add_argument("--more")
parser.add_argument("--switch", action="store_true")
parser.add_argument("--sleep", action="store_true")
parser.add_argument("--rollout-batch-size", type=int)
parser.add_argument("--num_rollout", type=int)
parser.add_argument("--rollout-num-gpus-per-engine", type=int)
parser.add_argument("--actor-num-gpus-per-node", type=int)
"""
# Megatron makes some of its flags from the fields of dataclasses.
MEGATRON_ARGUMENTS = """
from dataclasses import dataclass

@dataclass
class Parallel:
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    rotary_base: int = 10000
    save: str = ""
"""


LAUNCHED: list[subprocess.Popen] = []


class Tree(NamedTuple):
    """A fake vime checkout beside a fake Megatron, checkpoints and data, in a folder with spaces in its name."""

    root: Path

    @property
    def vime(self) -> Path:
        return self.root / "vi me"

    @property
    def megatron(self) -> Path:
        return self.root / "Megatron LM"

    @property
    def checkpoint(self) -> Path:
        return self.root / "check points" / "Qwen3-4B"

    @property
    def converted(self) -> Path:
        return self.checkpoint.with_name("Qwen3-4B_torch_dist")

    def environment(self, **changes: str | None) -> dict[str, str]:
        settings = {
            "PATH": f"{self.root / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.root),
            "VIME_ROOT": str(self.vime),
            "MEGATRON_ROOT": str(self.megatron),
            "RETOOL_DOWNLOADS": str(self.root / "downloads"),
            "HF_CHECKPOINT": str(self.checkpoint),
            "SFT_DATA": str(self.root / "sft.parquet"),
            "PROMPT_DATA": str(self.root / "prompts.jsonl"),
            "EVAL_DATA": str(self.root / "aime's.jsonl"),
            "NUM_GPUS": "8",
        }
        settings.update(changes)
        return {name: value for name, value in settings.items() if value is not None}


def whole_checkpoint(folder: Path, iteration: str = "release", name: str = "release") -> None:
    (folder / name).mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(iteration)


def run(
    tree: Tree, stage: str, *flags: str, trace: bool = False, before: Sequence[str] = (), **changes: str | None
) -> subprocess.CompletedProcess:
    command = [*before, "bash", *(["-x"] if trace else []), str(EXAMPLE / f"retool_qwen3_4b_{stage}.sh"), *flags]
    return subprocess.run(
        command, env=tree.environment(**changes), cwd=tree.root, capture_output=True, text=True, timeout=300
    )


def dry_run(tree: Tree, stage: str, *flags: str, **options) -> subprocess.CompletedProcess:
    result = run(tree, stage, *flags, DRY_RUN="1", **options)
    assert not (tree.root / "started").exists()
    return result


def job_words(output: str) -> list[str]:
    """The words of the training script's command line, read back by a shell's rules."""
    words = shlex.split(output.replace("\\\n", " "), comments=True)
    return words[max(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]


def flags_of(words: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            last = flags[word] = []
        else:
            last.append(word)
    return flags


def runtime_env(output: str) -> dict[str, str]:
    words = shlex.split(output.replace("\\\n", " "), comments=True)
    return json.loads(words[words.index("--runtime-env-json") + 1])["env_vars"]


both = pytest.mark.parametrize("stage", ["sft", "rl"])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False


# The beginning of a program that asks vime's own parser; it says MISSING where something that vime needs is not there.
VIMES_PARSER = """
import sys, types
import torch
if not torch.cuda.is_available():  # Megatron asks for the GPU's generation while it checks its arguments
    torch.cuda.get_device_properties = lambda *device: types.SimpleNamespace(major=9, minor=0)
try:
    from vllm.entrypoints.launchers import cli_args  # where newer versions have what vime imports while it parses
    sys.modules["vllm.entrypoints.openai.cli_args"] = cli_args
except ImportError:
    pass
try:
    from vime.utils.arguments import parse_args
    from vllm.entrypoints.openai.cli_args import FrontendArgs
    import megatron.training.arguments
except ImportError as error:
    print(f"MISSING {error}")
    sys.exit(0)
"""
