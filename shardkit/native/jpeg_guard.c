/* libjpeg's errors and warnings, and checks of a header: see jpeg_guard.h. */
#include "jpeg_guard.h"

#include <stdlib.h>
#include <string.h>

#include <jerror.h>

#define MOST_SCANS 500

static void on_error(j_common_ptr common) {
    sk_jpeg_failure *failure = (sk_jpeg_failure *)common->err;
    failure->code = failure->manager.msg_code == JERR_OUT_OF_MEMORY ? SK_MEMORY : SK_DECODER;
    longjmp(failure->escape, 1);
}

/* A warning, below 0, may mean lost data: Python decides. Traces say nothing about damage. */
static void on_message(j_common_ptr common, int level) {
    if (level < 0) on_error(common);
}

static void on_output(j_common_ptr common) { (void)common; }

struct jpeg_error_mgr *sk_jpeg_guard(sk_jpeg_failure *failure) {
    jpeg_std_error(&failure->manager);
    failure->manager.error_exit = on_error;
    failure->manager.emit_message = on_message;
    failure->manager.output_message = on_output;
    failure->code = SK_DECODER;
    return &failure->manager;
}

/* Whether more scans follow than MAX_SCANS in shardkit/codecs/structure.py allows. In the data of a
 * scan, 0xFF precedes only 0 or a marker. */
static int has_many_scans(const uint8_t *at, size_t length) {
    const uint8_t *end = at + length;
    int scans = 1;
    while (scans <= MOST_SCANS && (at = memchr(at, 0xFF, (size_t)(end - at))) != NULL)
        if (++at < end && *at == SK_JPEG_SOS) scans++;
    return scans > MOST_SCANS;
}

void sk_jpeg_read_header(struct jpeg_decompress_struct *image) {
    sk_jpeg_failure *failure = (sk_jpeg_failure *)image->err;
    jpeg_read_header(image, TRUE);
    if (jpeg_has_multiple_scans(image) &&
        has_many_scans(image->src->next_input_byte, image->src->bytes_in_buffer)) {
        failure->code = SK_UNSUPPORTED;
        longjmp(failure->escape, 1);
    }
}

void sk_jpeg_check_profile(struct jpeg_decompress_struct *image) {
    JOCTET *profile;
    unsigned length;
    if (jpeg_read_icc_profile(image, &profile, &length)) free(profile);
}

int sk_jpeg_sampling(const struct jpeg_decompress_struct *image) {
    const jpeg_component_info *luma = image->comp_info;
    int sampling = luma->h_samp_factor << 4 | luma->v_samp_factor;
    if (image->num_components == 1) return sampling == 0x11 ? sampling : 0;
    if (image->num_components != 3) return 0;
    for (int n = 1; n < 3; n++)
        if (image->comp_info[n].h_samp_factor != 1 || image->comp_info[n].v_samp_factor != 1)
            return 0;
    return sampling;
}
