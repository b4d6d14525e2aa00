/* Decode a region of a JPEG with libjpeg-turbo. The pixels equal those of decoding all of it. */
#include "jpeg_guard.h"

#include <string.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or newer is needed"
#endif

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

/* Columns decoded beyond each side of a region: smooth upsampling reads neighboring columns. */
#define CONTEXT 2

#define EOI 0xD9

/* Whether the sampling is one of TurboJPEG's, whose regions are known to be exact. */
static int is_usual(const struct jpeg_decompress_struct *image) {
    switch (sk_jpeg_sampling(image)) {
    case 0x11: case 0x21: case 0x22: case 0x12: case 0x41: case 0x14: return 1;
    default: return 0;
    }
}

/* Whether a scan ends with the image, so that decoding all of it gives warnings at worst. */
static int ends_after_scan(const uint8_t *at, size_t length) {
    const uint8_t *end = at + length;
    while ((at = memchr(at, 0xFF, (size_t)(end - at))) != NULL) {
        while (at < end && *at == 0xFF) at++;
        if (at == end) return 0;
        if (*at != 0 && (*at < 0xD0 || *at > 0xD7)) return *at == EOI; /* no stuffing, no restart */
    }
    return 0;
}

static enum sk_code check(const struct jpeg_decompress_struct *image, uint32_t width,
                          uint32_t height) {
    if (image->image_width != width || image->image_height != height) return SK_SIZE;
    /* Missing scans of a progressive image are smoothed differently in a region. */
    if (image->progressive_mode || image->arith_code || image->data_precision != 8)
        return SK_UNSUPPORTED;
    if (image->jpeg_color_space != JCS_YCbCr && image->jpeg_color_space != JCS_GRAYSCALE &&
        image->jpeg_color_space != JCS_RGB)
        return SK_UNSUPPORTED;
    return is_usual(image) ? SK_DONE : SK_UNSUPPORTED;
}

/* Decode the rows of a region; libjpeg's errors leave it by longjmp. */
static enum sk_code decode_rows(struct jpeg_decompress_struct *image, sk_region region,
                                sk_memory *line, uint8_t *out) {
    const uint8_t *scan = image->src->next_input_byte;
    size_t rest = image->src->bytes_in_buffer;
    JDIMENSION begin = 0, across, last = (JDIMENSION)(region.top + region.height);
    size_t wide = 3 * (size_t)region.width, stride;
    JSAMPROW lines[4];
    int direct;

    jpeg_start_decompress(image);
    across = image->output_width;
    if (image->output_components != 3 || region.left < 0 || region.top < 0 || region.width < 1 ||
        region.height < 1 || (uint32_t)region.width > across ||
        (uint32_t)region.left > across - (uint32_t)region.width ||
        (uint32_t)region.height > image->output_height ||
        (uint32_t)region.top > image->output_height - (uint32_t)region.height)
        return SK_SIZE;
    /* Whether a file is damaged must not depend on the region: Python decodes all of this image. */
    if (last < image->output_height && !ends_after_scan(scan, rest)) return SK_UNSUPPORTED;
    if ((uint32_t)region.width < across) {
        uint32_t left = (uint32_t)region.left, right = left + (uint32_t)region.width;
        begin = left > CONTEXT ? left - CONTEXT : 0;
        across = (across - right > CONTEXT ? right + CONTEXT : across) - begin;
        jpeg_crop_scanline(image, &begin, &across); /* rounds the left edge down to a block */
        if (begin > left || across < right - begin) return SK_DECODER;
    }
    stride = 3 * (size_t)image->output_width;
    direct = begin == (JDIMENSION)region.left && stride == wide;
    if (!direct && sk_reserve(line, 4 * stride) == NULL) return SK_MEMORY;
    if (region.top && jpeg_skip_scanlines(image, (JDIMENSION)region.top) != (JDIMENSION)region.top)
        return SK_DECODER;
    while (image->output_scanline < last) {
        JDIMENSION wanted = last - image->output_scanline, decoded;
        if (wanted > 4) wanted = 4;
        for (JDIMENSION n = 0; n < wanted; n++)
            lines[n] = direct ? out + n * wide : line->data + n * stride;
        decoded = jpeg_read_scanlines(image, lines, wanted);
        if (decoded == 0) return SK_DECODER;
        if (!direct)
            for (JDIMENSION n = 0; n < decoded; n++)
                memcpy(out + n * wide, lines[n] + 3 * ((JDIMENSION)region.left - begin), wide);
        out += decoded * wide;
    }
    /* Read to the end of the file, where it is near: what is missing there is a warning. */
    if (last == image->output_height) jpeg_finish_decompress(image);
    return SK_DONE;
}

struct job {
    struct jpeg_decompress_struct image; /* a new one: a used one keeps tables of other images */
    sk_jpeg_failure failure;
    const uint8_t *data;
    size_t length;
    uint32_t width, height;
    int eighths;
    sk_region region;
};

/* setjmp stands apart from the variables that a longjmp would leave undefined. */
static enum sk_code decode_guarded(struct job *job, sk_memory *line, uint8_t *out) {
    struct jpeg_decompress_struct *image = &job->image;
    enum sk_code code;

    if (setjmp(job->failure.escape)) return job->failure.code;
    jpeg_create_decompress(image);
    image->mem->max_memory_to_use = (long)SK_MOST_MEMORY;
    jpeg_mem_src(image, (unsigned char *)job->data, job->length);
    sk_jpeg_read_header(image);
    code = check(image, job->width, job->height);
    if (code != SK_DONE) return code;
    image->out_color_space = JCS_RGB;
    image->dct_method = JDCT_ISLOW;
    image->do_fancy_upsampling = TRUE;
    image->scale_num = (unsigned)job->eighths;
    image->scale_denom = 8;
    return decode_rows(image, job->region, line, out);
}

enum sk_code sk_decode_jpeg(const uint8_t *data, size_t length, uint32_t width, uint32_t height,
                            int eighths, sk_region region, sk_memory *line, uint8_t *out) {
    struct job job;
    enum sk_code code;

    memset(&job.image, 0, sizeof job.image);
    job.image.err = sk_jpeg_guard(&job.failure);
    job.data = data;
    job.length = length;
    job.width = width;
    job.height = height;
    job.eighths = eighths;
    job.region = region;
    code = decode_guarded(&job, line, out);
    jpeg_destroy_decompress(&job.image);
    return code;
}

const char *sk_jpeg_version(void) { return TEXT(LIBJPEG_TURBO_VERSION); }
