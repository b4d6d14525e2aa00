/* Inspect a JPEG with libjpeg-turbo: its size, and whether its data decode without a warning.
 *
 * All that can be wrong with the data of a JPEG shows while the Huffman codes are read: what
 * follows (inverse DCT, upsampling, colors) accepts any value. So skipping its lines proves as much
 * as decoding them, in half the time. */
#define _GNU_SOURCE
#include "convert.h"
#include "jpeg_guard.h"

#include <string.h>

#define MOST_PIXELS ((uint64_t)2 * 89478485)

/* Return the size of the header up to the first scan, or 0 if bytes between its segments, or
 * anything but segments, would need a closer look. */
static size_t header_of(const uint8_t *data, size_t length) {
    size_t at = 2;
    while (at + 4 <= length) {
        uint8_t marker = data[at + 1];
        size_t size = (size_t)data[at + 2] << 8 | data[at + 3];
        if (data[at] != 0xFF || marker < 0xC0 || (marker >= 0xD0 && marker <= 0xD9) || marker == 0xFF)
            return 0;
        if (size < 2 || size > length - at - 2) return 0;
        at += 2 + size;
        if (marker == SK_JPEG_SOS) return at;
    }
    return 0;
}

static int contains(const uint8_t *data, size_t length, const char *mark, size_t size) {
    const uint8_t *end = data + length;
    while ((size_t)(end - data) >= size) {
        const uint8_t *found = memchr(data, mark[0], (size_t)(end - data) - size + 1);
        if (found == NULL) return 0;
        if (memcmp(found, mark, size) == 0) return 1;
        data = found + 1;
    }
    return 0;
}

/* Whether a header may contain more than the size: EXIF, XMP, further images. */
static int speaks(const uint8_t *data, size_t length) {
    return contains(data, length, "Exif\0", 5) || contains(data, length, "rientation", 10) ||
           contains(data, length, "MPF\0", 4);
}

/* Whether the sampling is one that every decoder knows. */
static int is_usual(const struct jpeg_decompress_struct *image) {
    switch (sk_jpeg_sampling(image)) {
    case 0x11: case 0x21: case 0x22: case 0x12: return 1;
    default: return 0;
    }
}

struct job {
    struct jpeg_decompress_struct image;
    sk_jpeg_failure failure;
    const uint8_t *data;
    size_t length;
    sk_memory line;
};

static enum sk_code decode(struct job *job) {
    struct jpeg_decompress_struct *image = &job->image;
    JDIMENSION above;
    JSAMPROW line;

    image->out_color_space = JCS_RGB;
    jpeg_start_decompress(image);
    line = sk_reserve(&job->line, 3 * (size_t)image->output_width);
    if (line == NULL || image->output_components != 3) return SK_MEMORY;
    above = image->output_height - 1;
    /* Skipping the last line would skip the rest of the file, too. */
    if (above && jpeg_skip_scanlines(image, above) != above) return SK_DECODER;
    if (jpeg_read_scanlines(image, &line, 1) != 1) return SK_DECODER;
    jpeg_finish_decompress(image);
    return SK_DONE;
}

/* setjmp stands apart from the variables that a longjmp would leave undefined. */
static enum sk_code guarded(struct job *job, int wanted, sk_image *out) {
    struct jpeg_decompress_struct *image = &job->image;

    if (setjmp(job->failure.escape)) return job->failure.code;
    jpeg_create_decompress(image);
    image->mem->max_memory_to_use = (long)SK_MOST_MEMORY;
    jpeg_mem_src(image, (unsigned char *)job->data, job->length);
    if (wanted) jpeg_save_markers(image, JPEG_APP0 + 2, 0xFFFF);
    jpeg_read_header(image, TRUE);
    if (wanted) sk_jpeg_check_profile(image); /* TurboJPEG warns of a damaged one, too */
    if (image->progressive_mode || image->arith_code || image->data_precision != 8 ||
        (image->jpeg_color_space != JCS_YCbCr && image->jpeg_color_space != JCS_GRAYSCALE) ||
        !is_usual(image) || (uint64_t)image->image_width * image->image_height > MOST_PIXELS)
        return SK_UNSUPPORTED;
    out->width = image->image_width;
    out->height = image->image_height;
    if (wanted) {
        enum sk_code code = decode(job);
        if (code != SK_DONE) return code;
        out->whole = 1;
    }
    return SK_DONE;
}

enum sk_code sk_inspect_jpeg(const uint8_t *data, size_t length, int decode, sk_image *image) {
    struct job job;
    enum sk_code code;
    size_t header = header_of(data, length);

    if (header == 0 || speaks(data, header)) return SK_UNSUPPORTED;
    memset(&job, 0, sizeof job);
    sk_jpeg_guard(&job.image, &job.failure);
    job.data = data;
    job.length = length;
    image->kind = SK_JPG;
    code = guarded(&job, decode, image);
    jpeg_destroy_decompress(&job.image);
    sk_release(&job.line);
    return code;
}
