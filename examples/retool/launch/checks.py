"""What is checked before a launch starts anything: the machine, paths, GPUs and CPUs, data, room on the disk.

    machine, paths                  need the settings alone
    command                         needs the whole command line of the job

Contract: every check yields one `Finding` for each thing that is wrong, nothing if nothing is. Nothing is written.
What a flag may be is for vime's own parser (ask_vime.py); here is what it does not look at.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from launch import checkpoints, data_files, ray_job
from launch.checkpoints import TRACKER
from launch.settings import DEFAULT_MODEL, PLUGIN, Settings, last_value, number
from retool.paths import closed_folder
from retool.supervise import LaunchError

BYTES_PER_PARAMETER = 14  # of a checkpoint with its optimizer: weights in bf16, master weights and two moments in fp32
# What vime asks Ray for beside one CPU with each GPU: the rollout manager and the engines' lock.
CPUS_OF_THE_MANAGER = 2
CPUS_PER_EXTERNAL_ENGINE = 0.2
IN_A_CACHE = re.compile(r"/models--[^/]*(/|$)|/\.cache/(huggingface|modelscope)(/|$)")


class Finding(NamedTuple):
    """One line for the user, and what it means for the launch.

    A "problem" stops it; what is "missing" stops it unless it is a dry run; a "warning" and a "note" do not.
    """

    kind: str
    text: str


problem, missing, warning = (functools.partial(Finding, kind) for kind in ("problem", "missing", "warning"))


# The machine ---------------------------------------------------------------------------------------------------------


def machine(settings: Settings) -> Iterator[Finding]:
    """vime, Megatron, the programs, GPUs, and the Ray cluster that is to be used."""
    models, script = os.path.join(settings.vime, "scripts", "models"), f"{settings.model_script}.sh"
    for file in (settings.stage.train_script, "vime/utils/arguments.py", "scripts/models"):
        path = os.path.join(settings.vime, file)
        if not os.path.exists(path):
            yield closed("VIME_ROOT", path, problem) or problem(
                f"no vime in {settings.vime}: {file} is missing; "
                "copy examples/ into a vime checkout or set VIME_ROOT to one"
            )
            break
    else:
        if not os.path.isfile(os.path.join(models, script)):
            names = sorted(name.removesuffix(".sh") for name in os.listdir(models) if name.endswith(".sh"))
            yield problem(f"MODEL_SCRIPT: no {script} in {models}, which holds {' '.join(names)}")
    path = os.path.join(settings.megatron, "megatron", "training")
    if not os.path.isdir(path):
        yield closed("MEGATRON_ROOT", path, problem) or problem(
            f"no Megatron-LM in {settings.megatron}: megatron/training is missing; clone it there or set MEGATRON_ROOT"
        )
    if settings.model_script != DEFAULT_MODEL and not settings.hf_named:
        yield problem(f"MODEL_SCRIPT is {settings.model_script}; set HF_CHECKPOINT to the model that it describes")
    if ":" in f"{PLUGIN}{settings.vime}{settings.megatron}":
        yield problem(
            "a colon in the path of the plugin, vime or Megatron cannot be written in PYTHONPATH; move or link it"
        )
    if not shutil.which("ray", path=settings.environ.get("PATH")):
        yield missing(
            "no ray in PATH; activate the environment that vime is installed in, or: pip install 'ray[default]'"
        )
    yield from _gpus(settings)
    if settings.wandb and settings.ray_address:
        yield warning(
            "WANDB_KEY is not sent to the cluster at RAY_ADDRESS, since Ray shows a job's environment in process lists "
            "and in its dashboard; run `wandb login` on its nodes, or start them with WANDB_API_KEY set"
        )


def _gpus(settings: Settings) -> Iterator[Finding]:
    if not settings.gpus_found:
        yield missing(
            f"no GPU found with nvidia-smi; set NUM_GPUS to the number of GPUs per node ({settings.gpus} assumed)"
        )
    for name, value in (("NUM_GPUS", settings.gpus), ("NUM_NODES", settings.nodes)):
        if not re.fullmatch("[1-9][0-9]*", value):
            yield problem(f"{name} is {value}, expected a positive number")
            return
    devices = settings.environ.get("CUDA_VISIBLE_DEVICES")
    visible = sum(map(bool, (devices or "").split(",")))
    if settings.ray_address:
        if not re.match(r"https?://[^/]", settings.ray_address):
            yield problem(
                f"RAY_ADDRESS is {settings.ray_address}, expected the address of the cluster's dashboard, such as "
                "http://10.0.0.1:8265"
            )
        return
    if devices and int(settings.gpus) > visible:
        yield problem(f"NUM_GPUS is {settings.gpus}, but CUDA_VISIBLE_DEVICES names only {visible}: {devices}")
    if int(settings.nodes) > 1:
        yield problem(
            f"NUM_NODES is {settings.nodes}, but a cluster started here has one node; start Ray on all of them and set "
            "RAY_ADDRESS"
        )


def closed(name: str, path: str, kind=missing) -> Finding | None:
    """Says why a path is not found, if that is so since this user may not look there."""
    folder = closed_folder(path)
    return kind(f"{name}: {path} may be there, but there is no permission to look into {folder}") if folder else None


# Paths ---------------------------------------------------------------------------------------------------------------


def paths(settings: Settings) -> Iterator[Finding]:
    """The checkpoints to start from, and the folder to save to."""
    yield from _hf_checkpoint(settings)
    yield from _cache(settings)
    yield from _ref_load(settings)
    yield from _save(settings)


def _hf_checkpoint(settings: Settings) -> Iterator[Finding]:
    folder = settings.hf_checkpoint
    if os.path.isfile(os.path.join(folder, "config.json")):
        for line in checkpoints.missing_files(folder):
            yield missing(f"HF_CHECKPOINT: {folder}: {line}; download it again")
        return
    snapshots = os.path.join(folder, "snapshots")
    if os.path.isdir(snapshots):
        newest = sorted(os.listdir(snapshots), key=lambda name: os.path.getmtime(os.path.join(snapshots, name)))
        yield problem(
            f"HF_CHECKPOINT: {folder} is the Hugging Face cache of a model, whose files lie in a folder below it; set "
            f"HF_CHECKPOINT={os.path.join(snapshots, newest[-1] if newest else 'COMMIT')}, and REF_LOAD and SAVE"
        )
    elif os.path.isfile(folder):
        yield problem(f"HF_CHECKPOINT: {folder} is a file; name the folder of the model")
    else:
        on_hub = settings.hf_named.rstrip("/") or settings.stage.model_on_hub
        name = on_hub if re.fullmatch(r"\w[\w.-]*/[\w.-]+", on_hub) else "OWNER/NAME"
        yield closed("HF_CHECKPOINT", os.path.join(folder, "config.json")) or missing(
            f"HF_CHECKPOINT: {folder}/config.json does not exist (a folder is asked for, no name on the hub); "
            f"get it: hf download {name} --local-dir {shlex.quote(folder)}"
        )


def _cache(settings: Settings) -> Iterator[Finding]:
    """What is made beside a checkpoint in the cache of downloads is deleted with it by `hf cache prune`."""
    if settings.derived and IN_A_CACHE.search(os.path.dirname(settings.hf_checkpoint)):
        yield problem(
            f"HF_CHECKPOINT lies in a cache of downloads, where `hf cache prune` deletes what is made beside it: "
            f"{settings.hf_checkpoint}; set {' and '.join(settings.derived)} to folders elsewhere (REF_LOAD is made if "
            "its name ends in _torch_dist), or download the model to a folder of your own with hf download --local-dir"
        )


def _ref_load(settings: Settings) -> Iterator[Finding]:
    folder = settings.ref_load
    if checkpoints.is_whole(folder):
        return
    if not settings.ref_made:
        yield closed("REF_LOAD", os.path.join(folder, TRACKER)) or missing(
            f"REF_LOAD: {folder} is not a whole Megatron checkpoint; unset it to have HF_CHECKPOINT converted"
        )
        return
    if os.path.isdir(folder) and os.listdir(folder):
        yield missing(f"{folder} is an unfinished checkpoint; remove it to have it made again")
    converter = "tools/convert_hf_to_torch_dist.py"
    if not os.path.isfile(os.path.join(settings.vime, converter)):
        yield missing(f"no {converter} in {settings.vime} to make {folder} with; update vime")
    if why := _cannot_hold_files(folder):
        yield missing(f"REF_LOAD: {why}; make the checkpoint elsewhere and name it in REF_LOAD")


def _save(settings: Settings) -> Iterator[Finding]:
    """Whether checkpoints could be written to the folder, which need not exist yet."""
    if why := _cannot_hold_files(settings.saved_to):
        yield problem(f"SAVE: {why}; set SAVE to a folder for checkpoints")


def existing(folder: str) -> str:
    """The folder, or the lowest one above it that is there."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder


def _cannot_hold_files(folder: str) -> str:
    base = existing(folder)
    if not os.path.isdir(base):
        return f"{folder} cannot be made, since {base} is not a folder"
    # /proc and its like have no blocks: root may write there, and yet no file can be made.
    if not os.access(base, os.W_OK | os.X_OK) or os.statvfs(base).f_blocks == 0:
        return f"{base} cannot be written to"
    return ""


# The command ---------------------------------------------------------------------------------------------------------


def command(settings: Settings, words: Sequence[str]) -> Iterator[Finding]:
    """What does not fit together, of the whole command line of the job."""
    for word in words:
        if re.fullmatch(r"--[\w-]+=", word):  # to vime an empty text: of a place, the working folder
            yield problem(f"{word} has no value behind it; give one, or leave the flag out")
    for part in (_layout, _cluster, _resumed, _disk, _data):
        yield from part(settings, words)


def _layout(settings: Settings, words: Sequence[str]) -> Iterator[Finding]:
    """What vime's parser does not ask of parallel sizes, and what fails minutes later, when the processes are
    placed."""
    gpus, nodes = number("--actor-num-gpus-per-node", words) or 1, number("--actor-num-nodes", words) or 1
    engine = number("--rollout-num-gpus-per-engine", words) or 1
    if gpus % engine if engine <= gpus else engine % gpus or gpus * nodes % engine:
        yield problem(
            f"--rollout-num-gpus-per-engine {engine} does not divide the {gpus * nodes} GPUs (NUM_GPUS {gpus} x "
            f"NUM_NODES {nodes}); change one of them"
        )
    config = checkpoints.read_config(settings.hf_checkpoint) or {}
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    copies = (number(f"--vllm-{name}-parallel-size", words) or 1 for name in ("pipeline", "data"))
    sizes = {
        "--tensor-model-parallel-size": number("--tensor-model-parallel-size", words) or 1,
        "--rollout-num-gpus-per-engine": engine // math.prod(copies) or 1,
    }
    for flag, size in sizes.items():
        if isinstance(heads, int) and heads % size:
            yield problem(f"{flag} is {size}, which does not divide the model's {heads} attention heads")
        # A group of keys and values may also be copied to several GPUs.
        if isinstance(groups, int) and groups and groups % size and size % groups:
            yield problem(f"{flag} is {size}, which does not go with the model's {groups} groups of keys and values")
    given = number("--num-query-groups", words)
    if isinstance(groups, int) and given and given != groups:  # vime compares the other sizes
        yield problem(f"num_key_value_heads is {groups} in {settings.hf_checkpoint}, but --num-query-groups {given}")


class Resources(NamedTuple):
    """What the run asks Ray for. With less it would wait for ever, without a word."""

    gpus: int
    cpus: int


def resources(words: Sequence[str]) -> Resources:
    actor = (number("--actor-num-gpus-per-node", words) or 0) * (number("--actor-num-nodes", words) or 0)
    rollout = number("--rollout-num-gpus", words) or 0
    external = values("--rollout-external-engine-addrs", words)
    if "--debug-train-only" in words or last_value("--load-debug-rollout-data", words) or external:
        rollout = 0
    gpus = max(actor, rollout) if "--colocate" in words else actor + rollout
    return Resources(gpus, math.ceil(gpus + CPUS_OF_THE_MANAGER + CPUS_PER_EXTERNAL_ENGINE * len(external)))


def _cluster(settings: Settings, words: Sequence[str]) -> Iterator[Finding]:
    needed = resources(words)
    parts = f"1 with each of {needed.gpus} GPUs, {CPUS_OF_THE_MANAGER} for the rollout manager and its lock"
    if not settings.ray_address:
        if needed.gpus > int(settings.gpus):
            yield problem(f"the run asks for {needed.gpus} GPUs, and this machine has {settings.gpus} (NUM_GPUS)")
        return
    if settings.dry_run:
        return
    try:
        there = ray_job.resources(settings.ray_address)
    except LaunchError as error:
        yield problem(str(error))
        return
    if there.get("GPU", 0) < needed.gpus:
        yield problem(
            f"the cluster at RAY_ADDRESS has {there.get('GPU', 0):g} GPUs, and the run asks for {needed.gpus}: it would "
            "wait for ever; join more nodes to it, or change NUM_GPUS or NUM_NODES"
        )
    if there.get("CPU", 0) < needed.cpus:
        yield problem(
            f"the cluster at RAY_ADDRESS has {there.get('CPU', 0):g} CPUs, and the run asks for {needed.cpus} ({parts}): "
            f"it would wait for ever; start Ray there with --num-cpus, {needed.cpus} or more on all nodes together (Ray "
            "only counts them)"
        )


def _resumed(settings: Settings, words: Sequence[str]) -> Iterator[Finding]:
    """Which run vime will go on with, and whether it is the one that the settings speak of."""
    folder = os.path.abspath(last_value("--load", words) or settings.save)
    iteration = checkpoints.last_iteration(folder)
    if iteration is None or folder == settings.ref_load:
        return
    if not checkpoints.is_whole(folder):
        yield missing(
            f"SAVE: {folder}/{TRACKER} names {iteration or 'nothing'}, which is not there; write the number of one that "
            "is into it, or set another SAVE"
        )
        return
    start = checkpoints.started_from(folder)
    if start and start != settings.ref_load:
        yield problem(
            f"SAVE: the run in {folder} was started from {start}, and would go on with those weights, not with "
            f"those of REF_LOAD {settings.ref_load}; set another SAVE for a new run, or that REF_LOAD to go on"
        )
    step = iteration.removeprefix("iter_").lstrip("0") or "0"
    yield Finding("note", f"resumed: the run in {folder}, which has done step {step}; set another SAVE for a new run")


def _disk(settings: Settings, words: Sequence[str]) -> Iterator[Finding]:
    """Room for the conversion and the first checkpoint is needed; for all that will be kept, it is worth a word."""
    weights, per_parameter = checkpoints.weight_bytes(settings.hf_checkpoint)
    checkpoint = weights // per_parameter * (2 if "--no-save-optim" in words else BYTES_PER_PARAMETER)
    converted = 0 if checkpoints.is_whole(settings.ref_load) else weights  # beside the model, mostly on the same disk
    interval = number("--save-retain-interval", words) or number("--save-interval", words) or 1
    rollouts = number("--num-rollout", words)
    count = math.ceil(rollouts / interval) if rollouts else number("--num-epoch", words) or 1
    disk = shutil.disk_usage(existing(settings.saved_to))
    room = f"SAVE: {disk.free / 1e9:.3g} GB are free for {settings.saved_to}, and the run writes"
    each = f"of {checkpoint / 1e9:.3g} GB; --no-save-optim or, for fewer of them, --save-retain-interval writes less"
    if disk.free < checkpoint + converted:
        yield missing(f"{room} {converted / 1e9:.3g} GB for REF_LOAD and checkpoints {each}")
    elif disk.free < checkpoint * count + converted:
        yield warning(f"{room} {count} checkpoints {each}")


def _data(settings: Settings, words: Sequence[str]) -> Iterator[Finding]:
    """The first rows of each data file, as vime will read them."""
    ours = {(data.flag.startswith("--eval"), data.path): data for data in settings.data}
    batch = number("--rollout-batch-size", words) or 1
    files = [(last_value("--prompt-data", words) or "", "")]
    pairs = values("--eval-prompt-data", words)
    files += [(path, "eval-") for path in (pairs[1::2] if len(pairs) > 1 else pairs)]
    for path, prefix in files:
        known = ours.get((bool(prefix), path))
        name = known.variable if known else f"--{prefix}prompt-data"
        remedy = f"make it: {known.command}" if known else "name another file"
        keys = data_files.Keys(
            *(
                last_value(f"--{prefix}{kind}-key", words) or last_value(f"--{kind}-key", words)
                for kind in ("input", "label", "tool")
            )
        )
        file, _ = data_files.rows_of(path)
        if not os.path.exists(file) and (finding := closed(name, file)):
            yield finding
        elif why := data_files.not_a_data_file(file):
            yield problem(f"{name}: {why}")
        elif not os.path.exists(file) or not os.path.getsize(file):
            yield missing(f"{name}: {file} does not exist or is empty; {remedy}")
        else:
            try:
                count = data_files.look_into(path, keys, batch)
            except data_files.BadFile as why:
                yield problem(f"{name}: {file}: {why}; {remedy}{' --force' * bool(known)}")
            except ImportError as error:
                yield warning(f"{name}: {file} is not looked into ({error})")
            else:
                if not prefix and count < batch and settings.stage.name == "sft":
                    text = f"{name}: {path} has {count} rows, fewer than a batch (--rollout-batch-size {batch})"
                    if number("--num-rollout", words) is None:  # vime counts the steps of an epoch in whole batches
                        yield problem(f"{text}, so there would be no step")
                    else:
                        yield warning(f"{text}: they are repeated")


def values(flag: str, words: Sequence[str]) -> list[str]:
    """All values of a flag that takes several, where it is given last."""
    if flag not in words:
        return []
    start = len(words) - list(reversed(words)).index(flag)
    return list(itertools.takewhile(lambda word: not word.startswith("--"), words[start:]))
