/* The Python module shardkit._native: checks its arguments, and releases the GIL once per call. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "core.h"
#include "module.h"
#include "png.h"

/* The version of this interface; shardkit/system/native.py has the same number. */
#define API 18

/* Return whether a buffer holds `count` values of `size` bytes, aligned for them; else raise. */
static int holds(const Py_buffer *buffer, const char *name, size_t count, size_t size) {
    if ((size_t)buffer->len == count * size && (uintptr_t)buffer->buf % (size % 8 ? 4 : 8) == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes; %zu values of %zu bytes are needed", name,
                 buffer->len, count, size);
    return 0;
}

PyDoc_STRVAR(fill_doc,
             "fill(out, height, width, entries, files, maps, pieces, rows, mark, verify_encoded, "
             "verify_raw, background, bicubic, tall_first, oversample, codes)\n--\n\n"
             "Fill a batch of images, and return how many were copied from maps; see "
             "shardkit/system/compiled.py.");

/* The buffers of a batch, in the order of its members. */
typedef struct {
    Py_buffer out, entries, files, pieces, rows, mark, codes;
} batch_buffers;

static int set_rows(sk_batch *batch, const batch_buffers *given) {
    size_t count = (size_t)given->codes.len;
    if ((size_t)given->entries.len != count * SK_ENTRY) {
        PyErr_SetString(PyExc_ValueError, "entries do not have the size of the batch");
        return 0;
    }
    if (!holds(&given->files, "files", count, sizeof(int32_t))) return 0;
    if (given->mark.buf != NULL && (!holds(&given->mark, "mark", 1, sizeof(int64_t)) ||
                                    !holds(&given->rows, "rows", count, sizeof(int64_t))))
        return 0;
    if (given->mark.buf != NULL && given->mark.readonly) {
        PyErr_SetString(PyExc_ValueError, "mark is read-only");
        return 0;
    }
    batch->count = count;
    batch->entries = given->entries.buf;
    batch->files = given->files.buf;
    batch->rows = given->rows.buf;
    batch->mark = given->mark.buf;
    batch->codes = given->codes.buf;
    return 1;
}

static int set_batch(sk_batch *batch, const batch_buffers *given) {
    size_t sample = batch->values, count = (size_t)given->codes.len;
    if (!set_rows(batch, given)) return 0;
    if (!sample) {
        if (batch->height < 1 || batch->width < 1 || batch->height > 65535 ||
            batch->width > 65535) {
            PyErr_SetString(PyExc_ValueError, "height and width are not from 1 to 65535");
            return 0;
        }
        sample = 3 * (size_t)batch->height * (size_t)batch->width;
    }
    if ((size_t)given->out.len / sample != count || (size_t)given->out.len % sample) {
        PyErr_SetString(PyExc_ValueError, "out does not have the size of the batch");
        return 0;
    }
    if (given->pieces.buf != NULL && !holds(&given->pieces, "pieces", count, sizeof(sk_piece)))
        return 0;
    batch->pieces = given->pieces.buf;
    batch->out = given->out.buf;
    return 1;
}

static void release(batch_buffers *given) {
    Py_buffer *buffers[] = {&given->out,  &given->entries, &given->files, &given->pieces,
                            &given->rows, &given->mark,    &given->codes};
    for (size_t n = 0; n < sizeof buffers / sizeof *buffers; n++)
        if (buffers[n]->obj != NULL) PyBuffer_Release(buffers[n]);
}

/* A view of a batch of images, or a batch of arrays: the arguments of one call. */
typedef struct {
    batch_buffers given;
    PyObject *maps;
} batch_arguments;

static int parse_view(PyObject *arguments, sk_batch *batch, batch_arguments *view) {
    batch_buffers *given = &view->given;
    int bicubic;
    if (!PyArg_ParseTuple(arguments, "w*iiy*y*Oz*z*z*pp(bbb)ppdw*:fill", &given->out,
                          &batch->height, &batch->width, &given->entries, &given->files,
                          &view->maps, &given->pieces, &given->rows, &given->mark,
                          &batch->verify_encoded, &batch->verify_raw, &batch->ground[0],
                          &batch->ground[1], &batch->ground[2], &bicubic, &batch->tall_first,
                          &batch->oversample, &given->codes)) {
        memset(given, 0, sizeof *given); /* released */
        return 0;
    }
    batch->filter = bicubic ? SK_BICUBIC : SK_BILINEAR;
    return 1;
}

/* Check a batch and set its pointers, among them new memory for `maps`. */
static int prepare(sk_batch *batch, const batch_arguments *view) {
    sk_map *maps;
    if (!set_batch(batch, &view->given)) return 0;
    if (view->maps == Py_None) return 1;
    batch->maps = maps = PyMem_Calloc(batch->count ? batch->count : 1, sizeof *maps);
    if (maps == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    return sk_set_maps(maps, batch->count, view->maps);
}

/* Fill the views of a batch and release their buffers; return how many samples were copied from
 * maps. Without `ready`, an exception is set. */
static PyObject *fill_batch(sk_batch *batches, batch_arguments *views, size_t count, int ready) {
    size_t mapped = 0;
    for (size_t n = 0; ready && n < count; n++) ready = prepare(&batches[n], &views[n]);
    for (size_t n = 1; ready && n < count; n++) {
        ready = batches[n].entries == batches->entries && batches[n].count == batches->count;
        if (!ready) PyErr_SetString(PyExc_ValueError, "the views do not have the same entries");
    }
    if (ready) {
        Py_BEGIN_ALLOW_THREADS
        mapped = sk_fill(batches, count);
        Py_END_ALLOW_THREADS
    }
    for (size_t n = 0; n < count; n++) {
        release(&views[n].given);
        PyMem_Free((void *)batches[n].maps);
    }
    return ready ? PyLong_FromSize_t(mapped) : NULL;
}

static PyObject *fill(PyObject *module, PyObject *arguments) {
    batch_arguments view = {0};
    sk_batch batch = {0};
    (void)module;
    return fill_batch(&batch, &view, 1, parse_view(arguments, &batch, &view));
}

PyDoc_STRVAR(fill_views_doc,
             "fill_views(*views)\n--\n\n"
             "Fill views of the same images; each is a tuple of the arguments of fill.");

static PyObject *fill_views(PyObject *module, PyObject *arguments) {
    size_t count = (size_t)PyTuple_Size(arguments);
    batch_arguments *views = PyMem_Calloc(count ? count : 1, sizeof *views);
    sk_batch *batches = PyMem_Calloc(count ? count : 1, sizeof *batches);
    PyObject *result = NULL;
    int ready = count > 0;
    (void)module;
    if (views == NULL || batches == NULL) {
        PyErr_NoMemory();
    } else {
        if (!ready) PyErr_SetString(PyExc_ValueError, "the size of a batch without views is unknown");
        for (size_t n = 0; ready && n < count; n++) {
            PyObject *one = PyTuple_GetItem(arguments, (Py_ssize_t)n);
            ready = one != NULL && PyTuple_Check(one);
            if (!ready) PyErr_SetString(PyExc_TypeError, "a view is not a tuple");
            ready = ready && parse_view(one, &batches[n], &views[n]);
        }
        result = fill_batch(batches, views, count, ready);
    }
    PyMem_Free(views);
    PyMem_Free(batches);
    return result;
}

PyDoc_STRVAR(fill_values_doc,
             "fill_values(out, size, entries, files, maps, rows, mark, verify, codes)\n--\n\n"
             "Fill a batch of arrays of one size; see shardkit/system/compiled.py.");

static PyObject *fill_values(PyObject *module, PyObject *arguments) {
    batch_arguments view = {0};
    batch_buffers *given = &view.given;
    Py_ssize_t size;
    sk_batch batch = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "w*ny*y*Oz*z*pw*:fill_values", &given->out, &size,
                          &given->entries, &given->files, &view.maps, &given->rows, &given->mark,
                          &batch.verify_raw, &given->codes))
        return NULL;
    batch.values = size > 0 ? (size_t)size : 0; /* 0 is refused: a sample has a size */
    return fill_batch(&batch, &view, 1, 1);
}

PyDoc_STRVAR(read_stored_doc,
             "read_stored(entries, files, rows, mark, verify, codes)\n--\n\n"
             "Return the stored bytes of a batch as a list; see shardkit/system/compiled.py.");

/* Return a list with new bytes for each entry, and where their content starts in `to`. */
static PyObject *new_list(const sk_batch *batch, uint8_t **to) {
    PyObject *list = PyList_New((Py_ssize_t)batch->count);
    for (size_t n = 0; list != NULL && n < batch->count; n++) {
        Py_ssize_t length = (Py_ssize_t)sk_length_of(batch->entries + n * SK_ENTRY);
        PyObject *item = PyBytes_FromStringAndSize(NULL, length);
        if (item == NULL) {
            Py_CLEAR(list);
        } else {
            to[n] = (uint8_t *)PyBytes_AsString(item);
            PyList_SetItem(list, (Py_ssize_t)n, item);
        }
    }
    return list;
}

static PyObject *read_stored(PyObject *module, PyObject *arguments) {
    batch_buffers given;
    sk_batch batch = {0};
    PyObject *list = NULL;
    uint8_t **to;
    (void)module;
    memset(&given, 0, sizeof given);
    if (!PyArg_ParseTuple(arguments, "y*y*z*z*pw*:read_stored", &given.entries, &given.files,
                          &given.rows, &given.mark, &batch.verify_raw, &given.codes))
        return NULL;
    batch.verify_encoded = batch.verify_raw;
    if (set_rows(&batch, &given)) {
        if ((to = PyMem_Calloc(batch.count + 1, sizeof *to)) == NULL)
            PyErr_NoMemory();
        else if ((list = new_list(&batch, to)) != NULL) {
            Py_BEGIN_ALLOW_THREADS
            sk_read_stored(&batch, to);
            Py_END_ALLOW_THREADS
        }
        PyMem_Free(to);
    }
    release(&given);
    return list;
}

PyDoc_STRVAR(draw_crops_doc,
             "draw_crops(key, samples, widths, heights, scale, ratio, log_ratio, flip, pieces)\n--\n\n"
             "Draw the pieces of RandomResizedCrop; return whether all sizes are possible.");

static PyObject *draw_crops(PyObject *module, PyObject *arguments) {
    Py_buffer samples, widths, heights, pieces;
    unsigned long long key;
    sk_random_crop crop;
    size_t count;
    int fits, drawn = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "Ky*y*y*(dd)(dd)(dd)dw*:draw_crops", &key, &samples, &widths,
                          &heights, &crop.scale[0], &crop.scale[1], &crop.ratio[0], &crop.ratio[1],
                          &crop.log_ratio[0], &crop.log_ratio[1], &crop.flip, &pieces))
        return NULL;
    count = (size_t)pieces.len / sizeof(sk_piece);
    fits = holds(&pieces, "pieces", count, sizeof(sk_piece)) &&
           holds(&samples, "samples", count, sizeof(uint64_t)) &&
           holds(&widths, "widths", count, sizeof(int64_t)) &&
           holds(&heights, "heights", count, sizeof(int64_t));
    if (fits)
        drawn = sk_draw_crops(&crop, key, count, samples.buf, widths.buf, heights.buf, pieces.buf);
    PyBuffer_Release(&samples);
    PyBuffer_Release(&widths);
    PyBuffer_Release(&heights);
    PyBuffer_Release(&pieces);
    return fits ? PyBool_FromLong(drawn) : NULL;
}

/* Whether images have a margin before each line or each image, and a crop fits into both margins. */
static int is_margin(int margin, int distance, int crop) {
    const int most = 1 << 29;
    return 0 <= margin && margin < distance && distance <= most && 1 <= crop &&
           crop <= distance + margin;
}

PyDoc_STRVAR(copy_crops_doc,
             "copy_crops(out, height, width, images, line, lines, across, down, positions, key, "
             "samples, flip)\n--\n\n"
             "Copy a random crop of each image; return whether all positions are those of images.");

static PyObject *copy_crops(PyObject *module, PyObject *arguments) {
    Py_buffer out, pixels, positions, samples;
    sk_margined images;
    int height, width, across, down, fits, copied = 0;
    unsigned long long key;
    double flip;
    size_t count;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "w*iiy*iiiiy*Ky*d:copy_crops", &out, &height, &width, &pixels,
                          &images.line, &images.lines, &across, &down, &positions, &key, &samples,
                          &flip))
        return NULL;
    count = (size_t)positions.len / sizeof(int64_t);
    fits = is_margin(across, images.line, width) && is_margin(down, images.lines, height);
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "the margins leave no crop of this size");
    else
        fits = holds(&positions, "positions", count, sizeof(int64_t)) &&
               holds(&samples, "samples", count, sizeof(uint64_t)) &&
               holds(&out, "out", count, 3 * (size_t)height * (size_t)width);
    if (fits) {
        size_t image = (size_t)images.line * (size_t)images.lines, stored = (size_t)pixels.len / 3;
        size_t after = (size_t)images.line * (size_t)down + (size_t)across;
        images.pixels = pixels.buf;
        images.count = stored < after ? 0 : (stored - after) / image;
        images.lefts = images.line + across - width + 1;
        images.tops = images.lines + down - height + 1;
        Py_BEGIN_ALLOW_THREADS
        copied = sk_copy_crops(&images, flip, key, count, positions.buf, samples.buf, width, height,
                               out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&samples);
    return fits ? PyBool_FromLong(copied) : NULL;
}

PyDoc_STRVAR(check_entries_doc, "check_entries(entries, kinds, wrong)\n--\n\n"
                                "Set wrong[n] to 1 for each damaged entry of an index.");

static PyObject *check_entries(PyObject *module, PyObject *arguments) {
    Py_buffer entries, wrong;
    int kinds, fits;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*iw*:check_entries", &entries, &kinds, &wrong)) return NULL;
    fits = entries.len / SK_ENTRY == wrong.len && entries.len % SK_ENTRY == 0;
    if (fits)
        sk_check_entries(entries.buf, (size_t)wrong.len, kinds, wrong.buf);
    else
        PyErr_SetString(PyExc_ValueError, "wrong does not have one byte for each entry");
    PyBuffer_Release(&entries);
    PyBuffer_Release(&wrong);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(survey_doc,
             "survey(entries, sizes, kinds, width, height, most_pixels)\n--\n\n"
             "Return the longest image, the most pixels, and width and height of all or 0, 0;\n"
             "None if an entry is damaged, impossible, or has no place in its file.");

static PyObject *survey(PyObject *module, PyObject *arguments) {
    Py_buffer entries, sizes;
    unsigned int width, height;
    unsigned long long most_pixels;
    int kinds, fits, usual = 0;
    sk_survey survey;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y*iIIK:survey", &entries, &sizes, &kinds, &width, &height,
                          &most_pixels))
        return NULL;
    fits = entries.len % SK_ENTRY == 0 &&
           holds(&sizes, "sizes", (size_t)entries.len / SK_ENTRY, sizeof(int64_t));
    if (fits)
        usual = sk_survey_entries(entries.buf, (size_t)entries.len / SK_ENTRY, sizes.buf, kinds,
                                  width, height, most_pixels, &survey);
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "entries are not whole");
    PyBuffer_Release(&entries);
    PyBuffer_Release(&sizes);
    if (!fits) return NULL;
    if (!usual) Py_RETURN_NONE;
    return Py_BuildValue("(IKII)", survey.longest, (unsigned long long)survey.most_pixels,
                         survey.width, survey.height);
}

PyDoc_STRVAR(resize_doc, "resize(pixels, width, height, box, out, out_width, out_height, filter, tall_first)"
                         "\n--\n\nScale a box of an RGB image as Pillow does.");

static PyObject *resize(PyObject *module, PyObject *arguments) {
    Py_buffer pixels, out;
    int width, height, out_width, out_height, filter, tall_first;
    double box[4];
    enum sk_code code = SK_UNSUPPORTED;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*ii(dddd)w*iiip:resize", &pixels, &width, &height, &box[0],
                          &box[1], &box[2], &box[3], &out, &out_width, &out_height, &filter,
                          &tall_first))
        return NULL;
    if (width > 0 && height > 0 && out_width > 0 && out_height > 0 && filter >= 0 &&
        filter < SK_FILTERS &&
        (uint64_t)pixels.len == 3 * (uint64_t)width * (uint64_t)height &&
        (uint64_t)out.len == 3 * (uint64_t)out_width * (uint64_t)out_height) {
        sk_memory work = {NULL, 0};
        sk_region all = {0, 0, out_width, out_height};
        Py_BEGIN_ALLOW_THREADS
        code = sk_resize(pixels.buf, 3 * (size_t)width, width, height, box, out_width, out_height,
                         (enum sk_filter)filter, tall_first, all, 0, &work, out.buf);
        sk_release(&work);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&out);
    return PyBool_FromLong(code == SK_DONE);
}

PyDoc_STRVAR(finish_planes_doc, "finish_planes(data, width, height, region, out)\n--\n\n"
                                "Convert a region of a record of planes to RGB; return whether it did.");

static PyObject *finish_planes(PyObject *module, PyObject *arguments) {
    Py_buffer data, out;
    unsigned int width, height;
    sk_region region;
    enum sk_code code = SK_UNSUPPORTED;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*II(iiii)w*:finish_planes", &data, &width, &height,
                          &region.left, &region.top, &region.width, &region.height, &out))
        return NULL;
    if (sk_is_inside(region, width, height) &&
        (uint64_t)out.len == 3 * (uint64_t)region.width * (uint64_t)region.height) {
        sk_memory work = {NULL, 0};
        Py_BEGIN_ALLOW_THREADS
        code = sk_finish_planes(data.buf, (size_t)data.len, width, height, region, &work, out.buf);
        sk_release(&work);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return PyBool_FromLong(code == SK_DONE);
}

PyDoc_STRVAR(decode_png_doc, "decode_png(data, background, keep_16)\n--\n\n"
                             "Return (height, width, channels, pixels) of a PNG, or None; see\n"
                             "shardkit/system/compiled.py.");

static PyObject *decode_png(PyObject *module, PyObject *arguments) {
    PyObject *pixels = NULL, *result = NULL;
    const char *ground;
    Py_ssize_t colors;
    enum sk_code code;
    Py_buffer data;
    int keep_16;
    sk_png png;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y#p:decode_png", &data, &ground, &colors, &keep_16))
        return NULL;
    code = sk_read_png(data.buf, (size_t)data.len, &png);
    png.keeps_16 = (uint8_t)keep_16;
    if (code == SK_DONE && keep_16 && png.depth != 16) code = SK_UNSUPPORTED;
    if (code == SK_DONE) {
        size_t pixel_bytes = colors == 3 ? 3 : sk_png_values(&png);
        sk_region all = {0, 0, (int32_t)png.width, (int32_t)png.height};
        sk_memory work = {NULL, 0};
        size_t size = pixel_bytes * png.width * png.height;
        pixels = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)size);
        if (pixels != NULL) {
            uint8_t *out = (uint8_t *)PyByteArray_AsString(pixels);
            Py_BEGIN_ALLOW_THREADS
            code = sk_png_pixels(data.buf, &png, all, colors == 3 ? (const uint8_t *)ground : NULL,
                                 &work, out);
            sk_release(&work);
            Py_END_ALLOW_THREADS
            result = code == SK_DONE
                         ? Py_BuildValue("(IIiO)", png.height, png.width,
                                         colors == 3 ? 3 : (int)png.channels, pixels)
                         : Py_NewRef(Py_None);
            Py_DECREF(pixels);
        }
    } else {
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&data);
    return result;
}

PyDoc_STRVAR(map_file_doc, "map_file(descriptor, size)\n--\n\n"
                           "Return a map of a file for fill, or None if it cannot be mapped.");

PyDoc_STRVAR(crc32_doc, "crc32(data, value)\n--\n\nReturn the CRC-32 of data, as zlib does.");

static PyObject *crc32(PyObject *module, PyObject *arguments) {
    Py_buffer data;
    unsigned int value;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*I:crc32", &data, &value)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    value = sk_crc32(value, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(value);
}

PyDoc_STRVAR(crc32_contribution_doc,
             "crc32_contribution(data, following)\n--\n\n"
             "Return what data contributes to the CRC-32 of bytes that go on for so many more.");

static PyObject *crc32_contribution(PyObject *module, PyObject *arguments) {
    Py_buffer data;
    unsigned long long following;
    uint32_t value;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*K:crc32_contribution", &data, &following)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    value = sk_crc32_shifted(~sk_crc32(~0u, data.buf, (size_t)data.len), following);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(value);
}

static PyMethodDef methods[] = {
    {"check_entries", check_entries, METH_VARARGS, check_entries_doc},
    {"copy_crops", copy_crops, METH_VARARGS, copy_crops_doc},
    {"crc32", crc32, METH_VARARGS, crc32_doc},
    {"crc32_contribution", crc32_contribution, METH_VARARGS, crc32_contribution_doc},
    {"decode_png", decode_png, METH_VARARGS, decode_png_doc},
    {"draw_crops", draw_crops, METH_VARARGS, draw_crops_doc},
    {"fill", fill, METH_VARARGS, fill_doc},
    {"fill_views", fill_views, METH_VARARGS, fill_views_doc},
    {"fill_values", fill_values, METH_VARARGS, fill_values_doc},
    {"finish_planes", finish_planes, METH_VARARGS, finish_planes_doc},
    {"map_file", sk_map_file, METH_VARARGS, map_file_doc},
    {"read_stored", read_stored, METH_VARARGS, read_stored_doc},
    {"resize", resize, METH_VARARGS, resize_doc},
    {"survey", survey, METH_VARARGS, survey_doc},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    sk_cpu_prepare();
    sk_crc32_prepare();
    if (sk_add_convert(module)) return -1;
    if (PyModule_AddIntConstant(module, "API", API)) return -1;
    if (PyModule_AddIntConstant(module, "AVX2", sk_cpu.avx2)) return -1;
    if (PyModule_AddIntConstant(module, "LEAST_MAPPED", SK_LEAST_MAPPED)) return -1;
    if (PyModule_AddStringConstant(module, "LIBDEFLATE", sk_deflate_version())) return -1;
    return PyModule_AddStringConstant(module, "LIBJPEG_TURBO", sk_jpeg_version());
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#if defined(Py_GIL_DISABLED) && defined(Py_mod_gil)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled reading of batches.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
