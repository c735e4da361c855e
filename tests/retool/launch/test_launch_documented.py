"""Every way to launch that the README shows: as a dry run, and through vime's own parser where vime and Megatron are."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from launch_helpers import SECRET, VIMES_PARSER, Tree, dry_run, flags_of, job_words

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


def show(tree: Tree, launch: Launch, **settings: str) -> list[str]:
    """The words of the job that the command would start."""
    (tree.checkpoint / "config.json").write_text(json.dumps(launch.config))
    changes = {**launch.settings, **settings, "WANDB_KEY": SECRET}
    if launch.flags == SMOKE:
        changes["EVAL_DATA"] = f"{tree.environment()['EVAL_DATA']}@[0:4]"
    result = dry_run(tree, launch.stage, *launch.flags, **changes)
    assert result.returncode == 0, result.stderr
    return job_words(result.stdout)


@documented
def test_every_documented_launch_gives_a_command(tree, launch):
    layers = launch.config["num_hidden_layers"]
    for name in ("qwen3-4B", "qwen3-0.6B"):
        (tree.vime / "scripts" / "models" / f"{name}.sh").write_text(f"MODEL_ARGS=(--num-layers {layers})\n")
    defined = "".join(f'parser.add_argument("{flag}")\n' for flag in launch.flags if flag.startswith("--"))
    (tree.vime / "vime" / "utils" / "arguments.py").write_text(defined)
    words = show(tree, launch)
    assert words[len(words) - len(launch.flags) :] == launch.flags
    assert flags_of(words)["--actor-num-nodes"] == [launch.settings.get("NUM_NODES", "1")]


PARSE = f"""{VIMES_PARSER}
args = parse_args()
print("PARSED", args.rotary_base, args.max_tokens_per_gpu, args.loss_mask_type, args.eval_reward_key)
"""


@documented
def test_every_flag_is_one_of_vimes(tree, launch):
    vime, megatron = os.environ.get("VIME_ROOT"), Path(os.environ.get("MEGATRON_ROOT", "/root/Megatron-LM"))
    if not vime or not (megatron / "megatron" / "training").is_dir():
        pytest.skip("needs VIME_ROOT and MEGATRON_ROOT to name checkouts of vime and Megatron-LM")
    words = show(tree, launch, VIME_ROOT=vime, MEGATRON_ROOT=str(megatron))
    program = tree.root / "parse.py"
    program.write_text(PARSE)
    result = subprocess.run(
        [sys.executable, str(program), *words],
        env={
            **os.environ,
            "PYTHONPATH": f"{vime}:{megatron}:{os.environ.get('PYTHONPATH', '')}",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "MISSING" in result.stdout:
        pytest.skip(f"vime's parser does not import here: {result.stdout.strip()}")
    assert result.returncode == 0, result.stderr[-3000:]
    tokens = "4096" if launch.flags == SMOKE else "9216"
    assert f"PARSED {launch.config['rope_theta']} {tokens} qwen" in result.stdout
