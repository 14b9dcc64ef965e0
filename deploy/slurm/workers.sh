#!/bin/sh
# Keeps as many workers in SLURM's queue as are wanted while a TuneMQ farm has work, and none while
# it has none. It looks once and ends: have cron or scrontab call it every few minutes.
#
#   workers.sh NAME NUMBER FOLDER ARGUMENTS OF SBATCH...
#
#   NAME     of the jobs; each pool of workers (each kind of GPU) has one of its own
#   NUMBER   of workers
#   FOLDER   of a submitter: his `environment` (TUNEMQ_REDIS, TUNEMQ_KEYS); mode 0700
#
#   workers.sh a100 16 ~/tunemq/ada --gpus=a100:1 --time=8:00:00 \
#       ~/tunemq/tunemq.sbatch worker ~/tunemq/worker
#
# Exit codes: 0 done; 64 something given is of no use; otherwise that of the command that failed:
# of `tunemq ls` 69, Redis is away, or 75, no scheduler is there; of `squeue` 1, SLURM does not
# answer. Then nothing is changed.
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
    '' | *[!A-Za-z0-9._-]*) fail "'$name' is no name of a job; take letters, digits, - and _" ;;
esac
case $number in
    '' | *[!0-9]*) fail "'$number' is no number of workers" ;;
esac
settings=$folder/environment
[ -r "$settings" ] || fail "$settings cannot be read; make it: docs/deploy/slurm.md says how"
while IFS= read -r line || [ -n "$line" ]; do
    case $line in
        '' | '#'*) continue ;;
        *=*) ;;
        *) fail "$settings: a line is no NAME=VALUE" ;;
    esac
    case ${line%%=*} in
        '' | [!A-Za-z_]* | *[!A-Za-z0-9_]*) fail "$settings: '${line%%=*}' is no variable" ;;
    esac
    export "${line?}"
done < "$settings"

found=$("${TUNEMQ_PROGRAM:-tunemq}" ls --active --json)
waiting=$(printf '%s' "$found" | grep -o '"state":"\(QUEUED\|RUNNING\|STOPPING\)"' | grep -c .) || :
# On its own: a squeue that fails ends this here, and does not count as one that found nobody.
listed=$(squeue --noheader --array --user="$(id -un)" --name="$name" --format=%i)
there=$(printf '%s' "$listed" | grep -c .) || :

if [ "$waiting" -eq 0 ]; then
    if [ "$there" -gt 0 ]; then
        echo "workers.sh: no searches; $there workers of $name are not needed"
        scancel --user="$(id -un)" --name="$name"
    fi
elif [ "$there" -lt "$number" ]; then
    missing=$((number - there))
    echo "workers.sh: searches: $waiting; workers of $name: $there, $missing more are wanted"
    sbatch --job-name="$name" --array="1-$missing" "$@"
fi
