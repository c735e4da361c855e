# shellcheck shell=bash
# What the SFT and the RL launch script share; sourced by both, never run.
#
#   settings -> checks (all of them, one line each) -> model arguments -> checkpoint -> command -> Ray
#
# Nothing is started, written or converted before every check has passed. With DRY_RUN=1 the command is printed and
# nothing else happens; what is missing of data, checkpoints or tools is a warning there, a missing vime or Megatron an
# error. What a shell cannot check well, launch/checks.py checks. The wandb key is never expanded here, only tested for being set, so that neither `bash -x` nor a process list
# can show it.
#
# The sourcing script sets TRAIN_SCRIPT, HF_CHECKPOINT, REF_LOAD (may be empty) and RUNTIME_ENV (NAME=VALUE for the job).

PLUGIN_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VIME_ROOT="${VIME_ROOT:-${PLUGIN_DIR}/../..}"
MEGATRON_ROOT="${MEGATRON_ROOT:-/root/Megatron-LM}"
MODEL_SCRIPT="${MODEL_SCRIPT:-qwen3-4B}"
# shellcheck disable=SC2034 # read by the sourcing scripts
DOWNLOADS="${RETOOL_DOWNLOADS:-/root}"
DRY_RUN="${DRY_RUN:-0}"
NUM_NODES="${NUM_NODES:-1}"
NUM_GPUS="${NUM_GPUS:-}"
DEFAULT_NUM_GPUS=8
# For a dry run without the checkpoint: that of the models which the scripts train by default.
DEFAULT_ROPE_THETA=5000000

PROBLEMS=()
MODEL_ARGS=()

# shellcheck disable=SC2034 # read by the sourcing scripts
PERF_ARGS=(
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

# The job may run in another directory than this script. Without the slash at the end, since names are made from it:
# HF_CHECKPOINT=model/ must not become model/_torch_dist.
absolute() { realpath --canonicalize-missing --no-symlinks -- "$1"; }

# Says why a path is not found if that is so since this user may not look there, else fails. closed VARIABLE PATH
closed() {
    local folder
    folder="$(realpath --canonicalize-missing -- "$2")"
    until [[ -e "$folder" ]]; do folder="$(dirname -- "$folder")"; done
    [[ -d "$folder" && ! -x "$folder" ]] || return 1
    printf '%s: %s may be there, but there is no permission to look into %s' "$1" "$2" "$folder"
}

check_environment() {
    case "${DRY_RUN,,}" in
        1 | true | yes | on) DRY_RUN=1 ;;
        0 | false | no | off) DRY_RUN=0 ;;
        *)
            printf 'error: DRY_RUN is %s, expected 1 or 0\n' "$DRY_RUN" >&2
            exit 1
            ;;
    esac
    if [[ -d "$VIME_ROOT" && -x "$VIME_ROOT" ]]; then
        VIME_ROOT="$(cd -- "$VIME_ROOT" && pwd)"
    fi
    local file why
    for file in "$TRAIN_SCRIPT" vime/utils/arguments.py scripts/models; do
        if why="$(closed VIME_ROOT "${VIME_ROOT}/${file}")"; then
            problem "$why"
            break
        elif [[ ! -e "${VIME_ROOT}/${file}" ]]; then
            problem "no vime in ${VIME_ROOT}: ${file} is missing; copy examples/ into a vime checkout or set VIME_ROOT to one"
            break
        fi
    done
    if why="$(closed MEGATRON_ROOT "${MEGATRON_ROOT}/megatron/training")"; then
        problem "$why"
    elif [[ ! -d "${MEGATRON_ROOT}/megatron/training" ]]; then
        problem "no Megatron-LM in ${MEGATRON_ROOT}: megatron/training is missing; clone it there or set MEGATRON_ROOT"
    fi
    if [[ -d "${VIME_ROOT}/scripts/models" && ! -f "${VIME_ROOT}/scripts/models/${MODEL_SCRIPT}.sh" ]]; then
        problem "MODEL_SCRIPT: no ${MODEL_SCRIPT}.sh in ${VIME_ROOT}/scripts/models, which holds" \
            "$(find "${VIME_ROOT}/scripts/models" -name '*.sh' -printf '%f ' | sed 's/\.sh / /g')"
    fi
    if [[ "$MODEL_SCRIPT" != qwen3-4B && -z "${HF_CHECKPOINT:-}" ]]; then
        problem "MODEL_SCRIPT is ${MODEL_SCRIPT}; set HF_CHECKPOINT to the model that it describes"
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
    local visible
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
    elif [[ -n "${CUDA_VISIBLE_DEVICES:-}" && -z "${RAY_ADDRESS:-}" ]]; then
        visible="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)"
        if ((NUM_GPUS > visible)); then
            problem "NUM_GPUS is ${NUM_GPUS}, but CUDA_VISIBLE_DEVICES names only ${visible}: ${CUDA_VISIBLE_DEVICES}"
        fi
    fi
    if [[ ! "$NUM_NODES" =~ ^[1-9][0-9]*$ ]]; then
        problem "NUM_NODES is ${NUM_NODES}, expected a positive number"
    elif ((NUM_NODES > 1)) && [[ -z "${RAY_ADDRESS:-}" ]]; then
        problem "NUM_NODES is ${NUM_NODES}, but a cluster started here has one node; start Ray on all and set RAY_ADDRESS"
    fi
}

# Without this the job fails minutes later, when the processes are placed. check_gpu_split ALL_FLAGS...
check_gpu_split() {
    local gpus nodes total group=1 flag size engine
    gpus="$(last_value --actor-num-gpus-per-node --actor-num-gpus-per-node "$NUM_GPUS" "$@")"
    nodes="$(last_value --actor-num-nodes --actor-num-nodes "$NUM_NODES" "$@")"
    [[ "$gpus" =~ ^[1-9][0-9]*$ && "$nodes" =~ ^[1-9][0-9]*$ ]] || return 0
    total=$((gpus * nodes))
    for flag in --tensor-model-parallel-size --context-parallel-size --pipeline-model-parallel-size; do
        size="$(last_value "$flag" "$@")"
        if [[ "$size" =~ ^[1-9][0-9]*$ ]]; then group=$((group * size)); fi
    done
    if ((total % group)); then
        problem "tensor x context x pipeline parallel size is ${group}, which does not divide the ${total} GPUs" \
            "(NUM_GPUS ${gpus} x NUM_NODES ${nodes}); change one of them"
    fi
    engine="$(last_value --rollout-num-gpus-per-engine "$@")"
    if [[ "$engine" =~ ^[1-9][0-9]*$ ]] && ((engine <= gpus ? gpus % engine : engine % gpus || total % engine)); then
        problem "--rollout-num-gpus-per-engine ${engine} does not divide the ${total} GPUs" \
            "(NUM_GPUS ${gpus} x NUM_NODES ${nodes}); change one of them"
    fi
}

# vime reads PATH@[FROM:TO] as those rows of the file. check_file VARIABLE HOW_TO_GET_IT
check_file() {
    local file="${!1}" why
    if [[ "$file" =~ ^(.*)@\[-?[0-9]*:-?[0-9]*\]$ ]]; then
        file="${BASH_REMATCH[1]}"
    fi
    if why="$(closed "$1" "$file")"; then
        missing "$why"
    elif [[ -d "$file" ]]; then
        problem "$1: ${file} is a folder; name the .jsonl or .parquet file in it"
    elif [[ ! -s "$file" ]]; then
        missing "$1: ${file} does not exist or is empty; $2"
    elif [[ "$file" != *.jsonl && "$file" != *.parquet ]]; then
        problem "$1: vime tells the format of a file by its ending, which must be .jsonl or .parquet: ${file}"
    fi
}

# The first file that is there, else the first: what the data script wrote, then what was downloaded. first_file FILE...
first_file() {
    local file
    for file in "$@"; do
        if [[ -s "$file" ]]; then
            printf '%s' "$file"
            return
        fi
    done
    printf '%s' "$1"
}

# Whether checkpoints could be written to the folder, which need not exist yet. check_save USER_FLAGS...
check_save() {
    local folder
    SAVE="$(absolute "$SAVE")"
    SAVED_TO="$(absolute "$(last_value --save --save "$SAVE" "$@")")"
    folder="$SAVED_TO"
    while [[ ! -e "$folder" ]]; do folder="$(dirname -- "$folder")"; done
    if [[ ! -d "$folder" ]]; then
        problem "SAVE: ${SAVED_TO} cannot be made, since ${folder} is not a folder"
    elif [[ ! -w "$folder" ]]; then
        problem "SAVE: ${folder} cannot be written to; set SAVE to a folder for checkpoints"
    fi
}

# check_flags USER_FLAGS...
check_flags() {
    local line
    if [[ -d "${VIME_ROOT}/vime" && -d "${MEGATRON_ROOT}/megatron" ]]; then
        while IFS= read -r line; do problem "$line"; done \
            < <(python3 "${PLUGIN_DIR}/launch/checks.py" flags "$VIME_ROOT" "$MEGATRON_ROOT" -- "$@")
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

# Sets MODEL_ARGS for the checkpoint's own rope theta, where vime's script says another one, and checks the sizes; vime
# compares both as well, but minutes later. load_model_args "$@"
load_model_args() {
    local config="${HF_CHECKPOINT}/config.json" theta="" used line
    if [[ -f "$config" ]]; then
        theta="$(python3 "${PLUGIN_DIR}/launch/checks.py" rope-theta "$config")"
    elif [[ "$MODEL_SCRIPT" == qwen3-4B ]]; then
        theta="$DEFAULT_ROPE_THETA"
    fi
    if [[ -n "$theta" && -n "${MODEL_ARGS_ROTARY_BASE:-}" && "$MODEL_ARGS_ROTARY_BASE" != "$theta" ]]; then
        problem "MODEL_ARGS_ROTARY_BASE is ${MODEL_ARGS_ROTARY_BASE}, but rope theta of ${HF_CHECKPOINT} is ${theta}"
    fi
    if [[ -n "$theta" ]]; then
        export MODEL_ARGS_ROTARY_BASE="$theta"
    fi
    # shellcheck source=/dev/null
    source "${VIME_ROOT}/scripts/models/${MODEL_SCRIPT}.sh"
    if [[ -n "$theta" && -z "$(last_value --rotary-base "${MODEL_ARGS[@]}")" ]]; then
        MODEL_ARGS+=(--rotary-base "$theta")
    fi
    used="$(last_value --rotary-base "${MODEL_ARGS[@]}" "$@")"
    if [[ -n "$theta" && "$used" != "$theta" ]]; then
        problem "--rotary-base is ${used}, but rope theta of ${HF_CHECKPOINT} is ${theta}"
    fi
    if [[ -f "$config" ]]; then
        while IFS= read -r line; do problem "HF_CHECKPOINT: ${HF_CHECKPOINT}: ${line}"; done \
            < <(python3 "${PLUGIN_DIR}/launch/checks.py" model "$config" "$MODEL_SCRIPT" -- "${MODEL_ARGS[@]}" "$@")
    fi
    stop_on_problems
}

# Sets HF_CHECKPOINT and REF_LOAD to full paths. set_model NAME_ON_THE_HUB ITS_FOLDER (where HF_CHECKPOINT is not given)
set_model() {
    MODEL_ON_HUB=""
    if [[ -z "${HF_CHECKPOINT:-}" ]]; then
        MODEL_ON_HUB="$1"
        HF_CHECKPOINT="$2"
    fi
    HF_CHECKPOINT="$(absolute "$HF_CHECKPOINT")"
    REF_LOAD="${REF_LOAD:+$(absolute "$REF_LOAD")}"
}

# checkpoint_is_whole FOLDER
checkpoint_is_whole() { python3 "${PLUGIN_DIR}/launch/checks.py" megatron "$1"; }

check_checkpoint() {
    local line why
    if why="$(closed HF_CHECKPOINT "${HF_CHECKPOINT}/config.json")"; then
        missing "$why"
    elif [[ ! -f "${HF_CHECKPOINT}/config.json" ]]; then
        missing "HF_CHECKPOINT: ${HF_CHECKPOINT}/config.json does not exist;" \
            "get it: hf download ${MODEL_ON_HUB:-OWNER/NAME} --local-dir ${HF_CHECKPOINT}"
    else
        while IFS= read -r line; do missing "HF_CHECKPOINT: ${HF_CHECKPOINT}: ${line}; download it again"; done \
            < <(python3 "${PLUGIN_DIR}/launch/checks.py" checkpoint "$HF_CHECKPOINT")
    fi
    CONVERT=0
    if [[ -n "$REF_LOAD" ]]; then
        # Given by the user: making it from HF_CHECKPOINT would train another model than the one that was meant.
        if why="$(closed REF_LOAD "${REF_LOAD}/latest_checkpointed_iteration.txt")"; then
            missing "$why"
        elif ! checkpoint_is_whole "$REF_LOAD"; then
            missing "REF_LOAD: ${REF_LOAD} is not a whole Megatron checkpoint; unset it to have HF_CHECKPOINT converted"
        fi
        return
    fi
    REF_LOAD="${HF_CHECKPOINT}_torch_dist"
    if ! checkpoint_is_whole "$REF_LOAD"; then
        CONVERT=1
        if [[ -d "$REF_LOAD" && -n "$(ls -A -- "$REF_LOAD")" ]]; then
            missing "${REF_LOAD} is an unfinished checkpoint; remove it to have it made again"
        fi
        if [[ ! -f "${VIME_ROOT}/tools/convert_hf_to_torch_dist.py" ]]; then
            missing "no tools/convert_hf_to_torch_dist.py in ${VIME_ROOT} to make ${REF_LOAD} with; update vime"
        fi
        if [[ -d "$(dirname -- "$REF_LOAD")" && ! -w "$(dirname -- "$REF_LOAD")" ]]; then
            missing "${REF_LOAD} cannot be written; make the checkpoint elsewhere and name it in REF_LOAD"
        fi
    fi
}

prepare_checkpoint() {
    ((CONVERT)) || return 0
    local command=(
        env "PYTHONPATH=${MEGATRON_ROOT}:${VIME_ROOT}" CUDA_DEVICE_MAX_CONNECTIONS=1
        python3 "${PLUGIN_DIR}/launch/convert.py" --target "$REF_LOAD" --
        python3 "${VIME_ROOT}/tools/convert_hf_to_torch_dist.py" "${MODEL_ARGS[@]}" --hf-checkpoint "$HF_CHECKPOINT"
    )
    printf '# Megatron checkpoint %s, made from %s\n' "$REF_LOAD" "$HF_CHECKPOINT"
    print_command "${command[@]}"
    [[ "$DRY_RUN" != 1 ]] || return 0
    "${command[@]}"
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
    # The plugin's settings, for a cluster that was started without them.
    for setting in RETOOL_ALLOWED_MODULES RETOOL_SANDBOX "${!RETOOL_SANDBOX_@}"; do
        if [[ -n "${!setting+set}" ]]; then environment+=("${setting}=${!setting}"); fi
    done
    local command=(python3 "${PLUGIN_DIR}/launch/local_ray.py" --num-gpus "$NUM_GPUS")
    if [[ -n "${RAY_ADDRESS:-}" ]]; then
        command=(python3 "${PLUGIN_DIR}/launch/ray_job.py" --address "$RAY_ADDRESS")
    fi
    command+=(
        --runtime-env-json "$(runtime_env_json "${environment[@]}")"
        --lock "${SAVED_TO}/.retool.lock" # two runs that save to one folder would mix their checkpoints
        -- python3 "${VIME_ROOT}/${TRAIN_SCRIPT}" "$@"
    )
    if [[ -n "${WANDB_KEY:+set}" && -z "${RAY_ADDRESS:-}" ]]; then
        printf '# WANDB_KEY=*** in the environment, from where local_ray.py hands it to the cluster\n'
    fi
    print_command "${command[@]}"
    [[ "$DRY_RUN" != 1 ]] || return 0
    exec "${command[@]}"
}
