#!/bin/sh
# Makes the images that all others are FROM, where no registry can be reached:
#   debian:bookworm-slim     with debootstrap, from a mirror of Debian
#   golang:1.26-bookworm     the same with Go, if its archive is given; only MinIO is built in it
# and hands them to Docker. They stand in for the official images of these names.
set -eu

mirror=http://deb.debian.org/debian
security=http://deb.debian.org/debian-security
go=
usage() {
    cat >&2 <<'END'
usage: base-images.sh [--mirror URL] [--security URL] [--go ARCHIVE]
  --mirror URL     of Debian; default: http://deb.debian.org/debian
  --security URL   of Debian's security updates; '' for none; default: http://deb.debian.org/debian-security
  --go ARCHIVE     go1.26.N.linux-ARCH.tar.gz, as go.dev has it: makes golang:1.26-bookworm, too
It needs root, debootstrap, and Docker, and room for 1 GiB in $TMPDIR.
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

[ "$(id -u)" -eq 0 ] || fail "only root can make a system in a folder; run it with sudo"
for program in debootstrap docker; do
    command -v "$program" > /dev/null || fail "there is no $program: apt-get install debootstrap docker.io"
done
docker version > /dev/null 2>&1 || fail "Docker does not answer; is its daemon running?"
if [ -n "$go" ]; then
    version=$(tar -xzOf "$go" go/VERSION | head -n 1) || fail "$go is not an archive of Go"
    case $version in
        go1.26 | go1.26.*) ;;
        *) fail "$go is $version; the image golang:1.26-bookworm wants go1.26" ;;
    esac
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset TMPDIR  # programs in the new system would look for that folder there
root=$folder/root

debootstrap --variant=minbase bookworm "$root" "$mirror"

# As in the official slim image: no documentation, no translations, now and later.
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
# Packages start no services in an image, and keep no archives there.
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
into_docker() { # NAME CHANGE...
    name=$1
    shift
    # What is of this machine, or made anew by whoever needs it.
    rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/log/*.log \
        "$root"/var/log/apt "$root"/var/cache/ldconfig/aux-cache "$root"/var/cache/debconf/*-old
    rm -f "$root/etc/hostname" "$root/etc/resolv.conf"
    : > "$root/etc/machine-id"
    tar -C "$root" --numeric-owner -c . | docker import "$@" - "$name" > /dev/null
    echo "$name: $(docker image inspect --format '{{.Size}}' "$name") bytes"
}
updated() {
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    within apt-get -qq update
}

updated
within apt-get -qq -y upgrade
within apt-get -qq clean
into_docker debian:bookworm-slim --change 'CMD ["bash"]'

if [ -n "$go" ]; then
    updated
    within apt-get -qq -y install --no-install-recommends ca-certificates
    tar -C "$root/usr/local" -xzf "$go"
    mkdir -p "$root/go"
    into_docker golang:1.26-bookworm --change 'CMD ["bash"]' --change 'WORKDIR /go' \
        --change 'ENV GOPATH=/go' --change 'ENV PATH=/go/bin:/usr/local/go/bin:/usr/sbin:/usr/bin:/sbin:/bin'
fi
