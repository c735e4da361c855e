"""What of vime's arguments does not go with this plugin, said by name before the first sample is rolled out.

Contract: `check` raises for what would crash vime or train nothing, and warns of what is likely a mistake. It reads
arguments and changes nothing. vime's reader of data is looked up where it is loaded: this module does not import vime.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from retool import advantages, handover
from retool.episode import Limits

logger = logging.getLogger(__name__)

MAX_ROWS_NAMED = 10


_checked: Any = None  # the arguments of this process's run


def check_once(args: Any, configs: dict[str, Any], length: Callable[[Any], int]) -> None:
    """`check` and `name_long_prompts`, at the first sample that is to be trained on."""
    global _checked
    if args is not _checked:
        check(args, configs)
        _checked = args
        name_long_prompts(args, length)


def check(args: Any, configs: dict[str, Any]) -> None:
    """Look over the arguments of a run that trains.

    Args:
        args: vime's.
        configs: TOOL_CONFIGS.

    Raises:
        RuntimeError: an argument cannot go with the plugin; the message names it and the way out.
        ValueError: a setting has no such value.
    """
    spread = configs["advantage_spread"]
    advantages.check_spread(spread)
    handover.check_overlong(configs["overlong"])
    hook = getattr(args, "custom_reward_post_process_path", None) or "vime."
    ours = hook.startswith(("vime.", "generate_with_retool."))
    # A teacher that the trainer loads itself needs nothing from here. One that is served is asked by reward hooks of
    # vime's, which read its answer from the reward of every sample: ours have none, and neither has a lost sample.
    if getattr(args, "use_opd", False) and getattr(args, "opd_type", None) != "megatron" and ours:
        raise RuntimeError(
            "retool does not support --use-opd with a served teacher, since nothing here asks it: use --opd-type "
            "megatron, or a --custom-reward-post-process-path of your own that sets teacher_log_probs on every sample"
        )
    estimator = getattr(args, "advantage_estimator", None)
    if estimator == "reinforce_plus_plus" and not getattr(args, "custom_advantage_function_path", None):
        raise RuntimeError(
            "--advantage-estimator reinforce_plus_plus fails in vime on the first sample without a trained token, as a "
            "lost one is: add --custom-advantage-function-path generate_with_retool.compute_advantages, which leaves "
            "those out, or use reinforce_plus_plus_baseline"
        )
    group_filter = getattr(args, "dynamic_sampling_filter_path", None) or ""
    if group_filter.endswith(".check_reward_nonzero_std") and spread == "accuracy":
        raise RuntimeError(
            f"--dynamic-sampling-filter-path {group_filter} keeps groups in which only the bonus for calling the tool "
            "differs, and those train nothing: use generate_with_retool.keep_group"
        )
    normalized = estimator in advantages.GROUP_ESTIMATORS and getattr(args, "rewards_normalization", False)
    if (
        normalized
        and getattr(args, "n_samples_per_prompt", None) == 1
        and not getattr(args, "debug_rollout_only", False)
    ):
        logger.warning(
            "--n-samples-per-prompt 1 with --advantage-estimator %s trains nothing: a sample is compared with the "
            "others of its prompt, and there are none. Raise it, or pass --disable-rewards-normalization",
            estimator,
        )


def name_long_prompts(args: Any, length: Callable[[Any], int]) -> None:
    """Log which rows of the prompts leave no room for a response, from a thread: the file may be long.

    Args:
        args: vime's; `prompt_data`, `input_key` and the limits of the context are read.
        length: of a prompt with its tools, in tokens. ValueError for one that cannot be rendered, which is an error of
            its own once it is rolled out.
    """
    read_rows = getattr(sys.modules.get("vime.utils.data"), "read_file", None)  # where vime has read them
    limits = (Limits.of(args, 0, evaluation=False).context, getattr(args, "vllm_max_model_len", None))
    limit = min((value for value in limits if value), default=None)
    path = getattr(args, "prompt_data", None)
    if read_rows is None or limit is None or not isinstance(path, str):
        return

    def look() -> None:
        try:
            rows = _long_rows(read_rows(path), getattr(args, "input_key", "prompt"), limit, length)
        except Exception:  # what vime cannot read it says itself
            logger.exception("the lengths of the prompts in %s could not be looked at", path)
            return
        if rows:
            named = ", ".join(map(str, rows[:MAX_ROWS_NAMED])) + (", ..." if len(rows) > MAX_ROWS_NAMED else "")
            logger.warning(
                "%d prompts of %s leave no room for a response in the context of %d tokens and train nothing: rows %s",
                *(len(rows), path, limit, named),
            )

    threading.Thread(target=look, name="retool-prompts", daemon=True).start()


def _long_rows(rows: Iterable[dict[str, Any]], key: str, limit: int, length: Callable[[Any], int]) -> list[int]:
    """Indices. A token is a byte at least, so most prompts are seen to be short without a tokenizer."""
    frame, found = None, []
    for index, row in enumerate(rows):
        prompt = row.get(key)
        if not prompt:
            continue
        if frame is None:
            frame = length("?")
        if len(str(prompt).encode("utf-8", "replace")) + frame < limit:
            continue
        try:
            if length(prompt) >= limit:
                found.append(index)
        except ValueError:
            pass
    return found
