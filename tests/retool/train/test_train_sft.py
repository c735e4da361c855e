"""SFT through vime's trainer: what is trained on, the loss, and the weights on their way to Megatron and back."""

import pytest
import torch
from train_helpers import load_model, log_probs, samples_of
from trainer import run
from trainer.evidence import logged
from transformers import AutoTokenizer

pytestmark = pytest.mark.train


def test_the_loss_falls(trained):
    losses = logged(trained.folder / "sft.log")["step"]
    assert len(losses) == 24 and losses[0]["train/loss"] > 5 and losses[23]["train/loss"] < 1.5


def test_what_is_trained_on_is_what_the_assistant_says(trained):
    """Read from the text: from the opening of an assistant's turn to the newline after its end, and nothing else."""
    tokenizer = AutoTokenizer.from_pretrained(trained.folder / "model")
    samples = samples_of(trained.folder / "sft_dump" / "rollout_0.pt")
    assert len(samples) == 8
    for sample in samples:
        prompt = len(sample["tokens"]) - sample["response_length"]
        mask = [0] * prompt + sample["loss_mask"]
        pieces = tokenizer.batch_decode([[token] for token in sample["tokens"]])
        text, expected = "", []
        for piece in pieces:
            turn = text.rpartition("<|im_start|>")[2]
            said = turn.startswith("assistant\n") and not turn.endswith("<|im_end|>\n")
            expected.append(int(said))
            text += piece
        assert mask == expected
        assert text.count("<tool_response>\nOutput:\n") == text.count("<tool_call>") - 2  # the system text has two


def test_the_loss_is_that_of_transformers_on_the_same_samples(trained):
    model = load_model(trained.folder / "model")
    total = count = 0.0
    with torch.no_grad():
        for sample in samples_of(trained.folder / "sft_dump" / "rollout_0.pt"):
            mask = torch.tensor(sample["loss_mask"])
            total, count = total - (log_probs(model, sample) * mask).sum(), count + mask.sum()
    first = logged(trained.folder / "sft.log")["step"][0]["train/loss"]
    assert first == pytest.approx((total / count).item(), abs=1e-5)


def test_a_model_comes_back_from_megatron_as_it_went(trained):
    """The checkpoint that the launch made of the random model, and the way back that the guide shows."""
    converted = trained.folder / "model_torch_dist"
    command = ["python", str(trained.vime / "tools" / "convert_torch_dist_to_hf.py")]
    command += ["--input-dir", str(converted / "release"), "--output-dir", str(trained.folder / "back")]
    command += ["--origin-hf-dir", str(trained.folder / "model")]
    run.execute(trained, "back", command, {"PYTHONPATH": f"{trained.sources.megatron}:{trained.vime}"})
    before = load_model(trained.folder / "model").state_dict()
    after = load_model(trained.folder / "back").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
