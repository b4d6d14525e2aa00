/* Decode a JPEG and scale it, a strip of rows at a time, which stays in the cache; and encode one. */
#include "convert.h"
#include "jpeg_guard.h"
#include "resize.h"

#include <string.h>

/* Rows of a strip: as many as libjpeg decodes together. */
#define STRIP 16

typedef struct {
    struct jpeg_decompress_struct image;
    sk_jpeg_failure failure;
    sk_scaled_jpeg *scaled;
    sk_memory strip, work;
} scaling_job;

/* Whether a progressive image has all its scans; libjpeg smooths others, each version in its way. */
static int is_complete(const struct jpeg_decompress_struct *image) {
    for (int n = 0; image->progressive_mode && n < image->num_components; n++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (image->coef_bits[n][k] != 0) return 0;
    return 1;
}

/* Scale all rows; libjpeg's errors leave it by longjmp. */
static enum sk_code scale_rows(scaling_job *job, sk_scaler *scaler) {
    struct jpeg_decompress_struct *image = &job->image;
    size_t stride = 3 * (size_t)image->output_width;
    uint8_t *strip = sk_reserve(&job->strip, STRIP * stride);
    JSAMPROW lines[STRIP];

    if (strip == NULL) return SK_MEMORY;
    for (size_t n = 0; n < STRIP; n++) lines[n] = strip + n * stride;
    while (image->output_scanline < image->output_height) {
        JDIMENSION top = image->output_scanline, count = 0, left = image->output_height - top;
        if (left > STRIP) left = STRIP;
        while (count < left) {
            JDIMENSION decoded = jpeg_read_scanlines(image, lines + count, left - count);
            if (decoded == 0) return SK_DECODER;
            count += decoded;
        }
        sk_scaler_add(scaler, strip, stride, (int32_t)top, (int32_t)count, 0);
    }
    jpeg_finish_decompress(image);
    sk_scaler_end(scaler, job->scaled->out);
    return SK_DONE;
}

/* setjmp stands apart from the variables that a longjmp would leave undefined. */
static enum sk_code scale_guarded(scaling_job *job, sk_scaler *scaler) {
    struct jpeg_decompress_struct *image = &job->image;
    sk_scaled_jpeg *scaled = job->scaled;
    enum sk_code code;

    if (setjmp(job->failure.escape)) return job->failure.code;
    jpeg_create_decompress(image);
    image->mem->max_memory_to_use = (long)SK_MOST_MEMORY;
    jpeg_mem_src(image, (unsigned char *)scaled->data, scaled->length);
    jpeg_save_markers(image, JPEG_APP0 + 2, 0xFFFF);
    sk_jpeg_read_header(image);
    sk_jpeg_check_profile(image); /* TurboJPEG warns of a damaged one, too */
    if (image->image_width != scaled->width || image->image_height != scaled->height) return SK_SIZE;
    if (image->data_precision != 8 || image->num_components > 3 ||
        (uint64_t)scaled->width * scaled->height > SK_MOST_PIXELS)
        return SK_UNSUPPORTED;
    image->out_color_space = JCS_RGB;
    image->dct_method = JDCT_ISLOW;
    image->do_fancy_upsampling = TRUE;
    image->scale_num = (unsigned)scaled->eighths;
    image->scale_denom = 8;
    jpeg_start_decompress(image);
    if (image->output_components != 3 || !is_complete(image)) return SK_UNSUPPORTED;
    scaler->source_width = (int32_t)image->output_width;
    scaler->source_height = (int32_t)image->output_height;
    code = sk_scaler_begin(scaler, scaled->box, scaled->to_width, scaled->to_height,
                           scaled->filter, &job->work);
    if (code != SK_DONE) return code;
    return scaler->tall_first ? SK_UNSUPPORTED : scale_rows(job, scaler);
}

enum sk_code sk_scale_jpeg(sk_scaled_jpeg *scaled) {
    scaling_job job = {.scaled = scaled};
    sk_scaler scaler = {.tall_first = scaled->tall_first,
                        .region = {0, 0, scaled->to_width, scaled->to_height}};
    enum sk_code code;

    job.image.err = sk_jpeg_guard(&job.failure);
    code = scale_guarded(&job, &scaler);
    jpeg_destroy_decompress(&job.image);
    sk_release(&job.strip);
    sk_release(&job.work);
    return code;
}

typedef struct {
    struct jpeg_compress_struct image;
    struct jpeg_destination_mgr target;
    sk_jpeg_failure failure;
    const uint8_t *pixels;
    uint32_t width, height;
    int channels, quality;
} encoding_job;

static void on_start(j_compress_ptr image) { (void)image; }

/* The memory does not suffice. */
static boolean on_full(j_compress_ptr image) {
    longjmp(((sk_jpeg_failure *)image->err)->escape, 1);
}

static enum sk_code encode_guarded(encoding_job *job) {
    struct jpeg_compress_struct *image = &job->image;
    size_t stride = (size_t)job->channels * job->width;

    if (setjmp(job->failure.escape)) return job->failure.code;
    jpeg_create_compress(image);
    image->dest = &job->target;
    image->image_width = job->width;
    image->image_height = job->height;
    image->input_components = job->channels;
    image->in_color_space = job->channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
    jpeg_set_defaults(image); /* as Pillow: 4:2:0, baseline, the usual Huffman tables */
    jpeg_set_quality(image, job->quality, TRUE);
    jpeg_start_compress(image, TRUE);
    while (image->next_scanline < image->image_height) {
        JSAMPROW line = (JSAMPROW)(job->pixels + image->next_scanline * stride);
        jpeg_write_scanlines(image, &line, 1);
    }
    jpeg_finish_compress(image);
    return SK_DONE;
}

size_t sk_encode_jpeg(const uint8_t *pixels, uint32_t width, uint32_t height, int channels,
                      int quality, uint8_t *out, size_t room) {
    encoding_job job = {.pixels = pixels,
                        .width = width,
                        .height = height,
                        .channels = channels,
                        .quality = quality};
    enum sk_code code;

    job.target.init_destination = job.target.term_destination = on_start;
    job.target.empty_output_buffer = on_full;
    job.target.next_output_byte = out;
    job.target.free_in_buffer = room;
    job.image.err = sk_jpeg_guard(&job.failure);
    code = encode_guarded(&job);
    jpeg_destroy_compress(&job.image);
    return code == SK_DONE ? room - job.target.free_in_buffer : 0;
}
