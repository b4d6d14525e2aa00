/* Draw the pieces of RandomResizedCrop, and those of RandomCrop for images in memory: the numbers of
 * Draws in shardkit/sampling/order.py, and the arithmetic of shardkit/torch/data/crops.py, to the bit. */
#include "core.h"

#include <math.h>
#include <string.h>

#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)
#define ATTEMPTS 10

static uint64_t mix(uint64_t value) {
    value = (value ^ value >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    value = (value ^ value >> 27) * UINT64_C(0x94D049BB133111EB);
    return value ^ value >> 31;
}

static uint64_t bits(uint64_t *state) { return mix(*state += GOLDEN); }

static double uniform(uint64_t *state, const double range[2]) {
    return range[0] + (range[1] - range[0]) * ((double)(bits(state) >> 11) * 0x1p-53);
}

/* The upper half of the product with 64 bits. */
static int32_t below(uint64_t *state, int32_t limit) {
    uint64_t value = bits(state), factor = (uint64_t)limit;
    return (int32_t)(((value >> 32) * factor + ((value & 0xFFFFFFFF) * factor >> 32)) >> 32);
}

static double at_least_1(double value) { return value < 1 ? 1 : value; }

static sk_piece draw(const sk_random_crop *crop, int32_t width, int32_t height, uint64_t state) {
    const double all[2] = {0.0, 1.0};
    sk_piece piece = {{0, 0, width, height}, 0, 0, 0};
    sk_region *region = &piece.region;

    piece.flip = uniform(&state, all) < crop->flip;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        double area = (double)((int64_t)width * height) * uniform(&state, crop->scale);
        double ratio = exp(uniform(&state, crop->log_ratio));
        double across = rint(sqrt(area * ratio)), down = rint(sqrt(area / ratio));
        if (0 < across && across <= width && 0 < down && down <= height) {
            region->width = (int32_t)across;
            region->height = (int32_t)down;
            region->left = below(&state, width - region->width + 1);
            region->top = below(&state, height - region->height + 1);
            return piece;
        }
    }
    if (width < crop->ratio[0] * height)
        region->height = (int32_t)at_least_1(rint(width / crop->ratio[0]));
    else if (width > crop->ratio[1] * height)
        region->width = (int32_t)at_least_1(rint(height * crop->ratio[1]));
    region->left = (width - region->width) / 2;
    region->top = (height - region->height) / 2;
    return piece;
}

int sk_draw_crops(const sk_random_crop *crop, uint64_t key, size_t count, const uint64_t *samples,
                  const int64_t *widths, const int64_t *heights, sk_piece *pieces) {
    for (size_t n = 0; n < count; n++) {
        int64_t width = widths[n], height = heights[n];
        if (width < 1 || height < 1 || width > INT32_MAX || height > INT32_MAX) return 0;
        pieces[n] = draw(crop, (int32_t)width, (int32_t)height, mix(key ^ mix(samples[n] + 1)));
    }
    return 1;
}

/* A crop of an image in memory: its first pixel, or NULL. */
typedef struct {
    const uint8_t *from;
    int flip;
} stored_crop;

static stored_crop draw_stored(const sk_margined *images, double flip, int64_t position,
                               uint64_t state) {
    const double all[2] = {0.0, 1.0};
    stored_crop crop = {NULL, uniform(&state, all) < flip};
    size_t left = (size_t)below(&state, images->lefts), top = (size_t)below(&state, images->tops);
    if (position < 0 || (size_t)position >= images->count) return crop;
    top += (size_t)position * (size_t)images->lines;
    crop.from = images->pixels + 3 * (top * (size_t)images->line + left);
    return crop;
}

static void copy_line(const uint8_t *from, size_t length, int flip, uint8_t *out) {
    if (!flip) {
        memcpy(out, from, length);
        return;
    }
    memcpy(out, from + length - 3, 3);
    for (size_t x = 3; x + 3 < length; x += 3) /* the next pixel overwrites the fourth byte */
        memcpy(out + x, from + length - 3 - x, 4);
    memcpy(out + length - 3, from, 3);
}

int sk_copy_crops(const sk_margined *images, double flip, uint64_t key, size_t count,
                  const int64_t *positions, const uint64_t *samples, int32_t width, int32_t height,
                  uint8_t *out) {
    const size_t length = 3 * (size_t)width, stride = 3 * (size_t)images->line;
    stored_crop crop, next = {NULL, 0};
    for (size_t n = 0; n <= count; n++) {
        crop = next;
        if (n < count) {
            next = draw_stored(images, flip, positions[n], mix(key ^ mix(samples[n] + 1)));
            if (next.from == NULL) return 0;
        }
        for (int32_t y = 0; n > 0 && y < height; y++, out += length) {
            /* Prefetching the next image saves a third. */
            for (size_t x = 0; x < length; x += 64) __builtin_prefetch(next.from + y * stride + x);
            copy_line(crop.from + y * stride, length, crop.flip, out);
        }
    }
    return 1;
}
