/* cpu/avx2_calibration.c - calibration, 8 rows or blocks at a time. */
#define LANES 8
#include "cpu/calibration.inc.h"

const bsh_cpu_calibration bsh_cpu_avx2_calibration = {
    .search_4bit = search_4bit_lanes,
    .round_4bit = round_4bit_lanes,
};
