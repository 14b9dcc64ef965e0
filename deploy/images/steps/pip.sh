#!/bin/sh
# A step of an image's build: runs `pip install` or `pip wheel` of /opt/tunemq with the versions of
# constraints.txt and the sources in /mnt/site (deploy/images/site).
set -eu

if [ -e /mnt/site/pip.conf ]; then
    export PIP_CONFIG_FILE=/mnt/site/pip.conf
fi
if [ -e /mnt/site/ca.crt ]; then
    export PIP_CERT=/mnt/site/ca.crt
fi
if [ -d /mnt/site/wheels ]; then
    export PIP_FIND_LINKS=/mnt/site/wheels PIP_NO_INDEX=1
fi
export PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

command=$1
shift
/opt/tunemq/bin/python -m pip "$command" --constraint constraints.txt "$@"
/opt/tunemq/bin/python -m pip check
