#!/bin/bash
# Any program can be a trial. This one fits a number by gradient descent; run it with
#
#   tunemq run ./train.sh --lr {lr} --space space.yaml --metric loss --num-samples 8
set -euo pipefail

[ "$1" = --lr ] && lr=$2
epoch=0
weight=0
if [ -n "${TUNEMQ_CHECKPOINT:-}" ]; then # a folder to continue from; empty at first
    read -r epoch weight < "$TUNEMQ_CHECKPOINT/state"
fi
while [ "$epoch" -lt 20 ]; do
    epoch=$((epoch + 1))
    weight=$(awk "BEGIN { print $weight - $lr * 2 * ($weight - 3) }")
    loss=$(awk "BEGIN { print ($weight - 3) ^ 2 }")
    if [ -n "${TUNEMQ_CHECKPOINT_DIR:-}" ]; then
        # Renamed once complete, before the script prints the result that belongs to it.
        echo "$epoch $weight" > "$TUNEMQ_CHECKPOINT_DIR/.state"
        mv "$TUNEMQ_CHECKPOINT_DIR/.state" "$TUNEMQ_CHECKPOINT_DIR/state"
    fi
    echo "epoch=$epoch loss=$loss"
done
