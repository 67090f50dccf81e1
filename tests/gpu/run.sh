#!/usr/bin/env bash
# Builds kernels/, gpu/, the client without gRPC, and their device tests with CMake, a C++ compiler and nvcc alone; runs
# them, and prints a table.
#   tests/gpu/run.sh [--arch N] [--memcheck] [--bench]
#   --arch N      architecture of the device (default: asked of nvidia-smi; 90 where it is not there)
#   --memcheck    runs the tests under compute-sanitizer's memcheck and racecheck too, where it is installed
#   --bench       runs the benches too (minutes, tens of GB of both memories); their rows go to build/gpu/figures.json
#
# Without a device it says so and runs the same tests on the emulation; the device's own say why they are skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
arch=
memcheck=
bench=
while [ $# -gt 0 ]; do
  case "$1" in
    --arch) arch=${2:?--arch needs a number}; shift ;;
    --memcheck) memcheck=1 ;;
    --bench) bench=1 ;;
    -h|--help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: unknown argument $1 (see --help)" >&2; exit 2 ;;
  esac
  shift
done
if [ -z "$arch" ]; then
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d . || true)
fi
label='gpu$'
if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "No GPU here: the tests run on the emulation of the device, and those of the device are skipped; nothing is measured."
  label='gpu(_emulated)?$'
fi
build=build/gpu
cmake -S tests/gpu/standalone -B "$build" "-DCMAKE_CUDA_ARCHITECTURES=${arch:-90}" >/dev/null
programs=$(cd "$build" && ctest -N -L "^$label" | sed -n 's/^ *Test *#[0-9]*: //p')
# shellcheck disable=SC2086  # a word for each program
cmake --build "$build" -j "$(nproc)" --target $programs ${bench:+bench_gpu} >"$build/build.log" 2>&1 || { tail -n 40 "$build/build.log" >&2; exit 1; }

failed=0
skipped=
printf '%-36s %8s %8s\n' test result seconds
for program in $programs; do
  started=$SECONDS
  if "$build/tests/$program" >"$build/$program.log" 2>&1; then
    result=ok
    if grep -qi 'skipped' "$build/$program.log" && ! grep -q '\bOK\b' "$build/$program.log"; then result=skipped; skipped=$program; fi
  else
    result=FAILED; failed=1
  fi
  printf '%-36s %8s %8d\n' "$program" "$result" $((SECONDS - started))
  [ "$result" = FAILED ] && tail -n 20 "$build/$program.log" >&2
  if [ -n "$memcheck" ] && [ "$result" = ok ] && [[ $program != gpu_emulat* ]]; then
    for tool in memcheck racecheck; do
      if ! command -v compute-sanitizer >/dev/null; then echo "compute-sanitizer is not here: $tool not run"; continue; fi
      if compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 1 "$build/tests/$program" >"$build/$program.$tool.log" 2>&1; then
        printf '%-36s %8s\n' "  $tool" ok
      else
        printf '%-36s %8s\n' "  $tool" FAILED; failed=1; tail -n 20 "$build/$program.$tool.log" >&2
      fi
    done
  fi
done
[ -z "$skipped" ] || grep -m 1 -i 'no GPU' "$build/$skipped.log" || true
if [ -n "$bench" ]; then "$build/tests/figures/gpu/bench_gpu" --json "$build/figures.json" || failed=1; fi
exit $failed
