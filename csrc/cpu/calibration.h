/* cpu/calibration.h - what the instruction sets share in calibration. */
#ifndef BSH_CPU_CALIBRATION_H
#define BSH_CPU_CALIBRATION_H

#include <float.h>
#include <math.h>

/* What a weight is multiplied by before it is encoded; a scale too small to divide by makes everything zero. */
static inline float inverse_scale(const float scale) { return fabsf(scale) >= FLT_MIN ? 1.0f / scale : 0.0f; }

#endif
