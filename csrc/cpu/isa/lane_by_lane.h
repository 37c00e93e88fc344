/* cpu/isa/lane_by_lane.h - what an instruction set without masked loads and stores does lane by lane, by its v_store.
 *
 * Included by its header (cpu/isa/vectors.h), behind v_store. */
#ifndef BSH_CPU_ISA_LANE_BY_LANE_H
#define BSH_CPU_ISA_LANE_BY_LANE_H

ALWAYS_INLINE void v_store_two(void *const out, const bsh_dtype dtype, const int64_t i, const floats a,
                               const floats b) {
  v_store(out, dtype, i, a);
  v_store(out, dtype, i + LANES, b);
}

ALWAYS_INLINE floats v_load_some(const void *const x, const bsh_dtype dtype, const int64_t i, const int64_t n) {
  float lanes[LANES] = {0};
  for (int64_t lane = 0; lane < min_i64(n, LANES); lane++) lanes[lane] = load_f32(x, dtype, i + lane);
  return v_read(lanes);
}

ALWAYS_INLINE void v_store_some(void *const out, const bsh_dtype dtype, const int64_t i, const int64_t n,
                                const floats v) {
  for (int64_t lane = 0; lane < min_i64(n, LANES); lane++) store_f32(out, dtype, i + lane, v[lane]);
}

ALWAYS_INLINE void v_write_some(float *const out, const int64_t n, const floats v) {
  for (int64_t lane = 0; lane < min_i64(n, LANES); lane++) out[lane] = v[lane];
}

#endif
