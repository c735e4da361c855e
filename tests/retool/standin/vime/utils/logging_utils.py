"""vime's trackers, wandb and TensorBoard, as far as rollouts log to them. wandb runs offline here."""

from __future__ import annotations

import os

import wandb


def init_tracking(args, primary: bool = True, **kwargs):
    if args.use_wandb:
        wandb.init(project=args.wandb_project, dir=args.wandb_dir, settings=wandb.Settings(mode="offline"))
        for kind in ("rollout", "eval"):
            wandb.define_metric(f"{kind}/step")
            wandb.define_metric(f"{kind}/*", step_metric=f"{kind}/step")


def finish_tracking(args):
    if args.use_wandb and wandb.run is not None:
        wandb.finish()


def log(args, metrics, step_key: str):
    if args.use_wandb:
        wandb.log(metrics)
    if args.use_tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(os.environ["TENSORBOARD_DIR"]) as writer:
            for name, value in metrics.items():
                if name != step_key:
                    writer.add_scalar(name, value, metrics[step_key])
