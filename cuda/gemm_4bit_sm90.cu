// gemm_4bit_sm90.cu - y[M, N] = x[M, K] W^T + bias for M <= 64 on Hopper's warpgroup tensor-core instructions (sm_90a).
//
// W is the A operand from registers: each warp decodes its 16 rows of an m64 tile, so a code is looked up once for all
// tokens. x is the B operand in shared memory; x_units, a small kernel in front, has put it into the order of k that
// the packed bytes dictate (decode_unit), swizzled, tokens padded with zeros, so that a plain bulk copy brings each
// stage. The product of one unit (64 of K) is made unscaled, then added to the sums times its fp32 scales while the
// next one runs. A block owns 256 rows and a k_splits-th of K; the blocks of a cluster join their sums in a fixed
// order.
#include "decode.cuh"
#include "sums.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define BSH_HAS_WGMMA 1
#endif

namespace bsh {
namespace {

constexpr int WARPS = 8;       // two warpgroups
constexpr int PIECE_UNITS = 4; // a ring slot: 16 rows x 4 units of W

#ifdef BSH_HAS_WGMMA
constexpr int ROW_TILES = 2; // m64 tiles per warpgroup
constexpr int BLOCK_ROWS = 2 * 64 * ROW_TILES;
constexpr int PIECE_BYTES = BSH_ROW_TILE * PIECE_UNITS * 32;
constexpr int SLOTS = 3;       // of the ring of one warp and row tile
constexpr int STAGE_UNITS = 2; // units of x in a stage
constexpr int STAGES = 3;
template <int TOKENS> constexpr int STAGE_BYTES = STAGE_UNITS * TOKENS * BSH_UNIT * 2;

// ---- barriers and copies of the asynchronous proxy ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
               "@!done bra again;\n}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}
// Announces and starts a copy of `bytes` bytes; the barrier completes when they have arrived.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// ---- the warpgroup product ----

// d[64 rows of W x N tokens] (+)= a (16 rows a warp) * x: k16 step at shared address `b` of a tile of 128-byte rows
// with 128-byte swizzle.
template <typename T, int N> struct warpgroup;
#define BSH_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BSH_D16(i) BSH_D4(i), BSH_D4(i + 4), BSH_D4(i + 8), BSH_D4(i + 12)
#define BSH_WARPGROUP(TYPE, PTX, N, D_LIST, D_OPERANDS, A0, A1, A2, A3, B, P)                                          \
  template <> struct warpgroup<TYPE, N> {                                                                              \
    static __device__ __forceinline__ void multiply(float *d, const uint32_t *a, uint64_t b, int accumulate) {         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" D_LIST "}, {%" A0 ",%" A1        \
                   ",%" A2 ",%" A3 "}, %" B ", p, 1, 1, 0;\n}"                                                         \
                   : D_OPERANDS                                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                             \
    }                                                                                                                  \
  };
#define BSH_WARPGROUP_SIZES(TYPE, PTX)                                                                                 \
  BSH_WARPGROUP(TYPE, PTX, 8, "%0,%1,%2,%3", BSH_D4(0), "4", "5", "6", "7", "8", "9")                                  \
  BSH_WARPGROUP(TYPE, PTX, 16, "%0,%1,%2,%3,%4,%5,%6,%7", BSH_D4(0) BSH_COMMA BSH_D4(4), "8", "9", "10", "11", "12",   \
                "13")                                                                                                  \
  BSH_WARPGROUP(TYPE, PTX, 32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", BSH_D16(0), "16", "17", "18",  \
                "19", "20", "21")                                                                                      \
  BSH_WARPGROUP(TYPE, PTX, 64,                                                                                         \
                "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"   \
                "%27,%28,%29,%30,%31",                                                                                 \
                BSH_D16(0) BSH_COMMA BSH_D16(16), "32", "33", "34", "35", "36", "37")
#define BSH_COMMA ,
BSH_WARPGROUP_SIZES(__nv_bfloat16, "bf16")
BSH_WARPGROUP_SIZES(__half, "f16")

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups run; `d` of a finished one may be read after it.
template <int PENDING, int N> __device__ __forceinline__ void products_wait(float *d) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Shared-memory operand of the product: rows of 128 bytes, 8 rows = 1024 bytes apart, 128-byte swizzle.
__device__ __forceinline__ uint64_t operand_b(uint32_t address) {
  return ((uint64_t)1 << 62) | ((uint64_t)(1024 >> 4) << 32) | ((uint64_t)1 << 16) | ((address & 0x3FFFF) >> 4);
}

// ---- the stages of the kernel ----

// Shared memory: [barriers, map, x stages] below 64 KiB, the table at 64 KiB, the rings at 128 KiB (as gemv_4bit.cu).
struct shared_layout {
  char *table, *ring, *x;
  float *map;
  uint32_t full, empty; // addresses of STAGES barriers each
};
template <int TOKENS> __device__ __forceinline__ shared_layout lay_out(char *memory) {
  static_assert(2048 + STAGES * STAGE_BYTES<TOKENS> <= 63 * 1024, "the x stages must end below the table");
  shared_layout s;
  s.table = memory + (65536 - (shared_address(memory) & 65535));
  s.ring = s.table + TABLE_BYTES;
  s.full = shared_address(memory), s.empty = s.full + 8 * STAGES;
  s.map = reinterpret_cast<float *>(memory + 1024);
  s.x = memory + 2048;
  return s;
}

// The rows of one warp: row tile t is 16 rows from row(t) on.
struct place {
  int lane, warp, g, c, split, first_row, begin, end; // pieces of K
  __device__ __forceinline__ int row(int t) const {
    return first_row + ((warp >> 2) * ROW_TILES + t) * 64 + (warp & 3) * BSH_ROW_TILE;
  }
};
__device__ __forceinline__ place find_place(const bsh_fused_args &args) {
  place p;
  p.lane = threadIdx.x & 31, p.warp = threadIdx.x >> 5, p.g = p.lane >> 2, p.c = p.lane & 3;
  p.split = blockIdx.x % args.k_splits, p.first_row = blockIdx.x / args.k_splits * BLOCK_ROWS;
  const int pieces = (args.K / BSH_UNIT + PIECE_UNITS - 1) / PIECE_UNITS;
  p.begin = pieces * p.split / args.k_splits, p.end = pieces * (p.split + 1) / args.k_splits;
  return p;
}

// The packed bytes of a warp's row tile, walking along K. Rows and columns beyond W repeat its last ones.
struct weight_walk {
  const uint8_t *row; // this lane's first row
  uint32_t to, four_rows;
  int chunk, pitch;

  __device__ __forceinline__ void locate(const bsh_fused_args &args, const place &p, const char *ring, int t) {
    const int lane_row = p.lane >> 3;
    pitch = args.K >> 1, four_rows = pitch * 4, chunk = (p.lane & 7) * 16;
    row = args.packed + (int64_t)(min(p.row(t), args.N - BSH_ROW_TILE) + lane_row) * pitch;
    to = shared_address(ring) + (p.warp * ROW_TILES + t) * SLOTS * PIECE_BYTES + lane_row * 128 +
         (chunk ^ (lane_row << 5));
  }
  __device__ __forceinline__ void start(int piece, uint32_t slot) const {
    const uint8_t *from = row + min(piece * 128 + chunk, pitch - 16);
#pragma unroll
    for (int i = 0; i < 4; i++, from += four_rows) copy16(to + slot + i * 512, from);
  }
  __device__ __forceinline__ void prefetch(int piece) const {
    const uint8_t *from = row + min(piece * 128 + chunk, pitch - 16);
    if (chunk == 0)
#pragma unroll
      for (int i = 0; i < 4; i++, from += four_rows) prefetch_l2(from);
  }
};

// Scales of a row tile along K: lane c of a quad holds unit c of the piece, for rows g and g + 8. Fetched a piece
// ahead.
struct scale_walk {
  uint32_t raw[2];
  float second[2];
  uint32_t first[2];

  __device__ __forceinline__ void locate(const bsh_fused_args &args, const place &p, int t) {
    const int row = min(p.row(t), args.N - BSH_ROW_TILE) + p.g;
    first[0] = (uint32_t)row * (args.K / BSH_UNIT), first[1] = first[0] + 8 * (args.K / BSH_UNIT);
  }
  __device__ __forceinline__ void fetch(const bsh_fused_args &args, const place &p, int piece) {
    const uint32_t unit = min(piece * PIECE_UNITS + p.c, args.K / BSH_UNIT - 1);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t block = (first[r] + unit) >> args.block_shift;
      if (args.absmax) {
        raw[r] = __float_as_uint(args.absmax[block]);
      } else {
        raw[r] = args.absmax_code[block];
        second[r] = args.absmax2[block / BSH_NESTED_BLOCKSIZE];
      }
    }
  }
  __device__ __forceinline__ float resolve(const bsh_fused_args &args, const float *map, float offset, int r) const {
    return args.absmax ? __uint_as_float(raw[r]) : nested_scale(map, raw[r], second[r], offset);
  }
};

// Brings stage n of this block's x. Warp 0 calls it when every warp is done with the stage that had its place.
template <int TOKENS>
__device__ __forceinline__ void bring_x(const bsh_fused_args &args, const place &p, const shared_layout &shared,
                                        int n) {
  const int slot = n % STAGES, first = p.begin * (PIECE_UNITS / STAGE_UNITS);
  if (n >= STAGES) barrier_wait(shared.empty + 8 * slot, (n / STAGES - 1) & 1);
  if (p.lane == 0)
    bulk_copy(shared_address(shared.x) + slot * STAGE_BYTES<TOKENS>,
              static_cast<const char *>(args.x) + (int64_t)(first + n) * STAGE_BYTES<TOKENS>, STAGE_BYTES<TOKENS>,
              shared.full + 8 * slot);
  __syncwarp();
}

// sum += scales * part
template <int TOKEN_TILES>
__device__ __forceinline__ void add_scaled(float *sum, const float *part, float upper, float lower) {
#pragma unroll
  for (int i = 0; i < TOKEN_TILES * 4; i++) sum[i] += (i & 2 ? lower : upper) * part[i];
}

template <typename T, int TOKENS>
__device__ __forceinline__ void multiply(const bsh_fused_args &args, const place &p, const shared_layout &shared) {
  constexpr int TOKEN_TILES = TOKENS / 8, SUMS = TOKEN_TILES * 4;
  const float offset = args.absmax ? 0.f : *args.offset;
  const uint32_t lane_base = shared_address(shared.table) + p.lane * 4;
  weight_walk weights[ROW_TILES];
  scale_walk scales[ROW_TILES];
#pragma unroll
  for (int t = 0; t < ROW_TILES; t++) {
    weights[t].locate(args, p, shared.ring, t), scales[t].locate(args, p, t);
    scales[t].fetch(args, p, p.begin);
  }
#pragma unroll
  for (int i = 0; i < SLOTS - 1; i++) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++)
      if (p.begin + i < p.end) weights[t].start(p.begin + i, i * PIECE_BYTES);
    copy_commit();
  }

  const int stages = (p.end - p.begin) * (PIECE_UNITS / STAGE_UNITS);
  if (p.warp == 0)
    for (int n = 0; n < min(STAGES - 1, stages); n++) bring_x<TOKENS>(args, p, shared, n);

  float sum[ROW_TILES][SUMS] = {}, part[ROW_TILES][SUMS];
  const char *const own = shared.ring + p.warp * ROW_TILES * SLOTS * PIECE_BYTES + p.g * 128 + p.c * 8;
  uint32_t slot = 0, fill = (SLOTS - 1) * PIECE_BYTES, stage = 0, parity = 0;
  for (int piece = p.begin; piece < p.end; piece++) {
    float scale[ROW_TILES][2];
    copy_wait<SLOTS - 2>();
    __syncwarp();
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
      if (piece + SLOTS - 1 < p.end) weights[t].start(piece + SLOTS - 1, fill);
      scale[t][0] = scales[t].resolve(args, shared.map, offset, 0);
      scale[t][1] = scales[t].resolve(args, shared.map, offset, 1);
      if (piece + 1 < p.end) scales[t].fetch(args, p, piece + 1);
    }
    copy_commit();
#pragma unroll
    for (int half = 0; half < PIECE_UNITS / STAGE_UNITS; half++) {
      const int ahead = (piece - p.begin) * (PIECE_UNITS / STAGE_UNITS) + half + STAGES - 1;
      if (p.warp == 0 && ahead < stages) bring_x<TOKENS>(args, p, shared, ahead);
      barrier_wait(shared.full + 8 * stage, parity);
      const uint32_t x = shared_address(shared.x) + stage * STAGE_BYTES<TOKENS>;
#pragma unroll
      for (int i = 0; i < STAGE_UNITS * ROW_TILES; i++) {
        const int t = i % ROW_TILES, in_stage = i / ROW_TILES, unit = half * STAGE_UNITS + in_stage;
        const char *const from = own + t * SLOTS * PIECE_BYTES + slot + (((p.g & 3) ^ unit) * 32);
        uint32_t a[4][4];
        decode_unit(a, *reinterpret_cast<const uint2 *>(from), *reinterpret_cast<const uint2 *>(from + PIECE_BYTES / 2),
                    lane_base);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++)
          warpgroup<T, TOKENS>::multiply(part[t], a[k], operand_b(x + in_stage * TOKENS * 128 + k * 32), k > 0);
        products_commit();
        if (i > 0) {
          const int before = (i - 1) % ROW_TILES, unit_before = half * STAGE_UNITS + (i - 1) / ROW_TILES;
          products_wait<1, SUMS>(part[before]);
          add_scaled<TOKEN_TILES>(sum[before], part[before], __shfl_sync(~0u, scale[before][0], unit_before, 4),
                                  __shfl_sync(~0u, scale[before][1], unit_before, 4));
        }
      }
      constexpr int last = ROW_TILES - 1;
      const int unit = half * STAGE_UNITS + STAGE_UNITS - 1;
      products_wait<0, SUMS>(part[last]);
      if (p.lane == 0) barrier_arrive(shared.empty + 8 * stage);
      add_scaled<TOKEN_TILES>(sum[last], part[last], __shfl_sync(~0u, scale[last][0], unit, 4),
                              __shfl_sync(~0u, scale[last][1], unit, 4));
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    fill = slot;
    slot = slot == (SLOTS - 1) * PIECE_BYTES ? 0 : slot + PIECE_BYTES;
  }

#pragma unroll
  for (int t = 0; t < ROW_TILES; t++) {
    const int tile = p.row(t) / BSH_ROW_TILE;
    if (p.row(t) >= args.N) continue;
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
      const int e = (i >> 2) * 128 + p.lane * 4 + (i & 3);
      if (args.k_splits > 1)
        args.partial[((int64_t)tile * args.k_splits + p.split) * (TOKEN_TILES * 128) + e] = sum[t][i];
      else store<T>(args, element(tile, e), sum[t][i]);
    }
  }
}

template <typename T, int TOKENS> __device__ __forceinline__ void gemm(const bsh_fused_args &args) {
  extern __shared__ __align__(1024) char memory[];
  const shared_layout shared = lay_out<TOKENS>(memory);
  const place p = find_place(args);

  // Before the wait: constants, and hints about what will be read.
  for (int t = 0; t < ROW_TILES; t++) {
    weight_walk weights;
    weights.locate(args, p, shared.ring, t);
    for (int piece = p.begin; piece < min(p.begin + 4, p.end); piece++) weights.prefetch(piece);
  }
  build_table<T>(shared.table, args.format);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(shared.full + 8 * i, 1), barrier_init(shared.empty + 8 * i, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  wait_for_earlier_kernels();
  let_later_kernels_start();
  if (args.absmax == nullptr)
    for (int i = threadIdx.x; i < 256; i += blockDim.x) shared.map[i] = args.absmax_map[i];
  __syncthreads();

  multiply<T, TOKENS>(args, p, shared);
  if (args.k_splits > 1) {
    constexpr int TILE = TOKENS * BSH_ROW_TILE;
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
    const int rows = min(BLOCK_ROWS, args.N - p.first_row);
    join_splits<T, TOKENS / 8>(args, p.first_row / BSH_ROW_TILE, p.split * blockDim.x + threadIdx.x,
                               rows / BSH_ROW_TILE * TILE, args.k_splits * blockDim.x);
  }
}
#endif

} // namespace
} // namespace bsh

#ifdef BSH_HAS_WGMMA
#define BSH_GEMM_BODY(T, TOKENS) bsh::gemm<T, TOKENS>(args);
#else
#define BSH_GEMM_BODY(T, TOKENS) __trap(); // the host launches these on sm_90 machine code only
#endif
#define GEMM(T, NAME, TOKENS)                                                                                          \
  extern "C" __global__ void __launch_bounds__(bsh::WARPS * 32, 1) NAME(const __grid_constant__ bsh_fused_args args) { \
    BSH_GEMM_BODY(T, TOKENS)                                                                                           \
  }
GEMM(__nv_bfloat16, gemm_4bit_bf16_m8, 8)
GEMM(__nv_bfloat16, gemm_4bit_bf16_m16, 16)
GEMM(__nv_bfloat16, gemm_4bit_bf16_m32, 32)
GEMM(__nv_bfloat16, gemm_4bit_bf16_m64, 64)
GEMM(__half, gemm_4bit_f16_m8, 8)
GEMM(__half, gemm_4bit_f16_m16, 16)
GEMM(__half, gemm_4bit_f16_m32, 32)
GEMM(__half, gemm_4bit_f16_m64, 64)

// x[M, K] (2-byte elements) -> [units, rounded up to PIECE_UNITS][TOKENS][64] in the layout of one stage: element
// 16c + 4s + 2h + e of a unit goes to 16s + 8h + 2c + e, 16-byte chunk j of token row n to chunk j ^ (n % 8). Missing
// tokens and units are zero. partial: the result. k_warps: TOKENS.
extern "C" __global__ void x_units(const __grid_constant__ bsh_fused_args args) {
  bsh::wait_for_earlier_kernels();
  bsh::let_later_kernels_start();
  const int tokens = args.k_warps, units = args.K / BSH_UNIT;
  const int at = blockIdx.x * blockDim.x + threadIdx.x, chunk = at & 7, token = (at >> 3) % tokens;
  const int unit = (at >> 3) / tokens;
  if (unit >= (units + bsh::PIECE_UNITS - 1) / bsh::PIECE_UNITS * bsh::PIECE_UNITS) return;
  uint32_t pairs[4] = {};
  if (token < args.M && unit < units) {
    const uint32_t *from = reinterpret_cast<const uint32_t *>(static_cast<const uint16_t *>(args.x) + token * args.ldx +
                                                              unit * BSH_UNIT + chunk * 2);
#pragma unroll
    for (int c = 0; c < 4; c++) pairs[c] = from[c * 8];
  }
  reinterpret_cast<uint4 *>(args.partial)[((int64_t)unit * tokens + token) * 8 + (chunk ^ (token & 7))] =
      make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
