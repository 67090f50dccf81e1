#!/usr/bin/env bash
# Runs the tests of the llama.cpp plug-in at full length, and with the plug-in under the sanitizers of addresses,
# undefined behaviour and threads. Fetches and builds llama.cpp when it is missing.
#   tests/llama/long.sh [--skip-packages]
# Builds in build/release, build/llama-asan and build/llama-tsan. Takes about two hours on two cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "${1:-}" = --skip-packages ] && export PQCACHED_SKIP_PACKAGES=1
python3 tests/llama/engine.py
export PYTHONDONTWRITEBYTECODE=1
deploy/install_packages.sh build test
cmake --preset release >/dev/null
cmake --build build/release --target ggml_pqcached pqcached_llama pqcached pqcached_rpc
plugin=build/release/client/libggml-pqcached.so
PQCACHED_LLAMA_OPERATIONS=100000 python3 tests/llama/llama_test.py "$plugin"
PQCACHED_LLAMA_LONG=1 python3 tests/llama/models_test.py "$plugin"
PQCACHED_LLAMA_KILLS=1000 python3 tests/llama/sidecar_test.py build/release "$plugin"
for test in drop_test application/offload_test application/application_test; do
  PQCACHED_LLAMA_KILLS=200 python3 "tests/llama/$test.py" build/release "$plugin"
done
cmake --build build/release --target pqcachectl pqcached-conform  # what is installed beside the libraries
python3 tests/llama/application/patched_server.py build/release
python3 tests/llama/application/server_patch_test.py build/release "$plugin"

# The plug-in and the client with sanitizers: their libraries are loaded first by an engine that was built without them.
sanitize() {
  local name=$1 flags=$2 libraries=$3
  cmake -S . -B "build/llama-$name" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=g++ -DCMAKE_UNITY_BUILD=ON \
    -DCMAKE_CXX_FLAGS="$flags -g1 -Wno-array-bounds -Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-restrict -Wno-tsan" >/dev/null
  cmake --build "build/llama-$name" --target ggml_pqcached pqcached_rpc
  for test in sidecar_test drop_test application/offload_test; do
    PQCACHED_LLAMA_PRELOAD=$libraries PQCACHED_LLAMA_KILLS=40 \
      python3 "tests/llama/$test.py" build/release "build/llama-$name/client/libggml-pqcached.so"
  done
}
sanitize asan "-fsanitize=address,undefined -fno-sanitize-recover=undefined" \
  "$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so)"
sanitize tsan -fsanitize=thread "$(g++ -print-file-name=libtsan.so)"
