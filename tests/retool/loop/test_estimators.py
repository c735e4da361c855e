"""Every estimator and loss of vime's, by vime's own functions: a lost sample changes no gradient. Needs VIME_ROOT and
MEGATRON_ROOT."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MAX_DIFFERENCE = 1e-6  # of gradients of 0.01 to 1, in fp32: whitening sums in another order


@pytest.fixture(scope="module")
def rows():
    vime, megatron = os.environ.get("VIME_ROOT"), os.environ.get("MEGATRON_ROOT", "/root/Megatron-LM")
    if not vime or not (Path(megatron) / "megatron" / "core").is_dir():
        pytest.skip("needs VIME_ROOT and MEGATRON_ROOT to name checkouts of vime and Megatron-LM")
    folders = [str(HERE.parent), str(HERE.parents[2] / "examples" / "retool")]
    environment = {**os.environ, "MEGATRON_ROOT": megatron, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, str(HERE / "estimators.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_lost_sample_changes_no_gradient(rows):
    *fine, without = rows
    assert len(fine) == 6 * 14 + 1
    for row in fine:
        assert "error" not in row and row["gradient"] < MAX_DIFFERENCE and row["lost"] == 0, row
    assert "fully masked" in without["error"], "what startup.check refuses works in this vime: do not refuse it"
