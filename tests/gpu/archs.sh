#!/usr/bin/env bash
# Compiles the CUDA side for every architecture that is supported: 80 86 89 90 100 120, or those given.
#   tests/gpu/archs.sh [ARCH...]
set -euo pipefail
cd "$(dirname "$0")/../.."
case "${1:-}" in -h|--help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
archs=("$@")
[ ${#archs[@]} -gt 0 ] || archs=(80 86 89 90 100 120)
for arch in "${archs[@]}"; do
  cmake -S tests/gpu/standalone -B "build/gpu-$arch" -DPQCACHED_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch" >/dev/null
  cmake --build "build/gpu-$arch" -j "$(nproc)" --target pqcached_gpu pqcached_kernels_cuda >/dev/null
  echo "sm_$arch: ok"
done
