"""The Megatron checkpoint that the launch scripts make, use or refuse."""

import os
import shutil
import signal
import subprocess

import pytest
from launch_helpers import EXAMPLE, LAUNCHED, alive, both, flags_of, job_words, run, wait_for, whole_checkpoint


@both
def test_a_missing_checkpoint_is_converted_and_then_the_job_starts(tree, stage):
    shutil.rmtree(tree.converted)
    tree.converted.mkdir()  # an empty folder is none
    (tree.converted.with_name(tree.converted.name + ".partial")).mkdir()  # nor is what an interrupted run left
    result = run(tree, stage)
    assert result.returncode == 0, result.stderr
    argv = (tree.converted / "release" / "argv").read_text()
    assert "'--rotary-base', '5000000'" in argv and f"'--hf-checkpoint', {str(tree.checkpoint)!r}" in argv
    assert f"{tree.root / 'Megatron LM'}:{tree.vime}" in argv
    assert (tree.converted / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert [path.name for path in tree.checkpoint.parent.iterdir() if "partial" in path.name] == []
    assert (tree.root / "started").read_text().splitlines()[:2] == ["start", "--head"]


@both
@pytest.mark.parametrize("how", ["fails", "cut short"])
def test_a_failed_conversion_is_no_checkpoint_and_starts_nothing(tree, stage, how):
    shutil.rmtree(tree.converted)
    result = run(tree, stage, FAKE_CONVERSION=how)
    assert result.returncode != 0
    assert not tree.converted.exists() and not (tree.root / "started").exists()


@both
@pytest.mark.parametrize(
    "tracker, folder",
    [(None, "release"), ("release", "iter_0000001"), ("1", "release"), ("", "release"), ("20", "iter_0000010")],
)
def test_half_a_checkpoint_is_never_used(tree, stage, tracker, folder):
    shutil.rmtree(tree.converted)
    (tree.converted / folder).mkdir(parents=True)
    if tracker is not None:
        (tree.converted / "latest_checkpointed_iteration.txt").write_text(tracker)
    result = run(tree, stage)
    assert result.returncode == 1 and "is an unfinished checkpoint; remove it" in result.stderr
    assert (tree.converted / folder).exists() and not (tree.root / "started").exists()


@both
def test_a_checkpoint_of_ones_own_is_used_and_never_made(tree, stage):
    own = tree.root / "own sft"
    whole_checkpoint(own, "46", "iter_0000046")
    result = run(tree, stage, REF_LOAD=str(own))
    assert result.returncode == 0 and flags_of(job_words(result.stdout))["--ref-load"] == [str(own)]
    result = run(tree, stage, REF_LOAD=str(tree.root / "typo"))
    assert result.returncode == 1 and "typo is not a whole Megatron checkpoint" in result.stderr
    assert not (tree.root / "typo").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_conversion_ends_with_its_launch_and_nothing_is_half_made(tree, number):
    shutil.rmtree(tree.converted)
    process = convert_in_background(tree)
    pid = int((tree.converted.parent / "converting").read_text())
    second = run(tree, "rl")
    assert second.returncode == 1 and not (tree.root / "started").exists()
    assert f"error: only one launch may make {tree.converted}: process " in second.stderr
    assert alive(pid)

    # A terminal sends Ctrl-C to the whole group, everything else comes to the shell alone.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    assert process.wait(30) != 0
    assert wait_for(lambda: not alive(pid), 30)
    assert not tree.converted.exists() and not (tree.root / "started").exists()
    assert run(tree, "rl").returncode == 0  # it is made again from the start
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
