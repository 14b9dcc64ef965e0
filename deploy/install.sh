#!/bin/sh
# Makes this machine a part of a farm, or no part of it any more; docs/deploy/bare-metal.md explains it.
# It needs a shell, Python and the folder `systemd` beside it. Run it again to upgrade or to change
# what was said before: what is as it should be stays as it is, and continues running.
#
# Names of units have no blanks in them; what a trap calls is called.
# shellcheck disable=SC2016,SC2046,SC2086,SC2317
set -eu

usage() {
    cat << 'END'
usage: install.sh scheduler|worker|store|submitter [options]
       install.sh uninstall [--purge]

  scheduler  the farm's head            worker     a machine that runs trials
  store      `tunemq store serve`       submitter  the commands only, for people

  --config FOLDER      copy its files (environment, keys.toml, credentials, ca.crt) to /etc/tunemq;
                       of a submitter, to ~/.config/tunemq of the --user
  --user NAME          with submitter: the person whose files these are
  --wheels FOLDER      TuneMQ and all that it needs is there, as wheels: nothing is downloaded
  --wheel FILE         TuneMQ is this wheel; what it needs comes from the index
                       (with neither: TuneMQ is the checkout that this script is in)
  --index URL          the index, in place of pip's own
  --requirements FILE  what else goes into /opt/tunemq, such as torch, as pip's requirements
  --python PROGRAM     3.11 or newer, the same minor version on the whole farm; default: python3
  --gpu                worker: ask the driver by NVML, and let trials use GPUs that are a group's
  --same-user          worker: trials run as the worker's own user, who is not root
  --separate-user      worker: as tunemq-trials, who can read no key of the farm (default)
  --no-start           install only; what is on is left to run
  --purge              uninstall: also configuration, keys, results, users

It needs root. Exit codes: 0 done; 1 not done, or not up; 2 the command line is of no use.
END
}

prefix=/opt/tunemq
etc=/etc/tunemq
state=/var/lib/tunemq
cache=/var/cache/tunemq
trials=/var/lib/tunemq-trials
store=/var/lib/tunemq-store
programs=/usr/local/bin
units=/etc/systemd/system
says=$prefix/.installed
anew="\`install.sh uninstall\` keeps configuration and keys; then name another with --python"

say() { printf '%s\n' "install.sh: $*"; }
fail() { printf '%s\n' "install.sh: $*" >&2; exit 1; }
refuse() { printf '%s\n' "install.sh: $*; --help says what there is" >&2; exit 2; }

absolute() { case $1 in /*) printf '%s\n' "$1" ;; *) printf '%s\n' "$PWD/$1" ;; esac; }

# --- the command line -----------------------------------------------------------------------------

read_arguments() {
    role='' config='' user='' wheels='' wheel='' index='' requirements='' python=''
    gpu='' trials_as='' start=yes purge=''
    while [ "$#" -gt 0 ]; do
        case $1 in
            --config | --user | --wheels | --wheel | --index | --requirements | --python)
                [ -n "${2:-}" ] || refuse "$1 needs a value"
                case $1 in
                    --config) config=$(absolute "$2") ;;
                    --user) user=$2 ;;
                    --wheels) wheels=$(absolute "$2") ;;
                    --wheel) wheel=$(absolute "$2") ;;
                    --index) index=$2 ;;
                    --requirements) requirements=$(absolute "$2") ;;
                    --python) python=$2 ;;
                esac
                shift
                ;;
            --gpu) gpu=yes ;;
            --same-user) trials_as=worker ;;
            --separate-user) trials_as=tunemq-trials ;;
            --no-start) start='' ;;
            --purge) purge=yes ;;
            -h | --help) usage; exit 0 ;;
            scheduler | worker | store | submitter | uninstall)
                [ -z "$role" ] || refuse "$role and $1: one at a time"
                role=$1
                ;;
            *) refuse "$1 is not known" ;;
        esac
        shift
    done
    [ -n "$role" ] || refuse "say what this machine is to be"
    [ "$role" = uninstall ] || [ -z "$purge" ] || refuse "--purge goes with uninstall"
    if [ -n "$gpu$trials_as" ] && [ "$role" != worker ]; then
        refuse "--gpu, --same-user and --separate-user are for workers"
    fi
    [ -z "$wheel" ] || [ -z "$wheels" ] || refuse "--wheel or --wheels, not both"
    [ -z "$wheels" ] || [ -z "$index" ] || refuse "--wheels or --index, not both"
    case $index in
        *://*@*) refuse "others see arguments: say an index with a password in PIP_INDEX_URL" ;;
    esac
    if [ "$role" = submitter ]; then
        [ -z "$config" ] || [ -n "$user" ] || refuse "--config: say with --user whose files these are"
        [ -z "$user" ] || [ -n "$config" ] || refuse "--user goes with --config"
    elif [ -n "$user" ]; then
        refuse "--user is for submitters"
    fi
    [ -z "$config" ] || [ -f "$config/environment" ] ||
        refuse "--config $config: there is no file environment in it"
    [ -z "$config" ] || check_lines "$config/environment"
    [ -z "$wheels" ] || [ -d "$wheels" ] || refuse "--wheels $wheels is no folder"
    [ -z "$wheels" ] || [ "$(find "$wheels" -maxdepth 1 -name 'tunemq-*.whl' | wc -l)" -le 1 ] ||
        refuse "--wheels $wheels has several versions of TuneMQ: leave one there"
    [ -z "$wheel" ] || [ -f "$wheel" ] || refuse "--wheel $wheel is no file"
    [ -z "$requirements" ] || [ -f "$requirements" ] ||
        refuse "--requirements $requirements is no file"
}

# FILE: systemd would print a line that it does not understand into the journal, with its password.
check_lines() {
    wrong=$(grep -nEv '^([#;].*|[A-Za-z_][A-Za-z0-9_]*=.*|)$' "$1" | cut -d : -f 1 | paste -sd , -)
    [ -z "$wrong" ] || refuse "$1, line $wrong: write NAME=VALUE, without export or blanks before it"
}

# --- little helpers -------------------------------------------------------------------------------

has_systemd() { [ -d /run/systemd/system ]; }

# COMMAND...: for all services of TuneMQ, instances of the template included.
of_services() {
    has_systemd || return 0
    "$@" tunemq-scheduler.service tunemq-store.service tunemq-worker.service 'tunemq-worker@*.service'
}

running() {
    of_services systemctl list-units --plain --no-legend \
        --state=active,activating,reloading,deactivating | sed 's/ .*//'
}

# put SOURCE TARGET MODE OWNER:GROUP [MARK]: a copy, written only if it would differ (then 0). MARK is
# a file that stays until what runs was restarted, however this ends meanwhile.
put() {
    if [ -f "$2" ] && cmp -s "$1" "$2"; then
        chown "$4" "$2"
        chmod "$3" "$2"
        return 1
    fi
    [ -z "${5:-}" ] || : > "$5"
    new=$2.new.$$
    (umask 077 && cat "$1" > "$new")
    chown "$4" "$new"
    chmod "$3" "$new"
    mv -f "$new" "$2"
}

add_user() { # NAME HOME
    getent passwd "$1" > /dev/null && return
    command -v useradd > /dev/null ||
        fail "there is no useradd here: make the system user $1 with the home $2, and run this again"
    shell=$(command -v nologin || echo /bin/false)
    useradd --system --user-group --no-create-home --home-dir "$2" --shell "$shell" "$1"
    echo "$1" >> $etc/.made-users
    say "made the user $1"
}

# --- the steps ------------------------------------------------------------------------------------

make_users() {
    [ "$role" = submitter ] && return
    install -d -m 0755 $etc # its files are not for all
    add_user tunemq $state
    [ "$role" = worker ] || return 0
    add_user tunemq-trials $trials
    install -d -m 0700 -o tunemq-trials -g tunemq-trials $trials
    [ -n "$gpu" ] || return 0
    for group in video render; do
        getent group $group > /dev/null || continue
        usermod --append --groups $group tunemq-trials
        usermod --append --groups $group tunemq
    done
}

# What was said before holds until it is said otherwise.
remember() {
    ours=$units/tunemq-worker.service.d
    who=tunemq
    [ "$role" = worker ] || return 0
    [ -e $ours/gpu.conf ] && gpu=yes
    if [ -z "$trials_as" ]; then
        trials_as=tunemq-trials
        [ -e $ours/same-user.conf ] && trials_as=worker
    fi
    [ "$trials_as" = worker ] || who=root
    return 0
}

# LOCK: the process id of the worker that holds it. Trials may have made it, so it is opened only if it is no link.
holder_of() {
    $prefix/bin/python -I -c '
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    pid = os.read(lock, 32).strip()
    print(pid.decode() if pid.isdigit() else "unknown")
' "$1" 2> /dev/null || true
}

# Switching the worker's user switches the owner of its folders, which a worker that runs still needs.
# With systemd, that stops the worker and switches the owner.
refuse_other_user() {
    is_switched=''
    if has_systemd || [ "$role" != worker ]; then return 0; fi
    # Not the owner of each folder there: a --cache may be the trials' user's.
    for made in "$cache" "$cache"/*/lock; do
        [ ! -e "$made" ] || [ "$(stat -c %U "$made")" = $who ] || is_switched=yes
    done
    [ -n "$is_switched" ] || return 0
    for lock in "$cache"/*/lock; do
        holder=$(holder_of "$lock")
        [ -z "$holder" ] ||
            fail "process $holder, a worker of the user $(stat -c %U "$lock"), works in ${lock%/lock}, \
which the user $who would get: stop it, as by \"kill $holder\", and run this again"
    done
}

# Whether this lies in TuneMQ's checkout, and not in some folder that others put files into, too.
is_checkout() {
    [ "${here##*/}" = deploy ] && grep -qsx 'name = "tunemq"' "$here/../pyproject.toml" || return 1
    owner=$(stat -c %u "$here/install.sh")
    [ -z "$(find "$here" "$here/.." -maxdepth 0 \( ! -user "$owner" -o -perm -o=w \))" ]
}

# PYTHON: the program itself, whatever links and environments lead to it.
program_of() {
    "$1" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable))'
}

# PYTHON. The shell is first to be without root's rights, which setpriv still has when it executes it.
others_can_run() {
    setpriv --reuid 65534 --regid 65534 --clear-groups sh -c '"$1" -c ""' sh "$1" 2> /dev/null
}

# Fetches all of it before anything is stopped; $from is then the folder with the wheels.
fetch() {
    umask 022
    named=$python
    python=${python:-python3}
    command -v "$python" > /dev/null || [ -z "$named" ] || fail "--python: there is no $python"
    # Not there yet, or of a Python that is gone since the system was upgraded.
    if $prefix/bin/python -c 'import pip' 2> /dev/null; then
        [ -z "$named" ] || [ "$(program_of "$python")" = "$(program_of $prefix/bin/python)" ] ||
            fail "--python: $prefix has $(program_of $prefix/bin/python): $anew"
    else
        command -v "$python" > /dev/null ||
            fail "there is no $python: install Python, or name one with --python"
        others_can_run "$(program_of "$python")" ||
            fail "only root can run $(program_of "$python"), and services have users of theirs: \
name another with --python"
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            fail "$python is older than 3.11: name another with --python"
        "$python" -c 'import ensurepip, venv' || fail "$python has no venv: install python3-venv"
        say "making $prefix with $($python --version)"
        "$python" -m venv $prefix
    fi
    others_can_run $prefix/bin/python ||
        fail "only root can run $(program_of $prefix/bin/python), which $prefix has: $anew"
    export PIP_CACHE_DIR=$prefix/.pip-cache PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
    [ -d $cache ] || install -d -m 0755 $cache
    stage=$(mktemp -d /var/tmp/tunemq-install.XXXXXX)
    trap end EXIT
    trap 'exit 1' HUP INT TERM
    constraints=''
    [ -n "$wheels" ] || ! is_checkout || constraints=$here/../constraints.txt
    set -- ${constraints:+--constraint "$constraints"} ${requirements:+--requirement "$requirements"}
    from=$wheels
    if [ -n "$from" ]; then
        wheel=$(find "$wheels" -maxdepth 1 -name 'tunemq-*.whl')
        [ -n "$wheel" ] || fail "--wheels $wheels: there is no tunemq-*.whl in it"
    else
        from=$stage/wheels
        [ -z "$index" ] || export PIP_INDEX_URL="$index"
        if [ -z "$wheel" ]; then
            is_checkout || fail "this is no checkout of yours alone: say --wheels FOLDER or --wheel FILE"
            say "building TuneMQ from $(cd "$here/.." && pwd)"
            $prefix/bin/pip --quiet wheel --no-deps --wheel-dir "$stage/own" "$here/.."
            wheel=$(echo "$stage"/own/tunemq-*.whl)
        fi
    fi
    wanted=$wheel
    [ "$role" = scheduler ] && wanted="${wheel}[metrics]"
    [ "$role" = store ] && wanted="${wheel}[store]"
    [ -n "$gpu" ] && wanted="${wheel}[gpu]"
    if [ -z "$wheels" ]; then
        say "fetching what TuneMQ needs"
        $prefix/bin/pip --quiet wheel "$@" --wheel-dir "$from" "$wanted"
    fi
    set -- --no-index --find-links "$from" "$@"
    $prefix/bin/pip install --dry-run "$@" "$wanted" > "$stage/plan" ||
        fail "pip cannot install TuneMQ from $from"
    hash=$(sha256sum < "$wheel" | cut -d ' ' -f 1)
    is_new=''
    grep -q '^Would install' "$stage/plan" && is_new=yes
    grep -qsx "$hash" $says || is_new=yes
    # Called when nothing runs any more.
    install_packages() {
        rm -f $says
        $prefix/bin/pip --quiet install --no-index --find-links "$from" \
            ${constraints:+--constraint "$constraints"} \
            ${requirements:+--requirement "$requirements"} "$wanted"
        # The same version, built anew.
        grep -q '^Would install.* tunemq-' "$stage/plan" ||
            $prefix/bin/pip --quiet install --no-index --no-deps --force-reinstall "$wheel"
        $prefix/bin/python -m compileall -q $prefix/lib > /dev/null 2>&1 || true
        echo "$hash" > $says
        say "installed $($prefix/bin/pip list --format=freeze | grep '^tunemq=') and what it needs"
    }
}

# However this ends: nothing is left behind, and nothing stays down that was up.
end() {
    rm -rf "$stage"
    [ -z "$stopped" ] || systemctl start --no-block $stopped
}

# Of a person: written as that person, whose folder it is to make and to lead elsewhere.
put_persons_files() {
    [ -n "$config" ] || return 0
    home=$(getent passwd "$user" | cut -d : -f 6)
    [ -n "$home" ] || fail "--user $user is not known here"
    target=$home/.config/tunemq
    for file in "$config"/*; do
        [ -f "$file" ] || continue
        sed "s|$etc/|$target/|g" "$file" | setpriv --reuid "$user" --regid "$(id -g "$user")" \
            --init-groups sh -euc 'umask 077; mkdir -p "${1%/*}"; cat > "$1.new"; mv -f "$1.new" "$1"' \
            sh "$target/${file##*/}"
        say "wrote $target/${file##*/}"
    done
}

put_configuration() {
    # The first one has the folder, uninstalled or not: others have keys of their own.
    [ "$role" = store ] || [ -e $etc/.role ] || echo "$role" > $etc/.role
    target=$etc
    if ! grep -qsx "$role" $etc/.role; then
        target=$etc/$role
        install -d -m 0755 "$target"
    fi
    if [ -z "$config" ] && [ "$role" != store ] && [ ! -e $etc/environment ]; then
        (umask 077 && sed "s/ROLE/$role/g" "$here/systemd/environment.example" > $etc/environment)
        is_template=yes
    fi
    for file in "${config:-$target}"/*; do # what is there already: the worker's user may be another now
        [ -f "$file" ] || continue
        name=${file##*/} source=$file mode=0600 owner=$who:$who mark=$due
        case $name in
            environment) mode=0640 owner=root:$who ;; # of what is in there root's programs are made, too
            keys.toml) mark='' ;;                     # which a process reads again by itself
            *.crt) mode=0644 ;;                       # no secret, and all programs need an authority's
        esac
        if [ "$name" = environment ] && [ -n "$config" ] && [ "$target" != $etc ]; then
            (umask 077 && sed "s|$etc/|$target/|g" "$file" > "$stage/environment")
            source=$stage/environment
        fi
        if put "$source" "$target/$name" $mode "$owner" "$mark"; then say "wrote $target/$name"; fi
    done
}

put_programs() {
    if has_own_link; then
        ln -sfn $prefix/bin/tunemq $programs/tunemq
    else
        say "left $programs/tunemq, which is not from here: ours is $prefix/bin/tunemq"
    fi
    put "$here/systemd/tunemq-farm" $programs/tunemq-farm 0755 root:root || true
    [ "$here" = $prefix/share ] && return
    mkdir -p $prefix/share/systemd
    put "$here/install.sh" $prefix/share/install.sh 0755 root:root || true
    for file in "$here"/systemd/*; do
        put "$file" "$prefix/share/systemd/$(basename "$file")" 0644 root:root || true
    done
}

# Whether the command is our link, or is nobody's.
has_own_link() {
    [ "$(readlink $programs/tunemq)" = $prefix/bin/tunemq ] ||
        { [ ! -e $programs/tunemq ] && [ ! -L $programs/tunemq ]; }
}

put_unit() { # FILE FOLDER
    mkdir -p "$2"
    if put "$here/systemd/$1" "$2/$1" 0644 root:root "$due"; then say "wrote $2/$1"; fi
}

put_units() {
    put_unit "tunemq-$role.service" $units
    [ "$role" = worker ] || return 0
    put_unit tunemq-worker@.service $units
    for unit in tunemq-worker.service tunemq-worker@.service; do
        [ -z "$gpu" ] || put_unit gpu.conf $units/$unit.d
        if [ "$trials_as" = worker ]; then
            put_unit same-user.conf $units/$unit.d
        elif [ -e $units/$unit.d/same-user.conf ]; then
            : > "$due"
            rm $units/$unit.d/same-user.conf
            rmdir $units/$unit.d 2> /dev/null || true
        fi
    done
}

# The folders that the unit has systemd make.
make_folders() {
    case $role in
        scheduler) install -d -m 0750 -o tunemq -g tunemq $state ;;
        store) install -d -m 0700 -o tunemq -g tunemq $store ;;
        worker)
            install -d -m 0755 -o $who -g $who $cache
            # Trials may have made links there, hard ones too: no file elsewhere changes its owner.
            [ -z "$is_switched" ] ||
                find -P "$cache" \( -type d -o -type f -links 1 \) ! -user $who -execdir chown -h $who:$who {} +
            # The home of the worker's user, who may also be the scheduler's.
            [ "$who" != tunemq ] || install -d -m 0750 -o tunemq -g tunemq $state
            ;;
    esac
}

# The unit's ExecStart= for a shell, with its PATH, and with the options that the files `environment` have now.
command_line() {
    variables=$(sed -n 's|^Environment=PATH=|PATH=|p' "$units/tunemq-$role.service")
    [ "$target" = $etc ] || variables="$variables TUNEMQ_CONFIG=$target"
    [ -z "$variables" ] || printf '%s ' env $variables
    printf %s $programs/tunemq-farm
    set -f # no word of an option is a pattern
    for word in $(sed -n 's|^ExecStart=[^ ]* ||p' "$units/tunemq-$role.service"); do
        case $word in
            '$TRIALS_AS') [ "$trials_as" = worker ] || printf ' --trial-user %s' "$trials_as" ;;
            '$'*)
                for option in $(cat $etc/environment "$target/environment" 2> /dev/null |
                    sed -n "s|^${word#?}=||p" | tail -n 1); do
                    printf ' %s' "$(quoted "$option")"
                done
                ;;
            *) printf ' %s' "$word" ;;
        esac
    done
}

quoted() { # WORD
    case $1 in
        *[!A-Za-z0-9_./:=,+@%-]*) printf "'%s'" "$(printf '%s\n' "$1" | sed "s|'|'\\\\''|g")" ;;
        *) printf '%s' "$1" ;;
    esac
}

start_service() {
    service=tunemq-$role.service
    [ -n "$mine" ] || rm -f "$due" # what starts later has it all
    if ! has_systemd; then
        say "no systemd is at work here."
        make_folders
        # By this file tunemq-farm knows the user, and it runs nothing without one.
        [ -e "$target/environment" ] || put /dev/null "$target/environment" 0640 root:$who
        if [ -n "$is_template" ]; then
            say "fill in $etc/environment, then run this again, which prints the command to run"
            return 0
        fi
        if [ -n "$start" ] && command -v systemctl > /dev/null; then
            systemctl --quiet enable "$service" && say "with the next boot $service starts."
        fi
        say "Or have another supervisor run this, as root, and again whenever it ends:"
        printf '  %s\n' "$(command_line)"
        return 0
    fi
    systemctl daemon-reload
    if [ -z "$start" ]; then
        [ ! -e "$due" ] || say "restarted by the next run without --no-start:" $mine
        return 0
    fi
    if [ -n "$is_template" ]; then
        say "fill in $etc/environment, then: systemctl enable --now tunemq-$role"
        return 0
    fi
    # Whoever has instances of the template on has switched this one off.
    for link in "$units"/*.wants/tunemq-worker@*.service; do
        if [ "$role" = worker ] && [ -L "$link" ]; then service=''; fi
    done
    [ -z "$service" ] || systemctl --quiet enable "$service"
    down=''
    for unit in $before $service; do
        case " $down " in *" $unit "*) continue ;; esac
        systemctl is-active --quiet "$unit" || down="$down $unit"
    done
    # All at once: systemd starts the store before the scheduler that needs it.
    if [ -n "$down" ]; then
        say "starting$down"
        # What failed before this run counts as no attempt of it, and is not what is shown.
        systemctl reset-failed $down 2> /dev/null || true
        before_start=$(journalctl --quiet --lines 0 --show-cursor 2> /dev/null | sed -n 's/^-- cursor: //p')
        systemctl start --no-block $down
        for unit in $down; do comes_up "$unit" || is_down=$unit; done
    fi
    stopped=''
    rm -f "$due"
}

# UNIT: waits for it, a minute at most. One that has ended twice has waited for Redis itself, or was
# refused: the next minute would show the same.
comes_up() {
    tries=60
    until systemctl is-active --quiet "$1"; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] && [ "$(systemctl show --property NRestarts --value "$1")" -lt 2 ] || return 1
        [ $tries -ne 55 ] || say "it does not come up yet; waiting up to a minute"
        sleep 1
    done
}

report() {
    if [ -n "$is_down" ]; then
        journalctl --quiet --no-pager --output cat --unit "$is_down" \
            ${before_start:+--after-cursor "$before_start"} | tail -n 16 | sed 's/^/  /' >&2 || true
        fail "$is_down does not come up. Above is what it said; it is tried again every few seconds."
    fi
    case $role in
        scheduler) next="tunemq-farm doctor; tunemq-farm nodes" ;;
        worker)
            next="tunemq-farm nodes, on the head"
            ! has_systemd || next="$next; here, systemctl status 'tunemq-worker*'"
            ;;
        store)
            keys=$store/credentials
            tries=30
            until [ -s $keys ] || [ $tries -eq 0 ] || [ -z "$start" ] || ! has_systemd; do
                sleep 1
                tries=$((tries - 1))
            done
            next="the keys for all machines are in $keys"
            [ -s $keys ] || next="start the store, which writes the keys for all machines to $keys"
            ;;
        submitter) next="tunemq-farm ls, tunemq-farm submit SCRIPT" ;;
    esac
    say "done. Next: $next"
}

install_role() {
    here=$(cd "$(dirname "$0")" && pwd)
    [ -f "$here/systemd/tunemq-worker.service" ] ||
        fail "the folder systemd has to be beside this script, in $here"
    is_template='' is_down='' stopped=''
    due=$prefix/.restart-due-$role
    remember
    make_users
    fetch
    refuse_other_user
    before=$(running)
    mine=$(printf '%s\n' "$before" | grep "^tunemq-${role}[.@]" || true)
    [ -n "$start" ] || [ -z "$is_new" ] || [ -z "$before" ] ||
        fail "what runs cannot have its packages replaced: no --no-start, or first: systemctl stop" $before
    if [ "$role" = submitter ]; then put_persons_files; else put_configuration; put_units; fi
    put_programs
    if [ -n "$is_new" ]; then
        stop $before
        install_packages
    elif [ -e "$due" ]; then
        stop $mine
    else
        say "$prefix has it all already"
    fi
    if [ "$role" != submitter ]; then start_service; fi
    report
}

stop() { # UNIT...
    [ -n "$start" ] && [ "$#" -gt 0 ] || return 0
    say "stopping $*"
    systemctl daemon-reload
    stopped=$*
    systemctl stop "$@"
}

# --- away with it ---------------------------------------------------------------------------------

uninstall() {
    services=$(running)
    [ -z "$services" ] || say "stopping" $services
    of_services systemctl stop 2> /dev/null || true
    of_services systemctl reset-failed 2> /dev/null || true
    instances=$(find "$units" -path '*.wants/tunemq-worker@*' -exec basename -s .service {} ';')
    rm -f "$units"/*.wants/tunemq-worker@*.service
    for unit in tunemq-scheduler.service tunemq-worker.service tunemq-worker@.service tunemq-store.service; do
        rm -f "$units/$unit" "$units"/*.wants/"$unit"
        [ -z "$purge" ] || rm -rf "$units/$unit.d"
        rmdir "$units/$unit.d" 2> /dev/null || true
    done
    [ -z "$purge" ] || rm -rf "$units"/tunemq-worker@*.service.d
    if has_systemd; then systemctl daemon-reload; fi
    if has_own_link; then rm -f $programs/tunemq; fi
    rm -f $programs/tunemq-farm
    rm -rf $prefix $cache
    if [ -z "$purge" ]; then
        say "removed TuneMQ. Kept, and removed by --purge: $etc, $state, $store, $trials, users, and" \
            "the options of workers (--gpu, --same-user) in $units"
        [ -z "$instances" ] || say "to be enabled again, if you install it again:" $instances
        return
    fi
    made=$(cat $etc/.made-users 2> /dev/null || true) # others were there before
    rm -rf $etc $state $store $trials
    for name in $made; do
        if getent passwd "$name" > /dev/null; then userdel "$name" || say "left the user $name"; fi
        if getent group "$name" > /dev/null; then groupdel "$name" || true; fi
    done
    say "removed TuneMQ with its configuration, keys, results and users; people keep ~/.config/tunemq"
}

main() {
    read_arguments "$@"
    [ "$(id -u)" -eq 0 ] || fail "only root can do that: sudo sh $0 ..."
    if [ "$role" = uninstall ]; then uninstall; else install_role; fi
}

# In one line, which is read before it runs: this file may be replaced or removed meanwhile.
main "$@"; exit
