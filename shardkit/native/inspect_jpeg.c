/* Inspect a JPEG with libjpeg-turbo: its size, and whether its data decode without a warning.
 *
 * All that can be wrong with the data of a JPEG shows while the Huffman codes are read: what
 * follows (inverse DCT, upsampling, colors) accepts any value. So skipping its lines proves as much
 * as decoding them, in half the time. An image with a warning is left to Python, which judges it. */
#define _GNU_SOURCE
#include "convert.h"
#include "jpeg_guard.h"

#include <string.h>

#define SOF0 0xC0
#define SOF1 0xC1


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
        const uint8_t *match = memchr(data, mark[0], (size_t)(end - data) - size + 1);
        if (match == NULL) return 0;
        if (memcmp(match, mark, size) == 0) return 1;
        data = match + 1;
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

/* Sides that a reduced image has at least: SIDE in shardkit/codecs/measures.py. */
#define SIDE 32

/* The scale at which an image has sides of `least`, as sufficient_eighths in
 * shardkit/codecs/reduced.py. */
static unsigned eighths_of(uint64_t width, uint64_t height, uint64_t least) {
    if (2 * least > width + 1) return 8;
    for (unsigned eighths = 1; eighths < 5; eighths++)
        if ((width * eighths + 7) / 8 >= least && (height * eighths + 7) / 8 >= least)
            return eighths;
    return 8;
}

struct job {
    struct jpeg_decompress_struct image;
    sk_jpeg_failure failure;
    const uint8_t *data;
    size_t length;
    unsigned least; /* 0: the lines are skipped; or the sides of `pixels` are at least that */
    int gray;       /* whether they are only the luma */
    uint32_t width, height;
    uint32_t quantizers;
    int components;
    sk_memory pixels;
};

static enum sk_code decode_all(struct job *job) {
    struct jpeg_decompress_struct *image = &job->image;
    size_t stride;
    uint8_t *to;

    /* simplejpeg reduces tiny images in its own way, as in batch.c. */
    if (image->image_width < 8 || image->image_height < 8) return SK_UNSUPPORTED;
    image->scale_num = eighths_of(image->image_width, image->image_height, job->least);
    image->scale_denom = 8;
    jpeg_start_decompress(image);
    job->width = image->output_width;
    job->height = image->output_height;
    stride = (job->gray ? 1 : 3) * (size_t)job->width;
    to = sk_reserve(&job->pixels, stride * job->height);
    if (to == NULL || image->output_components != (job->gray ? 1 : 3)) return SK_MEMORY;
    while (image->output_scanline < job->height) {
        JSAMPROW lines[4];
        JDIMENSION wanted = job->height - image->output_scanline, decoded;
        for (int n = 0; n < 4; n++) lines[n] = to + (size_t)n * stride;
        decoded = jpeg_read_scanlines(image, lines, wanted < 4 ? wanted : 4);
        if (decoded == 0) return SK_DECODER;
        to += decoded * stride;
    }
    jpeg_finish_decompress(image);
    return SK_DONE;
}

static enum sk_code decode(struct job *job) {
    struct jpeg_decompress_struct *image = &job->image;
    JDIMENSION above;
    JSAMPROW line;

    image->out_color_space = job->gray ? JCS_GRAYSCALE : JCS_RGB;
    if (job->least) return decode_all(job);
    jpeg_start_decompress(image);
    line = sk_reserve(&job->pixels, 3 * (size_t)image->output_width);
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
    const JQUANT_TBL *luma;

    if (setjmp(job->failure.escape)) return job->failure.code;
    jpeg_create_decompress(image);
    image->mem->max_memory_to_use = (long)SK_MOST_MEMORY;
    jpeg_mem_src(image, (unsigned char *)job->data, job->length);
    if (wanted) jpeg_save_markers(image, JPEG_APP0 + 2, 0xFFFF);
    sk_jpeg_read_header(image);
    if (wanted) sk_jpeg_check_profile(image); /* TurboJPEG warns of a damaged one, too */
    if (image->progressive_mode || image->arith_code || image->data_precision != 8 ||
        (image->jpeg_color_space != JCS_YCbCr && image->jpeg_color_space != JCS_GRAYSCALE) ||
        !is_usual(image) || (uint64_t)image->image_width * image->image_height > SK_MOST_PIXELS)
        return SK_UNSUPPORTED;
    out->width = image->image_width;
    out->height = image->image_height;
    luma = image->quant_tbl_ptrs[0];
    job->quantizers = 0;
    for (int n = 0; luma != NULL && n < DCTSIZE2; n++) job->quantizers += luma->quantval[n];
    job->components = image->num_components;
    if (wanted) {
        enum sk_code code = decode(job);
        if (code != SK_DONE) return code;
        out->whole = 1;
    }
    return SK_DONE;
}

static enum sk_code run(struct job *job, int decode, sk_image *image) {
    enum sk_code code;
    memset(&job->image, 0, sizeof job->image); /* a used one keeps tables of other images */
    job->image.err = sk_jpeg_guard(&job->failure);
    code = guarded(job, decode, image);
    jpeg_destroy_decompress(&job->image);
    return code;
}

/* Measure the image that a job has decoded; decode it again if its sharpness needs more pixels. */
static enum sk_code measure(struct job *job, sk_image *image, const int16_t *waves, sk_measures *out) {
    sk_memory work = {NULL, 0};
    unsigned eighths = eighths_of(image->width, image->height, SIDE);
    sk_span span = {image->width * eighths, image->height * eighths};
    enum sk_code code = sk_measure(job->pixels.data, job->width, job->height, span, waves, &work, out);
    if (code == SK_DONE &&
        sk_may_be_blurred(job->length, image->width, image->height, job->quantizers) &&
        eighths < eighths_of(image->width, image->height, SK_SHARP_SIDE)) {
        job->least = SK_SHARP_SIDE;
        job->gray = 1;
        code = run(job, 1, image);
        if (code == SK_DONE)
            code = sk_sharpness(job->pixels.data, job->width, job->height, &out->sharpness);
    }
    sk_release(&work);
    out->quantizers = job->quantizers;
    out->components = (uint8_t)job->components;
    out->content = sk_crc32(0, job->data, job->length);
    out->done = code == SK_DONE;
    return code;
}

/* Whether Pillow would find a color profile: in a segment before the frame's. */
static int has_profile(const uint8_t *data, size_t header) {
    static const char name[] = "ICC_PROFILE";
    for (size_t at = 2; at < header && data[at + 1] != SOF0 && data[at + 1] != SOF1;) {
        size_t size = (size_t)data[at + 2] << 8 | data[at + 3];
        if (data[at + 1] == JPEG_APP0 + 2 && size >= 2 + sizeof name &&
            memcmp(data + at + 4, name, sizeof name) == 0)
            return 1;
        at += 2 + size;
    }
    return 0;
}

enum sk_code sk_inspect_jpeg(const uint8_t *data, size_t length, int decode, sk_image *image,
                             const int16_t *waves, sk_measures *measures) {
    struct job job = {.data = data, .length = length, .least = waves == NULL ? 0 : SIDE};
    size_t header = header_of(data, length);
    int plain = header && !speaks(data, header);
    enum sk_code code;

    if (header == 0 || !(plain || decode)) return SK_UNSUPPORTED;
    image->kind = SK_JPG;
    code = run(&job, decode, image);
    if (code == SK_DONE && decode && waves != NULL) {
        measure(&job, image, waves, measures);
        measures->plain = (uint8_t)plain;
        measures->icc = (uint8_t)has_profile(data, header);
    }
    sk_release(&job.pixels);
    return code == SK_DONE && !plain ? SK_UNSUPPORTED : code;
}

enum sk_code sk_measure_jpeg(const uint8_t *data, size_t length, uint32_t width, uint32_t height,
                             const int16_t *waves, sk_measures *out) {
    struct job job = {.data = data, .length = length, .least = SIDE};
    size_t header = header_of(data, length);
    sk_image image = {0};
    enum sk_code code = header ? run(&job, 1, &image) : SK_UNSUPPORTED;

    if (code == SK_DONE && (image.width != width || image.height != height)) code = SK_SIZE;
    if (code == SK_DONE) {
        code = measure(&job, &image, waves, out);
        out->plain = (uint8_t)!speaks(data, header);
        out->icc = (uint8_t)has_profile(data, header);
    }
    sk_release(&job.pixels);
    return code;
}
