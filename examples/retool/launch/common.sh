# shellcheck shell=bash
# What the SFT and the RL launch script share; sourced by both, never run.
#
#   settings -> checks (all of them, one line each) -> model arguments -> checkpoint -> command -> Ray
#
# Nothing is started, written or converted before every check has passed. With DRY_RUN=1 the command is printed and
# nothing else happens; what is missing of data, checkpoints or tools is a warning there, a missing vime or Megatron an
# error. The wandb key is never expanded here, only tested for being set, so that neither `bash -x` nor a process list
# can show it.
#
# The sourcing script sets TRAIN_SCRIPT, HF_CHECKPOINT, REF_LOAD (may be empty) and RUNTIME_ENV (NAME=VALUE for the job).

PLUGIN_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VIME_ROOT="${VIME_ROOT:-${PLUGIN_DIR}/../..}"
MEGATRON_ROOT="${MEGATRON_ROOT:-/root/Megatron-LM}"
DRY_RUN="${DRY_RUN:-0}"
NUM_NODES="${NUM_NODES:-1}"
NUM_GPUS="${NUM_GPUS:-}"
DEFAULT_ROPE_THETA=5000000
DEFAULT_NUM_GPUS=8

PROBLEMS=()
MODEL_ARGS=()

# One layout of model and batch for both stages, so that SFT's checkpoints and memory use are those of RL.
# shellcheck disable=SC2034 # read by the sourcing scripts
PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 1
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

# shellcheck disable=SC2034 # read by the sourcing scripts
MISC_ARGS=(
    --attention-dropout 0.0 # Megatron's default is 0.1
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

warn() { printf 'warning: %s\n' "$*" >&2; }

problem() { PROBLEMS+=("$*"); }

# Stops a real run; a dry run only shows what it would do.
missing() {
    if [[ "$DRY_RUN" == 1 ]]; then
        warn "$*"
    else
        problem "$*"
    fi
}

stop_on_problems() {
    if ((${#PROBLEMS[@]})); then
        printf 'error: %s\n' "${PROBLEMS[@]}" >&2
        exit 1
    fi
}

# The job may run in another directory than this script.
absolute() {
    case "$1" in
        /*) printf '%s' "$1" ;;
        *) printf '%s/%s' "$PWD" "$1" ;;
    esac
}

check_environment() {
    if [[ -d "$VIME_ROOT" ]]; then
        VIME_ROOT="$(cd -- "$VIME_ROOT" && pwd)"
    fi
    local file
    for file in "$TRAIN_SCRIPT" scripts/models/qwen3-4B.sh; do
        if [[ ! -f "${VIME_ROOT}/${file}" ]]; then
            problem "no vime in ${VIME_ROOT}: ${file} is missing; copy examples/ into a vime checkout or set VIME_ROOT to one"
            break
        fi
    done
    if [[ ! -d "$MEGATRON_ROOT" ]]; then
        problem "no Megatron-LM in ${MEGATRON_ROOT}; clone it there or set MEGATRON_ROOT to the checkout"
    fi
    MEGATRON_ROOT="$(absolute "$MEGATRON_ROOT")"
    if [[ "${PLUGIN_DIR}${VIME_ROOT}${MEGATRON_ROOT}" == *:* ]]; then
        problem "a colon in the path of the plugin, vime or Megatron cannot be written in PYTHONPATH; move or link it"
    fi
    if ! command -v python3 >/dev/null; then
        problem "no python3 in PATH; activate the environment that vime is installed in"
        stop_on_problems # the checks below are made with it
    fi
    if ! command -v ray >/dev/null; then
        missing "no ray in PATH; activate the environment that vime is installed in, or: pip install 'ray[default]'"
    fi
    check_gpus
}

check_gpus() {
    if [[ -z "$NUM_GPUS" && -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then
        NUM_GPUS="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)" # Ray refuses to be given more than these
    elif [[ -z "$NUM_GPUS" ]] && command -v nvidia-smi >/dev/null; then
        NUM_GPUS="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"
    fi
    if [[ -z "$NUM_GPUS" || "$NUM_GPUS" == 0 ]]; then
        missing "no GPU found with nvidia-smi; set NUM_GPUS to the number of GPUs per node (${DEFAULT_NUM_GPUS} assumed)"
        NUM_GPUS="$DEFAULT_NUM_GPUS"
    fi
    if [[ ! "$NUM_GPUS" =~ ^[1-9][0-9]*$ ]]; then
        problem "NUM_GPUS is ${NUM_GPUS}, expected a positive number"
    fi
    if [[ ! "$NUM_NODES" =~ ^[1-9][0-9]*$ ]]; then
        problem "NUM_NODES is ${NUM_NODES}, expected a positive number"
    elif ((NUM_NODES > 1)) && [[ -z "${RAY_ADDRESS:-}" ]]; then
        problem "NUM_NODES is ${NUM_NODES}, but a cluster started here has one node; start Ray on all and set RAY_ADDRESS"
    fi
}

# Without this the job fails minutes later, when the processes are placed. check_gpu_split ALL_FLAGS...
check_gpu_split() {
    local flag size
    for flag in --tensor-model-parallel-size --rollout-num-gpus-per-engine; do
        size="$(last_value "$flag" "$@")"
        if [[ "$size" =~ ^[1-9][0-9]*$ && "$NUM_GPUS" =~ ^[1-9][0-9]*$ ]] && ((NUM_GPUS % size)); then
            problem "NUM_GPUS is ${NUM_GPUS}, which ${flag} ${size} does not divide; change one of them"
        fi
    done
}

# check_file VARIABLE HOW_TO_GET_IT
check_file() {
    if [[ ! -s "${!1}" ]]; then
        missing "$1: ${!1} does not exist or is empty; $2"
    fi
}

# The value of a flag in an argument list as argparse takes it: the last one. last_value FLAG ARGS...
last_value() {
    local flag="$1" value="" take=0 argument
    shift
    for argument in "$@"; do
        if ((take)); then
            value="$argument" take=0
        elif [[ "$argument" == "$flag" ]]; then
            take=1
        elif [[ "$argument" == "$flag="* ]]; then
            value="${argument#*=}"
        fi
    done
    printf '%s' "$value"
}

# Prints rope theta as a whole number. Newer transformers keep it in rope_parameters.
read_rope_theta() {
    python3 - "$1" <<'PYTHON'
import json
import sys

path = sys.argv[1]
try:
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta")
    print(int(float(theta)))
except (OSError, ValueError, TypeError, AttributeError) as error:
    sys.exit(f"error: {path}: no rope theta in it ({error}); download the checkpoint again")
PYTHON
}

# Sets MODEL_ARGS for the checkpoint's own rope theta; vime's qwen3-4B.sh would take 1000000, with which a model trained
# with another one loses its sense of position without any error. load_model_args "$@"
load_model_args() {
    local config="${HF_CHECKPOINT}/config.json" theta="$DEFAULT_ROPE_THETA" used
    if [[ -f "$config" ]]; then
        theta="$(read_rope_theta "$config")"
    fi
    if [[ -n "${MODEL_ARGS_ROTARY_BASE:-}" && "$MODEL_ARGS_ROTARY_BASE" != "$theta" ]]; then
        problem "MODEL_ARGS_ROTARY_BASE is ${MODEL_ARGS_ROTARY_BASE}, but rope theta of ${HF_CHECKPOINT} is ${theta}"
    fi
    export MODEL_ARGS_ROTARY_BASE="$theta"
    # shellcheck source=/dev/null
    source "${VIME_ROOT}/scripts/models/qwen3-4B.sh"
    if [[ -z "$(last_value --rotary-base "${MODEL_ARGS[@]}")" ]]; then
        MODEL_ARGS+=(--rotary-base "$theta")
    fi
    used="$(last_value --rotary-base "${MODEL_ARGS[@]}" "$@")"
    if [[ "$used" != "$theta" ]]; then
        problem "--rotary-base is ${used}, but rope theta of ${HF_CHECKPOINT} is ${theta}"
    fi
    stop_on_problems
}

# Whether the directory holds a whole Megatron checkpoint: the tracker file is written last and names the folder.
checkpoint_is_whole() {
    local tracker="$1/latest_checkpointed_iteration.txt" iteration
    [[ -f "$tracker" ]] || return 1
    iteration="$(tr -d '[:space:]' <"$tracker")"
    if [[ "$iteration" =~ ^[0-9]+$ ]]; then
        iteration="$(printf 'iter_%07d' "$((10#$iteration))")"
    fi
    [[ -n "$iteration" && -d "$1/$iteration" ]]
}

check_checkpoint() {
    if [[ ! -f "${HF_CHECKPOINT}/config.json" ]]; then
        missing "HF_CHECKPOINT: ${HF_CHECKPOINT}/config.json does not exist; $1"
    fi
    if [[ -n "$REF_LOAD" ]]; then
        # Given by the user: making it from HF_CHECKPOINT would train another model than the one that was meant.
        checkpoint_is_whole "$REF_LOAD" ||
            missing "REF_LOAD: ${REF_LOAD} is not a whole Megatron checkpoint; unset it to have HF_CHECKPOINT converted"
        CONVERT=0
        return
    fi
    REF_LOAD="${HF_CHECKPOINT}_torch_dist"
    CONVERT=0
    if ! checkpoint_is_whole "$REF_LOAD"; then
        CONVERT=1
        if [[ -d "$REF_LOAD" && -n "$(ls -A -- "$REF_LOAD")" ]]; then
            missing "${REF_LOAD} is an unfinished checkpoint; remove it to have it made again"
        fi
        if [[ ! -f "${VIME_ROOT}/tools/convert_hf_to_torch_dist.py" ]]; then
            missing "no tools/convert_hf_to_torch_dist.py in ${VIME_ROOT} to make ${REF_LOAD} with; update vime"
        fi
    fi
}

# Made under another name and renamed when whole, so that an interrupted conversion is never taken for a checkpoint.
prepare_checkpoint() {
    ((CONVERT)) || return 0
    local partial="${REF_LOAD}.partial"
    local command=(
        env "PYTHONPATH=${MEGATRON_ROOT}:${VIME_ROOT}" CUDA_DEVICE_MAX_CONNECTIONS=1
        python3 "${VIME_ROOT}/tools/convert_hf_to_torch_dist.py" "${MODEL_ARGS[@]}"
        --hf-checkpoint "$HF_CHECKPOINT" --save "$partial"
    )
    printf '# Megatron checkpoint %s, made from %s\n' "$REF_LOAD" "$HF_CHECKPOINT"
    print_command "${command[@]}"
    [[ "$DRY_RUN" != 1 ]] || return 0
    rm -rf -- "$partial"
    "${command[@]}"
    if ! checkpoint_is_whole "$partial"; then
        problem "the conversion ended without a whole checkpoint in ${partial}; see its output above"
        stop_on_problems
    fi
    if [[ -d "$REF_LOAD" ]]; then
        rmdir -- "$REF_LOAD" # it is empty, or check_checkpoint would have stopped
    fi
    mv -- "$partial" "$REF_LOAD"
}

# The argument as a shell reads it back, left bare where it can be.
quoted() {
    local quote="'\''"
    if [[ "$1" =~ ^[[:alnum:]_@%+=:,./-]+$ ]]; then
        printf '%s' "$1"
    else
        printf "'%s'" "${1//\'/$quote}"
    fi
}

# One flag with its values a line.
print_command() {
    local argument
    quoted "$1"
    shift
    for argument in "$@"; do
        if [[ "$argument" == --* ]]; then
            printf ' \\\n   '
        fi
        printf ' %s' "$(quoted "$argument")"
    done
    printf '\n'
}

# runtime_env_json NAME=VALUE...
runtime_env_json() {
    python3 -c 'import json, sys; print(json.dumps({"env_vars": dict(a.split("=", 1) for a in sys.argv[1:])}))' "$@"
}

nvlink_found() {
    command -v nvidia-smi >/dev/null && nvidia-smi topo -m 2>/dev/null | grep -q 'NV[0-9]'
}

# Sets WANDB_ARGS. wandb_args DEFAULT_GROUP
# shellcheck disable=SC2034 # read by the sourcing scripts
wandb_args() {
    WANDB_ARGS=()
    if [[ -n "${WANDB_KEY:+set}" ]]; then
        WANDB_ARGS=(--use-wandb --wandb-project "${WANDB_PROJECT:-retool-vime}" --wandb-group "${WANDB_GROUP:-$1}")
        if [[ -n "${RAY_ADDRESS:-}" ]]; then
            warn "WANDB_KEY is not sent to the cluster at RAY_ADDRESS, since Ray shows a job's environment in process" \
                "lists and in its dashboard; run \`wandb login\` on its nodes, or start them with WANDB_API_KEY set"
        fi
    fi
}

# Runs the training script with the arguments given, on the cluster at RAY_ADDRESS or on one that lasts as long as the job.
launch() {
    local nvls=0 setting
    if nvlink_found; then nvls=1; fi
    local environment=(
        "PYTHONPATH=${PLUGIN_DIR}:${VIME_ROOT}:${MEGATRON_ROOT}"
        "PYTHONUNBUFFERED=1"
        "CUDA_DEVICE_MAX_CONNECTIONS=1"
        "NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-$nvls}"
        "${RUNTIME_ENV[@]}"
    )
    for setting in "${!RETOOL_SANDBOX_@}"; do # the sandbox's settings, for a cluster that was started without them
        environment+=("${setting}=${!setting}")
    done
    local command=(ray job submit)
    if [[ -n "${RAY_ADDRESS:-}" ]]; then
        command+=(--address "$RAY_ADDRESS")
    else
        command=(python3 "${PLUGIN_DIR}/launch/local_ray.py" --num-gpus "$NUM_GPUS" -- "${command[@]}")
    fi
    command+=(
        --runtime-env-json "$(runtime_env_json "${environment[@]}")"
        -- python3 "${VIME_ROOT}/${TRAIN_SCRIPT}" "$@"
    )
    if [[ -n "${WANDB_KEY:+set}" && -z "${RAY_ADDRESS:-}" ]]; then
        printf '# WANDB_KEY=*** in the environment, from where local_ray.py hands it to the cluster\n'
    fi
    print_command "${command[@]}"
    [[ "$DRY_RUN" != 1 ]] || return 0
    exec "${command[@]}"
}
