#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-4B on the ReTool conversations that sft_data_processing.py writes.
#
#   bash examples/retool/retool_qwen3_4b_sft.sh [further vime flags, which win over those below]
#   DRY_RUN=1 bash examples/retool/retool_qwen3_4b_sft.sh     # print the command, start nothing
#
# Settings (environment), from which launch/main.py makes the flags that are not below:
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
PLUGIN_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

SFT_ARGS=(
    --rollout-function-path vime.rollout.sft_rollout.generate_rollout
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
    --save-interval 1000 # vime saves at the end of each epoch as well
)
PERF_ARGS=(
    --tensor-model-parallel-size 1
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
MISC_ARGS=(
    --attention-dropout 0.0 # Megatron's default is 0.1
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

command -v python3 >/dev/null || {
    echo "error: no python3 in PATH; activate the environment that vime is installed in" >&2
    exit 1
}
exec python3 "${PLUGIN_DIR}/launch/main.py" sft "${SFT_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" \
    "${MISC_ARGS[@]}" -- "$@"
