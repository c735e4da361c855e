"""Paths that the user may not look at, as /root is to everyone else: taken as not there, and named where they were
asked for.

The launch scripts' part is in launch/test_launch_checks.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import EXAMPLE, ORDINARY

CLOSED = "{folder}/closed"
CONVERSATION = {
    "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "Answer: \\boxed{2}"}]
}
SFT, RL, VIEW = ("sft_data_processing.py", "rl_data_preprocess.py", "view_rollouts.py")
CHECK = "cpu/check.py"


@pytest.fixture
def folder(tmp_path):
    """Data that can be read, a folder that is closed, and one with a part that is closed."""
    (tmp_path / "in.jsonl").write_text(json.dumps(CONVERSATION | {"prompt": "1+1?", "label": "2"}) + "\n")
    (tmp_path / "samples.jsonl").write_text('{"response": "x"}\n')
    (tmp_path / "vime" / "rollout").mkdir(parents=True)
    (tmp_path / "vime" / "rollout" / "vllm_rollout.py").write_text("")
    closed = [tmp_path / "closed", tmp_path / "data" / "more"]
    for path in closed:
        (path / "Qwen").mkdir(parents=True)
        shutil.copy(tmp_path / "in.jsonl", path / "train-00001-of-00002.jsonl")
    shutil.copy(tmp_path / "in.jsonl", tmp_path / "data" / "train-00000-of-00002.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "closed" / "train-00001-of-00002.jsonl")
    for path in closed:
        path.chmod(0)
    yield tmp_path
    for path in closed:
        path.chmod(0o700)


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    settings = {"PATH": os.environ["PATH"], "HOME": str(folder), "VIME_ROOT": str(folder), "HF_HUB_OFFLINE": "1"}
    settings["PYTHONPATH"] = str(EXAMPLE)
    return subprocess.run(
        [*ORDINARY, *words], cwd=folder, env=settings | environment, capture_output=True, text=True, timeout=300
    )


NO_LOOK = f"no permission to look into {CLOSED}"


@pytest.mark.parametrize(
    "script, options, environment, code, said",
    [
        (SFT, f"--dataset {CLOSED}/a.jsonl", {}, 1, f"error: {CLOSED}/a.jsonl: {NO_LOOK}"),
        (SFT, "--dataset link.jsonl", {}, 1, f"error: link.jsonl: {NO_LOOK}"),
        (SFT, f"--dataset {CLOSED}", {}, 1, f"error: {CLOSED}: cannot be read (Permission denied)"),
        (SFT, "--dataset data", {}, 1, "error: data/more: cannot be read (Permission denied)"),
        (SFT, "", {"RETOOL_DOWNLOADS": CLOSED}, 1, f"error: RETOOL_DOWNLOADS is {CLOSED}: {NO_LOOK}"),
        (SFT, f"--dataset in.jsonl --tokenizer {CLOSED}/Qwen", {}, 0, f"no tokenizer in {CLOSED}/Qwen ({NO_LOOK})"),
        (SFT, f"--dataset in.jsonl --output {CLOSED}/a.parquet", {}, 1, "cannot be written (Permission denied)"),
        (RL, f"--dataset {CLOSED}/a.jsonl", {}, 1, f"error: {CLOSED}/a.jsonl: {NO_LOOK}"),
        (RL, f"--dataset in.jsonl --exclude {CLOSED}/a.jsonl", {}, 1, f"error: {CLOSED}/a.jsonl: {NO_LOOK}"),
        (RL, f"--dataset in.jsonl --output {CLOSED}/a.jsonl", {}, 1, "cannot be written (Permission denied)"),
        (VIEW, f"{CLOSED}/samples.jsonl", {}, 1, f"error: cannot read {CLOSED}/samples.jsonl: Permission denied"),
        (VIEW, f"samples.jsonl --tokenizer {CLOSED}/Qwen", {}, 1, f"the tokenizer {CLOSED}/Qwen: {NO_LOOK}"),
        (VIEW, f"samples.jsonl -o {CLOSED}/a.html", {}, 1, f"error: cannot write {CLOSED}/a.html: Permission denied"),
        (CHECK, f"--problems {CLOSED}/a.jsonl", {}, 1, f"problem file {CLOSED}/a.jsonl: Permission denied"),
        (CHECK, f"--model {CLOSED}/Qwen", {}, 1, "Permission denied"),
        (CHECK, f"--output {CLOSED}/out/a", {}, 1, f"error: cannot write to the folder {CLOSED}; name another"),
        (CHECK, "--output in.jsonl/a", {}, 1, "error: cannot make the folder in.jsonl: in.jsonl is none"),
        (CHECK, "", {"VIME_ROOT": f"{CLOSED}/vime"}, 1, f"error: VIME_ROOT={CLOSED}/vime: {NO_LOOK}"),
    ],
)
def test_a_path_that_was_named_and_is_closed_is_one_line(folder, script, options, environment, code, said):
    words, said = options.format(folder=folder).split(), said.format(folder=folder)
    environment = {name: value.format(folder=folder) for name, value in environment.items()}
    done = run(folder, sys.executable, str(EXAMPLE / script), *words, **environment)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert said in done.stderr
