#!/bin/sh
# Writes the hash of FOLDER/USER.password into users.acl for each user that has no password yet. If
# that file is missing, it creates it with a random password, readable only for you. If this machine
# has Redis 6, which does not know read-only rights (%R~), they become rights to read and write.
set -eu
umask 077

if [ "$#" -ne 2 ]; then
    echo "usage: passwords.sh users.acl FOLDER" >&2
    exit 2
fi
file=$1 folder=$2
mkdir -p "$folder"

case $(redis-server --version 2>/dev/null) in
*v=6.*)
    changed=$(sed 's/%R~/~/g' "$file")
    printf '%s\n' "$changed" > "$file"
    echo "Redis 6 has no read-only rights: users in $file may also write keys that they may read"
    ;;
esac

sed -n 's/.*#sha256-of-the-password-of-\([A-Za-z0-9_-]*\).*/\1/p' "$file" | while read -r user; do
    if [ -s "$folder/$user.password" ]; then
        password=$(cat "$folder/$user.password") state='unchanged, '
    else
        password=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') state=''
    fi
    hash=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
    printf '%s\n' "$password" > "$folder/$user.password"
    changed=$(sed "s/#sha256-of-the-password-of-$user /#$hash /" "$file")
    printf '%s\n' "$changed" > "$file"
    echo "$user: $state$folder/$user.password"
done
if grep -n '#sha256-of-the-password-of-' "$file" >&2; then
    echo "passwords.sh: these lines of $file have invalid names: use letters, digits, _ and -" >&2
    exit 1
fi
