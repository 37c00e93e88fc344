/* launch_stacks.h - products of stacks, planned and launched: part of test_launch.c. */

static void stacks(uint64_t *const state, const int rounds) {
  static const int32_t gpus[][2] = {{80, 108}, {86, 82}, {89, 128}, {120, 170}, {90, 132}, {75, 40}};
  static const char *const ops[] = {"grouped_linear_4bit", "grouped_linear_4bit_dgrad"};
  const bsh_torch_operands none = {0};
  int taken = 0;
  for (int round = 0; round < rounds; round++) {
    const int32_t *const gpu = gpus[random_below(state, 6)];
    bsh_product_args args = random_product(state);
    const int dgrad = (int)random_below(state, 2);
    args.E = 1 + random_below(state, 200), args.M *= 1 + random_below(state, args.E), args.offs = (int32_t *)0x1000;
    args.weight.n *= args.E;
    if (args.N * args.K % args.weight.blocksize != 0) continue;
    if (dgrad) args.bias = NULL, args.ldx = args.N, args.ldy = args.K, args.direction = BSH_INPUT_GRADIENT;
    const bsh_cuda_context context = {.op = ops[dgrad], .sm = gpu[0], .sms = gpu[1]};
    CHECK(bsh_force_kernel(ops[dgrad], NULL) == BSH_OK, "%s", bsh_status_message());
    CHECK(bsh_cuda_plan(ops[dgrad], &args, gpu[0], gpu[1], BSH_VENDOR_TORCH, &plan) == BSH_OK, "a plan for any stack");
    const bool microscaled = args.weight.format == BSH_E2M1 && args.weight.scales.absmax == NULL;
    const bool refused_on_hopper = args.weight.blocksize < 64 && !microscaled; /* by its own kernels */
    CHECK(!is_planned("gemm_4bit_sm80_grouped") || (gpu[0] >= 80 && (gpu[0] != 90 || refused_on_hopper)),
          "not chosen on sm_%d", gpu[0]);
    CHECK(!is_planned("gemm_4bit_sm75_grouped") || (gpu[0] == 75 && args.dtype == BSH_F16), "sm_%d", gpu[0]);
    const char *const forced = gpu[0] == 75 ? "gemm_4bit_sm75_grouped" : "gemm_4bit_sm80_grouped";
    CHECK(bsh_force_kernel(ops[dgrad], forced) == BSH_OK, "%s", bsh_status_message());
    if (bsh_cuda_plan(ops[dgrad], &args, gpu[0], gpu[1], BSH_VENDOR_TORCH, &plan) != BSH_OK) continue;
    forget(&args, args.E);
    CHECK(bsh_cuda_product(&args, &plan, &none, &context) == BSH_OK && rows_done == args.M, "%s", bsh_status_message());
    CHECK(bsh_force_kernel(ops[dgrad], NULL) == BSH_OK, "%s", bsh_status_message());
    taken++;
  }
  CHECK(taken > rounds / 4, "%d of %d stacks", taken, rounds);
}
