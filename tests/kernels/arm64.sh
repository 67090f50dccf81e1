#!/usr/bin/env bash
# Cross-compiles kernels/ and its tests for arm64 and runs them under qemu-user: the portable forms on a machine that is not
# an x86.
#   tests/kernels/arm64.sh [--skip-packages] [CTEST ARGUMENT...]
# Builds in build/arm64. An emulated test takes some ten times as long as a native one.
set -euo pipefail
cd "$(dirname "$0")/../.."
ctest_arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    --skip-packages) export PQCACHED_SKIP_PACKAGES=1 ;;
    -h|--help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) ctest_arguments+=("$1") ;;
  esac
  shift
done

deploy/install_packages.sh build test arm64
cross=(
  -G Ninja
  -DCMAKE_BUILD_TYPE=Release
  -DCMAKE_SYSTEM_NAME=Linux
  -DCMAKE_SYSTEM_PROCESSOR=aarch64
  -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
  -DCMAKE_C_COMPILER_LAUNCHER=ccache
  -DCMAKE_CXX_COMPILER_LAUNCHER=ccache
  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu"
)

# Debian's GoogleTest is compiled for this machine, its sources come beside it.
googletest=$PWD/build/arm64-googletest
cmake -S /usr/src/googletest -B "$googletest" "${cross[@]}" "-DCMAKE_INSTALL_PREFIX=$googletest/installed" \
  -DCMAKE_INSTALL_LIBDIR=lib >/dev/null
cmake --build "$googletest" --target install >/dev/null

# The rest of the tree is configured with this machine's libraries, and not built.
cmake -S . -B build/arm64 "${cross[@]}" -DPQCACHED_RPC=OFF "-DGTest_DIR=$googletest/installed/lib/cmake/GTest" \
  "-DCMAKE_PREFIX_PATH=/usr/lib/$(gcc -print-multiarch)/cmake" >/dev/null
cmake --build build/arm64 --target tests/kernels/all
ctest --test-dir build/arm64/tests/kernels -j"$(nproc)" --output-on-failure --no-tests=error "${ctest_arguments[@]}"
