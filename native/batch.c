/* Read, check, decode, crop and scale the images of a batch, straight into its memory. */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* Bytes of an entry that its own check, and the checksum of its image, cover. */
#define CHECKED 29
#define HEAD 16

/* Positions in STORED_KINDS of shardkit/record.py. */
#define JPEG 0
#define RAW 7
#define ARRAY 8

/* As MAX_PIXELS in shardkit/codecs/image.py. */
#define MOST_PIXELS ((uint64_t)2 * 89478485)

/* Encoded images and pixels are read with this many bytes to spare after them. */
#define SLACK 16

typedef struct {
    int64_t offset;
    uint32_t length, checksum, width, height;
    uint8_t kind;
} entry;

/* Memory for the steps of one image. */
typedef struct {
    sk_memory stored, line, pixels, resize;
} workspace;

static uint32_t u32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static entry entry_of(const uint8_t *at) {
    entry found;
    found.offset = (int64_t)(u32(at) | (uint64_t)u32(at + 4) << 32);
    found.length = u32(at + 8);
    found.checksum = u32(at + 12);
    found.width = u32(at + 20);
    found.height = u32(at + 24);
    found.kind = at[28];
    return found;
}

void sk_check_entries(const uint8_t *entries, size_t count, int kinds, uint8_t *wrong) {
    for (size_t n = 0; n < count; n++, entries += SK_ENTRY) {
        uint32_t stated = u32(entries + CHECKED - 1) >> 8;
        wrong[n] = (sk_crc32(0, entries, CHECKED) & 0xFFFFFF) != stated || entries[28] >= kinds;
    }
}

int sk_survey_entries(const uint8_t *entries, size_t count, const int64_t *sizes, int kinds,
                      uint32_t width, uint32_t height, uint64_t most_pixels, sk_survey *found) {
    memset(found, 0, sizeof *found);
    for (size_t n = 0; n < count; n++, entries += SK_ENTRY) {
        const entry image = entry_of(entries);
        uint64_t pixels = (uint64_t)image.width * image.height;
        uint8_t wrong;
        sk_check_entries(entries, 1, kinds, &wrong);
        if (wrong || image.offset < 0 || image.offset > sizes[n] - (int64_t)image.length) return 0;
        if (image.kind == RAW) {
            if (image.width != width || image.height != height || image.length != 3 * pixels)
                return 0;
        } else if (pixels > most_pixels || (pixels == 0 && (image.width || image.height))) {
            return 0;
        }
        if (image.length > found->longest) found->longest = image.length;
        if (pixels > found->most_pixels) found->most_pixels = pixels;
        if (n == 0) {
            found->width = image.width;
            found->height = image.height;
        } else if (found->width != image.width || found->height != image.height) {
            found->width = found->height = 0;
        }
    }
    return 1;
}

/* Read a range if all of it is in the page cache. */
static int read_cached(int file, int64_t offset, uint8_t *to, size_t length) {
#ifdef RWF_NOWAIT
    struct iovec part = {to, length};
    return preadv2(file, &part, 1, (off_t)offset, RWF_NOWAIT) == (ssize_t)length;
#else
    (void)file, (void)offset, (void)to, (void)length;
    return 0;
#endif
}

/* Issue readahead for all images from `number` on. */
static void announce(const sk_batch *batch, size_t number) {
#ifdef POSIX_FADV_WILLNEED
    for (; number < batch->count; number++) {
        entry each = entry_of(batch->entries + number * SK_ENTRY);
        if (each.offset >= 0)
            (void)posix_fadvise(batch->files[number], (off_t)each.offset, (off_t)each.length,
                                POSIX_FADV_WILLNEED);
    }
#else
    (void)batch, (void)number;
#endif
}

static enum sk_code read_image(const sk_batch *batch, size_t number, const entry *image,
                               int *announced, uint8_t *to) {
    const uint8_t *head = batch->entries + number * SK_ENTRY + HEAD;
    int is_raw = image->kind == RAW || image->kind == ARRAY;
    int verify = is_raw ? batch->verify_raw : batch->verify_encoded;
    if (*announced || !read_cached(batch->files[number], image->offset, to, image->length)) {
        if (!*announced && batch->count > 1) announce(batch, number);
        *announced = 1;
        if (!sk_read_range(batch->files[number], image->offset, to, image->length)) return SK_READ;
    }
    if (verify && sk_crc32(sk_crc32(0, head, CHECKED - HEAD), to, image->length) != image->checksum)
        return SK_CHECKSUM;
    return SK_DONE;
}

static int32_t reduced(uint32_t side, int eighths) {
    return (int32_t)(((uint64_t)side * (unsigned)eighths + 7) / 8);
}

/* As sufficient_eighths in shardkit/codecs/reduced.py, given the least sides. */
static int enough_eighths(const entry *image, double width, double height) {
    if (2 * width > (double)image->width + 1) return 8;
    for (int eighths = 1; eighths < 5; eighths++)
        if (reduced(image->width, eighths) >= width && reduced(image->height, eighths) >= height)
            return eighths;
    return 8;
}

/* As ImageOp._enough in shardkit/torch/data/ops.py. */
static int scale_of(const sk_batch *batch, const entry *image, const sk_piece *piece) {
    double needed, other;
    if (isinf(batch->oversample) || image->kind == RAW) return 8;
    if (piece->whole_height) {
        needed = (double)piece->whole_width / image->width;
        other = (double)piece->whole_height / image->height;
    } else {
        if (piece->region.width == batch->width && piece->region.height == batch->height) return 8;
        needed = (double)batch->width / piece->region.width;
        other = (double)batch->height / piece->region.height;
    }
    needed = (needed > other ? needed : other) * batch->oversample;
    return enough_eighths(image, ceil(image->width * needed), ceil(image->height * needed));
}

/* As `enclosing` in shardkit/dataset/decode.py: the region of the reduced image. */
static sk_region enclosing(const entry *image, sk_region region, int eighths) {
    double scale = eighths / 8.0;
    double right = ceil((region.left + region.width) * scale);
    double bottom = ceil((region.top + region.height) * scale);
    int32_t width = reduced(image->width, eighths), height = reduced(image->height, eighths);
    sk_region found = {(int32_t)(region.left * scale), (int32_t)(region.top * scale), 0, 0};
    found.width = (right < width ? (int32_t)right : width) - found.left;
    found.height = (bottom < height ? (int32_t)bottom : height) - found.top;
    return found;
}

static int is_inside(sk_region region, int64_t width, int64_t height) {
    return region.left >= 0 && region.top >= 0 && region.width > 0 && region.height > 0 &&
           region.left <= width - region.width && region.top <= height - region.height;
}

static int is_plausible(const sk_batch *batch, const entry *image, const sk_piece *piece) {
    uint64_t pixels = (uint64_t)image->width * image->height;
    if (image->kind != JPEG && image->kind != RAW) return 0;
    if (image->offset < 0 || image->length == 0 || pixels == 0 || pixels > MOST_PIXELS) return 0;
    if (image->width > INT32_MAX / 8 || image->height > INT32_MAX / 8) return 0;
    if (image->kind == RAW && image->length != 3 * pixels) return 0;
    if (!piece->whole_height) return is_inside(piece->region, image->width, image->height);
    if (piece->region.width != batch->width || piece->region.height != batch->height) return 0;
    return piece->whole_width > 0 && piece->whole_height > 0 &&
           is_inside(piece->region, piece->whole_width, piece->whole_height);
}

/* Copy a region of pixels. */
static void cut(const uint8_t *pixels, uint32_t width, sk_region region, uint8_t *out) {
    size_t stride = 3 * (size_t)width, wide = 3 * (size_t)region.width;
    pixels += region.top * stride + 3 * (size_t)region.left;
    for (int32_t y = 0; y < region.height; y++, pixels += stride, out += wide)
        memcpy(out, pixels, wide);
}

/* Decode the region of a stored image to `out`. */
static enum sk_code decode(const sk_batch *batch, const entry *image, sk_region region, int eighths,
                           workspace *work, uint8_t *out) {
    if (image->kind == JPEG)
        return sk_decode_jpeg(work->stored.data, image->length, image->width, image->height,
                              eighths, region, batch->fast, &work->line, out);
    cut(work->stored.data, image->width, region, out);
    return SK_DONE;
}

static double least(double one, double other) { return one < other ? one : other; }

/* Decode what a piece shows, and scale it to the size of a sample. */
static enum sk_code decode_scaled(const sk_batch *batch, const entry *image, const sk_piece *piece,
                                  workspace *work, uint8_t *out) {
    int eighths = scale_of(batch, image, piece);
    double scale = eighths / 8.0;
    sk_region sample = {0, 0, batch->width, batch->height}, shown = piece->region, part;
    int32_t width = batch->width, height = batch->height;
    double box[4];
    enum sk_code code;
    uint8_t *pixels;

    /* Several scales give a tiny image the same size, and simplejpeg would choose another. */
    if (eighths < 8 && (image->width < 8 || image->height < 8)) return SK_UNSUPPORTED;
    if (piece->whole_height) {
        shown = (sk_region){0, 0, (int32_t)image->width, (int32_t)image->height};
        sample = piece->region;
        width = piece->whole_width;
        height = piece->whole_height;
    }
    part = enclosing(image, shown, eighths);
    box[0] = shown.left * scale - part.left;
    box[1] = shown.top * scale - part.top;
    box[2] = least(box[0] + shown.width * scale, part.width);
    box[3] = least(box[1] + shown.height * scale, part.height);
    pixels = sk_reserve(&work->pixels, 3 * (size_t)part.width * (size_t)part.height);
    if (pixels == NULL) return SK_MEMORY;
    code = decode(batch, image, part, eighths, work, pixels);
    if (code != SK_DONE) return code;
    return sk_resize(pixels, part.width, part.height, box, width, height, batch->filter,
                     batch->tall_first, sample, piece->flip, &work->resize, out);
}

/* Find the piece of an image that becomes a sample. */
static enum sk_code choose_piece(const sk_batch *batch, size_t number, const entry *image,
                                 sk_piece *piece) {
    if (batch->values) {
        *piece = (sk_piece){{0, 0, 0, 0}, 0, 0, 0};
        if (image->kind != ARRAY || image->offset < 0) return SK_UNSUPPORTED;
        return image->length == batch->values ? SK_DONE : SK_SIZE;
    }
    if (batch->pieces != NULL)
        *piece = batch->pieces[number];
    else if (image->width != (uint32_t)batch->width || image->height != (uint32_t)batch->height)
        return SK_SIZE;
    else
        *piece = (sk_piece){{0, 0, batch->width, batch->height}, 0, 0, 0};
    return is_plausible(batch, image, piece) ? SK_DONE : SK_UNSUPPORTED;
}

/* Whether the pixels of a piece are copied and not scaled. */
static int is_copied(const sk_batch *batch, const sk_piece *piece) {
    return !piece->whole_height && piece->region.width == batch->width &&
           piece->region.height == batch->height;
}

static size_t sample_bytes(const sk_batch *batch) {
    return batch->values ? batch->values : 3 * (size_t)batch->width * (size_t)batch->height;
}

static uint8_t *sample_of(const sk_batch *batch, size_t number) {
    return batch->out + number * sample_bytes(batch);
}

static enum sk_code fill_one(const sk_batch *batch, size_t number, int *announced,
                             workspace *work) {
    const entry image = entry_of(batch->entries + number * SK_ENTRY);
    uint8_t *out = sample_of(batch, number);
    sk_piece piece;
    enum sk_code code = choose_piece(batch, number, &image, &piece);
    int copied;

    if (code != SK_DONE) return code;
    if (batch->values) return read_image(batch, number, &image, announced, out);
    copied = is_copied(batch, &piece);
    if (image.kind == RAW && copied && image.width == (uint32_t)batch->width &&
        image.height == (uint32_t)batch->height) {
        code = read_image(batch, number, &image, announced, out);
    } else {
        if (sk_reserve(&work->stored, (size_t)image.length + SLACK) == NULL) return SK_MEMORY;
        code = read_image(batch, number, &image, announced, work->stored.data);
        if (code == SK_DONE)
            code = copied ? decode(batch, &image, piece.region, 8, work, out)
                          : decode_scaled(batch, &image, &piece, work, out);
        if (!copied) return code;
    }
    if (code == SK_DONE && piece.flip) sk_flip(out, batch->width, batch->height);
    return code;
}

/* Whether an image's last byte is in the page cache, and so, most likely, all others: the kernel reads
 * files forward. If not, the helper waits for pages one by one. */
static int is_cached(int file, const entry *image) {
    uint8_t byte;
    return read_cached(file, image->offset + image->length - 1, &byte, 1);
}

/* Describe the copy that makes an image's sample, if its pixels only have to be copied from a map. */
static int find_copy(const sk_batch *batch, size_t number, sk_copy *copy) {
    const entry image = entry_of(batch->entries + number * SK_ENTRY);
    const sk_map *map = &batch->maps[number];
    size_t stride = 3 * (size_t)image.width;
    sk_piece piece;

    if (image.kind != RAW && !batch->values) return 0;
    if (choose_piece(batch, number, &image, &piece) != SK_DONE) return 0;
    if (!is_copied(batch, &piece) || piece.flip) return 0;
    if (image.length > map->size || (uint64_t)image.offset > map->size - image.length) return 0;
    if (!is_cached(batch->files[number], &image)) return 0;
    copy->from = map->data + image.offset + (size_t)piece.region.top * stride +
                 3 * (size_t)piece.region.left;
    copy->to = sample_of(batch, number);
    copy->length = 3 * (size_t)piece.region.width;
    copy->stride = stride;
    copy->lines = piece.region.height;
    copy->number = number;
    if (batch->values) {
        copy->length = batch->values;
        copy->lines = 1;
    } else if (copy->length == stride) { /* one long line */
        copy->length *= (size_t)copy->lines;
        copy->lines = 1;
    }
    return 1;
}

/* Copy what can be copied from maps, and return how many images that are. Other codes become
 * SK_UNSUPPORTED or SK_READ. */
static size_t fill_mapped(const sk_batch *batch) {
    size_t found = 0, done = 0;
    sk_copy *copies;

    memset(batch->codes, SK_UNSUPPORTED, batch->count);
    if (!SK_COPIES_MAPPED || batch->maps == NULL || batch->verify_raw) return 0;
    if (batch->count * sample_bytes(batch) < SK_LEAST_MAPPED) return 0;
    copies = malloc(batch->count * sizeof *copies);
    if (copies == NULL) return 0;
    for (size_t number = 0; number < batch->count; number++)
        found += (size_t)find_copy(batch, number, &copies[found]);
    if (found && sk_copy_mapped(copies, found, batch->codes))
        for (size_t number = 0; number < batch->count; number++)
            done += batch->codes[number] == SK_DONE;
    free(copies);
    return done;
}

uint32_t sk_length_of(const uint8_t *entry) { return u32(entry + 8); }

void sk_read_stored(const sk_batch *batch, uint8_t *const *to) {
    int announced = 0;
    for (size_t number = 0; number < batch->count; number++) {
        const entry image = entry_of(batch->entries + number * SK_ENTRY);
        if (batch->mark != NULL) *batch->mark = batch->rows[number];
        batch->codes[number] = (uint8_t)(image.offset < 0 ? SK_UNSUPPORTED
                                         : read_image(batch, number, &image, &announced, to[number]));
    }
}

size_t sk_fill(const sk_batch *batch) {
    workspace work = {{NULL, 0}, {NULL, 0}, {NULL, 0}, {NULL, 0}};
    size_t mapped = fill_mapped(batch);
    int announced = 0;
    for (size_t number = 0; number < batch->count; number++) {
        if (batch->codes[number] == SK_DONE) continue;
        if (batch->mark != NULL) *batch->mark = batch->rows[number];
        batch->codes[number] = (uint8_t)fill_one(batch, number, &announced, &work);
    }
    sk_release(&work.stored);
    sk_release(&work.line);
    sk_release(&work.pixels);
    sk_release(&work.resize);
    return mapped;
}
