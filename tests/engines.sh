#!/usr/bin/env bash
# Runs the tests of the adapters for LMCache and SGLang in the real packages. Installs these, without CUDA, when they are missing.
#   tests/engines.sh [OPTIONS OF run.sh]
set -euo pipefail
cd "$(dirname "$0")/.."
python3 tests/environments.py lmcache
python3 tests/environments.py sglang
PQCACHED_REQUIRE=lmcache,sglang tests/run.sh "$@" -R '^(lmcache|sglang)_'
