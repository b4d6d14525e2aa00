/* Maps of files, as Python objects that unmap them at their end. Nothing here touches their pages. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>

#include "core.h"
#include "module.h"

#define NAME "shardkit._native.map"

#if SK_COPIES_MAPPED

#include <sys/mman.h>

static void unmap(PyObject *capsule) {
    sk_map *map = PyCapsule_GetPointer(capsule, NAME);
    if (map == NULL) return;
    munmap((void *)(uintptr_t)map->data, map->size);
    free(map);
}

static sk_map *new_map(int file, long long size) {
    sk_map *map = malloc(sizeof *map);
    void *data;
    if (map == NULL) return NULL;
    data = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, file, 0);
    if (data == MAP_FAILED) {
        free(map);
        return NULL;
    }
    map->data = data;
    map->size = (size_t)size;
    return map;
}

PyObject *sk_map_file(PyObject *module, PyObject *arguments) {
    int file;
    long long size;
    sk_map *map;
    PyObject *capsule;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iL:map_file", &file, &size)) return NULL;
    map = size > 0 ? new_map(file, size) : NULL;
    if (map == NULL) Py_RETURN_NONE;
    capsule = PyCapsule_New(map, NAME, unmap);
    if (capsule == NULL) {
        munmap((void *)(uintptr_t)map->data, map->size);
        free(map);
    }
    return capsule;
}

#else

PyObject *sk_map_file(PyObject *module, PyObject *arguments) {
    (void)module, (void)arguments;
    Py_RETURN_NONE;
}

#endif

int sk_set_maps(sk_map *maps, size_t count, PyObject *given) {
    if (!PyList_Check(given) || (size_t)PyList_Size(given) != count) {
        PyErr_SetString(PyExc_ValueError, "maps is not a list with one item for each image");
        return 0;
    }
    for (size_t n = 0; n < count; n++) {
        PyObject *item = PyList_GetItem(given, (Py_ssize_t)n);
        const sk_map *map = NULL;
        if (item != Py_None && (map = PyCapsule_GetPointer(item, NAME)) == NULL) return 0;
        maps[n] = map == NULL ? (sk_map){NULL, 0} : *map;
    }
    return 1;
}
