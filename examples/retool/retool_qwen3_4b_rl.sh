#!/usr/bin/env bash
# Reinforcement learning of a ReTool model: GRPO on DAPO-Math-17k with code execution, evaluated on AIME 2024.
#
#   bash examples/retool/retool_qwen3_4b_rl.sh [further vime flags, which win over those below]
#   DRY_RUN=1 bash examples/retool/retool_qwen3_4b_rl.sh      # print the command, start nothing
#
# By default it starts from the released SFT model. To go on from a run of retool_qwen3_4b_sft.sh:
#   HF_CHECKPOINT=/root/Qwen/Qwen3-4B-Instruct-2507 REF_LOAD=/root/Qwen/Qwen3-4B-Instruct-2507_retool_sft bash ...
# (vime takes architecture and tokenizer from HF_CHECKPOINT, the weights from REF_LOAD).
#
# Settings (environment):
#   VIME_ROOT        vime checkout                        (the one this file lies in)
#   MODEL_SCRIPT     one of vime's scripts/models         (qwen3-4B); with another one HF_CHECKPOINT must be set
#   MEGATRON_ROOT    Megatron-LM checkout                 (/root/Megatron-LM)
#   HF_CHECKPOINT    model to start from                  (${RETOOL_DOWNLOADS}/font-info/qwen3-4b-sft)
#   REF_LOAD         its weights, a Megatron checkpoint   (${HF_CHECKPOINT}_torch_dist, made if it is not there)
#   SAVE             checkpoints; a run in it is resumed  (${HF_CHECKPOINT}_retool_rl)
#   PROMPT_DATA      from rl_data_preprocess.py           (${VIME_ROOT}/data/retool/dapo-math-17k.jsonl, else as
#                    downloaded: ${RETOOL_DOWNLOADS}/dapo-math-17k/dapo-math-17k.jsonl)
#   EVAL_DATA        from rl_data_preprocess.py           (${VIME_ROOT}/data/retool/aime-2024.jsonl, else as
#                    downloaded: ${RETOOL_DOWNLOADS}/aime-2024/aime-2024.jsonl)
#   RETOOL_DOWNLOADS where the published downloads lie    (/root)
#   NUM_GPUS         GPUs per node                        (as many as nvidia-smi lists)
#   NUM_NODES        nodes; over 1 needs RAY_ADDRESS      (1)
#   RAY_ADDRESS      a running Ray cluster to use         (none: one is started on loopback and stopped at the end)
#   WANDB_KEY        turns wandb on; WANDB_PROJECT and WANDB_GROUP name the run
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/common.sh"

TRAIN_SCRIPT=train.py
PARALLEL_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel)
VLLM_ARGS=(
    --rollout-num-gpus-per-engine 2
    --vllm-gpu-memory-utilization 0.7
)

check_environment
check_gpu_split "${PERF_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${VLLM_ARGS[@]}" "$@"
check_flags "$@"
set_model font-info/qwen3-4b-sft-SGLang-RL "${DOWNLOADS}/font-info/qwen3-4b-sft"
SAVE="${SAVE:-${HF_CHECKPOINT}_retool_rl}"
PROMPT_DATA="$(absolute "${PROMPT_DATA:-$(first_file \
    "${VIME_ROOT}/data/retool/dapo-math-17k.jsonl" "${DOWNLOADS}/dapo-math-17k/dapo-math-17k.jsonl")}")"
EVAL_DATA="$(absolute "${EVAL_DATA:-$(first_file \
    "${VIME_ROOT}/data/retool/aime-2024.jsonl" "${DOWNLOADS}/aime-2024/aime-2024.jsonl")}")"

check_checkpoint
check_save "$@"
check_file PROMPT_DATA "make it: python ${PLUGIN_DIR}/rl_data_preprocess.py --output ${PROMPT_DATA}"
check_file EVAL_DATA \
    "make it: python ${PLUGIN_DIR}/rl_data_preprocess.py --dataset zhuzilin/aime-2024 --output ${EVAL_DATA}"
stop_on_problems
load_model_args "$@"
prepare_checkpoint

CKPT_ARGS=(
    --hf-checkpoint "$HF_CHECKPOINT"
    --ref-load "$REF_LOAD"
    --load "$SAVE"
    --save "$SAVE"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --custom-generate-function-path generate_with_retool.generate
    --custom-rm-path generate_with_retool.reward_func
    --custom-reward-post-process-path generate_with_retool.normalize_rewards
    --custom-rollout-log-function-path generate_with_retool.log_rollout_data
    --custom-eval-rollout-log-function-path generate_with_retool.log_eval_rollout_data
    --reward-key score
    --prompt-data "$PROMPT_DATA"
    --input-key prompt # without --apply-chat-template: the plugin renders the prompt, with its tools
    --label-key label
    --rollout-shuffle
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "$EVAL_DATA"
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
    --eval-top-p 1
    --eval-reward-key acc
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)

# shellcheck disable=SC2034 # read by launch
RUNTIME_ENV=()
wandb_args qwen3-4b-retool-rl

launch \
    --actor-num-nodes "$NUM_NODES" \
    --actor-num-gpus-per-node "$NUM_GPUS" \
    --colocate \
    "${MODEL_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${EVAL_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${WANDB_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${VLLM_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
