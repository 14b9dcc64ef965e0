# The services of a farm: tunemq/redis, tunemq/minio, tunemq/proxy. From the root of a checkout,
# with BuildKit:
#
#   docker build -f deploy/images/services.Dockerfile --target redis -t tunemq/redis .
#
# None contains a configuration: docker-compose.yml and the chart provide it, with the command.
# deploy/images/site  other sources of packages than the internet (README.md there)

ARG BASE=debian:bookworm-slim
ARG GO_IMAGE=golang:1.26-bookworm

# Debian's 7.0.15 includes fixes of later versions; CVE-2026-23479 does not affect it.
FROM ${BASE} AS redis
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    sh /mnt/steps/apt-install.sh redis-server && sh /mnt/steps/add-user.sh /var/lib/redis
WORKDIR /var/lib/redis
USER 10001:10001
EXPOSE 6379
CMD ["redis-server"]
LABEL org.opencontainers.image.title="tunemq/redis" \
      org.opencontainers.image.description="Debian's Redis, for a TuneMQ farm" \
      org.opencontainers.image.licenses="BSD-3-Clause"

# The last version of the project, which publishes no binaries or images of it.
FROM ${GO_IMAGE} AS minio-build
ARG MINIO_VERSION=v0.0.0-20260212201848-7aac2a2c5b7c
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    --mount=type=cache,target=/var/cache/go-build \
    --mount=type=cache,target=/go/pkg/mod \
    sh /mnt/steps/minio.sh "${MINIO_VERSION}" /minio

# Others must reach MinIO only through the proxy, which rejects the uploads of CVE-2026-40344.
FROM ${BASE} AS minio
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    sh /mnt/steps/apt-install.sh ca-certificates && sh /mnt/steps/add-user.sh /var/lib/minio
COPY --from=minio-build /minio /usr/local/bin/minio
WORKDIR /var/lib/minio
USER 10001:10001
EXPOSE 9000
CMD ["minio", "server", "/var/lib/minio"]
LABEL org.opencontainers.image.title="tunemq/minio" \
      org.opencontainers.image.description="MinIO from its source, for a TuneMQ farm" \
      org.opencontainers.image.licenses="AGPL-3.0-only"

FROM ${BASE} AS proxy
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    sh /mnt/steps/apt-install.sh nginx-light && sh /mnt/steps/add-user.sh /var/lib/nginx /var/log/nginx
USER 10001:10001
EXPOSE 9000
STOPSIGNAL SIGQUIT
CMD ["nginx", "-g", "daemon off;"]
LABEL org.opencontainers.image.title="tunemq/proxy" \
      org.opencontainers.image.description="nginx before MinIO, for a TuneMQ farm" \
      org.opencontainers.image.licenses="BSD-2-Clause"
