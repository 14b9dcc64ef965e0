#!/bin/sh
# Installs a role of a farm on this machine, or uninstalls TuneMQ: docs/deploy/bare-metal.md.
# It needs a shell, Python and the folder `systemd` beside it. Run it again to upgrade or to change
# options: services that need no change continue to run.
#
# For shellcheck: names of units contain no blanks, and a trap calls clean_up.
# shellcheck disable=SC2016,SC2046,SC2086,SC2317
set -eu

usage() {
    cat << 'END'
usage: install.sh scheduler|worker|store|submitter [options]
       install.sh uninstall [--purge]

  scheduler  runs the scheduler         worker     runs trials
  store      runs `tunemq store serve`  submitter  has only the commands, for users

  --config FOLDER      copy its files (environment, keys.toml, credentials, ca.crt) to /etc/tunemq;
                       submitter: to ~/.config/tunemq of --user
  --user NAME          submitter: the user who gets the files of --config
  --wheels FOLDER      install TuneMQ and its dependencies from these wheels; download nothing
  --wheel FILE         install TuneMQ from this wheel, its dependencies from the index
                       (with neither: install the checkout that this script is in)
  --index URL          package index, instead of pip's default
  --requirements FILE  pip requirements to install into /opt/tunemq, too, such as torch
  --python PROGRAM     3.11 or newer, the same minor version on the whole farm; default: python3
  --gpu                worker: query GPUs with NVML; add users to the groups video and render
  --same-user          worker: run worker and trials as the same user, tunemq
  --separate-user      worker: run trials as tunemq-trials, which cannot read farm keys (default)
  --no-start           install only: start and stop no services
  --purge              uninstall: remove configuration, keys, results and users, too

It needs root. Exit codes: 0 done; 1 an installation or a service failed; 2 invalid arguments.
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
hash_file=$prefix/.installed
install_lock=/run/tunemq-install.lock
reinstall="to replace it, run \`install.sh uninstall\`, which keeps configuration and keys, first"

say() { printf '%s\n' "install.sh: $*"; }
fail() { printf '%s\n' "install.sh: $*" >&2; exit 1; }
refuse() { printf '%s\n' "install.sh: $*; see --help" >&2; exit 2; }

absolute() { case $1 in /*) printf '%s\n' "$1" ;; *) printf '%s\n' "$PWD/$1" ;; esac; }

# --- arguments ------------------------------------------------------------------------------------

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
                [ -z "$role" ] || refuse "got $role and $1: name only one of them"
                role=$1
                ;;
            *) refuse "unknown argument $1" ;;
        esac
        shift
    done
    [ -n "$role" ] || refuse "role missing: name scheduler, worker, store or submitter"
    [ "$role" = uninstall ] || [ -z "$purge" ] || refuse "--purge is for uninstall only"
    if [ -n "$gpu$trials_as" ] && [ "$role" != worker ]; then
        refuse "--gpu, --same-user and --separate-user are for workers only"
    fi
    [ -z "$wheel" ] || [ -z "$wheels" ] || refuse "pass --wheel or --wheels, not both"
    [ -z "$wheels" ] || [ -z "$index" ] || refuse "pass --wheels or --index, not both"
    case $index in
        *://*@*) refuse "other users can see a password in --index: set PIP_INDEX_URL instead" ;;
    esac
    if [ "$role" = submitter ]; then
        [ -z "$config" ] || [ -n "$user" ] || refuse "--config needs --user, who gets its files"
        [ -z "$user" ] || [ -n "$config" ] || refuse "--user needs --config FOLDER"
    elif [ -n "$user" ]; then
        refuse "--user is for submitters only"
    fi
    [ -z "$config" ] || [ -f "$config/environment" ] ||
        refuse "--config $config contains no file named environment"
    [ -z "$config" ] || check_lines "$config/environment"
    [ -z "$wheels" ] || [ -d "$wheels" ] || refuse "--wheels $wheels is not a folder"
    [ -z "$wheels" ] || [ "$(find "$wheels" -maxdepth 1 -name 'tunemq-*.whl' | wc -l)" -le 1 ] ||
        refuse "--wheels $wheels contains several versions of TuneMQ: keep only one"
    [ -z "$wheel" ] || [ -f "$wheel" ] || refuse "--wheel $wheel is not a file"
    [ -z "$requirements" ] || [ -f "$requirements" ] ||
        refuse "--requirements $requirements is not a file"
}

# systemd would write a line that it does not understand to the journal, including a password in it.
check_lines() { # FILE
    bad_lines=$(grep -nEv '^([#;].*|[A-Za-z_][A-Za-z0-9_]*=.*|)$' "$1" | cut -d : -f 1 | paste -sd , -)
    [ -z "$bad_lines" ] ||
        refuse "$1, line $bad_lines: write NAME=VALUE, without export or leading blanks"
}

# --- helpers --------------------------------------------------------------------------------------

has_systemd() { [ -d /run/systemd/system ]; }

# Appends all services of TuneMQ, including instances of the template, to a command and runs it.
with_services() { # COMMAND...
    has_systemd || return 0
    "$@" tunemq-scheduler.service tunemq-store.service tunemq-worker.service 'tunemq-worker@*.service'
}

running() {
    with_services systemctl list-units --plain --no-legend \
        --state=active,activating,reloading,deactivating | sed 's/ .*//'
}

# Copies a file and returns 0, or returns 1 if the target has that content already. MARKER is a file
# that exists until the services are restarted, even if this script fails before that.
put() { # SOURCE TARGET MODE OWNER:GROUP [MARKER]
    if [ -f "$2" ] && cmp -s "$1" "$2"; then
        chown "$4" "$2"
        chmod "$3" "$2"
        return 1
    fi
    [ -z "${5:-}" ] || : > "$5"
    new_file=$2.new.$$
    (umask 077 && cat "$1" > "$new_file")
    chown "$4" "$new_file"
    chmod "$3" "$new_file"
    mv -f "$new_file" "$2"
}

add_user() { # NAME HOME
    getent passwd "$1" > /dev/null && return
    command -v useradd > /dev/null ||
        fail "useradd not found: create the system user $1 with the home $2, then run this again"
    shell=$(command -v nologin || echo /bin/false)
    useradd --system --user-group --no-create-home --home-dir "$2" --shell "$shell" "$1"
    echo "$1" >> $etc/.made-users
    say "created the user $1"
}

# --- installation ---------------------------------------------------------------------------------

make_users() {
    [ "$role" = submitter ] && return
    install -d -m 0755 $etc # its files have modes that protect them
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

# The worker options of an earlier run apply until another run changes them.
restore_options() {
    drop_ins=$units/tunemq-worker.service.d
    service_user=tunemq
    [ "$role" = worker ] || return 0
    [ -e $drop_ins/gpu.conf ] && gpu=yes
    if [ -z "$trials_as" ]; then
        trials_as=tunemq-trials
        [ -e $drop_ins/same-user.conf ] && trials_as=worker
    fi
    [ "$trials_as" = worker ] || service_user=root
    return 0
}

# Prints the process id of the worker that holds a lock. O_NOFOLLOW: trials can put a link there.
lock_holder() { # LOCK
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

# A worker's folders change owner with its user, but a running worker still uses them. systemd stops
# it and changes the owner; without systemd, the admin has to stop it.
check_user_switch() {
    is_switched=''
    if has_systemd || [ "$role" != worker ]; then return 0; fi
    # Locks, not all folders: the trials' user may own a --cache.
    for path in "$cache" "$cache"/*/lock; do
        [ ! -e "$path" ] || [ "$(stat -c %U "$path")" = $service_user ] || is_switched=yes
    done
    [ -n "$is_switched" ] || return 0
    for lock in "$cache"/*/lock; do
        holder=$(lock_holder "$lock")
        [ -z "$holder" ] ||
            fail "cannot give ${lock%/lock} to the user $service_user: process $holder, a worker \
of the user $(stat -c %U "$lock"), uses it; stop it (kill $holder) and run this again"
    done
}

# Prints the processes of services that run from $prefix. Without systemd this script cannot stop them.
unmanaged() {
    for folder in /proc/[0-9]*; do
        case $(stat -c %U "$folder" 2> /dev/null) in
            root | tunemq | tunemq-trials) ;;
            *) continue ;; # users' commands
        esac
        if tr '\0' '\n' 2> /dev/null < "$folder/cmdline" | head -n 1 | grep -q "^$prefix/bin/"; then
            echo "${folder#/proc/}"
        fi
    done
}

# New files below a running process make its later children fail.
check_unmanaged() {
    if has_systemd || [ -z "$is_new" ]; then return 0; fi
    processes=$(unmanaged)
    [ -z "$processes" ] ||
        fail "cannot upgrade $prefix while its processes run:" $processes"; no service runs them: \
stop the worker, scheduler or store that started them, and run this again"
}

# Whether this script is in TuneMQ's checkout, and not in a folder that other users can write to.
is_checkout() {
    [ "${here##*/}" = deploy ] && grep -qsx 'name = "tunemq"' "$here/../pyproject.toml" || return 1
    owner=$(stat -c %u "$here/install.sh")
    [ -z "$(find "$here" "$here/.." -maxdepth 0 \( ! -user "$owner" -o -perm -o=w \))" ]
}

# Prints the path of the interpreter itself, without links and virtual environments.
interpreter_of() { # PYTHON
    "$1" -I -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable))'
}

# In a new session, as other processes of that user could type into root's terminal.
as_user() { # SETPRIV-OPTION... COMMAND...
    setsid --fork --wait setpriv "$@"
}

# setpriv executes its command with root's rights, so it starts a shell, which no longer has them.
others_can_run() { # PYTHON
    as_user --reuid 65534 --regid 65534 --clear-groups sh -c '"$1" -I -c ""' sh "$1" 2> /dev/null
}

# Fetches all wheels into $wheel_folder before any service is stopped.
fetch() {
    umask 022
    given_python=$python
    python=${python:-python3}
    command -v "$python" > /dev/null || [ -z "$given_python" ] || fail "--python $python not found"
    [ ! -e $prefix/bin/python ] || [ -e $prefix/.pip-cache ] || [ -e $hash_file ] ||
        fail "$prefix has a Python that this script did not install: move it, because \
\`install.sh uninstall\` would remove it"
    # The else branch also renews an environment whose Python an upgrade of the system removed.
    if $prefix/bin/python -I -c 'import pip' 2> /dev/null; then
        [ -z "$given_python" ] ||
            [ "$(interpreter_of "$python")" = "$(interpreter_of $prefix/bin/python)" ] ||
            fail "--python: $prefix uses $(interpreter_of $prefix/bin/python): $reinstall"
    else
        command -v "$python" > /dev/null ||
            fail "$python not found: install Python, or pass --python"
        others_can_run "$(interpreter_of "$python")" ||
            fail "only root can run $(interpreter_of "$python"), but services have other users: \
pass another --python"
        "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            fail "$python is older than 3.11: pass another --python"
        "$python" -I -c 'import ensurepip, venv' || fail "$python has no venv: install python3-venv"
        say "creating $prefix with $($python --version)"
        mkdir -p $prefix/.pip-cache # marks it as this script's
        "$python" -I -m venv $prefix
    fi
    others_can_run $prefix/bin/python ||
        fail "only root can run $(interpreter_of $prefix/bin/python), which $prefix uses: $reinstall"
    export PIP_CACHE_DIR=$prefix/.pip-cache PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
    [ -d $cache ] || install -d -m 0755 $cache
    # On the file system of $prefix, so that pip can undo an installation on a full disk by renaming.
    rm -rf $prefix/.stage.* # of one that was killed
    stage=$(mktemp -d $prefix/.stage.XXXXXX)
    export TMPDIR="$stage"
    trap clean_up EXIT
    trap 'exit 1' HUP INT TERM
    trap 'exec >/dev/null 2>&1; exit 1' PIPE  # its reader is gone, as after a lost connection
    constraints=''
    [ -n "$wheels" ] || ! is_checkout || constraints=$here/../constraints.txt
    set -- ${constraints:+--constraint "$constraints"} ${requirements:+--requirement "$requirements"}
    wheel_folder=$wheels
    if [ -n "$wheel_folder" ]; then
        wheel=$(find "$wheels" -maxdepth 1 -name 'tunemq-*.whl')
        [ -n "$wheel" ] || fail "--wheels $wheels contains no tunemq-*.whl"
    else
        wheel_folder=$stage/wheels
        [ -z "$index" ] || export PIP_INDEX_URL="$index"
        if [ -z "$wheel" ]; then
            is_checkout ||
                fail "$here is not in a checkout of TuneMQ, or others can write there: pass \
--wheels FOLDER or --wheel FILE"
            say "building TuneMQ from $(cd "$here/.." && pwd)"
            $prefix/bin/pip --quiet wheel --no-deps --wheel-dir "$stage/own" "$here/.."
            wheel=$(echo "$stage"/own/tunemq-*.whl)
        fi
    fi
    requirement=$wheel
    [ "$role" = scheduler ] && requirement="${wheel}[metrics]"
    [ "$role" = store ] && requirement="${wheel}[store]"
    [ -n "$gpu" ] && requirement="${wheel}[gpu]"
    if [ -z "$wheels" ]; then
        say "fetching the dependencies of TuneMQ"
        $prefix/bin/pip --quiet wheel "$@" --wheel-dir "$wheel_folder" "$requirement"
    fi
    set -- --no-index --find-links "$wheel_folder" "$@"
    $prefix/bin/pip install --dry-run "$@" "$requirement" > "$stage/plan" ||
        fail "pip cannot install TuneMQ from $wheel_folder"
    hash=$(sha256sum < "$wheel" | cut -d ' ' -f 1)
    is_new=''
    grep -q '^Would install' "$stage/plan" && is_new=yes
    grep -qsx "$hash" $hash_file || is_new=yes
    # Called after all services have stopped.
    install_packages() {
        rm -f $hash_file
        $prefix/bin/pip --quiet install --no-index --find-links "$wheel_folder" \
            ${constraints:+--constraint "$constraints"} \
            ${requirements:+--requirement "$requirements"} "$requirement"
        # pip skips a new build of the installed version.
        grep -q '^Would install.* tunemq-' "$stage/plan" ||
            $prefix/bin/pip --quiet install --no-index --no-deps --force-reinstall "$wheel"
        $prefix/bin/python -I -m compileall -q $prefix/lib > /dev/null 2>&1 || true
        echo "$hash" > $hash_file
        say "installed $($prefix/bin/pip list --format=freeze | grep '^tunemq=')" \
            "and its dependencies"
    }
}

# Also after a failure: services that this script stopped run again.
clean_up() {
    rm -rf "$stage"
    [ -z "$stopped_units" ] || systemctl start --no-block $stopped_units
}

# Written as the user, not as root: the user can make any part of this path a link.
put_submitter_files() {
    [ -n "$config" ] || return 0
    home=$(getent passwd "$user" | cut -d : -f 6)
    [ -n "$home" ] || fail "this machine has no user $user: create it, or pass another --user"
    target=$home/.config/tunemq
    for file in "$config"/*; do
        [ -f "$file" ] || continue
        sed "s|$etc/|$target/|g" "$file" | as_user --reuid "$user" --regid "$(id -g "$user")" \
            --init-groups sh -euc '
                umask 077
                mkdir -p "${1%/*}"
                new=$(mktemp "$1.XXXXXX")
                cat > "$new"
                mv -f "$new" "$1"' sh "$target/${file##*/}"
        say "wrote $target/${file##*/}"
    done
}

put_configuration() {
    # The first role keeps $etc, even after an uninstall; other roles' keys go into a subfolder.
    [ "$role" = store ] || [ -e $etc/.role ] || echo "$role" > $etc/.role
    target=$etc
    if ! grep -qsx "$role" $etc/.role; then
        target=$etc/$role
        check_own_environment
        install -d -m 0755 "$target"
    fi
    if [ -z "$config" ] && [ "$role" != store ] && [ ! -e $etc/environment ]; then
        (umask 077 && sed "s/ROLE/$role/g" "$here/systemd/environment.example" > $etc/environment)
        is_template=yes
    fi
    for file in "${config:-$target}"/*; do # without --config, too: the owner may have changed
        [ -f "$file" ] || continue
        name=${file##*/} source=$file mode=0600 owner=$service_user:$service_user
        marker=$restart_marker
        case $name in
            environment) mode=0640 owner=root:$service_user ;; # root runs programs with it, too
            keys.toml) marker='' ;;                            # processes reload it themselves
            *.crt) mode=0644 ;;                                # not secret; all need ca.crt
        esac
        if [ "$name" = environment ] && [ -n "$config" ] && [ "$target" != $etc ]; then
            (umask 077 && sed "s|$etc/|$target/|g" "$file" > "$stage/environment")
            source=$stage/environment
        fi
        if put "$source" "$target/$name" $mode "$owner" "$marker"; then say "wrote $target/$name"; fi
    done
}

# The units of earlier versions also read the first role's file. A store needs none for its defaults.
check_own_environment() {
    if [ -n "$config" ] || [ -e "$target/environment" ]; then return 0; fi
    [ "$role" != store ] || grep -qs '^TUNEMQ_STORE_' $etc/environment || return 0
    fail "the $role needs $target/environment, because it does not read $etc/environment, which is \
another role's: pass --config FOLDER"
}

put_programs() {
    if has_own_link; then
        ln -sfn $prefix/bin/tunemq $programs/tunemq
    else
        say "left $programs/tunemq, which this script did not create: use $prefix/bin/tunemq"
    fi
    put "$here/systemd/tunemq-farm" $programs/tunemq-farm 0755 root:root || true
    [ "$here" = $prefix/share ] && return
    mkdir -p $prefix/share/systemd
    put "$here/install.sh" $prefix/share/install.sh 0755 root:root || true
    for file in "$here"/systemd/*; do
        put "$file" "$prefix/share/systemd/$(basename "$file")" 0644 root:root || true
    done
}

# Whether the command is this script's link, or does not exist.
has_own_link() {
    [ "$(readlink $programs/tunemq)" = $prefix/bin/tunemq ] ||
        { [ ! -e $programs/tunemq ] && [ ! -L $programs/tunemq ]; }
}

put_unit() { # FILE FOLDER
    mkdir -p "$2"
    unit_file=$here/systemd/$1
    if [ "$target" != $etc ]; then # this role reads only its own folder
        unit_file=$stage/$1
        sed '\|^EnvironmentFile=-/etc/tunemq/environment$|d' "$here/systemd/$1" > "$unit_file"
    fi
    if put "$unit_file" "$2/$1" 0644 root:root "$restart_marker"; then say "wrote $2/$1"; fi
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
            : > "$restart_marker"
            rm $units/$unit.d/same-user.conf
            rmdir $units/$unit.d 2> /dev/null || true
        fi
    done
}

# Without systemd: the folders that systemd would make for the unit.
make_folders() {
    case $role in
        scheduler) install -d -m 0750 -o tunemq -g tunemq $state ;;
        store) install -d -m 0700 -o tunemq -g tunemq $store ;;
        worker)
            install -d -m 0755 -o $service_user -g $service_user $cache
            # Skips symbolic and hard links, with which trials could change other files' owners.
            [ -z "$is_switched" ] ||
                find -P "$cache" \( -type d -o -type f -links 1 \) ! -user $service_user \
                    -execdir chown -h $service_user:$service_user {} +
            # The home of tunemq, which is also the scheduler's user.
            [ "$service_user" != tunemq ] || install -d -m 0750 -o tunemq -g tunemq $state
            ;;
    esac
}

# Prints the unit's ExecStart= for a shell, with its PATH and the options of the role's environment.
command_line() {
    variables=$(sed -n 's|^Environment=PATH=|PATH=|p' "$units/tunemq-$role.service")
    [ "$target" = $etc ] || variables="$variables TUNEMQ_CONFIG=$target"
    [ -z "$variables" ] || printf '%s ' env $variables
    printf %s $programs/tunemq-farm
    set -f # an option may contain *
    for word in $(sed -n 's|^ExecStart=[^ ]* ||p' "$units/tunemq-$role.service"); do
        case $word in
            '$TRIALS_AS') [ "$trials_as" = worker ] || printf ' --trial-user %s' "$trials_as" ;;
            '$'*)
                for option in $(sed -n "s|^${word#?}=||p" "$target/environment" 2> /dev/null |
                    tail -n 1); do
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
    [ -n "$role_units" ] || rm -f "$restart_marker" # no running service has old files
    if ! has_systemd; then
        say "systemd is not running here."
        make_folders
        # tunemq-farm needs this file, whose group names its user.
        [ -e "$target/environment" ] || put /dev/null "$target/environment" 0640 root:$service_user
        if [ -n "$is_template" ]; then
            say "fill in $etc/environment, then run this again: it prints the command to run"
            return 0
        fi
        if [ -n "$start" ] && command -v systemctl > /dev/null; then
            systemctl --quiet enable "$service" && say "$service starts at the next boot."
        fi
        say "Or let another supervisor run this as root, and restart it when it ends:"
        printf '  %s\n' "$(command_line)"
        return 0
    fi
    systemctl daemon-reload
    if [ -z "$start" ]; then
        [ ! -e "$restart_marker" ] || say "the next run without --no-start restarts" $role_units
        return 0
    fi
    if [ -n "$is_template" ]; then
        say "fill in $etc/environment, then: systemctl enable --now tunemq-$role"
        return 0
    fi
    # On a machine with enabled instances of the template, the admin has disabled this service.
    for link in "$units"/*.wants/tunemq-worker@*.service; do
        if [ "$role" = worker ] && [ -L "$link" ]; then service=''; fi
    done
    [ -z "$service" ] || systemctl --quiet enable "$service"
    inactive_units=''
    for unit in $running_units $service; do
        case " $inactive_units " in *" $unit "*) continue ;; esac
        systemctl is-active --quiet "$unit" || inactive_units="$inactive_units $unit"
    done
    # All at once: systemd starts the store before the scheduler that needs it.
    if [ -n "$inactive_units" ]; then
        say "starting$inactive_units"
        # So that neither the restart counter nor the shown log includes failures before this run.
        systemctl reset-failed $inactive_units 2> /dev/null || true
        log_cursor=$(journalctl --quiet --lines 0 --show-cursor 2> /dev/null | sed -n 's/^-- cursor: //p')
        systemctl start --no-block $inactive_units
        for unit in $inactive_units; do wait_until_active "$unit" || failed_unit=$unit; done
    fi
    stopped_units=''
    rm -f "$restart_marker"
}

# Waits a minute at most. A unit that has ended twice has itself waited for Redis, or was rejected:
# a longer wait would not help.
wait_until_active() { # UNIT
    tries=60
    until systemctl is-active --quiet "$1"; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] && [ "$(systemctl show --property NRestarts --value "$1")" -lt 2 ] || return 1
        [ $tries -ne 55 ] || say "$1 is not active yet; waiting up to a minute"
        sleep 1
    done
}

report() {
    if [ -n "$failed_unit" ]; then
        journalctl --quiet --no-pager --output cat --unit "$failed_unit" \
            ${log_cursor:+--after-cursor "$log_cursor"} | tail -n 16 | sed 's/^/  /' >&2 || true
        fail "$failed_unit does not start: see its log above. systemd retries every few seconds."
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
        fail "$here has no folder systemd: copy it from the folder deploy of TuneMQ"
    is_template='' failed_unit='' stopped_units=''
    restart_marker=$prefix/.restart-due-$role
    restore_options
    make_users
    fetch
    check_user_switch
    running_units=$(running)
    role_units=$(printf '%s\n' "$running_units" | grep "^tunemq-${role}[.@]" || true)
    [ -n "$start" ] || [ -z "$is_new" ] || [ -z "$running_units" ] ||
        fail "cannot upgrade running services with --no-start: omit it, or first: systemctl stop" \
            $running_units
    check_unmanaged
    if [ "$role" = submitter ]; then put_submitter_files; else put_configuration; put_units; fi
    put_programs
    if [ -n "$is_new" ]; then
        stop $running_units
        install_packages
    elif [ -e "$restart_marker" ]; then
        stop $role_units
    else
        say "$prefix is up to date"
    fi
    if [ "$role" != submitter ]; then start_service; fi
    report
}

stop() { # UNIT...
    [ -n "$start" ] && [ "$#" -gt 0 ] || return 0
    say "stopping $*"
    systemctl daemon-reload
    stopped_units=$*
    systemctl stop "$@"
}

# --- removal --------------------------------------------------------------------------------------

# Of a folder that is a mount point only the content can be removed; the next folders follow.
remove_folders() { # FOLDER...
    for folder in "$@"; do rm -rf "$folder" || say "left $folder"; done
}

# Without --purge, files of trials stay: the home of --same-user, and what did not reach the store.
# find follows no links, which trials may have put there.
remove_cache() {
    if [ -n "$purge" ]; then remove_folders $cache && return; fi
    [ -d $cache ] || return 0
    rmdir $cache/home 2> /dev/null || true
    find -P $cache -mindepth 1 ! -path $cache/home ! -path "$cache/home/*" \
        ! -path "$cache/*/trials/unsent-*" -delete 2> /dev/null || true
    rmdir $cache 2> /dev/null || true
}

uninstall() {
    services=$(running)
    [ -z "$services" ] || say "stopping" $services
    with_services systemctl stop 2> /dev/null || true
    with_services systemctl reset-failed 2> /dev/null || true
    for lock in "$cache"/*/lock; do
        holder=$(lock_holder "$lock")
        [ -z "$holder" ] ||
            fail "process $holder, a worker that no service runs, works in ${lock%/lock}: \
stop it, as by \"kill $holder\", and run this again"
    done
    if ! has_systemd; then
        processes=$(unmanaged)
        [ -z "$processes" ] ||
            fail "cannot remove $prefix while its processes run:" $processes"; stop them first"
    fi
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
    # Only this script's files: administrators may have others there.
    rm -rf $prefix/bin $prefix/include $prefix/lib $prefix/lib64 $prefix/share $prefix/pyvenv.cfg \
        $prefix/.pip-cache $prefix/.stage.* $hash_file $prefix/.restart-due-*
    remove_cache
    rmdir $prefix 2> /dev/null || [ ! -e $prefix ] || say "left $prefix, which has other files"
    if [ -z "$purge" ]; then
        say "removed TuneMQ. --purge also removes $etc, $state, $store, $trials, users, and" \
            "the options of workers (--gpu, --same-user) in $units"
        [ ! -e $cache ] || say "left $cache, which has files of trials: the home of those of" \
            "--same-user, or what did not reach the store; --purge removes them"
        [ -z "$instances" ] || say "if you install TuneMQ again, enable these again:" $instances
        return
    fi
    created_users=$(cat $etc/.made-users 2> /dev/null || true) # not those that existed before
    remove_folders $etc $state $store $trials
    for name in $created_users; do
        if getent passwd "$name" > /dev/null; then userdel "$name" || say "left the user $name"; fi
        if getent group "$name" > /dev/null; then groupdel "$name" || true; fi
    done
    say "removed TuneMQ with its configuration, keys, results and users, but no ~/.config/tunemq"
}

main() {
    read_arguments "$@"
    [ "$(id -u)" -eq 0 ] || fail "only root can run this: sudo sh $0 ..."
    exec 9> $install_lock # until this process ends
    flock -n 9 || fail "another install.sh runs on this machine: wait until it has ended"
    if [ "$role" = uninstall ]; then uninstall; else install_role; fi
}

# One line: the shell reads it whole, and this script may replace or remove its own file.
main "$@"; exit
