/* The functions of shardkit._native that convert and verify: from Python's objects to convert.h. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert.h"
#include "module.h"

#define MOST_READ ((int64_t)64 << 20) /* larger files are left to Python, which looks before */
#define MOST_FIELDS 32
#define BLOCK 512

static PyObject *as_bytes(const void *data, size_t size) {
    return PyBytes_FromStringAndSize(data, (Py_ssize_t)size);
}

static int is_aligned(const Py_buffer *buffer, size_t size) {
    return (uintptr_t)buffer->buf % size == 0;
}

/* Raise unless a buffer holds `count` values of `size` bytes. */
static int holds(const Py_buffer *buffer, const char *name, size_t count, size_t size) {
    if ((size_t)buffer->len / size == count && (size_t)buffer->len % size == 0 &&
        is_aligned(buffer, size > 8 || size == 0 ? 4 : size))
        return 1;
    PyErr_Format(PyExc_ValueError, "%s does not hold %zu values of %zu bytes", name, count, size);
    return 0;
}

static void release(Py_buffer *buffers, size_t count) {
    for (size_t n = 0; n < count; n++)
        if (buffers[n].obj != NULL) PyBuffer_Release(buffers + n);
}

/* ---- read_images ---- */

typedef struct {
    const char *path;
    uint8_t *data;
    int64_t size, stamp;
    int was_read;
} source_file;

/* What a call of read_images fills for each file. */
typedef struct {
    const uint8_t *head; /* what each file starts with, and the content lacks */
    size_t head_size;
    sk_image *images;
    uint8_t *codes;
    const int16_t *waves;  /* NULL, or */
    sk_measures *measures; /* of each JPEG that is decoded */
} inspected;

/* Read the files, and inspect them as images if `out` has space for that. */
static void read_all(source_file *files, size_t count, int decode, const inspected *out) {
    for (size_t n = 0; n < count; n++) {
        source_file *file = files + n;
        if (file->data == NULL) continue;
        out->codes[n] = (uint8_t)sk_read_file(file->path, file->size, file->stamp, out->head,
                                               out->head_size, file->data);
        file->was_read = out->codes[n] == SK_DONE;
        if (file->was_read && out->images != NULL)
            out->codes[n] = (uint8_t)sk_inspect(
                file->data, (size_t)file->size, decode, out->images + n, out->waves,
                out->waves == NULL ? NULL : out->measures + n);
    }
}

static PyObject *read_files(PyObject *paths, const int64_t *sizes, const int64_t *stamps,
                            int decode, const inspected *out) {
    Py_ssize_t count = PyTuple_Size(paths);
    PyObject *contents = PyList_New(count);
    source_file *files = calloc((size_t)count + 1, sizeof *files);
    int fine = contents != NULL && files != NULL;
    if (files == NULL) PyErr_NoMemory();
    for (Py_ssize_t n = 0; fine && n < count; n++) {
        source_file *file = files + n;
        PyObject *content;
        char *path;
        out->codes[n] = SK_UNSUPPORTED;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(paths, n), &path, NULL) < 0) {
            fine = 0;
            break;
        }
        file->path = path;
        file->size = sizes[n];
        file->stamp = stamps[n];
        if (sizes[n] > (int64_t)out->head_size && sizes[n] <= MOST_READ) {
            Py_ssize_t size = (Py_ssize_t)sizes[n] - (Py_ssize_t)out->head_size;
            if ((content = PyBytes_FromStringAndSize(NULL, size)) == NULL) {
                fine = 0;
                break;
            }
            file->data = (uint8_t *)PyBytes_AsString(content);
            PyList_SetItem(contents, n, content);
        } else {
            PyList_SetItem(contents, n, Py_NewRef(Py_None));
        }
    }
    if (fine) {
        Py_BEGIN_ALLOW_THREADS
        read_all(files, (size_t)count, decode, out);
        Py_END_ALLOW_THREADS
        for (Py_ssize_t n = 0; n < count; n++)
            if (files[n].data != NULL && !files[n].was_read)
                PyList_SetItem(contents, n, Py_NewRef(Py_None));
    }
    free(files);
    if (fine) return contents;
    Py_XDECREF(contents);
    return NULL;
}

PyDoc_STRVAR(read_images_doc,
             "read_images(paths, sizes, stamps, decode, images, codes, waves, measures)\n--\n\n"
             "Read and inspect image files; see shardkit/system/compiled.py.");

/* Return whether buffers hold waves, and space for the measures of `count` images; else raise. */
static int hold_measures(const Py_buffer *waves, const Py_buffer *measures, size_t count) {
    return holds(waves, "waves", SK_WAVES, sizeof(int16_t)) && is_aligned(measures, 8) &&
           holds(measures, "measures", count, sizeof(sk_measures));
}

static PyObject *read_images(PyObject *module, PyObject *arguments) {
    Py_buffer buffers[6] = {{0}};
    PyObject *paths, *kept = NULL, *result = NULL;
    int decode;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "Oy*y*pw*w*z*w*:read_images", &paths, &buffers[0], &buffers[1],
                          &decode, &buffers[2], &buffers[3], &buffers[4], &buffers[5]))
        return NULL;
    /* Another thread may change a list while the GIL is released. */
    if ((kept = PySequence_Tuple(paths)) != NULL) {
        size_t count = (size_t)PyTuple_Size(kept);
        if (holds(&buffers[0], "sizes", count, 8) && holds(&buffers[1], "stamps", count, 8) &&
            holds(&buffers[2], "images", count, sizeof(sk_image)) &&
            holds(&buffers[3], "codes", count, 1) &&
            (buffers[4].buf == NULL || hold_measures(&buffers[4], &buffers[5], count))) {
            inspected out = {NULL, 0, buffers[2].buf, buffers[3].buf, buffers[4].buf, buffers[5].buf};
            result = read_files(kept, buffers[0].buf, buffers[1].buf, decode, &out);
        }
        Py_DECREF(kept);
    }
    release(buffers, 6);
    return result;
}

PyDoc_STRVAR(read_files_doc, "read_files(paths, sizes, stamps, head, codes)\n--\n\n"
                             "Read files; see shardkit/system/compiled.py.");

static PyObject *read_some_files(PyObject *module, PyObject *arguments) {
    Py_buffer buffers[4] = {{0}};
    PyObject *paths, *kept, *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "Oy*y*y*w*:read_files", &paths, &buffers[0], &buffers[1],
                          &buffers[2], &buffers[3]))
        return NULL;
    if ((kept = PySequence_Tuple(paths)) != NULL) {
        size_t count = (size_t)PyTuple_Size(kept);
        inspected out = {buffers[2].buf, (size_t)buffers[2].len, NULL, buffers[3].buf, NULL, NULL};
        if (holds(&buffers[0], "sizes", count, 8) && holds(&buffers[1], "stamps", count, 8) &&
            holds(&buffers[3], "codes", count, 1))
            result = read_files(kept, buffers[0].buf, buffers[1].buf, 0, &out);
        Py_DECREF(kept);
    }
    release(buffers, 4);
    return result;
}

PyDoc_STRVAR(read_heads_doc, "read_heads(paths, length, heads, sizes, stamps)\n--\n\n"
                             "Read the first bytes of files, their sizes and times; see "
                             "shardkit/system/compiled.py.");

static PyObject *read_heads(PyObject *module, PyObject *arguments) {
    Py_buffer buffers[3] = {{0}};
    PyObject *paths, *kept, *result = NULL;
    const char **names = NULL;
    Py_ssize_t length, count;
    int fine;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "Onw*w*w*:read_heads", &paths, &length, &buffers[0],
                          &buffers[1], &buffers[2]))
        return NULL;
    kept = PySequence_Tuple(paths);
    count = kept == NULL ? 0 : PyTuple_Size(kept);
    fine = kept != NULL && length > 0 && length <= SK_MOST_HEAD &&
           holds(&buffers[0], "heads", (size_t)(count * length), 1) &&
           holds(&buffers[1], "sizes", (size_t)count, 8) &&
           holds(&buffers[2], "stamps", (size_t)count, 8);
    if (fine && (names = calloc((size_t)count + 1, sizeof *names)) == NULL) {
        PyErr_NoMemory();
        fine = 0;
    }
    for (Py_ssize_t n = 0; fine && n < count; n++) {
        char *name;
        fine = PyBytes_AsStringAndSize(PyTuple_GetItem(kept, n), &name, NULL) == 0;
        if (fine) names[n] = name;
    }
    if (fine) {
        uint8_t *heads = buffers[0].buf;
        int64_t *sizes = buffers[1].buf, *stamps = buffers[2].buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t n = 0; n < count; n++)
            if (sk_read_head(names[n], (size_t)length, heads + n * length, sizes + n, stamps + n) != SK_DONE)
                sizes[n] = -1;
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "length is out of range");
    }
    free(names);
    Py_XDECREF(kept);
    release(buffers, 3);
    return result;
}

PyDoc_STRVAR(inspect_jpeg_doc, "inspect_jpeg(data)\n--\n\n"
                               "Return width and height of an ordinary JPEG, or None.");

static PyObject *inspect_jpeg(PyObject *module, PyObject *data) {
    char *bytes;
    Py_ssize_t size;
    sk_image image = {0};
    (void)module;
    if (PyBytes_AsStringAndSize(data, &bytes, &size) < 0) return NULL;
    if (sk_inspect_jpeg((const uint8_t *)bytes, (size_t)size, 0, &image, NULL, NULL) !=
        SK_DONE)
        return Py_NewRef(Py_None);
    return Py_BuildValue("II", image.width, image.height);
}

PyDoc_STRVAR(jpeg_decodes_doc, "jpeg_decodes(data)\n--\n\n"
                               "Whether a JPEG certainly decodes without a warning.");

static PyObject *jpeg_decodes(PyObject *module, PyObject *data) {
    char *bytes;
    Py_ssize_t size;
    sk_image image = {0};
    (void)module;
    if (PyBytes_AsStringAndSize(data, &bytes, &size) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    sk_inspect_jpeg((const uint8_t *)bytes, (size_t)size, 1, &image, NULL, NULL);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(image.whole);
}

PyDoc_STRVAR(jpeg_header_doc, "jpeg_header(data)\n--\n\n"
                              "Return width, height and components of a JPEG, or libjpeg's "
                              "first warning or error.");

static PyObject *jpeg_header(PyObject *module, PyObject *arguments) {
    sk_whole_jpeg whole = {0};
    Py_buffer data;
    enum sk_code code;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*:jpeg_header", &data)) return NULL;
    whole.data = data.buf;
    whole.length = (size_t)data.len;
    Py_BEGIN_ALLOW_THREADS
    code = sk_read_whole_jpeg(&whole);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    if (code != SK_DONE) return PyUnicode_FromString(whole.message);
    return Py_BuildValue("(IIi)", whole.width, whole.height, whole.channels);
}

PyDoc_STRVAR(decode_jpeg_doc, "decode_jpeg(data, out, width, height, channels, eighths)\n--\n\n"
                              "Decode a JPEG into out; return None, or libjpeg's first warning or "
                              "error.");

static PyObject *decode_jpeg(PyObject *module, PyObject *arguments) {
    sk_whole_jpeg whole = {0};
    Py_buffer data, out;
    PyObject *result = NULL;
    enum sk_code code;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*w*IIii:decode_jpeg", &data, &out, &whole.width,
                          &whole.height, &whole.channels, &whole.eighths))
        return NULL;
    if (whole.channels != 1 && whole.channels != 3 && whole.channels != 4)
        PyErr_SetString(PyExc_ValueError, "channels are 1, 3 or 4");
    else if (whole.eighths < 1 || whole.eighths > 8)
        PyErr_SetString(PyExc_ValueError, "eighths are from 1 to 8");
    else if (whole.width == 0 || whole.height == 0 ||
             (uint64_t)whole.width * whole.height > SK_MOST_PIXELS)
        PyErr_SetString(PyExc_ValueError, "width or height is out of range");
    else if (holds(&out, "out", (size_t)whole.width * whole.height * (size_t)whole.channels, 1)) {
        whole.data = data.buf;
        whole.length = (size_t)data.len;
        whole.out = out.buf;
        Py_BEGIN_ALLOW_THREADS
        code = sk_read_whole_jpeg(&whole);
        Py_END_ALLOW_THREADS
        result = code == SK_DONE ? Py_NewRef(Py_None) : PyUnicode_FromString(whole.message);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

PyDoc_STRVAR(jpeg_planes_doc, "jpeg_planes(data)\n--\n\n"
                              "Return width, height, sampling and planes of a JPEG, or None.");

static PyObject *jpeg_planes(PyObject *module, PyObject *data) {
    char *bytes;
    Py_ssize_t size;
    sk_jpeg_planes planes;
    enum sk_code code;
    PyObject *result = NULL;
    (void)module;
    if (PyBytes_AsStringAndSize(data, &bytes, &size) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    code = sk_jpeg_planes_of((const uint8_t *)bytes, (size_t)size, &planes);
    Py_END_ALLOW_THREADS
    result = code != SK_DONE
                ? Py_NewRef(Py_None)
                : Py_BuildValue("IIiy#", planes.width, planes.height, planes.sampling,
                                (const char *)planes.data, (Py_ssize_t)planes.size);
    free(planes.data);
    return result;
}

PyDoc_STRVAR(scale_jpeg_doc,
             "scale_jpeg(data, width, height, eighths, box, out, out_width, out_height, filter, "
             "tall_first)\n--\n\nScale a JPEG; return whether it did; see shardkit/system/compiled.py.");

static PyObject *scale_jpeg(PyObject *module, PyObject *arguments) {
    sk_scaled_jpeg scaled = {0};
    Py_buffer data, out;
    enum sk_code code = SK_UNSUPPORTED;
    int filter;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*IIi(dddd)w*iiip:scale_jpeg", &data, &scaled.width,
                          &scaled.height, &scaled.eighths, &scaled.box[0], &scaled.box[1],
                          &scaled.box[2], &scaled.box[3], &out, &scaled.to_width,
                          &scaled.to_height, &filter, &scaled.tall_first))
        return NULL;
    scaled.data = data.buf;
    scaled.length = (size_t)data.len;
    scaled.filter = (enum sk_filter)filter;
    scaled.out = out.buf;
    if (filter >= 0 && filter < SK_FILTERS && scaled.eighths >= 1 && scaled.eighths <= 8 &&
        scaled.to_width > 0 && scaled.to_height > 0 &&
        (uint64_t)out.len == 3 * (uint64_t)scaled.to_width * (uint64_t)scaled.to_height) {
        Py_BEGIN_ALLOW_THREADS
        code = sk_scale_jpeg(&scaled);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return PyBool_FromLong(code == SK_DONE);
}

PyDoc_STRVAR(encode_jpeg_doc, "encode_jpeg(pixels, width, height, channels, quality)\n--\n\n"
                              "Return gray or RGB pixels as a JPEG of Pillow's, or None.");

static PyObject *encode_jpeg(PyObject *module, PyObject *arguments) {
    unsigned int width, height;
    int channels, quality;
    Py_buffer pixels;
    uint8_t *out = NULL;
    PyObject *result = NULL;
    size_t size = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*IIii:encode_jpeg", &pixels, &width, &height, &channels,
                          &quality))
        return NULL;
    if ((channels == 1 || channels == 3) && quality >= 1 && quality <= 100 && width && height &&
        (uint64_t)width * height <= SK_MOST_PIXELS) {
        size_t values = (size_t)width * height, room = 3 * values + 2048; /* enough, but for noise */
        if (holds(&pixels, "pixels", values * (size_t)channels, 1)) {
            Py_BEGIN_ALLOW_THREADS
            if ((out = malloc(room)) != NULL)
                size = sk_encode_jpeg(pixels.buf, width, height, channels, quality, out, room);
            Py_END_ALLOW_THREADS
            result = size ? as_bytes(out, size) : Py_NewRef(Py_None);
            free(out);
        }
    } else {
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&pixels);
    return result;
}

PyDoc_STRVAR(measure_doc, "measure(pixels, width, height, span, waves, measures)\n--\n\n"
                          "Measure RGB pixels; see shardkit/codecs/measures.py.");
PyDoc_STRVAR(measure_png_doc, "measure_png(rows, width, height, channels, waves, measures)\n--\n\n"
                              "Measure the unpacked rows of an ordinary PNG.");
PyDoc_STRVAR(measure_jpeg_doc,
             "measure_jpeg(data, width, height, waves, measures)\n--\n\n"
             "Measure an ordinary JPEG of that size; see shardkit/system/compiled.py.");

enum content { PIXELS, PNG_ROWS, JPEG };

/* Whether `length` bytes are those of the pixels of an image, or of its rows. */
static int has_size(uint64_t length, uint64_t width, uint64_t height, unsigned channels, int filters) {
    uint64_t row = channels * width + (filters ? 1 : 0);
    return (channels == 1 || channels == 3) && width && height && width <= INT32_MAX &&
           length / height == row && length % height == 0;
}

/* Whether an span in 1/8 pixel ends in the last one of `pixels`. */
static int ends_in(uint64_t span, uint64_t pixels) {
    return span <= 8 * pixels && span + 8 > 8 * pixels;
}

/* Measure pixels, rows or a JPEG; return whether that was possible. */
static PyObject *measure_one(PyObject *arguments, enum content kind) {
    Py_buffer buffers[3] = {{0}};
    unsigned int width, height, channels = 3;
    sk_span span = {0, 0};
    enum sk_code code = SK_UNSUPPORTED;
    int fits;
    if (!(kind == PNG_ROWS ? PyArg_ParseTuple(arguments, "y*IIIy*w*", &buffers[0], &width, &height,
                                              &channels, &buffers[1], &buffers[2])
          : kind == PIXELS ? PyArg_ParseTuple(arguments, "y*II(II)y*w*", &buffers[0], &width, &height,
                                              &span.across, &span.down, &buffers[1], &buffers[2])
                           : PyArg_ParseTuple(arguments, "y*IIy*w*", &buffers[0], &width, &height,
                                              &buffers[1], &buffers[2])))
        return NULL;
    fits = hold_measures(&buffers[1], &buffers[2], 1);
    if (fits && kind != JPEG &&
        (!has_size((uint64_t)buffers[0].len, width, height, channels, kind == PNG_ROWS) ||
         (kind == PIXELS && !(ends_in(span.across, width) && ends_in(span.down, height))))) {
        PyErr_SetString(PyExc_ValueError, "the content does not have that size");
        fits = 0;
    }
    if (fits) {
        const uint8_t *data = buffers[0].buf;
        size_t length = (size_t)buffers[0].len;
        sk_measures *out = buffers[2].buf;
        Py_BEGIN_ALLOW_THREADS
        if (kind == JPEG) {
            code = sk_measure_jpeg(data, length, width, height, buffers[1].buf, out);
        } else if (kind == PNG_ROWS) {
            code = sk_measure_png(data, width, height, channels, buffers[1].buf, out);
        } else {
            sk_memory work = {NULL, 0};
            code = sk_measure(data, width, height, span, buffers[1].buf, &work, out);
            sk_release(&work);
        }
        Py_END_ALLOW_THREADS
    }
    release(buffers, 3);
    return fits ? PyBool_FromLong(code == SK_DONE) : NULL;
}

static PyObject *measure(PyObject *module, PyObject *arguments) {
    (void)module;
    return measure_one(arguments, PIXELS);
}

static PyObject *measure_jpeg(PyObject *module, PyObject *arguments) {
    (void)module;
    return measure_one(arguments, JPEG);
}

static PyObject *measure_png(PyObject *module, PyObject *arguments) {
    (void)module;
    return measure_one(arguments, PNG_ROWS);
}

/* ---- walk_tar, walk_lmdb ---- */

/* Return (metadata's range, names, raw header, keys, ends, offsets, lengths). */
static PyObject *table_of(const sk_table *table) {
    size_t count = table->rows * (size_t)table->names;
    PyObject *names = PyList_New(table->names);
    PyObject *offsets = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * count));
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * count));
    int fine = names != NULL && offsets != NULL && lengths != NULL;
    PyObject *result = NULL;
    if (fine) {
        int64_t *to = (int64_t *)PyBytes_AsString(offsets);
        int64_t *size = (int64_t *)PyBytes_AsString(lengths);
        for (size_t row = 0; row < table->rows; row++)
            for (int n = 0; n < table->names; n++) {
                *to++ = table->ranges[row * SK_NAMES + (size_t)n].offset;
                *size++ = table->ranges[row * SK_NAMES + (size_t)n].length;
            }
        for (int n = 0; fine && n < table->names; n++) {
            PyObject *name = as_bytes(table->name[n], strlen(table->name[n]));
            fine = name != NULL;
            if (fine) PyList_SetItem(names, n, name);
        }
    }
    if (fine)
        result = Py_BuildValue(
            "LLONNOO", (long long)table->meta.offset, (long long)table->meta.length, names,
            as_bytes(table->raw_header, table->has_raw ? SK_RAW_HEADER : 0),
            as_bytes(table->keys, table->keys_size), offsets, lengths);
    if (result != NULL) {
        PyObject *ends = as_bytes(table->ends, 8 * table->rows);
        PyObject *both = ends == NULL ? NULL : Py_BuildValue("NN", result, ends);
        if (both == NULL) Py_DECREF(result);
        result = both;
    }
    Py_XDECREF(names);
    Py_XDECREF(offsets);
    Py_XDECREF(lengths);
    return result;
}

static PyObject *finish_walk(enum sk_code code, sk_table *table) {
    PyObject *result = NULL;
    if (code == SK_DONE)
        result = table_of(table);
    else if (code == SK_MEMORY)
        PyErr_NoMemory();
    else
        result = Py_NewRef(Py_None);
    sk_free_table(table);
    return result;
}

PyDoc_STRVAR(walk_tar_doc, "walk_tar(file, size, start, stop)\n--\n\n"
                           "Return the table of a tar file, or None; see shardkit/formats/table.py.");

static PyObject *walk_tar(PyObject *module, PyObject *arguments) {
    long long size, start, stop;
    sk_table table;
    enum sk_code code;
    int file;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iLLL:walk_tar", &file, &size, &start, &stop)) return NULL;
    memset(&table, 0, sizeof table);
    Py_BEGIN_ALLOW_THREADS
    code = sk_walk_tar(file, size, start, stop, &table);
    Py_END_ALLOW_THREADS
    return finish_walk(code, &table);
}

PyDoc_STRVAR(walk_lmdb_doc, "walk_lmdb(file, size)\n--\n\n"
                            "Return the table of an LMDB file, or None; see shardkit/formats/table.py.");

static PyObject *walk_lmdb(PyObject *module, PyObject *arguments) {
    long long size;
    sk_table table;
    enum sk_code code;
    int file;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iL:walk_lmdb", &file, &size)) return NULL;
    memset(&table, 0, sizeof table);
    Py_BEGIN_ALLOW_THREADS
    code = sk_walk_lmdb(file, size, &table);
    Py_END_ALLOW_THREADS
    return finish_walk(code, &table);
}

/* ---- index_records ---- */

static PyObject *paths_of(const sk_records *records, const sk_range *paths) {
    PyObject *result = PyList_New((Py_ssize_t)records->count);
    for (size_t n = 0; result != NULL && n < records->count; n++) {
        PyObject *path = records->codes[n] == SK_DONE
                             ? PyUnicode_DecodeASCII((const char *)records->text + paths[n].offset,
                                                     (Py_ssize_t)paths[n].length, NULL)
                             : PyUnicode_FromStringAndSize(NULL, 0);
        if (path == NULL)
            Py_CLEAR(result);
        else
            PyList_SetItem(result, (Py_ssize_t)n, path);
    }
    return result;
}

/* Check that the keys of a part of a table are inside their text. */
static int are_inside(const sk_records *records, size_t size) {
    int64_t before = records->keys_start;
    if (before < 0) return 0;
    for (size_t n = 0; n < records->count; n++) {
        if (records->ends[n] < before || (uint64_t)records->ends[n] > size) return 0;
        before = records->ends[n];
    }
    return 1;
}

PyDoc_STRVAR(index_records_doc,
             "index_records(file, names, kinds, offsets, lengths, labels, keys, ends, keys_start, "
             "known, known_start, rows, checksums, codes)\n--\n\n"
             "Return the path of each record, and fill its row, checksum and code; see "
             "shardkit/dataset/index_builder.py.");

static PyObject *index_records(PyObject *module, PyObject *arguments) {
    enum { KINDS, OFFSETS, LENGTHS, LABELS, KEYS, ENDS, KNOWN, ROWS, CHECKSUMS, CODES, COUNT };
    Py_buffer buffers[COUNT] = {{0}};
    const char *names[SK_NAMES];
    PyObject *given, *result = NULL;
    sk_records records;
    sk_range *paths = NULL;
    long long keys_start, known_start;
    Py_ssize_t columns;
    size_t count;
    int file;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iO!y*y*y*z*y*y*Ly*Lw*z*w*:index_records", &file, &PyTuple_Type,
                          &given, &buffers[KINDS], &buffers[OFFSETS], &buffers[LENGTHS],
                          &buffers[LABELS], &buffers[KEYS], &buffers[ENDS], &keys_start,
                          &buffers[KNOWN], &known_start, &buffers[ROWS], &buffers[CHECKSUMS],
                          &buffers[CODES]))
        return NULL;
    columns = PyTuple_Size(given);
    count = (size_t)buffers[CODES].len;
    if (columns < 1 || columns > SK_NAMES) {
        PyErr_SetString(PyExc_ValueError, "the number of names is out of range");
        goto done;
    }
    for (Py_ssize_t n = 0; n < columns; n++) {
        char *name;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(given, n), &name, NULL) < 0) goto done;
        names[n] = name;
    }
    if (!holds(&buffers[KINDS], "kinds", (size_t)columns, 1) ||
        !holds(&buffers[OFFSETS], "offsets", count * (size_t)columns, 8) ||
        !holds(&buffers[LENGTHS], "lengths", count * (size_t)columns, 8) ||
        (buffers[LABELS].buf != NULL && !holds(&buffers[LABELS], "labels", count, 8)) ||
        !holds(&buffers[ENDS], "ends", count, 8) || !holds(&buffers[ROWS], "rows", count, SK_ENTRY) ||
        (buffers[CHECKSUMS].buf != NULL && !holds(&buffers[CHECKSUMS], "checksums", count, 4)))
        goto done;
    if (buffers[CHECKSUMS].buf != NULL && buffers[CHECKSUMS].readonly) {
        PyErr_SetString(PyExc_ValueError, "checksums are read-only");
        goto done;
    }
    memset(&records, 0, sizeof records);
    records.file = file;
    records.count = count;
    records.columns = (int)columns;
    records.names = names;
    records.kinds = buffers[KINDS].buf;
    records.offsets = buffers[OFFSETS].buf;
    records.lengths = buffers[LENGTHS].buf;
    records.labels = buffers[LABELS].buf;
    records.keys = buffers[KEYS].buf;
    records.ends = buffers[ENDS].buf;
    records.keys_start = keys_start;
    records.known = buffers[KNOWN].buf;
    records.known_start = known_start;
    records.known_size = buffers[KNOWN].len;
    records.rows = buffers[ROWS].buf;
    records.checksums = buffers[CHECKSUMS].buf;
    records.codes = buffers[CODES].buf;
    if (known_start < 0) {
        PyErr_SetString(PyExc_ValueError, "known_start is negative");
        goto done;
    }
    if (!are_inside(&records, (size_t)buffers[KEYS].len)) {
        PyErr_SetString(PyExc_ValueError, "a key is outside the text of the keys");
        goto done;
    }
    if ((paths = calloc(count + 1, sizeof *paths)) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    records.paths = paths;
    Py_BEGIN_ALLOW_THREADS
    sk_index(&records);
    Py_END_ALLOW_THREADS
    result = paths_of(&records, paths);
    free(records.text);
    free(paths);
done:
    release(buffers, COUNT);
    return result;
}

/* ---- record_checksums, tar_members, lmdb_items: from records, which are Python objects, or columns ---- */

/* One field of a record, borrowed from it. */
typedef struct {
    const char *name, *value, *header; /* the stored value is the header, then the value */
    Py_ssize_t name_size, size, header_size;
    PyObject *content; /* the value */
} field;

/* The key and the fields of a record, sorted by name. */
typedef struct {
    PyObject *key_object, *fields_object;
    const char *key;
    Py_ssize_t key_size;
    field fields[MOST_FIELDS];
    int count;
} parts;

/* Records; or, if `columns` are not NULL, the key of each, and pairs of a field's name and its values
 * in a list: see shardkit/record_columns.py. */
typedef struct {
    PyObject *items, *columns, *headers;
    Py_ssize_t count;
} batch;

static void drop(parts *parts) {
    Py_CLEAR(parts->key_object);
    Py_CLEAR(parts->fields_object);
}

static int precedes(const field *one, const field *other) {
    Py_ssize_t both = one->name_size < other->name_size ? one->name_size : other->name_size;
    int order = memcmp(one->name, other->name, (size_t)both);
    return order < 0 || (order == 0 && one->name_size < other->name_size);
}

/* Get the header of a field from a dict of (header, bytes of the value) by name; returns 0 if the
 * value has another size. */
static int find_header(PyObject *headers, PyObject *name, field *item) {
    PyObject *found = headers == NULL ? NULL : PyDict_GetItemWithError(headers, name);
    Py_ssize_t size;
    item->header = NULL;
    item->header_size = 0;
    if (found == NULL) return PyErr_Occurred() == NULL;
    return PyArg_ParseTuple(found, "y#n", &item->header, &item->header_size, &size) &&
           size == item->size;
}

/* Add a field to the parts of a record, in order; returns 0 if it is not an ordinary one. */
static int add_part(parts *parts, PyObject *headers, PyObject *name, PyObject *value) {
    field item;
    int place = parts->count;
    if (place == MOST_FIELDS || !PyUnicode_Check(name) || !PyBytes_Check(value)) return 0;
    if ((item.name = PyUnicode_AsUTF8AndSize(name, &item.name_size)) == NULL) return 0;
    item.content = value;
    item.value = PyBytes_AsString(value);
    item.size = PyBytes_Size(value);
    if (!find_header(headers, name, &item)) return 0;
    for (; place > 0 && precedes(&item, &parts->fields[place - 1]); place--)
        parts->fields[place] = parts->fields[place - 1];
    parts->fields[place] = item;
    parts->count++;
    return 1;
}

/* Get the parts of a record; returns 0 if it is not an ordinary one, with or without an error. */
static int take_apart(const batch *batch, Py_ssize_t row, parts *parts) {
    PyObject *record = PyTuple_GetItem(batch->items, row), *name, *value;
    Py_ssize_t at = 0;
    parts->count = 0;
    parts->fields_object = NULL;
    parts->key_object = batch->columns != NULL ? Py_NewRef(record) : PyObject_GetAttrString(record, "key");
    if (parts->key_object == NULL || !PyUnicode_Check(parts->key_object)) return 0;
    if ((parts->key = PyUnicode_AsUTF8AndSize(parts->key_object, &parts->key_size)) == NULL) return 0;
    if (batch->columns != NULL) {
        for (; at < PyTuple_Size(batch->columns); at++) {
            PyObject *column = PyTuple_GetItem(batch->columns, at);
            if ((value = PyList_GetItem(PyTuple_GetItem(column, 1), row)) == NULL) return 0;
            if (value != Py_None && !add_part(parts, batch->headers, PyTuple_GetItem(column, 0), value))
                return 0;
        }
        return 1;
    }
    if ((parts->fields_object = PyObject_GetAttrString(record, "fields")) == NULL) return 0;
    if (!PyDict_Check(parts->fields_object)) return 0;
    while (PyDict_Next(parts->fields_object, &at, &name, &value))
        if (!add_part(parts, batch->headers, name, value)) return 0;
    return 1;
}

static void close_batch(batch *batch) {
    Py_CLEAR(batch->items);
    Py_CLEAR(batch->columns);
}

/* Hold a list of records, or the columns of a RecordColumns; returns 0 with an error. */
static int open_batch(batch *batch, PyObject *records, PyObject *headers) {
    int are_columns = !PyList_Check(records) && !PyTuple_Check(records), fine;
    PyObject *keys = are_columns ? PyObject_GetAttrString(records, "keys") : Py_NewRef(records);
    batch->headers = headers;
    batch->columns = NULL;
    batch->items = keys == NULL ? NULL : PySequence_Tuple(keys);
    Py_XDECREF(keys);
    if (batch->items == NULL) return 0;
    batch->count = PyTuple_Size(batch->items);
    if (!are_columns) return 1;
    batch->columns = PyObject_GetAttrString(records, "columns");
    fine = batch->columns != NULL && PyTuple_Check(batch->columns);
    for (Py_ssize_t n = 0; fine && n < PyTuple_Size(batch->columns); n++) {
        PyObject *column = PyTuple_GetItem(batch->columns, n), *name, *values;
        fine = PyTuple_Check(column) && PyArg_ParseTuple(column, "UO!", &name, &PyList_Type, &values);
    }
    if (fine) return 1;
    close_batch(batch);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "columns are a tuple of pairs");
    return 0;
}

static uint32_t checksum_of(const parts *parts) {
    uint32_t total = sk_crc32(0, (const uint8_t *)parts->key, (size_t)parts->key_size);
    for (int n = 0; n < parts->count; n++) {
        const field *item = parts->fields + n;
        total = sk_crc32(total, (const uint8_t *)item->name, (size_t)item->name_size);
        total = sk_crc32(total, (const uint8_t *)item->value, (size_t)item->size);
    }
    return total;
}

PyDoc_STRVAR(record_checksums_doc,
             "record_checksums(records)\n--\n\n"
             "Return the checksum of each record, or None; see shardkit/record.py.");

static PyObject *record_checksums(PyObject *module, PyObject *records) {
    PyObject *result;
    batch batch;
    (void)module;
    if (!open_batch(&batch, records, NULL)) return NULL;
    result = PyList_New(batch.count);
    for (Py_ssize_t n = 0; result != NULL && n < batch.count; n++) {
        parts parts;
        PyObject *value = NULL;
        if (take_apart(&batch, n, &parts))
            value = PyLong_FromUnsignedLong(checksum_of(&parts));
        drop(&parts);
        if (value != NULL) {
            PyList_SetItem(result, n, value);
            continue;
        }
        Py_CLEAR(result);
        if (!PyErr_Occurred()) result = Py_NewRef(Py_None);
        break;
    }
    close_batch(&batch);
    return result;
}

/* Whether a field is raw pixels, which formats store with a header. */
static int is_raw(const field *item) {
    const char *end = item->name + item->name_size - 3;
    return item->name_size >= 3 && memcmp(end, "raw", 3) == 0 && (item->name_size == 3 || end[-1] == '.');
}

/* Bytes that are gathered before they become a piece. */
typedef struct {
    uint8_t *data;
    size_t size, room;
} gathered;

static uint8_t *space_for(gathered *to, size_t size) {
    if (to->room - to->size < size) {
        size_t room = to->room ? to->room : 1 << 16;
        uint8_t *data;
        while (room - to->size < size) room *= 2;
        if ((data = realloc(to->data, room)) == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        to->data = data;
        to->room = room;
    }
    to->size += size;
    return to->data + to->size - size;
}

static void octal(uint8_t *to, int digits, uint64_t value) {
    while (digits--) {
        to[digits] = (uint8_t)('0' + (value & 7));
        value >>= 3;
    }
}

/* Write the header of a member, as _header in shardkit/formats/webdataset.py. */
static void put_header(uint8_t *to, const parts *parts, const field *field) {
    uint32_t sum = 0;
    memset(to, 0, BLOCK);
    memcpy(to, parts->key, (size_t)parts->key_size);
    to[parts->key_size] = '.';
    memcpy(to + parts->key_size + 1, field->name, (size_t)field->name_size);
    memcpy(to + 100, "0000644\0000000000\0000000000", 24);
    octal(to + 124, 11, (uint64_t)(field->header_size + field->size));
    memset(to + 136, '0', 11);
    memset(to + 148, ' ', 8);
    to[156] = '0';
    memcpy(to + 257, "ustar\00000", 8);
    memcpy(to + 329, "0000000\0000000000", 16);
    for (int n = 0; n < BLOCK; n++) sum += to[n];
    octal(to + 148, 6, sum);
    to[154] = 0;
}

/* Whether the members of a record are ordinary: names that ustar has space for, and no pixels. */
static int is_ordinary(const parts *parts) {
    const char *last = parts->key;
    Py_ssize_t left = parts->key_size;
    for (Py_ssize_t n = 0; n < parts->key_size; n++) {
        if ((uint8_t)parts->key[n] >= 0x80 || parts->key[n] == 0) return 0;
        if (parts->key[n] == '/') {
            last = parts->key + n + 1;
            left = parts->key_size - n - 1;
        }
    }
    if (left == 0 || memchr(last, '.', (size_t)left) != NULL || parts->count == 0) return 0;
    for (int n = 0; n < parts->count; n++) {
        const field *item = parts->fields + n;
        if (parts->key_size + 1 + item->name_size > 100 || item->size >= (Py_ssize_t)1 << 32) return 0;
        if (is_raw(item)) return 0;
        for (Py_ssize_t m = 0; m < item->name_size; m++)
            if ((uint8_t)item->name[m] >= 0x80) return 0;
    }
    return 1;
}

/* Append what is gathered to the list, and start again. */
static int flush(gathered *waiting, PyObject *pieces) {
    PyObject *piece;
    int failed;
    if (waiting->size == 0) return 1;
    if ((piece = as_bytes(waiting->data, waiting->size)) == NULL) return 0;
    failed = PyList_Append(pieces, piece);
    Py_DECREF(piece);
    waiting->size = 0;
    return !failed;
}

static int put_members(const parts *parts, Py_ssize_t small, gathered *waiting, PyObject *pieces) {
    for (int n = 0; n < parts->count; n++) {
        const field *item = parts->fields + n;
        size_t padding = (size_t)(-(item->header_size + item->size) & (BLOCK - 1));
        uint8_t *to = space_for(waiting, BLOCK + (size_t)item->header_size);
        if (to == NULL) return 0;
        put_header(to, parts, item);
        if (item->header_size) memcpy(to + BLOCK, item->header, (size_t)item->header_size);
        if (item->size < small) {
            if ((to = space_for(waiting, (size_t)item->size)) == NULL) return 0;
            memcpy(to, item->value, (size_t)item->size);
        } else { /* copying it would take longer than passing it on */
            if (!flush(waiting, pieces) || PyList_Append(pieces, item->content) < 0) return 0;
        }
        if ((to = space_for(waiting, padding)) == NULL) return 0;
        memset(to, 0, padding);
    }
    return 1;
}

PyDoc_STRVAR(tar_members_doc,
             "tar_members(records, small, headers)\n--\n\n"
             "Return the members of records, or None; see shardkit/formats/webdataset.py.");

static PyObject *tar_members(PyObject *module, PyObject *arguments) {
    gathered waiting = {NULL, 0, 0};
    PyObject *records, *headers, *pieces;
    batch batch;
    Py_ssize_t small;
    int state = 1; /* 0: not ordinary, or an error */
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OnO!:tar_members", &records, &small, &PyDict_Type, &headers))
        return NULL;
    if (!open_batch(&batch, records, headers)) return NULL;
    pieces = PyList_New(0);
    for (Py_ssize_t n = 0; pieces != NULL && state && n < batch.count; n++) {
        parts parts;
        state = take_apart(&batch, n, &parts) && is_ordinary(&parts) &&
                put_members(&parts, small, &waiting, pieces);
        drop(&parts);
    }
    if (pieces != NULL && (!state || !flush(&waiting, pieces))) {
        Py_CLEAR(pieces);
        if (!PyErr_Occurred()) pieces = Py_NewRef(Py_None);
    }
    free(waiting.data);
    close_batch(&batch);
    return pieces;
}

#define KEY "__key__" /* the name of a record's key in formats other than tar */
#define LONGEST_NAME 80

PyDoc_STRVAR(lmdb_items_doc, "lmdb_items(records, row, headers)\n--\n\n"
                             "Return key and value of each field of records, or None; see "
                             "shardkit/formats/lmdb.py.");

/* Append key and value of a field to the items; returns 0 if it is not ordinary. */
static int put_item(PyObject *items, Py_ssize_t row, const field *item) {
    char key[16 + LONGEST_NAME];
    int start = snprintf(key, 16, "%09zd.", row);
    PyObject *value, *pair = NULL;
    int failed;
    if (item->name_size > LONGEST_NAME || is_raw(item)) return 0;
    memcpy(key + start, item->name, (size_t)item->name_size);
    if (item->header_size == 0 && item->content != NULL) {
        value = Py_NewRef(item->content);
    } else if ((value = PyBytes_FromStringAndSize(NULL, item->header_size + item->size)) != NULL) {
        char *to = PyBytes_AsString(value);
        if (item->header_size) memcpy(to, item->header, (size_t)item->header_size);
        memcpy(to + item->header_size, item->value, (size_t)item->size);
    }
    if (value != NULL) pair = Py_BuildValue("y#N", key, (Py_ssize_t)start + item->name_size, value);
    failed = pair == NULL || PyList_Append(items, pair) < 0;
    Py_XDECREF(pair);
    return !failed;
}

static PyObject *lmdb_items(PyObject *module, PyObject *arguments) {
    PyObject *records, *headers, *items;
    batch batch;
    Py_ssize_t row;
    int state = 1; /* 0: not ordinary, or an error */
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OnO!:lmdb_items", &records, &row, &PyDict_Type, &headers))
        return NULL;
    if (!open_batch(&batch, records, headers)) return NULL;
    items = PyList_New(0);
    for (Py_ssize_t n = 0; items != NULL && state && n < batch.count; n++, row++) {
        parts parts;
        field key = {KEY, NULL, NULL, sizeof KEY - 1, 0, 0, NULL};
        int at = 0;
        state = take_apart(&batch, n, &parts) && row >= 0 && row < 1000000000;
        key.value = parts.key;
        key.size = parts.key_size;
        for (; state && at < parts.count && precedes(parts.fields + at, &key); at++)
            state = put_item(items, row, parts.fields + at);
        if (state) state = put_item(items, row, &key);
        for (; state && at < parts.count; at++) state = put_item(items, row, parts.fields + at);
        drop(&parts);
    }
    close_batch(&batch);
    if (items == NULL || state) return items;
    Py_DECREF(items);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(ranges_start_doc, "ranges_start(file, offsets, start)\n--\n\n"
                               "Whether ranges of a file start with these bytes.");

static PyObject *ranges_start(PyObject *module, PyObject *arguments) {
    Py_buffer buffers[2] = {{0}};
    int file, same = 0;
    uint8_t *data;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iy*y*:ranges_start", &file, &buffers[0], &buffers[1]))
        return NULL;
    if ((data = malloc((size_t)buffers[1].len + 1)) != NULL && is_aligned(&buffers[0], 8)) {
        const int64_t *offsets = buffers[0].buf;
        Py_BEGIN_ALLOW_THREADS
        same = 1;
        for (Py_ssize_t n = 0; same && n < buffers[0].len / 8; n++)
            same = sk_read_range(file, offsets[n], data, (size_t)buffers[1].len) &&
                   memcmp(data, buffers[1].buf, (size_t)buffers[1].len) == 0;
        Py_END_ALLOW_THREADS
    }
    free(data);
    release(buffers, 2);
    return PyBool_FromLong(same);
}

static PyMethodDef methods[] = {
    {"decode_jpeg", decode_jpeg, METH_VARARGS, decode_jpeg_doc},
    {"encode_jpeg", encode_jpeg, METH_VARARGS, encode_jpeg_doc},
    {"index_records", index_records, METH_VARARGS, index_records_doc},
    {"inspect_jpeg", inspect_jpeg, METH_O, inspect_jpeg_doc},
    {"jpeg_decodes", jpeg_decodes, METH_O, jpeg_decodes_doc},
    {"jpeg_header", jpeg_header, METH_VARARGS, jpeg_header_doc},
    {"jpeg_planes", jpeg_planes, METH_O, jpeg_planes_doc},
    {"lmdb_items", lmdb_items, METH_VARARGS, lmdb_items_doc},
    {"measure", measure, METH_VARARGS, measure_doc},
    {"measure_jpeg", measure_jpeg, METH_VARARGS, measure_jpeg_doc},
    {"measure_png", measure_png, METH_VARARGS, measure_png_doc},
    {"ranges_start", ranges_start, METH_VARARGS, ranges_start_doc},
    {"read_files", read_some_files, METH_VARARGS, read_files_doc},
    {"read_heads", read_heads, METH_VARARGS, read_heads_doc},
    {"read_images", read_images, METH_VARARGS, read_images_doc},
    {"record_checksums", record_checksums, METH_O, record_checksums_doc},
    {"scale_jpeg", scale_jpeg, METH_VARARGS, scale_jpeg_doc},
    {"tar_members", tar_members, METH_VARARGS, tar_members_doc},
    {"walk_lmdb", walk_lmdb, METH_VARARGS, walk_lmdb_doc},
    {"walk_tar", walk_tar, METH_VARARGS, walk_tar_doc},
    {NULL, NULL, 0, NULL},
};

int sk_add_convert(PyObject *module) { return PyModule_AddFunctions(module, methods); }
