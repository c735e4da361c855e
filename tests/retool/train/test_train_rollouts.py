"""Samples that come to the trainer otherwise than a batch at a time: two steps each, by the launch script, with a
real engine."""

import shlex
import shutil

import pytest
from commands import recipes
from cpu.options import EXAMPLE
from train_helpers import DRAWN, gradient, load_model, own_advantages, samples_of
from trainer import run
from trainer.evidence import logged

pytestmark = pytest.mark.train
ALONE = shlex.split("--eval-interval 1000 --skip-eval-before-train")


def check_first_step(trained, sft_model, stage):
    """Taken on what the SFT model sampled, whatever is under way besides."""
    samples = samples_of(run.dumped(trained, stage, "rollout_0.pt"))
    loss, norm = gradient(load_model(sft_model), samples, own_advantages(samples))
    steps = logged(trained.folder / f"{stage}.log")["step"]
    assert steps.keys() == {0, 1} and steps[0]["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert steps[0]["train/pg_loss"] == pytest.approx(loss, abs=1e-4)
    assert steps[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 0.01
    assert steps[1]["train/grad_norm"] > 0.01
    return samples


def test_partial_rollout_with_groups_that_are_filtered_and_sampled_in_advance(trained, server, sft_model):
    [(_, flags)] = recipes()["Partial rollout"]
    flags += ["--over-sampling-batch-size", "16"]  # of 4, so that most are under way when it is full
    flags += ["--dynamic-sampling-filter-path", "generate_with_retool.keep_group"]
    run.reinforced(trained, server, *flags, *ALONE, *DRAWN, stage="partial")
    samples = check_first_step(trained, sft_model, "partial")
    for group in {sample["group_index"] for sample in samples}:
        assert len({sample["reward"]["acc"] for sample in samples if sample["group_index"] == group}) == 2
    later = samples_of(run.dumped(trained, "partial", "rollout_1.pt"))
    assert any(sample["metadata"].get("start_rollout_id") == 0 for sample in later), "nothing was continued"


def test_a_fully_asynchronous_run(trained, sft_model, tmp_path, monkeypatch):
    """As the recipe says, by a copy of the script without --colocate."""
    copy = tmp_path / "vime" / "examples" / "retool"
    shutil.copytree(EXAMPLE, copy)
    script = copy / "retool_qwen3_4b_rl.sh"
    script.write_text(script.read_text().replace("    --colocate\n", ""))
    assert "--colocate" not in script.read_text()
    [(settings, flags)] = recipes()["Fully asynchronous"]
    for setting in settings.items():
        monkeypatch.setenv(*setting)
    monkeypatch.setattr(run, "EXAMPLE", copy)
    sizes = ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"]
    with run.engine(trained, "nccl") as server:
        run.reinforced(trained._replace(gpus=2), server, *flags, *sizes, *DRAWN, stage="asynchronous")
    check_first_step(trained, sft_model, "asynchronous")


def test_evaluation_alone(trained, server):
    """As the guide has it: the SFT model is evaluated, and not trained."""
    flags = shlex.split("--num-rollout 0 --lr-decay-iters 1 --no-load-optim")
    run.reinforced(trained, server, *flags, stage="alone")
    log = trained.folder / "alone.log"
    assert not logged(log)["step"] and len(logged(log)["eval"]) == 1
