# Collects Debian packages, wheels and MinIO for a farm without internet. With them, this repository
# and the image debian:bookworm-slim suffice to build all images there. On a machine with internet,
# from the root of a checkout, with BuildKit:
#
#   docker build -f deploy/images/offline.Dockerfile --output deploy/images/site .
#
# PACKAGES  packages that searches and trials import: "numpy torch"
# docs/deploy/air-gapped.md describes the next steps.

ARG BASE=debian:bookworm-slim
ARG GO_IMAGE=golang:1.26-bookworm

# All packages that the other Dockerfiles install, with dependencies that the base image lacks.
FROM ${BASE} AS debian
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    sh /mnt/steps/apt-download.sh /debian \
    ca-certificates nginx-light openssl python3 python3-venv redis-server tini

FROM ${BASE} AS wheels
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    sh /mnt/steps/apt-install.sh ca-certificates python3-venv && python3 -m venv /opt/tunemq
WORKDIR /src
COPY constraints.txt LICENSE pyproject.toml README.md ./
COPY scheduler scheduler
COPY shared shared
COPY tunemq tunemq
COPY workers workers
ARG PACKAGES=""
# Images build TuneMQ's wheel with hatchling; deploy/install.sh uses the one from here.
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    --mount=type=cache,target=/var/cache/pip \
    sh /mnt/steps/pip.sh wheel --wheel-dir /wheels \
    ".[examples,gpu,metrics,optuna,pandas,pb2,store]" "hatchling>=1.26" ${PACKAGES}

FROM ${GO_IMAGE} AS minio
ARG MINIO_VERSION=v0.0.0-20260212201848-7aac2a2c5b7c
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    --mount=type=cache,target=/var/cache/go-build \
    --mount=type=cache,target=/go/pkg/mod \
    sh /mnt/steps/minio.sh "${MINIO_VERSION}" /minio

FROM scratch
COPY --from=debian /debian /debian
COPY --from=wheels /wheels /wheels
COPY --from=minio /minio /minio
