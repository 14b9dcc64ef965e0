#!/bin/sh
# A step of an image's build: adds the user `tunemq`, as whom everything runs, and gives it the
# folders that are named. A volume that is mounted there for the first time gets their owner.
set -eu

groupadd --gid 10001 tunemq
useradd --uid 10001 --gid 10001 --no-create-home --home-dir "$1" --shell /usr/sbin/nologin tunemq
for folder in "$@"; do
    install -d -o tunemq -g tunemq -m 0750 "$folder"
done
