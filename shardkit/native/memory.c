/* Working memory, reused by the images of a batch: fresh pages cost more than filling them. */
#include "core.h"

#include <stdlib.h>

uint8_t *sk_reserve(sk_memory *memory, size_t size) {
    if (size > SK_MOST_MEMORY) return NULL;
    if (size > memory->size) {
        free(memory->data);
        memory->data = malloc(size);
        memory->size = memory->data == NULL ? 0 : size;
    }
    return memory->data;
}

void sk_release(sk_memory *memory) {
    free(memory->data);
    memory->data = NULL;
    memory->size = 0;
}
