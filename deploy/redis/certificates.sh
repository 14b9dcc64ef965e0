#!/bin/sh
# Creates an authority and certificates for TLS in FOLDER, for farms that have no authority yet:
#   ca.crt, ca.key          the farm's authority; all machines get ca.crt, none gets ca.key
#   redis.crt, redis.key    for the server at HOST: names or addresses, separated by commas
#   client.crt, client.key  for clients, if a server requires certificates (tls-auth-clients yes)
# With SERVER, for example store, it creates store.crt and store.key instead of those of redis. It
# keeps existing certificates until 90 days before they expire. Then, or if you remove redis.crt to
# change HOST, the same authority signs a new one.
set -eu
umask 077

if [ "$#" -ne 2 ] && [ "$#" -ne 3 ]; then
    echo "usage: certificates.sh HOST[,HOST...] FOLDER [SERVER]" >&2
    exit 2
fi
hosts=$1 folder=$2 server=${3:-redis}
case $server in
    '' | ca | client | *[!A-Za-z0-9_-]*)
        echo "certificates.sh: invalid SERVER '$server': use letters, digits, _ and -, but not ca" \
            "or client" >&2
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
    echo "certificates.sh: HOST is empty: pass a name or an address of the server" >&2
    exit 2
fi

new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }

sign() { # FILE NAME
    openssl x509 -in "$1.crt" -noout -checkend $((90 * 24 * 3600)) > /dev/null 2>&1 && return
    # The key in use stays until its successor has a certificate.
    new_key "$1.key.new"
    openssl req -new -key "$1.key.new" -subj "/CN=$2" -out "$1.csr"
    openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 \
        -out "$1.new" -extfile extensions 2> problem || { cat problem >&2; exit 1; }
    rm -f "$1.csr" problem
    mv "$1.key.new" "$1.key"
    mv "$1.new" "$1.crt"
}

if [ -e ca.crt ] && [ ! -e ca.key ]; then
    echo "certificates.sh: $(pwd) has ca.crt and no ca.key: put the authority's key back, or" \
        "remove ca.crt to make another authority, whose ca.crt all machines need" >&2
    exit 1
fi
if [ ! -e ca.crt ]; then
    new_key ca.key
    openssl req -x509 -new -key ca.key -days 3650 -subj "/CN=TuneMQ farm" -out ca.new \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
    mv ca.new ca.crt
fi
identifiers='subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n'
printf "subjectAltName=%s\nextendedKeyUsage=serverAuth\n$identifiers" "$names" > extensions
sign "$server" "${hosts%%,*}"
printf "extendedKeyUsage=clientAuth\n$identifiers" > extensions
sign client "farm"
rm -f extensions
echo "files in $(pwd): $(echo *.crt *.key)"
