#!/usr/bin/env bash
# `make test-all`: one target after the other, also after a failure; in the end what failed and how long each took.
# Those that are joined by a + wait for other programs most of the time, and take turns at that. The environment of the
# clients is made beside the first; where that fails, their target tries again and says why.
set -uo pipefail
failed=()
table=""
make programs
make .venv-clients/ready > /dev/null 2>&1 &
for targets in "$@"; do
  began=$SECONDS
  outcome=passed
  at_once=()
  [[ $targets = *+* ]] && at_once=(--jobs=2 --output-sync=target)
  make --keep-going "${at_once[@]}" ${targets//+/ } || { outcome=FAILED; failed+=("$targets"); }
  wait
  took=$((SECONDS - began))
  table+=$(printf '%-31s %-8s %3d min %02d s\n' "make ${targets//+/, }" "$outcome" $((took / 60)) $((took % 60)))$'\n'
done
printf '%s%-40s %3d min %02d s\n' "$table" "all of these" $((SECONDS / 60)) $((SECONDS % 60))
exit $(( ${#failed[@]} > 0 ))
