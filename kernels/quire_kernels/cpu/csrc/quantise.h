/* The inputs of products in int8: whole numbers and a scale for each group of them. */
#ifndef QUIRE_QUANTISE_H
#define QUIRE_QUANTISE_H

#include "vectors.h"

/* ``count`` vectors of x as whole numbers from -127 to 127; returns their scale. NaN or infinity makes the scale NaN, and
 * with it the whole row of the result. */
INLINE float quantise_group(const void *x, int64_t first, int count, int dtype, ints16 *rounded) {
    vec16 largest = zero16(), poison = zero16();
    for (int i = 0; i < count; i++) {
        const vec16 values = load16(x, first + i * 16, dtype);
        largest = max16(abs16(values), largest);
        poison = add16(poison, mul16(values, zero16()));
    }
    const float peak = largest16(largest);
    const vec16 factor = all16(peak > 0 ? 127.0f / peak : 0.0f);
    for (int i = 0; i < count; i++) rounded[i] = to_ints16(mul16(load16(x, first + i * 16, dtype), factor));
    return peak / 127.0f + sum16(poison);
}

#endif
