#!/usr/bin/env bash
# Fuzzes targets, all at once, and prints how many inputs were run.
#   tests/fuzz/run.sh [--skip-packages] [--json FILE] [SECONDS [TARGET...]]     default: 60 s of handlers, broker, attachment
#
# A finding ends with a nonzero status; its input is named and stays in build/asan/findings. Put it into
# tests/fuzz/findings/TARGET with its fix, and name it in CMakeLists.txt: every build's tests replay it.
# PQCACHED_FUZZ_BUILD names another build folder than build/asan, already configured.
set -euo pipefail
cd "$(dirname "$0")/../.."
json=
positional=()
while [ $# -gt 0 ]; do
  case "$1" in
    --skip-packages) export PQCACHED_SKIP_PACKAGES=1 ;;
    --json) json=$(realpath -m "${2:?--json needs a file}"); shift ;;
    -h|--help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) positional+=("$1") ;;
  esac
  shift
done
seconds=${positional[0]:-60}
targets=("${positional[@]:1}")
[ ${#targets[@]} -gt 0 ] || targets=(handlers broker attachment)

deploy/install_packages.sh build test lint
build=${PQCACHED_FUZZ_BUILD:-build/asan}
[ -n "${PQCACHED_FUZZ_BUILD:-}" ] || cmake --preset asan >/dev/null
cmake --build "$build" --target fuzzers

export ASAN_OPTIONS=${ASAN_OPTIONS:-allocator_may_return_null=1:detect_leaks=1}
export LSAN_OPTIONS="suppressions=$PWD/tests/lsan.supp:print_suppressions=0" UBSAN_OPTIONS=print_stacktrace=1
findings=$build/findings
mkdir -p "$findings"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
declare -A running
for target in "${targets[@]}"; do
  corpus=$build/corpus/$target
  mkdir -p "$corpus"
  "$build/tests/fuzz/fuzz_${target}_test" --write "$corpus"
  # Leaks are looked for at the end: between inputs, other threads own memory too.
  "$build/tests/fuzz/fuzz_$target" -max_total_time="$seconds" -max_len=2048 -len_control=20 -timeout=60 \
    -rss_limit_mb=4096 -detect_leaks=0 -print_final_stats=1 -artifact_prefix="$findings/$target-" "$corpus" \
    >"$build/fuzz_$target.log" 2>&1 &
  running[$target]=$!
done
total=0
for target in "${targets[@]}"; do
  log=$build/fuzz_$target.log
  if ! wait "${running[$target]}"; then
    tail -n 60 "$log"
    echo "finding: see $log and $findings" >&2
    exit 1
  fi
  executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  covered=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)
  echo "$target: $executions executions in $seconds s, $covered edges covered"
  total=$((total + executions))
done
echo "executions: $total"
if [ -n "$json" ]; then
  printf '{"executions": %s, "seconds": %s, "targets": "%s"}\n' "$total" "$seconds" "${targets[*]}" >"$json"
fi
