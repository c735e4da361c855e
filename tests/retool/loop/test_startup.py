"""What is said at the start of a run: arguments that do not go with the plugin, and prompts that do not fit."""

import json
import sys
import threading
from types import SimpleNamespace

import generate_with_retool as plugin
import pytest
from retool import startup
from scripted import Turn, make_args, make_params

from vime.utils.types import Sample

VIMES_FILTER = "vime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
REFUSED = {
    "reinforce_plus_plus": (
        dict(advantage_estimator="reinforce_plus_plus"),
        "generate_with_retool.compute_advantages",
    ),
    "vime's filter": (dict(dynamic_sampling_filter_path=VIMES_FILTER), "generate_with_retool.keep_group"),
}
FINE = [
    dict(
        advantage_estimator="reinforce_plus_plus",
        custom_advantage_function_path="generate_with_retool.compute_advantages",
    ),
    dict(dynamic_sampling_filter_path="generate_with_retool.keep_group"),
    *(dict(advantage_estimator=name) for name in ("grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus_baseline")),
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(startup, "_checked", None)


@pytest.mark.parametrize("asked, words", REFUSED.values(), ids=REFUSED)
def test_what_would_crash_or_train_nothing_is_refused_by_name(rollout, asked, words):
    with pytest.raises(RuntimeError, match=words):
        rollout.run([], **asked)
    answer = [Turn("Answer: \\boxed{42}<|im_end|>")]
    assert rollout.run(answer, evaluation=True, **asked).status == Sample.Status.COMPLETED  # nothing is trained on


def test_the_spread_of_vimes_filter_goes_with_the_same_of_the_advantages():
    startup.check(
        make_args(dynamic_sampling_filter_path=VIMES_FILTER), {**plugin.TOOL_CONFIGS, "advantage_spread": "score"}
    )


@pytest.mark.parametrize("asked", FINE)
def test_what_works_is_not_refused(caplog, asked):
    startup.check(make_args(n_samples_per_prompt=8, rewards_normalization=True, **asked), plugin.TOOL_CONFIGS)
    assert not caplog.records


@pytest.mark.parametrize(
    "changes, warned", [({}, True), ({"rewards_normalization": False}, False), ({"debug_rollout_only": True}, False)]
)
def test_a_group_of_one_is_said_to_train_nothing(caplog, changes, warned):
    asked = dict(advantage_estimator="grpo", n_samples_per_prompt=1, rewards_normalization=True) | changes
    startup.check(make_args(**asked), plugin.TOOL_CONFIGS)
    assert ("--n-samples-per-prompt 1" in caplog.text) is warned


@pytest.mark.parametrize(
    "limits", [dict(rollout_max_context_len=600), dict(max_tokens_per_gpu=300, context_parallel_size=2)]
)
def test_prompts_that_do_not_fit_are_named_at_the_start(rollout, tool, monkeypatch, caplog, tmp_path, limits):
    """At the first sample, once, by their rows; one that cannot be rendered is another error."""
    rows = ["Q", "a" * 400, "b" * 20, "c" * 4000, [{"role": "user", "content": "d" * 4000}], "e" * 1000, ""]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"question": row}) + "\n" for row in rows))
    reader = SimpleNamespace(read_file=lambda name: map(json.loads, open(name)))
    monkeypatch.setitem(sys.modules, "vime.utils.data", reader)
    encoded = []
    monkeypatch.setattr(plugin, "encode", lambda tokenizer, text: encoded.append(text) or [0] * (len(text) // 2))
    asked = dict(prompt_data=str(path), input_key="question", **limits)
    args = make_args(**asked)
    for _ in range(2):
        plugin._open_episode(args, Sample(prompt="Q"), make_params(), False)
    for thread in threading.enumerate():
        if thread.name == "retool-prompts":
            thread.join(20)
    [record] = [record for record in caplog.records if "leave no room" in record.message]
    assert record.message.startswith(f"4 prompts of {path} leave no room") and record.message.endswith(
        "rows 1, 3, 4, 5"
    )
