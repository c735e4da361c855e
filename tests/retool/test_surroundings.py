"""The test command gives the same result from anywhere: a small part of it, from the worst of all surroundings at once."""

import os
import shutil
import subprocess

import pytest
from project import ROOT, our_files
from surroundings import NAME, worst

# What signals, Ray's sockets, the locale and closed folders have broken.
TESTS = [
    "cpu/test_cpu_run.py::test_a_signal_keeps_what_was_finished[1]",
    "launch/test_launch_ray.py::test_a_signal_ends_all_that_was_started[2-]",
    "sandbox/test_sandbox_ray.py::test_calls_work_in_a_task",
    "sandbox/test_sandbox_cases.py::test_golden_execution",
]


@pytest.mark.ray
@pytest.mark.skipif("RETOOL_CACHE" not in os.environ, reason="bash tests/retool/run.sh makes the environment for it")
def test_the_test_command_gives_the_same_result_from_anywhere(tmp_path):
    clone = tmp_path / NAME / "retool for vime"
    for path in our_files():
        copy = clone / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", clone / ".mypy_cache")
    command = ["bash", "tests/retool/run.sh", "-q", *(f"tests/retool/{name}" for name in TESTS)]
    surroundings = worst(tmp_path, os.environ["RETOOL_CACHE"])
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=600, **surroundings)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
