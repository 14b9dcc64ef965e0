#!/bin/sh
# Makes what TLS needs where there is no authority that signs certificates yet, in FOLDER:
#   ca.crt, ca.key          an authority of the farm's own; all machines get ca.crt, none ca.key
#   redis.crt, redis.key    for the server at HOST, a name or an address, or several with commas
#   client.crt, client.key  for those whom a server asks for a certificate (tls-auth-clients yes)
# With SERVER, store for example, those of that server are made instead of redis.crt and redis.key.
# What is there already is kept until 90 days before it ends; then, or where you remove redis.crt for
# another HOST, the same authority signs another.
set -eu
umask 077

if [ "$#" -ne 2 ] && [ "$#" -ne 3 ]; then
    echo "usage: certificates.sh HOST[,HOST...] FOLDER [SERVER]" >&2
    exit 2
fi
hosts=$1 folder=$2 server=${3:-redis}
case $server in
    '' | ca | client | *[!A-Za-z0-9_-]*)
        echo "certificates.sh: SERVER is a name such as redis, of letters, digits, _ and -," \
            "and not ca or client; given: $server" >&2
        exit 2 ;;
esac
mkdir -p "$folder"
cd "$folder"

identifier() { # HOST
    case $1 in
        *:*) echo "IP:$1" ;;
        *[!0-9.]*) echo "DNS:$1" ;;
        *) echo "IP:$1" ;;
    esac
}

names=
for host in $(echo "$hosts" | tr ',' ' '); do
    names=${names:+$names,}$(identifier "$host")
done
if [ -z "$names" ]; then
    echo "certificates.sh: HOST is empty; give a name or an address of the server" >&2
    exit 2
fi

new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

signed() { # FILE NAME
    openssl x509 -in "$1.crt" -noout -checkend $((90 * 24 * 3600)) > /dev/null 2>&1 && return
    new_key "$1.key"
    openssl req -new -key "$1.key" -subj "/CN=$2" |
        openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 -out "$1.new" \
            -extfile extensions 2>/dev/null
    mv "$1.new" "$1.crt"  # whole or not at all
}

if [ ! -e ca.crt ]; then
    new_key ca.key
    openssl req -x509 -new -key ca.key -days 3650 -subj "/CN=TuneMQ farm" -out ca.new \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
    mv ca.new ca.crt
fi
identifiers='subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n'
printf "subjectAltName=%s\nextendedKeyUsage=serverAuth\n$identifiers" "$names" > extensions
signed "$server" "${hosts%%,*}"
printf "extendedKeyUsage=clientAuth\n$identifiers" > extensions
signed client "farm"
rm -f extensions
echo "in $(pwd): $(echo *.crt *.key)"
