#!/usr/bin/env bash
# Measures every figure that the project claims, side by side in one run, and prints a table.
#   tests/figures.sh [--json FILE] [--skip-packages] [AREA...]     areas: house quality kernels local judge recovery gpu (default: all)
#
# A row: {area, name, value, unit, better, goal, against, samples, spread, machine, date}. A row that could not run here has
# value null and says why in `against`. Missed goals are printed like the others; the exit status tells only whether it ran.
set -euo pipefail
cd "$(dirname "$0")/.."
json=
areas=()
while [ $# -gt 0 ]; do
  case "$1" in
    --json) json=$(realpath -m "${2:?--json needs a file}"); shift ;;
    --skip-packages) export PQCACHED_SKIP_PACKAGES=1 ;;
    -h|--help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    house|quality|kernels|local|judge|recovery|gpu) areas+=("$1") ;;
    *) echo "error: unknown area $1 (see --help)" >&2; exit 2 ;;
  esac
  shift
done
[ ${#areas[@]} -gt 0 ] || areas=(house quality kernels local judge recovery gpu)

if [ "${areas[*]}" != house ]; then
  deploy/install_packages.sh build test bench
  cmake --preset bench >/dev/null
  target=all
  [ "${areas[*]}" = kernels ] && target=kernel_benches
  [ "${areas[*]}" = recovery ] && target=recovery_programs
  cmake --build build/bench --target "$target"
fi
rows=$(mktemp -d)
trap 'rm -rf "$rows"' EXIT

# On a machine with sched_autogroup a background job of another login takes half of a core, whatever its nice value;
# a session of its own with a high autogroup priority is what makes timings repeatable (needs root; harmless without).
measure() {
  setsid --wait bash -c 'echo -15 2>/dev/null >/proc/self/autogroup || true; exec "$@"' measure "$@"
}

for area in "${areas[@]}"; do
  if [ "$area" = house ]; then
    echo "== house: the prose and the size of the sources" >&2
    PYTHONDONTWRITEBYTECODE=1 python3 tests/tidy/prose.py . --json "$rows/house.json" | tail -n 1 >&2 || true
  fi
  if [ "$area" = quality ]; then
    echo "== quality: all questions of the trained model" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 python3 tests/quality/quality_rows.py build/bench --json "$rows/quality.json"
  fi
  if [ "$area" = judge ]; then
    echo "== judge: all methods on all questions and vectors; the page is build/judge/report.html" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 tests/quality/judge.py --full --build build/bench --out build/judge --rows "$rows/judge.json" >&2
  fi
  if [ "$area" = recovery ]; then
    echo "== recovery: kills, frozen processes, model tests, fuzzers" >&2
    measure tests/fault/recovery_rows.py build/bench --json "$rows/recovery.json" >&2
  fi
  for program in build/bench/tests/figures/"$area"/*; do
    [ -f "$program" ] && [ -x "$program" ] || continue
    echo "== $area: $(basename "$program")" >&2
    measure "$program" --json "$rows/$area-$(basename "$program").json"
  done
done
python3 tests/figures.py "$rows" ${json:+--json "$json"}
