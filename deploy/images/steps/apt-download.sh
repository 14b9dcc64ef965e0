#!/bin/sh
# A step of a build: puts Debian's packages that are named, and those that they need beside the ones
# of this image, into FOLDER, with the list of them that apt wants.
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
