/* Vectors of 16 elements, stored as float32 or bfloat16, computed in float32. Needs AVX-512 F/BW/DQ/VL: `native` makes
 * calls of kernels that include this only on such a CPU.
 */
#ifndef QUIRE_VECTORS_H
#define QUIRE_VECTORS_H

#include "runtime.h"

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>

INLINE __m512 load16(const void *base, int64_t index, int dtype) {
    if (dtype == FLOAT32) return _mm512_loadu_ps((const float *)base + index);
    __m256i narrow = _mm256_loadu_si256((const __m256i *)((const uint16_t *)base + index));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

/* Round to nearest even, as torch does; NaN stays NaN. */
INLINE __m256i narrow16(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

INLINE void store16(void *base, int64_t index, __m512 x, int dtype) {
    if (dtype == FLOAT32)
        _mm512_storeu_ps((float *)base + index, x);
    else
        _mm256_storeu_si256((__m256i *)((uint16_t *)base + index), narrow16(x));
}

/* To the stored precision and back. */
INLINE __m512 rounded16(__m512 x, int dtype) {
    if (dtype == FLOAT32) return x;
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow16(x)), 16));
}

/* e^x by 2^n * polynomial on [-ln2/2, ln2/2] (Cephes' coefficients); relative error about 1e-7. */
INLINE __m512 exp16(__m512 x) {
    /* In this order: both return their second operand if one is NaN. */
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(88.7f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

#endif
