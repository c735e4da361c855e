"""The plugin's metrics: their values, their list against the code and the documentation, and how trackers get them."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import generate_with_retool as plugin
import pytest
import tool_sandbox
from retool import chat, metrics, tracking
from retool.episode import EndReason
from retool.observations import Parts, timed_out
from scripted import Rollout, Turn, call

from vime.utils.types import Sample

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "examples" / "retool" / "docs" / "metrics.md"
END = chat.IM_END


def made(
    calls=(), *, observations=(), end="answer", score=1.0, mask=(1, 1, 0, 0), untrained=None, group=None, turns=2
):
    """A finished sample; `calls` are (outcome, seconds), of which 0.1 were spent in the queue."""
    frame = chat.frame("code", turn_ended=False)
    sizes = {"kind": "code_interpreter", "input_chars": 1, "output_chars": 1}
    retool = {
        "end_reason": end,
        "turns": turns,
        "calls": [{**sizes, "seconds": s, "outcome": o, "queued": 0.1} for o, s in calls],
        "hallucinated_outputs": 2 * (end == "length"),
    } | ({"untrained": untrained} if untrained else {})
    return Sample(
        group_index=group,
        metadata={"retool": retool},
        response="x".join(frame.before + body + frame.after for body in observations),
        response_length=len(mask),
        loss_mask=list(mask),
        reward={"score": score, "acc": score > 0, "pred": ""},
        remove_sample=untrained is not None,
        status=Sample.Status[EndReason(end).status],
    )


LOST = dict(score=0.0, end="infrastructure_error", untrained="infrastructure_error", mask=(), turns=0)


def test_values():
    samples = [
        made([("ok", 0.2), ("error", 0.4)], score=1.0, turns=3, group=0),
        made([("timeout", 10.1), ("ok", 0.2)], score=-0.95, end="length", mask=(1, 1, 1, 0), group=0),
        made([], score=-1.0, end="turn_cap", mask=(1,), turns=1, group=1),
        made([], score=1.0, end="context", mask=(1,), turns=1, group=1, untrained="overlong"),
        made(group=1, **LOST),
        *(made([], score=score, group=group, turns=0) for group, score in ((2, 1.0), (2, 1.0), (3, -1.0), (3, -1.0))),
    ]
    found = metrics.summarize(samples)
    assert found["accuracy"] == pytest.approx(4 / 8)  # what is masked as overlong counts, what is lost does not
    assert found["reward"] == pytest.approx((1 - 0.95 - 1 + 1) / 8)
    assert [found[f"accuracy_by_calls/{n}"] for n in "02"] == [0.5, 0.5]
    assert found["reward_by_calls/2"] == pytest.approx(0.025) and "reward_by_calls/3_to_4" not in found
    assert [found[f"groups/{kind}"] for kind in ("mixed", "all_right", "all_wrong", "lost")] == [0.25] * 4
    assert [found[f"untrained/{n}"] for n in ("overlong", "infrastructure_error", "no_reward")] == [1 / 9, 1 / 9, 0]
    assert (found["samples_with_calls"], found["calls_per_sample"]) == (2 / 9, 4 / 9)
    assert found["queue_seconds/p95"] == 0.1 and found["turns_per_sample"] == pytest.approx(7 / 9)
    assert (found["run_seconds/p50"], found["run_seconds/p95"]) == pytest.approx((0.1, 10.0))
    assert found["tool_seconds_per_sample"] == pytest.approx(10.9 / 9)
    assert found["repaired_errors"] == 0.5  # the timeout was followed by a call that went well, the error by none
    assert [found[f"outcome/{o}"] for o in ("ok", "error", "timeout", "memory")] == [0.5, 0.25, 0.25, 0]
    assert (found["response_tokens/right"], found["response_tokens/wrong"]) == (13 / 4, 13 / 4)
    assert found["truncated_right"] == pytest.approx(1 / 3)
    assert [found[f"end_reason/{e}"] for e in ("answer", "length", "abort")] == [5 / 9, 1 / 9, 0]
    assert found["observation_tokens"] == pytest.approx(11 / 26)
    assert (found["hallucinated_outputs"], found["infrastructure_errors"]) == (2 / 9, 1)


def test_what_a_curve_has_nothing_for_is_left_out():
    assert metrics.summarize([]) == {}
    assert metrics.summarize([SimpleNamespace(metadata={}), SimpleNamespace(metadata=None)]) == {}
    lost = metrics.summarize([made(**LOST)])
    assert not {"accuracy", "reward", "observation_tokens", "run_seconds/p50", "outcome/ok", "groups/lost"} & set(lost)
    assert lost["infrastructure_errors"] == 1


def test_a_reward_that_is_one_number_has_no_accuracy():
    sample = made()
    sample.reward = 0.25
    found = metrics.summarize([sample])
    assert found["reward"] == 0.25 and "accuracy" not in found


def everything():
    """Samples after which every metric has a value."""
    said = ["Error: not allowed: line 1: module 'numpy' is not available."]
    samples = [
        made([("error", 0.1)] * calls, observations=said, score=score, group=0, end="length")
        for calls in (0, 1, 2, 3, 5, 9)
        for score in (1.0, -1.0)
    ]
    return samples


def test_the_list_is_what_the_code_gives():
    assert sorted(metrics.METRICS) == sorted(metrics.summarize(everything()))
    assert len(set(metrics.METRICS)) == len(metrics.METRICS)


def test_the_document_names_each_metric_and_no_other():
    """Names of the first column, with their placeholder taken from the words in backticks of the second."""
    documented = []
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        names, said = line.removeprefix("| ").split(" | ")[:2]
        for name in re.findall(r"`([^`]+)`", names):
            stem = re.sub(r"/(NAME|N)$", "/", name)
            values = re.findall(r"`([^`]+)`", said) if stem != name else [""]
            documented += [stem + value for value in values]
    assert sorted(documented) == sorted(metrics.METRICS)


def test_outcomes_are_the_sandboxs():
    assert set(re.findall(r'"(\w+)"', tool_sandbox.ToolOutput.__doc__)) == set(metrics.OUTCOMES)


@pytest.mark.parametrize(
    "code, module",
    [
        ("import numpy as np", "numpy"),
        ("from scipy.special import comb", "scipy"),
        ("import os.path", "os"),
        ("import requests", "other"),
        ("import random\nrandom._os.getcwd()", "none"),
        ("eval('1')", "none"),
    ],
)
def test_refusals_are_counted_by_module(code, module):
    """Over the policy's own words."""
    safe, message = tool_sandbox.tool_registry.python_sandbox._check_code_safety(code)
    assert not safe
    found = metrics.summarize([made([("refused", 0.0)], observations=[f"Error: not allowed: {message}"])])
    shares = {name: value for name, value in found.items() if name.startswith("refused_module/")}
    assert {name for name, value in shares.items() if value} == {f"refused_module/{module}"}


def test_through_the_loop(monkeypatch):
    """What `generate` writes on a sample is what the metrics read."""

    async def execute_code(code):
        return tool_sandbox.ToolOutput.of(Parts(notice=timed_out(10)), "timeout")

    monkeypatch.setattr(tool_sandbox.tool_registry.python_sandbox, "execute_code", execute_code)
    rollout = Rollout(monkeypatch)
    try:
        turns = [call("print(1)"), "<tool_call>\n{nonsense\n</tool_call>", f"Answer: \\boxed{{42}}{END}"]
        sample = rollout.run([Turn(text) for text in turns])
    finally:
        rollout.close()
    sample.reward = plugin._score(sample)
    found = metrics.summarize([sample])
    assert (found["outcome/timeout"], found["outcome/unreadable"]) == (0.5, 0.5)
    assert (found["accuracy"], found["reward"], found["reward_by_calls/1"]) == (1, 1, 1)
    assert found["end_reason/answer"] == 1 and found["turns_per_sample"] == 3
    assert found["observation_tokens"] == pytest.approx(1 - sum(sample.loss_mask) / sample.response_length)


PLACES = ("vime.observability", "vime.utils")  # of vimes from September 2026 on, and before


def place_logging(monkeypatch, place: str | None) -> list:
    """A vime that has its logging in this place alone; what is logged there."""
    for other in PLACES:
        for name in ("logging_utils", "metric_utils"):
            monkeypatch.setitem(sys.modules, f"{other}.{name}", None)  # the import fails as for a missing module
    logged = []
    if place:
        made = {
            place: SimpleNamespace(__path__=[]),
            f"{place}.logging_utils": SimpleNamespace(
                log=lambda args, found, step_key: logged.append((found, step_key))
            ),
            f"{place}.metric_utils": SimpleNamespace(compute_rollout_step=lambda args, rollout_id: rollout_id * 10),
        }
        for name, module in made.items():
            monkeypatch.setitem(sys.modules, name, module)
    return logged


@pytest.mark.parametrize("place", PLACES)
def test_metrics_are_logged_wherever_vime_has_its_logging(monkeypatch, caplog, place):
    caplog.set_level("INFO")
    logged = place_logging(monkeypatch, place)
    assert plugin.log_rollout_data(3, SimpleNamespace(reward_key="score"), [made([("ok", 0.5)])], None, 1.0) is False
    aime = {"rewards": [1.0, False, 0.0], "samples": [made([]), made([], score=-1.0), made(**LOST)]}
    assert plugin.log_eval_rollout_data(4, SimpleNamespace(), {"aime": aime}, None) is False
    assert aime["rewards"] == [1.0, False, 0.5]  # vime's own mean of them is the accuracy of those that were not lost
    (training, step_key), (evaluation, _) = logged
    assert step_key == "rollout/step" and training["rollout/step"] == 30 and evaluation["eval/step"] == 40
    assert training["rollout/retool/outcome/ok"] == 1 and evaluation["eval/aime/retool/accuracy"] == 0.5
    assert "rollout 3: {'rollout/retool/accuracy': 1.0" in caplog.text  # also where nothing tracks


def test_a_number_that_cannot_be_had_does_not_stop_the_run(monkeypatch, caplog):
    place_logging(monkeypatch, "vime.utils")
    broken = Sample(metadata={"retool": {"end_reason": "answer"}})
    assert plugin.log_rollout_data(3, SimpleNamespace(reward_key=None), [broken], None, 1.0) is False
    assert "rollout 3 could not be logged" in caplog.text


def test_a_vime_without_that_logging_is_not_passed_over_in_silence(monkeypatch):
    place_logging(monkeypatch, None)
    with pytest.raises(ImportError, match="logging_utils neither in vime.observability nor in vime.utils"):
        plugin.log_rollout_data(3, SimpleNamespace(reward_key="score"), [made([("ok", 0.5)])], None, 1.0)


def test_what_vimes_logging_needs_is_named_if_it_is_missing(monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

    monkeypatch.setattr(tracking.importlib, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="wandb"):
        plugin.log_rollout_data(3, SimpleNamespace(reward_key="score"), [made([("ok", 0.5)])], None, 1.0)


# --- read back from the trackers -------------------------------------------------------------------------------------

# Everything goes through vime's own logging code, in a process of its own: vime's trackers are one for a process.
LOGGED_RUN = """
import os, sys
sys.path[:0] = {path!r}
from types import SimpleNamespace
from vime.ray import rollout
from vime.utils import logging_utils
from vime.utils.types import Sample

args = SimpleNamespace(
    use_wandb=True, wandb_mode="offline", wandb_project="retool", wandb_group="test", wandb_dir={folder!r}, wandb_key=None,
    wandb_host=None, wandb_team=None, wandb_random_suffix=False, wandb_run_id=None, rank=0,
    use_tensorboard=True, tb_project_name="retool", tb_experiment_name="test",
    wandb_always_use_train_step=True, rollout_batch_size=2, n_samples_per_prompt=2, global_batch_size=2,
    load_debug_rollout_data=None, reward_key="score", advantage_estimator="grpo", vllm_speculative_config=None,
    rollout_num_gpus=1, log_passrate=False, log_reward_category=None, n_samples_per_eval_prompt=1,
    custom_rollout_log_function_path="generate_with_retool.log_rollout_data",
    custom_eval_rollout_log_function_path="generate_with_retool.log_eval_rollout_data",
)
retool = dict(end_reason="answer", turns=2, hallucinated_outputs=0)
retool["calls"] = [dict(kind="code_interpreter", seconds=0.5, outcome="ok", input_chars=1, output_chars=1)]
samples = [
    Sample(group_index=0, index=i, tokens=[1, 2, 3], response="ab", response_length=2, loss_mask=[1, 0],
           reward=dict(score=score, acc=score > 0, pred=""), metadata=dict(retool=retool))
    for i, score in enumerate((1.0, -1.0))
]
data = {{"aime": dict(rewards=[1.0], truncated=[False], samples=samples[:1])}}
logging_utils.init_tracking(args)
rollout._log_rollout_data(3, args, samples, dict(), 1.0)
rollout._log_eval_rollout_data(3, args, data, None)
logging_utils.finish_tracking(args)
"""


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """({name: {step: value}} of TensorBoard, the rows of wandb's history) of one run through vime."""
    if not os.environ.get("VIME_ROOT"):
        pytest.skip("VIME_ROOT names no vime checkout to log with")
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("trackers")
    script = LOGGED_RUN.format(path=[path for path in sys.path if path], folder=str(folder))
    environment = {**os.environ, "TENSORBOARD_DIR": str(folder / "tensorboard"), "WANDB_SILENT": "true"}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    [wandb_file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    return tensorboard_scalars(folder / "tensorboard"), wandb_history(wandb_file)


def tensorboard_scalars(folder: Path) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in folder.iterdir():
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, {}).update({event.step: event.value for event in events.Scalars(name)})
    return found


def wandb_history(file: Path) -> list[dict]:
    """A run's file is a log of LevelDB's format: blocks of 32 KiB with records in pieces, after seven bytes of its
    own."""
    from wandb.proto import wandb_internal_pb2

    data, rows, piece, position = file.read_bytes(), [], b"", 7
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        piece += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record, piece = wandb_internal_pb2.Record.FromString(piece), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


OWN = {"accuracy": 0.5, "reward": 0.0, "run_seconds/p95": 0.5, "outcome/ok": 1.0, "observation_tokens": 0.5}


@pytest.mark.parametrize("kind, own", [("rollout", OWN), ("eval", OWN | {"accuracy": 1.0, "reward": 1.0})])
def test_the_trackers_have_the_metrics(logged, kind, own):
    scalars, history = logged
    prefix = {"rollout": "rollout/retool/", "eval": "eval/aime/retool/"}[kind]
    [row] = [row for row in history if prefix + "accuracy" in row]
    assert row[f"{kind}/step"] == 6  # of training: 3 rollouts of 4 samples, 2 a step
    for name, value in own.items():
        assert row[prefix + name] == value
        assert scalars[prefix + name][6] == pytest.approx(value)
    logged_names = {name.removeprefix(prefix) for name in scalars if name.startswith(prefix)}
    assert logged_names == {name.removeprefix(prefix) for name in row if name.startswith(prefix)}
    assert logged_names <= set(metrics.METRICS) and all(map(math.isfinite, map(float, own.values())))


def test_vimes_own_metrics_stay(logged):
    scalars, history = logged
    for name in ("rollout/response_len/mean", "rollout/truncated_ratio", "perf/rollout_time", "eval/aime"):
        assert 6 in scalars[name]
        assert any(name in row for row in history), name


def test_nothing_is_logged_again_for_samples_that_are_loaded(monkeypatch):
    monkeypatch.setattr(metrics, "summarize", lambda samples: pytest.fail("logged"))
    plugin.log_rollout_data(0, SimpleNamespace(load_debug_rollout_data="x.pt"), [Sample()], None, 1.0)


def test_end_reasons_are_all_there():
    assert {f"end_reason/{reason.value}" for reason in EndReason} <= set(metrics.METRICS)
