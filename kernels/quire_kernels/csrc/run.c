/* Whoever calls a kernel does it through here. */
#include "vectors.h"

struct call {
    void (*kernel)(const void *arguments, int64_t rows);
    const void *arguments;
};

int quire_lacked_memory;

/* The calls in their order, all over the same number of rows. One team of threads goes through all of them: to start
 * one for each would take as long as many a kernel. Returns whether one of them lacked memory, so that there is no
 * result; one run at a time. */
EXPORT int quire_run(const struct call *calls, int64_t count, int64_t rows, int is_parallel) {
    quire_lacked_memory = 0;
#pragma omp parallel if (is_parallel)
    for (int64_t i = 0; i < count; i++) calls[i].kernel(calls[i].arguments, rows);
    return quire_lacked_memory;
}
