/* Decode all of a JPEG of any coding, and report libjpeg's first warning or error. */
#include "convert.h"
#include "jpeg_guard.h"

#include <string.h>

_Static_assert(SK_JPEG_MESSAGE >= JMSG_LENGTH_MAX, "a message of libjpeg fits");

struct job {
    struct jpeg_decompress_struct image; /* a new one: a used one keeps tables of other images */
    sk_jpeg_failure failure;
    sk_whole_jpeg *whole;
};

static const J_COLOR_SPACE spaces[] = {[1] = JCS_GRAYSCALE, [3] = JCS_RGB, [4] = JCS_CMYK};

static enum sk_code decode(struct jpeg_decompress_struct *image, const sk_whole_jpeg *whole) {
    size_t stride = (size_t)whole->channels * whole->width;
    uint8_t *to = whole->out;

    sk_jpeg_check_profile(image); /* TurboJPEG warns of a damaged one, too */
    image->out_color_space = spaces[whole->channels];
    image->dct_method = JDCT_ISLOW;
    image->do_fancy_upsampling = TRUE;
    image->scale_num = (unsigned)whole->eighths;
    image->scale_denom = 8;
    jpeg_start_decompress(image);
    if (image->output_width != whole->width || image->output_height != whole->height ||
        image->output_components != whole->channels)
        return SK_SIZE;
    while (image->output_scanline < whole->height) {
        JSAMPROW lines[4];
        JDIMENSION wanted = whole->height - image->output_scanline, decoded;
        if (wanted > 4) wanted = 4;
        for (JDIMENSION n = 0; n < wanted; n++) lines[n] = to + n * stride;
        decoded = jpeg_read_scanlines(image, lines, wanted);
        if (decoded == 0) return SK_DECODER;
        to += decoded * stride;
    }
    jpeg_finish_decompress(image);
    return SK_DONE;
}

/* setjmp stands apart from the variables that a longjmp would leave undefined. */
static enum sk_code guarded(struct job *job) {
    struct jpeg_decompress_struct *image = &job->image;
    sk_whole_jpeg *whole = job->whole;

    if (setjmp(job->failure.escape)) {
        image->err->format_message((j_common_ptr)image, whole->message);
        return job->failure.code;
    }
    jpeg_create_decompress(image);
    jpeg_mem_src(image, (unsigned char *)whole->data, whole->length);
    if (whole->out != NULL) jpeg_save_markers(image, JPEG_APP0 + 2, 0xFFFF);
    jpeg_read_header(image, TRUE);
    if (image->data_precision != 8) return SK_UNSUPPORTED;
    if (whole->out != NULL) return decode(image, whole);
    whole->width = image->image_width;
    whole->height = image->image_height;
    whole->channels = image->num_components;
    return SK_DONE;
}

enum sk_code sk_read_whole_jpeg(sk_whole_jpeg *whole) {
    struct job job = {.whole = whole};
    enum sk_code code;

    strcpy(whole->message, "libjpeg does not decode it");
    job.image.err = sk_jpeg_guard(&job.failure);
    code = guarded(&job);
    jpeg_destroy_decompress(&job.image);
    return code;
}
