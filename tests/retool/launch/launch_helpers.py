"""What the tests of the launch scripts share: a fake vime tree, running a launch over it, reading a printed command.

The fake tree has spaces in its path. Its training script writes down what it was given, so that the runs against real
Ray see what a job sees. Most tests call the launcher in this process, as the scripts call it; what needs the script, a
signal or a process of its own runs bash.
"""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from launch import main

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
try:
    stranger = urllib.request.urlopen(f"{os.environ['RAY_API_SERVER_ADDRESS']}/api/version").status
except urllib.error.HTTPError as error:
    stranger = error.code
partial = report.with_suffix(".partial")
partial.write_text(json.dumps({
    "argv": sys.argv[1:], "pids": [os.getpid(), pid, detached], "environment": environment, "marker": marker,
    "command_lines": command_lines, "stranger": [ray.__version__, stranger],
    "gcs": ray.get_runtime_context().gcs_address,
}))
partial.rename(report)
while "--sleep" in sys.argv and not (report.parent / "go on").exists():
    time.sleep(0.1)
sys.exit(int(os.environ.get("FAKE_EXIT", "0")))
"""

# A parser that knows the flags given, as vime's would: it passes over what it does not know.
ARGUMENTS = """
import argparse
def parse_args():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag, options in {flags!r}.items():
        parser.add_argument(flag, **{{**options, **({{"type": int}} if flag == "--num-rollout" else {{}})}})
    return parser.parse_known_args()[0]
"""


MESSAGES = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "42"}]
SFT_ROWS = pyarrow.table({"messages": [MESSAGES] * 128, "tools": ["[]"] * 128})
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


def make_tree(root: Path) -> Tree:
    made = Tree(root)
    for folder in (
        made.vime / "scripts" / "models",
        made.vime / "tools",
        made.vime / "vime" / "utils",
        made.megatron / "megatron" / "training",
        made.checkpoint,
    ):
        folder.mkdir(parents=True)
    (made.vime / "scripts" / "models" / "qwen3-4B.sh").write_text(QWEN3_4B)
    (made.vime / "tools" / "convert_hf_to_torch_dist.py").write_text(CONVERTER)
    (made.vime / "vime" / "utils" / "arguments.py").write_text(ARGUMENTS.format(flags=known_flags()))
    (made.vime / "generate_marker.py").write_text("")
    for name in ("train.py", "train_async.py"):
        (made.vime / name).write_text(TRAIN)
    (made.checkpoint / "config.json").write_text(json.dumps({"rope_theta": 5000000.0}))
    (made.checkpoint / "model.safetensors").write_text("x")
    (made.checkpoint / "tokenizer.json").write_text("{}")
    whole_checkpoint(made.converted)
    pyarrow.parquet.write_table(SFT_ROWS, made.root / "sft.parquet")
    for name in ("prompts.jsonl", "aime's.jsonl"):
        (made.root / name).write_text(json.dumps({"prompt": "6 * 7?", "label": "42"}) + "\n")
    # Stands for every tool that starts something: a run that gets this far leaves a mark.
    bin_folder = made.root / "bin"
    bin_folder.mkdir()
    (bin_folder / "ray").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{made.root}/started"\n')
    (bin_folder / "ray").chmod(0o755)
    return made


def whole_checkpoint(folder: Path, iteration: str = "release", name: str = "release") -> None:
    (folder / name).mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(iteration)


@functools.cache
def script_words(stage: str) -> tuple[str, ...]:
    """What the script calls the launcher with, read from the script itself."""
    program = (
        f'python3() {{ :; }}; exec() {{ printf "%s\\0" "${{@:3}}"; }}; source "{EXAMPLE}/retool_qwen3_4b_{stage}.sh"'
    )
    return tuple(subprocess.check_output(["bash", "-c", program], text=True).split("\0")[:-1])


def known_flags(*more: str) -> dict[str, dict]:
    """Every flag of both scripts, and these, with the options that argparse needs for it."""
    words = [word for stage in ("sft", "rl") for word in script_words(stage)[1:-1]]
    words += "--actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-layers 1 --rotary-base 1 --hf-checkpoint x".split()
    words += (
        "--ref-load x --load x --save x --prompt-data x --more x --switch --sleep --use-wandb --hidden-size 1".split()
    )
    words += "--wandb-project x --wandb-group x --rollout-num-gpus 1 --no-save-optim --save-retain-interval 1".split()
    words += [*more, "--end"]
    flags: dict[str, dict] = {"--eval-prompt-data": {"nargs": "+"}}
    for word, following in zip(words, words[1:], strict=False):
        if word.startswith("--") and word not in flags:
            flags[word] = {"action": "store_true"} if following.startswith("--") else {}
    return flags


def run(
    tree: Tree, stage: str, *flags: str, parser: bool = False, cwd: Path | None = None, **changes: str | None
) -> SimpleNamespace:
    """A launch in this process, up to where it would start something.

    Args:
        parser: whether vime's parser is asked, in a process of its own; else it has nothing against the command.
        changes: of the environment; None takes a variable away.

    Returns:
        `code`, what it printed as `out` and `err`, and whether it `started`.
    """
    started = mock.Mock(return_value=0)
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    asks = contextlib.nullcontext() if parser else mock.patch.object(main, "ask_vime", return_value=[])
    os.chdir(cwd or tree.root)
    try:
        with (
            asks,
            mock.patch.multiple(main, local_ray=mock.Mock(run=started), ray_job=mock.Mock(run=started)),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = main.main([*script_words(stage), *flags], tree.environment(**changes))
    finally:
        os.chdir(before)
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue(), started=started.called)


def dry_run(tree: Tree, stage: str, *flags: str, **options) -> SimpleNamespace:
    result = run(tree, stage, *flags, DRY_RUN="1", **options)
    assert not result.started
    return result


def run_script(
    tree: Tree, stage: str, *flags: str, before: Sequence[str] = (), **changes: str | None
) -> subprocess.CompletedProcess:
    """The script itself, in its own process; `before` are words before bash."""
    command = [*before, "bash", str(EXAMPLE / f"retool_qwen3_4b_{stage}.sh"), *flags]
    return subprocess.run(
        command, env=tree.environment(**changes), cwd=tree.root, capture_output=True, text=True, timeout=300
    )


def flags_of(words: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            last = flags[word] = []
        else:
            last.append(word)
    return flags


both = pytest.mark.parametrize("stage", ["sft", "rl"])
