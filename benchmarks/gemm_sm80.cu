// gemm_sm80.cu - gemm_4bit_sm80 with each product issued BSH_SM80_PRODUCTS times: a card whose tensor cores are as many
// times slower beside everything else. For gemm_sm80.py, which compiles it.
#include "cuda/gemm/gemm_4bit_sm80.cu"

extern "C" {
int args_bytes() { return (int)sizeof(bsh_gemm_sm80_args); }

int run(int gradient, const bsh_gemm_sm80_args *args, int blocks, cudaStream_t stream) {
  using kernel = void (*)(bsh_gemm_sm80_args);
  static const kernel kernels[2][2] = {{gemm_sm80_bf16_m128, gemm_sm80_dgrad_bf16_m128},
                                       {gemm_sm80_bf16_m256, gemm_sm80_dgrad_bf16_m256}};
  const kernel it = kernels[args->cut.rows == 256][gradient];
  const int bytes = bsh_gemm_sm80_shared_bytes(args->cut.rows);
  if (cudaFuncSetAttribute(it, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return 1;
  if (args->flags && cudaMemsetAsync(args->flags, 0, 4096, stream)) return 2;
  it<<<blocks, bsh_gemm_sm80_threads(args->cut.rows), bytes, stream>>>(*args);
  return (int)cudaGetLastError();
}
}
