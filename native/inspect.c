/* Inspect encoded images; the same rules as plain_png in shardkit/codecs/structure.py. */
#include "convert.h"

#include <string.h>

/* As MAX_PIXELS in shardkit/codecs/image.py. */
#define MOST_PIXELS ((uint64_t)2 * 89478485)

#define SIGNATURE 8
#define MOST_PLAIN ((uint64_t)1 << 24) /* bytes of the file, and of its pixels */
#define MOST_TEXT 4096

static uint32_t big(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | (uint32_t)at[3];
}

/* Whether a chunk before the pixels affects neither them nor the orientation. */
static int is_plain(const uint8_t *kind, const uint8_t *content, size_t size) {
    static const struct {
        char kind[5];
        uint8_t size;
    } plain[] = {{"gAMA", 4}, {"sRGB", 1}, {"pHYs", 9}, {"cHRM", 32}, {"tIME", 7}};
    if (memcmp(kind, "tEXt", 4) == 0)
        return size <= MOST_TEXT && (size < 17 || memcmp(content, "Raw profile type ", 17));
    for (size_t n = 0; n < sizeof plain / sizeof *plain; n++)
        if (memcmp(kind, plain[n].kind, 4) == 0) return size == plain[n].size;
    return 0;
}

static enum sk_code inspect_png(const uint8_t *data, size_t length, sk_image *image) {
    static const uint8_t channels[] = {1, 0, 3, 0, 2, 0, 4}; /* by color type */
    size_t at = SIGNATURE, end = 0;
    uint64_t width, height;
    int pieces = 0;

    if (length < 33 || length > MOST_PLAIN || memcmp(data + 8, "\0\0\0\x0dIHDR", 8))
        return SK_UNSUPPORTED;
    width = big(data + 16);
    height = big(data + 20);
    if (data[24] != 8 || data[25] > 6 || !channels[data[25]] || data[26] || data[27] || data[28])
        return SK_UNSUPPORTED;
    image->channels = channels[data[25]];
    /* A side of 2^31 or more does not fit into the product; the limit is far below it. */
    if (width > MOST_PLAIN || height > MOST_PLAIN || width * height == 0 ||
        width * height > MOST_PIXELS || width * height * image->channels > MOST_PLAIN)
        return SK_UNSUPPORTED;
    image->width = (uint32_t)width;
    image->height = (uint32_t)height;
    image->kind = SK_PNG;
    while (length - at >= 12) {
        const uint8_t *kind = data + at + 4, *content = data + at + 8;
        size_t size = big(data + at);
        if (memcmp(kind, "IEND", 4) == 0) return pieces ? SK_DONE : SK_UNSUPPORTED;
        if (size > length - at - 12) return SK_UNSUPPORTED;
        if (memcmp(kind, "IDAT", 4) == 0 && size) {
            if (!pieces++) {
                image->packed = (uint32_t)(at + 8);
                image->packed_size = (uint32_t)size;
            } else {
                image->packed = image->packed_size = 0;
            }
        } else if (pieces || !(at == SIGNATURE || is_plain(kind, content, size))) {
            return SK_UNSUPPORTED;
        }
        if (sk_crc32(0, kind, size + 4) != big(content + size)) return SK_CHECKSUM;
        end = at + 12 + size;
        if (end < at) return SK_UNSUPPORTED;
        at = end;
    }
    return SK_UNSUPPORTED;
}

enum sk_code sk_inspect(const uint8_t *data, size_t length, int decode, sk_image *image,
                        const int16_t *waves, sk_measures *measures) {
    memset(image, 0, sizeof *image);
    if (length >= SIGNATURE && memcmp(data, "\x89PNG\r\n\x1a\n", SIGNATURE) == 0)
        return inspect_png(data, length, image);
    if (length >= 3 && memcmp(data, "\xff\xd8\xff", 3) == 0)
        return sk_inspect_jpeg(data, length, decode, image, waves, measures);
    return SK_UNSUPPORTED;
}
