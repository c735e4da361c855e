"""The launch scripts: dry runs over a fake vime tree, every check before a start, the conversion, and real Ray.

The fake tree has spaces in its path. Its training script writes down what it was given, so that the runs against real
Ray see what a job sees.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "retool"
SECRET = "0123456789abcdef-wandb-secret"
QWEN3_4B = """MODEL_ARGS=(
   --num-layers 36
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
)
"""
CONVERTER = """
import os, sys
from pathlib import Path
save = Path(sys.argv[sys.argv.index("--save") + 1])
(save / "release").mkdir(parents=True)
(save / "release" / "argv").write_text(repr(sys.argv[1:] + [os.environ["PYTHONPATH"]]))
if os.environ.get("FAKE_CONVERSION") != "cut short":
    (save / "latest_checkpointed_iteration.txt").write_text("release")
sys.exit(3 if os.environ.get("FAKE_CONVERSION") == "fails" else 0)
"""
TRAIN = """
import json, os, subprocess, sys, time, urllib.error, urllib.request
from pathlib import Path
import ray
report = Path(os.environ["FAKE_REPORT"])
ray.init()

@ray.remote
class Worker:
    def look(self):
        # an engine that a framework starts detached, out of reach of Ray's own shutdown
        detached = subprocess.Popen(["sleep", "600"], start_new_session=True)
        import generate_marker
        return os.getpid(), detached.pid, dict(os.environ), generate_marker.__file__

worker = Worker.options(runtime_env={"env_vars": {"ACTOR_ONLY": "1"}}).remote()
pid, detached, environment, marker = ray.get(worker.look.remote())
command_lines = []
for entry in Path("/proc").iterdir():
    if entry.name.isdigit():
        try:
            command_lines.append((entry / "cmdline").read_text())
        except OSError:
            pass
dashboard = ray.worker.global_worker.node.address_info["webui_url"]
try:
    stranger = urllib.request.urlopen(f"http://{dashboard}/api/version").status
except urllib.error.HTTPError as error:
    stranger = error.code
partial = report.with_suffix(".partial")
partial.write_text(json.dumps({
    "argv": sys.argv[1:], "pids": [os.getpid(), pid, detached], "environment": environment, "marker": marker,
    "command_lines": command_lines, "stranger": [ray.__version__, stranger],
    "gcs": ray.get_runtime_context().gcs_address,
}))
partial.rename(report)
if "--sleep" in sys.argv:
    time.sleep(600)
sys.exit(int(os.environ.get("FAKE_EXIT", "0")))
"""


LAUNCHED: list[subprocess.Popen] = []


class Tree(NamedTuple):
    """A fake vime checkout beside a fake Megatron, checkpoints and data, in a folder with spaces in its name."""

    root: Path

    @property
    def vime(self) -> Path:
        return self.root / "vi me"

    @property
    def checkpoint(self) -> Path:
        return self.root / "check points" / "Qwen3-4B"

    @property
    def converted(self) -> Path:
        return self.checkpoint.with_name("Qwen3-4B_torch_dist")

    def environment(self, **changes: str | None) -> dict[str, str]:
        settings = {
            "PATH": f"{self.root / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.root),
            "VIME_ROOT": str(self.vime),
            "MEGATRON_ROOT": str(self.root / "Megatron LM"),
            "HF_CHECKPOINT": str(self.checkpoint),
            "SFT_DATA": str(self.root / "sft.parquet"),
            "PROMPT_DATA": str(self.root / "prompts.jsonl"),
            "EVAL_DATA": str(self.root / "aime's.jsonl"),
            "NUM_GPUS": "8",
        }
        settings.update(changes)
        return {name: value for name, value in settings.items() if value is not None}


@pytest.fixture
def tree(tmp_path):
    made = Tree(tmp_path / "a  b")
    for folder in (made.vime / "scripts" / "models", made.vime / "tools", made.root / "Megatron LM", made.checkpoint):
        folder.mkdir(parents=True)
    (made.vime / "scripts" / "models" / "qwen3-4B.sh").write_text(QWEN3_4B)
    (made.vime / "tools" / "convert_hf_to_torch_dist.py").write_text(CONVERTER)
    (made.vime / "generate_marker.py").write_text("")
    for name in ("train.py", "train_async.py"):
        (made.vime / name).write_text(TRAIN)
    (made.checkpoint / "config.json").write_text(json.dumps({"rope_theta": 5000000.0}))
    whole_checkpoint(made.converted)
    for name in ("sft.parquet", "prompts.jsonl", "aime's.jsonl"):
        (made.root / name).write_text("x")
    # Stands for every tool that starts something: a run that gets this far leaves a mark.
    bin_folder = made.root / "bin"
    bin_folder.mkdir()
    (bin_folder / "ray").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{made.root}/started"\n')
    (bin_folder / "ray").chmod(0o755)
    yield made
    for process in LAUNCHED:  # a test that failed must not leave its launch behind
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    LAUNCHED.clear()


def whole_checkpoint(folder: Path, iteration: str = "release", name: str = "release") -> None:
    (folder / name).mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(iteration)


def run(
    tree: Tree, stage: str, *flags: str, trace: bool = False, **changes: str | None
) -> subprocess.CompletedProcess:
    command = ["bash", *(["-x"] if trace else []), str(EXAMPLE / f"retool_qwen3_4b_{stage}.sh"), *flags]
    return subprocess.run(
        command, env=tree.environment(**changes), cwd=tree.root, capture_output=True, text=True, timeout=300
    )


def dry_run(tree: Tree, stage: str, *flags: str, **options) -> subprocess.CompletedProcess:
    result = run(tree, stage, *flags, DRY_RUN="1", **options)
    assert not (tree.root / "started").exists()
    return result


def job_words(output: str) -> list[str]:
    """The words of the training script's command line, read back by a shell's rules."""
    words = shlex.split(output.replace("\\\n", " "), comments=True)
    return words[max(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]


def flags_of(words: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            last = flags[word] = []
        else:
            last.append(word)
    return flags


def runtime_env(output: str) -> dict[str, str]:
    words = shlex.split(output.replace("\\\n", " "), comments=True)
    return json.loads(words[words.index("--runtime-env-json") + 1])["env_vars"]


both = pytest.mark.parametrize("stage", ["sft", "rl"])


# Dry runs ------------------------------------------------------------------------------------------------------------


@both
def test_a_dry_run_prints_the_command_one_flag_a_line(tree, stage):
    result = dry_run(tree, stage, "--more", "a 'b' $c", "--switch")
    assert (result.returncode, result.stderr) == (0, "")
    words = job_words(result.stdout)
    assert words[-3:] == ["--more", "a 'b' $c", "--switch"]
    lines = [line.strip() for line in result.stdout.splitlines()]
    for flag in flags_of(words):
        assert sum(line.startswith((f"{flag} ", flag + "\\")) or line == flag for line in lines) == 1, flag
    assert all(line.count(" --") <= 1 for line in lines)
    assert "--apply-chat-template" not in result.stdout


@both
def test_paths_with_spaces_stay_one_word(tree, stage):
    result = dry_run(tree, stage)
    flags = flags_of(job_words(result.stdout))
    assert flags["--hf-checkpoint"] == [str(tree.checkpoint)]
    assert flags["--ref-load"] == [str(tree.converted)]
    assert flags["--load"] == flags["--save"] == [f"{tree.checkpoint}_retool_{stage}"]
    words = shlex.split(result.stdout.replace("\\\n", " "), comments=True)
    assert words[:4] == ["python3", str(EXAMPLE / "launch" / "local_ray.py"), "--num-gpus", "8"]
    assert str(tree.vime / ("train_async.py" if stage == "sft" else "train.py")) in words
    assert runtime_env(result.stdout)["PYTHONPATH"] == f"{EXAMPLE}:{tree.vime}:{tree.root / 'Megatron LM'}"


def test_sft_settings(tree):
    flags = flags_of(job_words(dry_run(tree, "sft").stdout))
    expected = {
        "--rollout-function-path": ["vime.rollout.sft_rollout.generate_rollout"],
        "--prompt-data": [str(tree.root / "sft.parquet")],
        "--input-key": ["messages"],
        "--tool-key": ["tools"],
        "--loss-mask-type": ["qwen"],
        "--loss-type": ["sft_loss"],
        "--num-epoch": ["3"],
        "--rollout-batch-size": ["128"],
        "--global-batch-size": ["128"],
        "--lr": ["1e-5"],
        "--lr-decay-style": ["cosine"],
        "--max-tokens-per-gpu": ["9216"],
        "--rotary-base": ["5000000"],
        "--actor-num-gpus-per-node": ["8"],
        "--debug-train-only": [],
    }
    assert {flag: flags.get(flag) for flag in expected} == expected


def test_rl_settings(tree):
    flags = flags_of(job_words(dry_run(tree, "rl").stdout))
    expected = {
        "--custom-generate-function-path": ["generate_with_retool.generate"],
        "--custom-rm-path": ["generate_with_retool.reward_func"],
        "--reward-key": ["score"],
        "--eval-reward-key": ["acc"],
        "--prompt-data": [str(tree.root / "prompts.jsonl")],
        "--eval-prompt-data": ["aime", str(tree.root / "aime's.jsonl")],
        "--input-key": ["prompt"],
        "--label-key": ["label"],
        "--advantage-estimator": ["grpo"],
        "--eps-clip": ["0.2"],
        "--eps-clip-high": ["0.28"],
        "--rollout-batch-size": ["32"],
        "--n-samples-per-prompt": ["8"],
        "--global-batch-size": ["256"],
        "--rollout-max-response-len": ["8192"],
        "--eval-interval": ["20"],
        "--n-samples-per-eval-prompt": ["16"],
        "--eval-max-response-len": ["16384"],
        "--tensor-model-parallel-size": ["2"],
        "--use-dynamic-batch-size": [],
        "--max-tokens-per-gpu": ["9216"],
        "--rotary-base": ["5000000"],
        "--colocate": [],
    }
    assert {flag: flags.get(flag) for flag in expected} == expected


@both
@pytest.mark.parametrize("trace", [False, True])
def test_the_wandb_key_is_never_shown(tree, stage, trace):
    result = dry_run(tree, stage, trace=trace, WANDB_KEY=SECRET)
    assert result.returncode == 0
    assert SECRET not in result.stdout + result.stderr
    assert "WANDB_KEY=***" in result.stdout
    flags = flags_of(job_words(result.stdout))
    assert flags["--use-wandb"] == [] and flags["--wandb-project"] == ["retool-vime"]
    assert "--wandb-key" not in flags


@both
@pytest.mark.parametrize("key", [None, ""])
def test_without_a_key_there_are_no_wandb_flags(tree, stage, key):
    result = dry_run(tree, stage, WANDB_KEY=key)
    assert result.returncode == 0 and "wandb" not in result.stdout.lower()


@both
def test_a_running_cluster_is_used_if_it_is_named(tree, stage):
    result = dry_run(tree, stage, RAY_ADDRESS="http://10.0.0.1:8265", NUM_NODES="2", WANDB_KEY=SECRET)
    assert result.returncode == 0
    words = shlex.split(result.stdout.replace("\\\n", " "), comments=True)
    assert words[:5] == ["ray", "job", "submit", "--address", "http://10.0.0.1:8265"]
    assert flags_of(job_words(result.stdout))["--actor-num-nodes"] == ["2"]
    assert "wandb login" in result.stderr and SECRET not in result.stdout + result.stderr


@both
def test_relative_paths_hold_wherever_the_job_runs(tree, stage):
    result = dry_run(
        tree, stage, VIME_ROOT="./vi me", HF_CHECKPOINT="check points/Qwen3-4B", SAVE="out", SFT_DATA="x y"
    )
    flags = flags_of(job_words(result.stdout))
    assert flags["--hf-checkpoint"] == [str(tree.checkpoint)] and flags["--save"] == [str(tree.root / "out")]
    assert runtime_env(result.stdout)["PYTHONPATH"].split(":")[1] == str(tree.vime)


@both
def test_settings_of_the_sandbox_reach_the_job(tree, stage):
    result = dry_run(tree, stage, RETOOL_SANDBOX_STRICT="1")
    assert runtime_env(result.stdout)["RETOOL_SANDBOX_STRICT"] == "1"


@both
def test_gpus_are_counted_as_the_job_sees_them(tree, stage):
    (tree.root / "bin" / "nvidia-smi").write_text(
        "#!/bin/sh\n[ \"$1\" = -L ] && printf 'GPU 0: A\\nGPU 1: A\\nGPU 2: A\\nGPU 3: A\\n' || echo 'GPU0 X NV18'\n"
    )
    (tree.root / "bin" / "nvidia-smi").chmod(0o755)
    for changes, count in [({}, "4"), ({"CUDA_VISIBLE_DEVICES": "5,7"}, "2"), ({"NUM_GPUS": "6"}, "6")]:
        result = dry_run(tree, stage, **{"NUM_GPUS": None, **changes})
        assert flags_of(job_words(result.stdout))["--actor-num-gpus-per-node"] == [count]
        assert runtime_env(result.stdout)["NCCL_NVLS_ENABLE"] == "1"


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


# What is missing -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("mode", ["1", "0"])
@pytest.mark.parametrize(
    "changes, says",
    [
        ({"VIME_ROOT": "/nowhere"}, "set VIME_ROOT"),
        ({"VIME_ROOT": "/usr"}, "no vime in /usr"),
        ({"MEGATRON_ROOT": "/nowhere"}, "set MEGATRON_ROOT"),
        ({"MEGATRON_ROOT": "/usr:/bin"}, "set MEGATRON_ROOT"),
        ({"NUM_GPUS": "many"}, "NUM_GPUS is many"),
        ({"NUM_GPUS": "7"}, "--tensor-model-parallel-size 2 does not divide"),
        ({"NUM_NODES": "0"}, "NUM_NODES is 0"),
        ({"NUM_NODES": "2"}, "set RAY_ADDRESS"),
        ({"MODEL_ARGS_ROTARY_BASE": "1000000"}, "MODEL_ARGS_ROTARY_BASE is 1000000, but rope theta"),
    ],
)
def test_what_is_wrong_stops_dry_runs_too(tree, stage, mode, changes, says):
    result = run(tree, stage, DRY_RUN=mode, **changes)
    assert result.returncode == 1
    assert any(line.startswith("error: ") and says in line for line in result.stderr.splitlines()), result.stderr
    assert result.stdout == "" and not (tree.root / "started").exists()


@both
def test_a_missing_default_megatron_is_named(tree, stage):
    if Path("/root/Megatron-LM").exists():
        pytest.skip("there is a /root/Megatron-LM here")
    assert "no Megatron-LM in /root/Megatron-LM" in dry_run(tree, stage, MEGATRON_ROOT=None).stderr


@both
def test_all_that_is_missing_is_listed_before_anything_starts(tree, stage):
    shutil.rmtree(tree.root / "Megatron LM")
    shutil.rmtree(tree.checkpoint)
    shutil.rmtree(tree.converted)
    for name in ("sft.parquet", "prompts.jsonl", "aime's.jsonl"):
        (tree.root / name).unlink()
    result = run(tree, stage, NUM_GPUS=None, PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    data = {"sft": ["sft_data_processing.py"], "rl": ["rl_data_preprocess.py", "zhuzilin/aime-2024"]}[stage]
    for says in ["MEGATRON_ROOT", "hf download", *data]:
        assert any(says in line for line in lines), says
    assert not tree.converted.exists() and not (tree.root / "started").exists()


@both
def test_a_missing_ray_is_named(tree, stage):
    (tree.root / "bin" / "ray").unlink()
    (tree.root / "bin" / "python3").symlink_to(sys.executable)
    result = run(tree, stage, PATH=f"{tree.root / 'bin'}:/usr/bin:/bin")
    if shutil.which("ray", path="/usr/bin:/bin"):
        pytest.skip("ray is installed in the system")
    assert result.returncode == 1 and "no ray in PATH" in result.stderr


@both
def test_missing_data_and_checkpoint_are_warnings_in_a_dry_run(tree, stage):
    shutil.rmtree(tree.checkpoint)
    shutil.rmtree(tree.converted)
    for name in ("sft.parquet", "prompts.jsonl", "aime's.jsonl"):
        (tree.root / name).unlink()
    result = dry_run(tree, stage)
    assert result.returncode == 0
    lines = result.stderr.splitlines()
    assert len(lines) == {"sft": 2, "rl": 3}[stage] and all(line.startswith("warning: ") for line in lines)
    assert flags_of(job_words(result.stdout))["--rotary-base"] == ["5000000"]
    assert "convert_hf_to_torch_dist.py" in result.stdout and not tree.converted.exists()


@both
def test_an_empty_data_file_is_missing_data(tree, stage):
    for name in ("sft.parquet", "prompts.jsonl", "aime's.jsonl"):
        (tree.root / name).write_text("")
    result = run(tree, stage)
    assert result.returncode == 1 and result.stderr.count("does not exist or is empty") == {"sft": 1, "rl": 2}[stage]


# Rope theta ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "config, theta",
    [
        ({"rope_theta": 5000000}, "5000000"),
        ({"rope_theta": 1e6}, "1000000"),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, "5000000"),
        ({"rope_theta": 10000, "rope_parameters": {"rope_theta": 5000000}}, "5000000"),
    ],
)
def test_rope_theta_is_the_checkpoints(tree, stage, config, theta):
    (tree.checkpoint / "config.json").write_text(json.dumps(config))
    assert flags_of(job_words(dry_run(tree, stage).stdout))["--rotary-base"] == [theta]


@both
@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rope_theta": "x"}', '{"rope_parameters": 5}'])
def test_a_config_without_rope_theta_stops(tree, stage, text):
    (tree.checkpoint / "config.json").write_text(text)
    result = dry_run(tree, stage)
    assert result.returncode == 1 and "no rope theta in it" in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


@both
@pytest.mark.parametrize("flags", [["--rotary-base", "1000000"], ["--rotary-base=10000"]])
def test_a_flag_against_rope_theta_stops(tree, stage, flags):
    result = dry_run(tree, stage, *flags)
    assert result.returncode == 1 and "but rope theta of" in result.stderr


@both
def test_a_model_script_that_fixes_another_base_stops(tree, stage):
    (tree.vime / "scripts" / "models" / "qwen3-4B.sh").write_text("MODEL_ARGS=(--rotary-base 1000000)\n")
    result = dry_run(tree, stage)
    assert result.returncode == 1 and "--rotary-base is 1000000, but rope theta" in result.stderr


@both
def test_a_model_script_without_a_base_is_given_one(tree, stage):
    (tree.vime / "scripts" / "models" / "qwen3-4B.sh").write_text("MODEL_ARGS=(--num-layers 36)\n")
    assert flags_of(job_words(dry_run(tree, stage).stdout))["--rotary-base"] == ["5000000"]


# The Megatron checkpoint ---------------------------------------------------------------------------------------------


@both
def test_a_missing_checkpoint_is_converted_and_then_the_job_starts(tree, stage):
    shutil.rmtree(tree.converted)
    tree.converted.mkdir()  # an empty folder is none
    (tree.converted.with_name(tree.converted.name + ".partial")).mkdir()  # nor is what an interrupted run left
    result = run(tree, stage, RAY_ADDRESS="http://127.0.0.1:1")
    assert result.returncode == 0, result.stderr
    argv = (tree.converted / "release" / "argv").read_text()
    assert "'--rotary-base', '5000000'" in argv and f"'--hf-checkpoint', {str(tree.checkpoint)!r}" in argv
    assert f"{tree.root / 'Megatron LM'}:{tree.vime}" in argv
    assert (tree.converted / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert [path.name for path in tree.checkpoint.parent.iterdir() if "partial" in path.name] == []
    assert (tree.root / "started").read_text().splitlines()[:2] == ["job", "submit"]


@both
@pytest.mark.parametrize("how", ["fails", "cut short"])
def test_a_failed_conversion_is_no_checkpoint_and_starts_nothing(tree, stage, how):
    shutil.rmtree(tree.converted)
    result = run(tree, stage, FAKE_CONVERSION=how)
    assert result.returncode != 0
    assert not tree.converted.exists() and not (tree.root / "started").exists()


@both
@pytest.mark.parametrize(
    "tracker, folder",
    [(None, "release"), ("release", "iter_0000001"), ("1", "release"), ("", "release"), ("20", "iter_0000010")],
)
def test_half_a_checkpoint_is_never_used(tree, stage, tracker, folder):
    shutil.rmtree(tree.converted)
    (tree.converted / folder).mkdir(parents=True)
    if tracker is not None:
        (tree.converted / "latest_checkpointed_iteration.txt").write_text(tracker)
    result = run(tree, stage)
    assert result.returncode == 1 and "is an unfinished checkpoint; remove it" in result.stderr
    assert (tree.converted / folder).exists() and not (tree.root / "started").exists()


@both
def test_a_checkpoint_of_ones_own_is_used_and_never_made(tree, stage):
    own = tree.root / "own sft"
    whole_checkpoint(own, "46", "iter_0000046")
    result = run(tree, stage, REF_LOAD=str(own), RAY_ADDRESS="http://127.0.0.1:1")
    assert result.returncode == 0 and flags_of(job_words(result.stdout))["--ref-load"] == [str(own)]
    result = run(tree, stage, REF_LOAD=str(tree.root / "typo"))
    assert result.returncode == 1 and "typo is not a whole Megatron checkpoint" in result.stderr
    assert not (tree.root / "typo").exists()


# vime's own parser ---------------------------------------------------------------------------------------------------

PARSE = """
import sys, types
import torch
if not torch.cuda.is_available():  # Megatron asks for the GPU's generation while it checks its arguments
    torch.cuda.get_device_properties = lambda *device: types.SimpleNamespace(major=9, minor=0)
try:
    from vime.utils.arguments import parse_args
    from vllm.entrypoints.openai.cli_args import FrontendArgs  # vime imports it while it parses
except ImportError as error:
    print(f"MISSING {error}")
    sys.exit(0)
args = parse_args()
print("PARSED", args.rotary_base, args.max_tokens_per_gpu, args.loss_mask_type, args.eval_reward_key)
"""


@both
def test_every_flag_is_one_of_vimes(tree, stage):
    vime, megatron = os.environ.get("VIME_ROOT"), Path(os.environ.get("MEGATRON_ROOT", "/root/Megatron-LM"))
    if not vime or not (megatron / "megatron" / "training").is_dir():
        pytest.skip("needs VIME_ROOT and MEGATRON_ROOT to name checkouts of vime and Megatron-LM")
    (tree.checkpoint / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "hidden_size": 2560,
                "num_attention_heads": 32,
                "num_hidden_layers": 36,
                "intermediate_size": 9728,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rms_norm_eps": 1e-06,
                "rope_theta": 5000000,
                "tie_word_embeddings": True,
                "vocab_size": 151936,
            }
        )
    )
    dry = dry_run(tree, stage, VIME_ROOT=vime, MEGATRON_ROOT=str(megatron), WANDB_KEY=SECRET)
    assert dry.returncode == 0, dry.stderr
    program = tree.root / "parse.py"
    program.write_text(PARSE)
    result = subprocess.run(
        [sys.executable, str(program), *job_words(dry.stdout)],
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
    assert "PARSED 5000000 9216 qwen" in result.stdout


# A cluster of the job's own, with a program in Ray's place -----------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False


def start(tree: Tree, tmp: Path, *flags: str, **changes: str) -> subprocess.Popen:
    """An RL launch in the background, its output in files."""
    settings = {"FAKE_REPORT": str(tree.root / "report.json"), "FAKE_EXIT": "0", "TMPDIR": str(tmp)}
    with open(tree.root / "out", "w") as out, open(tree.root / "err", "w") as err:
        process = subprocess.Popen(
            ["bash", str(EXAMPLE / "retool_qwen3_4b_rl.sh"), *flags],
            env=tree.environment(**{**settings, "WANDB_KEY": SECRET, **changes}),
            cwd=tree.root,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    LAUNCHED.append(process)
    return process


def start_real(tree: Tree, tmp: Path, *flags: str, **changes: str) -> subprocess.Popen:
    (tree.root / "bin" / "ray").unlink()
    return start(tree, tmp, *flags, **changes)


def check_ended_by(process: subprocess.Popen, number: int, tree: Tree, tmp: Path) -> None:
    """The signal, sent twice by an impatient user, ends everything and leaves nothing."""
    assert wait_for((tree.root / "report.json").exists), (tree.root / "err").read_text()[-3000:]
    pids = json.loads((tree.root / "report.json").read_text())["pids"]
    assert all(alive(pid) for pid in pids)
    process.send_signal(number)
    time.sleep(0.5)
    process.send_signal(number)
    assert process.wait(timeout=120) == 128 + number
    assert not any(alive(pid) for pid in pids)
    assert list(tmp.iterdir()) == []


@pytest.fixture
def short_tmp():
    """A temporary directory whose path leaves room for the names of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)


def printed_command(output: str) -> str:
    """The launch command at the head of the output, without what the job printed behind it."""
    lines = [line for line in output.splitlines() if not line.startswith("#")]
    end = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
    return "\n".join(lines[: end + 1])


FAKE_RAY = """
import json, os, signal, subprocess, sys, time
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

report = Path(os.environ["FAKE_REPORT"])
if sys.argv[1] == "start":
    # What outlives Ray's own shutdown: in another session, its parent gone, deaf to SIGTERM if asked to be.
    deaf = "trap '' TERM; " if os.environ.get("FAKE_DEAF") else ""
    with open(report.parent / "pids", "w") as pids:
        subprocess.run(["setsid", "sh", "-c", f"({deaf}sleep 600; sleep 600) & echo $!"], stdout=pids)
    Path(option("--temp-dir"), "session_x").mkdir()
    HTTPServer(("127.0.0.1", int(option("--dashboard-port"))), SimpleHTTPRequestHandler).serve_forever()
pids = [int(pid) for pid in (report.parent / "pids").read_text().split()] + [os.getpid(), os.getppid()]
(report.parent / "partial").write_text(json.dumps({"pids": pids, "key": os.environ.get("WANDB_API_KEY")}))
(report.parent / "partial").rename(report)
if "--sleep" in sys.argv:
    time.sleep(600)
sys.exit(int(os.environ["FAKE_EXIT"]))
"""


def start_fake(tree: Tree, tmp: Path, *flags: str, **changes: str) -> subprocess.Popen:
    (tree.root / "bin" / "ray.py").write_text(FAKE_RAY)
    (tree.root / "bin" / "ray").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tree.root}/bin/ray.py" "$@"\n')
    return start(tree, tmp, *flags, **changes)


@pytest.mark.parametrize("number, deaf", [(signal.SIGINT, ""), (signal.SIGTERM, "1"), (signal.SIGHUP, "")])
def test_a_signal_ends_all_that_was_started(tree, short_tmp, number, deaf):
    process = start_fake(tree, short_tmp, "--sleep", FAKE_DEAF=deaf)
    check_ended_by(process, number, tree, short_tmp)


@pytest.mark.parametrize("code, deaf", [(0, ""), (3, "1")])
def test_the_end_of_the_job_ends_all_that_was_started(tree, short_tmp, code, deaf):
    process = start_fake(tree, short_tmp, FAKE_EXIT=str(code), FAKE_DEAF=deaf)
    assert process.wait(timeout=120) == code
    report = json.loads((tree.root / "report.json").read_text())
    assert not any(alive(pid) for pid in report["pids"])
    assert report["key"] is None  # the client of the cluster needs none
    if code == 0:
        assert list(short_tmp.iterdir()) == []
    else:
        err = (tree.root / "err").read_text()
        kept = Path(err.rpartition("Ray's logs and temporary files: ")[2].splitlines()[0])
        assert kept.parent == short_tmp and (kept / "session_x").is_dir()


# Real Ray ------------------------------------------------------------------------------------------------------------

needs_ray = pytest.mark.skipif(
    not shutil.which("ray", path=str(Path(sys.executable).parent)), reason="ray is not installed"
)


@pytest.fixture
def other_cluster():
    """A Ray cluster of somebody else on the same machine, and its processes."""
    folder = tempfile.mkdtemp(prefix="other-", dir="/tmp")
    # Ray keeps a token in the home directory; with one there, a cluster asks everyone for it.
    home = Path(folder, "home")
    home.mkdir()
    program = (
        "import json, os, sys, ray, psutil, time\n"
        f"ray.init(num_cpus=1, num_gpus=0, include_dashboard=False, _temp_dir={folder!r})\n"
        "@ray.remote\nclass A:\n    def ping(self): return os.getpid()\n"
        "a = A.remote()\nray.get(a.ping.remote())\n"
        "print(json.dumps([p.pid for p in psutil.Process().children(recursive=True)]), flush=True)\n"
        "sys.stdin.readline()\nray.get(a.ping.remote())\nprint('still works', flush=True)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(home)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    pids = json.loads(process.stdout.readline())
    yield process, pids
    process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@needs_ray
def test_a_job_runs_on_a_cluster_of_its_own_and_nothing_else_is_touched(tree, short_tmp, other_cluster):
    other, other_pids = other_cluster
    process = start_real(tree, short_tmp, "--more", "a 'b' \"c\"", FAKE_EXIT="0")
    assert process.wait(timeout=300) == 0, (tree.root / "err").read_text()[-3000:]
    report = json.loads((tree.root / "report.json").read_text())

    assert report["argv"] == job_words(printed_command((tree.root / "out").read_text()))
    assert report["argv"][-2:] == ["--more", "a 'b' \"c\""]
    environment = report["environment"]
    assert environment["PYTHONPATH"].startswith(f"{EXAMPLE}:{tree.vime}:{tree.root / 'Megatron LM'}")
    assert report["marker"] == str(tree.vime / "generate_marker.py")
    assert report["gcs"].startswith("127.0.0.1:")
    version, status = report["stranger"]
    if tuple(map(int, version.split(".")[:2])) >= (2, 52):  # the first with tokens
        assert status == 401
    assert environment["WANDB_API_KEY"] == SECRET and "WANDB_KEY" not in environment
    assert not any(SECRET in line for line in report["command_lines"])
    for name in ("out", "err"):
        assert SECRET not in (tree.root / name).read_text()

    assert not any(alive(pid) for pid in report["pids"])
    assert list(short_tmp.iterdir()) == []
    assert all(alive(pid) for pid in other_pids)
    assert other.communicate("\n", timeout=60)[0].strip() == "still works"


@pytest.mark.ray
@needs_ray
def test_a_signal_ends_a_job_on_real_ray(tree, short_tmp):
    process = start_real(tree, short_tmp, "--sleep")
    check_ended_by(process, signal.SIGINT, tree, short_tmp)


@pytest.mark.ray
@needs_ray
def test_a_cluster_that_runs_already_is_used_and_stays(tree, short_tmp):
    (tree.root / "bin" / "ray").unlink()
    after = tree.root / "after"
    result = subprocess.run(
        [
            *[sys.executable, str(EXAMPLE / "launch" / "local_ray.py"), "--num-gpus", "8", "--", "bash", "-c"],
            # The second job shows that the first launch left the cluster as it was.
            'bash "$0" && ray job submit -- touch "$1"',
            str(EXAMPLE / "retool_qwen3_4b_rl.sh"),
            str(after),
        ],
        env=tree.environment(FAKE_REPORT=str(tree.root / "report.json"), TMPDIR=str(short_tmp), FAKE_EXIT="0"),
        cwd=tree.root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "--address http://127.0.0.1:" in result.stdout
    report = json.loads((tree.root / "report.json").read_text())
    assert report["argv"] == job_words(printed_command(result.stdout))
    assert after.exists() and list(short_tmp.iterdir()) == []


def test_a_cluster_that_does_not_start_is_one_clear_line(tree, short_tmp):
    (tree.root / "bin" / "ray").write_text("#!/bin/sh\necho no room on the device\nexit 1\n")
    result = run(tree, "rl", TMPDIR=str(short_tmp))
    assert result.returncode == 1
    assert "error: Ray ended while starting: no room on the device" in result.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_is_clean():
    scripts = sorted(path.name for path in EXAMPLE.glob("retool_*.sh")) + ["launch/common.sh"]
    result = subprocess.run(["shellcheck", "-x", *scripts], cwd=EXAMPLE, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
