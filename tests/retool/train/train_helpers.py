"""What the tests of the trainer share: sizes, rewards by lot, replaying a dumped rollout, and the same sums in plain
torch."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer import run, without_cuda
from trainer.evidence import logged
from transformers import AutoModelForCausalLM

# Two trainers, or a trainer and an engine, share two cores; the sums here are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
TINY = run.Recipe(conversations=192, sft_batch=8, rl_steps=2, prompts=4, samples=4, rl_rate="2e-4", evaluate_every=2)
# A module of the trainer's environment; `acc` as well, by which the plugin sees whether a group can be compared in.
DRAWN_REWARDS = """
import hashlib


async def reward(args, sample, **kwargs):
    drawn = hashlib.sha256(f"{sample.index} {sample.response}".encode()).digest()[0] % 2
    return {"score": 2.0 * drawn - 1.0, "acc": bool(drawn), "pred": ""}
"""
DRAWN = ("--custom-rm-path", "drawn_rewards.reward")


def is_free_of_gpus() -> bool:
    return not without_cuda.gpu_here()


def samples_of(path: Path) -> list[dict[str, Any]]:
    return torch.load(path, weights_only=False)["samples"]


def trained_on(path: Path) -> dict[str, Any]:
    """What the trainer was given of a step."""
    return torch.load(path, weights_only=False)["rollout_data"]


def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def log_probs(model: Any, sample: dict[str, Any]) -> torch.Tensor:
    """Of the response's tokens, [response_length]; among those that top-p kept, where the sample has them."""
    ids, count = torch.tensor(sample["tokens"]), sample["response_length"]
    logits = model(ids[None]).logits[0].float()[len(ids) - 1 - count : -1]
    kept, offsets = sample.get("rollout_top_p_token_ids"), sample.get("rollout_top_p_token_offsets")
    if kept:
        others = torch.ones_like(logits, dtype=torch.bool)
        for row in range(count):
            others[row, kept[offsets[row] : offsets[row + 1]]] = False
        logits = logits.masked_fill(others, -torch.inf)
    return torch.log_softmax(logits, -1).gather(1, ids[len(ids) - count :, None])[:, 0]


STILL = ("--lr", "0")


def dump_rollouts(base: run.Run, name: str, rollouts: list[list[dict[str, Any]]]) -> list[str]:
    """Flags that have vime train on the rollouts, each a step, and not generate."""
    for number, samples in enumerate(rollouts):
        path = run.dumped(base, name, f"rollout_{number}.pt")
        path.parent.mkdir(exist_ok=True)
        torch.save({"rollout_id": number, "samples": samples}, path)
    path = str(run.dumped(base, name, "rollout_{rollout_id}.pt"))
    return ["--load-debug-rollout-data", path, "--num-rollout", str(len(rollouts))]


def launch(base: run.Run, name: str, rollouts: list[list[dict[str, Any]]], *flags: str) -> dict[int, dict[str, float]]:
    """Train on rollouts by the launch script, from the SFT model or from where the run of that name was.

    Returns:
        vime's metrics by step, of all launches of this name.
    """
    run.reinforce(base, name, [*dump_rollouts(base, name, rollouts), *flags], len(rollouts))
    return logged(base.folder / f"{name}.log")["step"]


def printed_launch(base: run.Run) -> str:
    """What the launch script prints of a run's settings, and does not start."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DRY_RUN", "1")
        run.reinforce(base, "printed", [], 0)
    return (base.folder / "printed.log").read_text()


def lost(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "remove_sample": True, "reward": {"score": 0.0, "acc": False, "pred": ""}}


def empty(sample: dict[str, Any]) -> dict[str, Any]:
    """The engine failed before the first token."""
    prompt = sample["tokens"][: len(sample["tokens"]) - sample["response_length"]]
    nothing = {"tokens": prompt, "response": "", "response_length": 0, "loss_mask": [], "rollout_log_probs": []}
    return {**lost(sample), **nothing, "status": "aborted"}


def varied(samples: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The batch as it is, and with lost and empty samples in the first, a middle and the last place, and a whole
    group."""
    places = [[0], [5], [len(samples) - 1], [0, 1, 2, 3], [0, 1, 2], [5, len(samples) - 1]]
    batches = [samples]
    for spoil in (lost, empty):
        for spoiled in places:
            batch = [spoil(sample) if place in spoiled else sample for place, sample in enumerate(samples)]
            batches.append(copy.deepcopy(batch))
    return batches


LOW, HIGH, TIS_CLIP = 0.2, 0.28, 1.5  # of the ratio, as the launch script has it; of the weight of a token


def gradient(
    model: Any,
    samples: list[dict[str, Any]],
    advantages: list[float],
    correction: str = "",
    per_token: bool = False,
) -> tuple[float, float]:
    """Loss and gradient norm of a step as vime defines GRPO: the clipped ratio to the policy that took the step, the
    mean over a sample's trained tokens, then over all samples of the batch, those without a trained token counted as
    0.

    Args:
        per_token: whether the mean is over all trained tokens of the batch.
        correction: "" where the trainer's own log-probs are the old ones; "rollout" where the engine's are; "tis"
            where each token weighs as much more as the trainer finds it likelier than the engine did, up to TIS_CLIP.
    """
    model.zero_grad()
    total = torch.zeros(())
    # vime counts a sample without a trained token as one token.
    tokens = sum(1 if sample["remove_sample"] else max(1, sum(sample["loss_mask"])) for sample in samples)
    for sample, advantage in zip(samples, advantages, strict=True):
        mask = torch.tensor(sample["loss_mask"], dtype=torch.float32)
        if sample["remove_sample"] or not mask.sum():
            continue
        new, engine = log_probs(model, sample), torch.tensor(sample["rollout_log_probs"])
        ratio = (new - (engine if correction == "rollout" else new.detach())).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
        if correction == "tis":
            loss = loss * (new.detach() - engine).exp().clamp(0, TIS_CLIP)
        total = total + (loss * mask).sum() / (tokens if per_token else mask.sum() * len(samples))
    total.backward()
    norm = torch.stack(
        [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    ).norm()
    return total.item(), norm.item()


def own_advantages(samples: list[dict[str, Any]], spread: bool = True) -> list[float]:
    """By group (reward - mean) / (std + 1e-6) over those that were not lost; 0 for the lost and where all have the
    same. Without `spread` reward - mean."""
    groups: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        if not sample["remove_sample"] and sum(sample["loss_mask"]):
            groups.setdefault(sample["group_index"], []).append(place)
    advantages = [0.0] * len(samples)
    for places in groups.values():
        rewards = torch.tensor([samples[place]["reward"]["score"] for place in places], dtype=torch.float64)
        if len(places) < 2 or not rewards.std():
            continue
        scale = rewards.std() + 1e-6 if spread else 1.0
        for place, value in zip(places, (rewards - rewards.mean()) / scale, strict=True):
            advantages[place] = value.item()
    return advantages
