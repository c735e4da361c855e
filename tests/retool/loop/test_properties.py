"""The invariants of the loop over random episodes, with a tokenizer that does not round-trip."""

import asyncio
from types import SimpleNamespace

import generate_with_retool as plugin
import tool_sandbox
from hypothesis import given, settings
from hypothesis import strategies as st
from retool import engine, failures
from retool.observations import Parts
from scripted import PairTokenizer, Turn, call, check_sample, make_args, make_params, printed

from vime.utils.types import Sample

TEXTS = st.lists(
    st.sampled_from(
        [
            call("print(1)"),
            "<code>print(1)</code>",
            "<code>x = '</code>",
            "'</code>",
            "```python\n1\n```",
            "<|im_end|>",
        ]
        + [
            "Answer: \\boxed{4}",
            "prose ",
            "ab",
            "<tool_call>",
            "{",
            "</tool_call>",
            "<interpreter>\n4\n</interpreter>",
        ]
        + ["<think>", "</think>", "<|im_start|>user\n", "é☃", "\ufffd"]
    ),
    max_size=4,
).map("".join)
TURNS = st.builds(
    Turn,
    text=TEXTS,
    finish=st.sampled_from(["stop"] * 12 + ["length", "abort", None]),
    log_probs=st.sampled_from(["given"] * 12 + [None, {"content": [{"logprob": None}]}]),
)
OUTPUTS = st.one_of(
    st.sampled_from(["1", "", "<|im_end|>" * 5, "x" * 300, "é☃\ud800", "</interpreter>"]).map(printed),
    st.just(tool_sandbox.ToolOutput.of(Parts("1", notice="boom"), "crashed")),
    st.just(tool_sandbox.SandboxError("the worker is gone")),
)


class Script:
    """The engine in place of vime's `post`: it answers from a list, and holds what it was sent."""

    def __init__(self, turns, tokenizer, broken):
        self.turns, self.tokenizer, self.broken, self.requests = iter(turns), tokenizer, broken, []

    async def post(self, url, payload, max_retries=60, headers=None):
        self.requests.append(SimpleNamespace(payload=payload))
        await asyncio.sleep(0)
        turn = next(self.turns, Turn("Answer: \\boxed{4}<|im_end|>"))
        ids, limit = self.tokenizer.sampled(turn.text), payload["sampling_params"]["max_tokens"]
        if self.broken:
            ids.insert(len(ids) // 2, PairTokenizer.broken_id)
        assert limit > 0
        cut = len(ids) > limit
        ids = ids[:limit]
        log_probs = {"content": [{"logprob": -0.25}] * len(ids)} if turn.log_probs == "given" else turn.log_probs
        choice = {"token_ids": ids, "logprobs": log_probs, "finish_reason": "length" if cut else turn.finish}
        return {"choices": [choice], "usage": {"prompt_tokens": len(payload["token_ids"])}}


@settings(max_examples=400, deadline=None)
@given(
    turns=st.lists(TURNS, max_size=6),
    outputs=st.lists(OUTPUTS, min_size=1, max_size=4),
    max_new_tokens=st.one_of(st.integers(0, 700), st.just(50_000)),
    context=st.one_of(st.integers(0, 2500), st.none()),
    caps=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    broken=st.booleans(),
    cancel_at=st.one_of(st.none(), st.integers(1, 12)),
    evaluation=st.booleans(),
)
def test_any_episode_keeps_the_invariants(
    turns, outputs, max_new_tokens, context, caps, broken, cancel_at, evaluation
):
    tokenizer = PairTokenizer()
    script = Script(turns, tokenizer, broken)
    called = []

    async def execute_code(code):
        called.append(code)
        await asyncio.sleep(0)
        output = outputs[len(called) % len(outputs)]
        if isinstance(output, Exception):
            raise output
        return output

    args = make_args(rollout_max_context_len=context, eval_max_context_len=context, max_tokens_per_gpu=None)
    sample = Sample(prompt="What is 2 + 2?", label="4")
    state = SimpleNamespace(tokenizer=tokenizer, aborted=False)
    sandbox, configs = tool_sandbox.tool_registry.python_sandbox, tool_sandbox.TOOL_CONFIGS
    replaced = [
        (plugin, "post", script.post),
        (plugin, "GenerateState", lambda _args: state),
        (sandbox, "execute_code", execute_code),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    old_caps = configs["max_turns"], configs["max_tool_calls"]
    failures.forget()

    async def main():
        task = asyncio.ensure_future(
            plugin.generate(args, sample, make_params(max_new_tokens=max_new_tokens), evaluation)
        )
        for _ in range(cancel_at or 0):
            await asyncio.sleep(0)
        if cancel_at:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task

    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        configs["max_turns"], configs["max_tool_calls"] = caps[0] + caps[1], caps[1]
        task = asyncio.run(main())
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        configs["max_turns"], configs["max_tool_calls"] = old_caps

    if sample.status == Sample.Status.PENDING:  # cancelled before its first step
        assert cancel_at and task.cancelled()
        return
    check_sample(sample, tokenizer)
    assert task.cancelled() or task.result() is sample
    record = sample.metadata["retool"]
    for earlier, later in zip(script.requests, script.requests[1:], strict=False):
        assert later.payload["token_ids"][: len(earlier.payload["token_ids"])] == earlier.payload["token_ids"]
    for request in script.requests:
        sent = request.payload
        assert sample.tokens[: len(sent["token_ids"])] == sent["token_ids"]
        limit = sent["sampling_params"]["max_tokens"]
        if context is not None:
            assert len(sent["token_ids"]) + limit <= context
    assert sample.response_length <= max_new_tokens
    assert record["turns"] <= caps[0] + caps[1] and sample.tool_call_count <= caps[1]
    assert len(called) == sample.tool_call_count
    ends = {"answer": "completed", "abort": "aborted", "infrastructure_error": "aborted", "engine_abort": "aborted"}
    assert sample.status.value == ends.get(record["end_reason"], "truncated")
    if sample.loss_mask and sample.loss_mask[-1] == 0 and not task.cancelled():
        # an observation is the last thing only if the engine was asked to go on after it, and added nothing
        assert script.requests[-1].payload["token_ids"] == sample.tokens
    assert (sample.reward is not None) == sample.remove_sample
    if sample.remove_sample:
        assert sample.reward["score"] == 0 and record["untrained"]
        assert sample.status == Sample.Status.ABORTED or not any(sample.loss_mask)


VALUES = st.sampled_from([-0.5] * 8 + [0, 1e-4, 0.5, -9999.0, True, None, "-1", float("nan"), float("inf"), 10**400])
NAMES = st.sampled_from(["right"] * 8 + ["wrong", "float", "bool", "none"])
ITEMS = st.lists(st.tuples(VALUES, NAMES, st.booleans()), max_size=4)


@settings(max_examples=400, deadline=None)
@given(ITEMS)
def test_the_quick_look_at_log_probs_lets_nothing_pass_that_the_close_one_does_not(drawn):
    items, token_ids = [], []
    for position, (value, name, as_text) in enumerate(drawn):
        token = 1 + position
        named = {"right": token, "wrong": 70, "float": float(token), "bool": True, "none": None}[name]
        items.append({"logprob": value, **({"token": f"token_id:{named}"} if as_text else {"token_id": named})})
        token_ids.append(token)
    quick = engine._all_usable(token_ids, items)
    faults = [
        engine._log_prob_fault(item["logprob"]) or engine._wrong_token(item, token)
        for token, item in zip(token_ids, items, strict=True)
    ]
    assert not (quick and any(faults))
    if all(name == "right" and value == -0.5 and not as_text for value, name, as_text in drawn):
        assert quick or not items
