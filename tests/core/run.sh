#!/bin/sh
# Builds and runs the C tests: csrc without Python and torch, under AddressSanitizer and UndefinedBehaviorSanitizer.
#   tests/core/run.sh [build folder] [seed] [rounds]        CC, AR, CFLAGS and JOBS (2) are respected
# CC may compile for another machine, as aarch64-linux-gnu-gcc does; RUNNER then runs its programs, as qemu-aarch64 does.
# What is in the build folder is used again where it was made of the same sources, headers, flags and compiler.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cc=${CC:-gcc}
machine=$($cc -dumpmachine) && machine=${machine%%-*}
# -g1: lines for reports. With variables, and at -O1, it takes twice as long to compile and as long to run.
flags="-std=gnu11 -g1 -Og -Wall -Wextra -Werror -ffp-contract=off -fno-strict-aliasing -pthread -I$root/csrc -I$root"
flags="$flags -fsanitize=address,undefined -fno-sanitize-recover=all ${CFLAGS-}"
listed() { # sources of csrc/sources.txt that have the word $1, below csrc, without those of other machines
  awk -v word="$1" -v machine="$machine" '$1 == "flags" && $3 != machine { foreign[$2] }
    /^[^#]/ && $1 != "flags" { found = own = 0
      for (i = 2; i <= NF; i++) { found += $i == word; own += ($i in foreign) }
      if (found && !own) print $1 }' "$root/csrc/sources.txt"
}
isa_flags() { # of the source $1
  awk -v source="$1" '$1 == "flags" { name = $2; $1 = $2 = $3 = ""; flags[name] = $0 }
    $1 == source { for (i = 2; i <= NF; i++) if ($i in flags) print flags[$i] }' "$root/csrc/sources.txt"
}

object() { # name of the object of a source; ar knows objects without their folder
  echo "${1%.c}" | tr / _
}

if [ "${1-}" = --object ]; then # run.sh --object <build folder> <hash of headers and compiler> <source>
  build=$2 below=${4#"$root"/csrc/}
  name=$(object "${below#"$root"/tests/core/}")
  flags="$flags $(isa_flags "$below")"
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

sources=$(listed core)
tests="test_packed test_cpu test_int8 test_launch test_ops test_lora test_steps test_native"
headers=$( ($cc --version && cat "$root"/csrc/*/*.h "$root"/csrc/*/*/*.h "$root"/cuda/*/*.h "$root"/tests/core/*.h) | sha256sum | cut -c 1-16)
for name in $sources; do echo "$root/csrc/$name"; done >"$build/sources"
for name in $tests; do echo "$root/tests/core/$name.c"; done >>"$build/sources"
xargs -P "${JOBS:-2}" -n 1 "$0" --object "$build" "$headers" <"$build/sources"

rm -f "$build/libcore.a"
for name in $sources; do echo "$build/$(object "$name").o"; done | xargs "${AR:-ar}" rc "$build/libcore.a" # each test links only what it needs
for test in $tests; do
  # shellcheck disable=SC2086
  $cc $flags "$build/$test.o" "$build/libcore.a" -lm -o "$build/$test"
  # shellcheck disable=SC2086
  ${RUNNER-} "$build/$test" "$seed" "$rounds"
done
