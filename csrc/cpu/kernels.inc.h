/* cpu/kernels.inc.h - all kernels of an instruction set. Its file includes its header (cpu/isa/), then this.
 *
 * KERNELS_BY_LANES: the members of a bsh_cpu_kernels that are the same for all sets. linear_4bit is linear_by_groups,
 * or its own. */
#ifndef BSH_CPU_KERNELS_INC_H
#define BSH_CPU_KERNELS_INC_H

#include "cpu/blocks.inc.h"
#include "cpu/calibration.inc.h"
#include "cpu/e2m1.inc.h"
#include "cpu/groups.inc.h"
#include "cpu/int8.inc.h"
#include "cpu/int8_product.inc.h"
#include "cpu/merge.inc.h"
#include "cpu/optimizer_blocks.inc.h"

static const bsh_cpu_optimizers optimizers_by_lanes = {
    .optimizer_32bit = optimizer_32bit,
    .optimizer_squares = optimizer_squares,
    .optimizer_8bit_blockwise = optimizer_8bit_blockwise,
};

static const bsh_cpu_calibration calibration_by_lanes = {
    .search_4bit = search_4bit_lanes,
    .round_4bit = round_4bit_lanes,
};

static const bsh_cpu_int8_kernels int8_by_lanes = {INT8_BY_LANES, .product = product_by_tiles};

#define KERNELS_BY_LANES                                                                                               \
  .quantize_4bit = quantize_4bit_lanes, .quantize_e2m1 = quantize_e2m1_lanes, .decode_4bit = decode_run,               \
  .linear_4bit_dgrad = dgrad_by_groups, .quantize_blockwise = quantize_blockwise_lanes,                                \
  .dequantize_blockwise = dequantize_blockwise_lanes, .to_f32 = convert_to_f32, .from_f32 = convert_from_f32,          \
  .add_adapters = add_adapters_lanes, .optimizers = &optimizers_by_lanes, .calibration = &calibration_by_lanes,        \
  .int8 = &int8_by_lanes

#endif
