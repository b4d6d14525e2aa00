/* Read the records of a shard: their checksums, and their rows of the index. */
#include "convert.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WINDOW ((int64_t)1 << 18)
#define WINDOWS 3 /* formats that store fields apart have images, metadata and one more */
#define MOST_FIELD ((int64_t)1 << 30)
#define HEAD 16
#define CHECKED 29
#define MOST_LABEL 999999999

/* A piece of the file in memory. */
typedef struct {
    int64_t start, length;
    uint64_t used; /* time of the last use */
    sk_memory memory;
} window;

typedef struct {
    sk_records *records;
    window windows[WINDOWS];
    uint64_t time;
    int64_t size; /* of the file, as far as the ranges tell */
    size_t text_room;
} reader;

/* The values that a row of the index needs. */
typedef struct {
    int32_t label;
    uint32_t width, height;
    const uint8_t *path;
    size_t path_length;
} facts;

/* Return the bytes of a range, which stay valid until WINDOWS - 1 others were read; or NULL.
 * `more` is what is worth reading with it. */
static const uint8_t *bytes_at(reader *reader, int64_t offset, int64_t length, int64_t more) {
    window *oldest = reader->windows;
    uint8_t *data;
    int64_t ahead = offset - reader->records->known_start;
    if (ahead >= 0 && ahead <= reader->records->known_size &&
        length <= reader->records->known_size - ahead)
        return reader->records->known + ahead;
    for (int n = 0; n < WINDOWS; n++) {
        window *candidate = reader->windows + n;
        if (offset >= candidate->start && offset + length <= candidate->start + candidate->length) {
            candidate->used = ++reader->time;
            return candidate->memory.data + (offset - candidate->start);
        }
        if (candidate->used < oldest->used) oldest = candidate;
    }
    if (more < length) more = length;
    oldest->length = 0;
    if ((data = sk_reserve(&oldest->memory, (size_t)(more > 0 ? more : 1))) == NULL) return NULL;
    if (!sk_read_range(reader->records->file, offset, data, (size_t)more)) return NULL;
    oldest->start = offset;
    oldest->length = more;
    oldest->used = ++reader->time;
    return data;
}

/* Parse the shortest decimal form of a number up to nine digits; returns its length or 0. */
static size_t number_at(const uint8_t *data, size_t length, uint32_t *value) {
    size_t n = 0;
    *value = 0;
    while (n < length && data[n] >= '0' && data[n] <= '9') {
        if (n == 9) return 0;
        *value = *value * 10 + (data[n++] - '0');
    }
    return n > 1 && data[0] == '0' ? 0 : n;
}

static int expect(const uint8_t **at, const uint8_t *end, const char *text) {
    size_t length = strlen(text);
    if ((size_t)(end - *at) < length || memcmp(*at, text, length)) return 0;
    *at += length;
    return 1;
}

/* Parse metadata of the form {"height":H,"path":"P","width":W}, without escapes in P; or, of a
 * record without an image, {"path":"P"}. */
static int parse_meta(const uint8_t *data, size_t length, int has_image, facts *facts) {
    const uint8_t *at = data, *end = data + length;
    size_t digits;
    if (!expect(&at, end, has_image ? "{\"height\":" : "{\"path\":\"")) return 0;
    if (has_image) {
        if ((digits = number_at(at, (size_t)(end - at), &facts->height)) == 0) return 0;
        at += digits;
        if (!expect(&at, end, ",\"path\":\"")) return 0;
    }
    facts->path = at;
    while (at < end && *at != '"') {
        if (*at < 0x20 || *at >= 0x7F || *at == '\\') return 0;
        at++;
    }
    facts->path_length = (size_t)(at - facts->path);
    if (!has_image) return expect(&at, end, "\"}") && at == end;
    if (!expect(&at, end, "\",\"width\":")) return 0;
    if ((digits = number_at(at, (size_t)(end - at), &facts->width)) == 0) return 0;
    at += digits;
    return expect(&at, end, "}") && at == end;
}

static void put(uint8_t *at, uint64_t value, int bytes) {
    for (int n = 0; n < bytes; n++) at[n] = (uint8_t)(value >> (8 * n));
}

static int keep_path(reader *reader, const facts *facts, sk_range *path) {
    sk_records *records = reader->records;
    size_t needed = records->text_size + facts->path_length;
    if (needed > reader->text_room) {
        size_t room = reader->text_room ? reader->text_room : 4096;
        uint8_t *text;
        while (room < needed) room *= 2;
        if ((text = realloc(records->text, room)) == NULL) return 0;
        records->text = text;
        reader->text_room = room;
    }
    memcpy(records->text + records->text_size, facts->path, facts->path_length);
    path->offset = (int64_t)records->text_size;
    path->length = (int64_t)facts->path_length;
    records->text_size = needed;
    return 1;
}

static enum sk_code index_row(reader *reader, size_t row) {
    sk_records *records = reader->records;
    const int64_t *offsets = records->offsets + row * (size_t)records->columns;
    const int64_t *lengths = records->lengths + row * (size_t)records->columns;
    int64_t start = row ? records->ends[row - 1] : records->keys_start;
    uint8_t *out = records->rows + row * SK_ENTRY;
    int64_t first = INT64_MAX, last = 0, total = 0;
    const uint8_t *image = NULL;
    uint32_t checksum, checksum_of_row;
    int kind = -1, has_meta = 0, wants_meta = 0;
    int64_t offset = 0, size = 0; /* of the image */
    facts values = {-1, 0, 0, NULL, 0};

    for (int n = 0; n < records->columns; n++) {
        wants_meta |= records->kinds[n] == SK_META;
        if (offsets[n] < 0) continue;
        if (lengths[n] < 0 || lengths[n] > MOST_FIELD || offsets[n] > INT64_MAX - lengths[n])
            return SK_UNSUPPORTED;
        if (offsets[n] < first) first = offsets[n];
        if (offsets[n] + lengths[n] > last) last = offsets[n] + lengths[n];
        total += lengths[n];
        if (records->kinds[n] < 0) continue;
        if (kind >= 0) return SK_UNSUPPORTED; /* several images */
        kind = records->kinds[n];
        offset = offsets[n];
        size = lengths[n];
    }
    if (size > UINT32_MAX) return SK_UNSUPPORTED;
    checksum = sk_crc32(0, records->keys + start, (size_t)(records->ends[row] - start));
    /* The fields of most formats are neighbors: one read gets all of them. */
    if (last - first - total < (1 << 14) && last - first > WINDOW / 4 &&
        bytes_at(reader, first, last - first, 0) == NULL)
        return SK_READ;
    for (int n = 0; n < records->columns; n++) {
        const char *name = records->names[n];
        char digits[16];
        const uint8_t *data;
        size_t length = (size_t)lengths[n];
        if (records->kinds[n] == SK_LABEL && records->labels != NULL) {
            int64_t label = records->labels[row];
            if (label == -1) continue;
            if (label < 0 || label > MOST_LABEL) return SK_UNSUPPORTED;
            length = (size_t)snprintf(digits, sizeof digits, "%d", (int)label);
            data = (const uint8_t *)digits;
        } else if (offsets[n] < 0) {
            continue;
        } else {
            int64_t rest = reader->size - offsets[n];
            data = bytes_at(reader, offsets[n], lengths[n], rest < WINDOW ? rest : WINDOW);
            if (data == NULL) return SK_READ;
        }
        if (records->checksums != NULL) {
            checksum = sk_crc32(checksum, (const uint8_t *)name, strlen(name));
            checksum = sk_crc32(checksum, data, length);
        }
        if (records->kinds[n] == SK_LABEL) {
            uint32_t label;
            if (length == 0 || number_at(data, length, &label) != length) return SK_UNSUPPORTED;
            values.label = (int32_t)label;
        } else if (records->kinds[n] == SK_META) {
            if (!parse_meta(data, length, kind >= 0, &values)) return SK_UNSUPPORTED;
            if (!keep_path(reader, &values, records->paths + row)) return SK_MEMORY;
            has_meta = 1;
        }
    }
    if (has_meta != wants_meta) return SK_UNSUPPORTED;
    if (kind >= 0 && (image = bytes_at(reader, offset, size, 0)) == NULL) return SK_READ;
    put(out, (uint64_t)offset, 8);
    put(out + 8, (uint64_t)size, 4);
    put(out + 16, (uint32_t)values.label, 4);
    if (wants_meta) {
        put(out + 20, values.width, 4);
        put(out + 24, values.height, 4);
    }
    out[28] = (uint8_t)(kind >= 0 ? kind : SK_ABSENT);
    checksum_of_row = sk_crc32(0, out + HEAD, CHECKED - HEAD);
    if (kind >= 0) checksum_of_row = sk_crc32(checksum_of_row, image, (size_t)size);
    put(out + 12, checksum_of_row, 4);
    put(out + CHECKED, sk_crc32(0, out, CHECKED), 3);
    if (records->checksums != NULL) records->checksums[row] = checksum;
    return SK_DONE;
}

void sk_index(sk_records *records) {
    reader reader;
    memset(&reader, 0, sizeof reader);
    reader.records = records;
    for (size_t n = 0; n < records->count * (size_t)records->columns; n++)
        if (records->offsets[n] >= 0 && records->lengths[n] >= 0 &&
            records->lengths[n] <= MOST_FIELD && records->offsets[n] <= INT64_MAX - MOST_FIELD &&
            records->offsets[n] + records->lengths[n] > reader.size)
            reader.size = records->offsets[n] + records->lengths[n];
    for (size_t row = 0; row < records->count; row++)
        records->codes[row] = (uint8_t)index_row(&reader, row);
    for (int n = 0; n < WINDOWS; n++) sk_release(&reader.windows[n].memory);
}
