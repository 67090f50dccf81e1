#!/usr/bin/env bash
# Measures every figure that the project claims in one run, prints a table and how long each area took, and updates
# tests/FIGURES.md.
#   tests/figures.sh [--json FILE] [--no-page] [--check] [--skip-packages] [AREA...]
#   areas: house quality kernels local engine judge systems llama transformers recovery travel gpu (default: all), and `build`, which runs
#   only when it is named: how long builds take, as rows of `house`. --no-page leaves the page and its data alone.
#
# A row: {area, name, value, unit, better, goal, against, samples, spread, machine, date}. A row that could
# not run here has value null and the reason in `against`. Missed goals are printed like the others; the
# exit status is 0 when the programs ran, whatever the figures are. With --check it is 1 when a row of this
# run misses its goal: the missed rows are listed last. A row that could not run is named, and misses nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
json=
no_page=
check=
areas=()
while [ $# -gt 0 ]; do
  case "$1" in
    --json) json=$(realpath -m "${2:?--json needs a file}"); shift ;;
    --no-page) no_page=1 ;;
    --check) check=1 ;;
    --skip-packages) export PQCACHED_SKIP_PACKAGES=1 ;;
    -h|--help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    house|build|quality|kernels|local|engine|judge|systems|llama|transformers|recovery|travel|gpu) areas+=("$1") ;;
    *) echo "error: unknown area $1 (see --help)" >&2; exit 2 ;;
  esac
  shift
done
[ ${#areas[@]} -gt 0 ] || areas=(house quality kernels local engine judge systems llama transformers recovery travel gpu)

benches=
for area in "${areas[@]}"; do
  case $area in house|build) ;; *) benches=1 ;; esac
done
if [ -n "$benches" ]; then
  deploy/install_packages.sh build test bench
  cmake --preset bench >/dev/null
  target=all
  [ "${areas[*]}" = kernels ] && target=kernel_benches
  [ "${areas[*]}" = recovery ] && target=recovery_programs
  cmake --build build/bench --target "$target"
fi
rows=$(mktemp -d)
trap 'rm -rf "$rows"' EXIT

# With sched_autogroup, a background job of another login takes half of a core, whatever its nice value.
# setsid gives the program an autogroup of its own, whose high priority makes timings repeatable. Raising
# the priority needs root; without root the attempt fails and does no harm.
measure() {
  setsid --wait bash -c 'echo -15 2>/dev/null >/proc/self/autogroup || true; exec "$@"' measure "$@"
}

for area in "${areas[@]}"; do
  started=$SECONDS
  if [ "$area" = house ]; then
    echo "== house: the prose and the size of the sources" >&2
    PYTHONDONTWRITEBYTECODE=1 python3 tests/tidy/prose.py . --json "$rows/house.json" | tail -n 1 >&2 || true
  fi
  if [ "$area" = build ]; then
    echo "== build: the quickstart and an edit, without a compiler cache" >&2
    deploy/install_packages.sh build test
    PYTHONDONTWRITEBYTECODE=1 python3 tests/tidy/build_times.py --json "$rows/build.json" >&2
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
  if [ "$area" = engine ]; then
    echo "== engine: rows stored and loaded, beside Mooncake's store" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 python3 tests/bench/engine/mooncake_peer.py build/bench --json "$rows/engine-mooncake.json" >&2
    echo "== engine: the first token of turn 30, with and without the stored prefix" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH=build/bench/client python3 tests/bench/engine/turn_trace.py build/bench \
      --json "$rows/engine-turns.json" >&2
    echo "== engine: the memory of an idle daemon" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH=build/bench/client python3 tests/bench/engine/idle_memory.py build/bench \
      --json "$rows/engine-idle.json" >&2
    echo "== engine: the memory of one sequence over its content" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH=build/bench/client python3 tests/bench/engine/content_memory.py build/bench \
      --json "$rows/engine-content.json" >&2
    echo "== engine: the attention mass that re-ranking gains" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 python3 tests/quality/pretrained_rows.py build/bench engine --json "$rows/engine-rerank.json" >&2
  fi
  if [ "$area" = llama ]; then
    echo "== llama: decoding with long contexts, beside plain llama.cpp" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 python3 tests/llama/llama_rows.py build/bench --json "$rows/llama.json" >&2
  fi
  if [ "$area" = transformers ]; then
    echo "== transformers: SmolLM2 in Transformers, with our cache and its own" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH=build/bench/client python3 tests/transformers/hf_rows.py build/bench \
      --json "$rows/transformers.json" >&2
    echo "== transformers: SmolLM2 in vLLM, with our plug-in and without it" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH=build/bench/client python3 tests/vllm/vllm_rows.py build/bench \
      --json "$rows/transformers-vllm.json" >&2
  fi
  if [ "$area" = travel ]; then
    echo "== travel: refusals of TLS, and what it costs" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH=build/bench/client python3 tests/bench/travel/tls_rows.py build/bench \
      --json "$rows/travel-tls.json" >&2
  fi
  if [ "$area" = systems ]; then
    echo "== systems: the attention mass that whole rotary pairs gain" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 python3 tests/quality/pretrained_rows.py build/bench systems --json "$rows/systems-pairs.json" >&2
    echo "== systems: the trained models with their values in the sidecar" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 python3 tests/quality/kcache_rows.py build/bench --json "$rows/systems-kcache.json" \
      --grid build/bench/kcache_grid.json >&2
    echo "== systems: the trained models with tokens that graphs select" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 python3 tests/quality/ra_rows.py build/bench --json "$rows/systems-ra.json" >&2
    echo "== systems: graphs beside exact search, IVF and HNSW" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 python3 tests/quality/graph/graph_rows.py build/bench --json "$rows/systems-graph.json" >&2
    echo "== systems: what a tail estimate gains" >&2
    measure env PYTHONDONTWRITEBYTECODE=1 python3 tests/quality/tail_rows.py build/bench --json "$rows/systems-tail.json" >&2
    echo "== systems: the size of a plug-in" >&2
    PYTHONDONTWRITEBYTECODE=1 python3 tests/quality/plugin_rows.py --json "$rows/systems-plugin.json"
  fi
  for program in build/bench/tests/figures/"$area"/*; do
    [ -f "$program" ] && [ -x "$program" ] || continue
    echo "== $area: $(basename "$program")" >&2
    measure "$program" --json "$rows/$area-$(basename "$program").json"
  done
  echo "$area $((SECONDS - started))" >>"$rows/seconds"
done
python3 tests/figures.py "$rows" ${json:+--json "$json"} ${no_page:+--no-page} ${check:+--check}
