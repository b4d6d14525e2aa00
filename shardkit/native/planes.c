/* Finish the planes of a JPEG decoder: upsample chroma and convert to RGB, for a region only. The pixels
 * are those of libjpeg: triangle ("fancy") upsampling, and color conversion in 16-bit fixed point. The
 * reference is shardkit/codecs/planes.py, which also describes the record. */
#include "core.h"

#include <stdio.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define VECTORS 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#endif

#define INLINE static inline __attribute__((always_inline))

/* Columns that rows have room for beyond their end, for whole vectors. */
#define SLACK 64

#define LINE "YUV4MPEG2 W%u H%u F1:1 Ip A1:1 C"
#define LINE_END " XCOLORRANGE=FULL\nFRAME"
#define PARAMETERS 4
#define PARAMETER 16 /* characters, each of 6 bits, lowest byte first: three checksums */
#define BANDS (PARAMETERS * PARAMETER * 6 / 32)
#define FRAME (PARAMETERS * (2 + PARAMETER) + 1) /* bytes of the parameters and the end of the line */

/* The planes of a record. */
typedef struct {
    const uint8_t *luma, *blue, *red; /* no blue and red: gray */
    uint32_t width, height, chroma_width, chroma_height;
    int halves_width, halves_height; /* whether chroma has half the width, or half the height */
    size_t mode;
    char header[64];           /* the line up to the mode */
    size_t line;               /* its bytes */
    size_t begin[4];           /* offsets of the planes, and of the end */
    uint32_t checksums[BANDS]; /* of each band of rows */
} planes;

/* Rows of luma in a band. */
static int32_t band_rows(uint32_t height) {
    return 2 * (int32_t)((height + 2 * BANDS - 1) / (2 * BANDS));
}

static const struct {
    const char *name;
    int colored, halves_width, halves_height;
} modes[] = {{"420jpeg", 1, 1, 1}, {"444", 1, 0, 0}, {"422", 1, 1, 0}, {"mono", 0, 0, 0}};

/* Decode a character of base64; 64 or more if it is none. */
static uint32_t bits_of(uint8_t character) {
    if (character >= 'A' && character <= 'Z') return character - 'A';
    if (character >= 'a' && character <= 'z') return character - 'a' + 26u;
    if (character >= '0' && character <= '9') return character - '0' + 52u;
    return character == '+' ? 62 : character == '/' ? 63 : 64;
}

/* Read the parameters of the frame and the end of its line. */
static int read_checksums(const uint8_t *line, uint32_t *checksums) {
    uint8_t bytes[4 * BANDS];
    size_t count = 0;
    for (int n = 0; n < PARAMETERS; n++) {
        if (*line++ != ' ' || *line++ != 'X') return 0;
        for (int group = 0; group < PARAMETER / 4; group++, line += 4) {
            uint32_t bits = 0;
            for (int k = 0; k < 4; k++) {
                uint32_t next = bits_of(line[k]);
                if (next > 63) return 0;
                bits = bits << 6 | next;
            }
            for (int k = 2; k >= 0; k--) bytes[count++] = (uint8_t)(bits >> 8 * k);
        }
    }
    for (int n = 0; n < BANDS; n++)
        checksums[n] = (uint32_t)bytes[4 * n] | (uint32_t)bytes[4 * n + 1] << 8 |
                       (uint32_t)bytes[4 * n + 2] << 16 | (uint32_t)bytes[4 * n + 3] << 24;
    return *line == '\n';
}

/* State the size of planes; returns whether images may have it. */
static int start_layout(planes *out, uint32_t width, uint32_t height) {
    out->width = width;
    out->height = height;
    out->line = (size_t)snprintf(out->header, sizeof out->header, LINE, width, height);
    return (uint64_t)width * height <= SK_MOST_PIXELS;
}

/* Lay out planes of a mode; returns whether a record of them has that length. */
static int lay_out(planes *out, size_t mode, size_t length) {
    const uint32_t width = out->width, height = out->height;
    const size_t luma = (size_t)width * height, name = strlen(modes[mode].name);
    size_t chroma;
    out->mode = mode;
    out->halves_width = modes[mode].halves_width;
    out->halves_height = modes[mode].halves_height;
    out->chroma_width = width - (out->halves_width ? width / 2 : 0);
    out->chroma_height = height - (out->halves_height ? height / 2 : 0);
    chroma = modes[mode].colored ? (size_t)out->chroma_width * out->chroma_height : 0;
    out->begin[0] = out->line + name + sizeof LINE_END - 1 + FRAME;
    out->begin[1] = out->begin[0] + luma;
    out->begin[2] = out->begin[1] + chroma;
    out->begin[3] = out->begin[2] + chroma;
    return out->begin[3] == length;
}

/* Compare the header of a record with its layout, and read the checksums of the bands. */
static int read_header(planes *out, const uint8_t *data) {
    const char *name = modes[out->mode].name;
    const uint8_t *at = data + out->line, *end = data + out->begin[0] - FRAME;
    return memcmp(data, out->header, out->line) == 0 && memcmp(at, name, strlen(name)) == 0 &&
           memcmp(at + strlen(name), LINE_END, sizeof LINE_END - 1) == 0 &&
           read_checksums(end, out->checksums);
}

/* Find the planes of a record that has to be of that size; its bytes are untrusted. */
static int find_planes(const uint8_t *data, size_t length, uint32_t width, uint32_t height,
                       planes *out) {
    if (!start_layout(out, width, height)) return 0;
    for (size_t mode = 0; mode < sizeof modes / sizeof *modes; mode++) {
        if (!lay_out(out, mode, length) || !read_header(out, data)) continue;
        out->luma = data + out->begin[0];
        out->blue = modes[mode].colored ? data + out->begin[1] : NULL;
        out->red = modes[mode].colored ? data + out->begin[2] : NULL;
        return 1;
    }
    return 0;
}

/* Lay out planes of that size and length. Only tiny ones may have another mode, and those of one
 * column, which have as many bytes with 4:2:2 as with 4:4:4. */
static int lay_out_any(planes *out, size_t length, uint32_t width, uint32_t height) {
    if (width == 1 || !start_layout(out, width, height)) return 0;
    for (size_t mode = 0; mode < sizeof modes / sizeof *modes; mode++)
        if (lay_out(out, mode, length)) return 1;
    return 0;
}

/* Find the bands of rows that a region needs: those before `end`, from `begin` on. */
static void find_bands(const planes *from, sk_region region, int32_t *begin, int32_t *end) {
    const int32_t height = (int32_t)from->height, rows = band_rows(from->height);
    const int32_t margin = from->halves_height ? 2 : 0; /* the next nearest row of chroma */
    const int32_t top = region.top - margin, bottom = region.top + region.height + margin;
    *begin = (top < 0 ? 0 : top) / rows;
    *end = ((bottom > height ? height : bottom) + rows - 1) / rows;
}

size_t sk_planes_ranges(size_t length, uint32_t width, uint32_t height, sk_region region,
                        sk_extent *ranges) {
    planes from;
    size_t count = 1, skipped = length;
    int32_t first, end;

    ranges[0] = (sk_extent){0, length};
    if (length < SK_LEAST_SKIPPED || !lay_out_any(&from, length, width, height)) return 1;
    find_bands(&from, region, &first, &end);
    ranges[0].end = from.begin[0];
    for (int n = 0; n < (modes[from.mode].colored ? 3 : 1); n++) {
        const size_t wide = n ? from.chroma_width : width;
        const size_t high = n ? from.chroma_height : height;
        const size_t rows = (size_t)band_rows(height) >> (n && from.halves_height);
        const size_t bottom = (size_t)end * rows < high ? (size_t)end * rows : high;
        const sk_extent part = {from.begin[n] + (size_t)first * rows * wide, from.begin[n] + bottom * wide};
        if (part.begin == ranges[count - 1].end)
            ranges[count - 1].end = part.end;
        else
            ranges[count++] = part;
    }
    for (size_t n = 0; n < count; n++) skipped -= ranges[n].end - ranges[n].begin;
    if (skipped >= SK_LEAST_SKIPPED) return count;
    ranges[0] = (sk_extent){0, length};
    return 1;
}

int sk_check_planes(const uint8_t *record, size_t length, uint32_t width, uint32_t height,
                    sk_region region, const sk_extent *ranges, size_t count, uint32_t crc,
                    uint32_t checksum) {
    planes from;
    size_t done = 0;
    int32_t first, end;

    if (!lay_out_any(&from, length, width, height) || !read_header(&from, record)) return 0;
    find_bands(&from, region, &first, &end);
    for (size_t n = 0; n < count; n++) {
        crc = ~sk_crc32_shifted(~crc, ranges[n].begin - done);
        crc = sk_crc32(crc, record + ranges[n].begin, ranges[n].end - ranges[n].begin);
        done = ranges[n].end;
    }
    crc = ~sk_crc32_shifted(~crc, length - done);
    for (int32_t band = 0; band < BANDS; band++)
        if (band < first || band >= end) crc ^= from.checksums[band];
    return crc == checksum;
}

/* The rounded product of a factor and a number, as libjpeg's tables have it, in 16-bit lanes. */
INLINE int16_t product(int16_t value, int16_t factor) {
    return (int16_t)((int16_t)(((2 * value * factor) >> 16) + 1) >> 1);
}

INLINE uint8_t clamped(int16_t value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

/* Convert pixels. 16-bit lanes suffice if the integer part of each factor is added apart:
 * 1.402 = 1 + 0.402, 1.772 = 2 - 0.228, and 0.71414 = 1 - 0.28586. */
INLINE void convert_pixels(const uint8_t *restrict luma, const uint8_t *restrict blue,
                           const uint8_t *restrict red, uint8_t *restrict out, ptrdiff_t count) {
    for (ptrdiff_t x = 0; x < count; x++) {
        int16_t y = luma[x], cb = (int16_t)(blue[x] - 128), cr = (int16_t)(red[x] - 128);
        int16_t green = (int16_t)((18734 * cr - 22554 * cb + 32768) >> 16);
        out[3 * x] = clamped((int16_t)(y + cr + product(cr, 26345)));
        out[3 * x + 1] = clamped((int16_t)(y - cr + green));
        out[3 * x + 2] = clamped((int16_t)(y + 2 * cb + product(cb, -14942)));
    }
}

/* Weigh each value of the nearest row three times, and of the next nearest once. */
INLINE void sum_rows(const uint8_t *restrict near, const uint8_t *restrict far,
                     uint16_t *restrict sums, ptrdiff_t count) {
    for (ptrdiff_t x = 0; x < count; x++) sums[x] = (uint16_t)(3 * near[x] + far[x]);
}

/* Double the columns of sums; sums[-1] and sums[count] exist. */
INLINE void double_sums(const uint16_t *restrict sums, uint8_t *restrict out, ptrdiff_t count) {
    for (ptrdiff_t x = 0; x < count; x++) {
        out[2 * x] = (uint8_t)((3 * sums[x] + sums[x - 1] + 8) >> 4);
        out[2 * x + 1] = (uint8_t)((3 * sums[x] + sums[x + 1] + 7) >> 4);
    }
}

/* The same for one row, without a vertical part. */
INLINE void double_values(const uint16_t *restrict values, uint8_t *restrict out, ptrdiff_t count) {
    for (ptrdiff_t x = 0; x < count; x++) {
        out[2 * x] = (uint8_t)((3 * values[x] + values[x - 1] + 1) >> 2);
        out[2 * x + 1] = (uint8_t)((3 * values[x] + values[x + 1] + 2) >> 2);
    }
}

/* Working memory for the rows of a region. */
typedef struct {
    uint16_t *sums;
    uint8_t *blue, *red;
} rows;

/* Upsample the part of a chroma row that covers the columns of a region; returns where they start. */
INLINE const uint8_t *upsample(const planes *from, const uint8_t *plane, int32_t y,
                               sk_region region, uint16_t *sums, uint8_t *out) {
    const int32_t width = (int32_t)from->chroma_width, height = (int32_t)from->chroma_height;
    const int32_t first = region.left / 2, last = (region.left + region.width - 1) / 2;
    const int32_t count = last - first + 1;
    const int32_t begin = first ? first - 1 : 0, end = last + 2 < width ? last + 2 : width;
    const int32_t nearest = from->halves_height ? y / 2 : y;
    const uint8_t *near = plane + (size_t)nearest * from->chroma_width;

    if (!from->halves_width) return near + region.left;
    if (width <= 2) { /* libjpeg repeats the pixels of narrow images */
        for (int32_t x = 0; x < 2 * count; x++) out[x] = near[first + x / 2];
        return out + region.left % 2;
    }
    sums++;
    if (from->halves_height) {
        int32_t next = nearest + (y % 2 ? 1 : -1);
        next = next < 0 ? 0 : next < height ? next : height - 1;
        sum_rows(near + begin, plane + (size_t)next * from->chroma_width + begin,
                 sums + (begin - first), end - begin);
    } else {
        for (ptrdiff_t x = begin; x < end; x++) sums[x - first] = near[x];
    }
    if (begin == first) sums[-1] = sums[0];
    if (end == last + 1) sums[count] = sums[count - 1];
    if (from->halves_height)
        double_sums(sums, out, count);
    else
        double_values(sums, out, count);
    return out + region.left % 2;
}

typedef void converter(const uint8_t *luma, const uint8_t *blue, const uint8_t *red, uint8_t *out,
                       ptrdiff_t count);

INLINE void finish(const planes *from, sk_region region, const rows *work, converter *convert,
                   uint8_t *out) {
    for (int32_t y = region.top; y < region.top + region.height; y++, out += 3 * (ptrdiff_t)region.width) {
        const uint8_t *luma = from->luma + (size_t)y * from->width + region.left;
        if (from->blue == NULL) {
            for (ptrdiff_t x = 0; x < region.width; x++)
                out[3 * x] = out[3 * x + 1] = out[3 * x + 2] = luma[x];
            continue;
        }
        convert(luma, upsample(from, from->blue, y, region, work->sums, work->blue),
                upsample(from, from->red, y, region, work->sums, work->red), out, region.width);
    }
}

static void convert_plain(const uint8_t *luma, const uint8_t *blue, const uint8_t *red, uint8_t *out,
                          ptrdiff_t count) {
    convert_pixels(luma, blue, red, out, count);
}

#ifdef VECTORS
AVX2 static __m256i load(const uint8_t *from) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
}

AVX2 static __m256i product16(__m256i value, int16_t factor) {
    __m256i high = _mm256_mulhi_epi16(_mm256_add_epi16(value, value), _mm256_set1_epi16(factor));
    return _mm256_srai_epi16(_mm256_add_epi16(high, _mm256_set1_epi16(1)), 1);
}

/* The sum of two products: pairs of values and of factors, four and four of them. */
AVX2 static __m256i product_pairs(__m256i pairs) {
    const __m256i factors = _mm256_set1_epi32((int)((uint32_t)-22554 << 16 | 18734));
    __m256i sums = _mm256_madd_epi16(pairs, factors);
    return _mm256_srai_epi32(_mm256_add_epi32(sums, _mm256_set1_epi32(32768)), 16);
}

/* As convert_pixels, 16 pixels at a time, which compilers do not interleave well: in a third of the
 * time. */
AVX2 static void convert_avx2(const uint8_t *luma, const uint8_t *blue, const uint8_t *red,
                              uint8_t *out, ptrdiff_t count) {
    /* From eight bytes of red, then green, and eight of blue, to the first 16 and last 8 of 24. */
    const __m256i red_green = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 8, -1, 1, 9, -1, 2, 10, -1, 3, 11, -1, 4, 12, -1, 5));
    const __m256i only_blue = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1));
    const __m256i red_green_end = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(13, -1, 6, 14, -1, 7, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m256i only_blue_end = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m256i middle = _mm256_set1_epi16(128);
    ptrdiff_t x = 0;
    for (; x + 16 <= count; x += 16, out += 48) {
        __m256i y = load(luma + x), cb = _mm256_sub_epi16(load(blue + x), middle);
        __m256i cr = _mm256_sub_epi16(load(red + x), middle);
        __m256i r = _mm256_add_epi16(_mm256_add_epi16(y, cr), product16(cr, 26345));
        __m256i b = _mm256_add_epi16(_mm256_add_epi16(y, _mm256_add_epi16(cb, cb)),
                                     product16(cb, -14942));
        __m256i g = _mm256_packs_epi32(product_pairs(_mm256_unpacklo_epi16(cr, cb)),
                                       product_pairs(_mm256_unpackhi_epi16(cr, cb)));
        g = _mm256_add_epi16(_mm256_sub_epi16(y, cr), g);
        r = _mm256_packus_epi16(r, g);
        b = _mm256_packus_epi16(b, b);
        __m256i first = _mm256_or_si256(_mm256_shuffle_epi8(r, red_green),
                                        _mm256_shuffle_epi8(b, only_blue));
        __m256i last = _mm256_or_si256(_mm256_shuffle_epi8(r, red_green_end),
                                       _mm256_shuffle_epi8(b, only_blue_end));
        _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(first));
        _mm_storel_epi64((__m128i *)(out + 16), _mm256_castsi256_si128(last));
        _mm_storeu_si128((__m128i *)(out + 24), _mm256_extracti128_si256(first, 1));
        _mm_storel_epi64((__m128i *)(out + 40), _mm256_extracti128_si256(last, 1));
    }
    convert_pixels(luma + x, blue + x, red + x, out, count - x);
}

AVX2 static void finish_avx2(const planes *from, sk_region region, const rows *work, uint8_t *out) {
    finish(from, region, work, convert_avx2, out);
}
#endif

enum sk_code sk_finish_planes(const uint8_t *data, size_t length, uint32_t width, uint32_t height,
                              sk_region region, sk_memory *memory, uint8_t *out) {
    const size_t row = (size_t)region.width + SLACK;
    planes from;
    rows work;
    if (!find_planes(data, length, width, height, &from)) return SK_SIZE;
    if (sk_reserve(memory, 4 * row) == NULL) return SK_MEMORY;
    work.sums = (uint16_t *)memory->data;
    work.blue = memory->data + 2 * row;
    work.red = work.blue + row;
#ifdef VECTORS
    if (sk_cpu.avx2) {
        finish_avx2(&from, region, &work, out);
        return SK_DONE;
    }
#endif
    finish(&from, region, &work, convert_plain, out);
    return SK_DONE;
}
