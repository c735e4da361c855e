"""A run that was killed goes on, and what it dumped can be looked at."""

import os
import signal
import threading
from pathlib import Path

import pytest
from train_helpers import launch, samples_of
from trainer import run
from trainer.evidence import logged
from view_rollouts import make_page
from watching import descendants, wait_for

pytestmark = pytest.mark.train


def test_a_run_that_was_killed_in_a_step_does_none_twice_and_leaves_none_out(reinforced, retrain):
    """kill -9 of the trainer once its third step is through, of which two are saved; each step of the run that goes on
    has the gradient of one that was let be, and so its weights and its optimizer's state."""
    batches = [samples_of(run.dumped(reinforced, "rl", "rollout_0.pt"))] * 5
    whole = retrain("whole", batches, "--lr", "1e-3")
    flags = ["--lr", "1e-3", "--save-interval", "2"]
    log = reinforced.folder / "killed.log"

    def kill():
        wait_for(lambda: log.exists() and len(logged(log)["step"]) == 3, 400)
        for pid in descendants(os.getpid()):
            if b"MegatronTrainRayActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(run.RunError):
        launch(reinforced, "killed", batches, *flags)
    killer.join()
    killed = launch(reinforced, "killed", batches, *flags)
    assert [killed[number]["train/grad_norm"] for number in range(5)] == [step["train/grad_norm"] for step in whole]


def test_the_page_shows_the_dumps(reinforced, tmp_path):
    dumps = sorted((reinforced.folder / "rl_dump").glob("rollout_*.pt"))
    assert len(dumps) == 4
    assert make_page(dumps, tmp_path / "page.html", reinforced.folder / "model") == []
    assert "What is" in (tmp_path / "page.html").read_text()
