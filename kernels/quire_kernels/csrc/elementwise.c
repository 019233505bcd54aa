/* The small operations between the matrices: each is one pass over its rows. */
#include "vectors.h"

enum { SMALL = 16384 }; /* elements below which a second thread costs more than it brings */

INLINE void norm_row(const void *x, void *residual, const void *weight, void *y, int64_t size, float eps, int dtype) {
    __m512 squares = _mm512_setzero_ps();
    void *sum = residual ? residual : (void *)x;
    for (int64_t i = 0; i < size; i += 16) {
        __m512 value = load16(x, i, dtype);
        if (residual) {
            value = rounded16(_mm512_add_ps(value, load16(residual, i, dtype)), dtype);
            store16(residual, i, value, dtype);
        }
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    __m512 factor = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)size + eps));
    for (int64_t i = 0; i < size; i += 16) {
        __m512 value = rounded16(_mm512_mul_ps(load16(sum, i, dtype), factor), dtype);
        store16(y, i, _mm512_mul_ps(load16(weight, i, dtype), value), dtype);
    }
}

INLINE void norm(const void *x, void *residual, const void *weight, void *y, int64_t rows, int64_t size, float eps,
                 int dtype) {
#pragma omp parallel for schedule(static) if (rows * size > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        void *stream = residual ? (void *)at(residual, row * size, dtype) : NULL;
        norm_row(at(x, row * size, dtype), stream, weight, (void *)at(y, row * size, dtype), size, eps, dtype);
    }
}

/* All [rows, size], size a multiple of 16; residual may be null. */
EXPORT void quire_add_rmsnorm(const void *x, void *residual, const void *weight, void *y, int64_t rows, int64_t size,
                              float eps, int dtype) {
    if (dtype == BFLOAT16)
        norm(x, residual, weight, y, rows, size, eps, BFLOAT16);
    else
        norm(x, residual, weight, y, rows, size, eps, FLOAT32);
}

INLINE void gate(const void *gate_up, void *y, int64_t rows, int64_t size, int dtype) {
#pragma omp parallel for schedule(static) if (rows * size > SMALL)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += 16) {
            __m512 x = load16(gate_up, row * 2 * size + i, dtype);
            __m512 up = load16(gate_up, row * 2 * size + size + i, dtype);
            __m512 bound = _mm512_add_ps(exp16(_mm512_sub_ps(_mm512_setzero_ps(), x)), _mm512_set1_ps(1.0f));
            store16(y, row * size + i, _mm512_mul_ps(rounded16(_mm512_div_ps(x, bound), dtype), up), dtype);
        }
}

/* gate_up [rows, 2 size] -> y [rows, size]: silu(gate) * up; size a multiple of 16. */
EXPORT void quire_silu_mul(const void *gate_up, void *y, int64_t rows, int64_t size, int dtype) {
    if (dtype == BFLOAT16)
        gate(gate_up, y, rows, size, BFLOAT16);
    else
        gate(gate_up, y, rows, size, FLOAT32);
}

INLINE void rotate_head(const void *x, void *y, const float *cos, const float *sin, int64_t half, int dtype) {
    for (int64_t i = 0; i < half; i += 16) {
        __m512 first = load16(x, i, dtype), second = load16(x, half + i, dtype);
        __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
        store16(y, i, _mm512_fnmadd_ps(second, s, _mm512_mul_ps(first, c)), dtype);
        store16(y, half + i, _mm512_fmadd_ps(first, s, _mm512_mul_ps(second, c)), dtype);
    }
}

INLINE void rope(const void *qkv, const float *cos, const float *sin, const int64_t *slots, void *k_cache,
                 void *v_cache, void *q_out, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_size,
                 int64_t block_size, int dtype) {
    const int64_t half = head_size / 2, width = (heads + 2 * kv_heads) * head_size;
#pragma omp parallel for schedule(static) if (tokens * width > SMALL)
    for (int64_t token = 0; token < tokens; token++) {
        const float *c = cos + token * half, *s = sin + token * half;
        for (int64_t head = 0; head < heads; head++)
            rotate_head(at(qkv, token * width + head * head_size, dtype),
                        (void *)at(q_out, (token * heads + head) * head_size, dtype), c, s, half, dtype);
        int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t target = ((block * kv_heads + head) * block_size + offset) * head_size;
            int64_t key = token * width + (heads + head) * head_size;
            rotate_head(at(qkv, key, dtype), (void *)at(k_cache, target, dtype), c, s, half, dtype);
            for (int64_t i = 0; i < head_size; i += 16)
                store16(v_cache, target + i, load16(qkv, key + kv_heads * head_size + i, dtype), dtype);
        }
    }
}

/* qkv [tokens, (heads + 2 kv_heads) head_size] -> q_out, and k and v to their slots; head_size a multiple of 32. */
EXPORT void quire_rope_kv_write(const void *qkv, const float *cos, const float *sin, const int64_t *slots,
                                void *k_cache, void *v_cache, void *q_out, int64_t tokens, int64_t heads,
                                int64_t kv_heads, int64_t head_size, int64_t block_size, int dtype) {
    if (dtype == BFLOAT16)
        rope(qkv, cos, sin, slots, k_cache, v_cache, q_out, tokens, heads, kv_heads, head_size, block_size, BFLOAT16);
    else
        rope(qkv, cos, sin, slots, k_cache, v_cache, q_out, tokens, heads, kv_heads, head_size, block_size, FLOAT32);
}
