#!/usr/bin/env bash
# The plug-in in every known version of vLLM, which it installs first (3.5 GB each), and 100 kills of the sidecar.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONDONTWRITEBYTECODE=1 PQCACHED_VLLM_LONG=1
python3 tests/vllm/environment.py
tests/run.sh -R '^vllm_'
