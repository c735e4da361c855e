#!/usr/bin/env bash
# A tiny model learns on a machine without a GPU: SFT, RL, evaluation and export through vime's own trainer.
#
#   bash examples/retool/train_on_cpu.sh [--output DIR] [--afresh] [--seed N] [--control shuffled]
#
# VIME_ROOT, MEGATRON_ROOT   checkouts; without them both are cloned, at the commits that trainer/sources.py names
# MBRIDGE_ROOT               a checkout of mbridge instead of the package of PyPI
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=examples/retool/cpu/system.sh
source "$here/cpu/system.sh"

need_python
need_libraries
venv=$(bash "$here/cpu/venv.sh" "$here/trainer/requirements.txt")
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec "$venv/bin/python" -P -m trainer.run "$@"
