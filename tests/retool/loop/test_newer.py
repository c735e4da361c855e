"""What depends on the model's template and on the age of vime: thinking models, score centering, expert rows,
prompts."""

import asyncio
import base64
import io
import re
from types import SimpleNamespace

import generate_with_retool as plugin
import numpy
import pytest
import tool_sandbox
from retool import chat
from retool.actions import Answer
from scripted import PairTokenizer, Rollout, Turn, call, check_token_in_token_out

from vime.utils.types import Sample

END = chat.IM_END
ANSWER = Turn(f"So it is.\nAnswer: \\boxed{{42}}{END}")


def assert_lost(sample):
    assert sample.status == Sample.Status.ABORTED and sample.remove_sample and sample.reward["score"] == 0


# --- thinking models -------------------------------------------------------------------------------------------------

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
OPEN_THOUGHT = "<think>\n"


class Templated(PairTokenizer):
    """A tokenizer with a chat template of its own."""

    def __init__(self, opening):
        self.chat_template, self.opening, self.asked = "yes", opening, []

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **kwargs):
        assert tokenize is False and add_generation_prompt is True
        self.asked.append(kwargs)
        return "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n" + self.opening(**kwargs)


def hybrid(enable_thinking=True, **_kwargs):
    return "" if enable_thinking else EMPTY_THOUGHT


def always(**_kwargs):
    return OPEN_THOUGHT


def prompt_and_response(sample):
    return sample.payload_text.removesuffix(sample.response), sample.response


@pytest.mark.parametrize(
    "template, kwargs, opening",
    [
        (hybrid, {}, ""),
        (hybrid, None, ""),
        (hybrid, {"enable_thinking": True}, ""),
        (hybrid, {"enable_thinking": False}, EMPTY_THOUGHT),
        (always, {}, OPEN_THOUGHT),
    ],
)
def test_every_assistant_turn_opens_as_the_models_template_opens_it(monkeypatch, tool, template, kwargs, opening):
    rollout = Rollout(monkeypatch, Templated(template))
    last = Turn(f"So</think>\n{ANSWER.text}") if opening == OPEN_THOUGHT else ANSWER  # no answer stands in a thought
    first = Turn("</think>" * (opening == OPEN_THOUGHT) + call("1"))  # nor does a call of this dialect
    turns = [first, Turn(f"hm{END}"), Turn("<code>2</code>"), last]
    sample = rollout.run(turns, apply_chat_template_kwargs=kwargs)
    rollout.close()
    prompt, response = prompt_and_response(sample)
    assert prompt.endswith(chat.OPEN_TURN + opening)
    pieces = response.split(chat.OPEN_TURN)
    assert len(pieces) == 3 and all(piece.startswith(opening) for piece in pieces[1:])
    assert "</code>\n\n<interpreter>\n42\n</interpreter>\n\nSo" in response  # the same assistant turn
    trained = [t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
    assert rollout.tokenizer.decode(trained) == "".join(turn.text for turn in turns)
    check_token_in_token_out(sample, rollout.requests)
    assert len(rollout.tokenizer.asked) == 1  # once per process, not per sample or turn


def test_a_sample_may_have_template_arguments_of_its_own(monkeypatch, tool):
    rollout = Rollout(monkeypatch, Templated(hybrid))
    sample = Sample(prompt="Q")
    sample.apply_chat_template_kwargs = {"enable_thinking": False}
    rollout.run([ANSWER], sample=sample, apply_chat_template_kwargs={"enable_thinking": True})
    rollout.close()
    assert prompt_and_response(sample)[0].endswith(EMPTY_THOUGHT)


def test_a_rendered_prompt_keeps_its_opening(monkeypatch, tool):
    rollout = Rollout(monkeypatch, Templated(always))
    rendered = chat.render_prompt("Q", tool_sandbox.tool_registry.get_tool_specs(), OPEN_THOUGHT)
    sample = rollout.run([Turn(f"So</think>\n{ANSWER.text}")], sample=Sample(prompt=rendered))
    rollout.close()
    assert prompt_and_response(sample)[0] == rendered and sample.status == Sample.Status.COMPLETED


def test_the_models_own_thought_is_read_as_one(monkeypatch, tool):
    """Its opening tag stands in the prompt, or in an observation's frame: what it closes is a thought all the same."""
    read = []
    real = plugin.actions.read_action

    def read_action(text, *more, **named):
        read.append(text)
        return real(text, *more, **named)

    monkeypatch.setattr(plugin.actions, "read_action", read_action)
    rollout = Rollout(monkeypatch, Templated(always))
    turns = [
        Turn(f"Answer: \\boxed{{1}}?\n</think>\n\nLet me see. {call('1')}"),
        Turn("<code>2</code>"),
        Turn(f"Answer: \\boxed{{2}}?</think>\nAnswer: \\boxed{{42}}{END}"),
    ]
    sample = rollout.run(turns)
    rollout.close()
    assert [text.startswith(OPEN_THOUGHT) for text in read] == [True] * 3  # the third goes on in an open thought
    assert tool.codes == ["1", "2"] and plugin.actions.read_action(read[-1], tools={}).action == Answer("42")
    assert turns[0].text in sample.response and turns[2].text in sample.response  # as sampled
    read.clear()
    rollout = Rollout(monkeypatch, Templated(always))
    rollout.run([Turn("hm</think><code>1</code>"), ANSWER])
    rollout.close()
    assert [text.startswith(OPEN_THOUGHT) for text in read] == [True, False]


def test_qwen3s_own_templates(qwen3_tokenizer):
    """The hybrid's, from its checkpoint, and that of the models that always think, which differs in this place
    only."""
    open_ = chat.read_template_prefix
    assert open_(qwen3_tokenizer, {}) == open_(qwen3_tokenizer, {"enable_thinking": True}) == ""
    assert open_(qwen3_tokenizer, {"enable_thinking": False}) == EMPTY_THOUGHT
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    for kwargs in ({}, {"enable_thinking": False}):
        rendered = qwen3_tokenizer.apply_chat_template(
            messages, tools=[chat.CODE_INTERPRETER], tokenize=False, add_generation_prompt=True, **kwargs
        )
        opening = open_(qwen3_tokenizer, kwargs)
        assert chat.render_prompt(messages, [chat.CODE_INTERPRETER], opening) == rendered
        call_turn = {"role": "assistant", "content": chat.tool_call_text("code_interpreter", {"code": "1"})}
        shown = [*messages, call_turn, {"role": "tool", "content": "Output:\n42"}]
        longer = qwen3_tokenizer.apply_chat_template(
            shown, tools=[chat.CODE_INTERPRETER], tokenize=False, add_generation_prompt=True, **kwargs
        )
        before, after = chat.frame("tool_call", turn_ended=False, template_prefix=opening)
        assert longer.endswith(call_turn["content"] + before + "Output:\n42" + after)


# --- newer vime ------------------------------------------------------------------------------------------------------


class NewSample(Sample):
    """Notes what it is given; what newer vime does with it is vime's."""

    rollout_topk_token_ids = rollout_topk_log_probs = rollout_top_p_log_probs = None

    def append_response_tokens(self, args=None, *, meta_info=None, **keywords):
        self.__dict__.setdefault("seen", []).append((keywords, meta_info))
        known = {key: value for key, value in (meta_info or {}).items() if not key.startswith("score_centering")}
        if "routed_experts" in known:
            self.rows = known.pop("routed_experts_start_len", 0) + len(known.pop("routed_experts"))
        super().append_response_tokens(args, meta_info=known if meta_info is not None else None, **keywords)

    rows = 0

    def get_rollout_routed_experts_length(self):
        return self.rows


@pytest.fixture
def centering(monkeypatch):
    """vime's check of the parameters, which newer vimes bring along."""
    checked = []

    def score_centering_request(args, sampling_params):
        sampling_params.setdefault("temperature", 1.0)
        checked.append(sampling_params)

    monkeypatch.setattr(plugin, "score_centering_request", score_centering_request)
    return checked


@pytest.mark.parametrize("named", ["token_id", "token"])
def test_score_centering_keeps_the_most_likely_tokens(rollout, tool, centering, named):
    def log_probs(ids):
        def entry(token, value):
            return (
                {"token_id": token, "logprob": value}
                if named == "token_id"
                else {
                    "token": f"token_id:{token}",
                    "logprob": value,
                }
            )

        content = []
        for token in ids:  # the sampled token is the least likely of them
            top = [entry(token, -3.0), entry(token + 1, -0.5), entry(token + 2, -1.0), entry(token + 3, -2.0)]
            content.append({**entry(token, -3.0), "top_logprobs": top})
        return {"content": content}

    sample = NewSample(prompt="Q")
    script = [Turn(call("1"), log_probs=log_probs), Turn(ANSWER.text, log_probs=log_probs)]
    rollout.run(script, sample=sample, use_score_centering=True, score_centering_top_k=3, rollout_top_p=1.0)
    assert [request.payload["sampling_params"]["logprobs"] for request in rollout.requests] == [4, 4]
    assert len(centering) == 2
    (turn, meta), (observation, nothing), _last = sample.seen
    ids, values = meta["score_centering_topk"]
    count = len(turn["tokens"])
    assert ids.shape == values.shape == (count, 3) and ids.dtype == numpy.int32 and values.dtype == numpy.float32
    assert ids.tolist() == [[token + 1, token + 2, token + 3] for token in turn["tokens"]]
    assert values.tolist() == [[-0.5, -1.0, -2.0]] * count
    assert observation["trainable"] is False and nothing is None
    assert set(turn["log_probs"]) == {-3.0}


def test_score_centering_under_top_p_takes_the_log_probs_of_the_cut_distribution(rollout, tool, centering):
    ids = rollout.tokenizer.sampled(ANSWER.text)
    extra = {
        "sampling_mask": [[token + 1, token] for token in ids],
        "sampling_mask_logprobs": [[-0.2, -1.7] for _ in ids],
    }
    sample = NewSample(prompt="Q")
    rollout.run([Turn(ANSWER.text, extra=extra)], sample=sample, use_score_centering=True, rollout_top_p=0.9)
    assert rollout.requests[0].payload["sampling_params"]["logprobs"] == 1
    (turn, meta) = sample.seen[0]
    kept, offsets, values = meta["score_centering_top_p"]
    assert turn["log_probs"] == [-1.7] * len(ids)
    assert kept.tolist() == [token for pair in extra["sampling_mask"] for token in pair]
    assert offsets.tolist() == list(range(0, 2 * len(ids) + 1, 2))
    assert numpy.allclose(values, [-0.2, -1.7] * len(ids))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_an_engine_without_the_distribution_loses_the_sample(rollout, tool, centering, caplog, top_p):
    sample = NewSample(prompt="Q")
    rollout.run([ANSWER], sample=sample, use_score_centering=True, score_centering_top_k=3, rollout_top_p=top_p)
    assert_lost(sample)
    assert "score centering cannot read it" in caplog.text and sample.response_length == 0


def test_what_is_not_supported_is_refused_by_name(rollout, monkeypatch):
    monkeypatch.setattr(plugin, "score_centering_request", None)
    with pytest.raises(RuntimeError, match="--use-score-centering"):
        rollout.run([], use_score_centering=True, score_centering_top_k=3, rollout_top_p=1.0)


OURS = "generate_with_retool.normalize_rewards"
VIMES = "vime.rollout.on_policy_distillation.post_process_rewards"


@pytest.mark.parametrize("hook", [None, OURS, VIMES])
@pytest.mark.parametrize("kind", ["vllm", None])
def test_a_served_teacher_is_refused_at_the_first_sample(rollout, hook, kind):
    """vime's loss would miss the teacher's log-probs after the first rollout, or its hook fail on the first lost
    sample."""
    with pytest.raises(RuntimeError, match="--use-opd with a served teacher"):
        rollout.run([], use_opd=True, opd_type=kind, custom_reward_post_process_path=hook)


@pytest.mark.parametrize(
    "asked",
    [
        dict(use_opd=True, opd_type="megatron", custom_reward_post_process_path=OURS),
        dict(use_opd=True, opd_type="vllm", custom_reward_post_process_path="mine.ask_the_teacher"),
        dict(use_opd=False, opd_type="vllm", custom_reward_post_process_path=OURS),
    ],
)
def test_a_teacher_that_can_be_asked_is_not_refused(rollout, tool, asked):
    assert rollout.run([ANSWER], **asked).status == Sample.Status.COMPLETED


def test_each_turn_draws_with_numbers_of_its_own(rollout, tool):
    """An engine begins its random stream anew with each request, and vime sends one seed per sample."""

    def seeds(params, first="<code>1</code>", second="<code>2</code>"):
        rollout.run([Turn(first), Turn(second), ANSWER], params=params)
        return [request.payload["sampling_params"].get("seed") for request in rollout.requests]

    first = seeds({"seed": 1234})
    assert first[0] == 1234 and len(set(first)) == 3 and first == seeds({"seed": 1234})
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in first)
    assert not set(first[1:]) & set(seeds({"seed": 1235})[1:])
    assert seeds({}) == [None] * 3
    one_turn = seeds({"seed": 0}, first="<code>\ns = '</code>", second="'\n</code>")  # in two requests
    assert one_turn[0] == 0 and len(set(one_turn)) == 3


def npy(array):
    raw = io.BytesIO()
    numpy.save(raw, array)
    return base64.b64encode(raw.getvalue()).decode()


@pytest.mark.parametrize("replay, knows_parts", [(True, True), (False, True), (True, False)])
def test_expert_rows_are_fetched_once(rollout, tool, replay, knows_parts):
    turns = [Turn(call("1")), Turn(call("2")), ANSWER]
    starts = []

    def script(payload, index):
        ids = rollout.tokenizer.sampled(turns[index].text)
        start = payload["sampling_params"].get("routed_experts_prompt_start", 0)
        starts.append(start)
        rows = len(payload["token_ids"]) + len(ids) - 1 - start
        return Turn(turns[index].text, extra={"routed_experts": npy(numpy.full((rows, 2, 2), index, numpy.uint8))})

    sample = (NewSample if knows_parts else Sample)(prompt="Q")
    rollout.run(script, sample=sample, use_rollout_routing_replay=replay)
    if not (replay and knows_parts):
        assert starts == [0, 0, 0]
        return
    ends = [len(request.payload["token_ids"]) for request in rollout.requests]
    ends = [end + len(rollout.tokenizer.sampled(turn.text)) - 1 for end, turn in zip(ends, turns, strict=True)]
    assert starts == [0, *ends[:-1]] and sample.rows == ends[-1] == len(sample.tokens) - 1


@pytest.mark.parametrize("with_mapping", [True, False])
def test_unknown_sampling_parameters_are_passed_on_untouched(rollout, tool, monkeypatch, with_mapping):
    if not with_mapping:
        monkeypatch.setattr(plugin, "vllm_rollout", SimpleNamespace())
    given = {"min_p": 0.05, "logit_bias": {"7": -1.0}, "presence_penalty": 0.0, "not_given": None}
    rollout.run([ANSWER], params={**given, "custom_params": {"own": 1}})
    sent = rollout.requests[0].payload["sampling_params"]
    assert {name: sent[name] for name in ("min_p", "logit_bias", "presence_penalty")} == {
        name: given[name] for name in ("min_p", "logit_bias", "presence_penalty")
    }
    assert not {"not_given", "custom_params", "no_stop_trim", "max_new_tokens"} & set(sent)


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, words",
    [
        ("", "the prompt is empty"),
        (" \n", "the prompt is empty"),
        (None, "not NoneType"),
        (7, "not int"),
        ({"role": "user", "content": "Q"}, "not dict"),
        ([], "holds no question"),
        ([{"role": "system", "content": "S"}], "holds no question"),
        ([{"role": "user", "content": ""}], "holds no question"),
        (["Q"], "not str"),
        ([{"role": "user", "content": 7}], "must be text, not int"),
        ([{"role": "wizard", "content": "Q"}], "the role 'wizard'"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named_by_row_and_field(rollout, prompt, words):
    with pytest.raises(ValueError, match=rf"row 17 .*'question' \(--input-key\).*{re.escape(words)}"):
        rollout.run([], sample=Sample(prompt=prompt, index=17), input_key="question")


# --- the output of tools ---------------------------------------------------------------------------------------------


def test_the_output_of_any_tool_is_bounded_before_it_is_read(rollout, monkeypatch):
    """6 MB of it would keep the loop busy for half a minute."""
    longest = []

    class Measured(PairTokenizer):
        def __call__(self, text, add_special_tokens=True):
            longest.append(len(text))
            return super().__call__(text, add_special_tokens)

    async def dump(arguments):
        return "<|im_end|>" + "0123456789" * 600_000 + "the end"

    monkeypatch.setattr(plugin, "neutralize", lambda text: longest.append(len(text)) or chat.neutralize(text))
    registry = tool_sandbox.ToolRegistry()
    spec = {"type": "function", "function": {"name": "dump", "description": "", "parameters": {}}}
    registry.register_tool("dump", spec, dump)
    monkeypatch.setattr(plugin, "tool_registry", registry)
    rollout = Rollout(monkeypatch, Measured())
    sample = rollout.run([Turn('<tool_call>\n{"name": "dump", "arguments": {}}\n</tool_call>'), ANSWER])
    rollout.close()
    most = tool_sandbox.TOOL_CONFIGS["max_output_chars"]
    assert max(longest) < most + 5000  # the prompt is among them
    assert sample.metadata["retool"]["calls"][0]["output_chars"] <= most
    assert "characters left out" in sample.response and "the end\n</tool_response>" in sample.response
    observation, _done = asyncio.run(
        plugin.execute_predictions('<tool_call>\n{"name": "dump", "arguments": {}}\n</tool_call>')
    )
    assert len(observation) < most + 200


def test_the_frame_of_an_observation_is_encoded_once(monkeypatch, tool):
    frames = []

    class Counting(PairTokenizer):
        def __call__(self, text, add_special_tokens=True):
            if text == "".join(chat.frame("tool_call", turn_ended=False)):
                frames.append(text)
            return super().__call__(text, add_special_tokens)

    rollout = Rollout(monkeypatch, Counting())
    for _ in range(3):
        rollout.run([Turn(call("1")), Turn(call("2")), Turn(call("3")), ANSWER])
    rollout.close()
    assert len(frames) == 1
