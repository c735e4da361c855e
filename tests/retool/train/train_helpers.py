"""What the tests of the trainer share: sizes, rewards by lot, replaying a dumped rollout, and the same sums in plain torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from trainer import run, without_cuda
from trainer.evidence import logged
from transformers import AutoModelForCausalLM

TINY = run.Recipe(conversations=192, sft_batch=8, rl_steps=2, prompts=4, samples=4, rl_rate="1e-3", evaluate_every=2)
# A module of the trainer's environment; `acc` as well, by which the plugin sees whether a group can be compared in.
DRAWN_REWARDS = """
import hashlib


async def reward(args, sample, **kwargs):
    drawn = hashlib.sha256(f"{sample.index} {sample.response}".encode()).digest()[0] % 2
    return {"score": 2.0 * drawn - 1.0, "acc": bool(drawn), "pred": ""}
"""


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
    """Of the response's tokens, [response_length]."""
    ids, count = torch.tensor(sample["tokens"]), sample["response_length"]
    logits = model(ids[None]).logits[0].float()
    return torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0][len(ids) - 1 - count :]


def replay(
    base: run.Run, name: str, rollouts: list[list[dict[str, Any]]], *flags: str, gpus: int = 1
) -> list[dict[str, float]]:
    """Train on rollouts as they are given, each a step from the SFT model at a learning rate of 0, without an engine.

    Returns:
        vime's metrics of each step; what the trainer was given is in the folder NAME_dump.
    """
    dump = base.folder / f"{name}_dump"
    dump.mkdir()
    for number, samples in enumerate(rollouts):
        torch.save({"rollout_id": number, "samples": copy.deepcopy(samples)}, dump / f"rollout_{number}.pt")
    given = ["--load-debug-rollout-data", str(dump / "rollout_{rollout_id}.pt"), "--save-interval", "1000"]
    given += ["--save-debug-train-data", str(dump / "train_{rollout_id}_{rank}.pt"), "--no-save-optim"]
    base = base._replace(gpus=gpus)
    run.reinforce(base, name, [*given, "--num-rollout", str(len(rollouts)), "--lr", "0", *flags], len(rollouts))
    steps = logged(base.folder / f"{name}.log")["step"]
    return [steps[number] for number in range(len(rollouts))]


def grpo(
    model: Any, samples: list[dict[str, Any]], advantages: list[float], low=0.2, high=0.28
) -> tuple[float, float]:
    """Loss and gradient norm of a step as vime defines GRPO: the clipped ratio to the policy that took the step, the mean
    over a sample's trained tokens, then over all samples of the batch, those without a trained token counted as 0."""
    model.zero_grad()
    total = torch.zeros(())
    for sample, advantage in zip(samples, advantages, strict=True):
        mask = torch.tensor(sample["loss_mask"], dtype=torch.float32)
        if sample["remove_sample"] or not mask.sum():
            continue
        new = log_probs(model, sample)
        ratio = (new - new.detach()).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        total = total + (loss * mask).sum() / mask.sum() / len(samples)
    total.backward()
    norm = torch.stack(
        [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    ).norm()
    return total.item(), norm.item()


def own_advantages(samples: list[dict[str, Any]]) -> list[float]:
    """By group (reward - mean) / (std + 1e-6) over those that were not lost; 0 for the lost and where all have the same."""
    groups: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        if not sample["remove_sample"] and sum(sample["loss_mask"]):
            groups.setdefault(sample["group_index"], []).append(place)
    advantages = [0.0] * len(samples)
    for places in groups.values():
        rewards = torch.tensor([samples[place]["reward"]["score"] for place in places], dtype=torch.float64)
        if len(places) < 2 or not rewards.std():
            continue
        for place, value in zip(places, (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True):
            advantages[place] = value.item()
    return advantages
