# weft, for every process of a cluster: `docker build -t weft .`, then `docker run weft serve …`, `weft api …` and so on.
# --build-arg TORCH_INDEX=<one of PyTorch's indexes> chooses its build for a CPU, or for your CUDA; without it, PyPI's (CUDA).
# --build-arg PYTHON_IMAGE=python@sha256:… pins the image below.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/weft
WORKDIR /src
# First what seldom changes, so that a change of weft installs weft only.
RUN /opt/weft/bin/pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch==${TORCH_VERSION}"
COPY pyproject.toml requirements.lock README.md LICENSE ./
# Every file by its hash. torch, above, is by version only: its hashes are those of the index that was chosen.
RUN /opt/weft/bin/pip install --no-deps --require-hashes -r requirements.lock
COPY api api
COPY cli cli
COPY contracts contracts
COPY engine engine
COPY ledger ledger
COPY migrations migrations
COPY store store
COPY telemetry telemetry
COPY tenants tenants
COPY workers workers
# With the setuptools of requirements.lock, not with one fetched for the build.
RUN /opt/weft/bin/pip install --no-deps --no-build-isolation .

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --create-home weft && install -d -o weft -g weft /data
COPY --from=build /opt/weft /opt/weft
# Tokenizers and models come from mounted folders: a process that looks for them elsewhere has a wrong path.
ENV PATH=/opt/weft/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 \
    WEFT_DATA_DIR=/data WEFT_HOST=0.0.0.0 WEFT_METRICS_PORT=9464
USER weft
WORKDIR /home/weft
VOLUME /data
EXPOSE 8642 9464
# On the metrics' port, which every process but beat has; one that loads its base answers there already.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"WEFT_METRICS_PORT\"]}/healthz', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["weft"]
CMD ["--help"]
