/* Shared by all kernels: a kernel is a function of its arguments and a number of rows, which all threads of a team call
 * together (`run_calls.c`): it distributes work by `omp for`, at whose end all threads wait.
 */
#ifndef QUIRE_RUNTIME_H
#define QUIRE_RUNTIME_H

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* A file that has this in a name is compiled once for each instruction set (`native_build.py`). */
#if defined(__AVX512F__)
#define KERNEL(name) quire_##name##_avx512_vnni
#elif defined(__AVX2__)
#define KERNEL(name) quire_##name##_avx2
#else
#define KERNEL(name) quire_##name##_any
#endif

/* Flags that kernels set within a run when they fail (`run_calls.c`). */
enum run_failure { LACKED_MEMORY = 1, RANK_FAILED = 2 };
extern int quire_failures;
/* Set by a kernel in every thread of the team alike: no further call is made. */
extern _Thread_local int quire_stops;

enum dtype { FLOAT32 = 0, BFLOAT16 = 1 };

INLINE int64_t size_of(int dtype) { return dtype == BFLOAT16 ? 2 : 4; }

INLINE const void *at(const void *base, int64_t index, int dtype) {
    return (const char *)base + index * size_of(dtype);
}

#endif
