"""vime's trainer on rollouts that are given: one process imports everything, and each run is a fork of it per rank.

    python trainer_forks.py    reads jobs, lines of JSON {"arguments", "ranks", "log"}, and answers each with a line:
                               the list of the ranks' exit codes

A launch takes a minute, of which the steps are a second. Of vime this runs the parser, what the rollout manager makes
of a rollout, and the Megatron actor, as train.py does; there is no Ray, no engine, no evaluation and no checkpoint.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from types import SimpleNamespace

import ray
from retool.processes import LOOPBACK, free_ports

from vime.backends.megatron_utils.actor import MegatronTrainRayActor
from vime.ray import rollout
from vime.utils.arguments import parse_args

RolloutManager = rollout.RolloutManager.__ray_metadata__.modified_class


def train(arguments: list[str], rank: int, ranks: int, port: int) -> None:
    """Each rank makes the batch for itself, and takes its part of it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(ranks)))
    ray.get_gpu_ids = lambda: [rank]
    ray.put = lambda value, **_: value
    ray.get = lambda value: value
    rollout.Lock = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: None))
    sys.argv = ["train.py", *arguments]
    args = parse_args()
    manager = RolloutManager(args, None)
    actor = MegatronTrainRayActor(ranks, rank, LOOPBACK, port)
    actor.init(args, "actor", with_ref=args.kl_coef != 0 or args.use_kl_loss)
    manager.set_train_parallel_config(actor.train_parallel_config)
    for number in range(args.num_rollout):
        actor.train(number, manager.generate(number))


def fork(job: dict, rank: int, port: int) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        train(job["arguments"], rank, job["ranks"], port)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        [port] = free_ports(1)
        children = [fork(job, rank, port) for rank in range(job["ranks"])]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == "__main__":
    main()
