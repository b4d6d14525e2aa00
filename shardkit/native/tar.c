/* Walk a tar file whose headers are those of shardkit/formats/webdataset.py, to the byte. */
#include "convert.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK 512
#define NAME 100
#define AHEAD (1 << 12)  /* bytes to read for a header and the next ones, */
#define WINDOW (1 << 16) /* up to this many while all members are small */
#define ENDING (1 << 20)
#define MOST_KEY (1 << 14)

typedef struct {
    int file;
    int64_t size; /* of the file */
    int64_t start; /* of the window */
    size_t length;
    int64_t ahead; /* bytes to read next */
    uint8_t data[WINDOW];
} window;

/* Return the block at an offset. What is read with it doubles while it is used. */
static const uint8_t *block_at(window *window, int64_t offset) {
    int64_t left = window->size - offset, end = window->start + (int64_t)window->length;
    if (left < BLOCK) return NULL;
    if (offset < window->start || offset + BLOCK > end) {
        int64_t wanted = offset - end < AHEAD ? 2 * window->ahead : AHEAD;
        window->ahead = wanted = wanted < WINDOW ? wanted : WINDOW;
        if (wanted > left) wanted = left;
        if (!sk_read_range(window->file, offset, window->data, (size_t)wanted)) return NULL;
        window->start = offset;
        window->length = (size_t)wanted;
    }
    return window->data + (offset - window->start);
}

static int octal(const uint8_t *digits, int count, int64_t *value) {
    *value = 0;
    for (int n = 0; n < count; n++) {
        if (digits[n] < '0' || digits[n] > '7') return 0;
        *value = *value << 3 | (digits[n] - '0');
    }
    return 1;
}

static int is_zero(const uint8_t *data, size_t length) {
    return length == 0 || (data[0] == 0 && memcmp(data, data + 1, length - 1) == 0);
}

/* Parse a header; returns whether it is just as shardkit writes one. */
static int as_written(const uint8_t *header, size_t *length, int64_t *size) {
    static const uint8_t owner[24] = "0000644\0000000000\0000000000";
    static const uint8_t time[12] = "00000000000";
    uint32_t sum = 0;
    int64_t stated;
    size_t n;

    for (n = 0; n < NAME && header[n]; n++)
        if (header[n] >= 0x80) return 0;
    *length = n;
    if (!is_zero(header + n, NAME - n)) return 0;
    /* Owner, size, time (before which the size ends), checksum, type; then the rest. */
    if (*length == 0 || memcmp(header + 100, owner, 24) || !octal(header + 124, 11, size) ||
        header[135] || memcmp(header + 136, time, 12) || !octal(header + 148, 6, &stated) ||
        header[154] || header[155] != ' ' || header[156] != '0')
        return 0;
    if (!is_zero(header + 157, 100) || memcmp(header + 257, "ustar\00000", 8) ||
        !is_zero(header + 265, 64) || memcmp(header + 329, "0000000\0000000000", 16) ||
        !is_zero(header + 345, BLOCK - 345))
        return 0;
    for (n = 0; n < BLOCK; n++) sum += header[n];
    for (n = 148; n < 156; n++) sum += ' ' - (uint32_t)header[n];
    return (int64_t)sum == stated;
}

/* Whether the archive ends properly at an offset: only zeros follow, at least two blocks. */
static int ends_at(int file, int64_t size, int64_t offset) {
    uint8_t *data;
    int fine = 1;
    if (size - offset < 2 * BLOCK || (data = malloc(ENDING)) == NULL) return 0;
    while (fine && offset < size) {
        size_t part = size - offset < ENDING ? (size_t)(size - offset) : ENDING;
        fine = sk_read_range(file, offset, data, part) && is_zero(data, part);
        offset += (int64_t)part;
    }
    free(data);
    return fine;
}

/* Return the length of the key in a member's name: up to the first dot of its last part. */
static size_t key_of(const uint8_t *name, size_t length) {
    size_t last = 0, at;
    for (size_t n = 0; n < length; n++)
        if (name[n] == '/') last = n + 1;
    for (at = last; at < length && name[at] != '.'; at++);
    return at == length || at == last ? 0 : at;
}

static int add_member(sk_table *table, int file, const uint8_t *name, size_t length, sk_range range) {
    size_t key = key_of(name, length), before;
    const uint8_t *field = name + key + 1;
    if (length == 12 && memcmp(name, "__shardkit__", 12) == 0) {
        if (table->meta.length) return 0;
        table->meta = range;
        return range.length > 0;
    }
    if (key == 0 || key > MOST_KEY) return 0;
    before = table->rows > 1 ? (size_t)table->ends[table->rows - 2] : 0;
    if (table->rows == 0 || table->keys_size - before != key ||
        memcmp(table->keys + before, name, key))
        if (!sk_add_row(table, name, key)) return 0;
    length -= key + 1;
    if (length == 7 && memcmp(field, "raw.npy", 7) == 0) return sk_add_raw(table, file, range);
    return sk_add_field(table, field, length, range);
}

static enum sk_code walk(window *window, int64_t start, int64_t stop, sk_table *table) {
    int64_t offset = start, end = stop < 0 ? window->size : stop;
    while (offset < end) {
        const uint8_t *header = block_at(window, offset);
        sk_range range;
        size_t length;
        if (header == NULL) return SK_READ;
        if (header[0] == 0) {
            if (!is_zero(header, BLOCK)) return SK_UNSUPPORTED;
            break;
        }
        if (!as_written(header, &length, &range.length)) return SK_UNSUPPORTED;
        range.offset = offset + BLOCK;
        if (range.length > window->size - range.offset) return SK_READ;
        if (!add_member(table, window->file, header, length, range)) return SK_UNSUPPORTED;
        offset = range.offset + (range.length + BLOCK - 1) / BLOCK * BLOCK;
    }
    if (stop >= 0) return offset == stop ? SK_DONE : SK_UNSUPPORTED;
    return ends_at(window->file, window->size, offset) ? SK_DONE : SK_UNSUPPORTED;
}

enum sk_code sk_walk_tar(int file, int64_t size, int64_t start, int64_t stop, sk_table *table) {
    window *work = malloc(sizeof *work);
    enum sk_code code;
    if (work == NULL) return SK_MEMORY;
    work->file = file;
    work->size = size;
    work->start = 0;
    work->length = 0;
    work->ahead = AHEAD;
    code = start < 0 || stop > size ? SK_UNSUPPORTED : walk(work, start, stop, table);
    free(work);
    return code;
}
