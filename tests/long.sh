#!/usr/bin/env bash
# Runs one of the long suites, or lists them with their last runs. Records the result in tests/long.json and
# tests/FIGURES.md, failures too.
#   tests/long.sh [NAME]
set -euo pipefail
PYTHONDONTWRITEBYTECODE=1 exec python3 "$(dirname "$0")/long.py" "$@"
