#!/bin/sh
# Makes all that is secret in a farm of docker-compose.yml, once, each role's in a folder of its own
# below FOLDER (/secrets): what is there is kept, what others need of it is copied anew. Run by the
# service `setup` at each `docker compose up`; by hand, `docker compose run --rm setup COMMAND`:
#   (none)             makes what is missing; TUNEMQ_SUBMITTERS says who may submit
#   keys ARGUMENTS     `tunemq keys` on the keys of the farm: keys show, keys rotate, ...
#   new-passwords      other passwords for Redis and the store
#   new-certificates   other certificates, of the same authority
#   show               who is there, and until when certificates are good; nothing that is secret
# Variables: TUNEMQ_SUBMITTERS (names with spaces or commas), TUNEMQ_HOST (names and addresses of
# this machine for others; by default the address in TUNEMQ_PUBLISH, or 127.0.0.1), TUNEMQ_REDIS_PORT,
# TUNEMQ_STORE_PORT (where others reach them). Without TUNEMQ_SUBMITTERS the submitters stay; each other
# variable that is empty means its default. A COMMAND changes none of them.
# TUNEMQ_OWNER is uid:gid of all containers but this, and TUNEMQ_GRAFANA_OWNER that of Grafana's.
set -eu
umask 077

secrets=${TUNEMQ_SECRETS:-/secrets}
here=$(cd "$(dirname "$0")" && pwd)
shipped=${here%/*}
owner=${TUNEMQ_OWNER-10001:10001} grafana_owner=${TUNEMQ_GRAFANA_OWNER-472:0}
made=$secrets/authority  # what others' files are made of; no other container sees it
soon=$((90 * 24 * 3600))  # before it ends, in seconds, a certificate is made anew, as by certificates.sh

lines() { # TEXT: the names in it, which have spaces or commas between them, each once
    echo "$1" | tr -s ', \n' '\n' | awk 'NF && !seen[$0]++'
}

before() { # NAME: the setting of the last run
    sed -n "s/^$1=//p" "$made/settings" 2> /dev/null || :
}

setting() { # NAME VALUE DEFAULT: VALUE now; for a command, the setting of the last run
    kept=
    [ -z "$command" ] || kept=$(before "$1")
    echo "${kept:-${2:-$3}}"
}

command=${1-}
published=${TUNEMQ_PUBLISH-}
case $published in 0.0.0.0 | :: | '[::]') published= ;; esac  # no address that others can use
hosts=$(lines "$(setting HOST "${TUNEMQ_HOST-}" "${published:-127.0.0.1}")")
redis_port=$(setting REDIS_PORT "${TUNEMQ_REDIS_PORT-}" 6379)
store_port=$(setting STORE_PORT "${TUNEMQ_STORE_PORT-}" 9000)

# The submitter that is made where none is named stays when others are named later: the person who set
# up the farm would lose access. Named once, it goes as every other name does.
named=$(lines "${TUNEMQ_SUBMITTERS-}")
submitters=$(lines "$(before SUBMITTERS)")
unnamed=$(before UNNAMED)
if [ -z "$submitters$named" ]; then
    unnamed=submitter
    submitters=$unnamed
elif [ -n "$named" ] && { [ -z "$command" ] || [ -z "$submitters" ]; }; then
    ! echo "$named" | grep -qx submitter || unnamed=
    submitters=$(lines "$named $unnamed")
fi
changed='' removed=''

fail() {
    echo "setup: $*" >&2
    exit 1
}

usage() {
    sed -n '2,/^set -eu/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

random() { # BYTES
    od -An -v -N "$1" -tx1 /dev/urandom | tr -d ' \n'
}

give() { # PATH [OWNER]
    [ -z "${2-$owner}" ] || chown -R "${2-$owner}" "$1"
}

put() { # TARGET [OWNER]: what comes in, if it differs, whole or not at all
    cat > "$1.new"
    if [ -e "$1" ] && cmp -s "$1.new" "$1"; then
        rm "$1.new"
    else
        give "$1.new" "${2-$owner}"
        [ ! -e "$1" ] || changed="$changed ${1#"$secrets/"}"
        mv "$1.new" "$1"
    fi
}

once() { # FILE BYTES: a random text, if there is none yet
    [ -s "$1" ] || random "$2" | put "$1" ''
}

check() {
    command -v openssl > /dev/null || fail "there is no openssl here: this runs in tunemq/scheduler"
    for name in $submitters; do
        case $name in
            scheduler | worker | exporter | keeper | default | admin | client | [!A-Za-z]* | *[!A-Za-z0-9_-]*)
                fail "TUNEMQ_SUBMITTERS: '$name' cannot be the name of a submitter; it begins with a" \
                    "letter, has letters, digits, _ and - only, and is no role's (scheduler, worker," \
                    "exporter, keeper, default, admin, client)" ;;
        esac
        [ "${#name}" -le 40 ] || fail "TUNEMQ_SUBMITTERS: '$name' is too long, 40 characters are the most"
    done
    for port in "$redis_port" "$store_port"; do
        case $port in
            '' | *[!0-9]*) fail "TUNEMQ_REDIS_PORT and TUNEMQ_STORE_PORT are numbers; given: '$port'" ;;
        esac
    done
    for host in $hosts; do
        case $host in
            *[!A-Za-z0-9.:-]*) fail "TUNEMQ_HOST: '$host' is no name or address of a machine" ;;
        esac
    done
}

# --- what is made once ----------------------------------------------------------------------------

make_settings() {
    for name in HOST:"$hosts" SUBMITTERS:"$submitters" UNNAMED:"$unnamed" REDIS_PORT:"$redis_port" \
        STORE_PORT:"$store_port"; do
        echo "${name%%:*}=$(lines "${name#*:}" | paste -sd' ' -)"
    done | put "$made/settings" ''
}

make_certificates() {
    tls=$made/tls
    mkdir -p "$tls"
    for server in redis:redis proxy:store; do
        names=$(lines "${server%:*} localhost 127.0.0.1 $hosts" | paste -sd, -)
        server=${server#*:}
        if [ "$(cat "$tls/$server.names" 2> /dev/null)" != "$names" ]; then
            rm -f "$tls/$server.crt"  # it is for other names
        fi
        sh "$shipped/redis/certificates.sh" "$names" "$tls" "$server" > /dev/null
        printf '%s\n' "$names" > "$tls/$server.names"
    done
}

make_keys() {
    if [ ! -e "$made/keys/scheduler.toml" ]; then
        rm -rf "$made/keys.new"
        # shellcheck disable=SC2086 # names have no spaces
        tunemq keys new "$made/keys.new" $submitters > /dev/null
        mv "$made/keys.new" "$made/keys"
    fi
    # scheduler.toml is what counts: the others may be there before it says so, and after.
    for name in $submitters; do
        submitters_there | grep -qx -- "$name" || tunemq keys add "$made/keys" "$name" > /dev/null
    done
    for name in $(submitters_there); do
        if ! may_submit "$name"; then
            removed="$removed $name"
            tunemq keys remove "$made/keys" "$name" > /dev/null
        fi
    done
    forget_others keys .toml
}

# FOLDER SUFFIX: files there of those who may submit no more.
forget_others() {
    for file in "$made/$1"/*"$2"; do
        name=$(basename "$file" "$2")
        case $name in scheduler | worker) continue ;; esac
        may_submit "$name" || rm "$file"
    done
}

submitters_there() {
    sed -n 's/^\[submitters\.\(.*\)\]$/\1/p' "$made/keys/scheduler.toml"
}

may_submit() { # NAME
    echo "$submitters" | grep -qx -- "$1"
}

make_redis_users() {
    # The file is made anew each time, from the rights that are shipped and passwords that stay.
    mkdir -p "$made/passwords"
    acl=$made/users.acl.new
    grep -v '^user submitter ' "$shipped/redis/users.acl" > "$acl"
    for name in $submitters; do
        sed -n "s/^user submitter /user $name /; s/-password-of-submitter /-password-of-$name /; /^user $name /p" \
            "$shipped/redis/users.acl" >> "$acl"
    done
    # Has Redis read this file again, for `store-setup`, if it has not; and may do nothing else.
    echo 'user keeper on #sha256-of-the-password-of-keeper resetchannels -@all +ping +acl|load +acl|users' >> "$acl"
    for name in scheduler worker exporter keeper $submitters; do
        file=$made/passwords/$name.password
        once "$file" 32
        hash=$(tr -d '\n' < "$file" | sha256sum | cut -d ' ' -f 1)
        sed "s/#sha256-of-the-password-of-$name /#$hash /" "$acl" > "$acl.next"
        mv "$acl.next" "$acl"
    done
    for file in "$made"/passwords/*.password; do
        name=$(basename "$file" .password)
        case $name in scheduler | worker | exporter | keeper) continue ;; esac
        may_submit "$name" || rm "$file"
    done
    if grep -n '#sha256-of-the-password-of-' "$acl" >&2; then
        fail "these lines of redis/users.acl have no password: setup.sh does not know their users"
    fi
    # Nobody can be this one: the name says which file Redis has read.
    hash=$(sha256sum < "$acl" | cut -d ' ' -f 1)
    echo "user file-$hash off resetpass resetkeys resetchannels -@all" >> "$acl"
    mv "$acl" "$made/users.acl"
}

make_store_users() {
    mkdir -p "$made/store"
    once "$made/store/root-user" 12
    once "$made/store/root-password" 32
    for name in scheduler worker $submitters; do
        file=$made/store/$name.credentials
        [ -s "$file" ] || printf '[default]\naws_access_key_id = %s-%s\naws_secret_access_key = %s\n' \
            "$name" "$(random 6)" "$(random 20)" | put "$file" ''
    done
    forget_others store .credentials
}

# --- what each gets of it -------------------------------------------------------------------------

environment() { # USER-OF-REDIS HOST PORT STORE: as the role finds it in /etc/tunemq
    echo "TUNEMQ_REDIS=rediss://$1:$(cat "$made/passwords/$1.password")@$2:$3/0?ssl_ca_certs=/etc/tunemq/ca.crt"
    echo "TUNEMQ_KEYS=/etc/tunemq/keys.toml"
    echo "TUNEMQ_S3_ENDPOINT=https://proxy:9000"
    [ -z "$4" ] || echo "TUNEMQ_S3_REACHED_AT=$4"
    echo "AWS_CA_BUNDLE=/etc/tunemq/ca.crt"
    echo "AWS_SHARED_CREDENTIALS_FILE=/etc/tunemq/credentials"
}

give_role() { # FOLDER NAME HOST PORT STORE
    mkdir -p "$1"
    put "$1/ca.crt" < "$made/tls/ca.crt"
    put "$1/credentials" < "$made/store/$2.credentials"
    put "$1/keys.toml" < "$made/keys/$2.toml"
    environment "$2" "$3" "$4" "$5" | put "$1/environment"
    give "$1"
}

give_outside() { # NAME
    host=$(echo "$hosts" | head -n 1)
    case $host in *:*) host="[$host]" ;; esac
    give_role "$secrets/outside/$1" "$1" "$host" "$redis_port" "https://$host:$store_port"
    put "$secrets/outside/$1/with" < "$here/with.sh"
    chmod 700 "$secrets/outside/$1/with"
}

give_all() {
    mkdir -p "$secrets/redis/tls"
    put "$secrets/redis/redis.conf" < "$shipped/redis/redis.conf"
    put "$secrets/redis/users.acl" < "$made/users.acl"
    put "$secrets/redis/exporter.password" < "$made/passwords/exporter.password"
    for file in ca.crt redis.crt redis.key; do
        put "$secrets/redis/tls/$file" < "$made/tls/$file"
    done
    give "$secrets/redis"

    mkdir -p "$secrets/minio" "$secrets/proxy" "$secrets/grafana"
    put "$secrets/minio/root-user" < "$made/store/root-user"
    put "$secrets/minio/root-password" < "$made/store/root-password"
    give "$secrets/minio"
    for file in store.crt store.key; do
        put "$secrets/proxy/$file" < "$made/tls/$file"
    done
    put "$secrets/proxy/nginx.conf" < "$shipped/proxy/nginx.conf"
    give "$secrets/proxy"
    once "$made/grafana-password" 16
    once "$made/grafana-key" 32
    put "$secrets/grafana/admin-password" "$grafana_owner" < "$made/grafana-password"
    put "$secrets/grafana/secret-key" "$grafana_owner" < "$made/grafana-key"
    give "$secrets/grafana" "$grafana_owner"

    give_role "$secrets/scheduler" scheduler redis 6379 ''
    give_role "$secrets/worker" worker redis 6379 ''
    mkdir -p "$secrets/outside"
    give_outside worker
    for name in $submitters; do
        give_outside "$name"
    done
    for folder in "$secrets"/outside/*; do
        name=$(basename "$folder")
        [ "$name" = worker ] || may_submit "$name" || rm -rf "$folder"
    done

    # Volumes of what is kept: Docker makes them root's.
    for folder in redis minio results; do
        [ ! -d "/data/$folder" ] || chown "$owner" "/data/$folder"
    done
}

show() {
    for file in tls/store.names keys/scheduler.toml; do
        [ -e "$made/$file" ] || fail "nothing is made yet: \`docker compose up --detach\` does so"
    done
    echo "submitters: $(submitters_there | paste -sd' ' -)"
    for file in ca redis store; do
        echo "$file.crt:$(of_names "$file") until $(openssl x509 -in "$made/tls/$file.crt" -noout -enddate |
            cut -d= -f2)$(ends_soon "$file")"
    done
    echo "for outside, in $secrets/outside: $(cd "$secrets/outside" && echo *)"
}

of_names() { # FILE
    [ ! -e "$made/tls/$1.names" ] || echo " for $(cat "$made/tls/$1.names"),"
}

ends_soon() { # FILE
    openssl x509 -in "$made/tls/$1.crt" -noout -checkend "$soon" > /dev/null ||
        echo ": SOON; \`docker compose up --detach\`, then \`docker compose restart redis proxy\`"
}

say_what_is_other() {
    [ -z "$removed" ] || echo "removed:$removed; named again, they get other keys and copy their folders again"
    [ -z "$unnamed" ] || [ "$unnamed" = "$submitters" ] ||
        echo "kept: $unnamed, made before TUNEMQ_SUBMITTERS named anyone; to remove it, name it there," \
            "run \`docker compose up --detach\`, and take the name out again"
    others=$(lines "$changed" | grep -E '^(redis/(redis.conf|tls/)|proxy/)' | paste -sd' ' - || :)
    [ -z "$others" ] ||
        echo "changed: $others; in force after \`docker compose restart redis proxy\`, where these run already"
}

[ "$#" -le 1 ] || [ "$command" = keys ] || usage
case $command in
    '' | new-passwords | new-certificates) ;;
    show)
        show
        exit ;;
    keys)
        [ "$#" -ge 2 ] || usage
        case $2 in
            rotate | promote | drop) ;;
            show)
                shift 2
                exec tunemq keys show "$made/keys" "$@" ;;
            *) fail "keys $2 is not for here: rotate, promote, drop and show are; who may submit" \
                "stands in TUNEMQ_SUBMITTERS" ;;
        esac ;;
    *) usage ;;
esac
check
case $command in
    keys)
        step=$2
        shift 2
        tunemq keys "$step" "$made/keys" "$@"
        echo "setup: the scheduler and the workers get theirs now; from outside/ copy those of others" ;;
    new-passwords) rm -rf "$made/passwords" "$made/store" ;;
    new-certificates) rm -f "$made"/tls/redis.crt "$made"/tls/store.crt ;;
esac
mkdir -p "$made"
make_settings
make_certificates
make_keys
make_redis_users
make_store_users
give_all
show
say_what_is_other
