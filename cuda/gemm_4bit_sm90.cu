// gemm_4bit_sm90.cu - y[M, N] = x[M, K] W^T + bias for M <= 64 on Hopper's warpgroup tensor-core instructions (sm_90a).
//
// W is the A operand from registers: each warp decodes its 16 rows of an m64 tile, so a code is looked up once for all
// tokens. x is the B operand in shared memory, in the order of k that the packed bytes dictate (decode_unit), swizzled,
// tokens padded with zeros. x_units, a small kernel in front, has put it so, and a plain bulk copy brings each stage;
// or (OWN_X) four more warps do it, which saves the kernel but costs shared-memory cycles. The product of one unit (64
// of K) is made unscaled, then added to the sums times its fp32 scales.
//
// Work split: W is cut into row blocks, one row tile a warp, and these into pieces of 4 units of K; the blocks of
// threads share all pieces, in order, evenly. Where several own parts of one row block, the owner of its last piece
// waits until the others have left their sums in args.partial and adds all in the order of K: equal inputs give equal
// bits. A block of threads begins with its last row block, so that what others wait for is left early and what it waits
// for is needed late. It waits for blocks of lower index only. There are no more blocks than multiprocessors, so all
// run at once unless other work holds some; and blocks start in the order of their index, so that even then those it
// waits for have started.
//
// K_PARTS = 2: half of the warps take the first half of K, the others the second, so that row blocks are half as high.
// Each block of threads then has one share of one row block, and the two warps of a row tile finish half of the tokens
// each. The host also chooses how many row tiles a row block has, so that all multiprocessors get one; the warps left
// over decode nothing.
#include "gemm_4bit_sm90.h"

#include "decode.cuh"
#include "sums.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define BSH_HAS_WGMMA 1
#endif

namespace bsh {
namespace {

#ifdef BSH_HAS_WGMMA
constexpr int PIECE_BYTES = BSH_PIECE_BYTES, SLOTS = BSH_GEMM_SLOTS, STAGES = BSH_GEMM_STAGES;
template <int TOKENS, int K_PARTS> constexpr bool AHEAD = bsh_gemm_ahead(TOKENS, K_PARTS);
template <int TOKENS, int K_PARTS> constexpr int WARPS = bsh_gemm_warps(TOKENS, K_PARTS);
template <int TOKENS, int K_PARTS> constexpr int ROW_WARPS = WARPS<TOKENS, K_PARTS> / K_PARTS;
template <int TOKENS, int K_PARTS>
constexpr int OWN_TOKENS = TOKENS / K_PARTS; // whose sums a warp completes and stores
template <int TOKENS, int K_PARTS> constexpr int STAGE_UNITS = bsh_gemm_stage_units(TOKENS, K_PARTS); // of each part
template <int TOKENS, int K_PARTS> constexpr int PART_BYTES = bsh_gemm_part_bytes(TOKENS, K_PARTS);
template <int TOKENS, int K_PARTS> constexpr int STAGE_BYTES = bsh_gemm_stage_bytes(TOKENS, K_PARTS);
template <int TOKENS, int K_PARTS> constexpr bool OWN_X = bsh_gemm_own_x(TOKENS, K_PARTS);

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
// Announces `bytes` bytes; the barrier completes when they have arrived. Only where `wanted`, without a branch: behind
// one that lanes may take differently, the compiler gives up uniform registers, in which the products want addresses.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes, bool wanted) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
               "@p mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n}" ::"r"(barrier),
               "r"(bytes), "r"((uint32_t)wanted)
               : "memory");
}
__device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                          bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
      "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "r"((uint32_t)wanted)
      : "memory");
}

// ---- the warpgroup product ----

// The descriptor of x in shared memory: rows of 128 bytes with 128-byte swizzle, groups of 8 rows 1024 bytes apart.
constexpr uint32_t OPERAND_B_HIGH = 1u << 30 | 1024 >> 4;
__device__ __forceinline__ uint32_t operand_b(uint32_t address) { return 1u << 16 | (address & 0x3FFFF) >> 4; }

// d[64 rows of W x N tokens] (+)= a (16 rows a warp) * x. b: low word of the descriptor of the x operand.
template <typename T, int N> struct warpgroup;
#define BSH_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BSH_D16(i) BSH_D4(i), BSH_D4(i + 4), BSH_D4(i + 8), BSH_D4(i + 12)
#define BSH_WARPGROUP(TYPE, PTX, N, D_LIST, D_OPERANDS, A0, A1, A2, A3, B, P, B_HIGH)                                  \
  template <> struct warpgroup<TYPE, N> {                                                                              \
    static __device__ __forceinline__ void multiply(float *d, const uint32_t *a, uint32_t b, int accumulate) {         \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" P ", 0;\nmov.b64 b, {%" B ", %" B_HIGH "};\n"    \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" D_LIST "}, {%" A0 ",%" A1        \
                   ",%" A2 ",%" A3 "}, b, p, 1, 1, 0;\n}"                                                              \
                   : D_OPERANDS                                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(OPERAND_B_HIGH));        \
    }                                                                                                                  \
  };
#define BSH_WARPGROUP_SIZES(TYPE, PTX)                                                                                 \
  BSH_WARPGROUP(TYPE, PTX, 16, "%0,%1,%2,%3,%4,%5,%6,%7", BSH_D4(0) BSH_COMMA BSH_D4(4), "8", "9", "10", "11", "12",   \
                "13", "14")                                                                                            \
  BSH_WARPGROUP(TYPE, PTX, 32, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", BSH_D16(0), "16", "17", "18",  \
                "19", "20", "21", "22")                                                                                \
  BSH_WARPGROUP(TYPE, PTX, 64,                                                                                         \
                "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"   \
                "%27,%28,%29,%30,%31",                                                                                 \
                BSH_D16(0) BSH_COMMA BSH_D16(16), "32", "33", "34", "35", "36", "37", "38")
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

// ---- the stages of the kernel ----

// Shared memory: [barriers, map, x stages] below 64 KiB, the table at 64 KiB, the rings at 128 KiB (as gemv_4bit.cu).
struct shared_layout {
  char *table, *ring, *x;
  float *map;
  uint32_t full, empty; // addresses of STAGES barriers each
};
template <int TOKENS, int K_PARTS> __device__ __forceinline__ shared_layout lay_out(char *memory) {
  static_assert(BSH_GEMM_X_AT + STAGES * STAGE_BYTES<TOKENS, K_PARTS> <= 63 * 1024, "x must end below the table");
  shared_layout s;
  s.table = wide_table(memory);
  s.ring = wide_ring(s.table);
  s.full = shared_address(memory), s.empty = s.full + 8 * STAGES;
  s.map = reinterpret_cast<float *>(memory + BSH_GEMM_MAP_AT);
  s.x = memory + BSH_GEMM_X_AT;
  return s;
}

// Pieces [piece, end) of a row block.
struct stretch {
  int block, piece, end;
};

// How pieces are shared out: block of threads i = blockIdx.x takes [begin(i), begin(i + 1)) of all pieces of all row
// blocks (K_PARTS = 1) or of those of row block blockIdx.y (2). The host has divided: `each`, and `more` to spread. It
// keeps all pieces * gridDim.x below 2^31.
template <int K_PARTS> struct share {
  int pieces; // of a row block, of one part of K
  int each, more, begin, count;

  __device__ __forceinline__ explicit share(const bsh_fused_args &args) {
    pieces = (args.K / BSH_UNIT + BSH_PIECE_UNITS * K_PARTS - 1) / (BSH_PIECE_UNITS * K_PARTS);
    each = args.cut.block_pieces, more = args.cut.more_pieces;
    begin = begin_of(blockIdx.x), count = begin_of(blockIdx.x + 1) - begin;
  }
  __device__ __forceinline__ int begin_of(uint32_t i) const { return i * each + (more > 0 ? i * more / gridDim.x : 0); }
  __device__ __forceinline__ stretch first() const {
    if (K_PARTS == 2) return {(int)blockIdx.y, begin, begin + count};
    const int last = begin + count - 1, block = last / pieces;
    return {block, max(begin - block * pieces, 0), last - block * pieces + 1};
  }
  __device__ __forceinline__ stretch after(stretch at) const { // may be none of this block's, but is one of W's
    const int block = max(at.block - 1, 0);
    return {block, max(begin - block * pieces, 0), pieces};
  }
  // K_PARTS = 1: blocks of threads that own earlier pieces of a row block.
  __device__ __forceinline__ int earlier_owners(int block) const {
    const uint32_t at = block * pieces;
    return blockIdx.x - ((at + 1) * gridDim.x - 1) / (each * gridDim.x + more);
  }
};

// The row tiles of a row block and the one of this warp among them; a warp left over has none.
template <int TOKENS, int K_PARTS> struct row_tiles {
  int count, own;
  bool active;
  __device__ __forceinline__ explicit row_tiles(const bsh_fused_args &args) {
    constexpr int ROW_WARPS = bsh::ROW_WARPS<TOKENS, K_PARTS>;
    count = K_PARTS == 2 ? args.cut.row_tiles : ROW_WARPS;
    own = (threadIdx.x >> 5) % ROW_WARPS, active = K_PARTS == 1 || own < count;
  }
  __device__ __forceinline__ int tile(int block) const { return block * count + own; }
};

// The packed bytes of a warp's 16 rows, walking through the pieces. Rows and columns beyond W repeat its last ones.
struct weight_walk {
  const uint8_t *row; // this lane's first row in the row block of the next piece
  uint32_t to, chunk, last_chunk, four_rows;

  __device__ __forceinline__ weight_walk(const bsh_fused_args &args, const char *ring) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, lane_row = lane >> 3;
    chunk = keep((lane & 7) * 16), last_chunk = (args.K >> 1) - 16, four_rows = args.K * 2;
    to = keep(shared_address(ring) + warp * SLOTS * PIECE_BYTES + lane_row * 128 + (chunk ^ (lane_row << 5)));
  }
  __device__ __forceinline__ void enter(const bsh_fused_args &args, int tile) {
    const int lane_row = (threadIdx.x & 31) >> 3;
    const int first = min(tile * BSH_ROW_TILE, args.N - BSH_ROW_TILE) + lane_row;
    row = keep(args.packed + (int64_t)first * (args.K >> 1));
  }
  __device__ __forceinline__ void start(int piece, uint32_t slot) const {
    const uint8_t *from = row + min(piece * 128 + chunk, last_chunk);
#pragma unroll
    for (int i = 0; i < 4; i++, from += four_rows) copy16(to + slot + i * 512, from);
  }
  __device__ __forceinline__ void prefetch(int piece) const {
    const uint8_t *from = row + min(piece * 128 + chunk, last_chunk);
    if (chunk == 0)
#pragma unroll
      for (int i = 0; i < 4; i++, from += four_rows) prefetch_l2(from);
  }
};

// Scales of a warp's 16 rows. A group is 4 pieces (ANY_SCALES: 1); lane c of a quad holds, for rows g and g + 8, the 4
// units of piece c of the group (ANY_SCALES: unit c of the piece). Fetched a group ahead and kept raw until used.
// NESTED_64: nested, one scale a unit, units of a row a multiple of 4.
enum scale_kind { NESTED_64, ANY_SCALES };
template <scale_kind KIND> struct scale_walk {
  static constexpr int GROUP = KIND == NESTED_64 ? 4 : 1; // pieces
  static constexpr int PER_LANE = KIND == NESTED_64 ? 4 : 1;
  uint32_t raw[2]; // 4 codes; ANY_SCALES: 1 code or the fp32 bits of a plain scale
  float second[2];
  float scale[2][PER_LANE];

  // Block of this lane's first scale, rows g (r = 0) and g + 8 of the tile.
  static __device__ __forceinline__ uint32_t block(const bsh_fused_args &args, int tile, int piece, int r) {
    const int units = args.K / BSH_UNIT, lane = threadIdx.x & 31;
    const int row = min(tile * BSH_ROW_TILE, args.N - BSH_ROW_TILE) + (lane >> 2);
    const int first = piece / GROUP * (GROUP * BSH_PIECE_UNITS) + (lane & 3) * PER_LANE;
    const uint32_t unit = (uint32_t)(row + r * 8) * units + min(first, units - PER_LANE);
    return KIND == NESTED_64 ? unit : unit >> args.block_shift;
  }
  __device__ __forceinline__ void fetch(const bsh_fused_args &args, int tile, int piece) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t block = scale_walk::block(args, tile, piece, r);
      if (KIND == NESTED_64) {
        raw[r] = *reinterpret_cast<const uint32_t *>(args.absmax_code + block);
        second[r] = args.absmax2[block / BSH_NESTED_BLOCKSIZE];
      } else if (args.absmax) {
        raw[r] = __float_as_uint(args.absmax[block]);
      } else {
        raw[r] = args.absmax_code[block];
        second[r] = args.absmax2[block / BSH_NESTED_BLOCKSIZE];
      }
    }
  }
  __device__ __forceinline__ void resolve(const bsh_fused_args &args, const float *map, float offset) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (KIND == NESTED_64) scale[r][i] = nested_scale(map, raw[r] >> (8 * i) & 255, second[r], offset);
        else scale[r][i] = args.absmax ? __uint_as_float(raw[r]) : nested_scale(map, raw[r], second[r], offset);
  }
  // Scale of `unit` of the piece, rows g (r = 0) and g + 8.
  __device__ __forceinline__ float of(int r, int piece, int unit) const {
    return KIND == NESTED_64 ? __shfl_sync(~0u, scale[r][unit % PER_LANE], piece % GROUP, 4)
                             : __shfl_sync(~0u, scale[r][0], unit, 4);
  }
};

// Brings the next stage of x into its place; warp 0 calls it once every warp is done with what was there.
template <int TOKENS, int K_PARTS> struct x_stream {
  static constexpr int STEPS = BSH_PIECE_UNITS / STAGE_UNITS<TOKENS, K_PARTS>; // stages of a piece
  const share<K_PARTS> &work;
  stretch at; // of the next stage
  const char *from;
  uint32_t to, full, empty, parity;
  int slot, step, left;
  uint32_t part_bytes; // from one part of K to the next in x
  bool refill;

  __device__ __forceinline__ x_stream(const bsh_fused_args &args, const shared_layout &shared,
                                      const share<K_PARTS> &work)
      : work(work), at(work.first()) {
    from = static_cast<const char *>(args.x), to = shared_address(shared.x), full = shared.full, empty = shared.empty;
    slot = 0, parity = 1, refill = false, step = 0, left = work.count * STEPS;
    part_bytes = work.pieces * (BSH_PIECE_UNITS * TOKENS * BSH_UNIT * 2);
  }
  __device__ __forceinline__ void bring() {
    if (left == 0) return;
    if (refill) barrier_wait(empty + 8 * slot, parity);
    constexpr int BYTES = PART_BYTES<TOKENS, K_PARTS>;
    const bool first_lane = (threadIdx.x & 31) == 0;
    barrier_expect(full + 8 * slot, BYTES * K_PARTS, first_lane);
#pragma unroll
    for (int k = 0; k < K_PARTS; k++)
      bulk_copy(to + (slot * K_PARTS + k) * BYTES, from + (int64_t)(at.piece * STEPS + step) * BYTES + k * part_bytes,
                BYTES, full + 8 * slot, first_lane);
    left--;
    if (++step == STEPS) {
      step = 0, at.piece++;
      if (K_PARTS == 1 && at.piece == at.end) at = work.after(at);
    }
    if (++slot == STAGES) slot = 0, parity ^= 1, refill = true;
  }
};

// OWN_X: how the last warps put x in order. Element 16c + 4s + 2h + e of a unit goes to 16s + 8h + 2c + e, 16-byte
// chunk j of token row n to chunk j ^ (n % 8). Thread t takes chunk t % 8 of the token rows t / 8 + 16 i of a stage.
template <int TOKENS, int K_PARTS> struct x_order {
  static constexpr int UNITS = STAGE_UNITS<TOKENS, K_PARTS>, GROUPS = TOKENS / 16, ROWS_BYTES = 16 * 128;
  static constexpr int LOADS = K_PARTS * UNITS * GROUPS;
  const uint16_t *from[GROUPS];
  uint32_t to[4], full, empty, parity; // to: of the four pairs of 16 bytes
  int units, part_units, rows, slot;   // rows: of x, counted from this thread's first one
  bool refill;

  __device__ __forceinline__ x_order(const bsh_fused_args &args, const shared_layout &shared, int pieces) {
    const int t = threadIdx.x % (BSH_GEMM_X_WARPS * 32), chunk = t & 7, row = t >> 3;
    full = shared.full, empty = shared.empty, parity = 1, slot = 0, refill = false;
    units = args.K / BSH_UNIT, part_units = pieces * BSH_PIECE_UNITS, rows = args.M - row;
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
      from[i] = static_cast<const uint16_t *>(args.x) + min(i * 16 + row, args.M - 1) * args.ldx + chunk * 8;
#pragma unroll
    for (int i = 0; i < 4; i++)
      to[i] = shared_address(shared.x) + row * 128 + (chunk >> 1) * 4 + ((((chunk & 1) * 4 + i) ^ (row & 7)) << 4);
  }
  __device__ __forceinline__ void load(uint4 *v, int stage) const {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int unit = i / (GROUPS * UNITS) * part_units + stage * UNITS + i / GROUPS % UNITS;
      v[i] = make_uint4(0, 0, 0, 0);
      if (unit < units && i % GROUPS * 16 < rows)
        v[i] = *reinterpret_cast<const uint4 *>(from[i % GROUPS] + unit * BSH_UNIT);
    }
  }
  __device__ __forceinline__ void store(const uint4 *v) {
    if (refill) barrier_wait(empty + 8 * slot, parity);
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const uint32_t at = slot * STAGE_BYTES<TOKENS, K_PARTS> + i * ROWS_BYTES;
      store_shared(to[0] + at, v[i].x), store_shared(to[1] + at, v[i].y);
      store_shared(to[2] + at, v[i].z), store_shared(to[3] + at, v[i].w);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // the products read through the asynchronous proxy
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(full + 8 * slot);
    if (++slot == STAGES) slot = 0, parity ^= 1, refill = true;
  }
  // Stages [first, end), the next one asked for before this one is written.
  __device__ __forceinline__ void run(int first, int end) {
    uint4 v[2][LOADS];
    load(v[0], first);
    for (int stage = first; stage < end; stage += 2) {
      if (stage + 1 < end) load(v[1], stage + 1);
      store(v[0]);
      if (stage + 1 == end) return;
      if (stage + 2 < end) load(v[0], stage + 2);
      store(v[1]);
    }
  }
};

// Stores a warp's tokens of a tile. In the loop over row blocks, shuffles would cost uniform registers
// (barrier_expect).
template <typename T, int TOKENS, int K_PARTS>
__device__ __forceinline__ void store(const bsh_fused_args &args, int tile, int token, const float *sum) {
  constexpr int TILES = OWN_TOKENS<TOKENS, K_PARTS> / 8;
  if (K_PARTS == 2) store_tile_pairs<T, TILES>(args, tile, token, sum);
  else store_tile<T, TILES>(args, tile, token, sum);
}

// Sums of a row block that several blocks of threads own: where those of this warp's tokens and tile lie.
template <int TOKENS, int K_PARTS> struct joint {
  static constexpr int TILE = TOKENS * BSH_ROW_TILE, OWN = OWN_TOKENS<TOKENS, K_PARTS>;
  int tile, token;
  float4 *sums;      // this lane's, of the first owner; TILE / 4 from one owner to the next
  uint32_t *counter; // of owners that have left their sums

  __device__ __forceinline__ joint(const bsh_fused_args &args, int tile, int token) : tile(tile), token(token) {
    sums = reinterpret_cast<float4 *>(args.partial) + (int64_t)tile * args.cut.k_splits * (TILE / 4) +
           token * (BSH_ROW_TILE / 4) + (threadIdx.x & 31);
    counter = args.counters + tile * K_PARTS + token / OWN;
  }
  // Leaves the sums of owner `owner`; how many had left theirs before.
  __device__ __forceinline__ uint32_t leave(const float *sum, int owner) const {
    float4 *const own = sums + owner * (TILE / 4);
#pragma unroll
    for (int n = 0; n < OWN / 8; n++)
      own[n * 32] = make_float4(sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3]);
    __syncwarp();
    uint32_t before = 0;
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\n@p atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n}"
                 : "+r"(before)
                 : "l"(counter), "r"(threadIdx.x & 31)
                 : "memory");
    return before;
  }
  __device__ __forceinline__ void wait_for(int owners) const {
    uint32_t arrived;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    while (!__all_sync(~0u, arrived >= (uint32_t)owners));
  }
  // Adds the sums of the first `owners` owners and then `last`, if given, in the order of K, and stores the result.
  template <typename T>
  __device__ __forceinline__ void join(const bsh_fused_args &args, int owners, const float *last) const {
    constexpr int BATCH = 128 / OWN; // owners whose loads are on their way together
    float total[OWN / 2] = {};
    for (int k0 = 0; k0 < owners; k0 += BATCH) {
      float4 v[BATCH][OWN / 8];
#pragma unroll
      for (int k = 0; k < BATCH; k++)
#pragma unroll
        for (int n = 0; n < OWN / 8; n++)
          v[k][n] = k0 + k < owners ? __ldcg(sums + (k0 + k) * (TILE / 4) + n * 32) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int k = 0; k < BATCH; k++)
#pragma unroll
        for (int n = 0; n < OWN / 8; n++) {
          total[4 * n] += v[k][n].x, total[4 * n + 1] += v[k][n].y;
          total[4 * n + 2] += v[k][n].z, total[4 * n + 3] += v[k][n].w;
        }
    }
    if (last)
#pragma unroll
      for (int i = 0; i < OWN / 2; i++) total[i] += last[i];
    store<T, TOKENS, K_PARTS>(args, tile, token, total);
  }
};

// What becomes of a warp's sums of the pieces [from, at.end): stored, left for others, or joined with what others left.
// The votes tell the compiler that all lanes agree.
template <typename T, int TOKENS>
__device__ __forceinline__ void finish(const bsh_fused_args &args, const share<1> &work, stretch at, int from, int tile,
                                       const float *sum) {
  const bool exists = tile * BSH_ROW_TILE < args.N;
  const bool leaves = __any_sync(~0u, at.end < work.pieces), joins = __any_sync(~0u, from > 0);
  if (leaves || joins) {
    const joint<TOKENS, 1> others(args, tile, 0);
    const int earlier = work.earlier_owners(at.block);
    if (__any_sync(~0u, exists && leaves)) {
      others.leave(sum, earlier);
    } else if (__any_sync(~0u, exists)) {
      others.wait_for(earlier);
      others.template join<T>(args, earlier, sum);
    }
  } else if (exists) {
    store<T, TOKENS, 1>(args, tile, 0, sum);
  }
}

// The same for two parts of K. The owners of a row block reach its end together: the last one joins, so that nobody
// waits and the work is spread.
template <typename T, int TOKENS>
__device__ __forceinline__ void finish_part(const bsh_fused_args &args, const row_tiles<TOKENS, 2> &rows,
                                            const float *sum) {
  const int tile = rows.tile(blockIdx.y), token = threadIdx.x / 32 < ROW_WARPS<TOKENS, 2> ? 0 : OWN_TOKENS<TOKENS, 2>;
  if (!__any_sync(~0u, rows.active && tile * BSH_ROW_TILE < args.N)) return;
  if (gridDim.x == 1) return store<T, TOKENS, 2>(args, tile, token, sum);
  const joint<TOKENS, 2> others(args, tile, token);
  const uint32_t before = others.leave(sum, blockIdx.x);
  __syncwarp();
  if (__any_sync(~0u, before == gridDim.x - 1)) others.template join<T>(args, gridDim.x, nullptr);
}

// A barrier of the warps that multiply.
template <int TOKENS, int K_PARTS> __device__ __forceinline__ void products_meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(WARPS<TOKENS, K_PARTS> * 32) : "memory");
}

// Two parts of K: the two warps of a row tile exchange halves of their sums through their rings, which they are done
// with. Then the first OWN_TOKENS / 2 sums are complete: of the first half of the tokens in the first part's warp, of
// the second half in the other's.
template <int TOKENS> __device__ __forceinline__ void add_parts(float *sum, char *ring) {
  constexpr int ROW_WARPS = bsh::ROW_WARPS<TOKENS, 2>, HALF = TOKENS / 4, RING = SLOTS * PIECE_BYTES / 16;
  static_assert(HALF * 32 * sizeof(float) <= RING * 16, "half of the sums must fit in a ring");
  const int warp = threadIdx.x >> 5;
  const bool second = warp >= ROW_WARPS;
  float4 *const given = reinterpret_cast<float4 *>(ring) + warp * RING + (threadIdx.x & 31);
  const float4 *const taken = given + (second ? -ROW_WARPS : ROW_WARPS) * RING;
  copy_wait<0>();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < HALF; i += 4) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      v[j] = second ? sum[i + j] : sum[HALF + i + j];
      sum[i + j] = second ? sum[HALF + i + j] : sum[i + j];
    }
    given[i * 8] = make_float4(v[0], v[1], v[2], v[3]);
  }
  asm volatile("bar.sync %0, 64;" ::"r"(2 + warp % ROW_WARPS) : "memory"); // barrier 1 is products_meet's
#pragma unroll
  for (int i = 0; i < HALF; i += 4) {
    const float4 v = taken[i * 8];
    sum[i] += v.x, sum[i + 1] += v.y, sum[i + 2] += v.z, sum[i + 3] += v.w;
  }
}

template <typename T, int TOKENS, int K_PARTS, scale_kind KIND>
__device__ __forceinline__ void gemm(const bsh_fused_args &args) {
  constexpr int SUMS = TOKENS / 2, UNITS = STAGE_UNITS<TOKENS, K_PARTS>, WARPS = bsh::WARPS<TOKENS, K_PARTS>;
  constexpr int ROW_WARPS = bsh::ROW_WARPS<TOKENS, K_PARTS>;
  constexpr bool AHEAD = bsh::AHEAD<TOKENS, K_PARTS>, OWN_X = bsh::OWN_X<TOKENS, K_PARTS>;
  extern __shared__ __align__(1024) char memory[];
  const shared_layout shared = lay_out<TOKENS, K_PARTS>(memory);
  // The shuffle tells the compiler that all lanes agree.
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), g = lane >> 2, c = lane & 3;
  const row_tiles<TOKENS, K_PARTS> rows(args);
  const share<K_PARTS> work(args);
  const int base = K_PARTS == 1 ? 0 : warp / ROW_WARPS * work.pieces; // this warp's part of K: its first piece
  const stretch start = work.first();

  // Before the wait: constants, and hints about what will be read.
  weight_walk weights(args, shared.ring);
  weights.enter(args, rows.tile(start.block));
  if (warp < WARPS)
    for (int i = 0; i < min(work.count, OWN_X ? 2 : 4); i++)
      weights.prefetch(base + min(start.piece + i, work.pieces - 1));
  build_table<T>(shared.table, args.format);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++)
      barrier_init(shared.full + 8 * i, OWN_X ? BSH_GEMM_X_WARPS : 1), barrier_init(shared.empty + 8 * i, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (OWN_X) __syncthreads();
  wait_for_earlier_kernels();
  let_later_kernels_start();
  if constexpr (OWN_X)
    if (warp >= WARPS) {
      constexpr int STEPS = BSH_PIECE_UNITS / UNITS; // stages of a piece
      return x_order<TOKENS, K_PARTS>(args, shared, work.pieces).run(start.piece * STEPS, start.end * STEPS);
    }

  stretch ahead = start; // the piece that the ring loads next
  auto load_next = [&](bool there_is, uint32_t to_slot) {
    if (there_is && rows.active) weights.start(base + ahead.piece, to_slot);
    copy_commit();
    if (++ahead.piece < ahead.end || K_PARTS == 2) return; // two parts of K: one row block
    ahead = work.after(ahead);
    weights.enter(args, rows.tile(ahead.block));
  };
#pragma unroll
  for (int i = 0; i < SLOTS - 1; i++) load_next(i < work.count, i * PIECE_BYTES);
  const bool brings_x = !OWN_X && __any_sync(~0u, threadIdx.x < 32); // the vote: all lanes agree
  x_stream<TOKENS, K_PARTS> x_in(args, shared, work);
  if (brings_x)
    for (int i = 0; i < STAGES - 1; i++) x_in.bring();
  const float map_value = args.absmax ? 0.f : args.absmax_map[threadIdx.x & 255];
  const float offset = args.absmax ? 0.f : *args.offset;
  scale_walk<KIND> scales;
  scales.fetch(args, rows.tile(start.block), base + start.piece);
  if (threadIdx.x < 256) shared.map[threadIdx.x] = map_value;
  products_meet<TOKENS, K_PARTS>();

  const uint32_t lane_base = keep(shared_address(shared.table) + lane * 4);
  const uint32_t own = keep(shared_address(shared.ring) + warp * SLOTS * PIECE_BYTES + g * 128 + (g & 3) * 32 + c * 8);
  const uint32_t x_base =
      operand_b(shared_address(shared.x) + (K_PARTS == 1 ? 0 : warp / ROW_WARPS * PART_BYTES<TOKENS, K_PARTS>));
  uint32_t a[AHEAD ? 2 : 1][4][4] = {};
  float sum[SUMS] = {}, part[SUMS];
  uint32_t slot = 0, fill = (SLOTS - 1) * PIECE_BYTES, stage = 0, parity = 0;
  int left = work.count;
  for (stretch at = start; left > 0; at = work.after(at)) {
    const int from = at.piece;
    for (; at.piece < at.end; at.piece++, left--) {
      copy_wait<SLOTS - 2>();
      __syncwarp();
      load_next(left >= SLOTS, fill);
      const int piece = base + at.piece;
      if (at.piece == from || piece % scales.GROUP == 0) {
        scales.resolve(args, shared.map, offset);
        stretch next = {at.block, (piece / scales.GROUP + 1) * scales.GROUP, 0};
        if (K_PARTS == 1 && next.piece >= at.end) next = work.after(at);
        scales.fetch(args, rows.tile(next.block), next.piece);
      }
      uint2 upper_bytes, lower_bytes; // of the unit decoded next, read one unit ahead
      auto read_bytes = [&](int unit) {
        const uint32_t bytes = (own + slot) ^ (unit * 32);
        upper_bytes = load_shared(bytes), lower_bytes = load_shared(bytes + PIECE_BYTES / 2);
      };
      read_bytes(0);
      if (AHEAD) decode_unit<K_PARTS == 2>(a[0], upper_bytes, lower_bytes, lane_base, rows.active), read_bytes(1);
#pragma unroll
      for (int unit = 0; unit < BSH_PIECE_UNITS; unit++) {
        if (unit % UNITS == 0) {
          if (brings_x) x_in.bring();
          barrier_wait(shared.full + 8 * stage, parity);
        }
        if (!AHEAD) {
          decode_unit<K_PARTS == 2>(a[0], upper_bytes, lower_bytes, lane_base, rows.active);
          if (unit + 1 < BSH_PIECE_UNITS) read_bytes(unit + 1);
        }
        const uint32_t x = x_base + ((stage * STAGE_BYTES<TOKENS, K_PARTS> + unit % UNITS * (TOKENS * 128)) >> 4);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) warpgroup<T, TOKENS>::multiply(part, a[AHEAD ? unit & 1 : 0][k], x + k * 2, k > 0);
        products_commit();
        if (AHEAD && unit + 1 < BSH_PIECE_UNITS) {
          decode_unit<K_PARTS == 2>(a[(unit + 1) & 1], upper_bytes, lower_bytes, lane_base, rows.active);
          if (unit + 2 < BSH_PIECE_UNITS) read_bytes(unit + 2);
        }
        const float upper = scales.of(0, piece, unit), lower = scales.of(1, piece, unit);
        products_wait<0, SUMS>(part);
        if (unit % UNITS == UNITS - 1) {
          if (lane == 0) barrier_arrive(shared.empty + 8 * stage);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[i] += (i & 2 ? lower : upper) * part[i];
      }
      fill = slot;
      slot = slot == (SLOTS - 1) * PIECE_BYTES ? 0 : slot + PIECE_BYTES;
    }
    if constexpr (K_PARTS == 2) {
      add_parts<TOKENS>(sum, shared.ring);
      return finish_part<T, TOKENS>(args, rows, sum); // not in a loop, so that its shuffles cost no uniform registers
    } else {
      finish<T, TOKENS>(args, work, at, from, rows.tile(at.block), sum);
#pragma unroll
      for (int i = 0; i < SUMS; i++) sum[i] = 0.f;
    }
  }
}
#endif

} // namespace
} // namespace bsh

#ifdef BSH_HAS_WGMMA
#define GEMM_BODY(T, TOKENS, K_PARTS, KIND) bsh::gemm<T, TOKENS, K_PARTS, bsh::KIND>(args);
#else
#define GEMM_BODY(T, TOKENS, K_PARTS, KIND) __trap(); // the host launches these on sm_90 machine code only
#endif
#define GEMM(T, NAME, TOKENS, K_PARTS, KIND)                                                                           \
  extern "C" __global__ void __launch_bounds__(bsh_gemm_threads(TOKENS, K_PARTS), 1)                                   \
      NAME(const __grid_constant__ bsh_fused_args args) {                                                              \
    GEMM_BODY(T, TOKENS, K_PARTS, KIND)                                                                                \
  }
#define GEMM_PAIR(T, NAME, TOKENS, K_PARTS)                                                                            \
  GEMM(T, NAME, TOKENS, K_PARTS, NESTED_64) GEMM(T, NAME##_any, TOKENS, K_PARTS, ANY_SCALES)
#define GEMM_BF16(FORM, TOKENS, K_PARTS) GEMM_PAIR(__nv_bfloat16, gemm_4bit_bf16_##FORM, TOKENS, K_PARTS)
#define GEMM_F16(FORM, TOKENS, K_PARTS) GEMM_PAIR(__half, gemm_4bit_f16_##FORM, TOKENS, K_PARTS)
BSH_GEMM_FORMS(GEMM_BF16)
BSH_GEMM_FORMS(GEMM_F16)

// x[M, K] (2-byte elements) -> [all_units][tokens][64] in the layout of one stage, as x_order makes it. Missing tokens
// and units are zero. Also clears the counters; with tokens = 0 nothing else.
extern "C" __global__ void x_units(const __grid_constant__ bsh_fused_args args, uint4 *out, int tokens, int all_units,
                                   int counters) {
  bsh::let_later_kernels_start(); // the product waits for this kernel, which waits for those before it
  bsh::wait_for_earlier_kernels();
  const int units = args.K / BSH_UNIT, at = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = at; i < counters; i += gridDim.x * blockDim.x) args.counters[i] = 0;
  if (tokens == 0) return;
  const int chunk = at & 7, token = (at >> 3) % tokens, unit = (at >> 3) / tokens;
  if (unit >= all_units) return;
  uint32_t pairs[4] = {};
  if (token < args.M && unit < units) {
    const uint32_t *from = reinterpret_cast<const uint32_t *>(static_cast<const uint16_t *>(args.x) + token * args.ldx +
                                                              unit * BSH_UNIT + chunk * 2);
#pragma unroll
    for (int c = 0; c < 4; c++) pairs[c] = from[c * 8];
  }
  out[((int64_t)unit * tokens + token) * 8 + (chunk ^ (token & 7))] =
      make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
