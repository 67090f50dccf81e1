#!/bin/sh
# What libpqcached_client shows to the loader: pqc_* alone, and no library of third parties.
# Usage: exports_test.sh LIBRARY HEADER...
set -eu
library=$1
shift
failed=0
others=$(nm -D --defined-only "$library" | awk '{print $3}' | grep -v '^pqc_' || true)
if [ -n "$others" ]; then
  echo "exports other names than pqc_*:" $others
  failed=1
fi
exported=$(nm -D --defined-only "$library" | grep -c ' T pqc_')
declared=$(cat "$@" | grep -c '^PQC_API')
if [ "$exported" != "$declared" ]; then
  echo "exports $exported functions, but the headers declare $declared"
  failed=1
fi
# The sanitizers' libraries are the build's, not ours.
for needed in $(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
  case $needed in
    libc.so.*|libm.so.*|libstdc++.so.*|libgcc_s.so.*|libdl.so.*|ld-linux-*|libclang_rt.asan-*|libtsan.so.*) ;;
    *) echo "needs $needed"; failed=1 ;;
  esac
done
exit $failed
