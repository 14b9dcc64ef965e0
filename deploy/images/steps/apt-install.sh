#!/bin/sh
# A step of an image's build: installs Debian PACKAGES, and leaves no temporary files.
set -eu
. /mnt/steps/apt.sh

apt update
apt install --yes --no-install-recommends "$@"
apt clean
rm -rf /tmp/site.list /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log \
    /var/log/alternatives.log /var/cache/debconf/*-old /var/cache/ldconfig/aux-cache
