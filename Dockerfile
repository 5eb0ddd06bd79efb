# dtx with its embedded PostgreSQL, as a user that is not root:
#   docker build --tag dtx .
#   docker run --detach --name dtx --volume dtx:/var/lib/dtx --publish 127.0.0.1:5673:5673 dtx
#   docker exec dtx dtx doctor
# Settings are the variables DTX_… (docs/reference/settings.md). With DTX_DATABASE the volume is not used.
FROM python:3.13-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY deploy deploy
COPY dtx dtx
COPY migrations migrations
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-compile --root-user-action ignore --prefix /install '.[embedded,otel]' ./deploy/client

FROM python:3.13-slim
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="dtx" \
      org.opencontainers.image.description="An XA resource manager for AMQP 0-9: two-phase commit for RabbitMQ" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /install /usr/local
COPY deploy/docker/healthcheck.py deploy/docker/role.py /usr/local/lib/dtx/
# The user cannot write bytecode. Some builders round the times of files, and bytecode with a time would not be used.
RUN python -m compileall -q --invalidation-mode unchecked-hash /usr/local/lib/python3.13 \
    && groupadd --gid 5673 dtx \
    && useradd --uid 5673 --gid dtx --home-dir /var/lib/dtx --shell /usr/sbin/nologin dtx \
    && install --directory --owner dtx --group dtx --mode 0700 /var/lib/dtx
# numbers, so that Kubernetes can check that it is not root
USER 5673:5673
WORKDIR /var/lib/dtx
VOLUME ["/var/lib/dtx"]
# inside the container: publish the ports where clients and operators may come from
ENV DTX_DATA_DIR=/var/lib/dtx DTX_LISTEN=0.0.0.0:5673 DTX_ADMIN_LISTEN=0.0.0.0:15673
EXPOSE 5673 15673
HEALTHCHECK --interval=5s --timeout=10s --start-period=30s --retries=12 CMD ["python", "/usr/local/lib/dtx/healthcheck.py"]
# SIGTERM is an orderly stop; give it a minute (docker stop --time 60)
STOPSIGNAL SIGTERM
ENTRYPOINT ["dtx"]
CMD ["serve"]
