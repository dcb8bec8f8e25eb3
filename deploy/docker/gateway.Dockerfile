# hippo's gateway: REST in, gRPC out; without torch.
#
#   docker build -f deploy/docker/gateway.Dockerfile -t hippo-gateway .
#
# Nothing here needs BuildKit. What changes least lies lowest: the base, the packages, the code.

ARG BASE=python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

FROM ${BASE} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv --without-pip /opt/hippo
# Each file must have a hash of the list, which `make locks` writes.
COPY deploy/docker/gateway.lock /in/
RUN python3 -m pip --python /opt/hippo install --no-deps --require-hashes -r /in/gateway.lock

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
LABEL org.opencontainers.image.title="hippo gateway" \
      org.opencontainers.image.description="OpenAI-style REST before a speculating pair" \
      org.opencontainers.image.licenses="Apache-2.0"
ARG UID=10001
RUN useradd --uid "${UID}" --no-create-home --home-dir /tmp --shell /usr/sbin/nologin hippo \
 && install -d -o hippo -g hippo /uploads \
 && install -d /media
COPY --from=dependencies /opt/hippo /opt/hippo
COPY --from=code /app /app
ENV PATH=/opt/hippo/bin:/app/bin:${PATH} \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HIPPO_GATEWAY_HOST=0.0.0.0 \
    HIPPO_GATEWAY_PORT=8000
USER hippo
WORKDIR /app
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
  CMD ["python", "-m", "hippo.rpc.health_check", "http://127.0.0.1:8000/ready"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m"]
CMD ["gateway"]
