/* torch/abi.c - finds torch's functions in the libraries that `import torch` has loaded. */
#include "torch/abi.h"

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

#define FIND_OPTIONAL(result, name, parameters)                                                                        \
  if (!find(library, #name, &bsh_torch.name, sizeof bsh_torch.name)) return false;

static bool load_cuda(void *const library) {
  if (library == NULL) return false;
  BSH_TORCH_CUDA_FUNCTIONS(FIND_OPTIONAL)
  return true;
}

/* dlsym looks through the libraries that `library` is linked to as well. */
static bool load_cublas(void *const library) {
  BSH_CUBLAS_FUNCTIONS(FIND_OPTIONAL)
  return true;
}
#undef FIND_OPTIONAL

const char *bsh_torch_load(void) {
  void *const library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  if (library == NULL) return "libtorch_cpu.so is not loaded: import torch before bitshard._C";
#define FIND(result, name, parameters)                                                                                 \
  if (!find(library, #name, &bsh_torch.name, sizeof bsh_torch.name)) return missing(#name);
  BSH_TORCH_CPU_FUNCTIONS(FIND)
#undef FIND
  int32_t (*number)(void);
#define ASK(name)                                                                                                      \
  if (!find(library, "aoti_torch_" #name, &number, sizeof number)) return missing("aoti_torch_" #name);                \
  bsh_torch.name = number();
  BSH_TORCH_NUMBERS(ASK)
#undef ASK
  void *const cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  bsh_torch.has_cuda = load_cuda(cuda);
  bsh_torch.has_cublas = bsh_torch.has_cuda && load_cublas(cuda);
  return NULL;
}
