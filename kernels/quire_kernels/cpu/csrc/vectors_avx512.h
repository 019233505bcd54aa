/* The operations of `vectors.h` by AVX-512 F/BW/DQ/VL. */
typedef __m512 vec16;
typedef __m512i ints16;
typedef __mmask16 mask16, lanes16;

INLINE vec16 zero16(void) { return _mm512_setzero_ps(); }
INLINE vec16 all16(float x) { return _mm512_set1_ps(x); }
INLINE vec16 read16(const float *from) { return _mm512_loadu_ps(from); }
INLINE void write16(float *to, vec16 x) { _mm512_storeu_ps(to, x); }
INLINE vec16 add16(vec16 x, vec16 y) { return _mm512_add_ps(x, y); }
INLINE vec16 sub16(vec16 x, vec16 y) { return _mm512_sub_ps(x, y); }
INLINE vec16 mul16(vec16 x, vec16 y) { return _mm512_mul_ps(x, y); }
INLINE vec16 div16(vec16 x, vec16 y) { return _mm512_div_ps(x, y); }
INLINE vec16 fma16(vec16 x, vec16 y, vec16 z) { return _mm512_fmadd_ps(x, y, z); }
INLINE vec16 fnma16(vec16 x, vec16 y, vec16 z) { return _mm512_fnmadd_ps(x, y, z); }
INLINE vec16 abs16(vec16 x) { return _mm512_abs_ps(x); }
INLINE vec16 max16(vec16 x, vec16 y) { return _mm512_max_ps(x, y); }
INLINE vec16 min16(vec16 x, vec16 y) { return _mm512_min_ps(x, y); }
INLINE vec16 nearest16(vec16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE vec16 scale16(vec16 x, vec16 n) { return _mm512_scalef_ps(x, n); }
INLINE float sum16(vec16 x) { return _mm512_reduce_add_ps(x); }
INLINE float largest16(vec16 x) { return _mm512_reduce_max_ps(x); }

INLINE ints16 zero_ints16(void) { return _mm512_setzero_si512(); }
INLINE ints16 all_ints16(int32_t x) { return _mm512_set1_epi32(x); }
INLINE ints16 add_ints16(ints16 x, ints16 y) { return _mm512_add_epi32(x, y); }
INLINE int32_t sum_ints16(ints16 x) { return _mm512_reduce_add_epi32(x); }
INLINE ints16 to_ints16(vec16 x) { return _mm512_cvtps_epi32(x); }
INLINE vec16 to_floats16(ints16 x) { return _mm512_cvtepi32_ps(x); }
INLINE void write_bytes16(int8_t *to, ints16 x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(x)); }
INLINE vec16 of_bytes16(const uint8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
INLINE vec16 of_halves16(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

/* Adds the products of 16 times 4 unsigned bytes with the same 4 signed ones. Inline assembly, because gcc 12 adds a
 * copy and a store to the stack to each use of the intrinsic. */
INLINE ints16 add_products16(ints16 sums, __m512i bytes, const int8_t *four) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(bytes), "m"(*(const int32_t *)four));
    return sums;
}

INLINE mask16 unordered16(vec16 x, vec16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q); }
INLINE mask16 equal16(vec16 x, vec16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ); }
INLINE vec16 where16(mask16 mask, vec16 x, vec16 otherwise) { return _mm512_mask_mov_ps(otherwise, mask, x); }
INLINE void write_where16(float *to, mask16 mask, vec16 x) { _mm512_mask_storeu_ps(to, mask, x); }
INLINE lanes16 differ16(vec16 x, vec16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_NEQ_UQ); }
INLINE vec16 only16(lanes16 lanes, vec16 x) { return _mm512_maskz_mov_ps(lanes, x); }

INLINE vec16 widened16(const uint16_t *from) {
    __m256i narrow = _mm256_loadu_si256((const __m256i *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

INLINE __m256i narrow16(vec16 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

INLINE void write_narrow16(uint16_t *to, vec16 x) { _mm256_storeu_si256((__m256i *)to, narrow16(x)); }

INLINE vec16 through_narrow16(vec16 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow16(x)), 16));
}

INLINE __m128 sums4(vec16 a, vec16 b, vec16 c, vec16 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    __m512 high = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    __m512 all = _mm512_add_ps(low, high);
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
