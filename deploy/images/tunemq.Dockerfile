# The images of TuneMQ itself: tunemq/scheduler, tunemq/worker, tunemq/worker-gpu. From the root of
# a checkout, with BuildKit (`docker build` of Docker 23 or newer; before that DOCKER_BUILDKIT=1):
#
#   docker build -f deploy/images/tunemq.Dockerfile --target worker -t tunemq/worker .
#
# PACKAGES          packages that searches and trials import, for all images: "numpy scikit-learn"
# SCHEDULER_EXTRAS  TuneMQ's extras (pyproject.toml) in the scheduler's image
# deploy/images/site  other sources of packages than the internet (README.md there)

ARG BASE=debian:bookworm-slim

# --- common to all images: Debian's Python, an init, a user ---------------------------------------

FROM ${BASE} AS base
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    sh /mnt/steps/apt-install.sh ca-certificates openssl python3 tini && \
    sh /mnt/steps/add-user.sh /var/lib/tunemq /var/cache/tunemq
ENV PATH=/opt/tunemq/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 \
    TUNEMQ_HEALTH=/tmp/tunemq-health
LABEL org.opencontainers.image.licenses="Apache-2.0"

# --- /opt/tunemq; the images contain no other files of these stages -------------------------------

FROM base AS venv
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    sh /mnt/steps/apt-install.sh python3-venv && python3 -m venv /opt/tunemq && \
    /opt/tunemq/bin/pip uninstall -qqy setuptools
WORKDIR /src
COPY constraints.txt LICENSE pyproject.toml README.md ./
COPY scheduler scheduler
COPY shared shared
COPY tunemq tunemq
COPY workers workers
ARG PACKAGES=""
RUN cp constraints.txt /opt/tunemq/

FROM venv AS scheduler-venv
ARG SCHEDULER_EXTRAS="metrics,optuna"
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    --mount=type=cache,target=/var/cache/pip \
    sh /mnt/steps/pip.sh install ".[${SCHEDULER_EXTRAS}]" ${PACKAGES}

FROM venv AS worker-venv
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    --mount=type=cache,target=/var/cache/pip \
    sh /mnt/steps/pip.sh install "." ${PACKAGES}

FROM venv AS worker-gpu-venv
RUN --mount=type=bind,source=deploy/images,target=/mnt \
    --mount=type=cache,target=/var/cache/pip \
    sh /mnt/steps/pip.sh install ".[gpu]" ${PACKAGES}

# --- the images -----------------------------------------------------------------------------------

FROM base AS scheduler
COPY deploy/images/entrypoint.sh /usr/local/bin/tunemq-entrypoint
COPY --from=scheduler-venv /opt/tunemq /opt/tunemq
ENV HOME=/var/lib/tunemq TUNEMQ_RESULTS=/var/lib/tunemq
WORKDIR /var/lib/tunemq
USER 10001:10001
# The port of --metrics.
EXPOSE 9464
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 CMD ["tunemq", "health"]
ENTRYPOINT ["tini", "-s", "--", "tunemq-entrypoint", "scheduler"]
LABEL org.opencontainers.image.title="tunemq/scheduler" \
      org.opencontainers.image.description="The scheduler of a TuneMQ farm"

FROM base AS worker-base
COPY deploy/images/entrypoint.sh /usr/local/bin/tunemq-entrypoint
ENV HOME=/var/cache/tunemq
WORKDIR /var/cache/tunemq
USER 10001:10001
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 CMD ["tunemq", "health"]
ENTRYPOINT ["tini", "-s", "--", "tunemq-entrypoint", "worker"]

FROM worker-base AS worker
COPY --from=worker-venv /opt/tunemq /opt/tunemq
LABEL org.opencontainers.image.title="tunemq/worker" \
      org.opencontainers.image.description="A node of a TuneMQ farm, without GPUs"

# No CUDA: NVIDIA's container toolkit adds the driver, and the wheels of PyTorch and others contain
# the rest.
FROM worker-base AS worker-gpu
COPY --from=worker-gpu-venv /opt/tunemq /opt/tunemq
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.title="tunemq/worker-gpu" \
      org.opencontainers.image.description="A node of a TuneMQ farm, with NVIDIA GPUs"
