#!/usr/bin/env bash
# Builds pqcached, starts the sidecar in a temporary directory, lets a small trained model answer
# long-context questions with its KV cache there, prints the report, and stops the sidecar.
#   deploy/quickstart.sh [--json FILE] [--skip-packages]
#   --json FILE       also writes the report as JSON
#   --skip-packages   does not install Debian packages
set -euo pipefail
json=()
while [ $# -gt 0 ]; do
  case "$1" in
    --json) json=(--json "$(realpath -m "${2:?--json needs a file}")"); shift ;;
    --skip-packages) export PQCACHED_SKIP_PACKAGES=1 ;;
    -h|--help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown argument $1 (see --help)" >&2; exit 2 ;;
  esac
  shift
done
cd "$(dirname "$0")/.."

deploy/install_packages.sh build
cmake --preset quickstart >/dev/null
cmake --build build/quickstart --target pqcached pqcached_rpc tinylm_report

directory=$(mktemp -d)
sidecar=
stop() {
  if [ -n "$sidecar" ]; then
    kill "$sidecar" 2>/dev/null || true
    wait "$sidecar" 2>/dev/null || true
  fi
  rm -rf "$directory"
}
trap stop EXIT INT TERM

socket=$directory/pqcached.sock
build/quickstart/service/pqcached --listen "unix://$socket" >"$directory/log" 2>&1 &
sidecar=$!
for _ in $(seq 100); do
  [ -S "$socket" ] && break
  if ! kill -0 "$sidecar" 2>/dev/null; then
    cat "$directory/log" >&2
    echo "error: the sidecar did not start" >&2
    exit 1
  fi
  sleep 0.1
done
[ -S "$socket" ] || { echo "error: the sidecar did not open $socket within 10 s" >&2; exit 1; }

build/quickstart/tests/tinylm/tinylm_report --endpoint "unix://$socket" \
  --model tests/tinylm/model --prompts tests/tinylm/prompts_dev "${json[@]}"
