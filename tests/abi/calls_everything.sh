#!/bin/sh
# Checks that a program calls every function that the headers of its version declare.
# Usage: calls_everything.sh PROGRAM HEADERS_FOLDER
set -eu
called=$(nm -D --undefined-only "$1" | awk '{print $2}' | sed 's/@.*//' | grep '^pqc_' | sort)
declared=$(cat "$2"/*.h | sed -n 's/^PQC_API [^(]*[ *]\(pqc_[a-z0-9_]*\)(.*/\1/p' | sort)
[ -n "$declared" ]
if [ "$called" != "$declared" ]; then
  printf '%s\n' "$called" >"${TMPDIR:-/tmp}/called.$$"
  printf '%s\n' "$declared" | diff - "${TMPDIR:-/tmp}/called.$$" || true
  rm -f "${TMPDIR:-/tmp}/called.$$"
  echo "the program does not call what the headers declare (<), or calls other functions (>)"
  exit 1
fi
