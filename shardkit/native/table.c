/* The table of a shard: the key of each row, and where its fields are. */
#include "convert.h"

#include <stdlib.h>
#include <string.h>

/* Return an array with space for `count` more values of `size` bytes, or NULL. */
static void *grown(void *array, size_t used, size_t count, size_t *room, size_t size) {
    size_t wanted = *room ? *room : 1024;
    void *larger;
    if (used + count <= *room) return array;
    while (wanted < used + count) wanted *= 2;
    if (wanted > SIZE_MAX / size) return NULL;
    larger = realloc(array, wanted * size);
    if (larger != NULL) *room = wanted;
    return larger;
}

int sk_add_row(sk_table *table, const uint8_t *key, size_t length) {
    size_t room = table->room;
    void *larger;
    larger = grown(table->keys, table->keys_size, length, &table->keys_room, 1);
    if (larger == NULL) return 0;
    table->keys = larger;
    larger = grown(table->ends, table->rows, 1, &room, sizeof *table->ends);
    if (larger == NULL) return 0;
    table->ends = larger;
    larger = grown(table->ranges, table->rows, 1, &table->room, SK_NAMES * sizeof *table->ranges);
    if (larger == NULL) return 0;
    table->ranges = larger;
    memcpy(table->keys + table->keys_size, key, length);
    table->keys_size += length;
    for (int n = 0; n < SK_NAMES; n++) table->ranges[table->rows * SK_NAMES + n].offset = -1;
    for (int n = 0; n < SK_NAMES; n++) table->ranges[table->rows * SK_NAMES + n].length = 0;
    table->ends[table->rows++] = (int64_t)table->keys_size;
    return 1;
}

int sk_add_field(sk_table *table, const uint8_t *name, size_t length, sk_range range) {
    sk_range *last = table->ranges + (table->rows - 1) * SK_NAMES;
    int n;
    if (length >= SK_NAME || length == 0 || memchr(name, 0, length) != NULL) return 0;
    for (n = 0; n < table->names; n++)
        if (memcmp(table->name[n], name, length) == 0 && table->name[n][length] == 0) break;
    if (n == SK_NAMES) return 0;
    if (n == table->names) {
        memset(table->name[n], 0, SK_NAME);
        memcpy(table->name[n], name, length);
        table->names++;
    }
    if (last[n].offset >= 0) return 0;
    last[n] = range;
    return 1;
}

int sk_add_raw(sk_table *table, int file, sk_range range) {
    uint8_t header[SK_RAW_HEADER];
    if (range.length < SK_RAW_HEADER || !sk_read_range(file, range.offset, header, sizeof header))
        return 0;
    if (!table->has_raw)
        memcpy(table->raw_header, header, sizeof header);
    else if (memcmp(table->raw_header, header, sizeof header))
        return 0;
    table->has_raw = 1;
    return sk_add_field(table, (const uint8_t *)"raw.npy", 7, range);
}

void sk_free_table(sk_table *table) {
    free(table->ranges);
    free(table->keys);
    free(table->ends);
    memset(table, 0, sizeof *table);
}
