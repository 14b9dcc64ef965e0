#!/bin/sh
# Runs a command with a farm's addresses and keys, which are in the folder of this script:
#   ./with tunemq submit search.py
#   eval "$(./with)"                 # for all later commands of this shell
set -eu
folder=$(cd "$(dirname "$0")" && pwd)
case $folder in
    *[!A-Za-z0-9/._-]*)
        echo "with: move this folder: $folder must contain only letters, digits, ., _ and -, because" \
            "the address of Redis contains its path" >&2
        exit 64 ;;
esac

# These variables, if set for other stores, would override the credentials in the folder.
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
