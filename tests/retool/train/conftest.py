"""A tiny run of the third command's own stages, which the tests of the trainer share: SFT, an engine, two steps of
RL."""

import os

import pytest
from train_helpers import DRAWN, DRAWN_REWARDS, TINY, is_free_of_gpus
from trainer import run

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
