/* Vectors of 16 elements, stored as float32 or bfloat16, computed in float32. A kernel that includes this is compiled
 * once for each of two instruction sets, into a function whose name ends in the set's; `native` calls those that the CPU
 * can run. Both compute the same bits: the same operations, and sums over elements in the same order.
 *
 * vec16 is 16 float32, ints16 is 16 int32; mask16 chooses elements by the bits of a number, lanes16 in the form in which
 * comparisons give it. max16 and min16 return the second operand if one is NaN. scale16(x, n) is x 2^n for whole n.
 * of_bytes16 and of_halves16 read uint8 and float16; write_bytes16 writes int8, saturated.
 */
#ifndef QUIRE_VECTORS_H
#define QUIRE_VECTORS_H

#include "runtime.h"

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>

#ifdef __AVX512F__
#include "vectors_avx512.h"
#else
#include "vectors_avx2.h"
#endif

INLINE vec16 load16(const void *base, int64_t index, int dtype) {
    if (dtype == FLOAT32) return read16((const float *)base + index);
    return widened16((const uint16_t *)base + index);
}

/* bfloat16 is rounded to nearest even, as torch does; NaN stays NaN. */
INLINE void store16(void *base, int64_t index, vec16 x, int dtype) {
    if (dtype == FLOAT32)
        write16((float *)base + index, x);
    else
        write_narrow16((uint16_t *)base + index, x);
}

/* To the stored precision and back. */
INLINE vec16 rounded16(vec16 x, int dtype) { return dtype == FLOAT32 ? x : through_narrow16(x); }

/* e^x by 2^n * polynomial on [-ln2/2, ln2/2] (Cephes' coefficients); relative error about 1e-7. */
INLINE vec16 exp16(vec16 x) {
    /* In this order: both return their second operand if one is NaN. */
    x = max16(all16(-104.0f), min16(all16(88.7f), x));
    vec16 n = nearest16(mul16(x, all16(1.44269504f)));
    vec16 r = fnma16(n, all16(0.693359375f), x);
    r = fnma16(n, all16(-2.12194440e-4f), r);
    vec16 p = all16(1.9875691500e-4f);
    p = fma16(p, r, all16(1.3981999507e-3f));
    p = fma16(p, r, all16(8.3334519073e-3f));
    p = fma16(p, r, all16(4.1665795894e-2f));
    p = fma16(p, r, all16(1.6666665459e-1f));
    p = fma16(p, r, all16(5.0000001201e-1f));
    p = fma16(p, mul16(r, r), add16(r, all16(1.0f)));
    return scale16(p, n);
}

#endif
