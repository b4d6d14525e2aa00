/* The parts of shardkit._native that convert and verify: files, images, tables of shards, indexes.
 * Like core.h, nothing here knows of Python, and every function leaves what it does not handle. */
#ifndef SHARDKIT_CONVERT_H
#define SHARDKIT_CONVERT_H

#include "core.h"

/* Positions in STORED_KINDS of shardkit/record.py. */
enum sk_kind { SK_JPG = 0, SK_PNG = 1, SK_RAW = 7, SK_ABSENT = 10 };

/* files.c: read what follows `head` in a file that starts with it, and that has still the size and time
 * of modification of the scan. */
#define SK_MOST_HEAD 4096
enum sk_code sk_read_file(const char *path, int64_t size, int64_t stamp, const uint8_t *head,
                          size_t head_size, uint8_t *data);
/* Read the first bytes of a regular file that has so many, its size, and its time of modification. */
enum sk_code sk_read_head(const char *path, size_t length, uint8_t *head, int64_t *size,
                          int64_t *stamp);

/* inspect.c: what the header of an image states. */
typedef struct {
    uint32_t width, height;
    uint8_t kind;
    uint8_t whole;       /* whether decoding certainly succeeds, without a warning */
    uint16_t channels;   /* of a PNG, whose packed pixels are one range: */
    uint32_t packed, packed_size; /* offset and size; 0 if they are several ranges */
} sk_image;

/* measure.c: measures of an image, MEASURES in shardkit/codecs/measures.py. */
#define SK_VIEWS 7
#define SK_TURNS 6
#define SK_SHARP_SIDE 256
#define SK_WAVES (5 * 8 * 32) /* values of WAVES in shardkit/codecs/measures.py */

typedef struct {
    uint64_t hashes[SK_VIEWS];
    uint64_t turned[SK_TURNS];
    float mean[3], std[3], brightness, contrast, sharpness;
    uint32_t pixels, content; /* CRC-32 of the pixels, and of the encoded image */
    uint32_t quantizers;      /* of a JPEG: the sum of its luma table */
    uint8_t components, icc, plain; /* `plain`: its header states nothing else */
    uint8_t highlight;
    uint32_t done; /* whether it was measured */
} sk_measures;

/* Width and height of a picture in 1/8 pixel: the last column of a reduced JPEG may stand for less than
 * a pixel. */
typedef struct {
    uint32_t across, down;
} sk_span;

/* Measure RGB pixels of width x height, without gaps. */
enum sk_code sk_measure(const uint8_t *pixels, uint32_t width, uint32_t height, sk_span span,
                        const int16_t *waves, sk_memory *work, sk_measures *out);
/* Measure the sharpness of a gray image. */
enum sk_code sk_sharpness(const uint8_t *gray, uint32_t width, uint32_t height, float *sharpness);
/* Measure a PNG from its unpacked rows, of 1 (gray) or 3 channels of 8 bits. */
enum sk_code sk_measure_png(const uint8_t *rows, uint32_t width, uint32_t height, uint32_t channels,
                            const int16_t *waves, sk_measures *out);
/* Whether a JPEG has so few bits that its sharpness must be measured at full size. */
int sk_may_be_blurred(size_t length, uint32_t width, uint32_t height, uint32_t quantizers);

/* Measure a JPEG, decoded at as few eighths of its size as leave SIDE pixels, if its header is intact,
 * it decodes without a warning and has that width and height. */
enum sk_code sk_measure_jpeg(const uint8_t *data, size_t length, uint32_t width, uint32_t height,
                             const int16_t *waves, sk_measures *out);

/* Inspect an encoded image that has no information beyond its size: no EXIF, no further frames. Of
 * one that has, finds out only if it decodes, and returns SK_UNSUPPORTED.
 *
 * decode: whether to find out if it decodes; a JPEG with a warning is left to Python
 * waves: NULL, or to measure an image on the way
 */
enum sk_code sk_inspect(const uint8_t *data, size_t length, int decode, sk_image *image,
                        const int16_t *waves, sk_measures *measures);
/* inspect_jpeg.c: the same for a JPEG. */
enum sk_code sk_inspect_jpeg(const uint8_t *data, size_t length, int decode, sk_image *image,
                             const int16_t *waves, sk_measures *measures);

/* planes_jpeg.c: the planes of a JPEG, of any coding that libjpeg decodes without a warning. */
typedef struct {
    uint32_t width, height;
    int sampling;  /* 420, 422, 444, or 400 for gray */
    uint8_t *data; /* the planes, end to end; the caller frees it, whatever the code */
    size_t size;
} sk_jpeg_planes;

enum sk_code sk_jpeg_planes_of(const uint8_t *data, size_t length, sk_jpeg_planes *out);

/* whole_jpeg.c: all of a JPEG, of any coding that libjpeg decodes without a warning. */
#define SK_JPEG_MESSAGE 256

typedef struct {
    const uint8_t *data;
    size_t length;
    uint8_t *out;           /* height x width x channels bytes; NULL to read the header only */
    uint32_t width, height; /* of `out`; or, from the header, of the image */
    int channels;           /* the same: 1 (gray), 3 (RGB) or 4 (CMYK) */
    int eighths;            /* scale */
    char message[SK_JPEG_MESSAGE]; /* unless it is done, libjpeg's first warning or error */
} sk_whole_jpeg;

enum sk_code sk_read_whole_jpeg(sk_whole_jpeg *whole);

/* scale_jpeg.c: scale a JPEG, of any coding that libjpeg decodes to RGB without a warning. */
typedef struct {
    const uint8_t *data;
    size_t length;
    uint32_t width, height; /* that its header must state */
    int eighths;            /* scale at which it is decoded */
    double box[4];          /* the part of the decoded image to scale */
    int32_t to_width, to_height;
    enum sk_filter filter;
    int tall_first; /* see sk_resize; what is scaled down first is left to Python */
    uint8_t *out;   /* 3 * to_width * to_height bytes */
} sk_scaled_jpeg;

enum sk_code sk_scale_jpeg(sk_scaled_jpeg *scaled);

/* Encode gray or RGB pixels as Pillow does; return the size, or 0 if `room` bytes do not suffice. */
size_t sk_encode_jpeg(const uint8_t *pixels, uint32_t width, uint32_t height, int channels,
                      int quality, uint8_t *out, size_t room);

/* table.c: where the fields of each row of a shard are. */
#define SK_NAMES 8       /* at most so many fields; shards with more are left to Python */
#define SK_NAME 40       /* bytes of a field's stored name, with its end */
#define SK_RAW_HEADER 128 /* bytes of the .npy header of raw pixels */

typedef struct {
    int64_t offset, length; /* offset -1: the row lacks the field */
} sk_range;

typedef struct {
    size_t rows, room;
    int names;
    char name[SK_NAMES][SK_NAME];
    sk_range *ranges; /* SK_NAMES for each row */
    uint8_t *keys;    /* all keys, end to end */
    size_t keys_size, keys_room;
    int64_t *ends; /* of each key in `keys` */
    sk_range meta; /* the shard's metadata */
    int has_raw;
    uint8_t raw_header[SK_RAW_HEADER]; /* of all raw pixels */
} sk_table;

/* Start a row with its key; returns whether there is memory. */
int sk_add_row(sk_table *table, const uint8_t *key, size_t length);
/* Add a field to the last row; returns 0 if it has it already, or there are too many names. */
int sk_add_field(sk_table *table, const uint8_t *name, size_t length, sk_range range);
/* Add raw pixels, which are stored with a header; returns 0 if their header is another one. */
int sk_add_raw(sk_table *table, int file, sk_range range);
void sk_free_table(sk_table *table);

/* tar.c: walk the members from `start` to `stop`, or to the end of the archive if `stop` is -1.
 * Only headers that shardkit itself writes are handled. */
enum sk_code sk_walk_tar(int file, int64_t size, int64_t start, int64_t stop, sk_table *table);

/* lmdb.c: walk the pages of a finished file. */
enum sk_code sk_walk_lmdb(int file, int64_t size, sk_table *table);

/* index.c: read records, and return their checksums and their rows of the index: of the only field
 * with a position in STORED_KINDS, or of an absent one. The metadata are needed if a column is;
 * otherwise, the rows have the sizes already. */
typedef struct {
    int file;
    size_t count;
    int columns;               /* at most SK_NAMES, sorted by name */
    const char *const *names;  /* of the columns */
    const int8_t *kinds;       /* of each column: a position in STORED_KINDS, or */
    const int64_t *offsets;    /* columns for each row; -1: the row lacks the field */
    const int64_t *lengths;
    const int64_t *labels;     /* NULL, or the value of the column SK_LABEL, which has no ranges */
    const uint8_t *keys;
    const int64_t *ends;       /* of each key; the first one starts at `keys_start` */
    int64_t keys_start;
    const uint8_t *known;      /* a piece of the file that was read already: */
    int64_t known_start, known_size; /* where it is in the file */
    uint8_t *rows;             /* SK_ENTRY bytes for each row */
    uint32_t *checksums;       /* NULL, or of each record, as _checksum in shardkit/record.py */
    sk_range *paths;           /* in the text of the paths, of rows that are done */
    uint8_t *text;             /* allocated by sk_index; the caller frees it */
    size_t text_size;
    uint8_t *codes;            /* sk_code of each row */
} sk_records;

enum { SK_OTHER = -1, SK_LABEL = -2, SK_META = -3 };

void sk_index(sk_records *records);

#endif
