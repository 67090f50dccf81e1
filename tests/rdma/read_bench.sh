# Runs in the virtual machine: pulls 32 MiB, and reads 32 MiB with perftest's ib_read_bw, by turns.
# Prints lines `pull MIB_PER_S` and `ib_read_bw MIB_PER_S`.
#   read_bench.sh PROGRAM
set -euo pipefail
is_listening() { grep -qs ":$(printf %04X 18515) .* 0A " /proc/net/tcp /proc/net/tcp6; }
for repetition in 1 2 3 4 5; do
  echo "pull $("$1" 32)"
  ib_read_bw -d rxe1 -x 1 -q 2 -n 16 -s 1048576 >/dev/null 2>&1 &
  for attempt in $(seq 100); do
    is_listening && break
    sleep 0.1
  done
  echo "ib_read_bw $(ib_read_bw -d rxe0 -x 1 -q 2 -n 16 -s 1048576 10.77.0.2 2>/dev/null |
    awk '$1 == 1048576 {print $4}')"
  wait
done
