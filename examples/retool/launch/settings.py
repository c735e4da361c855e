"""The settings of a launch: from the environment, or from flags that stand for them, with their defaults."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from retool.supervise import LaunchError

PLUGIN = Path(__file__).resolve().parents[1]
CONVERTED = "_torch_dist"  # at the end of the name of a checkpoint that the launch makes
DEFAULT_GPUS = "8"
DEFAULT_MODEL = "qwen3-4B"  # of vime's scripts/models
# For a dry run without the checkpoint: that of the models which the scripts train by default.
DEFAULT_ROPE_THETA = "5000000"


class Data(NamedTuple):
    """A data file of a stage."""

    variable: str
    flag: str  # with the words between it and the path
    made: str  # below data/retool of vime
    downloaded: str  # below RETOOL_DOWNLOADS; "" where vime cannot read the download
    command: str  # that makes it
    path: str = ""  # of this launch, as vime is given it: FILE@[FROM:TO] takes those rows


class Stage(NamedTuple):
    name: str
    train_script: str
    model_on_hub: str
    model: str  # where its download lies, below RETOOL_DOWNLOADS
    data: tuple[Data, ...]
    environment: dict[str, str]


class Settings(NamedTuple):
    """What the environment and the flags after the script's name say. Paths are absolute, without a slash at the end.

    `hf_named` is HF_CHECKPOINT as it was given, "" if it was not; `ref_made` says whether the launch may make
    REF_LOAD, and `derived` which of REF_LOAD and SAVE are named after HF_CHECKPOINT.
    """

    stage: Stage
    environ: Mapping[str, str]
    dry_run: bool
    vime: str
    megatron: str
    model_script: str
    hf_named: str
    hf_checkpoint: str
    ref_load: str
    ref_made: bool
    save: str
    saved_to: str
    derived: tuple[str, ...]
    data: tuple[Data, ...]
    gpus: str
    gpus_found: bool
    nodes: str
    ray_address: str
    wandb: bool


class Launch(NamedTuple):
    """What is to be run, once the checks have passed."""

    settings: Settings
    environment: dict[str, str]  # of the conversion and the job, beside the caller's
    conversion: list[str]  # makes the Megatron checkpoint but for --save; empty where it is there
    job: list[str]

    @property
    def lock(self) -> Path:
        """Held while the job runs: two runs that save to one folder would mix their checkpoints."""
        return Path(self.settings.saved_to, ".retool.lock")


_SCRIPTS = shlex.quote(str(PLUGIN))
_MAKE_SFT = f"python {_SCRIPTS}/sft_data_processing.py --output {{path}}"
_MAKE_RL = f"python {_SCRIPTS}/rl_data_preprocess.py --exclude {{eval}} --output {{path}}"
_MAKE_EVAL = f"python {_SCRIPTS}/rl_data_preprocess.py --dataset zhuzilin/aime-2024 --output {{path}}"
STAGES = {
    "sft": Stage(
        "sft",
        "train_async.py",
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen3-4B-Instruct-2507",
        (Data("SFT_DATA", "--prompt-data", "ReTool-SFT.parquet", "", _MAKE_SFT),),
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    "rl": Stage(
        "rl",
        "train.py",
        "font-info/qwen3-4b-sft-SGLang-RL",
        "font-info/qwen3-4b-sft",
        (
            Data("PROMPT_DATA", "--prompt-data", "dapo-math-17k.jsonl", "dapo-math-17k/dapo-math-17k.jsonl", _MAKE_RL),
            Data("EVAL_DATA", "--eval-prompt-data aime", "aime-2024.jsonl", "aime-2024/aime-2024.jsonl", _MAKE_EVAL),
        ),
        {},
    ),
}


def read_settings(stage: str, further: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read the settings; whether they are any good is for the checks.

    Raises:
        LaunchError: DRY_RUN is neither yes nor no, so that nothing may start.
    """

    def given(variable: str, flag: str) -> str:
        return last_value(flag, further) or environ.get(variable) or ""

    dry_run = environ.get("DRY_RUN") or "0"
    if dry_run.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise LaunchError(f"DRY_RUN is {dry_run}, expected 1 or 0")
    kind = STAGES[stage]
    kind = kind._replace(train_script=environ.get("TRAIN_SCRIPT") or kind.train_script)
    vime = os.path.abspath(environ.get("VIME_ROOT") or PLUGIN.parents[1])
    downloads = environ.get("RETOOL_DOWNLOADS") or "/root"
    hf_named = given("HF_CHECKPOINT", "--hf-checkpoint")
    hf_checkpoint = os.path.abspath(hf_named or os.path.join(downloads, kind.model))
    ref_load, save = given("REF_LOAD", "--ref-load"), environ.get("SAVE")
    gpus = environ.get("NUM_GPUS") or visible_gpus(environ)
    save_folder = os.path.abspath(save or f"{hf_checkpoint}_retool_{stage}")
    return Settings(
        stage=kind,
        environ=environ,
        dry_run=dry_run.lower() in ("1", "true", "yes", "on"),
        vime=vime,
        megatron=os.path.abspath(environ.get("MEGATRON_ROOT") or "/root/Megatron-LM"),
        model_script=environ.get("MODEL_SCRIPT") or DEFAULT_MODEL,
        hf_named=hf_named,
        hf_checkpoint=hf_checkpoint,
        ref_load=os.path.abspath(ref_load or f"{hf_checkpoint}{CONVERTED}"),
        # Another one that is given was trained: making it from HF_CHECKPOINT would train another model than was meant.
        ref_made=not ref_load or ref_load.rstrip("/").endswith(CONVERTED),
        save=save_folder,
        saved_to=os.path.abspath(last_value("--save", further) or save_folder),
        derived=(*(() if ref_load else ("REF_LOAD",)), *(() if save else ("SAVE",))),
        data=data_files(kind, vime, downloads, environ),
        gpus=gpus or DEFAULT_GPUS,
        gpus_found=bool(gpus),
        nodes=environ.get("NUM_NODES") or "1",
        ray_address=(environ.get("RAY_ADDRESS") or "").rstrip("/"),
        wandb=bool(environ.get("WANDB_KEY") or environ.get("WANDB_API_KEY")),
    )


def data_files(stage: Stage, vime: str, downloads: str, environ: Mapping[str, str]) -> tuple[Data, ...]:
    """The stage's files: as named, else what the data script wrote, else what was downloaded, else the first again."""
    paths = {}
    for data in stage.data:
        made, downloaded = os.path.join(vime, "data", "retool", data.made), os.path.join(downloads, data.downloaded)
        found = made if has_content(made) or not has_content(downloaded) else downloaded
        paths[data.variable] = os.path.abspath(environ.get(data.variable) or found)
    files = {variable: shlex.quote(path.partition("@[")[0]) for variable, path in paths.items()}
    return tuple(
        data._replace(
            path=paths[data.variable],
            command=data.command.format(path=files[data.variable], eval=files.get("EVAL_DATA")),
        )
        for data in stage.data
    )


def has_content(path: str | Path) -> bool:
    try:
        return os.path.isfile(path) and os.path.getsize(path) > 0
    except OSError:
        return False


def visible_gpus(environ: Mapping[str, str]) -> str:
    """How many GPUs a job sees here; "" if none is found."""
    if devices := environ.get("CUDA_VISIBLE_DEVICES"):
        return str(sum(map(bool, devices.split(","))))  # Ray refuses to be given more than these
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return ""
    listed = subprocess.run([program, "-L"], env=dict(environ), capture_output=True, text=True).stdout
    count = sum(line.startswith("GPU") for line in listed.splitlines())
    return str(count or "")


def last_value(flag: str, words: Sequence[str]) -> str | None:
    """The value of a flag as argparse takes it: the last one; None where it is not given."""
    value = None
    for number, word in enumerate(words):
        if word == flag:
            value = words[number + 1] if number + 1 < len(words) else None
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def number(flag: str, words: Sequence[str]) -> int | None:
    """The value of a flag that is a positive number, else None: vime's parser says what is wrong with another."""
    value = last_value(flag, words) or ""
    return int(value) if value.isascii() and value.isdigit() and int(value) > 0 else None
