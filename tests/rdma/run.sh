#!/usr/bin/env bash
# Runs the tests of RDMA in a virtual machine (vm.sh). Prints SKIPPED rdma_vm when there is none.
#   tests/rdma/run.sh PROGRAM [ARGUMENT...]          pqcached_rdma_test, with arguments of GoogleTest
#   tests/rdma/run.sh --bench PROGRAM [--json FILE]  pqcached_rdma_read_bench, next to ib_read_bw
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bench=0 json=
if [ "${1:-}" = --bench ]; then bench=1; shift; fi
program=${1:?needs a program}
shift
if [ "${1:-}" = --json ]; then json=$2; shift 2; fi

run=("$here/vm.sh" --with "$program")
if (( bench )); then
  run+=(--with "$here/read_bench.sh" -- bash ./read_bench.sh "./$(basename "$program")")
else
  run+=(-- "./$(basename "$program")" "$@")
fi
status=0
output=$(mktemp)
trap 'rm -f "$output"' EXIT
"${run[@]}" | tee "$output" || status=$?
if [ $status = 77 ]; then
  echo "SKIPPED rdma_vm: $(tail -n 1 "$output")"
  exit 0
fi
if (( bench )) && [ $status = 0 ]; then
  python3 "$here/read_bench.py" "$output" ${json:+"$json"}
fi
exit $status
