#!/bin/sh
# Runs a command with the addresses and keys of a farm, which lie in the folder of this file:
#   ./with tunemq submit search.py
#   eval "$(./with)"                 # or so, for all that this shell runs from now on
set -eu
folder=$(cd "$(dirname "$0")" && pwd)
case $folder in
    *[!A-Za-z0-9/._-]*)
        echo "with: $folder has other characters than letters, digits, . _ and -, which an address" \
            "of Redis cannot name; put this folder elsewhere" >&2
        exit 64 ;;
esac

# What somebody has for other stores would be taken before what stands in the folder.
for name in AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_PROFILE AWS_DEFAULT_PROFILE \
    MINIO_ACCESS_KEY MINIO_SECRET_KEY MINIO_ROOT_USER MINIO_ROOT_PASSWORD; do
    if [ "$#" -eq 0 ]; then
        echo "unset $name"
    else
        unset "$name"
    fi
done

while IFS= read -r line; do
    case $line in
        */etc/tunemq/*) line=${line%%/etc/tunemq/*}$folder/${line#*/etc/tunemq/} ;;
    esac
    if [ "$#" -eq 0 ]; then
        echo "export ${line%%=*}='${line#*=}'"
    else
        export "${line?}"
    fi
done < "$folder/environment"
[ "$#" -eq 0 ] || exec "$@"
