#!/bin/sh
# Builds the base images of all others, for sites without a registry, and imports them into Docker:
#   debian:bookworm-slim     with debootstrap, from a Debian mirror
#   golang:1.26-bookworm     the same with Go, if you pass its archive; only MinIO needs it
# They replace the official images of these names.
set -eu

mirror=http://deb.debian.org/debian
security=http://deb.debian.org/debian-security
go=
usage() {
    cat >&2 <<'END'
usage: base-images.sh [--mirror URL] [--security URL] [--go ARCHIVE]
  --mirror URL     Debian mirror; default: http://deb.debian.org/debian
  --security URL   Debian's security updates; '' for none; default: http://deb.debian.org/debian-security
  --go ARCHIVE     go1.26.N.linux-ARCH.tar.gz from go.dev: also builds golang:1.26-bookworm
It needs root, debootstrap, Docker, and 1 GiB in $TMPDIR.
END
    exit 2
}
fail() {
    echo "base-images.sh: $1" >&2
    exit 1
}
while [ "$#" -gt 0 ]; do
    [ "$#" -ge 2 ] || usage
    case $1 in
        --mirror) mirror=$2 ;;
        --security) security=$2 ;;
        --go) go=$2 ;;
        *) usage ;;
    esac
    shift 2
done

[ "$(id -u)" -eq 0 ] || fail "debootstrap needs root: run this with sudo"
for program in debootstrap docker; do
    command -v "$program" > /dev/null ||
        fail "$program not found: run apt-get install debootstrap docker.io"
done
docker version > /dev/null 2>&1 || fail "Docker does not answer: start its daemon"
if [ -n "$go" ]; then
    version=$(tar -xzOf "$go" go/VERSION | head -n 1) || fail "--go $go is not an archive of Go"
    case $version in
        go1.26 | go1.26.*) ;;
        *) fail "--go $go is $version: golang:1.26-bookworm needs go1.26" ;;
    esac
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset TMPDIR  # the new system does not have that folder
root=$folder/root

debootstrap --variant=minbase bookworm "$root" "$mirror"

# As in the official slim image: no documentation or translations, now or from later packages.
cat > "$root/etc/dpkg/dpkg.cfg.d/docker" <<'END'
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/man/*
END
find "$root/usr/share/doc" ! -type d ! -name copyright -delete
find "$root/usr/share/doc" -type d -empty -delete
for kind in info locale man; do
    find "$root/usr/share/$kind" -mindepth 1 -delete
done
# Packages must not start services in an image, and apt must not keep archives.
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod 0755 "$root/usr/sbin/policy-rc.d"
cat > "$root/etc/apt/apt.conf.d/docker" <<'END'
Acquire::Languages "none";
APT::AutoRemove::SuggestsImportant "false";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb"; };
END
{
    echo "deb $mirror bookworm main"
    echo "deb $mirror bookworm-updates main"
    [ -z "$security" ] || echo "deb $security bookworm-security main"
} > "$root/etc/apt/sources.list"

within() { DEBIAN_FRONTEND=noninteractive LC_ALL=C chroot "$root" "$@"; }
import_image() { # NAME CHANGE...
    name=$1
    shift
    # Files of this machine, and files that programs create again.
    rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/log/*.log \
        "$root"/var/log/apt "$root"/var/cache/ldconfig/aux-cache "$root"/var/cache/debconf/*-old
    rm -f "$root/etc/hostname" "$root/etc/resolv.conf"
    : > "$root/etc/machine-id"
    tar -C "$root" --numeric-owner -c . | docker import "$@" - "$name" > /dev/null
    echo "$name: $(docker image inspect --format '{{.Size}}' "$name") bytes"
}
update_package_lists() {
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    within apt-get -qq update
}

update_package_lists
within apt-get -qq -y upgrade
within apt-get -qq clean
import_image debian:bookworm-slim --change 'CMD ["bash"]'

if [ -n "$go" ]; then
    update_package_lists
    within apt-get -qq -y install --no-install-recommends ca-certificates
    tar -C "$root/usr/local" -xzf "$go"
    mkdir -p "$root/go"
    import_image golang:1.26-bookworm --change 'CMD ["bash"]' --change 'WORKDIR /go' \
        --change 'ENV GOPATH=/go' --change 'ENV PATH=/go/bin:/usr/local/go/bin:/usr/sbin:/usr/bin:/sbin:/bin'
fi
