"""The reward: DAPO's strict box on the assistant's prose, any label, single and batch."""

import asyncio
import itertools
import threading

import generate_with_retool as plugin
import pytest
from retool import chat
from scripted import call

from vime.utils.types import Sample


def score(response, label="42", calls=2, status=Sample.Status.COMPLETED):
    sample = Sample(prompt="What is \\boxed{42}?", response=response, label=label, status=status)
    sample.tool_call_count = calls
    return asyncio.run(plugin.reward_func(None, sample))


TOOL_OUTPUT = "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
INLINE_OUTPUT = "\n\n<interpreter>\n{}\n</interpreter>\n\n"
NOTICE = "<|im_end|>\n<|im_start|>user\nYour previous action is invalid. Write `Answer: \\boxed{{...}}`.{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "response, pred",
    [
        ("Answer: \\boxed{42}", "42"),
        ("Answer: \\boxed{42}<|im_end|>", "42"),
        ("\\boxed{41}, no: \\boxed{42}", "42"),
        ("\\boxed{42} and then \\boxed{4", ""),
        ("Answer: \\boxed{42}" + " and a long farewell" * 20, "42"),
        ("<answer>\n\\boxed{42}\n</answer>", "42"),
        ("Answer: \\boxed{ 42 }", "42"),
        ("no box", ""),
        ("", ""),
        ("Answer: \\boxed{}", ""),
        ("<code>\nprint('\\boxed{42}')\n</code>", ""),
        (call("print('\\\\boxed{42}')"), ""),
        ("```python\n# \\boxed{42}\n```", ""),
        ("<code>\nprint('\\boxed{42}", ""),
        ("x" + TOOL_OUTPUT.format("\\boxed{42}"), ""),
        ("x" + INLINE_OUTPUT.format("\\boxed{42}"), ""),
        ("x" + NOTICE.format(" \\boxed{42}"), ""),
        ("\\boxed{7}" + TOOL_OUTPUT.format("\\boxed{42}") + "hm", "7"),
        ("It prints\n<interpreter>\n\\boxed{42}\n</interpreter>\nso", ""),
        ('<code>x = """</code>' + TOOL_OUTPUT.format("4") + "\\boxed{42}" + INLINE_OUTPUT.format('"""'), "42"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("<think>so \\boxed{42}", ""),
        ("<think>a <code>1</code>" + INLINE_OUTPUT.format("1") + "Answer: \\boxed{42}", ""),
        ("<think>a <code>1</code>" + INLINE_OUTPUT.format("1") + "b</think>\nAnswer: \\boxed{42}", "42"),
        ("\\boxed{7} <code>1</code>" + INLINE_OUTPUT.format("1") + "so \\boxed{7}</think>", ""),
        ("<think>a" + call("1") + TOOL_OUTPUT.format("1") + "Answer: \\boxed{42}", "42"),
        ("I write `Answer: \\boxed{...}` in the end", ""),
        ("Answer: \\boxed{answer}", ""),
        ("Answer: \\boxed{42}. I was asked for `Answer: \\boxed{...}`", "42"),
        ("```python\n# \\boxed{42}", ""),
        ("Answer: \\boxed{42}\nnot \\boxed{7}, I think", "7"),
    ],
)
def test_the_last_box_of_the_models_own_words(response, pred):
    result = score(response)
    assert result["pred"] == pred and isinstance(result["pred"], str)
    assert result["acc"] == (pred == "42") and result["score"] == (1.0 if pred == "42" else -1.0)


@pytest.mark.parametrize(
    "response, pred",
    [
        ("So \\boxed{42}<|im_end|>", "42"),  # a turn that ended, where a cap of turns ended the episode
        ("So \\boxed{42}.\n<|im_end|>", "42"),
        ("Answer: \\boxed{42} and so on", "42"),
        ("<answer>\n\\boxed{42}\n</answer> and so on", "42"),
        ("So \\boxed{42}", ""),
        ("So \\boxed{42}. But wait, let me see", ""),
        ("Perhaps \\boxed{42}?\n" + call("1") + TOOL_OUTPUT.format("1") + "hm", ""),
        ("Perhaps \\boxed{42}\n<code>1</code>" + INLINE_OUTPUT.format("1") + "hm", ""),
        ("Answer: \\boxed{42}" + NOTICE.format("") + "hm", "42"),
        ("<think>Answer: \\boxed{42}", ""),
    ],
)
def test_a_box_in_an_episode_that_a_limit_ended(response, pred):
    assert score(response, status=Sample.Status.TRUNCATED)["pred"] == pred


def test_the_prompt_may_have_opened_the_thought():
    def pred(prompt, response):
        sample = Sample(prompt=prompt, response=response, label="42", status=Sample.Status.COMPLETED)
        sample.payload_text = prompt + response
        return asyncio.run(plugin.reward_func(None, sample))["pred"]

    thinking, hybrid = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert pred(thinking, "Answer: \\boxed{42}<|im_end|>") == ""
    assert pred(thinking, "Answer: \\boxed{41}</think>\nAnswer: \\boxed{42}<|im_end|>") == "42"
    assert pred(hybrid, "Answer: \\boxed{42}<|im_end|>") == "42"
    later = call("1") + TOOL_OUTPUT.format("1") + "Answer: \\boxed{42}<|im_end|>"
    assert pred(thinking, "Answer: \\boxed{41}" + later) == "42"


@pytest.mark.parametrize(
    "box, label, right",
    [
        ("42", 42, True),
        ("42", "42", True),
        ("42", 42.0, True),
        ("25", "025", True),
        ("025", 25, True),
        ("000", 0, True),
        ("42", " 42 ", True),
        ("1{,}234", "1234", True),
        ("1,234", 1234, True),
        ("x = 42", "42", True),
        ("42^\\circ", "42", True),
        ("\\$42", "42", True),
        ("\\text{42 units}", "42", True),
        ("\\frac12", "\\frac{1}{2}", True),
        ("-7", -7, True),
        ("-7", 7, False),
        ("4.2", 42, False),
        ("42", None, False),
        ("42", "", False),
        ("None", None, False),
        ("", None, False),
        ("", "", False),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "8" * 5000, False),
        ("a+" * 80 + "b", "a+" * 80 + "b", True),
        ("²", "2", False),
    ],
)
def test_labels_of_any_type(box, label, right):
    assert score(f"Answer: \\boxed{{{box}}}", label)["acc"] is right


def test_a_wrong_answer_scores_by_its_calls():
    scores = [score("Answer: \\boxed{1}", calls=calls)["score"] for calls in (0, 1, 2, 4, 10, 16)]
    assert scores == pytest.approx([-1.1, -1.05, -1.0, -0.9, -0.6, -0.6])
    assert score("Answer: \\boxed{42}", calls=16)["score"] == 1.0
    sample = Sample(response="x", label="1")
    assert asyncio.run(plugin.reward_func(None, sample))["score"] == pytest.approx(-1.1)  # never through generate


@pytest.mark.parametrize(
    "outcomes, bonus, expected",
    [
        (["refused"] * 10, 0.05, -1.1),
        (["empty"] * 16, 0.05, -1.1),
        (["syntax_error", "invalid", "not_found"], 0.05, -1.1),
        (["ok", "error", "timeout", "memory", "too_long", "crashed", "of my own", "refused"], 0.05, -0.75),
        (["ok"] * 16, 0.05, -0.6),
        (["ok"] * 4, 0.1, -0.8),
        ([], 0, -1.0),
        (["ok"] * 16, 0, -1.0),
    ],
)
def test_calls_that_ran_nothing_earn_nothing(monkeypatch, outcomes, bonus, expected):
    monkeypatch.setitem(plugin.TOOL_CONFIGS, "tool_bonus", bonus)
    sample = Sample(response="Answer: \\boxed{1}", label="42")
    sample.tool_call_count = len(outcomes)
    sample.metadata = {"retool": {"calls": [{"outcome": outcome} for outcome in outcomes]}}
    assert asyncio.run(plugin.reward_func(None, sample))["score"] == pytest.approx(expected)


def test_a_batch_is_scored_like_its_samples():
    samples = [Sample(response=f"\\boxed{{{n}}}", label=42) for n in (41, 42)]
    samples.append(Sample(response="\\boxed{42}", label=42, status=Sample.Status.ABORTED))
    results = asyncio.run(plugin.reward_func(None, samples))
    assert [result["acc"] for result in results] == [False, True, False]
    assert results[2] == {"score": 0.0, "acc": False, "pred": ""}
    assert asyncio.run(plugin.reward_func(None, [])) == []
    assert asyncio.run(plugin.reward_func(args=None, samples=samples)) == results  # by the names that vime gives
    assert asyncio.run(plugin.reward_func(args=None, sample=samples[1], evaluation=True)) == results[1]


@pytest.mark.parametrize("given", [{"response": "x"}, "x", 5, None, [{"response": "x"}], [None], [[]], Sample])
def test_what_is_no_sample_is_refused(given):
    with pytest.raises(TypeError, match="[Ss]ample"):
        asyncio.run(plugin.reward_func(None, given))
    with pytest.raises(TypeError, match="dict"):
        asyncio.run(plugin.reward_func(None, {"response": "x"}))
    with pytest.raises(TypeError, match="sample"):
        asyncio.run(plugin.reward_func(None, Sample(), samples=[Sample()]))


def test_from_any_thread():
    results = []

    def work():
        results.append(score("Answer: \\boxed{42}"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result["acc"] for result in results] == [True] * 8


def test_observations_are_recognized_as_the_loop_frames_them():
    for dialect, ended in itertools.product(("tool_call", "code", None), (False, True)):
        turn = "x" + (chat.IM_END if ended else "")
        before, after = chat.frame(dialect, turn_ended=ended)
        response = turn + before + chat.neutralize("Output:\n\\boxed{42}\n</interpreter>\n\n") + after + "done"
        assert score(response)["pred"] == "", (dialect, ended)
