/* Inspect encoded images; the same rules as in shardkit/codecs/structure.py. */
#include "convert.h"
#include "png.h"

#include <string.h>

#define SIGNATURE 8

/* Measure a PNG from its rows; colors of other kinds are left to Python. */
static void measure_png(const uint8_t *data, size_t length, const sk_png *png, const uint8_t *rows,
                        const int16_t *waves, sk_measures *out) {
    if (png->depth != 8 || png->has_palette || png->transparent || png->is_interlaced ||
        png->profile)
        return;
    sk_measure_png(rows, png->width, png->height, png->channels, waves, out);
    out->content = sk_crc32(0, data, length);
}

static enum sk_code inspect_png(const uint8_t *data, size_t length, int decode, sk_image *image,
                                const int16_t *waves, sk_measures *measures) {
    sk_png png;
    enum sk_code code = sk_read_png(data, length, &png);

    if (code != SK_DONE) return code;
    image->width = png.width;
    image->height = png.height;
    image->kind = SK_PNG;
    image->channels = png.channels;
    if (png.pieces == 1 && png.depth == 8 && !png.has_palette && !png.is_interlaced) {
        image->packed = (uint32_t)png.packed;
        image->packed_size = (uint32_t)png.packed_size;
    }
    if (decode) {
        sk_memory rows = {NULL, 0};
        image->whole = sk_unpack_png(data, &png, &rows) == SK_DONE;
        if (image->whole && png.plain && waves != NULL)
            measure_png(data, length, &png, rows.data, waves, measures);
        sk_release(&rows);
    }
    return png.plain && (image->whole || !png.profile) ? SK_DONE : SK_UNSUPPORTED;
}

enum sk_code sk_inspect(const uint8_t *data, size_t length, int decode, sk_image *image,
                        const int16_t *waves, sk_measures *measures) {
    memset(image, 0, sizeof *image);
    if (length >= SIGNATURE && memcmp(data, "\x89PNG\r\n\x1a\n", SIGNATURE) == 0)
        return inspect_png(data, length, decode, image, waves, measures);
    if (length >= 3 && memcmp(data, "\xff\xd8\xff", 3) == 0)
        return sk_inspect_jpeg(data, length, decode, image, waves, measures);
    return SK_UNSUPPORTED;
}
