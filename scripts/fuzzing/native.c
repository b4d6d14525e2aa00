/* Runs files through the compiled core, for builds with sanitizers (tests/campaigns/test_sanitized.py):
 *
 *   native FILE...
 *
 * Each file is decoded as a PNG and as a JPEG: whole and in regions, at all scales, with true and false
 * sizes, and to planes, which are converted. A JPEG is scaled and encoded. Its bytes also serve as index entries, pieces and pixels, as
 * an image to inspect and as a shard to walk and index. Nothing is compared; the sanitizers report. */
#include "convert.h"
#include "png.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST (1 << 22)

static size_t decoded;

static const uint8_t white[] = {255, 255, 255};

static void decode(const uint8_t *data, size_t length, uint32_t width, uint32_t height) {
    static const int scales[] = {8, 4, 3, 2, 1};
    sk_memory line = {NULL, 0};
    for (size_t n = 0; n < sizeof scales / sizeof *scales; n++) {
        int32_t wide = (int32_t)(((uint64_t)width * scales[n] + 7) / 8);
        int32_t high = (int32_t)(((uint64_t)height * scales[n] + 7) / 8);
        const sk_region regions[] = {
            {0, 0, wide, high},
            {wide / 3, high / 3, wide - wide / 3, high - high / 3},
            {wide / 4, high / 4, wide / 2, high / 2},
            {wide - 1, high - 1, 1, 1},
            {wide - 1, 0, 2, 1},
            {0, high, 1, 1},
            {-1, 0, 1, 1},
        };
        for (size_t m = 0; m < sizeof regions / sizeof *regions; m++) {
            /* Exactly as large as it must be, so that each byte too many is found. */
            size_t size = 3 * (size_t)(regions[m].width > 0 ? regions[m].width : 0) *
                          (size_t)(regions[m].height > 0 ? regions[m].height : 0);
            uint8_t *out = malloc(size ? size : 1);
            if (out != NULL)
                decoded += sk_decode_jpeg(data, length, width, height, scales[n], regions[m],
                                          &line, out) == SK_DONE;
            if (out != NULL && scales[n] == 8)
                decoded += sk_decode_png(data, length, width, height, regions[m], white, &line,
                                         out) == SK_DONE;
            free(out);
        }
    }
    sk_release(&line);
}

/* Decode a PNG as its header states, to RGB, to values, and to values that keep 16 bits. */
static void decode_png(const uint8_t *data, size_t length) {
    sk_memory work = {NULL, 0};
    sk_png png;
    if (sk_read_png(data, length, &png) != SK_DONE || (uint64_t)png.width * png.height > 1 << 20)
        return;
    for (int values = 0; values < 3; values++) {
        sk_region all = {0, 0, (int32_t)png.width, (int32_t)png.height};
        uint8_t *out;
        png.keeps_16 = values == 2;
        out = malloc((values ? sk_png_values(&png) : 3) * png.width * png.height);
        if (out == NULL) abort();
        decoded += sk_png_pixels(data, &png, all, values ? NULL : white, &work, out) == SK_DONE;
        free(out);
    }
    sk_release(&work);
    decode(data, length, png.width, png.height);
}

/* Decode a JPEG as its header states, in all colors, in memory that is exactly as large as it must be. */
static void decode_whole(const uint8_t *data, size_t length) {
    static const int channels[] = {1, 3, 4};
    sk_whole_jpeg header = {.data = data, .length = length};
    if (sk_read_whole_jpeg(&header) != SK_DONE ||
        (uint64_t)header.width * header.height > 1 << 20)
        return;
    for (size_t n = 0; n < sizeof channels / sizeof *channels; n++)
        for (int eighths = 1; eighths <= 8; eighths++) {
            sk_whole_jpeg whole = {
                .data = data,
                .length = length,
                .width = (header.width * (uint32_t)eighths + 7) / 8,
                .height = (header.height * (uint32_t)eighths + 7) / 8,
                .channels = channels[n],
                .eighths = eighths,
            };
            whole.out = malloc((size_t)whole.width * whole.height * (size_t)whole.channels);
            if (whole.out == NULL) abort();
            decoded += sk_read_whole_jpeg(&whole) == SK_DONE;
            free(whole.out);
        }
}

/* Scale a JPEG while it is decoded, and encode the result, in memory that is exactly as large or smaller. */
static void scale(const uint8_t *data, size_t length) {
    static const int32_t sides[] = {1, 5, 40, 300};
    sk_whole_jpeg header = {.data = data, .length = length};
    if (sk_read_whole_jpeg(&header) != SK_DONE ||
        (uint64_t)header.width * header.height > 1 << 20)
        return;
    for (int n = 0; n < 16; n++) {
        int32_t width = sides[n % 4], height = sides[n / 4];
        size_t size = 3 * (size_t)width * (size_t)height, room = size / (size_t)(1 + n % 3) + 1000;
        sk_scaled_jpeg scaled = {
            .data = data,
            .length = length,
            .width = header.width,
            .height = header.height + (n == 9),
            .eighths = 1 + n % 8,
            .box = {0, 0, header.width * (1 + n % 8) / 8.0, header.height * (1 + n % 8) / 8.0},
            .to_width = width,
            .to_height = height,
            .filter = (enum sk_filter)(n % SK_FILTERS),
            .tall_first = n % 2,
            .out = malloc(size),
        };
        uint8_t *encoded = malloc(room);
        if (scaled.out == NULL || encoded == NULL) abort();
        if (sk_scale_jpeg(&scaled) == SK_DONE) {
            int channels = n % 2 ? 1 : 3;
            uint32_t wide = (uint32_t)(channels == 1 ? 3 * width : width);
            decoded += sk_encode_jpeg(scaled.out, wide, (uint32_t)height, channels, 1 + n * 6,
                                      encoded, room) > 0;
        }
        free(encoded);
        free(scaled.out);
    }
}

/* Check the ranges of a record that a region needs, which are inside of it and follow each other. */
static void check_ranges(const uint8_t *record, size_t length, uint32_t width, uint32_t height,
                         sk_region region) {
    sk_extent ranges[SK_MOST_RANGES];
    size_t count = sk_planes_ranges(length, width, height, region, ranges), end = 0;
    if (count == 0 || count > SK_MOST_RANGES) abort();
    for (size_t n = 0; n < count; n++) {
        if (ranges[n].begin < end || ranges[n].end < ranges[n].begin) abort();
        end = ranges[n].end;
    }
    if (end > length) abort();
    if (count > 1 || end < length)
        (void)sk_check_planes(record, length, width, height, region, ranges, count, 0, 0);
}

/* Convert regions of a record, in memory that is exactly as large as it must be. */
static void finish(const uint8_t *record, size_t length, uint32_t width, uint32_t height) {
    int32_t wide = (int32_t)width, high = (int32_t)height;
    const sk_region regions[] = {
        {0, 0, wide, high},
        {wide / 3, high / 3, wide - wide / 3, high - high / 3},
        {wide / 4, high / 4, wide - wide / 2, high - high / 2},
        {wide - 1, high - 1, 1, 1},
    };
    sk_memory work = {NULL, 0};
    for (size_t n = 0; n < sizeof regions / sizeof *regions; n++) {
        uint8_t *out = malloc(3 * (size_t)regions[n].width * (size_t)regions[n].height);
        if (out == NULL) abort();
        decoded += sk_finish_planes(record, length, width, height, regions[n], &work, out) == SK_DONE;
        free(out);
        check_ranges(record, length, width, height, regions[n]);
    }
    sk_release(&work);
}

/* Read the planes of a JPEG, and convert them to RGB with all samplings that fit their size. */
static void read_planes(const uint8_t *data, size_t length) {
    static const char *const names[] = {"mono", "420jpeg", "422", "444"};
    sk_jpeg_planes planes;
    enum sk_code code = sk_jpeg_planes_of(data, length, &planes);
    for (size_t n = 0; code == SK_DONE && n < sizeof names / sizeof *names; n++) {
        static const char checksums[] = "AAAAAAAAAAAAAAAA";
        char header[160];
        size_t start = (size_t)snprintf(
            header, sizeof header,
            "YUV4MPEG2 W%u H%u F1:1 Ip A1:1 C%s XCOLORRANGE=FULL\nFRAME X%s X%s X%s X%s\n",
            planes.width, planes.height, names[n], checksums, checksums, checksums, checksums);
        uint8_t *record = malloc(start + planes.size);
        if (record == NULL) abort();
        memcpy(record, header, start);
        memcpy(record + start, planes.data, planes.size);
        finish(record, start + planes.size, planes.width, planes.height);
        free(record);
    }
    free(planes.data);
}

/* Read what entries name, of any 64 KiB, and draw crops of their sizes. */
static void read_stored(sk_batch *batch) {
    const sk_random_crop crop = {{0.08, 1.0}, {0.75, 1.25}, {-0.2, 0.2}, 0.5};
    uint8_t *entries = malloc(batch->count * SK_ENTRY), *to[8];
    int64_t sides[8];
    uint64_t samples[8];
    sk_piece pieces[8];
    if (entries == NULL || batch->count > 8) abort();
    memcpy(entries, batch->entries, batch->count * SK_ENTRY);
    for (size_t n = 0; n < batch->count; n++) {
        memset(entries + n * SK_ENTRY + 10, 0, 2);
        if ((to[n] = malloc(sk_length_of(entries + n * SK_ENTRY) + 1)) == NULL) abort();
        memcpy(&sides[n], entries + n * SK_ENTRY + 16, 8);
        sides[n] = n % 2 ? sides[n] : sides[n] & 0xFFFF;
        samples[n] = (uint64_t)sides[n];
    }
    batch->entries = entries;
    sk_read_stored(batch, to);
    for (size_t n = 0; n < batch->count; n++) {
        free(to[n]);
        decoded += sk_draw_crops(&crop, samples[n], 1, &samples[n], &sides[n], &sides[n], &pieces[n]);
    }
    free(entries);
}

/* Fill a batch, and views of it, from entries made of the file's bytes, which name the file itself. */
static void fill(const uint8_t *data, size_t length, int file) {
    enum { COUNT = 8, SIDE = 24, VIEWS = 3 };
    size_t sample = 3 * SIDE * SIDE;
    uint8_t *out = malloc(COUNT * sample), *entries = malloc(COUNT * SK_ENTRY), codes[COUNT];
    uint8_t more_codes[COUNT];
    int32_t files[COUNT];
    sk_piece pieces[COUNT], others[COUNT];
    sk_batch batch = {0}, views[VIEWS];
    if (out == NULL || entries == NULL) abort();
    for (size_t n = 0; n < COUNT; n++) {
        files[n] = file;
        for (size_t m = 0; m < SK_ENTRY; m++)
            entries[n * SK_ENTRY + m] = data[(n * 37 + m) % length];
        memcpy(&pieces[n], entries + n * SK_ENTRY, sizeof pieces[n]);
        if (n % 2) { /* plausible, so that more of the code runs */
            memset(entries + n * SK_ENTRY, 0, 8);
            entries[n * SK_ENTRY + 10] = entries[n * SK_ENTRY + 11] = 0;
            memset(entries + n * SK_ENTRY + 21, 0, 3);
            memset(entries + n * SK_ENTRY + 25, 0, 3);
            entries[n * SK_ENTRY + 28] = n % 4 == 1 ? 7 : n % 8 == 3;
            pieces[n] = (sk_piece){{1, 2, 1 + (int32_t)n, SIDE - (int32_t)n}, 1, 0, 0};
        }
        others[n] = (sk_piece){{(int32_t)n, 0, SIDE, 8 + (int32_t)n}, 0, 0, 0};
    }
    batch.count = COUNT;
    batch.entries = entries;
    batch.files = files;
    batch.pieces = pieces;
    batch.height = batch.width = SIDE;
    batch.filter = SK_BICUBIC;
    batch.tall_first = 1;
    batch.oversample = 1.0;
    batch.out = out;
    batch.codes = codes;
    sk_fill(&batch, 1);
    for (int n = 0; n < VIEWS; n++) views[n] = batch;
    views[1].pieces = others;
    views[1].height = views[1].width = 3; /* at reduced size */
    views[1].codes = more_codes;
    views[2].pieces = others;
    sk_fill(views, VIEWS);
    batch.pieces = NULL;
    batch.verify_encoded = batch.verify_raw = 1;
    sk_fill(&batch, 1);
    sk_check_entries(entries, COUNT, 8, codes);
    read_stored(&batch);
    free(out);
    free(entries);
}

/* Copy pixels that are the file's bytes from a map of it, whole and in part, some beyond its end. */
static void copy(size_t length, int file) {
    enum { COUNT = 23, SIDE = 250 };
    size_t sample = 3 * SIDE * SIDE, size = (size_t)8 << 20;
    uint8_t *out = malloc(COUNT * sample), *entries = calloc(COUNT, SK_ENTRY), codes[COUNT];
    uint8_t *data = mmap(NULL, size, PROT_READ, MAP_SHARED, file, 0);
    sk_piece pieces[COUNT];
    sk_map maps[COUNT];
    int32_t files[COUNT];
    sk_batch batch = {0};
    if (out == NULL || entries == NULL || data == MAP_FAILED) abort();
    for (size_t n = 0; n < COUNT; n++) {
        uint8_t *entry = entries + n * SK_ENTRY;
        uint32_t offset = (uint32_t)(n * length / COUNT), side = SIDE + (n % 3 == 0);
        uint32_t bytes = 3 * side * side;
        memcpy(entry, &offset, 4);
        memcpy(entry + 8, &bytes, 4);
        memcpy(entry + 20, &side, 4);
        memcpy(entry + 24, &side, 4);
        entry[28] = 7;
        files[n] = file;
        maps[n] = (sk_map){data, n % 7 ? size : 0};
        pieces[n] = (sk_piece){{n % 3 == 0, 0, SIDE, SIDE}, n % 5 == 1, 0, 0};
    }
    batch.count = COUNT;
    batch.entries = entries;
    batch.files = files;
    batch.maps = maps;
    batch.pieces = pieces;
    batch.height = batch.width = SIDE;
    batch.out = out;
    batch.codes = codes;
    sk_fill(&batch, 1);
    for (size_t n = 0; n < COUNT; n++) { /* as if the end of each had been in memory */
        sk_copy each = {data + n * length / COUNT, out + n * sample, sample, sample, 1, n};
        sk_copy_mapped(&each, 1, codes);
    }
    munmap(data, size);
    free(out);
    free(entries);
}

static void resize(const uint8_t *data, size_t length) {
    static const int32_t sides[] = {1, 2, 3, 17, 40};
    sk_memory work = {NULL, 0};
    for (size_t n = 0; n < 25; n++) {
        int32_t width = sides[n % 5], height = sides[n / 5];
        size_t size = 3 * (size_t)width * (size_t)height;
        uint8_t *pixels = malloc(size);
        if (pixels == NULL) abort();
        for (size_t m = 0; m < size; m++) pixels[m] = data[m % length];
        for (size_t m = 0; m < 25; m++) {
            int32_t wide = sides[m % 5], high = sides[m / 5];
            const double box[4] = {width * (data[0] / 600.0), height * (data[length - 1] / 600.0),
                                   width - 0.3 * (n % 3), height - 0.2 * (n % 2)};
            sk_region region = {wide / 3, high / 2, wide - wide / 3, high - high / 2};
            uint8_t *out = malloc(3 * (size_t)region.width * (size_t)region.height);
            if (out == NULL) abort();
            sk_resize(pixels, 3 * (size_t)width, width, height, box, wide, high,
                      (enum sk_filter)(m % SK_FILTERS), n % 2 == 0, region, m % 3 == 0, &work, out);
            free(out);
        }
        free(pixels);
    }
    sk_release(&work);
}

/* Index the records of a table. */
static void index_table(const sk_table *table, int file) {
    size_t cells = table->rows * (size_t)table->names + 1;
    const char *names[SK_NAMES];
    int8_t found[SK_NAMES];
    sk_records records = {0};
    int64_t *offsets = malloc(cells * sizeof *offsets), *lengths = malloc(cells * sizeof *lengths);
    if (offsets == NULL || lengths == NULL) abort();
    for (int n = 0; n < table->names; n++) {
        names[n] = table->name[n];
        found[n] = strcmp(names[n], "cls") == 0    ? SK_LABEL
                   : strcmp(names[n], "json") == 0 ? SK_META
                                                   : n & 1                          ? SK_OTHER
                                                   : SK_PNG;
    }
    for (size_t row = 0; row < table->rows; row++)
        for (int n = 0; n < table->names; n++) {
            offsets[row * (size_t)table->names + (size_t)n] = table->ranges[row * SK_NAMES + (size_t)n].offset;
            lengths[row * (size_t)table->names + (size_t)n] = table->ranges[row * SK_NAMES + (size_t)n].length;
        }
    records.file = file;
    records.count = table->rows;
    records.columns = table->names;
    records.names = names;
    records.kinds = found;
    records.offsets = offsets;
    records.lengths = lengths;
    records.keys = table->keys;
    records.ends = table->ends;
    records.rows = malloc(table->rows * SK_ENTRY + 1);
    records.checksums = malloc((table->rows + 1) * sizeof *records.checksums);
    records.paths = malloc((table->rows + 1) * sizeof *records.paths);
    records.codes = malloc(table->rows + 1);
    if (records.rows == NULL || records.checksums == NULL || records.paths == NULL ||
        records.codes == NULL)
        abort();
    sk_index(&records);
    for (size_t row = 0; row < table->rows; row++) decoded += records.codes[row] == SK_DONE;
    free(records.text);
    free(records.rows);
    free(records.checksums);
    free(records.paths);
    free(records.codes);
    free(offsets);
    free(lengths);
}

static void walk(int file, size_t length) {
    for (int n = 0; n < 3; n++) {
        sk_table table = {0};
        enum sk_code code = n ? sk_walk_tar(file, (int64_t)length, n == 1 ? 0 : 1536, n == 1 ? -1 : 4096, &table)
                              : sk_walk_lmdb(file, (int64_t)length, &table);
        if (table.rows && table.names) index_table(&table, file); /* even of a damaged shard */
        decoded += code == SK_DONE;
        sk_free_table(&table);
    }
}

static const int16_t waves[SK_WAVES] = {8192, -8192, 1};

/* Measure a JPEG, or pixels and the rows of a PNG of many sizes. */
static void measure(const uint8_t *data, size_t length) {
    sk_memory work = {NULL, 0};
    sk_measures measures;
    sk_image image;
    decoded += sk_inspect(data, length, 1, &image, waves, &measures) == SK_DONE;
    for (uint32_t width = 1; width <= length; width = width * 3 + 1)
        for (uint32_t channels = 1; channels <= 3; channels += 2) {
            uint32_t height = (uint32_t)(length / (channels * width + 1));
            if (height) sk_measure_png(data, width, height, channels, waves, &measures);
            if (height && channels == 3) {
                sk_span span = {8 * width - height % 8, 8 * height - width % 8}; /* of a reduced one */
                sk_measure(data, width, height, span, waves, &work, &measures);
            }
        }
    sk_release(&work);
}

int main(int count, char **names) {
    sk_cpu_prepare();
    sk_crc32_prepare();
    for (int n = 1; n < count; n++) {
        FILE *file = fopen(names[n], "rb");
        uint8_t *data, *exact;
        size_t length;
        if (file == NULL) return 2;
        data = malloc(MOST);
        if (data == NULL) abort();
        length = fread(data, 1, MOST, file);
        exact = malloc(length + 1);
        if (exact == NULL) abort();
        memcpy(exact, data, length);
        free(data);
        data = realloc(exact, length ? length : 1); /* no byte to spare */
        if (data == NULL) abort();
        if (length) {
            sk_image image;
            decoded += sk_inspect(data, length, 0, &image, NULL, NULL) == SK_DONE;
            decoded += sk_inspect(data, length, 1, &image, NULL, NULL) == SK_DONE;
            measure(data, length);
            walk(fileno(file), length);
            /* The size that the frame header states, wherever it is, and others. */
            for (size_t at = 2; at + 9 < length; at++)
                if (data[at] == 0xFF && (data[at + 1] & 0xFC) == 0xC0) {
                    uint32_t height = data[at + 5] << 8 | data[at + 6];
                    uint32_t width = data[at + 7] << 8 | data[at + 8];
                    if (width && height && (uint64_t)width * height < 1 << 20) {
                        sk_measures measures;
                        decode(data, length, width, height);
                        sk_measure_jpeg(data, length, width, height, waves, &measures);
                    }
                    break;
                }
            decode_png(data, length);
            decode(data, length, 17, 9);
            fill(data, length, fileno(file));
            if (n % 16 == 1) copy(length, fileno(file));
            resize(data, length);
            read_planes(data, length);
            decode_whole(data, length);
            scale(data, length);
        }
        free(data);
        fclose(file);
    }
    printf("%zu images and records read\n", decoded);
    return 0;
}
