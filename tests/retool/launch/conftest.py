"""The fake vime tree and a short temporary directory, for all tests of the launch."""

import json
import tempfile
from pathlib import Path

import pytest
from launch_helpers import ARGUMENTS, CONVERTER, LAUNCHED, MEGATRON_ARGUMENTS, QWEN3_4B, TRAIN, Tree, whole_checkpoint


@pytest.fixture
def tree(tmp_path):
    made = Tree(tmp_path / "a  b")
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
    (made.vime / "vime" / "utils" / "arguments.py").write_text(ARGUMENTS)
    (made.megatron / "megatron" / "training" / "config.py").write_text(MEGATRON_ARGUMENTS)
    (made.vime / "generate_marker.py").write_text("")
    for name in ("train.py", "train_async.py"):
        (made.vime / name).write_text(TRAIN)
    (made.checkpoint / "config.json").write_text(json.dumps({"rope_theta": 5000000.0}))
    (made.checkpoint / "model.safetensors").write_text("x")
    (made.checkpoint / "tokenizer.json").write_text("{}")
    whole_checkpoint(made.converted)
    for name in ("sft.parquet", "prompts.jsonl", "aime's.jsonl"):
        (made.root / name).write_text("x")
    # Stands for every tool that starts something: a run that gets this far leaves a mark.
    bin_folder = made.root / "bin"
    bin_folder.mkdir()
    (bin_folder / "ray").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{made.root}/started"\n')
    (bin_folder / "ray").chmod(0o755)
    yield made
    for process in LAUNCHED:  # a test that failed must not leave its launch running
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    LAUNCHED.clear()


@pytest.fixture
def short_tmp():
    """A temporary directory whose path leaves room for the names of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)
