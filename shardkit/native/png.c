/* Decode PNGs: libdeflate unpacks the rows. The pixels equal those of shardkit/codecs/image.py. */
#include "png.h"

#include <stdlib.h>
#include <string.h>

#ifdef SK_LIBDEFLATE
#include <libdeflate.h>
#endif

#define SIGNATURE 8
#define MOST_BYTES ((uint64_t)64 << 20) /* of the file, and of its rows: see MAX_TEXT_MEMORY of Pillow */
#define MOST_TEXT 4096
#define MOST_PROFILE ((size_t)1 << 20) /* MAX_TEXT_CHUNK of Pillow */
/* LARGE_PIXELS in shardkit/codecs/limits.py: larger images are decoded one at a time. */
#define MOST_PIXELS ((uint64_t)64000000)

static uint32_t big(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | (uint32_t)at[3];
}

/* ---- Chunks ---- */

static int is_kind(const uint8_t *kind, const char *name) { return memcmp(kind, name, 4) == 0; }

/* Whether a text may hold EXIF data, or has a keyword that Pillow mixes with its own properties; the
 * words are those of shardkit/codecs/structure.py. */
static int is_telling(const uint8_t *text, size_t size) {
    static const char *const words[] = {"Raw profile type ", "transparency", "interlace", "bbox"};
    for (size_t n = 0; n < sizeof words / sizeof *words; n++)
        if (size >= strlen(words[n]) && memcmp(text, words[n], strlen(words[n])) == 0) return 1;
    return 0;
}

/* Whether a chunk affects neither pixels nor orientation; the same rule as in
 * shardkit/codecs/structure.py. */
static int is_plain(const uint8_t *kind, const uint8_t *content, size_t size) {
    static const struct {
        char kind[5];
        uint8_t size;
    } plain[] = {{"gAMA", 4}, {"sRGB", 1}, {"pHYs", 9}, {"cHRM", 32}, {"tIME", 7}};
    if (is_kind(kind, "tEXt")) return size <= MOST_TEXT && !is_telling(content, size);
    for (size_t n = 0; n < sizeof plain / sizeof *plain; n++)
        if (is_kind(kind, plain[n].kind)) return size == plain[n].size;
    return 0;
}

/* Whether a chunk does not affect the pixels, though perhaps the orientation. */
static int is_harmless(const uint8_t *kind, const uint8_t *content, size_t size) {
    if (is_kind(kind, "iTXt")) {
        const uint8_t *end = memchr(content, 0, size); /* of the keyword; then: whether it is packed */
        return end != NULL && end + 1 < content + size && !end[1] && !is_telling(content, size);
    }
    return is_kind(kind, "eXIf") || is_kind(kind, "bKGD") || is_kind(kind, "sBIT");
}

static enum sk_code read_header(const uint8_t *at, sk_png *png) {
    static const uint8_t channels[] = {1, 0, 3, 1, 2, 0, 4}; /* by color type */
    uint8_t color = at[9];
    uint64_t row;
    png->width = big(at);
    png->height = big(at + 4);
    png->depth = at[8];
    if (color > 6 || !channels[color] || at[10] || at[11] || at[12] > 1) return SK_UNSUPPORTED;
    png->channels = channels[color];
    png->has_palette = color == 3;
    png->is_interlaced = at[12];
    png->transparent = color >= 4;
    switch (png->depth) {
    case 1: case 2: case 4:
        if (png->channels != 1) return SK_UNSUPPORTED;
        break;
    case 8:
        break;
    case 16:
        if (png->has_palette) return SK_UNSUPPORTED;
        break;
    default:
        return SK_UNSUPPORTED;
    }
    row = 1 + ((uint64_t)png->width * png->channels * png->depth + 7) / 8;
    /* A side of 2^31 or more would not fit into the product. Interlacing adds up to 14 bytes for each
     * eight rows. */
    if (png->width == 0 || png->height == 0 || png->width > MOST_BYTES ||
        png->height > MOST_BYTES || (row + 2) * png->height > MOST_BYTES ||
        (uint64_t)png->width * png->height > MOST_PIXELS)
        return SK_UNSUPPORTED;
    return SK_DONE;
}

static enum sk_code read_palette(const uint8_t *content, size_t size, sk_png *png) {
    if (!png->has_palette || png->colors || size == 0 || size % 3 || size > 768)
        return SK_UNSUPPORTED;
    png->colors = (uint32_t)size / 3;
    for (uint32_t n = 0; n < png->colors; n++) {
        memcpy(png->palette[n], content + 3 * (size_t)n, 3);
        png->palette[n][3] = 255;
    }
    return SK_DONE;
}

static enum sk_code read_transparency(const uint8_t *content, size_t size, sk_png *png) {
    if (png->transparent || size == 0) return SK_UNSUPPORTED;
    png->transparent = 1;
    if (png->has_palette) {
        if (size > png->colors) return SK_UNSUPPORTED;
        for (size_t n = 0; n < size; n++) png->palette[n][3] = content[n];
        return SK_DONE;
    }
    if (png->depth != 8 || size != 2 * (size_t)png->channels) return SK_UNSUPPORTED;
    for (int n = 0; n < png->channels; n++) {
        if (content[2 * n]) return SK_UNSUPPORTED;
        png->key[n] = content[2 * n + 1];
    }
    return SK_DONE;
}

/* Remember where a profile is, after its name, which ends with a zero, and the method, another zero. */
static enum sk_code read_profile(const uint8_t *data, const uint8_t *content, size_t size,
                                 sk_png *png) {
    const uint8_t *name = memchr(content, 0, size);
    size_t head = name == NULL ? size : (size_t)(name - content) + 2;
    if (png->profile || head >= size || name[1]) return SK_UNSUPPORTED;
    png->profile = (size_t)(content - data) + head;
    png->profile_size = size - head;
    return SK_DONE;
}

/* Read a chunk other than the first and the last; `ended` tells whether the pixels have ended. */
static enum sk_code read_chunk(const uint8_t *data, const uint8_t *kind, size_t size, int ended,
                               sk_png *png) {
    const uint8_t *content = kind + 4;
    if (is_plain(kind, content, size)) return SK_DONE;
    if (is_harmless(kind, content, size)) {
        png->plain = 0;
        return SK_DONE;
    }
    if (ended) return SK_UNSUPPORTED;
    if (is_kind(kind, "PLTE")) return read_palette(content, size, png);
    if (is_kind(kind, "tRNS")) return read_transparency(content, size, png);
    if (is_kind(kind, "iCCP")) return read_profile(data, content, size, png);
    return SK_UNSUPPORTED;
}

enum sk_code sk_read_png(const uint8_t *data, size_t length, sk_png *png) {
    size_t at = SIGNATURE;
    int ended = 0;

    memset(png, 0, sizeof *png);
    png->plain = 1;
    if (length < 33 || length > MOST_BYTES ||
        memcmp(data, "\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR", 16))
        return SK_UNSUPPORTED;
    while (length - at >= 12) {
        const uint8_t *kind = data + at + 4, *content = data + at + 8;
        size_t size = big(data + at);
        enum sk_code code = SK_DONE;
        if (is_kind(kind, "IEND"))
            return png->pieces && !png->has_palette == !png->colors ? SK_DONE : SK_UNSUPPORTED;
        if (size > length - at - 12) return SK_UNSUPPORTED;
        if (at == SIGNATURE) {
            code = read_header(content, png);
        } else if (is_kind(kind, "IDAT")) {
            if (ended || size == 0) return SK_UNSUPPORTED;
            if (!png->pieces++) png->packed = at + 8;
            png->packed_size += size;
        } else {
            ended = png->pieces > 0;
            code = read_chunk(data, kind, size, ended, png);
        }
        if (code != SK_DONE) return code;
        if (sk_crc32(0, kind, size + 4) != big(content + size)) return SK_CHECKSUM;
        at += 12 + size;
    }
    return SK_UNSUPPORTED;
}

/* ---- Rows ---- */

/* The pixels of an image, or of a pass of an interlaced one: the first, and the steps between them. */
typedef struct {
    uint8_t left, top, across, down;
} pass;

static const pass complete = {0, 0, 1, 1};
static const pass interlaced[] = {{0, 0, 8, 8}, {4, 0, 8, 8}, {0, 4, 4, 8}, {2, 0, 4, 4},
                                  {0, 2, 2, 4}, {1, 0, 2, 2}, {0, 1, 1, 2}};

static const pass *passes_of(const sk_png *png, int *count) {
    *count = png->is_interlaced ? 7 : 1;
    return png->is_interlaced ? interlaced : &complete;
}

static uint32_t steps(uint32_t side, uint8_t first, uint8_t step) {
    return side > first ? (side - first + step - 1u) / step : 0;
}

static size_t row_bytes(const sk_png *png, uint32_t columns) {
    return 1 + ((size_t)columns * png->channels * png->depth + 7) / 8;
}

static size_t rows_bytes(const sk_png *png) {
    size_t total = 0;
    int count;
    const pass *part = passes_of(png, &count);
    for (; count--; part++) {
        uint32_t columns = steps(png->width, part->left, part->across);
        if (columns) total += row_bytes(png, columns) * steps(png->height, part->top, part->down);
    }
    return total;
}

static int has_known_filters(const sk_png *png, const uint8_t *rows) {
    int count;
    const pass *part = passes_of(png, &count);
    for (; count--; part++) {
        uint32_t columns = steps(png->width, part->left, part->across);
        uint32_t lines = columns ? steps(png->height, part->top, part->down) : 0;
        for (; lines--; rows += row_bytes(png, columns))
            if (*rows > 4) return 0;
    }
    return 1;
}

#ifdef SK_LIBDEFLATE
/* Return the packed rows without gaps: in place, or joined at `to`. */
static const uint8_t *join(const uint8_t *data, const sk_png *png, uint8_t *to) {
    size_t at = png->packed - 8, done = 0;
    if (png->pieces == 1) return data + png->packed;
    while (done < png->packed_size) {
        size_t size = big(data + at);
        memcpy(to + done, data + at + 8, size);
        done += size;
        at += 12 + size;
    }
    return to;
}

static enum sk_code unpack(struct libdeflate_decompressor *unpacker, const uint8_t *data,
                           const sk_png *png, size_t size, uint8_t *to) {
    size_t read = 0, written = 0;
    enum libdeflate_result result;
    if (png->profile) {
        result = libdeflate_zlib_decompress(unpacker, data + png->profile, png->profile_size, to,
                                            MOST_PROFILE, &written);
        if (result != LIBDEFLATE_SUCCESS) return SK_DECODER;
    }
    result = libdeflate_zlib_decompress_ex(unpacker, join(data, png, to + size + SK_PNG_SLACK),
                                           png->packed_size, to, size, &read, &written);
    if (result != LIBDEFLATE_SUCCESS || read != png->packed_size || written != size ||
        !has_known_filters(png, to))
        return SK_DECODER;
    memset(to + size, 0, SK_PNG_SLACK);
    return SK_DONE;
}

enum sk_code sk_unpack_png(const uint8_t *data, const sk_png *png, sk_memory *rows) {
    size_t size = rows_bytes(png), rest = (png->keeps_16 ? 8 : 4) * (size_t)png->width; /* a line */
    size_t needed;
    struct libdeflate_decompressor *unpacker;
    enum sk_code code;

    if (png->pieces > 1 && png->packed_size > rest) rest = png->packed_size;
    needed = size + SK_PNG_SLACK + rest;
    if (png->profile && needed < MOST_PROFILE) needed = MOST_PROFILE;
    if (sk_reserve(rows, needed) == NULL) return SK_MEMORY;
    if ((unpacker = libdeflate_alloc_decompressor()) == NULL) return SK_MEMORY;
    code = unpack(unpacker, data, png, size, rows->data);
    libdeflate_free_decompressor(unpacker);
    return code;
}

const char *sk_deflate_version(void) { return LIBDEFLATE_VERSION_STRING; }
#else
enum sk_code sk_unpack_png(const uint8_t *data, const sk_png *png, sk_memory *rows) {
    (void)data, (void)png, (void)rows, (void)rows_bytes, (void)has_known_filters;
    return SK_UNSUPPORTED;
}

const char *sk_deflate_version(void) { return ""; }
#endif

/* The bytes of a pixel, computed side by side: branches would be unpredictable. */
typedef uint8_t bytes __attribute__((vector_size(8)));
typedef int16_t lanes __attribute__((vector_size(16)));

static inline lanes load(const uint8_t *at) {
    bytes pixel;
    memcpy(&pixel, at, sizeof pixel);
    return __builtin_convertvector(pixel, lanes);
}

static inline lanes store(lanes value, uint8_t *at, size_t step) {
    bytes low = __builtin_convertvector(value & 0xFF, bytes);
    memcpy(at, &low, step);
    return value & 0xFF;
}

static inline lanes magnitude(lanes value) {
    lanes sign = value >> 15;
    return (value ^ sign) - sign;
}

static inline lanes choose(lanes which, lanes yes, lanes no) { return (which & yes) | (~which & no); }

static inline lanes paeth(lanes left, lanes up, lanes corner) {
    lanes to_left = up - corner, to_up = left - corner, to_corner = magnitude(to_left + to_up);
    to_left = magnitude(to_left);
    to_up = magnitude(to_up);
    return choose((to_left <= to_up) & (to_left <= to_corner), left,
                  choose(to_up <= to_corner, up, corner));
}

static inline void unfilter_by(uint8_t filter, uint8_t *row, const uint8_t *above, size_t size,
                               size_t step) {
    lanes left = {0}, up = {0}, corner;
    if (above == NULL && filter % 2 == 0) filter = filter == 4; /* as if it were 0 */
    switch (filter) {
    case 1:
        for (size_t n = 0; n < size; n += step) left = store(load(row + n) + left, row + n, step);
        break;
    case 2:
        for (size_t n = 0; n < size; n++) row[n] = (uint8_t)(row[n] + above[n]);
        break;
    case 3:
        for (size_t n = 0; n < size; n += step) {
            if (above != NULL) up = load(above + n);
            left = store(load(row + n) + ((left + up) >> 1), row + n, step);
        }
        break;
    case 4:
        for (size_t n = 0; n < size; n += step) {
            corner = up;
            up = load(above + n);
            left = store(load(row + n) + paeth(left, up, corner), row + n, step);
        }
        break;
    default:
        break;
    }
}

void sk_unfilter(uint8_t filter, uint8_t *row, const uint8_t *above, size_t size, size_t step) {
    switch (step) { /* constant steps */
    case 1: unfilter_by(filter, row, above, size, 1); break;
    case 2: unfilter_by(filter, row, above, size, 2); break;
    case 3: unfilter_by(filter, row, above, size, 3); break;
    case 4: unfilter_by(filter, row, above, size, 4); break;
    case 6: unfilter_by(filter, row, above, size, 6); break;
    default: unfilter_by(filter, row, above, size, 8);
    }
}

/* ---- Pixels ---- */

/* Whether the values of all channels keep 16 bits. Pillow reduces those of several channels. */
static int keeps_16_bits(const sk_png *png) {
    return png->depth == 16 && (png->channels == 1 || png->keeps_16);
}

size_t sk_png_values(const sk_png *png) {
    return keeps_16_bits(png) ? 2 * (size_t)png->channels : png->channels;
}

/* Return the samples of a row in 8 bits, perhaps in `line`: the upper ones of 16, or fewer scaled up.
 * As values, samples may keep 16 bits, and single bits are not scaled. */
static const uint8_t *samples_of(const sk_png *png, const uint8_t *row, uint32_t columns,
                                 int as_values, uint8_t *line) {
    size_t count = (size_t)columns * png->channels;
    unsigned depth = png->depth, most = (1u << depth) - 1;
    int scaled = !png->has_palette && !(as_values && depth == 1);
    if (depth == 8) return row;
    for (size_t n = 0; depth < 8 && n < count; n++) {
        unsigned value = row[n * depth / 8] >> (8 - depth - n * depth % 8) & most;
        line[n] = (uint8_t)(scaled ? value * (255 / most) : value);
    }
    for (size_t n = 0; depth == 16 && n < count; n++) {
        uint16_t value = (uint16_t)(row[2 * n] << 8 | row[2 * n + 1]);
        if (as_values && keeps_16_bits(png))
            memcpy(line + 2 * n, &value, 2);
        else
            line[n] = row[2 * n];
    }
    return line;
}

/* As Pillow composites over an opaque ground. */
static inline uint8_t blend(uint32_t value, uint32_t ground, uint32_t alpha) {
    uint32_t sum = (value * alpha + ground * (255 - alpha)) * 128 + (128 << 7);
    return (uint8_t)(((sum >> 8) + sum) >> 15);
}

/* Convert `count` pixels from samples to RGB, `step` bytes apart. Returns 0 if the palette lacks one. */
static int convert(const sk_png *png, const uint8_t *from, uint32_t count,
                   const uint8_t ground[3], uint8_t *to, size_t step) {
    int opaque = !png->transparent, channels = png->channels;
    if (png->has_palette) {
        for (; count--; to += step) {
            if (*from >= png->colors) return 0;
            memcpy(to, png->palette[*from++], 3);
        }
    } else if (opaque && channels == 3 && step == 3) {
        memcpy(to, from, 3 * (size_t)count);
    } else if (channels == 1) {
        for (; count--; from++, to += step) {
            memset(to, *from, 3);
            if (!opaque && *from == *png->key) memcpy(to, ground, 3);
        }
    } else if (channels == 3) {
        for (; count--; from += 3, to += step)
            memcpy(to, !opaque && memcmp(from, png->key, 3) == 0 ? ground : from, 3);
    } else {
        int gray = channels == 2;
        for (; count--; from += channels, to += step)
            for (int c = 0; c < 3; c++) to[c] = blend(from[gray ? 0 : c], ground[c], from[channels - 1]);
    }
    return 1;
}

/* Copy `count` values of `size` bytes, `step` bytes apart. */
static void copy_values(const uint8_t *from, uint32_t count, size_t size, uint8_t *to, size_t step) {
    if (step == size)
        memcpy(to, from, size * count);
    else
        for (; count--; from += size, to += step) memcpy(to, from, size);
}

/* Return the number of positions of a pass before `end`, of all `count` at most. */
static uint32_t before(uint32_t end, uint8_t first, uint8_t step, uint32_t count) {
    uint32_t positions = steps(end, first, step);
    return positions < count ? positions : count;
}

/* Unfilter the rows at `row`, and put the pixels of a region in place. */
static enum sk_code put(const sk_png *png, uint8_t *row, sk_region region, const uint8_t *ground,
                        uint8_t *out) {
    uint8_t *line = row + rows_bytes(png) + SK_PNG_SLACK;
    uint32_t left = (uint32_t)region.left, top = (uint32_t)region.top;
    uint32_t wide = (uint32_t)region.width, bottom = top + (uint32_t)region.height;
    size_t pixel = (size_t)png->channels * png->depth / 8;
    size_t value = ground == NULL ? sk_png_values(png) : 3;
    size_t sample = ground == NULL ? value : png->channels;
    int count;
    const pass *part = passes_of(png, &count);

    for (; count--; part++) {
        uint32_t columns = steps(png->width, part->left, part->across);
        uint32_t lines = columns ? steps(png->height, part->top, part->down) : 0;
        uint32_t first = before(left, part->left, part->across, columns);
        uint32_t shown = before(left + wide, part->left, part->across, columns) - first;
        uint32_t x = part->left + first * part->across;
        size_t size = row_bytes(png, columns), step = value * part->across;
        for (uint32_t n = 0; n < lines; n++, row += size) {
            uint32_t y = part->top + n * part->down;
            const uint8_t *samples;
            uint8_t *to;
            if (y >= bottom) continue;
            sk_unfilter(*row, row + 1, n ? row + 1 - size : NULL, size - 1, pixel ? pixel : 1);
            if (y < top || shown == 0) continue;
            samples = samples_of(png, row + 1, columns, ground == NULL, line) + sample * first;
            to = out + value * ((size_t)(y - top) * wide + (x - left));
            if (ground == NULL)
                copy_values(samples, shown, value, to, step);
            else if (!convert(png, samples, shown, ground, to, step))
                return SK_UNSUPPORTED;
        }
    }
    return SK_DONE;
}

enum sk_code sk_png_pixels(const uint8_t *data, sk_png *png, sk_region region,
                           const uint8_t *ground, sk_memory *work, uint8_t *out) {
    enum sk_code code = sk_unpack_png(data, png, work);
    if (code != SK_DONE) return code;
    if (ground == NULL && png->depth == 16 && png->channels == 2 && !png->keeps_16)
        return SK_UNSUPPORTED; /* Pillow makes RGBA of it */
    for (uint32_t n = 0; ground != NULL && png->transparent && n < png->colors; n++)
        for (int c = 0; c < 3; c++)
            png->palette[n][c] = blend(png->palette[n][c], ground[c], png->palette[n][3]);
    return put(png, work->data, region, ground, out);
}

enum sk_code sk_decode_png(const uint8_t *data, size_t length, uint32_t width, uint32_t height,
                           sk_region region, const uint8_t ground[3], sk_memory *work,
                           uint8_t *out) {
    sk_png png;
    enum sk_code code = sk_read_png(data, length, &png);
    if (code != SK_DONE) return code;
    if (png.width != width || png.height != height || region.left < 0 || region.top < 0 ||
        region.width < 1 || region.height < 1 || (uint32_t)region.width > width ||
        (uint32_t)region.left > width - (uint32_t)region.width ||
        (uint32_t)region.height > height ||
        (uint32_t)region.top > height - (uint32_t)region.height)
        return SK_SIZE;
    return sk_png_pixels(data, &png, region, ground, work, out);
}
