# shellcheck shell=bash
# Sourced by the scripts: where environments, models, tokenizers and pip's log are kept. RETOOL_CACHE names another
# folder; the programs that these scripts start read the variable and know no rule of their own.
RETOOL_CACHE=${RETOOL_CACHE:-${XDG_CACHE_HOME:-${HOME:?HOME is not set; name a folder in RETOOL_CACHE}/.cache}/retool-vime}
export RETOOL_CACHE
