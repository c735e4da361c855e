"""What the launch scripts check before anything starts: paths, tools, GPUs, data, rope theta."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch_helpers import EXAMPLE, VIMES_PARSER, both, dry_run, flags_of, job_words, run
from project import ORDINARY

OPTIONS = (
    VIMES_PARSER
    + """
import argparse, json
found, parse_known_args = set(), argparse.ArgumentParser.parse_known_args

def note(parser, *args, **options):
    found.update(name for action in parser._actions for name in action.option_strings)
    return parse_known_args(parser, *args, **options)

argparse.ArgumentParser.parse_known_args = note
try:
    parse_args()
except (SystemExit, Exception) as error:  # it is not given what it needs, but it has been built by then
    print(repr(error), file=sys.stderr)
print(json.dumps(sorted(name for name in found if name.startswith("--"))))
"""
)

# What is missing -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("mode", ["1", "0"])
@pytest.mark.parametrize(
    "changes, says",
    [
        ({"VIME_ROOT": "/nowhere"}, "set VIME_ROOT"),
        ({"VIME_ROOT": "/usr"}, "no vime in /usr"),
        ({"MEGATRON_ROOT": "/nowhere"}, "set MEGATRON_ROOT"),
        ({"MEGATRON_ROOT": "/usr"}, "no Megatron-LM in /usr: megatron/training is missing"),
        ({"MODEL_SCRIPT": "qwen3-5B"}, "no qwen3-5B.sh in"),
        ({"MODEL_SCRIPT": "qwen3-8B", "HF_CHECKPOINT": None}, "set HF_CHECKPOINT to the model"),
        ({"SAVE": "/proc/version/x"}, "SAVE: /proc/version/x cannot be made, since /proc/version is not a folder"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "NUM_GPUS is 8, but CUDA_VISIBLE_DEVICES names only 2: 0,1"),
        ({"MEGATRON_ROOT": "/usr:/bin"}, "set MEGATRON_ROOT"),
        ({"NUM_GPUS": "many"}, "NUM_GPUS is many"),
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
    if os.path.exists("/root/Megatron-LM"):
        pytest.skip("there is a /root/Megatron-LM here")
    said = dry_run(tree, stage, MEGATRON_ROOT=None).stderr
    closed = not os.access("/root", os.X_OK)  # to an ordinary user
    assert ("no permission to look into /root" if closed else "no Megatron-LM in /root/Megatron-LM") in said


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


@both
@pytest.mark.parametrize(
    "flags, settings, problem",
    [
        (["--tensor-model-parallel-size", "2", "--rollout-num-gpus-per-engine", "1"], {"NUM_GPUS": "7"}, "size is 2"),
        (["--context-parallel-size", "2", "--tensor-model-parallel-size=8"], {}, "size is 16, which does not divide"),
        (
            ["--pipeline-model-parallel-size", "3", "--tensor-model-parallel-size", "1"],
            {},
            "does not divide the 8 GPUs",
        ),
        (["--tensor-model-parallel-size", "8", "--context-parallel-size", "2"], {"NUM_NODES": "2"}, ""),
        (["--rollout-num-gpus-per-engine", "3"], {}, "--rollout-num-gpus-per-engine 3 does not divide the 8 GPUs"),
        (["--rollout-num-gpus-per-engine", "16"], {"NUM_NODES": "2"}, ""),
        (["--rollout-num-gpus-per-engine", "16"], {}, "--rollout-num-gpus-per-engine 16 does not divide the 8 GPUs"),
        (["--actor-num-gpus-per-node", "3", "--rollout-num-gpus-per-engine=3"], {}, "rl: size is 2, which does not"),
    ],
)
def test_the_parallel_sizes_fit_the_gpus(tree, stage, flags, settings, problem):
    result = dry_run(tree, stage, *flags, **{"RAY_ADDRESS": "http://127.0.0.1:1", **settings})
    only = problem.partition(": ")[0] if problem.startswith("rl: ") else stage
    expected = problem.removeprefix("rl: ") if only == stage else ""
    assert (result.returncode == 1) is bool(expected), result.stderr
    assert expected in result.stderr


# Flags ---------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "flag, says",
    [
        ("--rollout-batch-sise", "--rollout-batch-sise is a flag of neither vime nor Megatron, which would ignore it"),
        ("--rollout-batch-sise=4", "did you mean --rollout-batch-size?"),
        ("--tensor-model-paralel-size", "did you mean --tensor-model-parallel-size?"),
        ("--rollout_batch_size", ""),
        ("--num-rollout", ""),
        ("--no-switch", ""),
        ("--disable-switch", ""),
    ],
)
def test_a_misspelt_flag_stops(tree, stage, flag, says):
    result = dry_run(tree, stage, flag)
    assert (result.returncode, bool(result.stderr)) == ((1, True) if says else (0, False)), result.stderr
    assert says in result.stderr


def test_every_flag_of_a_real_parser_is_known(tmp_path):
    """The list is read from sources, which the parsers of vime, Megatron and vLLM have to agree with."""
    vime, megatron = os.environ.get("VIME_ROOT"), Path(os.environ.get("MEGATRON_ROOT", "/root/Megatron-LM"))
    if not vime or not (megatron / "megatron" / "training").is_dir():
        pytest.skip("needs VIME_ROOT and MEGATRON_ROOT to name checkouts of vime and Megatron-LM")
    program = tmp_path / "options.py"
    program.write_text(OPTIONS)
    environment = {**os.environ, "PYTHONPATH": f"{vime}:{megatron}:{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300
    )
    if "MISSING" in result.stdout:
        pytest.skip(f"vime's parser does not import here: {result.stdout.strip()}")
    flags = json.loads(result.stdout.splitlines()[-1])
    assert len(flags) > 500, result.stderr[-2000:]
    checks = [sys.executable, str(EXAMPLE / "launch" / "checks.py"), "flags", vime, str(megatron), "--", *flags]
    unknown = subprocess.run(checks, capture_output=True, text=True, timeout=300).stdout.splitlines()
    # What vLLM's router makes no parser of its own for; nobody passes these to a launch script.
    assert [line.split()[0] for line in unknown if not line.startswith(("--help", "--worker-urls", "--router-"))] == []


# The Hugging Face checkpoint -----------------------------------------------------------------------------------------


def test_the_checkpoint_is_whole(tree):
    (tree.checkpoint / "model.safetensors").unlink()
    index = tree.checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (tree.checkpoint / "model-1.safetensors").write_text("x")
    (tree.checkpoint / "model-2.safetensors").write_text("")
    result = run(tree, "rl")
    assert result.returncode == 1 and not (tree.root / "started").exists()
    assert "1 of 2 files that model.safetensors.index.json names are missing: model-2.safetensors" in result.stderr
    (tree.checkpoint / "model-2.safetensors").write_text("x")
    assert run(tree, "rl").returncode == 0
    (tree.checkpoint / "tokenizer.json").unlink()
    index.write_text("{")
    result = run(tree, "rl")
    assert "no tokenizer in it" in result.stderr and "index.json cannot be read" in result.stderr
    index.unlink()
    assert "no weights in it" in run(tree, "rl").stderr


@both
def test_the_model_script_describes_the_checkpoint(tree, stage):
    config = {"rope_theta": 5000000, "num_hidden_layers": 28, "hidden_size": 1024}
    (tree.checkpoint / "config.json").write_text(json.dumps(config))
    result = dry_run(tree, stage)
    assert result.returncode == 1
    assert (
        "num_hidden_layers is 28 in the checkpoint's config.json, but --num-layers is 36 in qwen3-4B" in result.stderr
    )
    (tree.vime / "scripts" / "models" / "small.sh").write_text("MODEL_ARGS=(--num-layers 28 --hidden-size 1024)\n")
    result = dry_run(tree, stage, MODEL_SCRIPT="small")
    assert result.returncode == 0, result.stderr
    flags = flags_of(job_words(result.stdout))
    assert (flags["--num-layers"], flags["--rotary-base"]) == (["28"], ["5000000"])
    (tree.checkpoint / "config.json").write_text(json.dumps({"text_config": {**config, "tie_word_embeddings": False}}))
    assert "lacks --untie-embeddings" in dry_run(tree, stage, MODEL_SCRIPT="small").stderr


@both
def test_hints_name_no_other_model_than_was_asked_for(tree, stage):
    result = dry_run(tree, stage, HF_CHECKPOINT=str(tree.root / "my model"))
    assert "hf download OWNER/NAME --local-dir" in result.stderr
    assert "Qwen/" not in result.stderr and "font-info" not in result.stderr
    default = {"sft": "Qwen/Qwen3-4B-Instruct-2507", "rl": "font-info/qwen3-4b-sft-SGLang-RL"}[stage]
    assert (
        f"hf download {default} --local-dir {tree.root}/downloads/" in dry_run(tree, stage, HF_CHECKPOINT=None).stderr
    )


@both
def test_every_model_script_of_vime_can_be_named(tree, stage):
    vime = os.environ.get("VIME_ROOT")
    if not vime:
        pytest.skip("needs VIME_ROOT to name a checkout of vime")
    shutil.copytree(Path(vime) / "scripts" / "models", tree.vime / "scripts" / "models", dirs_exist_ok=True)
    missing = str(tree.root / "not downloaded yet")
    for script in sorted((tree.vime / "scripts" / "models").glob("*.sh")):
        result = dry_run(tree, stage, MODEL_SCRIPT=script.stem, HF_CHECKPOINT=missing)
        assert result.returncode == 0, (script.stem, result.stderr)
        assert "--num-layers" in result.stdout


# Settings ------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes", "on"])
def test_a_dry_run_is_one_in_every_spelling(tree, stage, value):
    result = run(tree, stage, DRY_RUN=value)
    assert result.returncode == 0 and not (tree.root / "started").exists()


@both
@pytest.mark.parametrize("value", ["2", "dry", "True!"])
def test_another_spelling_of_a_dry_run_starts_nothing(tree, stage, value):
    result = run(tree, stage, DRY_RUN=value)
    assert result.returncode == 1 and f"DRY_RUN is {value}, expected 1 or 0" in result.stderr
    assert not (tree.root / "started").exists()


@both
def test_a_slash_at_the_end_names_the_same_checkpoint(tree, stage):
    for path in (f"{tree.checkpoint}/", f"{tree.checkpoint}//", f"{tree.checkpoint.parent}/./Qwen3-4B/."):
        flags = flags_of(job_words(dry_run(tree, stage, HF_CHECKPOINT=path).stdout))
        assert flags["--hf-checkpoint"] == [str(tree.checkpoint)]
        assert flags["--ref-load"] == [str(tree.converted)]
        assert flags["--save"] == [f"{tree.checkpoint}_retool_{stage}"]


@both
def test_rows_of_a_file_are_data_and_a_folder_is_none(tree, stage):
    variable = {"sft": "SFT_DATA", "rl": "PROMPT_DATA"}[stage]
    for rows in ("@[0:100]", "@[:8]", "@[-8:]"):
        path = f"{tree.environment()[variable]}{rows}"
        assert flags_of(job_words(run(tree, stage, DRY_RUN="1", **{variable: path}).stdout))["--prompt-data"] == [path]
    for value, says in [
        (str(tree.root), "is a folder; name the .jsonl or .parquet file in it"),
        (f"{tree.root}@[0:3]", "is a folder"),
        (str(tree.vime / "train.py"), "which must be .jsonl or .parquet"),
        (str(tree.root / "none.jsonl@[0:3]"), "none.jsonl does not exist or is empty"),
    ]:
        result = run(tree, stage, **{variable: value})
        assert result.returncode == 1 and f"{variable}: " in result.stderr and says in result.stderr


def test_rl_takes_the_downloaded_files_where_none_were_made(tree):
    changes = {"PROMPT_DATA": None, "EVAL_DATA": None}
    names = ["dapo-math-17k/dapo-math-17k.jsonl", "aime-2024/aime-2024.jsonl"]
    downloads = [tree.root / "downloads" / name for name in names]
    made = [tree.vime / "data" / "retool" / Path(name).name for name in names]
    for expected in (downloads, made):
        for file in expected:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("x")
        result = dry_run(tree, "rl", **changes)
        assert (result.returncode, result.stderr) == (0, "")
        flags = flags_of(job_words(result.stdout))
        assert flags["--prompt-data"] == [str(expected[0])]
        assert flags["--eval-prompt-data"] == ["aime", str(expected[1])]


def test_a_folder_that_cannot_be_written_is_no_place_for_checkpoints(tree):
    closed = tree.root / "closed"
    closed.mkdir(mode=0o500)
    result = dry_run(tree, "rl", "--save", str(closed / "x"))
    if os.access(closed, os.W_OK):
        assert result.returncode == 0  # root may write everywhere
    else:
        assert result.returncode == 1 and f"SAVE: {closed} cannot be written to" in result.stderr


CLOSED = {
    **{"VIME_ROOT": "vime", "MEGATRON_ROOT": "Megatron", "HF_CHECKPOINT": "model", "REF_LOAD": "model_torch_dist"},
    **{"PROMPT_DATA": "a.jsonl", "EVAL_DATA": "b.jsonl@[0:10]"},
}


@pytest.mark.parametrize("variable", CLOSED)
def test_what_may_not_be_looked_at_is_not_called_missing(tree, variable):
    closed = tree.root / "closed"
    closed.mkdir(mode=0)
    result = run(tree, "rl", before=ORDINARY, **{variable: str(closed / CLOSED[variable])})
    [line] = [line for line in result.stderr.splitlines() if variable in line]
    assert result.returncode == 1 and line.startswith(f"error: {variable}: {closed}/")
    assert line.endswith(f"may be there, but there is no permission to look into {closed}")


@both
@pytest.mark.parametrize(
    "variable, says", [("VIME_ROOT", "no permission to look into"), ("SAVE", "cannot be written")]
)
def test_a_folder_that_is_itself_closed_is_said(tree, stage, variable, says):
    closed = tree.root / "closed"
    closed.mkdir(mode=0)
    result = run(tree, stage, before=ORDINARY, **{variable: str(closed)})
    assert result.returncode == 1 and says in result.stderr and "Permission denied" not in result.stderr
