#!/bin/sh
# Runs `tunemq` with the variables of /etc/tunemq/environment, if that file is there: lines
# NAME=VALUE, without quotes, as systemd reads them. What is in the file counts, whatever was set
# before. So no secret is in an argument, nor in what `docker inspect` shows.
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
                # Not the line itself, which may be half of a password.
                echo "tunemq-entrypoint: line $number of $file is not NAME=VALUE" >&2
                exit 64
                ;;
        esac
        export "$line"
    done < "$file"
fi

# A folder for each node, so that several may share what is mounted there.
if [ "${1-}" = worker ]; then
    shift
    set -- worker --workdir "/var/cache/tunemq/$(uname -n)" "$@"
fi
exec tunemq "$@"
