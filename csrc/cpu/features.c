/* cpu/features.c - see cpu/features.h. */
#include "cpu/features.h"

#include <pthread.h>
#include <stdint.h>
#if BSH_AARCH64
#include <sys/auxv.h>
#endif

#if BSH_X86_64
typedef struct {
  uint32_t eax, ebx, ecx, edx;
} cpuid_leaf;

static cpuid_leaf cpuid(const uint32_t leaf, const uint32_t subleaf) {
  cpuid_leaf r;
  __asm__ volatile("cpuid" : "=a"(r.eax), "=b"(r.ebx), "=c"(r.ecx), "=d"(r.edx) : "a"(leaf), "c"(subleaf));
  return r;
}

/* XCR0: which registers the operating system saves. */
static uint32_t saved_registers(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

static bool bit(const uint32_t word, const int n) { return word >> n & 1; }

static bsh_cpu_features find_features(void) {
  enum { OSXSAVE = 27, XMM_YMM = 0x06, XMM_YMM_ZMM = 0xe6 };
  bsh_cpu_features found = {0};
  if (cpuid(0, 0).eax < 7) return found;
  const cpuid_leaf one = cpuid(1, 0), seven = cpuid(7, 0);
  if (!bit(one.ecx, OSXSAVE) || (saved_registers() & XMM_YMM) != XMM_YMM) return found;
  const uint32_t more = seven.eax >= 1 ? cpuid(7, 1).eax : 0; /* leaf 7 has told how many subleaves it has */
  found.fma = bit(one.ecx, 12), found.f16c = bit(one.ecx, 29), found.avx2 = bit(seven.ebx, 5);
  found.avxvnni = bit(more, 4);
  if ((saved_registers() & XMM_YMM_ZMM) != XMM_YMM_ZMM) return found;
  found.avx512f = bit(seven.ebx, 16), found.avx512dq = bit(seven.ebx, 17);
  found.avx512bw = bit(seven.ebx, 30), found.avx512vl = bit(seven.ebx, 31);
  found.avx512vbmi = bit(seven.ecx, 1), found.avx512vnni = bit(seven.ecx, 11);
  found.avx512bf16 = bit(more, 5);
  return found;
}
#elif BSH_AARCH64
static bsh_cpu_features find_features(void) {
  enum { ASIMDDP = 20, I8MM = 13 }; /* bits of Linux's AT_HWCAP, AT_HWCAP2 */
  return (bsh_cpu_features){
      .dotprod = getauxval(AT_HWCAP) >> ASIMDDP & 1,
      .i8mm = getauxval(AT_HWCAP2) >> I8MM & 1,
  };
}
#else
static bsh_cpu_features find_features(void) { return (bsh_cpu_features){0}; }
#endif

static bsh_cpu_features found_features;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void keep_features(void) { found_features = find_features(); }

const bsh_cpu_features *bsh_cpu_has(void) {
  pthread_once(&once, keep_features);
  return &found_features;
}
