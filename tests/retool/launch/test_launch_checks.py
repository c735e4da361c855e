"""What is checked before a launch starts anything: machine, checkpoints, rope theta, GPUs and CPUs, data, settings."""

import json
import os
import shlex
import shutil
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from commands import job_words
from launch import checkpoints, checks, ray_job
from launch_helpers import EXAMPLE, MESSAGES, SECRET, both, dry_run, flags_of, run, run_script, whole_checkpoint
from project import ORDINARY
from retool.supervise import LaunchError

CLUSTER = {"RAY_ADDRESS": "http://127.0.0.1:1"}


def write_config(tree, **config):
    (tree.checkpoint / "config.json").write_text(json.dumps({"rope_theta": 5000000, **config}))


# What is missing -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "changes, says",
    [
        ({"VIME_ROOT": "/nowhere"}, "set VIME_ROOT"),
        ({"VIME_ROOT": "/usr"}, "no vime in /usr"),
        ({"MEGATRON_ROOT": "/nowhere"}, "set MEGATRON_ROOT"),
        ({"MEGATRON_ROOT": "/usr"}, "no Megatron-LM in /usr: megatron/training is missing"),
        ({"MEGATRON_ROOT": "/usr:/bin"}, "a colon in the path"),
        ({"MODEL_SCRIPT": "qwen3-5B"}, "no qwen3-5B.sh in"),
        ({"MODEL_SCRIPT": "qwen3-8B", "HF_CHECKPOINT": None}, "set HF_CHECKPOINT to the model"),
        ({"SAVE": "/proc/version/x"}, "SAVE: /proc/version/x cannot be made, since /proc/version is not a folder"),
        ({"SAVE": "/proc/x"}, "SAVE: /proc cannot be written to"),
        ({"SAVE": "/sys/x/y"}, "SAVE: /sys cannot be written to"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,"}, "NUM_GPUS is 8, but CUDA_VISIBLE_DEVICES names only 2: 0,1,"),
        ({"NUM_GPUS": "many"}, "NUM_GPUS is many"),
        ({"NUM_NODES": "0"}, "NUM_NODES is 0"),
        ({"NUM_NODES": "2"}, "set RAY_ADDRESS"),
        ({"RAY_ADDRESS": "127.0.0.1:6379"}, "RAY_ADDRESS is 127.0.0.1:6379, expected the address of the cluster's da"),
        ({"RAY_ADDRESS": "auto"}, "such as http://10.0.0.1:8265"),
        ({"RAY_ADDRESS": "ray://10.0.0.1:10001"}, "such as http://10.0.0.1:8265"),
        ({"DRY_RUN": "2"}, "DRY_RUN is 2, expected 1 or 0"),
        ({"DRY_RUN": "True!"}, "DRY_RUN is True!, expected 1 or 0"),
        ({"HF_CHECKPOINT": "/proc/version"}, "HF_CHECKPOINT: /proc/version is a file; name the folder"),
    ],
)
def test_what_is_wrong_stops_dry_runs_too(tree, stage, changes, says):
    for mode in ("1", "0"):
        result = run(tree, stage, **{"DRY_RUN": mode, **changes})
        assert result.code == 1 and not result.started
        assert any(line.startswith("error: ") and says in line for line in result.err.splitlines()), result.err
        assert result.out == ""


@both
def test_all_that_is_missing_is_listed_before_anything_starts(tree, stage):
    for folder in (tree.root / "Megatron LM", tree.checkpoint, tree.converted):
        shutil.rmtree(folder)
    result = run(tree, stage, NUM_GPUS=None, MEGATRON_ROOT=None, PATH="/usr/bin:/bin")
    assert result.code == 1 and not result.started
    assert all(line.startswith("error: ") for line in result.err.splitlines())
    closed = not os.access("/root", os.X_OK)  # to an ordinary user
    megatron = "no permission to look into /root" if closed else "no Megatron-LM in /root/Megatron-LM"
    for says in (megatron, "no GPU found with nvidia-smi; set NUM_GPUS", "no ray in PATH"):
        assert says in result.err or (says.startswith("no ray") and shutil.which("ray", path="/usr/bin:/bin"))
    result = run(tree, stage, MEGATRON_ROOT="/usr")  # what depends on it is not asked
    assert "hf download" not in result.err


@both
def test_missing_data_and_checkpoint_are_warnings_in_a_dry_run(tree, stage):
    shutil.rmtree(tree.checkpoint)
    shutil.rmtree(tree.converted)
    for name in ("sft.parquet", "prompts.jsonl", "aime's.jsonl"):
        (tree.root / name).unlink()
    result = dry_run(tree, stage)
    assert result.code == 0
    lines = result.err.splitlines()
    assert len(lines) == {"sft": 2, "rl": 3}[stage] and all(line.startswith("warning: ") for line in lines)
    assert "hf download OWNER/NAME --local-dir" in lines[0]
    assert flags_of(job_words(result.out))["--rotary-base"] == ["5000000"]
    assert "convert_hf_to_torch_dist.py" in result.out and not tree.converted.exists()
    assert run(tree, stage).code == 1
    hub = {"sft": "Qwen/Qwen3-4B-Instruct-2507", "rl": "font-info/qwen3-4b-sft-SGLang-RL"}[stage]
    assert f"hf download {hub} --local-dir '{tree.root}/downloads/" in dry_run(tree, stage, HF_CHECKPOINT=None).err
    named = f"(a folder is asked for, no name on the hub); get it: hf download Qwen/X --local-dir '{tree.root}/Qwen/X'"
    assert named in dry_run(tree, stage, HF_CHECKPOINT="Qwen/X/").err


# Checkpoints ---------------------------------------------------------------------------------------------------------


def lose_a_shard(tree):
    (tree.checkpoint / "model.safetensors").unlink()
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tree.checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tree.checkpoint / "model-1.safetensors").write_text("x")
    (tree.checkpoint / "model-2.safetensors").write_text("")


@pytest.mark.parametrize(
    "change, says",
    [
        (lose_a_shard, "1 of 2 weight files are missing: model-2.safetensors"),
        (lambda tree: (tree.checkpoint / "tokenizer.json").unlink(), "no tokenizer in it"),
        (lambda tree: (tree.checkpoint / "model.safetensors").unlink(), "no weights in it"),
        (lambda tree: (tree.checkpoint / "model.safetensors.index.json").write_text("{"), "index.json cannot be read"),
        (
            lambda tree: (tree.checkpoint / "model.safetensors").write_text(
                "version https://git-lfs.github.com/spec/v1"
            ),
            "1 of 1 weight files are Git LFS pointers, not weights: model.safetensors; download it again",
        ),
    ],
)
def test_the_checkpoint_is_whole(tree, change, says):
    change(tree)
    result = run(tree, "rl")
    assert result.code == 1 and says in result.err
    assert dry_run(tree, "rl").code == 0  # the command is shown before the download


@pytest.mark.parametrize("place", ["hub/models--Qwen--Qwen3-4B/snapshots/abc", ".cache/modelscope/hub/Qwen/Qwen3-4B"])
def test_nothing_is_made_in_a_cache_of_downloads(tree, place):
    model = tree.root / place
    shutil.copytree(tree.checkpoint, model)
    settings = {"HF_CHECKPOINT": str(model)}
    result = dry_run(tree, "rl", **settings)
    assert result.code == 1 and "set REF_LOAD and SAVE to folders elsewhere" in result.err
    assert "set SAVE to folders elsewhere" in dry_run(tree, "rl", **settings, REF_LOAD=str(tree.converted)).err
    result = dry_run(tree, "rl", **settings, REF_LOAD=str(tree.root / "x_torch_dist"), SAVE=str(tree.root / "save"))
    assert (result.code, result.err) == (0, "") and f"# Megatron checkpoint {tree.root}/x_torch_dist" in result.out
    if "models--" in place:
        result = dry_run(tree, "rl", HF_CHECKPOINT=str(model.parents[1]))
        assert result.code == 1 and f"set HF_CHECKPOINT={model}, and REF_LOAD and SAVE" in result.err


@pytest.mark.parametrize(
    "tracker, folder",
    [(None, "release"), ("release", "iter_0000001"), ("1", "release"), ("", "release"), ("20", "iter_0000010")],
)
def test_half_a_checkpoint_is_never_used(tree, tracker, folder):
    shutil.rmtree(tree.converted)
    (tree.converted / folder).mkdir(parents=True)
    if tracker is not None:
        (tree.converted / "latest_checkpointed_iteration.txt").write_text(tracker)
    result = run(tree, "sft")
    assert result.code == 1 and "is an unfinished checkpoint; remove it" in result.err
    result = run(tree, "rl", REF_LOAD=str(tree.converted.rename(tree.root / "own sft")))
    assert result.code == 1 and "own sft is not a whole Megatron checkpoint" in result.err


@both
def test_a_checkpoint_of_ones_own_is_used_and_never_made(tree, stage):
    own = tree.root / "own sft"
    whole_checkpoint(own, "46", "iter_0000046")
    result = run(tree, stage, REF_LOAD=str(own))
    assert result.code == 0 and flags_of(job_words(result.out))["--ref-load"] == [str(own)]
    result = run(tree, stage, REF_LOAD=str(tree.root / "typo"))
    assert result.code == 1 and "typo is not a whole Megatron checkpoint" in result.err
    assert "convert_hf_to_torch_dist" not in dry_run(tree, stage, REF_LOAD=str(tree.root / "typo")).out


@both
def test_a_resumed_run_is_announced_and_must_be_the_one_that_was_meant(tree, stage):
    save = tree.root / "save"
    assert "# resumed" not in dry_run(tree, stage, SAVE=str(save)).out
    whole_checkpoint(save, "44", "iter_0000044")
    result = dry_run(tree, stage, SAVE=str(save))
    assert result.code == 0 and f"# resumed: the run in {save}, which has done step 44;" in result.out
    (save / ".retool_ref_load").write_text(f"{tree.converted}\n")
    assert dry_run(tree, stage, SAVE=str(save)).code == 0
    whole_checkpoint(tree.root / "other")
    result = dry_run(tree, stage, SAVE=str(save), REF_LOAD=str(tree.root / "other"))
    assert result.code == 1 and f"the run in {save} was started from {tree.converted}, and would go on" in result.err
    (save / "iter_0000044").rmdir()
    result = run(tree, stage, SAVE=str(save))
    assert (
        result.code == 1 and "latest_checkpointed_iteration.txt names iter_0000044, which is not there" in result.err
    )


def test_there_is_room_for_what_is_written(tree, monkeypatch):
    free = shutil.disk_usage(tree.root).free
    for weights, flags, says in [
        (free // 6, [], "and the run writes 0 GB for REF_LOAD and checkpoints of"),
        (free // 6, ["--no-save-optim", "--save-interval", "1500"], ""),
        (free // 500, [], "and the run writes 150 checkpoints of"),
        (free // 500, ["--save-retain-interval", "1000", "--no-save-optim"], ""),
    ]:
        monkeypatch.setattr(checkpoints, "weight_bytes", lambda folder, weights=weights: (weights, 2))
        result = run(tree, "rl", *flags)
        assert says in result.err and bool(result.err) is bool(says)
        assert result.started is ("REF_LOAD" not in says) and dry_run(tree, "rl", *flags).code == 0
    shutil.rmtree(tree.converted)
    monkeypatch.setattr(checkpoints, "weight_bytes", lambda folder: (free // 15 * 2, 2))
    assert run(tree, "rl").code == 1


# Rope theta and sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, theta",
    [
        ({"rope_theta": 5000000}, "5000000"),
        ({"rope_theta": 1e6}, "1000000"),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, "5000000"),
        ({"rope_theta": 10000, "rope_parameters": {"rope_theta": 5000000}}, "5000000"),
        *((text, None) for text in ("{", "[]", "{}", '{"rope_theta": "x"}', '{"rope_parameters": 5}')),
    ],
)
def test_rope_theta_is_the_checkpoints(tree, config, theta):
    (tree.checkpoint / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for script in (None, "MODEL_ARGS=(--num-layers 36)\n"):  # which says none itself
        if script:
            (tree.vime / "scripts" / "models" / "qwen3-4B.sh").write_text(script)
        result = dry_run(tree, "rl")
        if theta:
            assert flags_of(job_words(result.out))["--rotary-base"] == [theta]
        else:
            assert (result.code, result.out) == (1, "") and "no rope theta in it" in result.err


def test_the_models_flags_are_those_of_its_script(tree):
    (tree.vime / "scripts" / "models" / "small.sh").write_text("MODEL_ARGS=(--num-layers 28)\n")
    (tree.checkpoint / "config.json").write_text(json.dumps({"text_config": {"rope_theta": 1e4}}))
    flags = flags_of(job_words(dry_run(tree, "rl", MODEL_SCRIPT="small", MODEL_ARGS_ROTARY_BASE="7").out))
    assert (flags["--num-layers"], flags["--rotary-base"]) == (["28"], ["10000"])
    (tree.vime / "scripts" / "models" / "small.sh").write_text("echo oops >&2; false\n")
    result = dry_run(tree, "rl", MODEL_SCRIPT="small")
    assert result.code == 1 and "MODEL_SCRIPT: " in result.err and "small.sh fails: oops" in result.err


@both
def test_every_model_script_of_vime_can_be_named(tree, stage):
    vime = os.environ.get("VIME_ROOT")
    if not vime:
        pytest.skip("needs VIME_ROOT to name a checkout of vime")
    shutil.copytree(Path(vime) / "scripts" / "models", tree.vime / "scripts" / "models", dirs_exist_ok=True)
    missing = str(tree.root / "not downloaded yet")
    for script in sorted((tree.vime / "scripts" / "models").glob("*.sh")):
        result = dry_run(tree, stage, MODEL_SCRIPT=script.stem, HF_CHECKPOINT=missing)
        assert result.code == 0, (script.stem, result.err)
        assert "--num-layers" in result.out


# GPUs and CPUs -------------------------------------------------------------------------------------------------------

TENSOR, ENGINE = "--tensor-model-parallel-size", "--rollout-num-gpus-per-engine"


@pytest.mark.parametrize(
    "flags, settings, says",
    [
        ([ENGINE, "3"], {}, f"{ENGINE} 3 does not divide the 8 GPUs"),
        ([ENGINE, "16"], {"NUM_NODES": "2"}, ""),
        ([ENGINE, "16"], {}, f"{ENGINE} 16 does not divide the 8 GPUs"),
        (["--actor-num-gpus-per-node", "3", f"{ENGINE}=2"], {}, f"{ENGINE} 2 does not divide the 3 GPUs"),
        ([TENSOR, "6"], {"NUM_GPUS": "6"}, f"{TENSOR} is 6, which does not divide the model's 32 attention heads"),
        ([TENSOR, "6"], {"NUM_GPUS": "6"}, f"{TENSOR} is 6, which does not go with the model's 8 groups"),
        ([TENSOR, "16"], {"NUM_NODES": "2"}, ""),  # each group of keys and values on two GPUs
        (["--num-query-groups", "4"], {}, "num_key_value_heads is 8 in"),
        ([ENGINE, "6", "--vllm-pipeline-parallel-size", "3"], {"NUM_GPUS": "6"}, ""),
    ],
)
def test_the_parallel_sizes_fit_the_gpus_and_the_model(tree, flags, settings, says):
    write_config(tree, num_attention_heads=32, num_key_value_heads=8)
    result = dry_run(tree, "rl", *flags, **{**CLUSTER, **settings})
    assert (result.code == 1) is bool(says), result.err
    assert says in result.err


EXTERNAL = ["--rollout-external-engine-addrs", "a:1", "b:1", "--more", "x"]


@pytest.mark.parametrize(
    "stage, flags, settings, gpus, cpus",
    [
        ("sft", [], {}, 8, 10),
        ("rl", [], {}, 8, 10),
        ("rl", [], {"NUM_NODES": "4"}, 32, 34),
        ("rl", EXTERNAL, {"NUM_GPUS": "1"}, 1, 4),
        ("sft", ["--rollout-num-gpus", "4"], {}, 8, 10),
    ],
)
def test_a_run_for_which_the_cluster_is_too_small_is_refused(tree, stage, flags, settings, gpus, cpus):
    flags = [*flags, TENSOR, "1", ENGINE, "1"]
    words = job_words(dry_run(tree, stage, *flags, **CLUSTER, **settings).out)
    assert checks.resources(words) == (gpus, cpus)
    for there, says in [
        ({"GPU": gpus, "CPU": cpus}, ""),
        (
            {"GPU": gpus, "CPU": cpus - 1},
            f"has {cpus - 1} CPUs, and the run asks for {cpus} (1 with each of {gpus} GPUs",
        ),
        ({"CPU": cpus}, f"has 0 GPUs, and the run asks for {gpus}"),
    ]:
        with mock.patch.object(ray_job, "resources", return_value=there):
            result = run(tree, stage, *flags, **CLUSTER, **settings)
        assert (result.code, result.started) == ((1, False) if says else (0, True)), result.err
        assert says in result.err and (not says or "would wait for ever" in result.err)


def test_a_machine_that_has_too_few_gpus_is_named(tree):
    result = dry_run(tree, "rl", "--actor-num-nodes", "2")
    assert result.code == 1 and "the run asks for 16 GPUs, and this machine has 8 (NUM_GPUS)" in result.err


def test_no_cluster_at_the_address_is_one_clear_line_before_anything_else(tree):
    shutil.rmtree(tree.converted)
    result = run(tree, "rl", **CLUSTER)
    assert result.code == 1 and not result.started and not tree.converted.exists()
    [line] = result.err.splitlines()
    assert line.startswith("error: no Ray cluster answers at RAY_ADDRESS http://127.0.0.1:1: ")
    with pytest.raises(LaunchError, match="no Ray cluster answers at RAY_ADDRESS http://127.0.0.1:1/x y: "):
        ray_job.resources("http://127.0.0.1:1/x y")


# Settings ------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes", "on"])
def test_a_dry_run_is_one_in_every_spelling(tree, stage, value):
    assert not run(tree, stage, DRY_RUN=value).started
    assert run(tree, stage, DRY_RUN="off").started


@both
def test_a_slash_at_the_end_names_the_same_checkpoint(tree, stage):
    for path in (f"{tree.checkpoint}/", f"{tree.checkpoint}//", f"{tree.checkpoint.parent}/./Qwen3-4B/."):
        flags = flags_of(job_words(dry_run(tree, stage, HF_CHECKPOINT=path).out))
        assert flags["--hf-checkpoint"] == [str(tree.checkpoint)]
        assert flags["--ref-load"] == [str(tree.converted)]
        assert flags["--save"] == [f"{tree.checkpoint}_retool_{stage}"]


def test_a_flag_that_stands_for_a_setting_is_checked_as_the_setting_is(tree):
    result = dry_run(tree, "rl", "--save", "/proc/x", "--hf-checkpoint", "/nowhere/model")
    assert result.code == 1 and "SAVE: /proc cannot be written to" in result.err
    assert "HF_CHECKPOINT: /nowhere/model/config.json does not exist" in result.err


# Data ----------------------------------------------------------------------------------------------------------------


def lines(*rows) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


GOOD = {"prompt": MESSAGES[:1], "label": "42"}


@pytest.mark.parametrize(
    "variable, text, says",
    [
        ("PROMPT_DATA", "", "does not exist or is empty; make it: python"),
        ("PROMPT_DATA", "\n\n", "there is no row in it"),
        ("PROMPT_DATA", lines(GOOD, "garbage"), "line 2 is no JSON: garbage"),
        ("PROMPT_DATA", lines("[1, 2]"), "line 1 is no JSON object"),
        ("PROMPT_DATA", b"\xff\xfe\x00", "it is not UTF-8 text"),
        (
            "PROMPT_DATA",
            lines({"question": "6 * 7?", "label": "42"}),
            "line 1 has no prompt (--input-key), only question,",
        ),
        (
            "PROMPT_DATA",
            lines(GOOD, {"prompt": "x", "answer": "2"}),
            "line 2 has no label (--label-key), only prompt, an",
        ),
        ("PROMPT_DATA", lines({"prompt": "x", "label": None}), "line 1 has no label"),
        ("PROMPT_DATA", lines({"prompt": {"a": 1}, "label": "2"}), "has no list of messages in prompt, but {'a': 1}"),
        ("EVAL_DATA", lines({"prompt": "x"}), "EVAL_DATA"),
        (
            "SFT_DATA",
            lines({"messages": MESSAGES}),
            "line 1 has no tools (--tool-key), only messages; make it: python",
        ),
        (
            "SFT_DATA",
            lines({"messages": "text", "tools": "[]"}),
            "line 1 has no list of messages in messages, but text",
        ),
        (
            "SFT_DATA",
            lines({"messages": MESSAGES, "tools": "[]"}),
            "has 1 rows, fewer than a batch (--rollout-batch-size 128)",
        ),
    ],
)
def test_the_first_rows_are_looked_into(tree, variable, text, says):
    stage = "sft" if variable == "SFT_DATA" else "rl"
    path = tree.root / "data.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = run(tree, stage, **{variable: str(path)})
    assert result.code == 1 and not result.started
    [line] = result.err.splitlines()
    assert line.startswith(f"error: {variable}: ") and says in line


def test_parquet_is_looked_into_as_well(tree):
    path = tree.root / "raw.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": [MESSAGES] * 128}), path)  # as published
    result = run(tree, "sft", SFT_DATA=str(path))
    assert result.code == 1 and "row 1 has no tools (--tool-key), only messages; make it: python" in result.err
    path.write_text("no parquet")
    assert "it cannot be read as parquet (" in run(tree, "sft", SFT_DATA=str(path)).err
    with mock.patch.dict("sys.modules", {"pyarrow": None}):  # a machine that only submits
        result = run(tree, "sft", SFT_DATA=str(path))
    assert result.started and "is not looked into (" in result.err


def test_few_rows_are_repeated_where_steps_are_counted(tree):
    path = tree.root / "few.jsonl"
    path.write_text(lines({"messages": MESSAGES, "tools": []}))
    result = run(tree, "sft", "--num-rollout", "3", SFT_DATA=str(path))
    assert result.started and result.err.startswith("warning: SFT_DATA: ") and "they are repeated" in result.err


def test_data_that_flags_name_are_looked_into_with_the_keys_that_flags_name(tree):
    good, bad = tree.root / "good.jsonl", tree.root / "bad.jsonl"
    good.write_text(lines({"question": "x", "answer": "2"}))
    bad.write_text(lines({"prompt": "x"}))
    flags = ["--prompt-data", str(good), "--input-key", "question", "--label-key", "answer"]
    result = dry_run(tree, "rl", *flags, EVAL_DATA=str(good), PROMPT_DATA="/nowhere.jsonl")
    assert (result.code, result.err) == (0, "")
    result = dry_run(tree, "rl", "--eval-prompt-data", "a", str(tree.root / "prompts.jsonl"), "b", str(bad))
    assert result.code == 1 and f"--eval-prompt-data: {bad}: line 1 has no label" in result.err


def test_the_remedy_for_missing_data_is_the_guides_command(tree):
    data = {"PROMPT_DATA": str(tree.root / "p.jsonl"), "EVAL_DATA": str(tree.root / "e.jsonl")}
    error = run(tree, "rl", PROMPT_DATA=data["PROMPT_DATA"], EVAL_DATA=f"{data['EVAL_DATA']}@[0:4]").err
    script, paths = f"python {EXAMPLE}/rl_data_preprocess.py", {name: shlex.quote(path) for name, path in data.items()}
    assert f"{script} --exclude {paths['EVAL_DATA']} --output {paths['PROMPT_DATA']}\n" in error
    assert f"{script} --dataset zhuzilin/aime-2024 --output {paths['EVAL_DATA']}\n" in error


@both
def test_rows_of_a_file_are_data_and_a_folder_is_none(tree, stage):
    variable = {"sft": "SFT_DATA", "rl": "PROMPT_DATA"}[stage]
    for rows in ("@[0:1000]", "@[:128]", "@[0:]"):
        path = f"{tree.environment()[variable]}{rows}"
        assert flags_of(job_words(dry_run(tree, stage, **{variable: path}).out))["--prompt-data"] == [path]
    for value, says in [
        (str(tree.root), "is a folder; name the .jsonl or .parquet file in it"),
        (f"{tree.root}@[0:3]", "is a folder"),
        (str(tree.vime / "train.py"), "which must be .jsonl or .parquet"),
        (str(tree.root / "none.jsonl@[0:3]"), "none.jsonl does not exist or is empty"),
        (f"{tree.environment()[variable]}@[200:]", "there is no row in it"),
        (f"{tree.environment()[variable]}@[-8:]", "vime cannot count rows from the end"),
    ]:
        result = run(tree, stage, **{variable: value})
        assert result.code == 1 and f"{variable}: " in result.err and says in result.err


def test_rl_takes_the_downloaded_files_where_none_were_made(tree):
    changes = {"PROMPT_DATA": None, "EVAL_DATA": None}
    names = ["dapo-math-17k/dapo-math-17k.jsonl", "aime-2024/aime-2024.jsonl"]
    downloads = [tree.root / "downloads" / name for name in names]
    made = [tree.vime / "data" / "retool" / Path(name).name for name in names]
    for expected in (downloads, made):
        for file in expected:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(lines(GOOD))
        result = dry_run(tree, "rl", **changes)
        assert (result.code, result.err) == (0, "")
        flags = flags_of(job_words(result.out))
        assert flags["--prompt-data"] == [str(expected[0])]
        assert flags["--eval-prompt-data"] == ["aime", str(expected[1])]


# What may not be looked at, as an ordinary user ----------------------------------------------------------------------

CLOSED = {
    **{"VIME_ROOT": "vime", "MEGATRON_ROOT": "Megatron", "HF_CHECKPOINT": "model", "REF_LOAD": "model_x"},
    **{"PROMPT_DATA": "a.jsonl", "EVAL_DATA": "b.jsonl@[0:10]"},
}


@pytest.mark.parametrize("variable", CLOSED)
def test_what_may_not_be_looked_at_is_not_called_missing(tree, variable):
    closed = tree.root / "closed"
    closed.mkdir(mode=0)
    result = run_script(tree, "rl", before=ORDINARY, **{variable: str(closed / CLOSED[variable])})
    [line] = [line for line in result.stderr.splitlines() if variable in line]
    assert result.returncode == 1 and line.startswith(f"error: {variable}: {closed}/")
    assert line.endswith(f"may be there, but there is no permission to look into {closed}")


@pytest.mark.parametrize(
    "variable, says", [("VIME_ROOT", "no permission to look into"), ("SAVE", "cannot be written")]
)
def test_a_folder_that_is_itself_closed_is_said(tree, variable, says):
    closed = tree.root / "closed"
    closed.mkdir(mode=0)
    result = run_script(tree, "rl", before=ORDINARY, **{variable: str(closed)})
    assert result.returncode == 1 and says in result.stderr and "Permission denied" not in result.stderr


def test_the_wandb_keys_own_name_turns_wandb_on(tree):
    for name in ("WANDB_KEY", "WANDB_API_KEY"):
        result = dry_run(tree, "rl", **{name: SECRET})
        assert "--use-wandb" in job_words(result.out) and SECRET not in result.out + result.err
