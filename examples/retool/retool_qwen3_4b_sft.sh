#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-4B on the ReTool conversations that sft_data_processing.py writes.
#
#   bash examples/retool/retool_qwen3_4b_sft.sh [further vime flags, which win over those below]
#   DRY_RUN=1 bash examples/retool/retool_qwen3_4b_sft.sh     # print the command, start nothing
#
# Settings (environment):
#   VIME_ROOT        vime checkout                        (the one this file lies in)
#   MODEL_SCRIPT     one of vime's scripts/models         (qwen3-4B); with another one HF_CHECKPOINT must be set
#   MEGATRON_ROOT    Megatron-LM checkout                 (/root/Megatron-LM)
#   HF_CHECKPOINT    model to start from                  (${RETOOL_DOWNLOADS}/Qwen/Qwen3-4B-Instruct-2507)
#   REF_LOAD         the same as a Megatron checkpoint    (${HF_CHECKPOINT}_torch_dist, made if it is not there)
#   SAVE             checkpoints; a run in it is resumed  (${HF_CHECKPOINT}_retool_sft)
#   SFT_DATA         from sft_data_processing.py          (${VIME_ROOT}/data/retool/ReTool-SFT.parquet)
#   RETOOL_DOWNLOADS where the published downloads lie    (/root)
#   NUM_GPUS         GPUs per node                        (as many as nvidia-smi lists)
#   NUM_NODES        nodes; over 1 needs RAY_ADDRESS      (1)
#   RAY_ADDRESS      a running Ray cluster to use         (none: one is started on loopback and stopped at the end)
#   WANDB_KEY        turns wandb on; WANDB_PROJECT and WANDB_GROUP name the run
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/common.sh"

TRAIN_SCRIPT=train_async.py
PARALLEL_ARGS=(--tensor-model-parallel-size 1)

check_environment
check_gpu_split "${PERF_ARGS[@]}" "${PARALLEL_ARGS[@]}" "$@"
check_flags "$@"
set_model Qwen/Qwen3-4B-Instruct-2507 "${DOWNLOADS}/Qwen/Qwen3-4B-Instruct-2507"
SAVE="${SAVE:-${HF_CHECKPOINT}_retool_sft}"
SFT_DATA="$(absolute "${SFT_DATA:-${VIME_ROOT}/data/retool/ReTool-SFT.parquet}")"

check_checkpoint
check_save "$@"
check_file SFT_DATA "make it: python ${PLUGIN_DIR}/sft_data_processing.py --output ${SFT_DATA}"
stop_on_problems
load_model_args "$@"
prepare_checkpoint

CKPT_ARGS=(
    --hf-checkpoint "$HF_CHECKPOINT"
    --ref-load "$REF_LOAD"
    --load "$SAVE"
    --save "$SAVE"
    --save-interval 1000 # vime saves at the end of each epoch as well
)

SFT_ARGS=(
    --rollout-function-path vime.rollout.sft_rollout.generate_rollout
    --prompt-data "$SFT_DATA"
    --input-key messages
    --tool-key tools
    --loss-mask-type qwen # the one whose token ids are those of the RL loop
    --rollout-shuffle
    --num-epoch 3
    --rollout-batch-size 128
    --global-batch-size 128
    --loss-type sft_loss
    --calculate-per-token-loss
    --disable-compute-advantages-and-returns
    --debug-train-only
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-5
    --lr-decay-style cosine
    --min-lr 1e-6
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
)

# shellcheck disable=SC2034 # read by launch
RUNTIME_ENV=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
wandb_args qwen3-4b-retool-sft

launch \
    --actor-num-nodes "$NUM_NODES" \
    --actor-num-gpus-per-node "$NUM_GPUS" \
    "${MODEL_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${SFT_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${WANDB_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
