# Shards, for CPUs or NVIDIA GPUs. From the root of the repository:
#   docker build --file images/shard.Dockerfile --tag pagoda-shard-cpu:0.1.0 .
#   docker build --file images/shard.Dockerfile --build-arg DEVICE=cuda --tag pagoda-shard-cuda:0.1.0 .
# For builds that repeat, name the base by its digest: --build-arg PYTHON=python@sha256:...
ARG PYTHON=python:3.11-slim-bookworm
ARG DEVICE=cpu

FROM ${PYTHON} AS build
# An index of PyTorch with builds for CPUs alone; where there is none, the build for GPUs runs on CPUs too.
ARG PIP_EXTRA_INDEX_URL
WORKDIR /pagoda
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt ./
COPY launcher/environment.py launcher/
RUN python -m launcher.environment .venv shard \
    && .venv/bin/python -m pip uninstall --quiet --yes pip
RUN python -m launcher.environment .venv-build build
COPY protos protos
RUN find protos -name '*.proto' -exec \
    .venv-build/bin/python -m grpc_tools.protoc -Iprotos --python_out=. --grpc_python_out=. {} +
COPY kernels kernels
RUN .venv/bin/python kernels/cpu/build.py

# What is in it, as CycloneDX: docker build --file images/shard.Dockerfile --target sbom --output . .
FROM build AS list
RUN .venv-build/bin/python -m pip install --quiet 'cyclonedx-bom>=7,<8' \
    && .venv-build/bin/cyclonedx-py environment --output-file sbom.json .venv/bin/python
FROM scratch AS sbom
COPY --from=list /pagoda/sbom.json /

FROM ${PYTHON} AS cpu

# torch brings CUDA; Triton compiles a little C for each kernel that it makes.
FROM ${PYTHON} AS cuda
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM ${DEVICE}
LABEL org.opencontainers.image.title="Pagoda shard" org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /pagoda
ENV PATH=/pagoda/.venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=build /pagoda/.venv .venv
COPY --from=build /pagoda/pagoda pagoda
COPY --from=build /pagoda/build build
COPY common common
COPY kernels kernels
COPY launcher launcher
COPY shard shard
RUN python -m compileall -q common kernels launcher pagoda shard
USER 10001:10001
CMD ["python", "-m", "launcher", "ranks", "--help"]
