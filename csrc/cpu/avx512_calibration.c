/* cpu/avx512_calibration.c - calibration, 16 rows or blocks at a time. */
#define LANES 16
#include "cpu/calibration.inc.h"

const bsh_cpu_calibration bsh_cpu_avx512_calibration = {
    .search_4bit = search_4bit_lanes,
    .round_4bit = round_4bit_lanes,
};
