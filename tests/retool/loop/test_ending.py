"""What ends a run: every fault in every mode of vime's rollout, through vime itself. Needs VIME_ROOT for those."""

import asyncio
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from retool import failures

from vime.utils.types import Sample

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[2] / "examples" / "retool"
DRIVER = HERE / "rollout_modes.py"

needs_vime = pytest.mark.skipif(
    not os.environ.get("VIME_ROOT") or not os.environ.get("RETOOL_QWEN3_TOKENIZER"),
    reason="VIME_ROOT and RETOOL_QWEN3_TOKENIZER name no vime checkout and no tokenizer to run rollouts with",
)

MODES = ["sync", "evaluation", "fully_async"]
REFUSED = ("EngineRefused", "--enable-scale-out")
CAUSES = {  # what the last line begins with, and what it says
    "refuses": REFUSED,
    "no_log_probs": ("TooManyFailures", "it has no log-probs for"),
    "dead": ("TooManyFailures", "connection"),
    "aborts": ("TooManyFailures", "finish_reason abort"),
    "sandbox": ("TooManyFailures", "no worker starts here"),
    "prompt": ("ValueError", "row 7 has no prompt"),
    "old_vime": ("RuntimeError", "too old"),
    "reward": ("TypeError", "no reward for this label"),
}
EVERYWHERE = ("refuses", "no_log_probs", "dead", "sandbox", "prompt")
PAIRS = [(mode, fault) for mode in MODES for fault in CAUSES if fault in EVERYWHERE or mode == "fully_async"]
PAIRS.append(("sync", "aborts"))  # an evaluation is over before it has lasted long enough
HARMLESS = [*((mode, "none") for mode in MODES), ("sync", "refuses_one"), ("fully_async", "refuses_one")]
ENDS_SECONDS = 45  # most are over after one, of a dead engine after eleven; the rest is a busy machine's


def environment():
    folders = [os.environ["VIME_ROOT"], str(HERE.parent), str(EXAMPLE)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By "mode:fault": the exit status, the seconds and the log."""
    folder = tmp_path_factory.mktemp("modes")
    pairs = [f"{mode}:{fault}" for mode, fault in [*PAIRS, *HARMLESS]]
    command = [sys.executable, str(DRIVER), str(folder), *pairs]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, timeout=1200, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["pair"]: SimpleNamespace(**row, log=(folder / f"{row['pair']}.log").read_text()) for row in rows}


@needs_vime
@pytest.mark.parametrize("mode, fault", PAIRS)
def test_the_run_ends_with_its_cause(runs, mode, fault):
    run = runs[f"{mode}:{fault}"]
    kind, words = CAUSES[fault]
    last = [line for line in run.log.splitlines() if line.strip() and not line.startswith('{"kept"')][-1]
    assert run.status == 1 and 0 <= run.seconds < ENDS_SECONDS, run.log[-3000:]
    assert last.split(":")[0].endswith(kind) and words in last


@needs_vime
@pytest.mark.parametrize("mode, fault", HARMLESS)
def test_a_run_that_can_go_on_does(runs, mode, fault):
    assert runs[f"{mode}:{fault}"].status == 0, runs[f"{mode}:{fault}"].log[-3000:]


@needs_vime
def test_a_fully_asynchronous_run_gives_up_a_sample_that_always_fails(runs):
    """Its group would be begun again for ever, and the other samples in it with it."""
    log = runs["fully_async:refuses_one"].log
    assert "is given up: it failed 3 times" in log and "this one is too long" in log


@needs_vime
@pytest.mark.parametrize("fault", ["refuses", "no_log_probs", "dead", "sandbox", "old_vime"])
def test_no_group_is_consumed(runs, fault):
    """Under the fully asynchronous rollout, whose worker drops a group that raises."""
    assert '{"kept": true}' in runs[f"fully_async:{fault}"].log


@needs_vime
def test_the_streaming_rollout_is_no_mode_of_its_own():
    """It takes the place of this plugin's `generate`, under the rollout functions that are driven above."""
    from vime.rollout import vllm_streaming_rollout

    assert vllm_streaming_rollout.__all__ == ["generate_streaming"]


# --- in a Ray actor, as vime's rollout manager is one ---------------------------------------------------------------

RAY_DRIVER = '''
import os, sys, threading, asyncio, time
import ray

@ray.remote
class Manager:
    def __init__(self, workdir):
        import rollout_modes
        from pathlib import Path
        rollout_modes.write_prompts(Path(workdir))
        self.modes, self.workdir = rollout_modes, Path(workdir)

    def generate(self, mode):
        if mode == "own":
            self.modes.fully_async_rollout.generate_rollout_fully_async = own_rollout
            self.modes.MODES["own"] = self.modes.fully_async
        self.modes.run(self.workdir, mode, "refuses")

def own_rollout(args, rollout_id, data_source):
    """Drops exceptions, on a loop in a thread of its own, and waits for ever."""
    import generate_with_retool as plugin
    async def loop():
        while True:
            group = data_source.get_samples(1)[0]
            await asyncio.gather(*(plugin.generate(args, s, dict(max_new_tokens=9, temperature=1.0, top_p=1.0))
                for s in group), return_exceptions=True)
            await asyncio.sleep(0.2)
    thread = threading.Thread(target=lambda: asyncio.run(loop()), daemon=True)
    thread.start()
    thread.join()

ray.init(address=os.environ["RAY_ADDRESS"], runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
manager = Manager.remote(sys.argv[1])
ray.get(manager.__ray_ready__.remote())
print("ready", time.monotonic(), flush=True)
try:
    ray.get(manager.generate.remote(sys.argv[2]))
finally:
    print("ended", time.monotonic(), flush=True)
    time.sleep(2)  # what the actor wrote is still on its way
'''


@pytest.mark.ray
@needs_vime
@pytest.mark.parametrize("mode, error", [("fully_async", "RayTaskError(EngineRefused)"), ("own", "ActorDiedError")])
def test_the_driver_learns_the_cause(tmp_path, ray_cluster, mode, error):
    driver = tmp_path / "driver.py"
    driver.write_text(RAY_DRIVER)
    env = {**environment(), "RAY_ADDRESS": ray_cluster}
    env["PYTHONPATH"] += os.pathsep + str(HERE)
    command = [sys.executable, str(driver), str(tmp_path), mode]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    times = {
        line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines() if line[:5] in ("ready", "ended")
    }
    assert done.returncode == 1 and times["ended"] - times["ready"] < ENDS_SECONDS
    assert error in done.stderr
    said = done.stdout + done.stderr  # Ray prints what the actor writes on the driver's output
    assert "--enable-scale-out" in said
    if mode == "fully_async":
        assert "EngineRefused" in done.stderr.splitlines()[-1]


# --- the parts -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh():
    failures.forget()
    yield
    failures.forget()


LOST = RuntimeError("the worker is gone")


def test_a_lost_episode_is_logged(caplog):
    failures.count(LOST, 0.5)
    failures.count(None, 0.5)
    assert caplog.messages == ["a rollout is lost and will not be trained on: the worker is gone"]


def test_a_share_of_the_last_episodes_may_be_lost():
    for _ in range(32):
        failures.count(LOST, 0.5)
        failures.count(None, 0.5)
    failures.count(LOST, 0.5)
    with pytest.raises(failures.TooManyFailures, match="33 of the last 64 .* the worker is gone"):
        failures.count(LOST, 0.5)
    failures.count(LOST, 0.5)  # whoever caught it begins anew


@pytest.mark.parametrize("seconds_apart, rate, ends", [(1.0, 0.5, True), (0.1, 0.5, False), (1.0, 1.0, False)])
def test_losing_all_for_some_time_is_enough(monkeypatch, seconds_apart, rate, ends):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(failures.time, "monotonic", lambda: now.seconds)

    def lose(times):
        for _ in range(times):
            now.seconds += seconds_apart
            failures.count(LOST, rate)

    lose(failures.MAX_LOST_IN_A_ROW - 1)
    failures.count(None, rate)  # one that is not lost begins the row anew
    lose(failures.MAX_LOST_IN_A_ROW - 1)
    if ends:
        with pytest.raises(failures.TooManyFailures, match="all of the last 16 .* the worker is gone"):
            lose(1)
    else:
        lose(1)


@pytest.fixture
def worker(monkeypatch):
    """This thread is taken for vime's worker's."""
    made = SimpleNamespace(output_queue=queue.Queue(maxsize=1), worker_thread=threading.current_thread())
    vimes = SimpleNamespace(_global_worker=made)
    monkeypatch.setitem(sys.modules, "vime.rollout.fully_async_rollout", vimes)
    return made


def test_the_cause_is_first_in_the_queue_and_there_once(worker, monkeypatch):
    worker.output_queue.put((1, ["a group"]))  # and the queue is full
    failures.raise_if_ended()
    assert all(failures.end_run(LOST) for _ in range(3))
    assert worker.output_queue.qsize() == 2
    with pytest.raises(RuntimeError, match="the worker is gone"):
        _id, _group = worker.output_queue.get_nowait()
    assert worker.output_queue.get_nowait() == (1, ["a group"])
    with pytest.raises(RuntimeError, match="the worker is gone"):
        failures.raise_if_ended()
    assert failures.end_run(ValueError("a later one"))  # whoever goes on meets the first cause again
    with pytest.raises(RuntimeError, match="the worker is gone"):
        _id, _group = worker.output_queue.get_nowait()
    another = SimpleNamespace(output_queue=queue.Queue(), worker_thread=threading.current_thread())
    monkeypatch.setattr(sys.modules["vime.rollout.fully_async_rollout"], "_global_worker", another)
    failures.raise_if_ended()  # another worker is another run


def test_a_waiting_rollout_function_is_woken(worker):
    seen = []

    def wait():
        try:
            _id, _group = worker.output_queue.get(timeout=20)
        except RuntimeError as error:
            seen.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    failures.end_run(LOST)
    waiting.join(20)
    assert seen == [LOST]


def test_elsewhere_an_exception_is_only_raised():
    async def main():
        return failures.end_run(LOST)

    assert asyncio.run(main()) is False
    failures.raise_if_ended()


@pytest.mark.parametrize("in_worker", [True, False])
@pytest.mark.parametrize("gives_back", [True, False])
def test_what_an_episode_raises_is_raised_unless_the_rollout_gets_it_from_elsewhere(request, in_worker, gives_back):
    if in_worker:
        request.getfixturevalue("worker")

    @failures.ends_the_run(gives_sample_back=gives_back)
    async def generate(args, sample):
        raise LOST

    sample = Sample()
    if in_worker and gives_back:
        assert asyncio.run(generate(None, sample=sample)) is sample and sample.status == Sample.Status.ABORTED
        assert asyncio.run(generate(None, sample)) is sample  # and no episode is started any more
    else:
        with pytest.raises(RuntimeError, match="the worker is gone"):
            asyncio.run(generate(None, sample))
        assert sample.status == Sample.Status.PENDING


@pytest.mark.parametrize(
    "place, ends",
    [("an actor's own loop", True), ("vime's loop in an actor", False), ("a driver", False), ("", False)],
)
def test_a_process_whose_loop_drops_what_is_raised_is_ended(monkeypatch, place, ends):
    """A rollout function of the user's own, in a Ray actor: none but an actor's process is ended."""
    now, ended = SimpleNamespace(seconds=0.0), []
    monkeypatch.setattr(failures.time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(failures, "_end_process", ended.append)
    context = SimpleNamespace(get_actor_id=lambda: None if place == "a driver" else "actor")
    ray = SimpleNamespace(is_initialized=lambda: bool(place), get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)

    async def main():
        if place.startswith("vime's"):
            vimes = SimpleNamespace(async_loop=SimpleNamespace(loop=asyncio.get_running_loop()))
            monkeypatch.setitem(sys.modules, "vime.utils.async_utils", vimes)
        for now.seconds in (100.0, 100.0 + failures.MAX_SWALLOWED_SECONDS):
            assert failures.end_run(LOST) is False
        assert ended == []
        now.seconds += 0.1
        assert failures.end_run(LOST) is False
        assert ended == [LOST] * ends

    asyncio.run(main())


def test_a_vime_whose_worker_is_built_in_another_way_is_ended_by_its_process(worker, monkeypatch):
    ended = []
    monkeypatch.setattr(failures, "_end_process", ended.append)
    worker.output_queue = []
    failures.end_run(LOST)
    assert ended == [LOST]


ENDED = """
import logging, logging.handlers, sys, threading
from retool import failures
sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # neither is written at once
logging.getLogger().addHandler(logging.handlers.MemoryHandler(9, target=logging.FileHandler(sys.argv[1], delay=True)))
logging.warning("logged")
print("printed")
try:
    raise ValueError("the cause")
except ValueError as error:
    cause = error
threading.Thread(target=failures._end_process, args=[cause], daemon=True).start()
threading.Event().wait()
"""


def test_a_process_that_is_ended_leaves_all_that_it_said_and_the_cause_last(tmp_path):
    command = [sys.executable, "-c", ENDED, str(tmp_path / "log")]
    settings = {**os.environ, "PYTHONPATH": str(EXAMPLE)}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "printed\n", done.stderr
    assert (tmp_path / "log").read_text() == "logged\n"
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("\nValueError: the cause\n")
    assert done.stderr.count("the cause") == 2  # under the traceback, and by itself
