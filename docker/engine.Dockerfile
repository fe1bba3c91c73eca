# The engine: SGLang with the plugin, on the CPU. CUDA comes with the wheels and is not used yet: give the container no GPU.
# Build context: the repository.
FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 UV_COMPILE_BYTECODE=0 UV_NO_CACHE=1 \
    VIRTUAL_ENV=/opt/kvdrive PATH=/opt/kvdrive/bin:$PATH HOME=/cache

COPY requirements/uv.txt requirements/engine.txt /build/requirements/
RUN python -m venv /opt/kvdrive \
    && pip install --no-cache-dir --require-hashes -r /build/requirements/uv.txt \
    && uv pip install --require-hashes -r /build/requirements/engine.txt

COPY . /build
RUN uv pip install --no-deps /build \
    && rm -rf /build \
    && useradd --uid 10001 --no-create-home kvdrive \
    && install -d -o kvdrive -g kvdrive -m 0700 /data \
    && install -d -o kvdrive -g kvdrive /cache

USER kvdrive
ENTRYPOINT ["kvdrive"]
