"""The stand-in of vime against the real vime: same names, same signatures, same results. Needs VIME_ROOT."""

import importlib
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from scripted import make_args, make_params

STANDIN = Path(__file__).parents[1] / "standin"
MODULES = [
    "vime.utils.types",
    "vime.utils.http_utils",
    "vime.utils.misc",
    "vime.utils.async_utils",
    "vime.rollout.base_types",
    "vime.rollout.rm_hub.math_dapo_utils",
    "vime.rollout.vllm_rollout",
]

pytestmark = pytest.mark.skipif(
    not os.environ.get("VIME_ROOT"), reason="VIME_ROOT names no vime checkout to hold the stand-in against"
)


@pytest.fixture(scope="module")
def pairs():
    """(real module, stand-in module) by name, both loaded beside each other."""
    real = {name: importlib.import_module(name) for name in MODULES}
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "vime" or name.startswith("vime.")}
    sys.path.insert(0, str(STANDIN))
    try:
        standin = {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(STANDIN))
        for name in [name for name in sys.modules if name == "vime" or name.startswith("vime.")]:
            del sys.modules[name]
        sys.modules.update(hidden)
    assert all(str(STANDIN) in module.__file__ for module in standin.values())
    return {name: (real[name], standin[name]) for name in MODULES}


def own_names(module: ModuleType):
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and (not name.startswith("_") or name in PRIVATE)
    ]


PRIVATE = {"_build_inference_sampling_params"}


@pytest.mark.parametrize("name", MODULES)
def test_names_and_parameters(pairs, name):
    real, standin = pairs[name]
    for attribute in own_names(standin):
        assert hasattr(real, attribute), f"vime has no {name}.{attribute}"
        mine, theirs = getattr(standin, attribute), getattr(real, attribute)
        if inspect.isfunction(mine):
            expected = list(inspect.signature(inspect.unwrap(theirs)).parameters)
            assert list(inspect.signature(mine).parameters) == expected, attribute
            assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(inspect.unwrap(theirs)), attribute


def test_the_sample_has_vimes_fields(pairs):
    real, standin = pairs["vime.utils.types"]
    theirs, mine = real.Sample(), standin.Sample()
    for field, value in vars(mine).items():
        if field in ("status", "spec_info", "prefix_cache_info"):
            continue
        assert getattr(theirs, field) == value, field
    assert {s.value for s in standin.Sample.Status} == {s.value for s in real.Sample.Status}
    for inner in ("SpecInfo", "PrefixCacheInfo"):
        assert vars(getattr(standin.Sample, inner)()) == vars(getattr(real.Sample, inner)())


FINISH = {"finish_reason": {"type": "stop"}, "prompt_tokens": 5, "cached_tokens": 2, "weight_version": "v1"}
APPENDS = {
    "trainable": [dict(tokens=[1, 2], log_probs=[-0.1, -0.2], meta_info=FINISH, text="ab")],
    "observation": [dict(tokens=[1], log_probs=[-0.1]), dict(tokens=[2, 3], trainable=False, text="x")],
    "nothing": [dict()],
    "empty turn": [dict(tokens=[], log_probs=[], meta_info=FINISH, text="")],
    "length": [dict(tokens=[1], log_probs=[0], meta_info={"finish_reason": {"type": "length"}})],
    "abort": [dict(tokens=[1], log_probs=[0], meta_info={"finish_reason": {"type": "abort"}})],
    "no log-probs": [dict(tokens=[1])],
    "short log-probs": [dict(tokens=[1, 2], log_probs=[0.0])],
    "observation with log-probs": [dict(tokens=[1], log_probs=[0.0], trainable=False)],
    "top-p": [
        dict(
            tokens=[1, 2], log_probs=[0, 0], meta_info={"top_p_token_ids": [7, 8, 9], "top_p_token_offsets": [0, 1, 3]}
        ),
        dict(tokens=[3], trainable=False),
        dict(tokens=[4], log_probs=[0], meta_info={"top_p_token_ids": [6], "top_p_token_offsets": [0, 1]}),
    ],
    "top-p of the wrong length": [
        dict(tokens=[1, 2], log_probs=[0, 0], meta_info={"top_p_token_ids": [7], "top_p_token_offsets": [0, 1]})
    ],
    "top-p without offsets": [dict(tokens=[1], log_probs=[0], meta_info={"top_p_token_ids": [7]})],
    "speculation": [
        dict(tokens=[1], log_probs=[0], meta_info={**FINISH, "spec_accept_token_num": 3, "completion_tokens": 1})
    ],
}


def appended(Sample, appends):
    import numpy

    sample = Sample(tokens=[100, 101], loss_mask=[], rollout_log_probs=[])
    error = None
    try:
        for keywords in appends:
            sample.append_response_tokens(make_args(vllm_speculative_config="on"), **keywords)
    except ValueError:
        error = "ValueError"
    state = {}
    for name in vars(sample):
        value = getattr(sample, name)
        if hasattr(value, "tolist"):
            value = numpy.asarray(value).tolist()
        state[name] = vars(value) if name in ("spec_info", "prefix_cache_info") else value
    state["status"] = sample.status.value
    return error, state


@pytest.mark.parametrize("appends", APPENDS.values(), ids=APPENDS.keys())
def test_append_response_tokens(pairs, appends):
    real, standin = pairs["vime.utils.types"]
    theirs_error, theirs = appended(real.Sample, appends)
    mine_error, mine = appended(standin.Sample, appends)
    assert mine_error == theirs_error
    if not theirs_error:
        assert mine == {name: theirs[name] for name in mine}


def test_routed_experts(pairs):
    import numpy

    rows = numpy.arange(12, dtype=numpy.int32).reshape(3, 2, 2)
    results = []
    for module in pairs["vime.utils.types"]:
        sample = module.Sample(tokens=[1, 2], loss_mask=[], rollout_log_probs=[])
        meta = {"routed_experts": rows, **FINISH}
        sample.append_response_tokens(make_args(), tokens=[3, 4], log_probs=[0, 0], meta_info=meta)
        results.append(numpy.asarray(sample.rollout_routed_experts).tolist())
    assert results[0] == results[1] == rows.tolist()


@pytest.mark.parametrize(
    "changes",
    [{}, {"stop": ["x"]}, {"stop": "x", "no_stop_trim": False}, {"top_k": 5}, {"top_k": 0}, {"seed": 3}]
    + [{"stop_token_ids": [1]}, {"skip_special_tokens": None}, {"skip_special_tokens": True}],
)
def test_sampling_params(pairs, changes):
    real, standin = pairs["vime.rollout.vllm_rollout"]
    params = make_params(**changes)
    assert standin._build_inference_sampling_params(params) == real._build_inference_sampling_params(params)


def test_model_url(pairs):
    real, standin = pairs["vime.rollout.vllm_rollout"]
    for args in (make_args(), make_args(vllm_model_routers={"actor": ("10.0.0.1", 5)})):
        assert standin.get_model_url(args, "actor") == real.get_model_url(args, "actor")


ANSWERS = ["42", "x=42", "\\frac12", "\\boxed{3}", "\\text{ 7 }", "3{,}000", "a {b {c}} d", "{", "}", "", " 8 ", "²"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers(pairs, answer):
    real, standin = pairs["vime.rollout.rm_hub.math_dapo_utils"]
    for text in (f"\\boxed{{{answer}}}", f"so \\boxed{{{answer}}} it is", f"\\boxed{{{answer}", answer, "x" * 200):
        for label in (answer, "42", None):
            expected = real.compute_score(text, label, strict_box_verify=True)
            assert standin.compute_score(text, label, strict_box_verify=True) == expected


def test_spans(pairs):
    from scripted import plugin

    assert "vime" in plugin.trace_span.__module__
    assert list(inspect.signature(plugin.trace_span).parameters)[:2] == ["target", "name"]
    assert "attrs" in inspect.signature(plugin.trace_span).parameters
