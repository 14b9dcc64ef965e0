#!/bin/sh
# A step of a build: downloads Debian PACKAGES, with dependencies that this image lacks, into
# FOLDER, and writes the index that apt needs.
set -eu
. /mnt/steps/apt.sh
folder=$1
shift

mkdir -p "$folder/partial"
apt update
apt install --yes --no-install-recommends --download-only -o Dir::Cache::Archives="$folder" "$@"
rm -rf "$folder/partial" "$folder/lock"
apt install --yes --no-install-recommends apt-utils
cd "$folder"
apt-ftparchive packages . > Packages
