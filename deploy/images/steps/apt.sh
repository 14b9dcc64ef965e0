# Read by the steps that need Debian's packages: `apt COMMAND ...` is apt-get, which looks into
# /mnt/site (deploy/images/site) for where they come from.
export DEBIAN_FRONTEND=noninteractive
if [ -e /mnt/site/apt.conf ]; then
    export APT_CONFIG=/mnt/site/apt.conf
fi
apt_list=
if [ -d /mnt/site/debian ]; then
    # Made by apt-download.sh; whoever carried it here has looked at its checksum.
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
