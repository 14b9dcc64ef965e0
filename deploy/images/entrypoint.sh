#!/bin/sh
# Runs `tunemq` with the variables of /etc/tunemq/environment, if that file exists: lines
# NAME=VALUE, without quotes, as for systemd. They override variables of the container. So neither
# arguments nor `docker inspect` show a secret.
#
#   tunemq-entrypoint scheduler --store s3://tunemq/farm
#   docker exec CONTAINER tunemq-entrypoint doctor
set -eu

file=${TUNEMQ_ENVIRONMENT:-/etc/tunemq/environment}
if [ -e "$file" ]; then
    number=0
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        case $line in
            '' | '#'*) continue ;;
        esac
        name=${line%%=*}
        case $name in
            "$line" | '' | [0-9]* | *[!A-Za-z0-9_]*)
                # Without the line itself, which may contain a password.
                echo "tunemq-entrypoint: line $number of $file is not NAME=VALUE: correct it" >&2
                exit 64
                ;;
        esac
        export "$line"
    done < "$file"
fi

# A folder for each node, so that nodes can share a volume.
if [ "${1-}" = worker ]; then
    shift
    set -- worker --workdir "/var/cache/tunemq/$(uname -n)" "$@"
fi
exec tunemq "$@"
