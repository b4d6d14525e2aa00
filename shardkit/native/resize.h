/* Scale an image whose rows arrive one after another, as sk_resize does if it is there as a whole. */
#ifndef SHARDKIT_RESIZE_H
#define SHARDKIT_RESIZE_H

#include "core.h"

/* The weights of one side: output `n` is the mean of `counts[n]` inputs from `firsts[n]` on. */
typedef struct {
    int32_t *firsts, *counts, *weights;
    int32_t most; /* weights stored for each output */
} sk_kernel;

typedef struct {
    int32_t source_width, source_height;
    int tall_first; /* may it scale down first; after the beginning, does it: it needs all rows then */
    sk_region region;
    int32_t first, end; /* the rows that it reads */
    sk_kernel wide, high;
    double *scratch;
    int32_t *packed, *pairs;
    uint8_t *last_rows, *between;
} sk_scaler;

/* Compute the weights; the sizes, tall_first and region are set. The working memory lasts to the end. */
enum sk_code sk_scaler_begin(sk_scaler *scaler, const double box[4], int32_t width, int32_t height,
                             enum sk_filter filter, sk_memory *work);
/* Scale the next rows across, `count` from `top` on. */
void sk_scaler_add(sk_scaler *scaler, const uint8_t *rows, size_t stride, int32_t top,
                   int32_t count, int flip);
/* Scale all of them down. */
void sk_scaler_end(const sk_scaler *scaler, uint8_t *out);

#endif
