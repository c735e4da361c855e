"""The Megatron checkpoint that the launch scripts make: whole or not at all, and once at a time."""

import os
import shutil
import signal
import subprocess

import pytest
from launch_helpers import EXAMPLE, LAUNCHED, run_script
from watching import alive, wait_for


def test_a_missing_checkpoint_is_converted_and_then_the_job_starts(tree):
    shutil.rmtree(tree.converted)
    tree.converted.mkdir()  # an empty folder is none
    (tree.converted.with_name(tree.converted.name + ".partial")).mkdir()  # nor is what an interrupted run left
    result = run_script(tree, "sft")
    assert result.returncode == 0, result.stderr
    argv = (tree.converted / "release" / "argv").read_text()
    assert "'--rotary-base', '5000000'" in argv and f"'--hf-checkpoint', {str(tree.checkpoint)!r}" in argv
    assert f"{tree.root / 'Megatron LM'}" in argv
    assert (tree.converted / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert [path.name for path in tree.checkpoint.parent.iterdir() if "partial" in path.name] == []
    assert (tree.root / "started").read_text().splitlines()[:2] == ["start", "--head"]
    kept = tree.checkpoint.with_name("Qwen3-4B_retool_sft") / ".retool_ref_load"
    assert kept.read_text() == f"{tree.converted}\n"


@pytest.mark.parametrize("how", ["fails", "cut short"])
def test_a_failed_conversion_is_no_checkpoint_and_starts_nothing(tree, how):
    shutil.rmtree(tree.converted)
    result = run_script(tree, "rl", FAKE_CONVERSION=how)
    assert result.returncode == {"fails": 3, "cut short": 1}[how]
    assert not tree.converted.exists() and not (tree.root / "started").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_conversion_ends_with_its_launch_and_nothing_is_half_made(tree, number):
    shutil.rmtree(tree.converted)
    process = convert_in_background(tree)
    pid = int((tree.converted.parent / "converting").read_text())
    # A terminal sends Ctrl-C to the whole group, everything else comes to the launch alone.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    assert process.wait(30) != 0
    assert wait_for(lambda: not alive(pid), 30)
    assert not tree.converted.exists() and not (tree.root / "started").exists()


def test_a_conversion_is_made_once_at_a_time_and_again_from_the_start(tree):
    shutil.rmtree(tree.converted)
    process = convert_in_background(tree)
    second = run_script(tree, "rl", SAVE=str(tree.root / "elsewhere"))
    assert second.returncode == 1 and not (tree.root / "started").exists()
    assert f"error: only one launch may make {tree.converted}: process " in second.stderr
    assert process.poll() is None
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert run_script(tree, "rl").returncode == 0
    assert (tree.converted / "release").is_dir()


def convert_in_background(tree) -> subprocess.Popen:
    process = subprocess.Popen(
        ["bash", str(EXAMPLE / "retool_qwen3_4b_rl.sh")],
        env=tree.environment(FAKE_CONVERSION="hangs"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    LAUNCHED.append(process)
    assert wait_for((tree.converted.parent / "converting").exists)
    return process
