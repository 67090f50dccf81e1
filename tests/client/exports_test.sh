#!/bin/sh
# What libpqcached_client shows to the loader: pqc_* alone, and no library of third parties.
# Usage: exports_test.sh LIBRARY HEADER
set -eu
library=$1
failed=0
others=$(nm -D --defined-only "$library" | awk '{print $3}' | grep -v '^pqc_' || true)
if [ -n "$others" ]; then
  echo "exports other names than pqc_*:" $others
  failed=1
fi
exported=$(nm -D --defined-only "$library" | grep -c ' T pqc_')
declared=$(grep -c '^PQC_API' "$2")
if [ "$exported" != "$declared" ]; then
  echo "exports $exported functions, but the header declares $declared"
  failed=1
fi
# The sanitizers' libraries are the build's, not ours.
for needed in $(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
  case $needed in
    libc.so.*|libm.so.*|libstdc++.so.*|libgcc_s.so.*|libdl.so.*|ld-linux-*|libasan.so.*|libubsan.so.*|libtsan.so.*) ;;
    *) echo "needs $needed"; failed=1 ;;
  esac
done
exit $failed
