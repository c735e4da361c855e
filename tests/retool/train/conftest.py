"""A tiny run of the third command's own stages, which the tests of the trainer share: SFT, an engine, two steps of
RL."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from commands import job_environment, job_words
from train_helpers import (
    DRAWN,
    DRAWN_REWARDS,
    TINY,
    dump_rollouts,
    is_free_of_gpus,
    printed_launch,
    samples_of,
    varied,
)
from trainer import run
from trainer.evidence import logged

ROOTS = ("VIME_ROOT", "MEGATRON_ROOT")


def pytest_collection_modifyitems(items):
    missing = [name for name in ROOTS if not os.environ.get(name)]
    for item in items:
        if item.get_closest_marker("train") and missing:
            item.add_marker(pytest.mark.skip(reason=f"{' and '.join(missing)} name no checkout to train with"))
        elif item.get_closest_marker("train") and not is_free_of_gpus():
            item.add_marker(pytest.mark.skip(reason="this machine has a GPU, and the stand-in for CUDA refuses it"))


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A run whose model and data are made."""
    folder = tmp_path_factory.mktemp("run")
    options = run.parse_options(["--output", str(folder)])
    ready = run.prepare(options, TINY)
    [packages] = (folder / "environment").glob("lib/python3*/site-packages")
    (packages / "drawn_rewards.py").write_text(DRAWN_REWARDS)
    run.make_data(ready)
    return ready


@pytest.fixture(scope="session")
def trained(made):
    """After SFT, with what vime made of the conversations dumped."""
    run.supervised(made, "--save-debug-rollout-data", str(made.folder / "sft_dump" / "rollout_{rollout_id}.pt"))
    return made


@pytest.fixture(scope="session")
def sft_model(trained):
    """The checkpoint of SFT as a Hugging Face model."""
    return run.to_hugging_face(trained, "sft", trained.folder / "sft_hf")


@pytest.fixture(scope="session")
def server(trained):
    """An engine for all runs: each gives it its own weights first."""
    with run.engine(trained) as up:
        yield up


@pytest.fixture(scope="session")
def reinforced(trained, server):
    """After two steps of RL on rewards that are drawn by lot, since a model that has seen so little is never right."""
    run.reinforced(trained, server, *DRAWN)
    (trained.folder / run.GENERATED).write_text(str(run.generated_tokens(server)))
    run.export(trained)
    return trained


@pytest.fixture(scope="session")
def batches(reinforced):
    """With the engine's log-probs moved off Megatron's, up and down by turns, so that there is something to
    correct."""
    samples = samples_of(run.dumped(reinforced, "rl", "rollout_0.pt"))
    for sample in samples:
        reported = enumerate(sample["rollout_log_probs"])
        sample["rollout_log_probs"] = [value + (-0.6, 0.1, 0.3)[place % 3] for place, value in reported]
    return varied(samples)


@pytest.fixture(scope="session")
def retrain(trained):
    """retrain(name, rollouts, *flags, ranks=1): vime's metrics of each step on rollouts as they are given.

    It starts from the SFT model, in `trainer_forks`; the name is that of the log, and with _dump of the rollouts.
    """
    printed = printed_launch(trained)
    given, environment = job_words(printed), trained.environment(**job_environment(printed))
    program = Path(__file__).with_name("trainer_forks.py")
    with open(trained.folder / "forks.log", "w") as log:
        process = subprocess.Popen(
            [trained.programs / "python", program],
            cwd=trained.folder,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def retrain(name, rollouts, *flags, ranks=1):
        log, place = trained.folder / f"{name}.log", str(trained.folder / name)
        arguments = [*given, *dump_rollouts(trained, name, rollouts), "--load", place, "--save", place]
        arguments += ["--actor-num-gpus-per-node", str(ranks), *flags]
        process.stdin.write(json.dumps({"arguments": arguments, "ranks": ranks, "log": str(log)}) + "\n")
        process.stdin.flush()
        # Libraries print while they are imported.
        answer = next((line for line in process.stdout if line.startswith("[")), None)
        assert answer and not any(json.loads(answer)), (answer, log.read_text()[-3000:])
        steps = logged(log)["step"]
        return [steps[number] for number in range(len(rollouts))]

    with process:
        yield retrain
        process.stdin.close()
