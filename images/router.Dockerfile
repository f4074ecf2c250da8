# Router and scheduler, which need no torch. From the root of the repository:
#   docker build --file images/router.Dockerfile --tag pagoda-router:0.1.0 .
# For builds that repeat, name the base by its digest: --build-arg PYTHON=python@sha256:...
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /pagoda
COPY pyproject.toml constraints.txt ./
COPY launcher/environment.py launcher/
RUN python -m launcher.environment .venv router tracing \
    && .venv/bin/python -m pip uninstall --quiet --yes pip setuptools
RUN python -m launcher.environment .venv-build build
COPY protos protos
RUN find protos -name '*.proto' -exec \
    .venv-build/bin/python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. {} +

# What is in it, as CycloneDX: docker build --file images/router.Dockerfile --target sbom --output . .
FROM build AS list
RUN .venv-build/bin/python -m pip install --quiet 'cyclonedx-bom>=7,<8' \
    && .venv-build/bin/cyclonedx-py environment --output-file sbom.json .venv/bin/python
FROM scratch AS sbom
COPY --from=list /pagoda/sbom.json /

FROM ${PYTHON}
LABEL org.opencontainers.image.title="Pagoda router and scheduler" org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /pagoda
ENV PATH=/pagoda/.venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=build /pagoda/.venv .venv
COPY --from=build /pagoda/pagoda pagoda
COPY common common
COPY router router
COPY scheduler scheduler
RUN python -m compileall -q common pagoda router scheduler
USER 10001:10001
CMD ["python", "-m", "router", "--help"]
