/* What all uses of libjpeg share: its errors leave by longjmp, and its warnings count as errors. */
#ifndef SHARDKIT_JPEG_GUARD_H
#define SHARDKIT_JPEG_GUARD_H

#include "core.h"

#include <setjmp.h>
#include <stdio.h>

#include <jpeglib.h>

#define SK_JPEG_SOS 0xDA

typedef struct {
    struct jpeg_error_mgr manager;
    jmp_buf escape;
    enum sk_code code;
} sk_jpeg_failure;

/* Return what lets errors and warnings of an image set the failure's code and jump to its escape. */
struct jpeg_error_mgr *sk_jpeg_guard(sk_jpeg_failure *failure);

/* Read the header. An image of too many scans fails with SK_UNSUPPORTED: Python names their number. */
void sk_jpeg_read_header(struct jpeg_decompress_struct *image);

/* Read the color profile: libjpeg warns of a damaged one. */
void sk_jpeg_check_profile(struct jpeg_decompress_struct *image);

/* Return the sampling of a gray or color image, its luma's factors as two hexadecimal digits, or 0
 * if it is one of another kind. */
int sk_jpeg_sampling(const struct jpeg_decompress_struct *image);

#endif
