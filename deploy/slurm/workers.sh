#!/bin/sh
# Keeps NUMBER workers in SLURM's queue while a TuneMQ farm has searches, and none otherwise. It
# checks once and exits: call it every few minutes with cron or scrontab.
#
#   workers.sh NAME NUMBER FOLDER ARGUMENTS OF SBATCH...
#
#   NAME     of the jobs; each pool of workers (each kind of GPU) needs a separate one
#   NUMBER   of workers
#   FOLDER   of a submitter, with `environment` (TUNEMQ_REDIS, TUNEMQ_KEYS); mode 0700
#
#   workers.sh a100 16 ~/tunemq/ada --gpus=a100:1 --time=8:00:00 \
#       ~/tunemq/tunemq.sbatch worker ~/tunemq/worker
#
# Exit codes: 0 done; 64 invalid arguments or settings; otherwise the code of a command that failed,
# before which nothing was changed: 69 (`tunemq ls`: no Redis), 75 (`tunemq ls`: no scheduler), 1
# (`squeue`: SLURM does not answer).
set -eu

fail() {
    echo "workers.sh: $1" >&2
    exit 64
}

[ $# -ge 4 ] || fail "usage: workers.sh NAME NUMBER FOLDER ARGUMENTS OF SBATCH..."
name=$1
number=$2
folder=$3
shift 3
case $name in
    '' | *[!A-Za-z0-9._-]*) fail "invalid job name '$name': use letters, digits, ., - and _" ;;
esac
case $number in
    '' | *[!0-9]*) fail "invalid number of workers '$number': use digits" ;;
esac
settings=$folder/environment
[ -r "$settings" ] || fail "cannot read $settings: create it as in docs/deploy/slurm.md"
while IFS= read -r line || [ -n "$line" ]; do
    case $line in
        '' | '#'*) continue ;;
        *=*) ;;
        *) fail "$settings: a line has no =: write NAME=VALUE" ;;
    esac
    case ${line%%=*} in
        '' | [!A-Za-z_]* | *[!A-Za-z0-9_]*)
            fail "$settings: invalid name '${line%%=*}': use letters, digits and _"
            ;;
    esac
    export "${line?}"
done < "$settings"

listing=$("${TUNEMQ_PROGRAM:-tunemq}" ls --active --json)
searches=$(printf '%s' "$listing" | grep -o '"state":"\(QUEUED\|RUNNING\|STOPPING\)"' | grep -c .) || :
# Trials of a search that was just paused run to their next checkpoint.
paused=$(printf '%s' "$listing" | grep -o '"state":"PAUSED"' | grep -c .) || :
pausing=''
[ "$paused" -eq 0 ] || ! printf '%s' "$listing" | grep -q '"RUNNING":[1-9]' || pausing=yes
# Not in a pipe: if squeue fails, the script ends, instead of counting no jobs.
jobs=$(squeue --noheader --array --user="$(id -un)" --name="$name" --format=%i)
workers=$(printf '%s' "$jobs" | grep -c .) || :

if [ "$searches" -eq 0 ]; then
    if [ "$workers" -gt 0 ] && [ -z "$pausing" ]; then
        echo "workers.sh: no searches; cancelling $workers workers of $name"
        scancel --user="$(id -un)" --name="$name"
    fi
elif [ "$workers" -lt "$number" ]; then
    missing=$((number - workers))
    echo "workers.sh: searches: $searches; workers of $name: $workers, submitting $missing more"
    sbatch --job-name="$name" --array="1-$missing" "$@"
fi
