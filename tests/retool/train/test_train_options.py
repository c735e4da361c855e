"""The recipes of the guide, and options beside them, through vime's trainer: each has the gradient that its definition
asks for."""

import pytest
import torch
from commands import recipes
from train_helpers import STILL, gradient, load_model, own_advantages
from trainer import run
from trainer.evidence import logged

pytestmark = pytest.mark.train
RECIPES = recipes()


def whitened(samples, advantages):
    """Mean 0 and variance 1 over all trained tokens of the batch, each of which has its sample's advantage."""
    counts = [0 if sample["remove_sample"] else sum(sample["loss_mask"]) for sample in samples]
    tokens = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(torch.tensor(counts))
    return [(value - tokens.mean().item()) / tokens.std().item() for value in advantages]


def rewards(samples):
    return [0.0 if sample["remove_sample"] else sample["reward"]["score"] for sample in samples]


# The recipe, the number of its command, and the advantages of a batch.
ADVANTAGES = {
    ("DAPO", 0): lambda samples: own_advantages(samples, spread=False),
    ("GRPO", 0): own_advantages,
    ("GSPO", 0): own_advantages,
    ("REINFORCE++", 0): lambda samples: whitened(samples, own_advantages(samples, spread=False)),
    ("REINFORCE++", 1): lambda samples: whitened(samples, rewards(samples)),
}


def test_each_recipe_that_changes_the_loss_is_among_these():
    rollouts = {"Partial rollout", "Fully asynchronous"}  # they change what is sampled when
    assert {name for name, _ in ADVANTAGES} | rollouts == RECIPES.keys()
    for name in RECIPES.keys() - rollouts:
        assert len(RECIPES[name]) == sum(name == other for other, _ in ADVANTAGES)


@pytest.mark.parametrize("recipe, number", ADVANTAGES)
def test_a_recipe_has_the_gradient_that_it_is_defined_by(retrain, batches, sft_model, recipe, number):
    """Two steps, a batch as it is and one in which samples are lost, each on the policy that took the samples: there
    the clipped ratio is 1, of tokens and of sequences, and so is its gradient that of the log-prob."""
    settings, flags = RECIPES[recipe][number]
    assert not settings
    two = [batches[0], batches[2]]
    steps = retrain(f"recipe_{recipe}_{number}", two, *STILL, *flags)
    model = load_model(sft_model)
    for metrics, batch in zip(steps, two, strict=True):
        loss, norm = gradient(model, batch, ADVANTAGES[recipe, number](batch), per_token=recipe == "DAPO")
        assert metrics["train/pg_loss"] == pytest.approx(loss, abs=1e-4)
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 0.01


def test_log_probs_are_of_the_sets_that_top_p_kept(retrain, batches, sft_model):
    """The engine samples a token among those that top-p kept, and its probability is its share of theirs."""
    model, samples = load_model(sft_model), []
    for sample in batches[0]:
        ids, count = torch.tensor(sample["tokens"]), sample["response_length"]
        with torch.no_grad():
            logits = model(ids[None]).logits[0].float()[len(ids) - 1 - count : -1]
        kept = logits >= logits.topk(2).values[:, 1:]
        kept.scatter_(1, ids[-count:, None], True)
        sets = [row.nonzero()[:, 0].tolist() for row in kept]
        offsets = [0, *torch.tensor([len(one) for one in sets]).cumsum(0).tolist()]
        samples.append({**sample, "rollout_top_p_token_ids": sum(sets, []), "rollout_top_p_token_offsets": offsets})
    [metrics] = retrain("top_p", [samples], *STILL, "--rollout-top-p", "0.9")
    loss, norm = gradient(model, samples, own_advantages(samples))
    assert metrics["train/pg_loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    _, whole = gradient(model, batches[0], own_advantages(samples))
    assert norm != pytest.approx(whole, rel=1e-3), "the sets make no difference here"


def test_context_parallel_is_refused_by_name(trained):
    """Megatron's context parallelism is Transformer Engine's, which has no CPU."""
    with pytest.raises(run.RunError, match="context"):
        run.reinforce(trained, "context", ["--context-parallel-size", "2", "--num-rollout", "1"], 1)
    assert not logged(trained.folder / "context.log")["step"]
