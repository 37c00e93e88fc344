# bitshard's demo: QLoRA of a real 135 M model in one process, under FSDP1 and under FSDP2.
#
#   docker build -t bitshard .              for CPUs
#   docker run --rm bitshard
#
#   docker build -t bitshard --build-arg BASE=nvidia/cuda:13.0.0-devel-ubuntu24.04 .      for GPUs: nvcc is in that image
#   docker run --rm --gpus all --shm-size 2g bitshard
#
# Not built here: there is no Docker engine. Its RUN line with make, and `make demo QUICK=1`, were run in a clone on
# Debian 12, for CPUs, with nothing on the PATH but that system's programs.
ARG BASE=debian:bookworm
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev make python3 python3-dev python3-venv \
    ca-certificates && rm -rf /var/lib/apt/lists/*
WORKDIR /bitshard
COPY . .
RUN make .venv/.installed
CMD ["make", "demo"]
