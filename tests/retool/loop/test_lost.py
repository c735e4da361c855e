"""A lost sample in a batch: vime converts the others as if it were not there, whatever it captures for the trainer."""

import asyncio
import base64
import io
import os
from types import SimpleNamespace

import generate_with_retool as plugin
import numpy
import pytest
import tool_sandbox
from newest import NewestSample, check_replay_data, convert
from retool import chat, engine
from scripted import Turn, call, check_sample

from vime.utils.types import Sample

ANSWER = f"So it is.\nAnswer: \\boxed{{42}}{chat.IM_END}"
EXPERTS = 16
MODES = {
    "plain": {},
    "top-p": dict(rollout_top_p=0.9),
    "experts": dict(use_rollout_routing_replay=True),
    "top-p and experts": dict(rollout_top_p=0.9, use_rollout_routing_replay=True),
}
NEWER_MODES = {
    "centering, top-k": dict(use_score_centering=True),
    "centering, top-p": dict(use_score_centering=True, rollout_top_p=0.9),
    "centering, top-k and experts": dict(use_score_centering=True, use_rollout_routing_replay=True),
}
# What the engine answers, and how it goes wrong: the last turn, or the tool's answer to it.
LOST = {
    "in the first turn": ["unusable"],
    "in the second turn": [call("1"), "unusable"],
    "in the third turn": [call("1"), call("2"), "unusable"],
    "to the sandbox": [call("1"), call("break it")],
    "to captures that do not fit": [call("1"), "misfit"],
    "to an abort of the engine's in the first turn": ["abort"],
    "to an abort of the engine's in the second turn": [call("1"), "abort"],
    "to answers that stay empty": ["", "", ""],
    "to a prompt without room": None,
}


def npy(array) -> str:
    raw = io.BytesIO()
    numpy.save(raw, array)
    return base64.b64encode(raw.getvalue()).decode()


class Batches:
    """Samples as `generate` leaves them, over an engine that sends all that a mode asks for."""

    def __init__(self, rollout, tool, monkeypatch, kind, mode):
        self.rollout, self.kind = rollout, kind
        self.mode = {"rollout_top_p": 1.0, "use_score_centering": False, "use_rollout_routing_replay": False} | mode
        self.mode |= {"score_centering_top_k": 2, "num_experts": EXPERTS}
        self.sends_sets = True
        if kind is NewestSample:
            monkeypatch.setattr(plugin, "score_centering_request", lambda args, params: {})

        def broken(code):
            if code == "break it":
                raise tool_sandbox.SandboxError("the worker is gone")
            return "1"

        tool.answer = broken

    def turn(self, text: str, payload) -> Turn:
        """One answer; "empty, no rows" is "" of an engine that sends no expert rows for it."""
        said = "" if text == "empty, no rows" else ANSWER if text in ("unusable", "misfit", "abort") else text
        ids = self.rollout.tokenizer.sampled(said)[: 9 if text == "abort" else None]
        values = [-(i + 1) / 1000 for i in range(len(ids))]
        content = [
            {"token_id": t, "logprob": v, "top_logprobs": [{"token_id": t + n, "logprob": v - n} for n in range(3)]}
            for t, v in zip(ids, values, strict=True)
        ]
        extra = {}
        if self.mode["rollout_top_p"] != 1 and self.sends_sets:
            extra["sampling_mask"] = [[t + 1, t] for t in ids]
            extra["sampling_mask_logprobs"] = [[-0.5, v] for v in values]
        if self.mode["use_rollout_routing_replay"] and text != "empty, no rows":
            start = payload["sampling_params"].get("routed_experts_prompt_start", 0)
            rows = len(payload["token_ids"]) + len(ids) - 1 - start + (text == "misfit")
            shape = (rows, 2, 2)
            extra["routed_experts"] = npy((numpy.arange(rows * 4).reshape(shape) % EXPERTS).astype(numpy.uint8))
        if text == "misfit" and "sampling_mask" in extra:
            extra["sampling_mask"].append([7])
            extra["sampling_mask_logprobs"].append([-0.1])
        unusable = text == "unusable" or (text == "misfit" and not extra)
        finish = "abort" if text == "abort" else "stop"
        return Turn(ids=ids, finish=finish, extra=extra, log_probs=None if unusable else {"content": content})

    def sample(self, texts: list[str] | None, index: int, **more):
        more |= {"max_tokens_per_gpu": 10} if texts is None else {}
        sample = self.kind(prompt="What is 6 * 7?", label="42", index=index, group_index=0, rollout_id=index)
        params = {"top_p": self.mode["rollout_top_p"]}
        script = lambda payload, turn: self.turn(texts[min(turn, len(texts) - 1)], payload)  # noqa: E731
        self.rollout.run(script, sample=sample, params=params, **self.mode, **more)
        if sample.reward is None and sample.status != Sample.Status.ABORTED:
            sample.reward = asyncio.run(plugin.reward_func(None, sample))
        return sample

    def batch(self, how: str) -> list:
        made = [self.sample(texts, i) for i, texts in enumerate([[call("1"), ANSWER], LOST[how]] * 2)]
        assert [sample.remove_sample for sample in made] == [False, True] * 2
        assert all(sample.metadata["retool"]["untrained"] for sample in made[1::2])
        return made


def orders(batch: list) -> list[list]:
    good, lost, other_good, other_lost = batch
    return [[good, lost], [lost, good], [lost, other_lost, good, other_good], [good, other_good, other_lost]]


def expected_fields(mode) -> set[str]:
    fields = {"rollout_log_probs"}
    if mode.get("rollout_top_p", 1) != 1:
        fields |= {"rollout_top_p_token_ids", "rollout_top_p_token_offsets"}
    return fields | ({"rollout_routed_experts"} if mode.get("use_rollout_routing_replay") else set())


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("mode", MODES | NEWER_MODES)
def test_the_newest_vime_converts_every_batch(rollout, tool, monkeypatch, mode, how):
    wanted = (MODES | NEWER_MODES)[mode]
    batches = Batches(rollout, tool, monkeypatch, NewestSample, wanted)
    args = SimpleNamespace(**batches.mode, num_layers=2, moe_router_topk=2)
    batch = batches.batch(how)
    for sample in batch:  # with --rollout-data-transport straw it looks before it masks what is removed
        check_replay_data(args, sample)
    for order in orders(batch):
        found = convert(args, order)
        assert not wanted.get("use_rollout_routing_replay") or len(found["rollout_routed_experts"]) == len(order)


@pytest.mark.parametrize(
    "texts", [["", call("1"), ANSWER], [call("1"), ""], [call("1"), "", ""], [call("1"), "empty, no rows"]]
)
@pytest.mark.parametrize("mode", MODES | NEWER_MODES)
def test_empty_answers_beside_others_are_no_reason_to_lose_a_sample(rollout, tool, monkeypatch, caplog, mode, texts):
    monkeypatch.setitem(tool_sandbox.TOOL_CONFIGS, "max_turns", max(2, len(texts)))
    wanted = (MODES | NEWER_MODES)[mode]
    kind = NewestSample if mode in NEWER_MODES else Sample
    batches = Batches(rollout, tool, monkeypatch, kind, wanted)
    args = SimpleNamespace(**batches.mode, num_layers=2, moe_router_topk=2)
    mixed, good = batches.sample(texts, 0), batches.sample([ANSWER], 1)
    assert not mixed.remove_sample and any(mixed.loss_mask) and not caplog.records
    check_sample(mixed, rollout.tokenizer)
    for order in ([mixed, good], [good, mixed]):
        convert(args, order)
        assert all(len(one.rollout_routed_experts) == len(one.tokens) - 1 for one in order if "experts" in mode)


def vimes_conversion(args, samples) -> dict:
    """Through vime's own code, and on to the tensors that the trainer gets."""
    ray_rollout = pytest.importorskip("vime.ray.rollout")
    manager = ray_rollout.RolloutManager.__ray_metadata__.modified_class
    stand_in = SimpleNamespace(
        args=args,
        custom_convert_samples_to_train_data_func=None,
        _post_process_rewards=lambda given: plugin.normalize_rewards(args, given),
    )
    data = manager._convert_samples_to_train_data(stand_in, samples)
    ray_rollout._tensorize_rollout_data_for_training(data)
    return data


@pytest.mark.skipif(not os.environ.get("VIME_ROOT"), reason="VIME_ROOT names no vime checkout to convert with")
@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("mode", MODES)
def test_vimes_own_conversion_takes_every_batch(rollout, tool, monkeypatch, mode, how):
    batches = Batches(rollout, tool, monkeypatch, Sample, MODES[mode])
    args = SimpleNamespace(
        **batches.mode,
        **dict(
            reward_key="score", advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True
        ),
        **dict(n_samples_per_prompt=2, rollout_batch_size=1, num_layers=2, moe_router_topk=2),
    )
    for order in orders(batches.batch(how)):
        data = vimes_conversion(args, order)
        assert expected_fields(MODES[mode]) <= set(data)
        for index, sample in enumerate(order):
            length = sample.response_length
            assert len(data["loss_masks"][index]) == len(data["rollout_log_probs"][index]) == length
            assert bool(data["loss_masks"][index].sum()) != sample.remove_sample
            if "rollout_routed_experts" in expected_fields(MODES[mode]):  # the trainer asserts it
                assert data["rollout_routed_experts"][index].shape == (len(sample.tokens) - 1, 2, 2)
                assert int(data["rollout_routed_experts"][index].max()) < EXPERTS
            if sample.remove_sample:
                assert data["rewards"][index] == 0


@pytest.mark.parametrize("known", ["before", "after"])
def test_an_engine_that_sends_no_sets_is_taken_at_its_word(rollout, tool, monkeypatch, known):
    """July's vime asks for no top-p sets, and goes without them for the whole batch if the first sample has none."""
    batches = Batches(rollout, tool, monkeypatch, Sample, MODES["top-p"])
    batches.sends_sets = False
    if known == "before":
        batches.sample([ANSWER], 0)
    monkeypatch.setattr(engine, "forget_engine", lambda: None)
    lost = batches.sample(["unusable"] if known == "before" else [call("1"), "unusable"], 1)
    assert lost.remove_sample and lost.rollout_top_p_token_ids is None and lost.rollout_top_p_token_offsets is None


def test_a_lost_sample_that_comes_back_brings_nothing_along(rollout, tool, monkeypatch):
    batches = Batches(rollout, tool, monkeypatch, NewestSample, NEWER_MODES["centering, top-k and experts"])
    lost = batches.sample([call("1"), "unusable"], 0)
    again = [call("2"), ANSWER]
    batches.rollout.run(lambda payload, turn: batches.turn(again[turn], payload), sample=lost, **batches.mode)
    fresh = batches.sample(again, 0)
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        assert getattr(lost, name) == getattr(fresh, name)
    for name in ("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_routed_experts"):
        assert numpy.array_equal(getattr(lost, name), getattr(fresh, name)), name
    assert not lost.remove_sample


# --- continued samples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES | NEWER_MODES)
def test_an_aborted_sample_ends_on_what_was_sampled_and_captured(rollout, tool, monkeypatch, mode):
    """An observation that no request has carried yet has no expert rows; it is added again when the sample goes on."""
    wanted = (MODES | NEWER_MODES)[mode]
    batches = Batches(rollout, tool, monkeypatch, NewestSample, wanted)
    args = SimpleNamespace(**batches.mode, num_layers=2, moe_router_topk=2)
    texts = [call("1"), call("2"), ANSWER]
    whole = batches.sample(texts, 0)

    sample, turns = NewestSample(prompt="What is 6 * 7?", label="42", index=0), iter(texts)
    params = {"top_p": batches.mode["rollout_top_p"]}
    for aborted_call in ("1", "2"):

        def execute(code, aborted_call=aborted_call):
            rollout.state.aborted = code == aborted_call
            return "1"

        rollout.state.aborted, tool.answer = False, execute
        rollout.run(
            lambda payload, turn: batches.turn(next(turns), payload),
            sample=sample,
            params=params,
            partial_rollout=True,
            **batches.mode,
        )
        assert sample.status == Sample.Status.ABORTED and sample.response.endswith("</tool_call>")
        assert sample.loss_mask[-1] == 1 and sample.metadata["retool"]["saved_progress"]["observation"][1]
        convert(args, [sample])
    rollout.state.aborted, tool.answer = False, "1"
    rollout.run(
        lambda payload, turn: batches.turn(next(turns), payload),
        sample=sample,
        params=params,
        partial_rollout=True,
        **batches.mode,
    )
    assert sample.response == whole.response and sample.tool_call_count == 2
    for name in ("tokens", "loss_mask", "rollout_log_probs", "status"):
        assert getattr(sample, name) == getattr(whole, name), name
    for name in REPLAY_DATA:
        mine, theirs = getattr(sample, name), getattr(whole, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or numpy.array_equal(mine, theirs), name
    convert(args, [sample, whole])


REPLAY_DATA = [f"rollout_{name}" for name in ("topk_token_ids", "topk_log_probs", "routed_experts")]
REPLAY_DATA += [f"rollout_top_p_{name}" for name in ("token_ids", "token_offsets", "log_probs")]


@pytest.mark.parametrize("begun", ["<", "</tool", "</code", "a < b <", ""])
@pytest.mark.parametrize("mode", MODES | NEWER_MODES)
def test_a_cut_turn_keeps_all_but_a_begun_stop_string(rollout, tool, monkeypatch, mode, begun):
    wanted = (MODES | NEWER_MODES)[mode]
    batches = Batches(rollout, tool, monkeypatch, NewestSample, wanted)
    args = SimpleNamespace(**batches.mode, num_layers=2, moe_router_topk=2)
    kept = "Let me think. " + begun.removesuffix("<").removesuffix("</tool").removesuffix("</code")

    def script(payload, index):
        if index == 0:
            rollout.state.aborted = True
            turn = batches.turn("Let me think. " + begun, payload)
            turn.finish = "abort"
            return turn
        raise AssertionError("asked again")

    sample = NewestSample(prompt="Q", label="42", index=0)
    params = {"top_p": batches.mode["rollout_top_p"]}
    rollout.run(script, sample=sample, params=params, partial_rollout=True, **batches.mode)
    assert sample.response == kept and sample.metadata["retool"]["turns"] == 1
    convert(args, [sample])
    if wanted.get("use_rollout_routing_replay"):
        assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1


def test_a_cut_turn_without_expert_rows_is_left_out_where_they_are_replayed(rollout, tool, monkeypatch):
    batches = Batches(rollout, tool, monkeypatch, NewestSample, MODES["experts"])

    def script(payload, index):
        rollout.state.aborted = True
        return Turn("Let me think. ", finish="abort")

    sample = NewestSample(prompt="Q", label="42", index=0)
    rollout.run(script, sample=sample, partial_rollout=True, **batches.mode)
    assert sample.response_length == 0 and sample.status == Sample.Status.ABORTED and not sample.remove_sample


def test_an_abort_of_the_engines_keeps_what_is_continued(rollout, tool, monkeypatch):
    """vime may train on the batch it lies in, or give it back to be continued: both must find it whole."""
    wanted = dict(rollout_top_p=0.9, use_rollout_routing_replay=True)
    for texts in (["abort"], [call("1"), "abort"]):
        batches = Batches(rollout, tool, monkeypatch, NewestSample, wanted)
        args = SimpleNamespace(**batches.mode, num_layers=2, moe_router_topk=2)
        good, cut = batches.sample([ANSWER], 0), batches.sample(texts, 1, partial_rollout=True)
        assert cut.remove_sample and cut.response_length and any(cut.loss_mask)
        log_probs, rows = list(cut.rollout_log_probs), cut.rollout_routed_experts
        assert len(rows) == len(cut.tokens) - 1
        text = rollout.tokenizer.decode(rollout.tokenizer.sampled(ANSWER)[9:])
        script = lambda payload, turn, batches=batches, text=text: batches.turn(text, payload)  # noqa: E731
        rollout.run(script, sample=cut, params={"top_p": 0.9}, partial_rollout=True, **batches.mode)
        assert cut.status == Sample.Status.COMPLETED and not cut.remove_sample and cut.response.endswith(ANSWER)
        assert cut.rollout_log_probs[: len(log_probs)] == log_probs
        convert(args, [cut, good])
        check_sample(cut, rollout.tokenizer)
