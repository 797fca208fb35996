#!/usr/bin/env bash
# `make test-all`: one target after the other, also after a failure; in the end what failed and how long each took.
set -uo pipefail
failed=()
table=""
for target in "$@"; do
  began=$SECONDS
  outcome=passed
  make "$target" || { outcome=FAILED; failed+=("$target"); }
  took=$((SECONDS - began))
  table+=$(printf '%-20s %-8s %3d min %02d s' "make $target" "$outcome" $((took / 60)) $((took % 60)))$'\n'
done
printf '%s%-29s %3d min %02d s\n' "$table" "all of these" $((SECONDS / 60)) $((SECONDS % 60))
exit $(( ${#failed[@]} > 0 ))
