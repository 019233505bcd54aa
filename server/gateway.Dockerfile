# The gateway and quire-batch: Python, the public certificate authorities (for external backends), their locked
# dependencies and code; no torch, no kopf, no compiler, no apt.
#
# BASE, secrets and the order of layers are those of server/Dockerfile.
ARG BASE

FROM ${BASE} AS system
ARG BASE
RUN --mount=type=secret,id=env \
    case "$BASE" in *@sha256:*) ;; *) echo "BASE=$BASE has no digest: NAME@sha256:..." >&2; exit 1 ;; esac \
 && if [ -f /run/secrets/env ]; then . /run/secrets/env; fi \
 && apt-get update -q \
 && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*.log /var/log/apt /usr/share/doc /usr/share/man \
 && echo 'quire:x:65532:65532:quire:/home/quire:/usr/sbin/nologin' >> /etc/passwd \
 && echo 'quire:x:65532:' >> /etc/group \
 && install -d -o 65532 -g 65532 /home/quire

FROM system AS dependencies
COPY requirements/uv.txt requirements/gateway.txt /opt/quire/requirements/
# One step, so that uv and what installs it are in no layer. At its end apt goes, too.
RUN --mount=type=secret,id=env --mount=type=secret,id=ca \
    if [ -f /run/secrets/env ]; then . /run/secrets/env; fi \
 && apt-get update -q \
 && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends python3-venv \
 && python3 -m venv /tmp/uv \
 && /tmp/uv/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /opt/quire/requirements/uv.txt \
 && export UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never \
 && /tmp/uv/bin/uv venv --allow-existing --python /usr/bin/python3 /opt/quire \
 && /tmp/uv/bin/uv pip install --python /opt/quire/bin/python --require-hashes --only-binary :all: \
    --compile-bytecode -r /opt/quire/requirements/gateway.txt \
 && echo /opt/quire/code > "$(/opt/quire/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/quire.pth" \
 && apt-get purge -qy --auto-remove python3-venv \
 && dpkg --purge apt \
 && rm -rf /tmp/* /var/lib/apt/lists/* /var/cache/apt/* /var/log/*.log /var/log/apt

ENV PATH=/opt/quire/code:/opt/quire/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/home/quire LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/quire
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["quire-gateway"]

FROM system AS code
COPY server/quire_batch /opt/quire/code/quire_batch
COPY server/quire_gateway /opt/quire/code/quire_gateway
COPY server/quire_http /opt/quire/code/quire_http
RUN python3 -m compileall -q /opt/quire/code \
 && for each in batch gateway; do \
    printf '%s\n' '#!/opt/quire/bin/python' 'import sys' \
    "from quire_$each.__main__ import main" 'sys.exit(main())' > "/opt/quire/code/quire-$each" \
 && chmod 755 "/opt/quire/code/quire-$each" || exit 1; done

FROM dependencies AS sbom
ARG VERSION
USER 0:0
COPY deploy/images/write_sbom.py /tmp/
RUN install -d /usr/share/sbom \
 && /opt/quire/bin/python /tmp/write_sbom.py quire-gateway "$VERSION" > /usr/share/sbom/quire-gateway.cdx.json

FROM dependencies
ARG BASE
ARG VERSION
LABEL org.opencontainers.image.title="quire-gateway" \
      org.opencontainers.image.description="Quire's gateway to model servers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${BASE}"
COPY --from=sbom /usr/share/sbom /usr/share/sbom
COPY --from=code /opt/quire/code /opt/quire/code
