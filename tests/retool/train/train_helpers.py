"""What the tests of the trainer share: sizes, rewards by lot, replaying a dumped rollout, and the same sums in plain
torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from trainer import run, without_cuda
from trainer.evidence import logged
from transformers import AutoModelForCausalLM

# Two trainers, or a trainer and an engine, share two cores; the sums here are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
TINY = run.Recipe(conversations=192, sft_batch=8, rl_steps=2, prompts=4, samples=4, rl_rate="1e-3", evaluate_every=2)
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
    """Of the response's tokens, [response_length]."""
    ids, count = torch.tensor(sample["tokens"]), sample["response_length"]
    logits = model(ids[None]).logits[0].float()
    return torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0][len(ids) - 1 - count :]


STILL = ("--lr", "0", "--no-save-optim", "--save-interval", "1000")


def replay(
    base: run.Run, name: str, rollouts: list[list[dict[str, Any]]], *flags: str, gpus: int = 1
) -> list[dict[str, float]]:
    """Train on rollouts as they are given, each a step, from the SFT model and without an engine.

    Args:
        name: of the checkpoint's folder, of the log, and with _dump of the rollouts.
        flags: STILL, for weights that do not move, or others; then what is tested.

    Returns:
        vime's metrics of each step.
    """
    for number, samples in enumerate(rollouts):
        path = run.dumped(base, name, f"rollout_{number}.pt")
        path.parent.mkdir(exist_ok=True)
        torch.save({"rollout_id": number, "samples": samples}, path)
    given = ["--load-debug-rollout-data", str(run.dumped(base, name, "rollout_{rollout_id}.pt"))]
    given += ["--num-rollout", str(len(rollouts)), *flags]
    run.reinforce(base._replace(gpus=gpus), name, given, len(rollouts))
    steps = logged(base.folder / f"{name}.log")["step"]
    return [steps[number] for number in range(len(rollouts))]


LOW, HIGH, TIS_CLIP = 0.2, 0.28, 1.5  # of the ratio, as the launch script has it; of the weight of a token


def gradient(
    model: Any, samples: list[dict[str, Any]], advantages: list[float], correction: str = ""
) -> tuple[float, float]:
    """Loss and gradient norm of a step as vime defines GRPO: the clipped ratio to the policy that took the step, the
    mean over a sample's trained tokens, then over all samples of the batch, those without a trained token counted as
    0.

    Args:
        correction: "" where the trainer's own log-probs are the old ones; "rollout" where the engine's are; "tis"
            where each token weighs as much more as the trainer finds it likelier than the engine did, up to TIS_CLIP.
    """
    model.zero_grad()
    total = torch.zeros(())
    for sample, advantage in zip(samples, advantages, strict=True):
        mask = torch.tensor(sample["loss_mask"], dtype=torch.float32)
        if sample["remove_sample"] or not mask.sum():
            continue
        new, engine = log_probs(model, sample), torch.tensor(sample["rollout_log_probs"])
        ratio = (new - (engine if correction == "rollout" else new.detach())).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
        if correction == "tis":
            loss = loss * (new.detach() - engine).exp().clamp(0, TIS_CLIP)
        total = total + (loss * mask).sum() / mask.sum() / len(samples)
    total.backward()
    norm = torch.stack(
        [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    ).norm()
    return total.item(), norm.item()


def own_advantages(samples: list[dict[str, Any]]) -> list[float]:
    """By group (reward - mean) / (std + 1e-6) over those that were not lost; 0 for the lost and where all have the
    same."""
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
