#!/bin/sh
# Builds and runs the C tests: csrc without Python and torch, under AddressSanitizer and UndefinedBehaviorSanitizer.
#   tests/core/run.sh [build folder] [seed] [rounds]        CC, CFLAGS and JOBS (2) are respected
# What is in the build folder is used again where it was made of the same sources, headers, flags and compiler.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cc=${CC:-gcc}
# -g1: lines for reports. With variables, and at -O1, it takes twice as long to compile and as long to run.
flags="-std=gnu11 -g1 -Og -Wall -Wextra -Werror -ffp-contract=off -fno-strict-aliasing -pthread -I$root/csrc -I$root/cuda"
flags="$flags -fsanitize=address,undefined -fno-sanitize-recover=all ${CFLAGS-}"
isa_flags() { # the same as ISA_FLAGS in setup.py
  case $1 in
    cpu_avx2*) echo "-mavx2 -mfma -mf16c" ;;
    cpu_avx512*) echo "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mfma -mf16c" ;;
  esac
}

if [ "${1-}" = --object ]; then # run.sh --object <build folder> <hash of headers and compiler> <source>
  build=$2 name=$(basename "$4" .c)
  flags="$flags $(isa_flags "$name")"
  made_of=$( (echo "$3 $flags" && cat "$4") | sha256sum | cut -c 1-16)
  if [ ! -e "$build/$name-$made_of.o" ]; then
    # shellcheck disable=SC2086
    $cc $flags -c "$4" -o "$build/$name-$$.part"
    mv "$build/$name-$$.part" "$build/$name-$made_of.o"
  fi
  ln -sf "$name-$made_of.o" "$build/$name.o"
  exit
fi

build=${1:-$(mktemp -d)}
seed=${2:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
rounds=${3:-60}
mkdir -p "$build"
# gcc 13's stack for use-after-return checks aligns frames to less than 64 bytes: aligned AVX-512 loads fault on it.
$cc --version | grep -q clang || export ASAN_OPTIONS="detect_stack_use_after_return=0${ASAN_OPTIONS+:$ASAN_OPTIONS}"

isa=""
case $(uname -m) in x86_64) isa="cpu_avx512_optimizer cpu_avx512_linear cpu_avx2_optimizer cpu_avx512 cpu_avx2" ;; esac
sources="$isa cpu_scalar_optimizer cpu_scalar cpu_optimizer cpu_linear cpu status packed cuda_linear cuda_fused cuda_wide cuda_panels cuda_blockwise cuda_optimizer optimizer_step optimizer_ops ops tensor lora cublas plan plan_dequantize plan_gemv_4bit plan_gemv_4bit_simt plan_gemm_4bit_sm90 plan_gemm_4bit_sm90_wide images native native_cpu native_cuda"
tests="test_packed test_cpu test_launch test_ops test_lora test_steps test_native"
headers=$( ($cc --version && cat "$root"/csrc/*.h "$root"/cuda/*.h "$root"/tests/core/*.h) | sha256sum | cut -c 1-16)
for name in $sources; do echo "$root/csrc/$name.c"; done >"$build/sources"
for name in $tests; do echo "$root/tests/core/$name.c"; done >>"$build/sources"
xargs -P "${JOBS:-2}" -n 1 "$0" --object "$build" "$headers" <"$build/sources"

rm -f "$build/libcore.a"
for name in $sources; do echo "$build/$name.o"; done | xargs ar rc "$build/libcore.a" # each test links only what it needs
for test in $tests; do
  # shellcheck disable=SC2086
  $cc $flags "$build/$test.o" "$build/libcore.a" -lm -o "$build/$test"
  "$build/$test" "$seed" "$rounds"
done
