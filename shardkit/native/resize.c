/* Scale RGB pixels with Pillow's arithmetic, to the bit: two passes over bytes, first across and
 * then down, each a weighted mean with fixed-point weights of 22 bits, rounded to a byte. AVX2
 * multiplies 16-bit numbers, so each weight is split in two. */
#include "resize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define VECTORS 1
#include <immintrin.h>
#endif

#define BITS 22
#define HALF (1 << (BITS - 1))

/* Bytes that a pass may read beyond the last pixel of a row. */
#define SLACK 16
/* Rows that it scales at a time. */
#define ROWS 4

typedef sk_kernel kernel;

static double bilinear(double x) {
    if (x < 0.0) x = -x;
    return x < 1.0 ? 1.0 - x : 0.0;
}

static double bicubic(double x) {
    const double a = -0.5;
    if (x < 0.0) x = -x;
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
    return 0.0;
}

static double sinc(double x) {
    if (x == 0.0) return 1.0;
    x *= 3.14159265358979323846; /* M_PI is no part of C11 */
    return sin(x) / x;
}

static double lanczos(double x) { return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

static double box_of(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }

static const struct {
    double (*weight)(double);
    double support;
} filters[] = {
    [SK_BILINEAR] = {bilinear, 1.0},
    [SK_BICUBIC] = {bicubic, 2.0},
    [SK_LANCZOS] = {lanczos, 3.0},
    [SK_BOX] = {box_of, 0.5},
};

static double reach(enum sk_filter filter, double scale) {
    return filters[filter].support * (scale < 1.0 ? 1.0 : scale);
}

/* Pillow computes the length of a box in single precision. */
static double ratio(const float box[2], int32_t outputs) {
    return (double)(box[1] - box[0]) / outputs;
}

/* Compute the weights of the outputs from `first` on. `scratch` has room for `most` numbers. */
static void set_kernel(kernel *kernel, int32_t inputs, const float box[2], int32_t outputs,
                       int32_t first, int32_t count, enum sk_filter filter, double *scratch) {
    double scale = ratio(box, outputs), support = reach(filter, scale);
    double step = 1.0 / (scale < 1.0 ? 1.0 : scale);
    for (int32_t n = 0; n < count; n++) {
        double center = box[0] + (first + n + 0.5) * scale, sum = 0.0;
        int32_t *weights = kernel->weights + (size_t)n * kernel->most;
        double low = center - support + 0.5, high = center + support + 0.5;
        int32_t begin = low < 0 ? 0 : (int32_t)low;
        int32_t end = high > inputs ? inputs : (int32_t)high, total = end - begin;
        for (int32_t x = 0; x < total; x++) {
            double at = (x + begin - center + 0.5) * step;
            scratch[x] = filters[filter].weight(at);
            sum += scratch[x];
        }
        for (int32_t x = 0; x < total; x++) {
            double weight = sum != 0.0 ? scratch[x] / sum : scratch[x];
            weights[x] = (int32_t)((weight < 0 ? -0.5 : 0.5) + weight * (1 << BITS));
        }
        kernel->firsts[n] = begin;
        kernel->counts[n] = total;
    }
}

static inline uint8_t byte_of(int32_t sum) {
    sum >>= BITS;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

/* Scale one row across. */
static void across(const uint8_t *row, const kernel *kernel, int32_t width, int flip,
                   uint8_t *out) {
    for (int32_t x = 0; x < width; x++) {
        const int32_t *weights = kernel->weights + (size_t)x * kernel->most;
        const uint8_t *from = row + 3 * (size_t)kernel->firsts[x];
        uint8_t *to = out + 3 * (size_t)(flip ? width - 1 - x : x);
        int32_t red = HALF, green = HALF, blue = HALF;
        for (int32_t n = 0; n < kernel->counts[x]; n++, from += 3) {
            red += from[0] * weights[n];
            green += from[1] * weights[n];
            blue += from[2] * weights[n];
        }
        to[0] = byte_of(red);
        to[1] = byte_of(green);
        to[2] = byte_of(blue);
    }
}

/* Scale one row of `size` bytes down; `rows` is the first row that has a weight. */
static void down(const uint8_t *rows, size_t stride, const int32_t *weights, int32_t count,
                 size_t begin, size_t size, uint8_t *out) {
    for (size_t x = begin; x < size; x++) {
        int32_t sum = HALF;
        for (int32_t y = 0; y < count; y++) sum += rows[y * stride + x] * weights[y];
        out[x] = byte_of(sum);
    }
}

#ifdef VECTORS
/* The same sums with the instruction that multiplies 16-bit numbers and adds pairs of products.
 * A weight is split in a higher part and a lower part of SPLIT bits, so that both fit:
 * the sum of products is (sum with the higher parts << SPLIT) + sum with the lower parts. */
#define SPLIT 11
#define AVX2 __attribute__((target("avx2")))

/* Two weights as 16-bit numbers in one 32-bit number, of their higher or their lower parts. */
static int32_t higher(int32_t one, int32_t two) {
    return (int32_t)(((uint32_t)(one >> SPLIT) & 0xFFFF) | (uint32_t)(two >> SPLIT) << 16);
}

static int32_t lower(int32_t one, int32_t two) {
    const uint32_t mask = (1u << SPLIT) - 1;
    return (int32_t)(((uint32_t)one & mask) | ((uint32_t)two & mask) << 16);
}

/* The weights of a row's outputs in groups of four, as `across_avx2` reads them: 2 higher pairs and
 * 2 lower pairs for each group. */
static void pack(const kernel *kernel, int32_t width, int32_t groups, int32_t *packed) {
    for (int32_t x = 0; x < width; x++) {
        const int32_t *weights = kernel->weights + (size_t)x * kernel->most;
        for (int32_t group = 0; group < groups; group++, packed += 4) {
            int32_t four[4];
            for (int32_t n = 0; n < 4; n++) {
                int32_t at = 4 * group + n;
                four[n] = at < kernel->counts[x] ? weights[at] : 0;
            }
            packed[0] = higher(four[0], four[1]);
            packed[1] = higher(four[2], four[3]);
            packed[2] = lower(four[0], four[1]);
            packed[3] = lower(four[2], four[3]);
        }
    }
}

static int64_t pair_at(const int32_t *weights) {
    int64_t pair;
    memcpy(&pair, weights, sizeof pair);
    return pair;
}

/* Store the sums of a pixel of ROWS rows: of each, two sums of red and green, then of blue. */
AVX2 static void put_pixels(const __m256i sums[ROWS], uint8_t *const to[ROWS]) {
    __m256i two[2], bytes;
    uint64_t reds, blues; /* with the greens, and with nothing */
    for (int n = 0; n < 2; n++)
        two[n] = _mm256_srai_epi32(_mm256_hadd_epi32(sums[2 * n], sums[2 * n + 1]), BITS);
    bytes = _mm256_packs_epi32(two[0], two[1]);
    bytes = _mm256_packus_epi16(bytes, bytes);
    reds = (uint64_t)_mm_cvtsi128_si64(_mm256_castsi256_si128(bytes));
    blues = (uint64_t)_mm_cvtsi128_si64(_mm256_extracti128_si256(bytes, 1));
    for (int n = 0; n < ROWS; n++, reds >>= 16, blues >>= 16) {
        memcpy(to[n], &reds, 2);
        to[n][2] = (uint8_t)blues;
    }
}

/* Scale ROWS rows, for which the weights are unpacked once. Reads up to SLACK bytes beyond the last pixel
 * of each. */
AVX2 static void across_avx2(const uint8_t *const rows[ROWS], const kernel *kernel,
                             const int32_t *packed, int32_t groups, int32_t width, int flip,
                             uint8_t *const out[ROWS]) {
    /* The 16-bit values of four pixels, red and green in the lower lane, blue in the upper. */
    const __m256i spread = _mm256_setr_epi8(
        0, -1, 3, -1, 6, -1, 9, -1, 1, -1, 4, -1, 7, -1, 10, -1,
        2, -1, 5, -1, 8, -1, 11, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i half = _mm256_setr_epi32(HALF, 0, HALF, 0, HALF, 0, 0, 0);
    for (int32_t x = 0; x < width; x++) {
        const int32_t *weights = packed + 4 * (size_t)groups * (size_t)x;
        size_t at = 3 * (size_t)kernel->firsts[x];
        size_t place = 3 * (size_t)(flip ? width - 1 - x : x);
        int32_t used = (kernel->counts[x] + 3) / 4;
        __m256i high[ROWS], low[ROWS];
        uint8_t *to[ROWS];
        for (int n = 0; n < ROWS; n++) {
            high[n] = _mm256_setzero_si256();
            low[n] = half;
            to[n] = out[n] + place;
        }
        for (int32_t group = 0; group < used; group++, at += 12, weights += 4) {
            __m256i higher = _mm256_set1_epi64x(pair_at(weights));
            __m256i lower = _mm256_set1_epi64x(pair_at(weights + 2));
            for (int n = 0; n < ROWS; n++) {
                __m256i pixels = _mm256_broadcastsi128_si256(
                    _mm_loadu_si128((const __m128i *)(rows[n] + at)));
                pixels = _mm256_shuffle_epi8(pixels, spread);
                high[n] = _mm256_add_epi32(high[n], _mm256_madd_epi16(pixels, higher));
                low[n] = _mm256_add_epi32(low[n], _mm256_madd_epi16(pixels, lower));
                /* One row after another, or the compiler needs more registers than there are. */
                __asm__("" : "+x"(high[n]), "+x"(low[n]));
            }
        }
        for (int n = 0; n < ROWS; n++)
            low[n] = _mm256_add_epi32(low[n], _mm256_slli_epi32(high[n], SPLIT));
        put_pixels(low, to);
    }
}

AVX2 static void down_avx2(const uint8_t *rows, size_t stride, const int32_t *weights,
                           int32_t count, size_t size, int32_t *pairs, uint8_t *out) {
    const __m256i half = _mm256_set1_epi32(HALF);
    size_t x = 0;
    for (int32_t y = 0; y < count; y += 2) {
        int32_t second = y + 1 < count ? weights[y + 1] : 0;
        pairs[y] = higher(weights[y], second);
        pairs[y + 1] = lower(weights[y], second);
    }
    for (; x + 32 <= size; x += 32) {
        __m256i high[4], low[4];
        for (int n = 0; n < 4; n++) high[n] = low[n] = _mm256_setzero_si256();
        for (int32_t y = 0; y < count; y += 2) {
            const uint8_t *one = rows + y * stride + x, *two = y + 1 < count ? one + stride : one;
            __m256i higher_pair = _mm256_set1_epi32(pairs[y]);
            __m256i lower_pair = _mm256_set1_epi32(pairs[y + 1]);
            __m256i first = _mm256_loadu_si256((const __m256i *)one);
            __m256i next = _mm256_loadu_si256((const __m256i *)two);
            __m256i zero = _mm256_setzero_si256();
            __m256i mixed[2] = {_mm256_unpacklo_epi8(first, next),
                                _mm256_unpackhi_epi8(first, next)};
            for (int n = 0; n < 4; n++) {
                __m256i pairs = n % 2 ? _mm256_unpackhi_epi8(mixed[n / 2], zero)
                                      : _mm256_unpacklo_epi8(mixed[n / 2], zero);
                high[n] = _mm256_add_epi32(high[n], _mm256_madd_epi16(pairs, higher_pair));
                low[n] = _mm256_add_epi32(low[n], _mm256_madd_epi16(pairs, lower_pair));
            }
        }
        for (int n = 0; n < 4; n++) {
            low[n] = _mm256_add_epi32(low[n], _mm256_slli_epi32(high[n], SPLIT));
            low[n] = _mm256_srai_epi32(_mm256_add_epi32(low[n], half), BITS);
        }
        /* Packing works within lanes, as unpacking does, so the order is right again. */
        __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(low[0], low[1]),
                                            _mm256_packs_epi32(low[2], low[3]));
        _mm256_storeu_si256((__m256i *)(out + x), bytes);
    }
    down(rows, stride, weights, count, x, size, out);
}
#endif

/* Scale rows across. Those near the end of `rows` are read from copies with SLACK bytes after each. */
static void across_all(const uint8_t *rows, size_t stride, int32_t count, const sk_scaler *scaler,
                       int flip, uint8_t *out) {
    size_t size = 3 * (size_t)scaler->source_width, wide = 3 * (size_t)scaler->region.width;
#ifdef VECTORS
    if (sk_cpu.avx2) {
        int32_t groups = (scaler->wide.most + 3) / 4;
        for (int32_t y = 0; y < count; y += ROWS) {
            const uint8_t *from[ROWS];
            uint8_t *to[ROWS];
            for (int n = 0; n < ROWS; n++) { /* the last one, more than once */
                size_t row = (size_t)(y + n < count ? y + n : count - 1);
                from[n] = rows + row * stride;
                to[n] = out + row * wide;
                if (((size_t)count - 1 - row) * stride < SLACK)
                    from[n] = memcpy(scaler->last_rows + n * (size + SLACK), from[n], size);
            }
            across_avx2(from, &scaler->wide, scaler->packed, groups, scaler->region.width, flip, to);
        }
        return;
    }
#endif
    (void)size;
    for (int32_t y = 0; y < count; y++)
        across(rows + y * stride, &scaler->wide, scaler->region.width, flip, out + y * wide);
}

/* Scale all rows of `size` bytes down; `top` is the number of the first row in `rows`. */
static void down_all(const uint8_t *rows, size_t stride, size_t size, const sk_scaler *scaler,
                     int32_t top, uint8_t *out) {
    const kernel *kernel = &scaler->high;
    for (int32_t y = 0; y < scaler->region.height; y++, out += size) {
        const uint8_t *from = rows + (kernel->firsts[y] - top) * stride;
        const int32_t *weights = kernel->weights + (size_t)y * kernel->most;
#ifdef VECTORS
        if (sk_cpu.avx2) {
            down_avx2(from, stride, weights, kernel->counts[y], size, scaler->pairs, out);
            continue;
        }
#endif
        down(from, stride, weights, kernel->counts[y], 0, size, out);
    }
}

void sk_flip(uint8_t *pixels, int32_t width, int32_t height) {
    for (int32_t y = 0; y < height; y++, pixels += 3 * (size_t)width) {
        uint8_t *left = pixels, *right = pixels + 3 * (size_t)width - 3, pixel[3];
        for (; left < right; left += 3, right -= 3) {
            memcpy(pixel, left, 3);
            memcpy(left, right, 3);
            memcpy(right, pixel, 3);
        }
    }
}

static int is_box(const float box[2], int32_t inputs) {
    return box[0] >= 0 && box[1] <= inputs && box[0] < box[1];
}

/* Working memory, cut into aligned pieces; without `at`, only counts. */
typedef struct {
    uint8_t *at;
    size_t size;
} pieces;

static void *take(pieces *from, size_t size) {
    uint8_t *taken = from->at;
    size = (size + 15) & ~(size_t)15;
    from->size += size;
    if (from->at != NULL) from->at += size;
    return taken;
}

static void take_kernel(pieces *from, kernel *kernel, int32_t count) {
    kernel->firsts = take(from, (size_t)count * sizeof(int32_t));
    kernel->counts = take(from, (size_t)count * sizeof(int32_t));
    kernel->weights = take(from, (size_t)count * kernel->most * sizeof(int32_t));
}

/* Lay out the working memory. Either pass may be the first. */
static void lay_out(pieces *from, sk_scaler *scaler) {
    kernel *wide = &scaler->wide, *high = &scaler->high;
    sk_region region = scaler->region;
    size_t most = wide->most > high->most ? wide->most : high->most;
    size_t tall = 3 * (size_t)region.width * scaler->source_height;
    size_t flat = 3 * (size_t)scaler->source_width * region.height;
    size_t row = 3 * (size_t)scaler->source_width + SLACK;
    scaler->scratch = take(from, most * sizeof(double));
    take_kernel(from, wide, region.width);
    take_kernel(from, high, region.height);
    scaler->packed = take(from, ((size_t)wide->most + 3) / 4 * 16 * region.width);
    scaler->pairs = take(from, ((size_t)high->most + 1) * sizeof(int32_t));
    scaler->last_rows = take(from, ROWS * row);
    scaler->between = take(from, scaler->tall_first ? flat : tall);
}

enum sk_code sk_scaler_begin(sk_scaler *scaler, const double box[4], int32_t width, int32_t height,
                             enum sk_filter filter, sk_memory *work) {
    const float xs[2] = {(float)box[0], (float)box[2]}, ys[2] = {(float)box[1], (float)box[3]};
    int32_t shrinks = scaler->source_height - height;
    sk_region region = scaler->region;
    pieces parts = {NULL, 0};
    int32_t last = region.height - 1;

    if (!is_box(xs, scaler->source_width) || !is_box(ys, scaler->source_height))
        return SK_UNSUPPORTED;
    /* Where a side keeps its size, its weights are 1, so that the pass changes nothing. */
    scaler->tall_first = scaler->tall_first && shrinks > 0 &&
                         shrinks > 2 * ((int64_t)scaler->source_width - width);
    scaler->wide.most = (int32_t)ceil(reach(filter, ratio(xs, width))) * 2 + 1;
    scaler->high.most = (int32_t)ceil(reach(filter, ratio(ys, height))) * 2 + 1;
    lay_out(&parts, scaler);
    parts.at = sk_reserve(work, parts.size);
    if (parts.at == NULL) return SK_MEMORY;
    lay_out(&parts, scaler);
    set_kernel(&scaler->wide, scaler->source_width, xs, width, region.left, region.width, filter,
               scaler->scratch);
    set_kernel(&scaler->high, scaler->source_height, ys, height, region.top, region.height, filter,
               scaler->scratch);
#ifdef VECTORS
    pack(&scaler->wide, region.width, (scaler->wide.most + 3) / 4, scaler->packed);
    memset(scaler->last_rows, 0, ROWS * (3 * (size_t)scaler->source_width + SLACK));
#endif
    scaler->first = scaler->high.firsts[0];
    scaler->end = scaler->high.firsts[last] + scaler->high.counts[last];
    return SK_DONE;
}

void sk_scaler_add(sk_scaler *scaler, const uint8_t *rows, size_t stride, int32_t top,
                   int32_t count, int flip) {
    int32_t first = top > scaler->first ? top : scaler->first;
    int32_t end = top + count < scaler->end ? top + count : scaler->end;
    if (first < end)
        across_all(rows + (first - top) * stride, stride, end - first, scaler, flip,
                   scaler->between + 3 * (size_t)scaler->region.width * (first - scaler->first));
}

void sk_scaler_end(const sk_scaler *scaler, uint8_t *out) {
    size_t size = 3 * (size_t)scaler->region.width;
    down_all(scaler->between, size, size, scaler, scaler->first, out);
}

enum sk_code sk_resize(const uint8_t *pixels, size_t source_stride, int32_t source_width,
                       int32_t source_height, const double box[4], int32_t width, int32_t height,
                       enum sk_filter filter, int tall_first, sk_region region, int flip,
                       sk_memory *work, uint8_t *out) {
    sk_scaler scaler = {.source_width = source_width,
                        .source_height = source_height,
                        .tall_first = tall_first,
                        .region = region};
    size_t size = 3 * (size_t)source_width;
    enum sk_code code = sk_scaler_begin(&scaler, box, width, height, filter, work);

    if (code != SK_DONE) return code;
    if (scaler.tall_first) {
        down_all(pixels, source_stride, size, &scaler, 0, scaler.between);
        across_all(scaler.between, size, region.height, &scaler, flip, out);
    } else { /* only the rows that the second pass reads */
        sk_scaler_add(&scaler, pixels, source_stride, 0, source_height, flip);
        sk_scaler_end(&scaler, out);
    }
    return SK_DONE;
}
