/* Walk the pages of an LMDB file; the same rules as shardkit/formats/lmdb_pages.py. */
#include "convert.h"

#include <stdlib.h>
#include <string.h>

#define HEADER 16 /* bytes of a page's header, and of an overflow page's */
#define NODE 8
#define DEEPEST 32
#define LONGEST_KEY 511
#define MOST_KEY (1 << 14)
#define BRANCH 1
#define LEAF 2
#define OVERFLOW 4
#define BIG_DATA 1
#define NO_PAGE UINT64_MAX
#define DIGITS 9 /* of the row in a key */

typedef struct {
    int file;
    int64_t size;
    uint32_t page_size;
    uint64_t pages;
    uint8_t *used;
    uint8_t *levels; /* one page for each level of the tree */
    uint8_t last[LONGEST_KEY];
    size_t last_size;
    sk_range meta;
    sk_table *table;
} walker;

static uint32_t u16(const uint8_t *at) { return (uint32_t)at[0] | (uint32_t)at[1] << 8; }
static uint32_t u32(const uint8_t *at) { return u16(at) | u16(at + 2) << 16; }
static uint64_t u64(const uint8_t *at) { return u32(at) | (uint64_t)u32(at + 4) << 32; }

static int read_at(const walker *walker, uint64_t offset, uint8_t *to, size_t length) {
    if (offset > (uint64_t)walker->size || length > (uint64_t)walker->size - offset) return 0;
    return sk_read_range(walker->file, (int64_t)offset, to, length);
}

/* Mark pages as used; none may be used twice, so all values fit into the file. */
static int use(walker *walker, uint64_t first, uint64_t count) {
    if (count == 0 || first >= walker->pages || count > walker->pages - first) return 0;
    if (memchr(walker->used + first, 1, count) != NULL) return 0;
    memset(walker->used + first, 1, count);
    return 1;
}

/* Add a row or a field. LMDB sorts, so the fields of a row come before those of the next one. */
static int add(walker *walker, const uint8_t *key, size_t key_size, const uint8_t *value,
               sk_range range) {
    sk_table *table = walker->table;
    size_t row = 0, name = key_size - DIGITS - 1;
    const uint8_t *stored = key + DIGITS + 1;
    if (key_size == 12 && memcmp(key, "__shardkit__", 12) == 0) {
        walker->meta = range;
        return 1;
    }
    if (key_size < DIGITS + 2 || key[DIGITS] != '.') return 0;
    for (int n = 0; n < DIGITS; n++) {
        if (key[n] < '0' || key[n] > '9') return 0;
        row = row * 10 + (size_t)(key[n] - '0');
    }
    if (name == 7 && memcmp(stored, "__key__", 7) == 0) {
        /* It sorts before all other fields. A longer one, on pages of its own, is left. */
        if (row != table->rows || value == NULL || range.length < 1 || range.length > MOST_KEY)
            return 0;
        return sk_add_row(table, value, (size_t)range.length);
    }
    if (row + 1 != table->rows) return 0;
    if (name == 7 && memcmp(stored, "raw.npy", 7) == 0)
        return sk_add_raw(table, walker->file, range);
    return sk_add_field(table, stored, name, range);
}

/* Add the value of a node of a leaf; returns the bytes that it occupies there, or 0. */
static size_t add_node(walker *walker, const uint8_t *page, uint64_t number, uint32_t pointer) {
    size_t key_size, length, start;
    uint32_t flags;
    const uint8_t *key;
    uint8_t header[HEADER];
    uint64_t first, pages;
    sk_range range;

    if (pointer + NODE > walker->page_size) return 0;
    length = u32(page + pointer);
    flags = u16(page + pointer + 4);
    key_size = u16(page + pointer + 6);
    if (key_size == 0 || key_size > LONGEST_KEY) return 0;
    start = pointer + NODE + key_size;
    if (start > walker->page_size) return 0;
    key = page + pointer + NODE;
    if (walker->last_size) {
        size_t both = key_size < walker->last_size ? key_size : walker->last_size;
        int order = memcmp(key, walker->last, both);
        if (order < 0 || (order == 0 && key_size <= walker->last_size)) return 0;
    }
    memcpy(walker->last, key, key_size);
    walker->last_size = key_size;
    range.length = (int64_t)length;
    if (flags == 0 && length <= walker->page_size - start) {
        range.offset = (int64_t)(number * walker->page_size + start);
        return add(walker, key, key_size, page + start, range) ? NODE + key_size + length : 0;
    }
    if (flags != BIG_DATA || walker->page_size - start < 8) return 0;
    first = u64(page + start);
    if (first >= walker->pages || !read_at(walker, first * walker->page_size, header, HEADER))
        return 0;
    pages = u32(header + 12);
    if (u64(header) != first || u16(header + 10) != OVERFLOW ||
        HEADER + (uint64_t)length > pages * walker->page_size || !use(walker, first, pages))
        return 0;
    range.offset = (int64_t)(first * walker->page_size + HEADER);
    return add(walker, key, key_size, NULL, range) ? NODE + key_size + 8 : 0;
}

static int walk(walker *walker, uint64_t number, int depth) {
    uint8_t *page = walker->levels + (size_t)depth * walker->page_size;
    uint32_t lower, flags;
    size_t space;

    if (depth == DEEPEST || !use(walker, number, 1) ||
        !read_at(walker, number * walker->page_size, page, walker->page_size))
        return 0;
    flags = u16(page + 10);
    lower = u16(page + 12);
    if (u64(page) != number || lower < HEADER + 2 || lower > walker->page_size) return 0;
    space = walker->page_size - lower;
    for (uint32_t at = HEADER; at + 1 < lower; at += 2) {
        uint32_t pointer = u16(page + at);
        if (flags == LEAF) {
            size_t size = add_node(walker, page, number, pointer);
            if (size == 0 || size > space) return 0;
            space -= size;
        } else if (flags == BRANCH) {
            if (pointer + NODE > walker->page_size || u16(page + pointer + 6) > LONGEST_KEY) return 0;
            if (!walk(walker, u32(page + pointer) | (uint64_t)u16(page + pointer + 4) << 32, depth + 1))
                return 0;
        } else {
            return 0;
        }
    }
    return 1;
}

/* Read one of the two meta pages: transaction, last page and root. */
static int read_meta(const walker *walker, int number, uint64_t fields[3]) {
    uint8_t page[HEADER + 24 + 2 * 48 + 16];
    const uint8_t *database = page + HEADER + 24 + 48;
    if (!read_at(walker, (uint64_t)number * walker->page_size, page, sizeof page)) return 0;
    if (u32(page + HEADER) != 0xBEEFC0DE || u32(page + HEADER + 4) != 1 || u16(database + 4)) return 0;
    fields[0] = u64(database + 56);
    fields[1] = u64(database + 48);
    fields[2] = u64(database + 40);
    return 1;
}

static enum sk_code walk_all(walker *walker) {
    uint64_t one[3], other[3], *newest = one;
    uint8_t size[4];

    /* LMDB keeps the page size in a spare word of the first database's description. */
    if (!read_at(walker, HEADER + 24, size, 4)) return SK_READ;
    walker->page_size = u32(size);
    if (walker->page_size < 512 || walker->page_size > 65536 ||
        walker->page_size & (walker->page_size - 1))
        return SK_UNSUPPORTED;
    if (!read_meta(walker, 0, one) || !read_meta(walker, 1, other)) return SK_UNSUPPORTED;
    if (one[0] == other[0]) return SK_UNSUPPORTED;
    if (other[0] > one[0]) newest = other;
    if (newest[1] >= (uint64_t)walker->size / walker->page_size) return SK_READ;
    walker->pages = newest[1] + 1;
    walker->used = calloc(walker->pages, 1);
    walker->levels = malloc((size_t)DEEPEST * walker->page_size);
    if (walker->used == NULL || walker->levels == NULL) return SK_MEMORY;
    if (newest[2] == NO_PAGE || !walk(walker, newest[2], 0)) return SK_UNSUPPORTED;
    walker->table->meta = walker->meta;
    return SK_DONE;
}

enum sk_code sk_walk_lmdb(int file, int64_t size, sk_table *table) {
    walker walker;
    enum sk_code code;
    memset(&walker, 0, sizeof walker);
    walker.file = file;
    walker.size = size;
    walker.table = table;
    code = walk_all(&walker);
    free(walker.used);
    free(walker.levels);
    return code;
}
