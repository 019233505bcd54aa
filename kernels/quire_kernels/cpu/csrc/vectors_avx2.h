/* The operations of `vectors.h` by AVX2, FMA and F16C: halves of 8 elements each. */
typedef struct {
    __m256 low, high;
} vec16;
typedef struct {
    __m256i low, high;
} ints16;
typedef uint16_t mask16;
typedef vec16 lanes16;

/* A function of one or more vectors that applies an instruction to each half. */
#define UNARY(name, instruction) \
    INLINE vec16 name(vec16 x) { return (vec16){instruction(x.low), instruction(x.high)}; }
#define BINARY(type, name, instruction) \
    INLINE type name(type x, type y) { return (type){instruction(x.low, y.low), instruction(x.high, y.high)}; }
#define TERNARY(name, instruction)                                                                    \
    INLINE vec16 name(vec16 x, vec16 y, vec16 z) {                                                    \
        return (vec16){instruction(x.low, y.low, z.low), instruction(x.high, y.high, z.high)};        \
    }
#define NEAREST(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT)
#define ABSOLUTE(x) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)
#define DIFFER(x, y) _mm256_cmp_ps(x, y, _CMP_NEQ_UQ)

BINARY(vec16, add16, _mm256_add_ps)
BINARY(vec16, sub16, _mm256_sub_ps)
BINARY(vec16, mul16, _mm256_mul_ps)
BINARY(vec16, div16, _mm256_div_ps)
BINARY(vec16, max16, _mm256_max_ps)
BINARY(vec16, min16, _mm256_min_ps)
BINARY(vec16, differ16, DIFFER)
BINARY(vec16, only16, _mm256_and_ps)
BINARY(ints16, add_ints16, _mm256_add_epi32)
TERNARY(fma16, _mm256_fmadd_ps)
TERNARY(fnma16, _mm256_fnmadd_ps)
UNARY(abs16, ABSOLUTE)
UNARY(nearest16, NEAREST)

INLINE vec16 zero16(void) { return (vec16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE vec16 all16(float x) { return (vec16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vec16 read16(const float *from) { return (vec16){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE void write16(float *to, vec16 x) { _mm256_storeu_ps(to, x.low), _mm256_storeu_ps(to + 8, x.high); }

INLINE ints16 zero_ints16(void) { return (ints16){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE ints16 all_ints16(int32_t x) { return (ints16){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE ints16 to_ints16(vec16 x) { return (ints16){_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
INLINE vec16 to_floats16(ints16 x) { return (vec16){_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

INLINE void write_bytes16(int8_t *to, ints16 x) {
    const __m256i q = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128((__m128i *)to, _mm_packs_epi16(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1)));
}

INLINE vec16 of_bytes16(const uint8_t *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return to_floats16((ints16){_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))});
}

INLINE vec16 of_halves16(const uint16_t *from) {
    return (vec16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + 1))};
}

/* In two steps, of which only the second one rounds: 2^n alone need not be a float32, as of -150. */
INLINE __m256 scale8(__m256 x, __m256 n) {
    const __m256i bias = _mm256_set1_epi32(127), whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(x, first), second);
}
BINARY(vec16, scale16, scale8)

/* In the order of _mm512_reduce_add_ps. */
INLINE float sum16(vec16 x) {
    const __m256 eight = _mm256_add_ps(x.high, x.low);
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float largest16(vec16 x) {
    const __m256 eight = _mm256_max_ps(x.high, x.low);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

INLINE int32_t sum_ints16(ints16 x) {
    const __m256i eight = _mm256_add_epi32(x.low, x.high);
    const __m128i four = _mm_add_epi32(_mm256_extracti128_si256(eight, 1), _mm256_castsi256_si128(eight));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1))));
}

INLINE mask16 bits_of(__m256 low, __m256 high) {
    return (mask16)(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}

INLINE mask16 unordered16(vec16 x, vec16 y) {
    return bits_of(_mm256_cmp_ps(x.low, y.low, _CMP_UNORD_Q), _mm256_cmp_ps(x.high, y.high, _CMP_UNORD_Q));
}

INLINE mask16 equal16(vec16 x, vec16 y) {
    return bits_of(_mm256_cmp_ps(x.low, y.low, _CMP_EQ_OQ), _mm256_cmp_ps(x.high, y.high, _CMP_EQ_OQ));
}

/* Elements whose bits are set become all ones. */
INLINE __m256i lanes8(uint32_t bits) {
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int32_t)bits), each), each);
}

INLINE vec16 where16(mask16 mask, vec16 x, vec16 otherwise) {
    return (vec16){_mm256_blendv_ps(otherwise.low, x.low, _mm256_castsi256_ps(lanes8(mask))),
                   _mm256_blendv_ps(otherwise.high, x.high, _mm256_castsi256_ps(lanes8(mask >> 8)))};
}

/* A masked store takes some CPUs as long as many whole ones. */
INLINE void write_where16(float *to, mask16 mask, vec16 x) {
    if (mask == UINT16_MAX) {
        write16(to, x);
    } else if (mask) {
        _mm256_maskstore_ps(to, lanes8(mask), x.low);
        _mm256_maskstore_ps(to + 8, lanes8(mask >> 8), x.high);
    }
}

INLINE __m256 widened8(const uint16_t *from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE vec16 widened16(const uint16_t *from) { return (vec16){widened8(from), widened8(from + 8)}; }

/* The bits of the nearest bfloat16, above 16 that are not zero. */
INLINE __m256i nearest_bfloat16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
}

INLINE void write_narrow16(uint16_t *to, vec16 x) {
    const __m256i low = _mm256_srli_epi32(nearest_bfloat16(x.low), 16);
    const __m256i high = _mm256_srli_epi32(nearest_bfloat16(x.high), 16);
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256((__m256i *)to, both);
}

INLINE __m256 through_narrow8(__m256 x) {
    return _mm256_castsi256_ps(_mm256_and_si256(nearest_bfloat16(x), _mm256_set1_epi32((int32_t)0xffff0000)));
}
UNARY(through_narrow16, through_narrow8)

/* The sums of four vectors within each half register of 4, as one. */
INLINE __m256 sums4_within(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    return _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
}

INLINE __m128 sums4(vec16 a, vec16 b, vec16 c, vec16 d) {
    const __m256 low = sums4_within(a.low, b.low, c.low, d.low), high = sums4_within(a.high, b.high, c.high, d.high);
    const __m256 half = _mm256_add_ps(low, high);
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
