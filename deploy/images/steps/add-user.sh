#!/bin/sh
# A step of an image's build: adds the user `tunemq`, which runs all programs, and creates its
# FOLDERS, the first of which is its home. A new volume that is mounted on one gets the same owner.
set -eu

groupadd --gid 10001 tunemq
useradd --uid 10001 --gid 10001 --no-create-home --home-dir "$1" --shell /usr/sbin/nologin tunemq
for folder in "$@"; do
    install -d -o tunemq -g tunemq -m 0750 "$folder"
done
