"""The plugin's metrics on their way out: into the log, in the form of vime's own line, and to vime's trackers."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from typing import Any

from retool import metrics

logger = logging.getLogger(__name__)


def log(kind: str, rollout_id: int, args: Any, samples: dict[str, Iterable[Any]]) -> None:
    """Log the metrics of a rollout; a number that cannot be had is not worth the run.

    Args:
        kind: "rollout" or "eval".
        rollout_id: of the rollout.
        args: vime's.
        samples: by the prefix of their metrics' names.

    Raises:
        ImportError: this vime has its trackers nowhere: metrics that nobody sees are worse than none.
    """
    logging_utils, metric_utils = _observability("logging_utils"), _observability("metric_utils")
    try:
        found = {
            prefix + name: value for prefix in samples for name, value in metrics.summarize(samples[prefix]).items()
        }
        logger.info("%s %s: %s", kind, rollout_id, found)
        step_key = f"{kind}/step"
        step = {step_key: metric_utils.compute_rollout_step(args, rollout_id)}
        logging_utils.log(args, found | step, step_key=step_key)
    except Exception:
        logger.exception("the plugin's metrics of %s %s could not be logged", kind, rollout_id)


def _observability(name: str) -> Any:
    """A module of vime's observability, imported when it is used: it imports wandb, which whoever only rolls out need
    not have."""
    for package in ("vime.observability", "vime.utils"):  # from September 2026 on, and before
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}.{name}"):
                raise  # it is there, and something that it needs is not
    raise ImportError(
        f"this vime has {name} neither in vime.observability nor in vime.utils: start it without the "
        "--custom-rollout-log-function-path and --custom-eval-rollout-log-function-path of this plugin"
    )
