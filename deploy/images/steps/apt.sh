# For the steps that need Debian packages: `apt COMMAND ...` is apt-get with the sources in
# /mnt/site (deploy/images/site).
export DEBIAN_FRONTEND=noninteractive
if [ -e /mnt/site/apt.conf ]; then
    export APT_CONFIG=/mnt/site/apt.conf
fi
apt_list=
if [ -d /mnt/site/debian ]; then
    # apt-download.sh does not sign it; the admin who copied it here checked its checksum.
    apt_list=/tmp/site.list
    echo 'deb [trusted=yes] file:/mnt/site/debian ./' > "$apt_list"
elif [ -e /mnt/site/sources.list ]; then
    apt_list=/mnt/site/sources.list
fi

apt() {
    if [ -n "$apt_list" ]; then
        set -- -o Dir::Etc::SourceList="$apt_list" -o Dir::Etc::SourceParts=/none "$@"
    fi
    apt-get -qq -o Dpkg::Use-Pty=0 "$@"
}
