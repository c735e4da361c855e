"""The Megatron checkpoint that the launch scripts make, use or refuse."""

import shutil

import pytest
from launch_helpers import both, flags_of, job_words, run, whole_checkpoint


@both
def test_a_missing_checkpoint_is_converted_and_then_the_job_starts(tree, stage):
    shutil.rmtree(tree.converted)
    tree.converted.mkdir()  # an empty folder is none
    (tree.converted.with_name(tree.converted.name + ".partial")).mkdir()  # nor is what an interrupted run left
    result = run(tree, stage, RAY_ADDRESS="http://127.0.0.1:1")
    assert result.returncode == 0, result.stderr
    argv = (tree.converted / "release" / "argv").read_text()
    assert "'--rotary-base', '5000000'" in argv and f"'--hf-checkpoint', {str(tree.checkpoint)!r}" in argv
    assert f"{tree.root / 'Megatron LM'}:{tree.vime}" in argv
    assert (tree.converted / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert [path.name for path in tree.checkpoint.parent.iterdir() if "partial" in path.name] == []
    assert (tree.root / "started").read_text().splitlines()[:2] == ["job", "submit"]


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
    result = run(tree, stage, REF_LOAD=str(own), RAY_ADDRESS="http://127.0.0.1:1")
    assert result.returncode == 0 and flags_of(job_words(result.stdout))["--ref-load"] == [str(own)]
    result = run(tree, stage, REF_LOAD=str(tree.root / "typo"))
    assert result.returncode == 1 and "typo is not a whole Megatron checkpoint" in result.stderr
    assert not (tree.root / "typo").exists()
