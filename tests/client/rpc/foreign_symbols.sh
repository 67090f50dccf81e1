#!/bin/sh
# Writes assembly that defines every symbol of protobuf, gRPC and abseil that a library's own libraries define: functions
# lead to ForeignSymbolCalled, data is zero. Usage: foreign_symbols.sh LIBRARY OUTPUT.s
set -eu
libraries=$(ldd "$1" | awk '{print $3}' | grep -E '/lib(protobuf|grpc|gpr|absl|upb)')
[ -n "$libraries" ] || { echo "$1 has no shared protobuf, gRPC or abseil" >&2; exit 1; }
# One line per symbol: type and name without its version.
# shellcheck disable=SC2086
nm -D --defined-only $libraries | awk 'NF == 3 {sub(/@.*/, "", $3); print $2, $3}' |
  grep -E 'google8protobuf|grpc|absl|upb|^. gpr_' | sort -u -k2,2 > "$2.names"
{
  echo '.text'
  awk '$1 ~ /^[TWti]$/ {print ".globl " $2 "\n.type " $2 ",@function\n" $2 ":"}' "$2.names"
  echo 'jmp ForeignSymbolCalled@PLT'
  echo '.data'
  echo '.balign 64'
  awk '$1 !~ /^[TWti]$/ {print ".globl " $2 "\n.type " $2 ",@object\n.size " $2 ",8\n" $2 ":"}' "$2.names"
  echo '.zero 4096'
  echo '.section .note.GNU-stack,"",@progbits'
} > "$2"
rm "$2.names"
