/* Read, check, decode, crop and scale the images of a batch, straight into its memory. */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* Bytes of an entry that its own check, and the checksum of its image, cover. */
#define CHECKED 29
#define HEAD 16

/* Positions in STORED_KINDS of shardkit/record.py. */
#define JPEG 0
#define PNG 1
#define RAW 7
#define ARRAY 8
#define PLANES 11


/* Encoded images and pixels are read with this many bytes to spare after them. */
#define SLACK 16

typedef struct {
    int64_t offset;
    uint32_t length, checksum, width, height;
    uint8_t kind;
} entry;

/* What the views of one image show of it at one scale, decoded once. */
typedef struct {
    int views, is_decoded;
    sk_region region; /* around those of the views, in the scaled image */
    sk_memory pixels;
} shared_part;

/* Memory for the steps of one image. */
typedef struct {
    const sk_batch *views; /* all views of the batch */
    size_t count;
    size_t *next; /* the next position with the same image, LAST or SEEN; NULL if none has one */
    sk_memory stored, line, resize;
    int is_read;              /* whether `stored` has the image */
    shared_part parts[8 + 1]; /* by eighths */
} workspace;

#define LAST SIZE_MAX
#define SEEN (SIZE_MAX - 1)

static size_t next_of(const workspace *work, size_t number) {
    return work->next == NULL ? LAST : work->next[number];
}

static uint32_t u32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static entry entry_of(const uint8_t *at) {
    entry image;
    image.offset = (int64_t)(u32(at) | (uint64_t)u32(at + 4) << 32);
    image.length = u32(at + 8);
    image.checksum = u32(at + 12);
    image.width = u32(at + 20);
    image.height = u32(at + 24);
    image.kind = at[28];
    return image;
}

void sk_check_entries(const uint8_t *entries, size_t count, int kinds, uint8_t *wrong) {
    for (size_t n = 0; n < count; n++, entries += SK_ENTRY) {
        uint32_t stated = u32(entries + CHECKED - 1) >> 8;
        wrong[n] = (sk_crc32(0, entries, CHECKED) & 0xFFFFFF) != stated || entries[28] >= kinds;
    }
}

int sk_survey_entries(const uint8_t *entries, size_t count, const int64_t *sizes, int kinds,
                      uint32_t width, uint32_t height, uint64_t most_pixels, sk_survey *survey) {
    memset(survey, 0, sizeof *survey);
    for (size_t n = 0; n < count; n++, entries += SK_ENTRY) {
        const entry image = entry_of(entries);
        uint64_t pixels = (uint64_t)image.width * image.height;
        uint8_t wrong;
        sk_check_entries(entries, 1, PLANES + 1, &wrong);
        if (wrong || (image.kind >= kinds && image.kind != PLANES)) return 0;
        if (image.offset < 0 || image.offset > sizes[n] - (int64_t)image.length) return 0;
        if (image.kind == RAW) {
            if (image.width != width || image.height != height || image.length != 3 * pixels)
                return 0;
        } else if (pixels > most_pixels || (pixels == 0 && (image.width || image.height))) {
            return 0;
        }
        if (image.length > survey->longest) survey->longest = image.length;
        if (pixels > survey->most_pixels) survey->most_pixels = pixels;
        if (n == 0) {
            survey->width = image.width;
            survey->height = image.height;
        } else if (survey->width != image.width || survey->height != image.height) {
            survey->width = survey->height = 0;
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
    if (isinf(batch->oversample) || image->kind != JPEG) return 8;
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
    sk_region scaled = {(int32_t)(region.left * scale), (int32_t)(region.top * scale), 0, 0};
    scaled.width = (right < width ? (int32_t)right : width) - scaled.left;
    scaled.height = (bottom < height ? (int32_t)bottom : height) - scaled.top;
    return scaled;
}

int sk_is_inside(sk_region region, int64_t width, int64_t height) {
    return region.left >= 0 && region.top >= 0 && region.width > 0 && region.height > 0 &&
           region.left <= width - region.width && region.top <= height - region.height;
}

static int is_plausible(const sk_batch *batch, const entry *image, const sk_piece *piece) {
    uint64_t pixels = (uint64_t)image->width * image->height;
    if (image->kind != JPEG && image->kind != RAW && image->kind != PLANES &&
        !(image->kind == PNG && SK_DECODES_PNG))
        return 0;
    if (image->offset < 0 || image->length == 0 || pixels == 0 || pixels > SK_MOST_PIXELS) return 0;
    if (image->width > INT32_MAX / 8 || image->height > INT32_MAX / 8) return 0;
    if (image->kind == RAW && image->length != 3 * pixels) return 0;
    if (!piece->whole_height) return sk_is_inside(piece->region, image->width, image->height);
    if (piece->region.width != batch->width || piece->region.height != batch->height) return 0;
    return piece->whole_width > 0 && piece->whole_height > 0 &&
           sk_is_inside(piece->region, piece->whole_width, piece->whole_height);
}

/* Copy a region of pixels. */
static void cut(const uint8_t *pixels, size_t stride, sk_region region, uint8_t *out) {
    size_t wide = 3 * (size_t)region.width;
    pixels += region.top * stride + 3 * (size_t)region.left;
    for (int32_t y = 0; y < region.height; y++, pixels += stride, out += wide)
        memcpy(out, pixels, wide);
}

/* Decode the region of a stored image to `out`. */
static enum sk_code decode(const sk_batch *batch, const entry *image, sk_region region, int eighths,
                           workspace *work, uint8_t *out) {
    if (image->kind == JPEG)
        return sk_decode_jpeg(work->stored.data, image->length, image->width, image->height,
                              eighths, region, &work->line, out);
    if (image->kind == PLANES)
        return sk_finish_planes(work->stored.data, image->length, image->width, image->height,
                                region, &work->line, out);
    if (image->kind == PNG)
        return sk_decode_png(work->stored.data, image->length, image->width, image->height, region,
                             batch->ground, &work->line, out);
    cut(work->stored.data, 3 * (size_t)image->width, region, out);
    return SK_DONE;
}

/* Pixels inside others. */
typedef struct {
    const uint8_t *data;
    size_t stride;
} window;

/* Find the pixels of a region of a scaled image, decoded with those that other views show. */
static enum sk_code show(const sk_batch *batch, const entry *image, sk_region region, int eighths,
                         workspace *work, window *shown) {
    shared_part *part = &work->parts[eighths];
    sk_region all = part->region;
    if (image->kind == RAW) {
        all = (sk_region){0, 0, (int32_t)image->width, (int32_t)image->height};
        shown->data = work->stored.data;
    } else {
        if (!part->is_decoded) {
            size_t size = 3 * (size_t)all.width * (size_t)all.height;
            uint8_t *pixels = sk_reserve(&part->pixels, size);
            enum sk_code code;
            if (pixels == NULL) return SK_MEMORY;
            code = decode(batch, image, all, eighths, work, pixels);
            if (code != SK_DONE) return code;
            part->is_decoded = 1;
        }
        shown->data = part->pixels.data;
    }
    shown->stride = 3 * (size_t)all.width;
    shown->data += (size_t)(region.top - all.top) * shown->stride;
    shown->data += 3 * (size_t)(region.left - all.left);
    return SK_DONE;
}

static double least(double one, double other) { return one < other ? one : other; }

/* Return the region of an image that a piece shows. */
static sk_region shown_region(const entry *image, const sk_piece *piece) {
    if (!piece->whole_height) return piece->region;
    return (sk_region){0, 0, (int32_t)image->width, (int32_t)image->height};
}

/* Decode what a piece shows, and scale it to the size of a sample. */
static enum sk_code decode_scaled(const sk_batch *batch, const entry *image, const sk_piece *piece,
                                  workspace *work, uint8_t *out) {
    int eighths = scale_of(batch, image, piece);
    double scale = eighths / 8.0;
    sk_region sample = {0, 0, batch->width, batch->height}, part;
    sk_region shown = shown_region(image, piece);
    int32_t width = batch->width, height = batch->height;
    double box[4];
    enum sk_code code;
    window pixels;

    /* Several scales give a tiny image the same size, and simplejpeg would choose another. */
    if (eighths < 8 && (image->width < 8 || image->height < 8)) return SK_UNSUPPORTED;
    if (piece->whole_height) {
        sample = piece->region;
        width = piece->whole_width;
        height = piece->whole_height;
    }
    part = enclosing(image, shown, eighths);
    box[0] = shown.left * scale - part.left;
    box[1] = shown.top * scale - part.top;
    box[2] = least(box[0] + shown.width * scale, part.width);
    box[3] = least(box[1] + shown.height * scale, part.height);
    code = show(batch, image, part, eighths, work, &pixels);
    if (code != SK_DONE) return code;
    return sk_resize(pixels.data, pixels.stride, part.width, part.height, box, width, height,
                     batch->filter, batch->tall_first, sample, piece->flip, &work->resize, out);
}

/* Decode the region of a stored image that one view shows, in full size. */
static enum sk_code decode_unscaled(const sk_batch *batch, const entry *image, sk_region region,
                                    workspace *work, uint8_t *out) {
    window pixels;
    enum sk_code code;
    if (work->parts[8].views < 2) return decode(batch, image, region, 8, work, out);
    code = show(batch, image, region, 8, work, &pixels);
    if (code != SK_DONE) return code;
    region.left = region.top = 0;
    cut(pixels.data, pixels.stride, region, out);
    return SK_DONE;
}

/* Find the piece of an image that becomes a sample. */
static enum sk_code choose_piece(const sk_batch *batch, size_t number, const entry *image,
                                 sk_piece *piece) {
    if (batch->values) {
        *piece = (sk_piece){{0, 0, 0, 0}, 0, 0, 0};
        if ((image->kind != ARRAY && image->kind != RAW) || image->offset < 0) return SK_UNSUPPORTED;
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

static int32_t greater(int32_t one, int32_t other) { return one > other ? one : other; }
static int32_t lesser(int32_t one, int32_t other) { return one < other ? one : other; }

static sk_region around(sk_region one, sk_region other) {
    sk_region both = {lesser(one.left, other.left), lesser(one.top, other.top), 0, 0};
    both.width = greater(one.left + one.width, other.left + other.width) - both.left;
    both.height = greater(one.top + one.height, other.top + other.height) - both.top;
    return both;
}

/* Find the rectangle around what the samples of an image show, from `number` on; returns 0 if none shows
 * any of it. */
static int find_region(const workspace *work, size_t number, const entry *image, sk_region *region) {
    int shows = 0;
    for (; number < work->views->count; number = next_of(work, number))
        for (const sk_batch *view = work->views; view < work->views + work->count; view++) {
            sk_piece piece;
            if (choose_piece(view, number, image, &piece) != SK_DONE) continue;
            *region =
                shows ? around(*region, shown_region(image, &piece)) : shown_region(image, &piece);
            shows = 1;
        }
    return shows;
}

/* Find the ranges of a record that all views of an image read; returns their number. */
static size_t find_ranges(const workspace *work, size_t number, const entry *image, sk_region *region,
                          sk_extent *ranges) {
    ranges[0] = (sk_extent){0, image->length};
    if (image->kind != PLANES || !find_region(work, number, image, region)) return 1;
    return sk_planes_ranges(image->length, image->width, image->height, *region, ranges);
}

/* Issue readahead for all images from `number` on. */
static void announce(const workspace *work, size_t number) {
#ifdef POSIX_FADV_WILLNEED
    for (; number < work->views->count; number++) {
        entry image = entry_of(work->views->entries + number * SK_ENTRY);
        sk_extent ranges[SK_MOST_RANGES];
        sk_region region;
        size_t count;
        if (image.offset < 0) continue;
        count = find_ranges(work, number, &image, &region, ranges);
        for (const sk_extent *range = ranges; range < ranges + count; range++)
            (void)posix_fadvise(work->views->files[number], (off_t)(image.offset + (int64_t)range->begin),
                                (off_t)(range->end - range->begin), POSIX_FADV_WILLNEED);
    }
#else
    (void)work, (void)number;
#endif
}

static enum sk_code read_image(const sk_batch *batch, size_t number, const entry *image,
                               int *announced, const workspace *work, uint8_t *to) {
    const uint8_t *head = batch->entries + number * SK_ENTRY + HEAD;
    const int file = batch->files[number];
    int is_raw = image->kind == RAW || image->kind == ARRAY;
    int verify = is_raw ? batch->verify_raw : batch->verify_encoded;
    sk_extent ranges[SK_MOST_RANGES];
    sk_region region;
    size_t count = find_ranges(work, number, image, &region, ranges);
    uint32_t crc;

    for (const sk_extent *range = ranges; range < ranges + count; range++) {
        const int64_t offset = image->offset + (int64_t)range->begin;
        const size_t length = range->end - range->begin;
        if (!*announced && read_cached(file, offset, to + range->begin, length)) continue;
        if (!*announced && batch->count > 1) announce(work, number);
        *announced = 1;
        if (!sk_read_range(file, offset, to + range->begin, length)) return SK_READ;
    }
    if (!verify) return SK_DONE;
    crc = sk_crc32(0, head, CHECKED - HEAD);
    if (count == 1 && ranges->end == image->length)
        return sk_crc32(crc, to, image->length) == image->checksum ? SK_DONE : SK_CHECKSUM;
    return sk_check_planes(to, image->length, image->width, image->height, region, ranges, count, crc,
                           image->checksum)
               ? SK_DONE
               : SK_CHECKSUM;
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
    if (batch->values) return read_image(batch, number, &image, announced, work, out);
    copied = is_copied(batch, &piece);
    if (image.kind == RAW && copied && image.width == (uint32_t)batch->width &&
        image.height == (uint32_t)batch->height) {
        code = read_image(batch, number, &image, announced, work, out);
    } else {
        if (sk_reserve(&work->stored, (size_t)image.length + SLACK) == NULL) return SK_MEMORY;
        if (!work->is_read) code = read_image(batch, number, &image, announced, work, work->stored.data);
        work->is_read = code == SK_DONE;
        if (code == SK_DONE)
            code = copied ? decode_unscaled(batch, &image, piece.region, work, out)
                          : decode_scaled(batch, &image, &piece, work, out);
        if (!copied) return code;
    }
    if (code == SK_DONE && piece.flip) sk_flip(out, batch->width, batch->height);
    return code;
}

/* Whether an image's last byte is in the page cache, and so, most likely, all others: the kernel reads
 * files forward. */
static int is_cached(const sk_batch *batch, size_t number) {
    const entry image = entry_of(batch->entries + number * SK_ENTRY);
    uint8_t byte;
    return read_cached(batch->files[number], image.offset + image.length - 1, &byte, 1);
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

/* Refuse copies that end beyond their file: in the last page of a truncated file, a map has zeros.
 * Return how many are left. */
static size_t require_inside_files(const sk_batch *batch) {
    size_t done = 0;
    int64_t size = -1;
    for (size_t number = 0, latest = 0; number < batch->count; number++) {
        const entry image = entry_of(batch->entries + number * SK_ENTRY);
        if (batch->codes[number] != SK_DONE) continue;
        if (size < 0 || batch->files[number] != batch->files[latest]) {
            struct stat now;
            size = fstat(batch->files[number], &now) == 0 ? (int64_t)now.st_size : -1;
            latest = number;
        }
        if (image.offset <= size - (int64_t)image.length)
            done++;
        else
            batch->codes[number] = SK_READ;
    }
    return done;
}

/* Copy what can be copied from maps, and return how many images that are. Other codes become
 * SK_UNSUPPORTED or SK_READ. */
static size_t fill_mapped(const sk_batch *batch) {
    size_t mapped = 0, done = 0;
    sk_copy *copies;

    memset(batch->codes, SK_UNSUPPORTED, batch->count);
    if (!SK_COPIES_MAPPED || batch->maps == NULL || batch->verify_raw) return 0;
    if (batch->count * sample_bytes(batch) < SK_LEAST_MAPPED) return 0;
    copies = malloc(batch->count * sizeof *copies);
    if (copies == NULL) return 0;
    for (size_t number = 0; number < batch->count; number++)
        mapped += (size_t)find_copy(batch, number, &copies[mapped]);
    if (mapped && is_cached(batch, copies->number) && sk_copy_mapped(copies, mapped, batch->codes))
        done = require_inside_files(batch);
    free(copies);
    return done;
}

uint32_t sk_length_of(const uint8_t *entry) { return u32(entry + 8); }

void sk_read_stored(const sk_batch *batch, uint8_t *const *to) {
    const workspace work = {.views = batch}; /* none of which show anything: all bytes are read */
    int announced = 0;
    for (size_t number = 0; number < batch->count; number++) {
        const entry image = entry_of(batch->entries + number * SK_ENTRY);
        if (batch->mark != NULL) *batch->mark = batch->rows[number];
        batch->codes[number] = (uint8_t)(image.offset < 0 ? SK_UNSUPPORTED
                                         : read_image(batch, number, &image, &announced, &work, to[number]));
    }
}

typedef struct {
    int64_t offset;
    size_t number;
    int32_t file;
} place;

static int compare(const void *one, const void *other) {
    const place *a = one, *b = other;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    return a->number < b->number ? -1 : 1;
}

/* Find the images that a batch has several times: return `next` of a workspace. */
static size_t *find_repeats(const sk_batch *batch) {
    place *places = malloc((batch->count + 1) * sizeof *places);
    size_t *next = malloc((batch->count + 1) * sizeof *next), repeats = 0;
    if (places != NULL && next != NULL && !batch->values) {
        for (size_t n = 0; n < batch->count; n++) {
            places[n] = (place){entry_of(batch->entries + n * SK_ENTRY).offset, n, batch->files[n]};
            next[n] = LAST;
        }
        qsort(places, batch->count, sizeof *places, compare);
        for (const place *at = places; at + 1 < places + batch->count; at++) {
            const uint8_t *one = batch->entries + at->number * SK_ENTRY;
            if (at->file != at[1].file || at->offset != at[1].offset) continue;
            if (memcmp(one, batch->entries + at[1].number * SK_ENTRY, SK_ENTRY)) continue;
            next[at->number] = at[1].number;
            repeats++;
        }
    }
    free(places);
    if (repeats) return next;
    free(next);
    return NULL;
}

/* Whether two samples of one image are equal. */
static int are_equal(const sk_batch *view, size_t one, size_t other) {
    return view->pieces == NULL ||
           memcmp(&view->pieces[one], &view->pieces[other], sizeof *view->pieces) == 0;
}

/* Find what the samples of an image have to decode at each scale: the rectangle around their regions.
 * Most of a decode is entropy decoding of all rows down to the region, so it costs less than several. */
static void share_parts(const sk_batch *views, size_t count, size_t first, workspace *work) {
    const entry image = entry_of(views->entries + first * SK_ENTRY);
    work->is_read = 0;
    for (int eighths = 0; eighths <= 8; eighths++)
        work->parts[eighths].views = work->parts[eighths].is_decoded = 0;
    if (views->values) return;
    for (size_t number = first; number < views->count; number = next_of(work, number))
        for (const sk_batch *view = views; view < views + count; view++) {
            sk_piece piece;
            sk_region region;
            shared_part *part;
            int eighths;
            if (number != first && are_equal(view, first, number)) continue;
            if (choose_piece(view, number, &image, &piece) != SK_DONE) continue;
            eighths = is_copied(view, &piece) ? 8 : scale_of(view, &image, &piece);
            region = enclosing(&image, shown_region(&image, &piece), eighths);
            part = &work->parts[eighths];
            part->region = part->views++ ? around(part->region, region) : region;
        }
}

/* Fill a sample, or copy it from an equal one of the first position of its image. */
static void fill_sample(const sk_batch *view, size_t number, size_t first, int *announced,
                        workspace *work) {
    if (view->codes[number] == SK_DONE) return;
    if (view->mark != NULL) *view->mark = view->rows[number];
    if (number != first && view->codes[first] == SK_DONE && are_equal(view, first, number)) {
        memcpy(sample_of(view, number), sample_of(view, first), sample_bytes(view));
        view->codes[number] = SK_DONE;
        return;
    }
    view->codes[number] = (uint8_t)fill_one(view, number, announced, work);
}

size_t sk_fill(const sk_batch *views, size_t count) {
    workspace work;
    size_t mapped = 0, next;
    int announced = 0;
    memset(&work, 0, sizeof work);
    work.views = views;
    work.count = count;
    work.next = find_repeats(views);
    for (size_t view = 0; view < count; view++) mapped += fill_mapped(&views[view]);
    for (size_t first = 0; first < views->count; first++) {
        if (next_of(&work, first) == SEEN) continue;
        share_parts(views, count, first, &work);
        for (size_t number = first; number < views->count; number = next_of(&work, number))
            for (const sk_batch *view = views; view < views + count; view++)
                fill_sample(view, number, first, &announced, &work);
        for (size_t number = first; work.next != NULL && number < views->count; number = next) {
            next = work.next[number];
            work.next[number] = SEEN;
        }
    }
    free(work.next);
    sk_release(&work.stored);
    sk_release(&work.line);
    sk_release(&work.resize);
    for (int eighths = 0; eighths <= 8; eighths++) sk_release(&work.parts[eighths].pixels);
    return mapped;
}
