"""RL through vime's trainer with a real engine: weights, log-probs, tokens, and the gradient itself."""

import pytest
from train_helpers import STILL, TIS_CLIP, gradient, load_model, own_advantages, samples_of, trained_on
from trainer import run
from trainer.evidence import compare_export, logged

pytestmark = pytest.mark.train
MOST = 1e-5


def test_the_engine_has_the_weights_that_megatron_trains_after_each_update(reinforced):
    steps = logged(reinforced.folder / "rl.log")["step"]
    assert len(steps) == 2
    for metrics in steps.values():
        assert metrics["train/grad_norm"] > 0.01  # so there was an update for the engine to miss
        assert metrics["train/train_rollout_logprob_abs_diff"] < MOST
    assert compare_export(reinforced.folder / "export", run.dumped(reinforced, "rl", "rollout_eval_1.pt")) < MOST
    # Without the update the difference would be seen: the SFT model's own log-probs are another's by then.
    late = run.dumped(reinforced, "rl", "rollout_eval_1.pt")
    assert compare_export(run.to_hugging_face(reinforced, "sft", reinforced.folder / "old"), late) > 100 * MOST


def test_what_is_trained_on_is_what_the_engine_generated(reinforced):
    found = run.read_evidence(reinforced)
    rollouts = [*found.steps, *found.evaluations.values()]
    assert [step.misread for step in rollouts] == [0] * 4
    trained, cut = sum(step.trained for step in rollouts), sum(step.cut for step in rollouts)
    assert trained == sum(step.sampled for step in rollouts) > 500
    assert found.generated == trained or (cut and found.generated > trained)


def test_loss_and_gradient_are_those_of_plain_transformers(reinforced, sft_model):
    """GRPO as vime defines it, on the first batch, with the plugin's masks, and advantages calculated here."""
    samples = samples_of(run.dumped(reinforced, "rl", "rollout_0.pt"))
    given = trained_on(run.dumped(reinforced, "rl", "train_0_0.pt"))
    advantages = own_advantages(samples)
    assert any(advantages)
    by_index = dict(zip(given["sample_indices"], given["rewards"], strict=True))
    assert [by_index[sample["index"]] for sample in samples] == pytest.approx(advantages, abs=1e-5)
    loss, norm = gradient(load_model(sft_model), samples, advantages)
    metrics = logged(reinforced.folder / "rl.log")["step"][0]
    assert metrics["train/pg_loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    "name, correction, flags",
    [
        # Megatron pads the vocabulary to a multiple of this times the ranks, with rows that take part in the softmax.
        (
            "tensor_parallel",
            "rollout",
            [
                *"--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64".split(),
                "--use-rollout-logprobs",
            ],
        ),
        ("data_parallel", "tis", ["--use-tis", "--tis-clip", str(TIS_CLIP)]),  # balanced, as the launch script has it
    ],
)
def test_lost_and_empty_samples_in_each_place_change_nothing_else(
    retrain, batches, sft_model, name, correction, flags
):
    """On two ranks, and with vime's corrections for an engine that samples otherwise than the trainer would."""
    steps = retrain(name, batches, *STILL, *flags, ranks=2)
    model = load_model(sft_model)
    for number, (metrics, batch) in enumerate(zip(steps, batches, strict=True)):
        loss, norm = gradient(model, batch, own_advantages(batch), correction)
        assert metrics["train/pg_loss"] == pytest.approx(loss, abs=1e-4), f"batch {number}"
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4, abs=1e-6), f"batch {number}"
