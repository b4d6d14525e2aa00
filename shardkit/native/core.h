/* The parts of shardkit._native that know nothing of Python, so that sanitizers and fuzzers can run
 * them alone. No function keeps state: all memory is the caller's, or freed before it returns. */
#ifndef SHARDKIT_CORE_H
#define SHARDKIT_CORE_H

#include <stddef.h>
#include <stdint.h>

/* What became of one image. All but SK_DONE leave it to the Python implementation, which decides
 * what is wrong, if anything. */
enum sk_code {
    SK_DONE = 0,
    SK_UNSUPPORTED, /* a kind of image or piece that this code does not handle */
    SK_READ,        /* the file ends, or the device fails */
    SK_CHECKSUM,
    SK_SIZE,    /* the image has another size than the index states */
    SK_DECODER, /* libjpeg reported an error or a warning, or libdeflate an error */
    SK_MEMORY,
};

/* Pixels of an image, as MAX_PIXELS in shardkit/codecs/limits.py. */
#define SK_MOST_PIXELS ((uint64_t)2 * 89478485)

/* A rectangle in pixels. */
typedef struct {
    int32_t left, top, width, height;
} sk_region;

/* batch.c: whether a region is inside an image, and not empty. */
int sk_is_inside(sk_region region, int64_t width, int64_t height);

/* Memory that grows and is reused by the images of one batch. */
typedef struct {
    uint8_t *data;
    size_t size;
} sk_memory;

/* At most this much for one image; larger ones are left to Python. */
#define SK_MOST_MEMORY ((size_t)256 << 20)

/* Return at least `size` bytes, or NULL. Its former content is lost. */
uint8_t *sk_reserve(sk_memory *memory, size_t size);
void sk_release(sk_memory *memory);

/* files.c: read all of a range; returns whether it was read. */
int sk_read_range(int file, int64_t offset, uint8_t *to, size_t length);

/* copy.c: copy from mapped files, without a signal in this process if a page is missing. */
#if defined(__linux__) && defined(__x86_64__)
#define SK_COPIES_MAPPED 1
#else
#define SK_COPIES_MAPPED 0 /* not implemented */
#endif

typedef struct {
    const uint8_t *from;
    uint8_t *to;
    size_t length, stride; /* of each line; those of the copy have no gaps */
    int32_t lines;
    size_t number; /* of the image */
} sk_copy;

/* Copy pieces, and set the code of each image to SK_DONE, or SK_READ if a page of it or of an earlier
 * one is missing, or one of an earlier one was not in the page cache. Returns 0 if no copy could be
 * started. */
int sk_copy_mapped(const sk_copy *copies, size_t count, uint8_t *codes);

/* cpu.c: instructions that can be used; none before sk_cpu_prepare. */
typedef struct {
    int pclmul, avx2, vpclmulqdq, avx512f;
} sk_features;
extern sk_features sk_cpu;
void sk_cpu_prepare(void);

/* checksum.c: CRC-32 as zlib computes it. sk_crc32_prepare must run once before. */
void sk_crc32_prepare(void);
uint32_t sk_crc32(uint32_t crc, const uint8_t *data, size_t length);

/* Return the remainder of a value after `count` more bytes of zeros. A range of bytes contributes
 * sk_crc32_shifted(~sk_crc32(~0, data, length), following) to the CRC-32 of all, by XOR. */
uint32_t sk_crc32_shifted(uint32_t value, uint64_t count);

/* jpeg.c: decode a region of a baseline JPEG to RGB.
 *
 * data, length: the encoded image, of any content
 * width, height: the size that its header must state
 * eighths: the scale, 1 to 8
 * region: inside the scaled image
 * line: working memory
 * out: 3 * region.width * region.height bytes
 */
enum sk_code sk_decode_jpeg(const uint8_t *data, size_t length, uint32_t width, uint32_t height,
                            int eighths, sk_region region, sk_memory *line, uint8_t *out);
const char *sk_jpeg_version(void);

/* planes.c: convert a region of a record of planes (Y4M) to RGB.
 *
 * data, length: the record, of any content
 * width, height: the size that its header must state
 * region: inside the image
 * work: working memory
 * out: 3 * region.width * region.height bytes
 */
enum sk_code sk_finish_planes(const uint8_t *data, size_t length, uint32_t width, uint32_t height,
                              sk_region region, sk_memory *work, uint8_t *out);

/* Bytes of an image. */
typedef struct {
    size_t begin, end;
} sk_extent;

#define SK_MOST_RANGES 4
/* Bytes of a record from which on it takes less time to read and check the rest in parts. */
#define SK_LEAST_SKIPPED ((size_t)32 << 10)

/* Find the ranges of a record that a region and its checksum need: whole bands of rows.
 *
 * length, width, height, region: as above
 * ranges: at least SK_MOST_RANGES
 * Returns their number. */
size_t sk_planes_ranges(size_t length, uint32_t width, uint32_t height, sk_region region,
                        sk_extent *ranges);

/* Return whether the ranges of a record match its checksum.
 *
 * record: its bytes, which need to be there in the ranges only
 * crc: the checksum of what it covers before the record */
int sk_check_planes(const uint8_t *record, size_t length, uint32_t width, uint32_t height,
                    sk_region region, const sk_extent *ranges, size_t count, uint32_t crc,
                    uint32_t checksum);

#ifdef SK_LIBDEFLATE
#define SK_DECODES_PNG 1
#else
#define SK_DECODES_PNG 0
#endif

/* png.c: decode a region of a PNG to RGB, over a color if it is transparent.
 *
 * data, length, width, height, region, out: as for sk_decode_jpeg
 * ground: the color
 * work: working memory
 */
enum sk_code sk_decode_png(const uint8_t *data, size_t length, uint32_t width, uint32_t height,
                           sk_region region, const uint8_t ground[3], sk_memory *work,
                           uint8_t *out);
const char *sk_deflate_version(void); /* "" without libdeflate */

/* resize.c: scale as Pillow does, to the bit. */
enum sk_filter { SK_BILINEAR = 0, SK_BICUBIC, SK_LANCZOS, SK_BOX, SK_FILTERS };

/* Scale a box of an image to width x height pixels, and store a region of the result.
 *
 * pixels: RGB, of source_width x source_height
 * source_stride: bytes from one row to the next
 * box: left, top, right and bottom, inside the image
 * tall_first: whether to scale down first where the height shrinks by more than twice as many pixels
 *     as the width: Pillow does so from version 13 on
 * region: inside the result
 * flip: whether the region is flipped horizontally
 * work: working memory
 * out: 3 * region.width * region.height bytes
 */
enum sk_code sk_resize(const uint8_t *pixels, size_t source_stride, int32_t source_width,
                       int32_t source_height, const double box[4], int32_t width, int32_t height,
                       enum sk_filter filter, int tall_first, sk_region region, int flip,
                       sk_memory *work, uint8_t *out);
void sk_flip(uint8_t *pixels, int32_t width, int32_t height);

/* batch.c: read, check, decode, crop and scale the images of a batch; or read and check arrays. */
#define SK_ENTRY 32 /* bytes of an entry of the index, see shardkit/dataset/index.py */

/* The piece of an image that becomes a sample, as in shardkit/torch/data/ops.py. */
typedef struct {
    sk_region region; /* of the image, or of the image scaled to `whole` */
    int32_t flip;
    int32_t whole_height, whole_width; /* 0: the image is not scaled as a whole */
} sk_piece;

/* A file that is mapped; 0 bytes if it is not. */
typedef struct {
    const uint8_t *data;
    size_t size;
} sk_map;

typedef struct {
    size_t count;
    const uint8_t *entries; /* SK_ENTRY bytes each, not aligned */
    const int32_t *files;   /* descriptors */
    const sk_map *maps;     /* NULL, or the map of each image's file */
    const sk_piece *pieces; /* NULL: whole images */
    const int64_t *rows;    /* NULL, or values for `mark` */
    volatile int64_t *mark; /* NULL, or receives the row that is being read */
    int32_t height, width;  /* of each sample, if they are images */
    size_t values;          /* bytes of each sample, if they are arrays; 0 for images */
    int verify_encoded, verify_raw; /* whether to compare checksums */
    uint8_t ground[3]; /* color under transparent pixels */
    enum sk_filter filter;
    int tall_first; /* see sk_resize */
    double oversample; /* see shardkit/torch/data/ops.py */
    uint8_t *out;      /* 3 * height * width bytes for each image, or `values` for each array */
    uint8_t *codes;    /* sk_code for each image */
} sk_batch;

/* Bytes of a batch from which on a helper that copies from maps takes less time than it saves. */
#define SK_LEAST_MAPPED ((size_t)2 << 20)

/* Fill one batch, or several views of the same images, which are read and decoded once: those differ in
 * `pieces`, size, `filter`, `oversample`, `out` and `codes` only.
 * Returns how many images were copied from maps. */
size_t sk_fill(const sk_batch *views, size_t count);

/* Read and check stored bytes, those of image n to `to[n]`, which has room for sk_length_of its entry. */
void sk_read_stored(const sk_batch *batch, uint8_t *const *to);
uint32_t sk_length_of(const uint8_t *entry);

/* draws.c: the crops of RandomResizedCrop in shardkit/torch/data/crops.py. */
typedef struct {
    double scale[2], ratio[2], log_ratio[2], flip;
} sk_random_crop;

/* Draw the piece of each image.
 *
 * key: of the random numbers
 * samples: numbers of the samples
 * widths, heights: sizes of the images
 * Returns 0 if a size is not from 1 to INT32_MAX. */
int sk_draw_crops(const sk_random_crop *crop, uint64_t key, size_t count, const uint64_t *samples,
                  const int64_t *widths, const int64_t *heights, sk_piece *pieces);

/* RGB images with margins, one below the other: shardkit/torch/engine/resident_rows.py. */
typedef struct {
    const uint8_t *pixels;
    size_t count;
    int32_t line, lines; /* pixels from one line to the next, and lines from one image to the next */
    int32_t lefts, tops; /* number of positions of a crop */
} sk_margined;

/* Copy the crop of each image that RandomCrop draws.
 *
 * positions: of the images
 * key, samples: as above
 * Returns 0 if a position is not that of an image. */
int sk_copy_crops(const sk_margined *images, double flip, uint64_t key, size_t count,
                  const int64_t *positions, const uint64_t *samples, int32_t width, int32_t height,
                  uint8_t *out);

/* Compare the check of each entry: 1 in `wrong` if it or the kind of the image is damaged. */
void sk_check_entries(const uint8_t *entries, size_t count, int kinds, uint8_t *wrong);

typedef struct {
    uint32_t longest;       /* bytes of the longest image */
    uint64_t most_pixels;   /* pixels of the largest */
    uint32_t width, height; /* of all images, or 0 if they differ */
} sk_survey;

/* Compare entries with what they may state, and sum them up.
 *
 * sizes: bytes of the file of each
 * kinds: number of kinds of images, from 0 on; planes are one, too
 * width, height: of raw pixels
 * most_pixels: that an image may have
 * survey: the sum
 * Returns 0 if an entry is damaged, impossible, or has no place in its file: Python decides then. */
int sk_survey_entries(const uint8_t *entries, size_t count, const int64_t *sizes, int kinds,
                      uint32_t width, uint32_t height, uint64_t most_pixels, sk_survey *survey);

#endif
