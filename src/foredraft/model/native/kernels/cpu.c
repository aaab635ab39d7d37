/* Whether this processor has the instructions that the library next to it was compiled for; compiled for any. */
#include <stdint.h>

#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

int32_t fd_runs_here(void) {
#if defined(NEEDS_AVX512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#elif defined(NEEDS_AVX2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#elif defined(NEEDS_DOTPROD) && defined(__linux__)
    return (getauxval(AT_HWCAP) >> 20 & 1) != 0; /* HWCAP_ASIMDDP */
#else
    return 1;
#endif
}
