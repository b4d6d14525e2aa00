/* Which instructions the CPU has and the kernel allows. __builtin_cpu_supports is always 0 with the compiler of
 * the wheels. */
#include "core.h"

sk_features sk_cpu;

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

void sk_cpu_prepare(void) {
    unsigned eax, ebx, ecx, edx, state = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return;
    if (ecx & bit_OSXSAVE) __asm__("xgetbv" : "=a"(state), "=d"(edx) : "c"(0));
    sk_cpu.pclmul = (ecx & bit_PCLMUL) && (ecx & bit_SSE4_1);
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return;
    sk_cpu.avx2 = (state & 0x06) == 0x06 && (ebx & bit_AVX2); /* the kernel keeps 256-bit registers */
    sk_cpu.vpclmulqdq = sk_cpu.avx2 && (ecx & bit_VPCLMULQDQ);
    sk_cpu.avx512f = (state & 0xE6) == 0xE6 && (ebx & bit_AVX512F); /* and 512-bit ones */
}
#else
void sk_cpu_prepare(void) {}
#endif
