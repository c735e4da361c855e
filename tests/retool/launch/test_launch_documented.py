"""Every way to launch that the README shows, and every word that vime would ignore, through vime's own parser.

Where no checkouts of vime and Megatron are named, a parser of the tests' own stands in its place.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
from commands import job_words, recipes
from launch import main, ray_job
from launch_helpers import ARGUMENTS, EXAMPLE, SECRET, dry_run, flags_of, known_flags, run
from watching import alive, wait_for

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
DOCUMENTED |= {
    f"{heading} {number}": Launch("rl", recipe.flags, recipe.settings)
    for heading, commands in recipes().items()
    for number, recipe in enumerate(commands)
}
documented = pytest.mark.parametrize("launch", DOCUMENTED.values(), ids=DOCUMENTED)


VIME, MEGATRON = os.environ.get("VIME_ROOT"), os.environ.get("MEGATRON_ROOT", "/root/Megatron-LM")
REAL = bool(VIME) and os.path.isdir(os.path.join(MEGATRON, "megatron", "training"))
# Asks vime's parser about one command after the other, without importing all of vLLM and Megatron for each.
PARSERS = """
import importlib, json, os, sys
from launch import ask_vime
try:
    try:
        importlib.import_module("vllm.entrypoints.openai.cli_args")
    except ImportError:  # where newer versions have what vime imports while it parses
        moved = importlib.import_module("vllm.entrypoints.launchers.cli_args")
        sys.modules["vllm.entrypoints.openai.cli_args"] = moved
    import vime.utils.arguments
    ask_vime.stand_in_for_a_gpu()
    import vime.backends.megatron_utils.arguments
except ImportError:
    pass  # each answer says it
for line in sys.stdin:
    sys.argv = ["ask_vime.py", *json.loads(line)]
    if (child := os.fork()) == 0:
        ask_vime.main()
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def parsers():
    """Takes the place of `main.run_parser`: the real vime's where it is, else the tests' own in a process of its
    own."""
    if not REAL:
        yield main.run_parser
        return
    path = ":".join([str(EXAMPLE), str(VIME), MEGATRON])
    process = subprocess.Popen(
        [sys.executable, "-c", PARSERS],
        env={**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def ask(words, environment):
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        while not (line := process.stdout.readline()).startswith('{"problems"'):
            assert line, "the parsers have ended"
        return SimpleNamespace(stdout=line)

    yield ask
    process.stdin.close()
    process.wait(60)


@pytest.fixture
def parsed(tree, parsers):
    """Makes a dry run that asks the parser."""

    def ask(stage: str, *flags: str, **settings: str) -> SimpleNamespace:
        if REAL:
            settings = {"VIME_ROOT": VIME, "MEGATRON_ROOT": MEGATRON, **settings}
        with mock.patch.object(main, "run_parser", parsers):
            result = dry_run(tree, stage, *flags, parser=True, **settings)
        if "vime's parser of arguments does not start here" in result.err:
            pytest.skip(result.err)
        return result

    return ask


@documented
def test_every_documented_launch_is_one_that_vime_takes(tree, parsed, launch):
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
    result = parsed(launch.stage, *launch.flags, **settings)
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
    "--save=": "--save= has no value behind it",
    "--ref-load=": "--ref-load= has no value behind it",
    "--load-debug-rollout-data x": "",  # no engines: the script's own flags of vLLM are none then
    "--seed -5": "",
}


SAYS_THE_REAL_ONE = {
    "--rotary-base 1000000": "rope_theta in hf config 5000000 is not equal to rotary_base 1000000",
    "--num-layers 28": "num_hidden_layers in hf config 36 is not equal to num_layers 28",
    "--untie-embeddings-and-output-weights": "tie_word_embeddings in hf config True is not equal to untie",
    "--context-parallel-size 2 --tensor-model-parallel-size 8": "world size (8) is not divisible by total_model_size",
    "--pipeline-model-parallel-size 3": "world size (8) is not divisible by total_model_size",
    "--use-kl-loss --kl-coef 0.1 --kl-loss-coef 0.1": "Only one of kl_coef and kl_loss_coef can be set",
    "--vllm-no-such-flag": "--vllm-no-such-flag is a flag of neither vime nor Megatron",
    "--vllm-enable-prefix-caching --vllm-max-model-len 9000": "",
}


def test_words_that_vime_would_ignore_are_refused(tree, parsed):
    (tree.checkpoint / "config.json").write_text(json.dumps(QWEN3_4B))
    flags = known_flags("--load-debug-rollout-data", "x", "--seed", "1")
    (tree.vime / "vime" / "utils" / "arguments.py").write_text(ARGUMENTS.format(flags=flags))
    for words, says in {**SAYS, **(SAYS_THE_REAL_ONE if REAL else {})}.items():
        result = parsed("rl", *words.split())
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launch_that_is_stopped_while_it_asks_says_no_more(tree, number):
    (tree.vime / "vime" / "utils" / "arguments.py").write_text(
        f"import os, time; open({str(tree.root / 'asked')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    command = ["bash", str(EXAMPLE / "retool_qwen3_4b_rl.sh")]
    process = subprocess.Popen(command, env=tree.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert wait_for(lambda: (tree.root / "asked").exists() and (tree.root / "asked").read_text())
    process.send_signal(number)
    assert process.communicate(timeout=60) == (b"", b"") and process.returncode == 128 + number
    assert not alive(int((tree.root / "asked").read_text()))
