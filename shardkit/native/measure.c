/* Measures of pixels: the same numbers as shardkit/codecs/measures.py, bit for bit. */
#include "convert.h"
#include "png.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GRID 32   /* sides of a reduced image */
#define WAVES 8   /* lowest frequencies that make a hash */
#define RANGES 5
#define EIGHTHS 8
#define UNIT (EIGHTHS * GRID)
#define FINE 16   /* levels of a reduced image for each level of the image */
#define WINDOW 9
#define CHUNK (1 << 16)
#define FEW_BITS 4.3
#define USUAL_SIDE 512

/* Ranges of the width and the height that views have. */
static const uint8_t views[SK_VIEWS][2] = {{0, 0}, {1, 1}, {2, 1}, {1, 2}, {2, 2}, {3, 3}, {4, 4}};

/* Whether each turn transposes the picture, and then mirrors its columns and its rows. */
static const uint8_t turns[SK_TURNS][3] = {{0, 1, 0}, {0, 0, 1}, {0, 1, 1}, {1, 0, 0}, {1, 1, 1}, {1, 1, 0}};

typedef uint64_t histogram[256];

static void moments(uint64_t sum, uint64_t squares, uint64_t count, float *mean, float *deviation) {
    double middle = (double)sum / (double)count;
    double variance = (double)squares / (double)count - middle * middle;
    *mean = (float)middle;
    *deviation = (float)sqrt(variance > 0 ? variance : 0);
}

/* Measure the channels, and convert the pixels to gray as Pillow does. */
static void measure_colors(const uint8_t *pixels, size_t count, uint8_t *gray, sk_measures *out) {
    uint64_t sums[3] = {0}, squares[3] = {0}, sum = 0, square = 0, seen = 0;
    histogram levels = {0};
    for (size_t n = 0; n < count; n++, pixels += 3) {
        for (int c = 0; c < 3; c++) {
            sums[c] += pixels[c];
            squares[c] += (uint32_t)pixels[c] * pixels[c];
        }
        gray[n] = (uint8_t)((pixels[0] * 19595u + pixels[1] * 38470u + pixels[2] * 7471u + 0x8000) >> 16);
        levels[gray[n]]++;
    }
    for (int c = 0; c < 3; c++) moments(sums[c], squares[c], count, &out->mean[c], &out->std[c]);
    for (uint32_t level = 0; level < 256; level++) {
        sum += level * levels[level];
        square += (uint64_t)(level * level) * levels[level];
        seen += levels[level];
        if (100 * (seen - levels[level]) < 99 * (uint64_t)count) out->highlight = (uint8_t)level;
    }
    moments(sum, square, count, &out->brightness, &out->contrast);
}

/* Return the sums of the parts of a grid, in units of 1 / UNIT x 1 / UNIT pixel. */
static void reduce(const uint8_t *gray, uint32_t width, sk_span span, uint64_t totals[GRID][GRID]) {
    uint32_t whole[GRID], part[GRID]; /* pixels up to the end of each part */
    uint64_t down = span.down;
    memset(totals, 0, GRID * sizeof *totals);
    for (uint64_t n = 0; n < GRID; n++) {
        whole[n] = (uint32_t)((n + 1) * span.across / UNIT);
        part[n] = (uint32_t)((n + 1) * span.across % UNIT);
    }
    for (uint64_t y = 0; y * EIGHTHS < down; y++, gray += width) {
        uint64_t sums[GRID], sum = 0, before = 0, top = y * UNIT, bottom = top + UNIT;
        uint32_t x = 0;
        for (int n = 0; n < GRID; n++) {
            uint64_t at;
            while (x < whole[n]) sum += gray[x++];
            at = sum * UNIT + (part[n] ? part[n] * (uint64_t)gray[x] : 0);
            sums[n] = at - before;
            before = at;
        }
        for (uint64_t row = top / down; row < GRID && row * down < bottom; row++) {
            uint64_t start = row * down > top ? row * down : top;
            uint64_t stop = (row + 1) * down < bottom ? (row + 1) * down : bottom;
            for (int n = 0; n < GRID; n++) totals[row][n] += (stop - start) * sums[n];
        }
    }
}

/* Return 64 bits: which of the waves exceed their lower median. */
static uint64_t hash_of(const int32_t *amplitudes) {
    uint64_t bits = 0;
    for (int n = 0; n < WAVES * WAVES; n++) {
        int32_t below = 0;
        for (int m = 0; m < WAVES * WAVES; m++) below += amplitudes[m] < amplitudes[n];
        bits = bits << 1 | (below >= WAVES * WAVES / 2);
    }
    return bits;
}

/* Hash the picture as it is mirrored or rotated: a mirrored cosine has the opposite sign if its
 * frequency is odd, and a picture reflected at its diagonal has the transposed amplitudes. */
static void hash_turned(const int32_t *amplitudes, uint64_t *turned) {
    for (int turn = 0; turn < SK_TURNS; turn++) {
        int32_t changed[WAVES * WAVES];
        for (int y = 0; y < WAVES; y++)
            for (int x = 0; x < WAVES; x++) {
                int odd = (turns[turn][1] && x % 2) != (turns[turn][2] && y % 2);
                int32_t amplitude = amplitudes[turns[turn][0] ? x * WAVES + y : y * WAVES + x];
                changed[y * WAVES + x] = odd ? -amplitude : amplitude;
            }
        turned[turn] = hash_of(changed);
    }
}

static void measure_hashes(const uint8_t *gray, uint32_t width, sk_span span,
                           const int16_t *waves, sk_measures *out) {
    uint64_t totals[GRID][GRID], size = (uint64_t)span.across * span.down, mean = GRID * GRID / 2;
    int32_t across[GRID][RANGES * WAVES];
    int16_t levels[GRID][GRID];

    reduce(gray, width, span, totals);
    for (int y = 0; y < GRID; y++)
        for (int x = 0; x < GRID; x++) {
            totals[y][x] = (totals[y][x] * FINE + size / 2) / size;
            mean += totals[y][x];
        }
    mean /= GRID * GRID;
    for (int y = 0; y < GRID; y++)
        for (int x = 0; x < GRID; x++)
            levels[y][x] = (int16_t)((int64_t)totals[y][x] - (int64_t)mean);
    for (int y = 0; y < GRID; y++)
        for (int n = 0; n < RANGES * WAVES; n++) {
            int32_t sum = 0;
            for (int x = 0; x < GRID; x++) sum += levels[y][x] * waves[n * GRID + x];
            across[y][n] = sum;
        }
    for (int view = 0; view < SK_VIEWS; view++) {
        int left = views[view][0] * WAVES, top = views[view][1] * WAVES;
        int32_t amplitudes[WAVES * WAVES];
        for (int y = 0; y < WAVES; y++) {
            int64_t sums[WAVES] = {0};
            for (int n = 0; n < GRID; n++)
                for (int x = 0; x < WAVES; x++)
                    sums[x] += (int64_t)waves[(top + y) * GRID + n] * across[n][left + x];
            for (int x = 0; x < WAVES; x++) amplitudes[y * WAVES + x] = (int32_t)(sums[x] >> 17);
        }
        amplitudes[0] = 0; /* the mean level does not count */
        out->hashes[view] = hash_of(amplitudes);
        if (view == 0) hash_turned(amplitudes, out->turned);
    }
}

/* Add the differences of neighbors, and how much of them a blur removes. `from` is the first of
 * WINDOW + 1 values that are `step` apart; all are at most 8 * 255, so that a sum of CHUNK fits. */
static void add_lost(const int16_t *from, size_t step, size_t count, uint64_t *lost, uint64_t *total) {
    const int16_t *one = from + WINDOW / 2 * step, *next = one + step, *last = from + WINDOW * step;
    for (size_t start = 0; start < count; start += CHUNK) {
        size_t stop = count - start < CHUNK ? count : start + CHUNK;
        uint32_t removed = 0, all = 0;
        for (size_t n = start; n < stop; n++) {
            int16_t here = (int16_t)(next[n] - one[n]), blurred = (int16_t)(last[n] - from[n]);
            here = (int16_t)(WINDOW * (here < 0 ? -here : here));
            blurred = (int16_t)(blurred < 0 ? -blurred : blurred);
            all += (uint16_t)here;
            removed += (uint16_t)(here > blurred ? here - blurred : 0);
        }
        *lost += removed;
        *total += all;
    }
}

/* Return the sharpness at one scale. */
static double sharpness_of(const int16_t *levels, uint32_t width, uint32_t height) {
    uint64_t lost[2] = {0}, total[2] = {0};
    double least = 1;
    if (width <= 2 * WINDOW || height <= 2 * WINDOW) return 1; /* too small to judge */
    for (size_t y = 0; y < height; y++)
        add_lost(levels + y * width, 1, width - WINDOW, &lost[0], &total[0]);
    for (size_t y = 0; y < height - WINDOW; y++)
        add_lost(levels + y * width, width, width, &lost[1], &total[1]);
    for (int n = 0; n < 2; n++) {
        double fraction = total[n] ? (double)lost[n] / (double)total[n] : 0;
        if (fraction < least) least = fraction;
    }
    return least;
}

/* Return twice the mean of scale x scale pixels. */
static int16_t mean_of(const uint8_t *from, size_t width, uint32_t scale) {
    uint32_t sum = 0;
    for (uint32_t y = 0; y < scale; y++, from += width)
        for (uint32_t x = 0; x < scale; x++) sum += from[x];
    return (int16_t)(2 * sum / (scale * scale));
}

enum sk_code sk_sharpness(const uint8_t *gray, uint32_t width, uint32_t height, float *sharpness) {
    uint32_t shorter = width < height ? width : height;
    uint32_t scale = shorter < 2 * SK_SHARP_SIDE ? 1 : shorter / SK_SHARP_SIDE;
    size_t columns = width / scale, rows = height / scale, count = columns * rows;
    int16_t *levels = malloc(count * sizeof *levels);
    double whole, half;
    if (levels == NULL) return SK_MEMORY;
    if (scale == 1)
        for (size_t n = 0; n < count; n++) levels[n] = (int16_t)(2 * gray[n]);
    else
        for (size_t n = 0; n < count; n++)
            levels[n] = mean_of(gray + n / columns * scale * width + n % columns * scale, width, scale);
    whole = sharpness_of(levels, (uint32_t)columns, (uint32_t)rows);
    for (size_t y = 0; y < rows / 2; y++) /* in place: no value is read again */
        for (size_t x = 0; x < columns / 2; x++) {
            const int16_t *from = levels + 2 * y * columns + 2 * x;
            int sum = from[0] + from[1] + from[columns] + from[columns + 1];
            levels[y * (columns / 2) + x] = (int16_t)sum;
        }
    half = sharpness_of(levels, (uint32_t)columns / 2, (uint32_t)rows / 2);
    free(levels);
    *sharpness = (float)(half < whole ? half : whole);
    return SK_DONE;
}

int sk_may_be_blurred(size_t length, uint32_t width, uint32_t height, uint32_t quantizers) {
    double bits = 8 * (double)length / ((double)width * height) / FEW_BITS, mean = quantizers / 64.0;
    uint32_t shorter = width < height ? width : height;
    if (shorter > USUAL_SIDE) bits *= sqrt((double)shorter / USUAL_SIDE);
    return bits * bits * bits * bits * bits * mean * mean < 1;
}

enum sk_code sk_measure(const uint8_t *pixels, uint32_t width, uint32_t height, sk_span span,
                        const int16_t *waves, sk_memory *work, sk_measures *out) {
    size_t count = (size_t)width * height;
    uint8_t *gray = sk_reserve(work, count);
    if (gray == NULL) return SK_MEMORY;
    measure_colors(pixels, count, gray, out);
    measure_hashes(gray, width, span, waves, out);
    out->pixels = sk_crc32(0, pixels, 3 * count);
    return sk_sharpness(gray, width, height, &out->sharpness);
}

enum sk_code sk_measure_png(const uint8_t *rows, uint32_t width, uint32_t height, uint32_t channels,
                            const int16_t *waves, sk_measures *out) {
    sk_span whole = {EIGHTHS * width, EIGHTHS * height};
    size_t stride = (size_t)width * channels, count = (size_t)width * height;
    sk_memory pixels = {NULL, 0}, work = {NULL, 0};
    uint8_t *to = sk_reserve(&pixels, 3 * count + SK_PNG_SLACK);
    enum sk_code code = to == NULL ? SK_MEMORY : SK_DONE;
    for (size_t y = 0; code == SK_DONE && y < height; y++, rows += 1 + stride) {
        uint8_t *row = memcpy(to + y * stride, rows + 1, stride);
        if (*rows > 4) code = SK_DECODER;
        sk_unfilter(*rows, row, y ? row - stride : NULL, stride, channels);
    }
    if (channels == 1) /* in place, from the end */
        for (size_t n = count; code == SK_DONE && n--;) memset(to + 3 * n, to[n], 3);
    if (code == SK_DONE) code = sk_measure(to, width, height, whole, waves, &work, out);
    out->components = (uint8_t)channels;
    out->plain = out->done = code == SK_DONE;
    sk_release(&pixels);
    sk_release(&work);
    return code;
}
