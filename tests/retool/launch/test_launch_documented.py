"""Every way to launch that the README shows, and every word that vime would ignore, through vime's own parser.

Where no checkouts of vime and Megatron are named, a parser of the tests' own stands in its place.
"""

import json
import os
import shutil
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
from launch import ray_job
from launch_helpers import ARGUMENTS, SECRET, Tree, dry_run, flags_of, job_words, known_flags, run

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
}
QWEN3_4B = {
    **QWEN3,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "rope_theta": 5000000,
}
QWEN3_SMALL = {
    **QWEN3,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "rope_theta": 1000000,
}


class Launch(NamedTuple):
    """A documented command: the script, its flags and settings, and the model that HF_CHECKPOINT holds."""

    stage: str
    flags: list[str] = []
    settings: dict[str, str] = {}
    config: dict = QWEN3_4B


SMOKE = [
    *["--tensor-model-parallel-size", "1", "--rollout-num-gpus-per-engine", "1"],
    *["--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "16"],
    *["--rollout-max-response-len", "1024", "--max-tokens-per-gpu", "4096"],
    *["--n-samples-per-eval-prompt", "1", "--eval-max-response-len", "1024"],
]
DOCUMENTED = {
    "sft": Launch("sft"),
    "rl": Launch("rl"),
    "several nodes": Launch("rl", [], {"RAY_ADDRESS": "http://10.0.0.1:8265", "NUM_NODES": "8"}),
    "GPU smoke run": Launch("rl", SMOKE, {"NUM_GPUS": "1", "MODEL_SCRIPT": "qwen3-0.6B"}, QWEN3_SMALL),
    "AIME 2025": Launch("rl", ["--eval-prompt-data", "aime24", "/data/a.jsonl", "aime25", "/data/b.jsonl"]),
    "evaluation alone": Launch("rl", ["--num-rollout", "0", "--lr-decay-iters", "1", "--no-load-optim"]),
    "fewer checkpoints": Launch("rl", ["--save-interval", "20", "--save-retain-interval", "200"]),
}
documented = pytest.mark.parametrize("launch", DOCUMENTED.values(), ids=DOCUMENTED)


VIME, MEGATRON = os.environ.get("VIME_ROOT"), os.environ.get("MEGATRON_ROOT", "/root/Megatron-LM")
REAL = bool(VIME) and os.path.isdir(os.path.join(MEGATRON, "megatron", "training"))
# vLLM has moved a module that vime imports while it parses.
MOVED = """
import importlib.util, sys
class Moved:
    def find_spec(name, path=None, target=None):
        if name == "vllm.entrypoints.openai.cli_args":
            return importlib.util.find_spec("vllm.entrypoints.launchers.cli_args")
sys.meta_path.append(Moved)
"""


def parsed(tree: Tree, stage: str, *flags: str, **settings: str) -> SimpleNamespace:
    """A dry run that asks the parser."""
    if REAL:
        (tree.root / "sitecustomize.py").write_text(MOVED)
        settings = {"VIME_ROOT": VIME, "MEGATRON_ROOT": MEGATRON, "PYTHONPATH": str(tree.root), **settings}
    result = dry_run(tree, stage, *flags, parser=True, **settings)
    if "vime's parser of arguments does not start here" in result.err:
        pytest.skip(result.err)
    return result


@documented
def test_every_documented_launch_is_one_that_vime_takes(tree, launch):
    (tree.checkpoint / "config.json").write_text(json.dumps(launch.config))
    layers = launch.config["num_hidden_layers"]
    for name in ("qwen3-4B", "qwen3-0.6B"):
        (tree.vime / "scripts" / "models" / f"{name}.sh").write_text(f"MODEL_ARGS=(--num-layers {layers})\n")
    flags = known_flags(*launch.flags)
    (tree.vime / "vime" / "utils" / "arguments.py").write_text(ARGUMENTS.format(flags=flags))
    settings = {**launch.settings, "WANDB_KEY": SECRET}
    if launch.flags == SMOKE:
        settings["EVAL_DATA"] = f"{tree.environment()['EVAL_DATA']}@[0:4]"
    if "aime25" in launch.flags:
        launch = launch._replace(flags=[flag.replace("/data/", f"{tree.root}/") for flag in launch.flags])
        for name in ("a.jsonl", "b.jsonl"):
            shutil.copy(tree.root / "prompts.jsonl", tree.root / name)
    result = parsed(tree, launch.stage, *launch.flags, **settings)
    assert result.code == 0, result.err
    words = job_words(result.out)
    assert words[len(words) - len(launch.flags) :] == launch.flags
    assert flags_of(words)["--actor-num-nodes"] == [launch.settings.get("NUM_NODES", "1")]


SAYS = {
    "--rollout-batch-sise": "--rollout-batch-sise is a flag of neither vime nor Megatron, which would ignore it",
    "--rollout-batch-sise=4": "did you mean --rollout-batch-size?",
    "--tensor-model-paralel-size 2": "did you mean --tensor-model-parallel-size?",
    "--rollout_batch_size 4": "did you mean --rollout-batch-size?",  # argparse knows no underscores
    "-num-rollout 3": "-num-rollout is a flag of neither vime nor Megatron, which would ignore it; did you mean --num-",
    "num-rollout 3": "num-rollout is neither a flag nor the value of one; did you mean --num-rollout?",
    "--lr 1e-6 5": "5 is neither a flag nor the value of one",
    "NUM_GPUS=4": "NUM_GPUS=4 is neither a flag nor the value of one; a setting goes before the script's name: NUM_GPUS=4",
    "-- --lr 1e-6": "-- is a flag of neither vime nor Megatron",
    "--num-rollout": "vime refuses the command: argument --num-rollout: expected one argument",
    "--num-rollout many": "vime refuses the command: argument --num-rollout: invalid int value: 'many'",
    "--load-debug-rollout-data x": "",  # no engines: the script's own flags of vLLM are none then
    "--seed -5": "",
}


def test_words_that_vime_would_ignore_are_refused(tree):
    (tree.checkpoint / "config.json").write_text(json.dumps(QWEN3_4B))
    flags = known_flags("--load-debug-rollout-data", "x", "--seed", "1")
    (tree.vime / "vime" / "utils" / "arguments.py").write_text(ARGUMENTS.format(flags=flags))
    kinds = SAYS if not REAL else {words: SAYS[words] for words in list(SAYS)[::3]}  # each takes the real one 10 s
    for words, says in kinds.items():
        result = parsed(tree, "rl", *words.split())
        assert (result.code, bool(result.err)) == ((1, True) if says else (0, False)), (words, result.err)
        assert says in result.err


@pytest.mark.parametrize(
    "source, ray, code, says",
    [
        ("import nothing_like_it", None, 1, "error: vime's parser of arguments does not start here (No module named"),
        ("import nothing_like_it", "http://127.0.0.1:1", 0, "warning: vime's parser of arguments does not start here"),
        ("import os; os._exit(3)", None, 1, "ended without an answer: exit code 3"),
        ("def parse_args(): raise AssertionError('a\\nb')", None, 1, "error: vime refuses the command: a b"),
        ("def parse_args(): print('x'); raise SystemExit(2)", None, 1, "error: vime refuses the command: 2"),
    ],
)
def test_a_parser_that_does_not_answer_is_said(tree, source, ray, code, says):
    (tree.vime / "vime" / "utils" / "arguments.py").write_text(source)
    with mock.patch.object(ray_job, "resources", return_value={"GPU": 8, "CPU": 99}):
        result = run(tree, "rl", parser=True, RAY_ADDRESS=ray)
    assert (result.code, result.started) == (code, not code) and says in result.err
    shutil.rmtree(tree.checkpoint)  # in a dry run before the download, what needs the checkpoint is not asked
    if "refuses" in says:
        assert "refuses" not in dry_run(tree, "rl", parser=True, RAY_ADDRESS=ray).err
