#!/bin/sh
# Builds and runs the C tests: csrc without Python and torch, under AddressSanitizer and UndefinedBehaviorSanitizer.
#   tests/core/run.sh [build folder] [seed] [rounds]        CC and CFLAGS are respected
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$(mktemp -d)}
seed=${2:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
rounds=${3:-60}
mkdir -p "$build"

flags="-std=gnu11 -g -O1 -Wall -Wextra -Werror -ffp-contract=off -fno-strict-aliasing -pthread -I$root/csrc -I$root/cuda ${CFLAGS-}"
sanitize="-fsanitize=address,undefined -fno-sanitize-recover=all"
# gcc 13's stack for use-after-return checks aligns frames to less than 64 bytes: aligned AVX-512 loads fault on it.
${CC:-gcc} --version | grep -q clang || export ASAN_OPTIONS="detect_stack_use_after_return=0${ASAN_OPTIONS+:$ASAN_OPTIONS}"
isa_flags() { # the same as ISA_FLAGS in setup.py
  case $1 in
    cpu_avx2*) echo "-mavx2 -mfma -mf16c" ;;
    cpu_avx512*) echo "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mfma -mf16c" ;;
  esac
}

sources="status packed cpu cpu_linear cpu_optimizer cpu_scalar cpu_scalar_optimizer cuda_linear cuda_fused cuda_wide cuda_panels cuda_blockwise cuda_optimizer optimizer_step optimizer_ops ops tensor lora cublas plan plan_dequantize plan_gemv_4bit plan_gemv_4bit_simt plan_gemm_4bit_sm90 plan_gemm_4bit_sm90_wide images native native_cpu native_cuda"
case $(uname -m) in x86_64) sources="$sources cpu_avx2 cpu_avx2_optimizer cpu_avx512 cpu_avx512_linear cpu_avx512_optimizer" ;; esac
for name in $sources; do
  # shellcheck disable=SC2046,SC2086
  ${CC:-gcc} $flags $sanitize $(isa_flags "$name") -c "$root/csrc/$name.c" -o "$build/$name.o"
  ar rc "$build/libcore.a" "$build/$name.o" # of an archive, each test links only what it needs
done
for test in test_packed test_cpu test_launch test_ops test_lora test_steps test_native; do
  # shellcheck disable=SC2086
  ${CC:-gcc} $flags $sanitize "$root/tests/core/$test.c" "$build/libcore.a" -lm -o "$build/$test"
  "$build/$test" "$seed" "$rounds"
done
