"""What the launch scripts check before anything starts: paths, tools, GPUs, data, rope theta."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from launch_helpers import both, dry_run, flags_of, job_words, run

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
