/* Sets the logits of tokens that a grammar does not allow to -inf: one pass over words of 32 tokens, most of which
 * allow either none or all of them. */
#include "vectors.h"

/* logits [*, vocab] float32; mask e [words], one bit per allowed token, applies to row positions[e], or to none if
 * that is negative. */
struct bitmask {
    float *logits;
    const uint32_t *masks;
    const int64_t *positions;
    int64_t vocab, words;
};

EXPORT void KERNEL(token_bitmask)(const struct bitmask *a, int64_t entries) {
    const vec16 never = all16(-INFINITY);
#pragma omp for schedule(static)
    for (int64_t e = 0; e < entries; e++) {
        if (a->positions[e] < 0) continue;
        float *row = a->logits + a->positions[e] * a->vocab;
        const uint32_t *mask = a->masks + e * a->words;
        for (int64_t first = 0; first < a->vocab; first += 32) {
            uint32_t forbidden = ~mask[first / 32];
            if (first + 32 > a->vocab) forbidden &= (1u << (a->vocab - first)) - 1;
            write_where16(row + first, (mask16)forbidden, never);
            write_where16(row + first + 16, (mask16)(forbidden >> 16), never);
        }
    }
}
