#!/usr/bin/env bash
# Builds everything, runs all tests, and lists what was skipped and why.
#   tests/run.sh [--preset NAME] [--only TEST] [--skip-packages] [CTEST ARGUMENT...]
#   --preset NAME     release (default), dev, asan, tsan: see CMakePresets.json
#   --only TEST       builds and runs one test program, e.g. kvstore_evictor_test
#   --skip-packages   installs no Debian packages
#   PQCACHED_REQUIRE=NAME,... fails when a test is skipped for want of NAME (tests/skips.py has the names).
#   Longer forms of tests: tests/long.sh
set -euo pipefail
cd "$(dirname "$0")/.."
preset=release
target=all
ctest_arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    --preset) preset=${2:?--preset needs a name}; shift ;;
    --only) target=${2:?--only needs the name of a test}; ctest_arguments+=(-R "^$target\$"); shift ;;
    --skip-packages) export PQCACHED_SKIP_PACKAGES=1 ;;
    -h|--help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) ctest_arguments+=("$1") ;;
  esac
  shift
done
# Under TSan only what links no gRPC: Debian's is not instrumented and would drown us in false reports.
[ "$preset" = tsan ] && ctest_arguments=(-L core "${ctest_arguments[@]}")

. tests/sanitizer_options.sh

compiler=
[ "$preset" = asan ] && compiler=lint  # clang
deploy/install_packages.sh build test $compiler
python3 tests/skips.py --check
cmake --preset "$preset" ${PQCACHED_KERNEL_TESTS:+"-DPQCACHED_KERNEL_TESTS=$PQCACHED_KERNEL_TESTS"} \
  ${PQCACHED_GPU_TESTS:+"-DPQCACHED_GPU_TESTS=$PQCACHED_GPU_TESTS"} \
  ${PQCACHED_RPC:+"-DPQCACHED_RPC=$PQCACHED_RPC" -DPQCACHED_HANDLERS=ON} \
  ${PQCACHED_BUILD_ONCE:+-DCMAKE_DISABLE_PRECOMPILE_HEADERS=OFF -DCMAKE_UNITY_BUILD=ON} >/dev/null
cmake --build "build/$preset" --target "$target"
report=$PWD/build/$preset/tests.xml  # with the whole output of tests that have passed, where skips are
rm -f "$report"
status=0
ctest --test-dir "build/$preset" -j"$(nproc)" --output-on-failure --no-tests=error --output-junit "$report" \
  --test-output-size-passed 100000000 "${ctest_arguments[@]}" || status=$?
[ ! -f "$report" ] || python3 tests/skips.py "$report" || status=$((status > 0 ? status : 1))
exit "$status"
