"""Partial rollouts: an episode that is aborted at any await, and continued, is the one that nothing had
interrupted."""

import asyncio
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import generate_with_retool as plugin
import pytest
import tool_sandbox
from retool import chat
from scripted import PairTokenizer, call, check_sample, make_args, make_params, printed

from vime.utils.types import Sample

END = chat.IM_END
TURNS = {
    "calls": [
        "Let me see.\n" + call("print(1)"),
        f"Hm.{END}",  # answered with what was wrong
        "It prints\n<interpreter>\n7\n</interpreter>\n" + call("print(2)") + END,
        f"So it is.\nAnswer: \\boxed{{42}}{END}",
    ],
    "inline code, and a closing tag in a string": [
        "<code>\nprint(1)\n</code>",
        "<code>\ns = '</code>",  # the stop string ends the request, and not the turn
        "'\nprint(s)\n</code>",
        f"Answer: \\boxed{{42}}{END}",
    ],
}
INSIDE_A_STOP = tuple(stop[:length] for stop in plugin.CODE_STOPS for length in range(1, len(stop)))
SLICE = 7  # tokens that the engine samples at a time


class Engine:
    """Deterministic: what it samples is decided by the ids it is sent. It samples a slice, then lets others run, and
    looks whether it was told to abort."""

    def __init__(self, tokenizer, texts: list[str]):
        self.tokenizer, self.aborting, self.slices = tokenizer, False, 0
        self.scripts = [tokenizer.sampled(text) for text in texts]
        self.log_prob_of = lambda position: -(position + 1) / 1000

    async def post(self, url, payload, max_retries=60, headers=None):
        ids = payload["token_ids"]
        script, done = self.place(ids)
        limit = payload["sampling_params"]["max_tokens"]
        sampled: list[int] = []
        finish = "stop"
        while len(sampled) < len(script) - done:
            await asyncio.sleep(0)
            if self.aborting:
                finish = "abort"
                break
            sampled += script[done + len(sampled) :][:SLICE]
            self.slices += 1
        if len(sampled) > limit:
            sampled, finish = sampled[:limit], "length"
        content = [{"token_id": t, "logprob": self.log_prob_of(len(ids) + i)} for i, t in enumerate(sampled)]
        choice = {"token_ids": sampled, "logprobs": {"content": content}, "finish_reason": finish}
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(sampled)}}

    def place(self, ids: list[int]) -> tuple[list[int], int]:
        """The script that these ids end in the middle of, and how far. Between scripts there may be observations."""
        position = self.prompt_length
        for script in self.scripts:
            start = position
            while ids[start : start + len(script)] != script[: len(ids) - start]:
                start += 1
            if len(ids) - start < len(script):
                return script, len(ids) - start
            position = start + len(script)
        raise AssertionError("asked for more than the script")


class Setting:
    """One sample, its engine and its tool, over as many attempts as it takes."""

    def __init__(self, monkeypatch, texts, **args):
        self.tokenizer = PairTokenizer()
        self.engine = Engine(self.tokenizer, texts)
        self.state = SimpleNamespace(tokenizer=self.tokenizer, aborted=False)
        self.args = make_args(partial_rollout=True, mask_offpolicy_in_partial_rollout=False, **args)
        self.sample = Sample(prompt="What is 6 * 7?", label="42", index=3, group_index=1)
        self.finished: list[str] = []
        monkeypatch.setattr(plugin, "post", self.engine.post)
        monkeypatch.setattr(plugin, "GenerateState", lambda _args: self.state)
        monkeypatch.setattr(tool_sandbox.tool_registry.python_sandbox, "execute_code", self.execute)
        prompt = chat.render_prompt(self.sample.prompt, tool_sandbox.tool_registry.get_tool_specs())
        self.engine.prompt_length = len(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])

    async def execute(self, code):
        for _ in range(4):
            await asyncio.sleep(0)
        self.finished.append(code)
        return printed(code)

    def attempt(self, abort_after: int | None, way: str = "flag", masked: bool = False) -> bool:
        """Whether the episode ended by itself. An abort comes after so many steps of the event loop."""

        async def main():
            self.state.aborted = self.engine.aborting = False
            call = plugin.generate(self.args, self.sample, make_params())
            cancels = way == "cancel" or (way == "newest" and plugin.generate.abort_mode == "request")
            task = asyncio.ensure_future(call)
            for _ in range(abort_after if abort_after is not None else 10_000):
                if task.done():
                    break
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            if cancels:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return self.sample
            self.engine.aborting = True
            self.state.aborted = way != "engine"  # that alone, when weights are updated under an async rollout
            return await task

        asyncio.run(main())
        if not self.sample.tokens:  # cancelled before its first step
            return False
        if not masked:
            check_sample(self.sample, self.tokenizer)
        return self.sample.status != Sample.Status.ABORTED and self.sample.status != Sample.Status.PENDING

    def through_a_checkpoint(self) -> None:
        """As vime's data buffer is saved and loaded: what is not plain data is lost or fails."""
        assert json.loads(json.dumps(self.sample.metadata)) == self.sample.metadata
        if hasattr(Sample, "from_dict"):
            self.sample = Sample.from_dict(pickle.loads(pickle.dumps(self.sample.to_dict())))
        else:  # the stand-in has no such pair
            self.sample = pickle.loads(pickle.dumps(self.sample))


def outcome(sample) -> dict:
    written = {name: value for name, value in sample.metadata["retool"].items() if name != "calls"}
    calls = [{**call, "seconds": 0, "queued": 0} for call in sample.metadata["retool"]["calls"]]
    names = ("tokens", "response", "loss_mask", "rollout_log_probs", "response_length", "tool_call_count", "status")
    return {name: getattr(sample, name) for name in names} | {"retool": written, "calls": calls}


@pytest.mark.parametrize("way", ["flag", "engine", "cancel"])
@pytest.mark.parametrize("texts", TURNS.values(), ids=TURNS.keys())
def test_an_abort_at_any_await_changes_nothing(monkeypatch, texts, way):
    whole = Setting(monkeypatch, texts)
    assert whole.attempt(None)
    expected = outcome(whole.sample)
    assert expected["retool"]["end_reason"] == "answer" and expected["retool"]["turns"] == (
        4 if END in texts[1] else 3
    )

    aborted, step = 0, 0
    while True:
        broken = Setting(monkeypatch, texts)
        if broken.attempt(step, way):
            break
        assert broken.sample.reward is None or way == "engine"
        # Of an observation that no request has carried there are no expert rows.
        assert broken.sample.response_length == 0 or broken.sample.loss_mask[-1] == 1, step
        # An engine that goes on inside a stop string does not see it, and would sample past it.
        assert not broken.sample.response.endswith(INSIDE_A_STOP), step
        broken.through_a_checkpoint()
        assert broken.attempt(None), step
        assert outcome(broken.sample) == expected, step
        assert broken.finished == whole.finished, f"step {step}: a finished call is not made again"
        assert broken.sample.reward is None and not broken.sample.remove_sample
        aborted, step = aborted + 1, step + 1
    assert aborted > 20


@pytest.mark.parametrize("texts", TURNS.values(), ids=TURNS.keys())
def test_the_newest_vime_keeps_whatever_was_sampled(monkeypatch, texts):
    """It asks the engines for what they have, or cancels the task where `generate` says so, and drops a group in which
    no aborted sample has a response."""
    kept, step = 0, 0
    while True:
        broken = Setting(monkeypatch, texts)
        if broken.attempt(step, "newest"):
            break
        assert (broken.sample.response_length > 0) == (broken.engine.slices > 0), step
        kept, step = kept + (broken.sample.response_length > 0), step + 1
    assert kept > 20


@pytest.mark.parametrize("texts", TURNS.values(), ids=TURNS.keys())
def test_many_aborts_one_after_another(monkeypatch, texts):
    whole = Setting(monkeypatch, texts)
    assert whole.attempt(None)
    for rhythm in range(2, 9):
        broken = Setting(monkeypatch, texts)
        for _ in range(200):
            if broken.attempt(rhythm + 6):  # a call takes some steps, and one that is cut is made again
                break
            broken.through_a_checkpoint()
        assert outcome(broken.sample) == outcome(whole.sample)


def test_what_was_sampled_under_older_weights_is_masked_as_vime_masks_it(monkeypatch):
    """vime itself puts the mask of a sample that comes back to 0 with --mask-offpolicy-in-partial-rollout."""
    setting = Setting(monkeypatch, TURNS["calls"])
    assert not setting.attempt(12)
    length = setting.sample.response_length
    assert length > 0 and any(setting.sample.loss_mask)
    log_probs = list(setting.sample.rollout_log_probs)
    setting.sample.loss_mask = [0] * length
    assert setting.attempt(None, masked=True)
    assert setting.sample.rollout_log_probs[:length] == log_probs
    assert setting.sample.loss_mask[:length] == [0] * length and any(setting.sample.loss_mask[length:])


def test_an_infrastructure_error_is_not_continued_but_started_afresh(monkeypatch):
    setting = Setting(monkeypatch, TURNS["calls"])
    post = setting.engine.post

    async def broken(*args, **kwargs):
        if setting.sample.response_length:
            raise RuntimeError("the engine is down")
        return await post(*args, **kwargs)

    monkeypatch.setattr(plugin, "post", broken)
    setting.attempt(None)
    assert setting.sample.metadata["retool"]["end_reason"] == "infrastructure_error" and setting.sample.remove_sample
    monkeypatch.setattr(plugin, "post", post)
    assert setting.attempt(None)
    assert setting.finished == ["print(1)", "print(1)", "print(2)"]  # all of it again
    assert setting.sample.metadata["retool"]["turns"] == 4 and setting.sample.tool_call_count == 2


def test_without_the_flag_an_aborted_sample_is_started_afresh(monkeypatch):
    setting = Setting(monkeypatch, TURNS["calls"])
    setting.args.partial_rollout = False
    assert not setting.attempt(30)
    assert "saved_progress" not in setting.sample.metadata["retool"]
    finished = list(setting.finished)
    assert setting.attempt(None)
    assert setting.finished == finished + ["print(1)", "print(2)"]


def test_books_that_do_not_agree_are_not_continued(monkeypatch):
    setting = Setting(monkeypatch, TURNS["calls"])
    assert not setting.attempt(30)
    setting.sample.loss_mask.append(1)
    assert setting.attempt(None)
    assert setting.sample.metadata["retool"]["turns"] == 4


# Through vime's own rollouts -----------------------------------------------------------------------------------------

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def own_rollouts(tmp_path_factory):
    """The folder with what became of each run."""
    if not os.environ.get("VIME_ROOT") or not os.environ.get("RETOOL_QWEN3_TOKENIZER"):
        pytest.skip("VIME_ROOT and RETOOL_QWEN3_TOKENIZER name no vime checkout and no tokenizer to run rollouts with")
    folder = tmp_path_factory.mktemp("partial")
    folders = [os.environ["VIME_ROOT"], str(HERE.parent), str(HERE), str(HERE.parents[2] / "examples" / "retool")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, str(HERE / "partial_modes.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_vimes_own_rollouts_continue_what_they_aborted(own_rollouts, mode):
    whole, broken = (json.loads((own_rollouts / f"{mode}-{how}.json").read_text()) for how in ("whole", "broken"))
    assert len(whole["samples"]) == 8
    assert broken["samples"] == whole["samples"]
    codes = {f"print({number}, {call})" for number in range(8) for call in (1, 2)}
    assert codes <= set(whole["finished"]) and codes <= set(broken["finished"])
    assert broken["cut"] > whole["cut"] == 0, "nothing was aborted"
    for number in broken["started"]:  # a call is not made again where its episode is continued
        assert broken["finished"].count(f"print({number}, 1)") <= broken["started"].count(number)
