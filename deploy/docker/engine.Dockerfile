# hippo's engine with torch: the draft service and the target service.
#
#   docker build -f deploy/docker/engine.Dockerfile -t hippo-engine:cuda .
#   docker build -f deploy/docker/engine.Dockerfile -t hippo-engine:cpu \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# Nothing here needs BuildKit. What changes least lies lowest: the base, torch (most of the image),
# the other packages, the bundled pair, the code.

ARG BASE=python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

FROM ${BASE} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv --without-pip /opt/hippo
COPY constraints.txt /in/
# An index beside PyPI, which must have torch: its build, or none, and never PyPI's CUDA build
# instead; empty: PyPI's. Of torch only what runs is kept, not what compiles against it or tests it.
ARG TORCH_INDEX=
RUN if [ -n "${TORCH_INDEX}" ]; then \
      python3 -m pip --python /opt/hippo install -c /in/constraints.txt --no-deps \
        --index-url "${TORCH_INDEX}" torch; \
    fi \
 && python3 -m pip --python /opt/hippo install -c /in/constraints.txt torch torchvision \
      ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
 && cd /opt/hippo/lib/python3*/site-packages/torch \
 && rm -rf include share test \
 && find bin -type f ! -name torch_shm_manager -delete
# Each file must have a hash of the list, which `make locks` writes.
COPY deploy/docker/engine.lock /in/
RUN python3 -m pip --python /opt/hippo install --no-deps --require-hashes -r /in/engine.lock
# Further packages, for forms of quantised weights that need them (docs/operations.md).
ARG EXTRA_PACKAGES=
RUN if [ -n "${EXTRA_PACKAGES}" ]; then \
      python3 -m pip --python /opt/hippo install -c /in/constraints.txt ${EXTRA_PACKAGES}; \
    fi

FROM ${BASE} AS code
ARG SETUPTOOLS=80.9.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv --without-pip /opt/hippo \
 && python3 -m pip --python /opt/hippo install "setuptools==${SETUPTOOLS}"
COPY pyproject.toml setup.py README.md LICENSE /in/
COPY gateway /in/gateway
COPY services /in/services
COPY hippo /in/hippo
RUN python3 -m pip --python /opt/hippo install --no-deps --no-build-isolation --target /app /in

FROM ${BASE}
LABEL org.opencontainers.image.title="hippo engine" \
      org.opencontainers.image.description="Draft and target of a speculating pair of video LLMs" \
      org.opencontainers.image.licenses="Apache-2.0"
ARG UID=10001
RUN useradd --uid "${UID}" --no-create-home --home-dir /tmp --shell /usr/sbin/nologin hippo \
 && install -d -o hippo -g hippo /models /uploads \
 && install -d /media
COPY --from=dependencies /opt/hippo /opt/hippo
COPY demo/models/draft /app/demo/models/draft
COPY demo/models/target /app/demo/models/target
COPY --from=code /app /app
# Where models come from: the bundled pair, or any folder or hub name, cached under /models. A
# token for gated models is read from a file, such as a mounted secret.
ENV PATH=/opt/hippo/bin:/app/bin:${PATH} \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/models \
    HF_TOKEN_PATH=/run/secrets/hf_token \
    HF_HUB_DISABLE_TELEMETRY=1 \
    HIPPO_DRAFT_MODEL=/app/demo/models/draft \
    HIPPO_DRAFT_HOST=0.0.0.0 \
    HIPPO_DRAFT_PORT=50051 \
    HIPPO_DRAFT_METRICS_PORT=9101 \
    HIPPO_TARGET_MODEL=/app/demo/models/target \
    HIPPO_TARGET_HOST=0.0.0.0 \
    HIPPO_TARGET_PORT=50051 \
    HIPPO_TARGET_METRICS_PORT=9102
USER hippo
WORKDIR /app
EXPOSE 50051 9101 9102
# Loading a model takes as long as its download: the start period is to be set by whoever runs it.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=3 \
  CMD ["python", "-m", "hippo.rpc.health_check", "127.0.0.1:50051"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m"]
CMD ["services.target"]
