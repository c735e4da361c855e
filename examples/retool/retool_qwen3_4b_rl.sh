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
# Settings (environment), from which launch/main.py makes the flags that are not below:
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
PLUGIN_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

ROLLOUT_ARGS=(
    --custom-generate-function-path generate_with_retool.generate
    --custom-rm-path generate_with_retool.reward_func
    --custom-reward-post-process-path generate_with_retool.normalize_rewards
    --custom-rollout-log-function-path generate_with_retool.log_rollout_data
    --custom-eval-rollout-log-function-path generate_with_retool.log_eval_rollout_data
    --reward-key score
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
    --save-interval 20
)
PERF_ARGS=(
    --colocate
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
    --rollout-num-gpus-per-engine 2
    --vllm-gpu-memory-utilization 0.7
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
exec python3 "${PLUGIN_DIR}/launch/main.py" rl "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${MISC_ARGS[@]}" -- "$@"
