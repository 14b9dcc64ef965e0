#!/bin/sh
# A step of an image's build: writes MinIO of VERSION to FILE. It copies `minio` from /mnt/site
# (deploy/images/site), else compiles with the modules in `go-modules` there, else with Go's proxy.
set -eu
version=$1 file=$2

if [ -e /mnt/site/minio ]; then
    cp /mnt/site/minio "$file"
else
    if [ -e /mnt/site/go.env ]; then
        export GOENV=/mnt/site/go.env
    fi
    if [ -e /mnt/site/ca.crt ]; then
        export SSL_CERT_FILE=/mnt/site/ca.crt
    fi
    if [ -d /mnt/site/go-modules ]; then
        # Go checked the sums during the download; this site cannot reach the checksum database.
        export GOPROXY=file:///mnt/site/go-modules/cache/download GOSUMDB=off
    fi
    # Fetch no other Go; without C, the binary runs on any Linux.
    export GOCACHE=/var/cache/go-build GOTOOLCHAIN=local GOFLAGS=-buildvcs=false CGO_ENABLED=0 GOBIN=/tmp/bin
    go install -trimpath -ldflags '-s -w' "github.com/minio/minio@$version"
    mv /tmp/bin/minio "$file"
fi
chmod 0755 "$file"
"$file" --version
