"""Runs vime's own advantages and losses over a batch with and without lost samples, and prints what differs, as JSON.

    python estimators.py

A process of its own, since Megatron's groups are one for a process. Needs VIME_ROOT and MEGATRON_ROOT. Each line is
{"estimator", "options", "error" or "gradient": the largest difference of the gradient on the tokens of the samples
that are trained on, "lost": the largest on those of the others}.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than all the rest
sys.path[:0] = [os.environ["VIME_ROOT"], os.environ["MEGATRON_ROOT"]]

import generate_with_retool as plugin  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from megatron.core import mpu  # noqa: E402
from retool import handover  # noqa: E402

from vime.backends.megatron_utils import loss as vimes  # noqa: E402
from vime.utils.types import Sample  # noqa: E402

VOCABULARY = 11
ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "ppo")
ICEPOP = "vime.backends.megatron_utils.loss.icepop_function"
MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
with open(f"{os.environ['VIME_ROOT']}/examples/train_infer_mismatch_helper/mis.yaml") as file:
    MIS_SETTINGS = yaml.safe_load(file)
OPTIONS = {
    "none": {},
    "KL loss": dict(use_kl_loss=True, kl_loss_coef=0.1),
    "unbiased KL loss": dict(use_kl_loss=True, kl_loss_coef=0.1, use_unbiased_kl=True),
    "KL in the reward": dict(kl_coef=0.1),
    "entropy": dict(entropy_coef=0.01),
    "per token": dict(calculate_per_token_loss=True),
    "TIS": dict(use_tis=True),
    "icepop": dict(use_tis=True, custom_tis_function_path=ICEPOP),
    "MIS": MIS_SETTINGS | dict(custom_tis_function_path=MIS),
    "OPSM": dict(use_opsm=True),
    "rollout log-probs": dict(use_rollout_logprobs=True),
    "normalized advantages": dict(normalize_advantages=True),
    "no normalized rewards": dict(rewards_normalization=False),
    "discount": dict(gamma=0.9, lambd=0.9),
}


def make_args(**changes) -> argparse.Namespace:
    values = dict(
        **dict(reward_key="score", rewards_normalization=True, grpo_std_normalization=True, n_samples_per_prompt=4),
        **dict(normalize_advantages=False, custom_advantage_function_path=None, use_opd=False, kl_coef=0.0),
        **dict(kl_loss_type="k3", use_kl_loss=False, kl_loss_coef=0.0, use_unbiased_kl=False, entropy_coef=0.0),
        **dict(use_rollout_logprobs=False, use_tis=False, get_mismatch_metrics=False, custom_tis_function_path=None),
        **dict(tis_clip=2.0, tis_clip_low=0.0, use_opsm=False, opsm_delta=1e-4, eps_clip=0.2, eps_clip_high=0.28),
        **dict(gamma=1.0, lambd=1.0, value_clip=0.2, calculate_per_token_loss=False, allgather_cp=False),
        **dict(rollout_temperature=1.0, log_probs_chunk_size=-1, recompute_loss_function=False),
        **dict(custom_pg_loss_reducer_function_path=None, rollout_top_p=1.0, loss_type="policy_loss"),
    )
    return argparse.Namespace(**{**values, **changes})


def samples(args, with_lost: bool) -> list[Sample]:
    """A group of four with two right, one of which ends in an observation; two lost ones between them."""
    made = []
    for index, (score, mask) in enumerate(
        [(1.0, [1, 1, 0, 1]), (None, [1, 1, 0]), (-1.0, [1]), (None, []), (1.0, [1, 0])]
    ):
        length = len(mask)
        sample = Sample(group_index=0, index=index, tokens=[(index + i) % VOCABULARY for i in range(3 + length)])
        sample.response_length, sample.loss_mask = length, mask
        sample.rollout_log_probs = [-0.5 - 0.1 * i if kept else 0.0 for i, kept in enumerate(mask)]
        if score is None:
            sample.status = Sample.Status.ABORTED
            handover.lose(args, sample, "infrastructure_error")
        else:
            sample.reward = {"score": score, "acc": score > 0, "pred": ""}
        if with_lost or score is not None:
            made.append(sample)
    return made


def per_token(sample: Sample, seed: int) -> torch.Tensor:
    """Numbers for the tokens of a response, the same whatever stands beside it."""
    generator = torch.Generator().manual_seed(100 * sample.index + seed)
    return -torch.rand(sample.response_length, generator=generator)


def gradients(args, batch_samples: list[Sample]) -> dict[int, torch.Tensor]:
    """On the logits, by the sample."""
    _, rewards = plugin.normalize_rewards(args, batch_samples)
    masks = [torch.tensor([0] * len(s.loss_mask) if s.remove_sample else s.loss_mask) for s in batch_samples]
    batch = dict(
        rewards=rewards,
        loss_masks=masks,
        response_lengths=[s.response_length for s in batch_samples],
        total_lengths=[len(s.tokens) for s in batch_samples],
        unconcat_tokens=[torch.tensor(s.tokens) for s in batch_samples],
        rollout_mask_sums=torch.tensor([float(mask.sum()) for mask in masks]),
        rollout_log_probs=[torch.tensor(s.rollout_log_probs, dtype=torch.float32) for s in batch_samples],
        log_probs=[per_token(s, 1) for s in batch_samples],
        ref_log_probs=[per_token(s, 2) for s in batch_samples],
        values=[per_token(s, 3) for s in batch_samples],
    )
    vimes.compute_advantages_and_returns(args, batch)
    whole = []
    for sample in batch_samples:
        generator = torch.Generator().manual_seed(sample.index)
        width = 1 if args.loss_type == "value_loss" else VOCABULARY
        whole.append(torch.randn(len(sample.tokens), width, generator=generator))
    logits = torch.cat(whole).unsqueeze(0).requires_grad_()
    loss, _, log = vimes.loss_function(args, batch, 1, 1, logits)
    loss.backward()
    assert torch.isfinite(log["values"]).all() and torch.isfinite(logits.grad).all()
    parts = logits.grad[0].split(batch["total_lengths"])
    return {sample.index: part for sample, part in zip(batch_samples, parts, strict=True)}


def compare(estimator: str, options: dict) -> dict:
    args = make_args(advantage_estimator=estimator, **options)
    if estimator.startswith("reinforce"):
        args.normalize_advantages = True  # vime's parser asks for it
    if estimator == "reinforce_plus_plus" and "without" not in options:
        args.custom_advantage_function_path = "generate_with_retool.compute_advantages"
    try:
        together, alone = gradients(args, samples(args, True)), gradients(args, samples(args, False))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    assert max(float(part.abs().max()) for part in alone.values()) > 1e-3
    lost = [float(part.abs().max()) for index, part in together.items() if index not in alone]
    return {
        "gradient": max(float((together[index] - part).abs().max()) for index, part in alone.items()),
        "lost": max(lost),
    }


def main() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mpu.initialize_model_parallel()
    for estimator, (name, options) in itertools.product(ESTIMATORS, OPTIONS.items()):
        print(json.dumps({"estimator": estimator, "options": name} | compare(estimator, options)), flush=True)
    more = [("ppo", {"loss_type": "value_loss"}), ("reinforce_plus_plus", {"without": "our advantage function"})]
    for estimator, options in more:
        print(json.dumps({"estimator": estimator, "options": str(options)} | compare(estimator, options)), flush=True)


if __name__ == "__main__":
    main()
