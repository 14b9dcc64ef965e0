#!/bin/sh
# Gives each user of a users.acl that has no password yet the one in FOLDER/USER.password, or a new
# random one, which it writes there for your eyes only; the hash goes into users.acl. Redis 6 does not
# start with rights to read a key only (%R~): where it is installed here they become rights to all.
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
    echo "Redis 6 has no read-only keys: a user in $file who may read a key may also write it"
    ;;
esac

sed -n 's/.*#sha256-of-the-password-of-\([A-Za-z0-9_-]*\).*/\1/p' "$file" | while read -r user; do
    if [ -s "$folder/$user.password" ]; then
        password=$(cat "$folder/$user.password") is='as before, '
    else
        password=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') is=''
    fi
    hash=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
    printf '%s\n' "$password" > "$folder/$user.password"
    changed=$(sed "s/#sha256-of-the-password-of-$user /#$hash /" "$file")
    printf '%s\n' "$changed" > "$file"
    echo "$user: $is$folder/$user.password"
done
if grep -n '#sha256-of-the-password-of-' "$file" >&2; then
    echo "passwords.sh: these lines of $file still have no password: a name has letters, digits, _ and -" >&2
    exit 1
fi
