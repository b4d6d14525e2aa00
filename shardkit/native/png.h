/* What a PNG file states before its pixels. */
#ifndef SHARDKIT_PNG_H
#define SHARDKIT_PNG_H

#include "core.h"

typedef struct {
    uint32_t width, height;
    uint8_t depth, channels;
    uint8_t has_palette, is_interlaced;
    uint8_t keeps_16;    /* set by the caller: as values, all samples of 16 bits stay */
    uint8_t plain;       /* whether no chunk may hold an orientation */
    uint8_t transparent; /* whether some pixels may be, by a chunk or a channel */
    uint8_t key[3];      /* the transparent color, unless there are a palette or an alpha channel */
    uint32_t colors;     /* of the palette: red, green, blue, alpha */
    uint8_t palette[256][4];
    size_t packed, packed_size; /* offset of the packed rows, and their bytes in all chunks */
    int pieces;                 /* number of these chunks */
    size_t profile, profile_size; /* offset and bytes of a packed color profile */
} sk_png;

/* Read all chunks of an ordinary PNG: intact, one frame, of colors whose conversion is known. */
enum sk_code sk_read_png(const uint8_t *data, size_t length, sk_png *png);

/* Unpack the rows of a PNG that was read, each after the byte of its filter. Returns SK_UNSUPPORTED
 * without libdeflate, and SK_DECODER unless they are exactly all rows, or if its profile is odd. */
enum sk_code sk_unpack_png(const uint8_t *data, const sk_png *png, sk_memory *rows);

/* Decode a region of a PNG that was read.
 *
 * region: inside the image
 * ground: color under transparent pixels; or NULL for values as they are stored, like decode_mask in
 *     shardkit/codecs/image.py
 * work: working memory
 * out: 3 bytes for each pixel, or sk_png_values
 */
enum sk_code sk_png_pixels(const uint8_t *data, sk_png *png, sk_region region,
                           const uint8_t *ground, sk_memory *work, uint8_t *out);

/* Bytes of a pixel's values: 2 for a gray one of 16 bits, and for each channel of one of 16 bits that
 * keeps them; otherwise 1 for each channel. */
size_t sk_png_values(const sk_png *png);

#define SK_PNG_SLACK 16 /* bytes after each row that can be read */

/* Undo a filter of a row in place.
 *
 * filter: its number; from 5 on, nothing is done
 * row: without the byte of the filter
 * above: the row before it, or NULL
 * size: bytes of the row, a multiple of `step`
 * step: bytes of a pixel: 1, 2, 3, 4, 6 or 8
 */
void sk_unfilter(uint8_t filter, uint8_t *row, const uint8_t *above, size_t size,
                 size_t step);

#endif
