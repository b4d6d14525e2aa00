/* The planes of a JPEG: what libjpeg decodes before it upsamples chroma and converts to RGB. */
#include "convert.h"
#include "jpeg_guard.h"

#include <stdlib.h>
#include <string.h>

#define MOST_ROWS (MAX_SAMP_FACTOR * DCTSIZE)

/* Whether a component has a size of `factors`, its horizontal and vertical sampling. */
static int has_factors(const jpeg_component_info *component, int horizontal, int vertical) {
    return component->h_samp_factor == horizontal && component->v_samp_factor == vertical;
}

/* Return the sampling: 400, 420, 422 or 444, or 0 for others. TurboJPEG accepts the same ones. */
static int sampling_of(const struct jpeg_decompress_struct *image) {
    const jpeg_component_info *luma = image->comp_info, *chroma = luma + 1;
    int horizontal = luma->h_samp_factor, vertical = luma->v_samp_factor;
    if (image->jpeg_color_space == JCS_GRAYSCALE && image->num_components == 1) return 400;
    if (image->jpeg_color_space != JCS_YCbCr || image->num_components != 3) return 0;
    if (!has_factors(chroma + 1, chroma->h_samp_factor, chroma->v_samp_factor)) return 0;
    if (has_factors(chroma, horizontal, vertical)) return horizontal * vertical <= 3 ? 444 : 0;
    if (horizontal != 2 || vertical > 2 || chroma->h_samp_factor != 1) return 0;
    if (chroma->v_samp_factor == vertical) return 422;
    return vertical == 2 ? 420 : 0;
}

struct job {
    struct jpeg_decompress_struct image; /* a new one: a used one keeps tables of other images */
    sk_jpeg_failure failure;
    sk_memory rows;
    const uint8_t *data;
    size_t length;
    sk_jpeg_planes *out;
};

/* Read all planes; libjpeg's errors leave it by longjmp. */
static enum sk_code read_planes(struct job *job) {
    struct jpeg_decompress_struct *image = &job->image;
    JSAMPROW rows[3][MOST_ROWS];
    JSAMPARRAY components[3] = {rows[0], rows[1], rows[2]};
    uint8_t *to[3] = {job->out->data};
    size_t strides[3] = {0}, total = 0;
    int lines = image->max_v_samp_factor * DCTSIZE;

    for (int n = 0; n < image->num_components; n++) {
        const jpeg_component_info *component = image->comp_info + n;
        strides[n] = (size_t)component->width_in_blocks * DCTSIZE;
        total += strides[n] * (size_t)component->v_samp_factor * DCTSIZE;
        if (n) to[n] = to[n - 1] + (size_t)component[-1].downsampled_width *
                                       component[-1].downsampled_height;
    }
    if (sk_reserve(&job->rows, total) == NULL) return SK_MEMORY;
    total = 0;
    for (int n = 0; n < image->num_components; n++)
        for (int y = 0; y < image->comp_info[n].v_samp_factor * DCTSIZE; y++, total += strides[n])
            rows[n][y] = job->rows.data + total;
    while (image->output_scanline < image->output_height) {
        JDIMENSION top = image->output_scanline / (JDIMENSION)lines;
        if (jpeg_read_raw_data(image, components, (JDIMENSION)lines) == 0) return SK_DECODER;
        for (int n = 0; n < image->num_components; n++) {
            const jpeg_component_info *component = image->comp_info + n;
            JDIMENSION high = (JDIMENSION)component->v_samp_factor * DCTSIZE;
            JDIMENSION left = component->downsampled_height - top * high;
            for (JDIMENSION y = 0; y < high && y < left; y++, to[n] += component->downsampled_width)
                memcpy(to[n], rows[n][y], component->downsampled_width);
        }
    }
    jpeg_finish_decompress(image);
    return SK_DONE;
}

/* setjmp stands apart from the variables that a longjmp would leave undefined. */
static enum sk_code guarded(struct job *job) {
    struct jpeg_decompress_struct *image = &job->image;
    sk_jpeg_planes *out = job->out;

    if (setjmp(job->failure.escape)) return job->failure.code;
    jpeg_create_decompress(image);
    /* Python allows SK_MOST_MEMORY of coefficients (planes._MOST_COEFFICIENTS); the rest is small. */
    image->mem->max_memory_to_use = (long)(SK_MOST_MEMORY + SK_MOST_MEMORY / 8);
    jpeg_mem_src(image, (unsigned char *)job->data, job->length);
    sk_jpeg_read_header(image);
    out->width = image->image_width;
    out->height = image->image_height;
    out->sampling = sampling_of(image);
    if (image->data_precision != 8 || out->sampling == 0 ||
        (uint64_t)out->width * out->height > SK_MOST_PIXELS)
        return SK_UNSUPPORTED;
    image->out_color_space = image->jpeg_color_space;
    image->dct_method = JDCT_ISLOW;
    image->raw_data_out = TRUE;
    jpeg_start_decompress(image);
    for (int n = 0; n < image->num_components; n++)
        out->size += (size_t)image->comp_info[n].downsampled_width *
                     image->comp_info[n].downsampled_height;
    if ((out->data = malloc(out->size)) == NULL) return SK_MEMORY;
    return read_planes(job);
}

enum sk_code sk_jpeg_planes_of(const uint8_t *data, size_t length, sk_jpeg_planes *out) {
    struct job job = {.data = data, .length = length, .out = out};
    enum sk_code code;
    memset(out, 0, sizeof *out);
    job.image.err = sk_jpeg_guard(&job.failure);
    code = guarded(&job);
    jpeg_destroy_decompress(&job.image);
    sk_release(&job.rows);
    return code;
}
