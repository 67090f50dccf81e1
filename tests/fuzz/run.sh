#!/usr/bin/env bash
# Fuzzes all targets, as many at once as there are cores, and prints what each has run and covered.
#   tests/fuzz/run.sh [--skip-packages] [--json FILE] [SECONDS | --runs | --long] [TARGET...]
#   SECONDS      over all targets together (default: 60)
#   --runs       10^6 inputs for each parser, 10^5 for each other target
#   --long       ten times as many
#   --minimize   instead: writes tests/fuzz/corpus from what earlier runs of this build have kept
#
# A finding ends with a nonzero status; its input is named and stays in build/asan/findings. Put it into
# tests/fuzz/findings/TARGET with its fix: every build's tests replay what lies there, and the corpora.
# PQCACHED_FUZZ_BUILD names another build folder than build/asan, already configured.
set -euo pipefail
cd "$(dirname "$0")/../.."
json= factor=0 seconds=60 minimize=
wanted=()
while [ $# -gt 0 ]; do
  case "$1" in
    --skip-packages) export PQCACHED_SKIP_PACKAGES=1 ;;
    --json) json=$(realpath -m "${2:?--json needs a file}"); shift ;;
    --runs) factor=1 ;;
    --long) factor=10 ;;
    --minimize) minimize=1 ;;
    -h|--help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    [0-9]*) seconds=$1 ;;
    *) wanted+=("$1") ;;
  esac
  shift
done

deploy/install_packages.sh build test lint
build=${PQCACHED_FUZZ_BUILD:-build/asan}
[ -n "${PQCACHED_FUZZ_BUILD:-}" ] || cmake --preset asan >/dev/null
cmake --build "$build" --target fuzzers
# A target and its kind in each line.
mapfile -t lines <"$build/tests/fuzz/targets"
declare -A kind=()
targets=()
for line in "${lines[@]}"; do
  kind[${line% *}]=${line#* }
  [ ${#wanted[@]} -gt 0 ] || targets+=("${line% *}")
done
[ ${#wanted[@]} -eq 0 ] || targets=("${wanted[@]}")
for target in "${targets[@]}"; do
  [ -n "${kind[$target]:-}" ] || { echo "error: no target $target in ${!kind[*]}" >&2; exit 2; }
done

# Short stacks and a small quarantine: with the defaults, half of the time is spent on them.
export ASAN_OPTIONS=${ASAN_OPTIONS:-allocator_may_return_null=1:detect_leaks=1:malloc_context_size=6:quarantine_size_mb=16}
. tests/sanitizer_options.sh
findings=$build/findings
mkdir -p "$findings"
jobs=$(nproc)

# At most 60 inputs of at most 4 KiB. The merge writes those first that cover most of what is left.
minimize_one() {
  local target=$1 merged to=tests/fuzz/corpus/$1
  merged=$(mktemp -d)
  "$build/tests/fuzz/fuzz_$target" -merge=1 -set_cover_merge=1 -use_counters=0 -max_len=4096 "$merged" \
    "$build/corpus/$target" >"$build/fuzz_$target.log" 2>&1
  rm -rf "$to"
  mkdir -p "$to"
  find "$merged" -type f -printf '%T@ %p\n' | sort -n | awk 'NR <= 60 { print $2 }' | xargs -r cp -t "$to"
  rm -rf "$merged"
  echo "$target: $(find "$to" -type f | wc -l) inputs"
}

fuzz_one() {
  local target=$1 corpus=$build/corpus/$1 limit
  mkdir -p "$corpus"
  "$build/tests/fuzz/fuzz_${target}_test" --write "$corpus"
  if [ "$factor" -eq 0 ]; then
    local rounds=$(((${#targets[@]} + jobs - 1) / jobs))
    limit=-max_total_time=$(((seconds + rounds - 1) / rounds))
  elif [ "${kind[$target]}" = parser ]; then
    limit=-runs=$((factor * 1000000))
  else
    limit=-runs=$((factor * 100000))
  fi
  local kept=()
  [ ! -d "tests/fuzz/corpus/$target" ] || kept=("tests/fuzz/corpus/$target")
  # Leaks are looked for at the end: between inputs, other threads own memory too. Weights of inputs
  # (entropic) cost more than the calls of an input.
  exec "$build/tests/fuzz/fuzz_$target" "$limit" -max_len=1024 -len_control=20 -entropic=0 -timeout=60 -rss_limit_mb=4096 \
    -detect_leaks=0 -print_final_stats=1 -artifact_prefix="$findings/$target-" "$corpus" "${kept[@]}" \
    >"$build/fuzz_$target.log" 2>&1 </dev/null
}

started=$SECONDS
declare -A running=()
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
collect() {  # one that has ended
  local ended status=0
  wait -n -p ended "${!running[@]}" || status=$?
  local target=${running[$ended]}
  unset "running[$ended]"
  if [ "$status" -ne 0 ]; then
    tail -n 60 "$build/fuzz_$target.log"
    echo "finding: see $build/fuzz_$target.log and $findings" >&2
    exit 1
  fi
}
for target in "${targets[@]}"; do
  [ ${#running[@]} -lt "$jobs" ] || collect
  if [ -n "$minimize" ]; then minimize_one "$target" & else fuzz_one "$target" & fi
  running[$!]=$target
done
while [ ${#running[@]} -gt 0 ]; do collect; done
[ -z "$minimize" ] || exit 0

total=0
rows=
for target in "${targets[@]}"; do
  log=$build/fuzz_$target.log
  executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  edges=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)
  echo "$target: $executions executions, $edges edges covered"
  total=$((total + executions))
  rows+="${rows:+, }\"$target\": {\"executions\": $executions, \"edges\": $edges}"
done
echo "executions: $total in $((SECONDS - started)) s"
[ -z "$json" ] || printf '{"executions": %s, "seconds": %s, "targets": {%s}}\n' "$total" "$((SECONDS - started))" "$rows" >"$json"
