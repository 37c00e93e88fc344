/* core/formats.h - the number formats: every table of the project, once, for C and CUDA.
 *
 * NF4 and FP4 follow the checkpoint format of bitsandbytes; thresholds are those of its CUDA backend, given as fp32
 * bits because decimal literals and midpoints round differently. docs/formats.md explains each table. */
#ifndef BSH_CORE_FORMATS_H
#define BSH_CORE_FORMATS_H

/* BSH_E2M1: of MXFP4 and NVFP4. BSH_INT8: codes are numbers, core/int8.h. */
typedef enum { BSH_NF4 = 0, BSH_FP4 = 1, BSH_E2M1 = 2, BSH_INT8 = 3 } bsh_format;

/* Value of each of the 16 codes, for a block whose absmax is 1. */
#define BSH_NF4_VALUES                                                                                                 \
  -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,                     \
      -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,                  \
      0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f
#define BSH_FP4_VALUES                                                                                                 \
  0.0f, 0.005208333488553762f, 0.6666666865348816f, 1.0f, 0.3333333432674408f, 0.5f, 0.1666666716337204f, 0.25f,       \
      -0.0f, -0.005208333488553762f, -0.6666666865348816f, -1.0f, -0.3333333432674408f, -0.5f, -0.1666666716337204f,   \
      -0.25f

/* E2M1 (OCP Microscaling Formats v1.0, 5.3.3): sign, two bits of exponent, one of mantissa; 0 to 6. */
#define BSH_E2M1_VALUES                                                                                                \
  0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f

/* The three, by their numbers. */
#define BSH_4BIT_VALUES                                                                                                \
  {                                                                                                                    \
    {BSH_NF4_VALUES}, {BSH_FP4_VALUES}, { BSH_E2M1_VALUES }                                                            \
  }
enum { BSH_4BIT_FORMATS = 3 };

/* NF4: code = number of thresholds t with v > t (strict; a NaN gives code 0). fp32 bits, ascending. */
#define BSH_NF4_THRESHOLD_BITS                                                                                         \
  0xBF591CD9u, 0xBF1C5270u, 0xBEEB8480u, 0xBEADEA76u, 0xBE703CECu, 0xBE0D38BCu, 0xBD3A7871u, 0x3D22FAFFu, 0x3DF64863u, \
      0x3E5067E0u, 0x3E9582D4u, 0x3EC753F9u, 0x3F006D03u, 0x3F248DAFu, 0x3F5C89D9u

/* FP4: with k = number of thresholds t with |v| > t, code = BSH_FP4_ORDER[k] + (v < 0 ? 8 : 0). */
#define BSH_FP4_THRESHOLD_BITS 0x3B2AAAB9u, 0x3DB00000u, 0x3E555555u, 0x3E955555u, 0x3ED55556u, 0x3F155550u, 0x3F555555u
#define BSH_FP4_ORDER 0, 1, 6, 7, 4, 5, 2, 3

/* The same of E2M1, to the nearest and of two as near to the even code: 3/4, 7/4 and 7/2 go up, so theirs are one ulp
 * less. */
#define BSH_E2M1_THRESHOLD_BITS                                                                                        \
  0x3E800000u, 0x3F3FFFFFu, 0x3FA00000u, 0x3FDFFFFFu, 0x40200000u, 0x405FFFFFu, 0x40A00000u
#define BSH_E2M1_ORDER 0, 1, 2, 3, 4, 5, 6, 7

/* The signed dynamic 8-bit map (default of quantize_blockwise and of nested scales), fp32 bits, ascending. */
#define BSH_DYNAMIC_MAP_BITS                                                                                           \
  0xBF7E3333, 0xBF7A999A, 0xBF770000, 0xBF736666, 0xBF6FCCCD, 0xBF6C3333, 0xBF68999A, 0xBF650000, 0xBF616666,          \
      0xBF5DCCCD, 0xBF5A3333, 0xBF56999A, 0xBF530000, 0xBF4F6666, 0xBF4BCCCD, 0xBF483333, 0xBF44999A, 0xBF410000,      \
      0xBF3D6666, 0xBF39CCCD, 0xBF363334, 0xBF32999A, 0xBF2F0000, 0xBF2B6666, 0xBF27CCCD, 0xBF243334, 0xBF20999A,      \
      0xBF1D0000, 0xBF196666, 0xBF15CCCD, 0xBF123334, 0xBF0E999A, 0xBF0B0000, 0xBF076666, 0xBF03CCCC, 0xBF003333,      \
      0xBEF93332, 0xBEF20000, 0xBEEACCCC, 0xBEE3999A, 0xBEDC6666, 0xBED53333, 0xBECE0000, 0xBEC6CCCC, 0xBEBF999A,      \
      0xBEB86666, 0xBEB13333, 0xBEAA0000, 0xBEA2CCCC, 0xBE9B999A, 0xBE946666, 0xBE8D3334, 0xBE860000, 0xBE7D9999,      \
      0xBE6F3333, 0xBE60CCCD, 0xBE526666, 0xBE440000, 0xBE35999A, 0xBE273333, 0xBE18CCCD, 0xBE0A6666, 0xBDF80000,      \
      0xBDDB3334, 0xBDC9EB85, 0xBDC428F7, 0xBDBE6667, 0xBDB8A3D7, 0xBDB2E148, 0xBDAD1EB8, 0xBDA75C2A, 0xBDA1999A,      \
      0xBD9BD70A, 0xBD96147B, 0xBD9051EB, 0xBD8A8F5D, 0xBD84CCCD, 0xBD7E147B, 0xBD728F5D, 0xBD670A3D, 0xBD5B851F,      \
      0xBD500000, 0xBD447AE1, 0xBD38F5C3, 0xBD2D70A3, 0xBD21EB85, 0xBD166667, 0xBD0AE148, 0xBCFEB852, 0xBCE7AE15,      \
      0xBCD0A3D7, 0xBCB9999A, 0xBCA28F5D, 0xBC8B851F, 0xBC68F5C3, 0xBC3AE148, 0xBC1F3B64, 0xBC160418, 0xBC0CCCCD,      \
      0xBC039581, 0xBBF4BC6A, 0xBBE24DD3, 0xBBCFDF3B, 0xBBBD70A4, 0xBBAB020D, 0xBB989374, 0xBB8624DD, 0xBB676C8A,      \
      0xBB428F5C, 0xBB1DB22D, 0xBAF1A9FC, 0xBAA7EF9D, 0xBA7765FF, 0xBA59E83E, 0xBA3C6A80, 0xBA1EECC1, 0xBA016F01,      \
      0xB9C7E283, 0xB98CE705, 0xB923D70B, 0xB8BA1F4B, 0xB88AEFB3, 0xB8378034, 0xB7B24206, 0xB70205FF, 0xB65A1A94,      \
      0xB513A3B7, 0x00000000, 0x3513A3B7, 0x365A1A94, 0x370205FF, 0x37B24206, 0x38378034, 0x388AEFB3, 0x38BA1F4B,      \
      0x3923D70B, 0x398CE705, 0x39C7E283, 0x3A016F01, 0x3A1EECC1, 0x3A3C6A80, 0x3A59E83E, 0x3A7765FF, 0x3AA7EF9D,      \
      0x3AF1A9FC, 0x3B1DB22D, 0x3B428F5C, 0x3B676C8A, 0x3B8624DD, 0x3B989374, 0x3BAB020D, 0x3BBD70A4, 0x3BCFDF3B,      \
      0x3BE24DD3, 0x3BF4BC6A, 0x3C039581, 0x3C0CCCCD, 0x3C160418, 0x3C1F3B64, 0x3C3AE148, 0x3C68F5C3, 0x3C8B851F,      \
      0x3CA28F5D, 0x3CB9999A, 0x3CD0A3D7, 0x3CE7AE15, 0x3CFEB852, 0x3D0AE148, 0x3D166667, 0x3D21EB85, 0x3D2D70A3,      \
      0x3D38F5C3, 0x3D447AE1, 0x3D500000, 0x3D5B851F, 0x3D670A3D, 0x3D728F5D, 0x3D7E147B, 0x3D84CCCD, 0x3D8A8F5D,      \
      0x3D9051EB, 0x3D96147B, 0x3D9BD70A, 0x3DA1999A, 0x3DA75C2A, 0x3DAD1EB8, 0x3DB2E148, 0x3DB8A3D7, 0x3DBE6667,      \
      0x3DC428F7, 0x3DC9EB85, 0x3DDB3334, 0x3DF80000, 0x3E0A6666, 0x3E18CCCD, 0x3E273333, 0x3E35999A, 0x3E440000,      \
      0x3E526666, 0x3E60CCCD, 0x3E6F3333, 0x3E7D9999, 0x3E860000, 0x3E8D3334, 0x3E946666, 0x3E9B999A, 0x3EA2CCCC,      \
      0x3EAA0000, 0x3EB13333, 0x3EB86666, 0x3EBF999A, 0x3EC6CCCC, 0x3ECE0000, 0x3ED53333, 0x3EDC6666, 0x3EE3999A,      \
      0x3EEACCCC, 0x3EF20000, 0x3EF93332, 0x3F003333, 0x3F03CCCC, 0x3F076666, 0x3F0B0000, 0x3F0E999A, 0x3F123334,      \
      0x3F15CCCD, 0x3F196666, 0x3F1D0000, 0x3F20999A, 0x3F243334, 0x3F27CCCD, 0x3F2B6666, 0x3F2F0000, 0x3F32999A,      \
      0x3F363334, 0x3F39CCCD, 0x3F3D6666, 0x3F410000, 0x3F44999A, 0x3F483333, 0x3F4BCCCD, 0x3F4F6666, 0x3F530000,      \
      0x3F56999A, 0x3F5A3333, 0x3F5DCCCD, 0x3F616666, 0x3F650000, 0x3F68999A, 0x3F6C3333, 0x3F6FCCCD, 0x3F736666,      \
      0x3F770000, 0x3F7A999A, 0x3F7E3333, 0x3F800000

/* 1 / absmax as Hopper's rcp.approx.ftz.f32 gives it, for maxima whose fp32 mantissa has 10 significant bits (every
 * fp16 and bf16 value): the correctly rounded reciprocal plus (entry - 1) ulp. Entry of mantissa m (top 10 of 23 bits):
 * (BSH_RCP_WORDS[m / 32] >> 2 * (m % 32)) & 3. Measured on an H200 over all mantissas. */
#define BSH_RCP_WORDS                                                                                                  \
  0x5555566945954555, 0x4555555645555554, 0x5594055551554555, 0x05555559555A5569, 0x5559569555651555,                  \
      0x5555551455555554, 0x5115455956955555, 0x5655555555555569, 0x1555554555555655, 0x5555555A55665555,              \
      0x5165555555555155, 0x5555559555555555, 0x155A559156955565, 0x5115955555595559, 0x5541559555656959,              \
      0x5599556555565559, 0x95555596555A9555, 0x5555569545555595, 0x5555555555555555, 0x5555559555554555,              \
      0x5595555555A69555, 0x5A55555595555695, 0x5556565555555555, 0x5555555515555555, 0x555559A915555555,              \
      0x5555955559559955, 0x5555555555555555, 0x5955555566665555, 0x5596555555555555, 0x5045455655555556,              \
      0x5695555555565155, 0x5554554555555955

#endif
