"""The launch scripts as dry runs over a fake vime tree: what command they print."""

import ast
import json
import shlex
import shutil
import subprocess
import sys

import pytest
from commands import job_environment, job_words
from launch_helpers import EXAMPLE, SECRET, both, dry_run, flags_of


@both
def test_a_dry_run_prints_the_command_one_flag_a_line(tree, stage):
    result = dry_run(tree, stage, "--more", "a 'b' $c", "--switch")
    assert (result.code, result.err) == (0, "")
    words = job_words(result.out)
    assert words[-3:] == ["--more", "a 'b' $c", "--switch"]
    lines = [line.strip() for line in result.out.splitlines()]
    for flag in flags_of(words):
        assert sum(line.startswith((f"{flag} ", flag + "\\")) or line == flag for line in lines) == 1, flag
    assert all(line.count(" --") <= 1 for line in lines)
    assert "--apply-chat-template" not in result.out


@both
def test_paths_with_spaces_stay_one_word(tree, stage):
    result = dry_run(tree, stage)
    flags = flags_of(job_words(result.out))
    assert flags["--hf-checkpoint"] == [str(tree.checkpoint)]
    assert flags["--ref-load"] == [str(tree.converted)]
    assert flags["--load"] == flags["--save"] == [f"{tree.checkpoint}_retool_{stage}"]
    words = shlex.split(result.out.replace("\\\n", " "), comments=True)
    assert str(tree.vime / ("train_async.py" if stage == "sft" else "train.py")) in words
    paths = f"{EXAMPLE}:{tree.vime}:{tree.root / 'Megatron LM'}"
    assert job_environment(result.out)["PYTHONPATH"] == paths
    own = {"PYTHONPATH": "/of/mine:/more"}  # is searched last, and where there is another machine not at all
    assert job_environment(dry_run(tree, stage, **own).out)["PYTHONPATH"] == f"{paths}:/of/mine:/more"
    own["RAY_ADDRESS"] = "http://10.0.0.1:8265"
    assert job_environment(dry_run(tree, stage, **own).out)["PYTHONPATH"] == paths


# What a change of the scripts should not change unseen.
SETTINGS = {
    "sft": """--rollout-function-path vime.rollout.sft_rollout.generate_rollout --prompt-data sft.parquet
        --input-key messages --tool-key tools --loss-mask-type qwen --loss-type sft_loss --num-epoch 3 --lr 1e-5
        --rollout-batch-size 128 --global-batch-size 128 --lr-decay-style cosine --max-tokens-per-gpu 9216
        --rotary-base 5000000 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 1 --debug-train-only""",
    "rl": """--custom-generate-function-path generate_with_retool.generate
        --custom-rm-path generate_with_retool.reward_func
        --custom-reward-post-process-path generate_with_retool.normalize_rewards
        --custom-rollout-log-function-path generate_with_retool.log_rollout_data
        --custom-eval-rollout-log-function-path generate_with_retool.log_eval_rollout_data
        --reward-key score --eval-reward-key acc --prompt-data prompts.jsonl --eval-prompt-data aime aime's.jsonl
        --input-key prompt --label-key label --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
        --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192
        --eval-interval 20 --n-samples-per-eval-prompt 16 --eval-max-response-len 16384
        --tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216
        --rotary-base 5000000 --colocate""",
}


@both
def test_the_settings_are_the_published_ones(tree, stage):
    flags = flags_of(job_words(dry_run(tree, stage).out.replace(f"{tree.root}/", "")))
    expected = flags_of(SETTINGS[stage].split())
    assert {flag: flags.get(flag) for flag in expected} == expected
    assert ("--sequence-parallel" in flags) is (stage == "rl")


def test_every_function_that_vime_is_to_call_is_there(tree):
    words = job_words(dry_run(tree, "rl").out)
    called = [word.partition(".")[2] for word in words if word.startswith("generate_with_retool.")]
    source = ast.parse((EXAMPLE / "generate_with_retool.py").read_text())
    functions = [node.name for node in source.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert len(called) == 5 and set(called) <= set(functions)


@both
def test_the_wandb_key_is_never_shown(tree, stage):
    result = dry_run(tree, stage, WANDB_KEY=SECRET)
    assert result.code == 0
    assert SECRET not in result.out + result.err
    assert "WANDB_KEY=***" in result.out
    flags = flags_of(job_words(result.out))
    assert flags["--use-wandb"] == [] and flags["--wandb-project"] == ["retool-vime"]
    assert "--wandb-key" not in flags


def test_a_trace_of_the_script_shows_no_key(tree):
    command = ["bash", "-x", str(EXAMPLE / "retool_qwen3_4b_rl.sh")]
    environment = tree.environment(WANDB_KEY=SECRET, DRY_RUN="1")
    traced = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert traced.returncode == 0 and "+ exec python3" in traced.stderr and SECRET not in traced.stdout + traced.stderr


@both
@pytest.mark.parametrize("key", [None, ""])
def test_without_a_key_there_are_no_wandb_flags(tree, stage, key):
    result = dry_run(tree, stage, WANDB_KEY=key)
    assert result.code == 0 and "wandb" not in result.out.lower()


@both
def test_a_running_cluster_is_used_if_it_is_named(tree, stage):
    result = dry_run(tree, stage, RAY_ADDRESS="http://10.0.0.1:8265/", NUM_NODES="2", WANDB_KEY=SECRET)
    assert result.code == 0 and "as a job on the Ray cluster at http://10.0.0.1:8265\n" in result.out
    assert flags_of(job_words(result.out))["--actor-num-nodes"] == ["2"]
    assert "wandb login" in result.err and SECRET not in result.out + result.err


@both
def test_relative_paths_hold_wherever_the_job_runs(tree, stage):
    result = dry_run(
        tree, stage, VIME_ROOT="./vi me", HF_CHECKPOINT="check points/Qwen3-4B", SAVE="out", SFT_DATA="sft.parquet"
    )
    flags = flags_of(job_words(result.out))
    assert flags["--hf-checkpoint"] == [str(tree.checkpoint)] and flags["--save"] == [str(tree.root / "out")]
    assert job_environment(result.out)["PYTHONPATH"].split(":")[1] == str(tree.vime)


@both
def test_gpus_are_counted_as_the_job_sees_them(tree, stage):
    (tree.root / "bin" / "nvidia-smi").write_text(
        "#!/bin/sh\n[ \"$1\" = -L ] && printf 'GPU 0: A\\nGPU 1: A\\nGPU 2: A\\nGPU 3: A\\n' || echo 'GPU0 X NV18'\n"
    )
    (tree.root / "bin" / "nvidia-smi").chmod(0o755)
    for changes, count in [({}, "4"), ({"CUDA_VISIBLE_DEVICES": "5,7"}, "2"), ({"NUM_GPUS": "6"}, "6")]:
        result = dry_run(tree, stage, **{"NUM_GPUS": None, **changes})
        assert flags_of(job_words(result.out))["--actor-num-gpus-per-node"] == [count]
        assert job_environment(result.out)["NCCL_NVLS_ENABLE"] == "1"


@both
def test_inside_a_vime_checkout_nothing_needs_to_be_set(tree, stage):
    shutil.copytree(EXAMPLE, tree.vime / "examples" / "retool", ignore=shutil.ignore_patterns("__pycache__"))
    script = tree.vime / "examples" / "retool" / f"retool_qwen3_4b_{stage}.sh"
    result = subprocess.run(
        ["bash", str(script)],
        env=tree.environment(VIME_ROOT=None, DRY_RUN="1", SFT_DATA=None, PROMPT_DATA=None),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0
    data = {"sft": "ReTool-SFT.parquet", "rl": "dapo-math-17k.jsonl"}[stage]
    assert flags_of(job_words(result.stdout))["--prompt-data"] == [str(tree.vime / "data" / "retool" / data)]


def test_the_published_commands_work_without_arguments(tree):
    """After the published downloads, with nothing set but where they lie (by default /root)."""
    plugin = tree.vime / "examples" / "retool"
    shutil.copytree(EXAMPLE, plugin, ignore=shutil.ignore_patterns("__pycache__"))
    downloads = tree.root / "downloads"
    for model in ("Qwen/Qwen3-4B-Instruct-2507", "font-info/qwen3-4b-sft"):
        shutil.copytree(tree.checkpoint, downloads / model)
    question = {"role": "user", "content": "What is 6 times 7?"}
    answer = {"role": "assistant", "content": "<code>print(42)</code><interpreter>42</interpreter>\\boxed{42}"}
    files = {
        "JoeYing/ReTool-SFT/train.jsonl": {"messages": [question, answer]},
        "dapo-math-17k/dapo-math-17k.jsonl": {"prompt": [question], "label": "42"},
        "aime-2024/aime-2024.jsonl": {"prompt": [question], "label": "42"},
    }
    for name, row in files.items():
        (downloads / name).parent.mkdir(parents=True)
        rows = (json.dumps(row).replace("6 times", f"{n} times") + "\n" for n in range(128))  # a batch of SFT
        (downloads / name).write_text("".join(rows))

    settings = ("VIME_ROOT", "HF_CHECKPOINT", "SFT_DATA", "PROMPT_DATA", "EVAL_DATA")
    environment = tree.environment(**dict.fromkeys(settings))
    made = subprocess.run(
        [sys.executable, str(plugin / "sft_data_processing.py")],
        env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
        cwd=tree.vime,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    expected = {
        "sft": (tree.vime / "data" / "retool" / "ReTool-SFT.parquet", downloads / "Qwen" / "Qwen3-4B-Instruct-2507"),
        "rl": (downloads / "dapo-math-17k" / "dapo-math-17k.jsonl", downloads / "font-info" / "qwen3-4b-sft"),
    }
    for stage, (data, model) in expected.items():
        result = subprocess.run(
            ["bash", f"examples/retool/retool_qwen3_4b_{stage}.sh"],
            env=environment | {"DRY_RUN": "1"},
            cwd=tree.vime,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (result.returncode, result.stderr) == (0, "")
        flags = flags_of(job_words(result.stdout))
        assert (flags["--prompt-data"], flags["--hf-checkpoint"]) == ([str(data)], [str(model)])
    assert flags["--eval-prompt-data"] == ["aime", str(downloads / "aime-2024" / "aime-2024.jsonl")]


def test_the_settings_of_the_plugin_reach_the_job(tree):
    given = {"RETOOL_SANDBOX": "http://HOST", "RETOOL_ALLOWED_MODULES": "math,sympy", "RETOOL_SANDBOX_STRICT": "1"}
    environment = job_environment(dry_run(tree, "rl", **given, RETOOL_CACHE="x").out)
    assert {name: value for name, value in environment.items() if name.startswith("RETOOL_")} == given
