/* torch_abi.c - finds torch's functions in the libraries that `import torch` has loaded. */
#include "torch_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

bsh_torch_api bsh_torch;

static char trouble[160];

static const char *missing(const char *const name) {
  snprintf(trouble, sizeof trouble, "libtorch_cpu.so has no %s: bitshard needs torch >= 2.10", name);
  return trouble;
}

/* dlsym returns an object pointer; memcpy turns it into a function pointer without undefined behaviour. */
static bool find(void *const library, const char *const name, void *const slot, const size_t size) {
  void *const symbol = dlsym(library, name);
  memcpy(slot, &symbol, size);
  return symbol != NULL;
}

static bool load_cuda(void) {
  void *const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  if (library == NULL) return false;
#define FIND(result, name, parameters)                                                                                 \
  if (!find(library, #name, &bsh_torch.name, sizeof bsh_torch.name)) return false;
  BSH_TORCH_CUDA_FUNCTIONS(FIND)
#undef FIND
  return true;
}

const char *bsh_torch_load(void) {
  void *const library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  if (library == NULL) return "libtorch_cpu.so is not loaded: import torch before bitshard._C";
#define FIND(result, name, parameters)                                                                                 \
  if (!find(library, #name, &bsh_torch.name, sizeof bsh_torch.name)) return missing(#name);
  BSH_TORCH_CPU_FUNCTIONS(FIND)
#undef FIND
  bsh_torch.has_cuda = load_cuda();
  return NULL;
}
