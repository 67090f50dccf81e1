#!/bin/sh
# Compares the ABI with that of an earlier version: functions, enum values, and fields at the end of structs may be
# added, and nothing else may change. Usage: only_grows.sh STORED DECLARED LIBRARY
#   STORED    the earlier version's client.abi: abidw --no-show-locs --no-corpus-path --no-comp-dir-path of DECLARED
#   DECLARED  a library that has the functions of today's headers, with debugging information
#   LIBRARY   the client library of today: has the stored functions, and the soname of their version
set -eu
folder=$(dirname "$0")
# abidiff's status is a set of bits: 1 and 2 = it failed, 4 = the ABI has changed, 8 = in a way that is surely
# incompatible.
abidiff --no-added-syms --suppressions "$folder/growth.abignore" "$1" "$2"
missing=0
for name in $(sed -n "s/.*<elf-symbol name='\(pqc_[a-z0-9_]*\)'.*/\1/p" "$1"); do
  nm -D --defined-only "$3" | grep -q " T $name\$" || { echo "the library has no $name"; missing=1; }
done
readelf -d "$3" | grep -q 'SONAME.*\[libpqcached_client\.so\.1\]' || { echo "the soname is not libpqcached_client.so.1"; missing=1; }
exit $missing
