#!/bin/sh
# Creates the secrets of a farm of docker-compose.yml in /secrets, unless they exist, and copies to
# each role's folder those that it needs. The service `setup` runs it at each `docker compose up`. By
# hand: `docker compose run --rm setup COMMAND`
#   (none)             creates missing secrets for the roles and for TUNEMQ_SUBMITTERS
#   keys ARGUMENTS     runs `tunemq keys` on the farm's keys: keys show, keys rotate, ...
#   new-passwords      replaces the passwords for Redis and the store
#   new-certificates   replaces the certificates; the authority stays
#   show               prints the submitters and when certificates expire, but no secrets
# Variables: TUNEMQ_SUBMITTERS (names, separated by spaces or commas), TUNEMQ_HOST (names and
# addresses of this machine for others; default: the address in TUNEMQ_PUBLISH, or 127.0.0.1),
# TUNEMQ_REDIS_PORT, TUNEMQ_STORE_PORT (ports for others). Without TUNEMQ_SUBMITTERS the submitters
# stay; another empty variable means its default. A COMMAND changes none of these settings.
# TUNEMQ_OWNER is uid:gid of the other containers, TUNEMQ_GRAFANA_OWNER that of Grafana.
set -eu
umask 077

secrets=${TUNEMQ_SECRETS:-/secrets}
here=$(cd "$(dirname "$0")" && pwd)
shipped=${here%/*}
owner=${TUNEMQ_OWNER-10001:10001} grafana_owner=${TUNEMQ_GRAFANA_OWNER-472:0}
authority=$secrets/authority  # the source of all other files, for this and store-setup only
renewal_s=$((90 * 24 * 3600))  # certificates.sh renews a certificate this long before its end

unique_words() { # TEXT: prints its words, separated by spaces or commas, one a line
    echo "$1" | tr -s ', \n' '\n' | awk 'NF && !seen[$0]++'
}

last_setting() { # NAME: prints the setting of the last run
    sed -n "s/^$1=//p" "$authority/settings" 2> /dev/null || :
}

setting() { # NAME VALUE DEFAULT: prints VALUE or, for a command, the setting of the last run
    last=
    [ -z "$command" ] || last=$(last_setting "$1")
    echo "${last:-${2:-$3}}"
}

command=${1-}
published=${TUNEMQ_PUBLISH-}
case $published in 0.0.0.0 | :: | '[::]') published= ;; esac  # others cannot connect to these
hosts=$(unique_words "$(setting HOST "${TUNEMQ_HOST-}" "${published:-127.0.0.1}")")
redis_port=$(setting REDIS_PORT "${TUNEMQ_REDIS_PORT-}" 6379)
store_port=$(setting STORE_PORT "${TUNEMQ_STORE_PORT-}" 9000)

# The default submitter stays when TUNEMQ_SUBMITTERS is set later: otherwise the user who set up the
# farm would lose access. Once TUNEMQ_SUBMITTERS has named it, it is a submitter like all others.
given_submitters=$(unique_words "${TUNEMQ_SUBMITTERS-}")
submitters=$(unique_words "$(last_setting SUBMITTERS)")
default_submitter=$(last_setting UNNAMED)
if [ -z "$submitters$given_submitters" ]; then
    default_submitter=submitter
    submitters=$default_submitter
elif [ -n "$given_submitters" ] && { [ -z "$command" ] || [ -z "$submitters" ]; }; then
    ! echo "$given_submitters" | grep -qx submitter || default_submitter=
    submitters=$(unique_words "$given_submitters $default_submitter")
fi
changed_files='' removed_submitters=''

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

set_owner() { # PATH [OWNER]
    [ -z "${2-$owner}" ] || chown -R "${2-$owner}" "$1"
}

put() { # TARGET [OWNER]: replaces the file atomically with stdin, if they differ
    cat > "$1.new"
    if [ -e "$1" ] && cmp -s "$1.new" "$1"; then
        rm "$1.new"
    else
        set_owner "$1.new" "${2-$owner}"
        [ ! -e "$1" ] || changed_files="$changed_files ${1#"$secrets/"}"
        mv "$1.new" "$1"
    fi
}

put_random() { # FILE BYTES: writes a random text, unless the file has one
    [ -s "$1" ] || random "$2" | put "$1" ''
}

check() {
    command -v openssl > /dev/null || fail "openssl not found: run this in tunemq/scheduler"
    for name in $submitters; do
        case $name in
            scheduler | worker | exporter | keeper | default | admin | client | [!A-Za-z]* | *[!A-Za-z0-9_-]*)
                fail "TUNEMQ_SUBMITTERS: invalid name '$name': use letters, digits, _ and -, first" \
                    "a letter, and none of scheduler, worker, exporter, keeper, default, admin, client" ;;
        esac
        [ "${#name}" -le 40 ] ||
            fail "TUNEMQ_SUBMITTERS: '$name' is too long: use at most 40 characters"
    done
    for port in "$redis_port" "$store_port"; do
        case $port in
            '' | *[!0-9]*) fail "TUNEMQ_REDIS_PORT, TUNEMQ_STORE_PORT: '$port' is not a number" ;;
        esac
    done
    for host in $hosts; do
        case $host in
            *[!A-Za-z0-9.:-]*) fail "TUNEMQ_HOST: '$host' is not a host name or address" ;;
        esac
    done
}

# --- the authority's files ------------------------------------------------------------------------

make_settings() {
    for pair in HOST:"$hosts" SUBMITTERS:"$submitters" UNNAMED:"$default_submitter" \
        REDIS_PORT:"$redis_port" STORE_PORT:"$store_port"; do
        echo "${pair%%:*}=$(unique_words "${pair#*:}" | paste -sd' ' -)"
    done | put "$authority/settings" ''
}

make_certificates() {
    tls=$authority/tls
    mkdir -p "$tls"
    for server in redis:redis proxy:store; do
        names=$(unique_words "${server%:*} localhost 127.0.0.1 $hosts" | paste -sd, -)
        server=${server#*:}
        if [ "$(cat "$tls/$server.names" 2> /dev/null)" != "$names" ]; then
            rm -f "$tls/$server.crt"  # otherwise certificates.sh keeps it
        fi
        sh "$shipped/redis/certificates.sh" "$names" "$tls" "$server" > /dev/null
        printf '%s\n' "$names" > "$tls/$server.names"
    done
}

make_keys() {
    if [ ! -e "$authority/keys/scheduler.toml" ]; then
        rm -rf "$authority/keys.new"
        # shellcheck disable=SC2086 # names have no spaces
        tunemq keys new "$authority/keys.new" $submitters > /dev/null
        mv "$authority/keys.new" "$authority/keys"
    fi
    # Only scheduler.toml tells who may submit: after a crash, other files may be older or newer.
    for name in $submitters; do
        known_submitters | grep -qx -- "$name" ||
            tunemq keys add "$authority/keys" "$name" > /dev/null
    done
    for name in $(known_submitters); do
        if ! may_submit "$name"; then
            removed_submitters="$removed_submitters $name"
            tunemq keys remove "$authority/keys" "$name" > /dev/null
        fi
    done
    remove_former_submitters keys .toml
}

remove_former_submitters() { # FOLDER SUFFIX: removes their files
    for file in "$authority/$1"/*"$2"; do
        name=$(basename "$file" "$2")
        case $name in scheduler | worker) continue ;; esac
        may_submit "$name" || rm "$file"
    done
}

known_submitters() {
    sed -n 's/^\[submitters\.\(.*\)\]$/\1/p' "$authority/keys/scheduler.toml"
}

may_submit() { # NAME
    echo "$submitters" | grep -qx -- "$1"
}

make_redis_users() {
    # Written anew each time: an upgrade may bring other rights. The passwords stay.
    mkdir -p "$authority/passwords"
    acl=$authority/users.acl.new
    grep -v '^user submitter ' "$shipped/redis/users.acl" > "$acl"
    for name in $submitters; do
        sed -n "s/^user submitter /user $name /; s/-password-of-submitter /-password-of-$name /; /^user $name /p" \
            "$shipped/redis/users.acl" >> "$acl"
    done
    # With this user, `store-setup` makes Redis reload this file; it has no other rights.
    echo 'user keeper on #sha256-of-the-password-of-keeper resetchannels -@all +ping +acl|load +acl|users' >> "$acl"
    for name in scheduler worker exporter keeper $submitters; do
        file=$authority/passwords/$name.password
        put_random "$file" 32
        hash=$(tr -d '\n' < "$file" | sha256sum | cut -d ' ' -f 1)
        sed "s/#sha256-of-the-password-of-$name /#$hash /" "$acl" > "$acl.next"
        mv "$acl.next" "$acl"
    done
    for file in "$authority"/passwords/*.password; do
        name=$(basename "$file" .password)
        case $name in scheduler | worker | exporter | keeper) continue ;; esac
        may_submit "$name" || rm "$file"
    done
    if grep -n '#sha256-of-the-password-of-' "$acl" >&2; then
        fail "setup.sh does not know these users of redis/users.acl: use both files of one version"
    fi
    # A disabled user, whose name shows `store-setup` which version of the file Redis has read.
    hash=$(sha256sum < "$acl" | cut -d ' ' -f 1)
    echo "user file-$hash off resetpass resetkeys resetchannels -@all" >> "$acl"
    mv "$acl" "$authority/users.acl"
}

make_store_users() {
    mkdir -p "$authority/store"
    put_random "$authority/store/root-user" 12
    put_random "$authority/store/root-password" 32
    for name in scheduler worker $submitters; do
        file=$authority/store/$name.credentials
        [ -s "$file" ] || printf '[default]\naws_access_key_id = %s-%s\naws_secret_access_key = %s\n' \
            "$name" "$(random 6)" "$(random 20)" | put "$file" ''
    done
    remove_former_submitters store .credentials
}

# --- each role's copies ---------------------------------------------------------------------------

environment() { # USER-OF-REDIS HOST PORT STORE: prints the role's /etc/tunemq/environment
    echo "TUNEMQ_REDIS=rediss://$1:$(cat "$authority/passwords/$1.password")@$2:$3/0?ssl_ca_certs=/etc/tunemq/ca.crt"
    echo "TUNEMQ_KEYS=/etc/tunemq/keys.toml"
    echo "TUNEMQ_S3_ENDPOINT=https://proxy:9000"
    [ -z "$4" ] || echo "TUNEMQ_S3_REACHED_AT=$4"
    echo "AWS_CA_BUNDLE=/etc/tunemq/ca.crt"
    echo "AWS_SHARED_CREDENTIALS_FILE=/etc/tunemq/credentials"
}

copy_role() { # FOLDER NAME HOST PORT STORE
    mkdir -p "$1"
    put "$1/ca.crt" < "$authority/tls/ca.crt"
    put "$1/credentials" < "$authority/store/$2.credentials"
    put "$1/keys.toml" < "$authority/keys/$2.toml"
    environment "$2" "$3" "$4" "$5" | put "$1/environment"
    set_owner "$1"
}

copy_outside() { # NAME
    host=$(echo "$hosts" | head -n 1)
    case $host in *:*) host="[$host]" ;; esac
    copy_role "$secrets/outside/$1" "$1" "$host" "$redis_port" "https://$host:$store_port"
    put "$secrets/outside/$1/with" < "$here/with.sh"
    chmod 700 "$secrets/outside/$1/with"
}

copy_all() {
    mkdir -p "$secrets/redis/tls"
    put "$secrets/redis/redis.conf" < "$shipped/redis/redis.conf"
    put "$secrets/redis/users.acl" < "$authority/users.acl"
    put "$secrets/redis/exporter.password" < "$authority/passwords/exporter.password"
    for file in ca.crt redis.crt redis.key; do
        put "$secrets/redis/tls/$file" < "$authority/tls/$file"
    done
    set_owner "$secrets/redis"

    mkdir -p "$secrets/minio" "$secrets/proxy" "$secrets/grafana"
    put "$secrets/minio/root-user" < "$authority/store/root-user"
    put "$secrets/minio/root-password" < "$authority/store/root-password"
    set_owner "$secrets/minio"
    for file in store.crt store.key; do
        put "$secrets/proxy/$file" < "$authority/tls/$file"
    done
    put "$secrets/proxy/nginx.conf" < "$shipped/proxy/nginx.conf"
    set_owner "$secrets/proxy"
    put_random "$authority/grafana-password" 16
    put_random "$authority/grafana-key" 32
    put "$secrets/grafana/admin-password" "$grafana_owner" < "$authority/grafana-password"
    put "$secrets/grafana/secret-key" "$grafana_owner" < "$authority/grafana-key"
    set_owner "$secrets/grafana" "$grafana_owner"

    copy_role "$secrets/scheduler" scheduler redis 6379 ''
    copy_role "$secrets/worker" worker redis 6379 ''
    mkdir -p "$secrets/outside"
    copy_outside worker
    for name in $submitters; do
        copy_outside "$name"
    done
    for folder in "$secrets"/outside/*; do
        name=$(basename "$folder")
        [ "$name" = worker ] || may_submit "$name" || rm -rf "$folder"
    done

    # Docker creates these volumes with the owner root.
    for folder in redis minio results; do
        [ ! -d "/data/$folder" ] || chown "$owner" "/data/$folder"
    done
}

show() {
    for file in tls/store.names keys/scheduler.toml; do
        [ -e "$authority/$file" ] || fail "no secrets yet: run \`docker compose up --detach\`"
    done
    echo "submitters: $(known_submitters | paste -sd' ' -)"
    for file in ca redis store; do
        end=$(openssl x509 -in "$authority/tls/$file.crt" -noout -enddate | cut -d= -f2)
        echo "$file.crt:$(names_of "$file") until $end$(expiry_hint "$file")"
    done
    echo "files for other machines, in $secrets/outside: $(cd "$secrets/outside" && echo *)"
}

names_of() { # CERTIFICATE
    [ ! -e "$authority/tls/$1.names" ] || echo " for $(cat "$authority/tls/$1.names"),"
}

expiry_hint() { # CERTIFICATE
    openssl x509 -in "$authority/tls/$1.crt" -noout -checkend "$renewal_s" > /dev/null ||
        echo ": SOON; \`docker compose up --detach\` and \`docker compose restart redis proxy\` renew it"
}

report_changes() {
    [ -z "$removed_submitters" ] ||
        echo "removed:$removed_submitters; if you add them again, they need new copies of their folders"
    [ -z "$default_submitter" ] || [ "$default_submitter" = "$submitters" ] ||
        echo "kept: $default_submitter, from when TUNEMQ_SUBMITTERS was empty; to remove it, add it" \
            "there, run \`docker compose up --detach\`, and take it out again"
    service_files=$(unique_words "$changed_files" |
        grep -E '^(redis/(redis.conf|tls/)|proxy/)' | paste -sd' ' - || :)
    [ -z "$service_files" ] ||
        echo "changed: $service_files; running services need \`docker compose restart redis proxy\`"
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
                exec tunemq keys show "$authority/keys" "$@" ;;
            *) fail "keys $2 is not available: use rotate, promote, drop or show, and" \
                "TUNEMQ_SUBMITTERS for submitters" ;;
        esac ;;
    *) usage ;;
esac
check
case $command in
    keys)
        step=$2
        shift 2
        tunemq keys "$step" "$authority/keys" "$@"
        echo "setup: scheduler and workers get new keys now; copy those of others from outside/" ;;
    new-passwords) rm -rf "$authority/passwords" "$authority/store" ;;
    new-certificates) rm -f "$authority"/tls/redis.crt "$authority"/tls/store.crt ;;
esac
mkdir -p "$authority"
make_settings
make_certificates
make_keys
make_redis_users
make_store_users
copy_all
show
report_changes
