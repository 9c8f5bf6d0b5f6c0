/* Stands between ggml-opencl and libOpenCL, so that ggml-opencl runs on an OpenCL device that is a CPU.

   A device of another type is left as it is. Of a CPU it changes
   - the name, if it lacks "Intel": ggml-opencl refuses a device whose name has neither that nor Adreno or Qualcomm;
   - its extensions, if its OpenCL C 3.0 has sub-groups: ggml-opencl asks for the extension, which also promises that
     sub-groups make progress independently;
   - the options of a program: DROPPED, as Intel's runtime lacks functions that they lead to, such as exp_rm(half);
     and ADDED, as a current Clang refuses an assignment in ggml's rope.cl.
   CONFORM_OPENCL_DROP and CONFORM_OPENCL_ADD replace these, for experiments with a cache of kernels of their own. */
#define _GNU_SOURCE
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME "%s, a CPU called Intel"
#define SUBGROUPS "cl_khr_subgroups"
#define DROPPED "-cl-unsafe-math-optimizations -cl-fast-relaxed-math"
#define ADDED "-Wno-incompatible-pointer-types"

/* The folder `vendors` beside this library names the driver, unless the user named one. */
__attribute__((constructor)) static void choose_driver(void) {
    Dl_info self;
    char path[4096];
    if (dladdr((void *) choose_driver, &self) && strrchr(self.dli_fname, '/')) {
        int above = (int) (strrchr(self.dli_fname, '/') - self.dli_fname);
        snprintf(path, sizeof path, "%.*s/vendors", above, self.dli_fname);
        void * found = realpath(path, NULL);
        if (found) setenv("OCL_ICD_VENDORS", found, 0);
        free(found);
    }
}

static void * real(const char * name) {
    static void * library;
    if (!library) library = dlopen("libOpenCL.so.1", RTLD_NOW);
    void * found = library ? dlsym(library, name) : NULL;
    if (!found) fprintf(stderr, "opencl.c: libOpenCL.so.1 with %s expected\n", name), abort();
    return found;
}

typedef cl_int (*info_fn)(cl_device_id, cl_device_info, size_t, void *, size_t *);
typedef cl_int (*build_fn)(cl_program, cl_uint, const cl_device_id *, const char *,
                           void(CL_CALLBACK *)(cl_program, void *), void *);

static int is_cpu(cl_device_id device) {
    cl_device_type type = 0;
    ((info_fn) real("clGetDeviceInfo"))(device, CL_DEVICE_TYPE, sizeof type, &type, NULL);
    return (type & CL_DEVICE_TYPE_CPU) != 0;
}

static const char * chosen(const char * variable, const char * otherwise) {
    const char * value = getenv(variable);
    return value ? value : otherwise;
}

static int has_feature(cl_device_id device, const char * name) {
    cl_name_version found[64];
    size_t size = 0;
    info_fn ask = (info_fn) real("clGetDeviceInfo");
    if (ask(device, CL_DEVICE_OPENCL_C_FEATURES, sizeof found, found, &size) != CL_SUCCESS) return 0;
    for (size_t i = 0; i < size / sizeof *found; i++)
        if (!strcmp(found[i].name, name)) return 1;
    return 0;
}

cl_int clGetDeviceInfo(cl_device_id device, cl_device_info what, size_t size, void * value, size_t * needed) {
    info_fn ask = (info_fn) real("clGetDeviceInfo");
    char own[8192], text[8192 + 64];
    if ((what != CL_DEVICE_NAME && what != CL_DEVICE_EXTENSIONS) || !is_cpu(device))
        return ask(device, what, size, value, needed);
    cl_int error = ask(device, what, sizeof own, own, NULL);
    if (error != CL_SUCCESS) return error;
    int renamed = what == CL_DEVICE_NAME && !strstr(own, "Intel");
    int extended = what == CL_DEVICE_EXTENSIONS && !strstr(own, SUBGROUPS) && has_feature(device, "__opencl_c_subgroups");
    size_t length = 1 + (size_t) snprintf(text, sizeof text, renamed ? NAME : extended ? "%s " SUBGROUPS : "%s", own);
    if (needed) *needed = length;
    if (value && size < length) return CL_INVALID_VALUE;
    if (value) memcpy(value, text, length);
    return CL_SUCCESS;
}

cl_int clBuildProgram(cl_program program, cl_uint n, const cl_device_id * devices, const char * options,
                      void(CL_CALLBACK * notify)(cl_program, void *), void * data) {
    build_fn build = (build_fn) real("clBuildProgram");
    cl_device_id device = NULL;
    clGetProgramInfo(program, CL_PROGRAM_DEVICES, sizeof device, &device, NULL);
    if (!options || !device || !is_cpu(device)) return build(program, n, devices, options, notify, data);
    const char * dropped = chosen("CONFORM_OPENCL_DROP", DROPPED);
    const char * added = chosen("CONFORM_OPENCL_ADD", ADDED);
    char * words = strdup(options), * rest = NULL;
    char * kept = calloc(strlen(options) + strlen(added) + 3, 1);
    for (char * word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        if (!strstr(dropped, word)) strcat(strcat(kept, word), " ");
    cl_int error = build(program, n, devices, strcat(kept, added), notify, data);
    free(words);
    free(kept);
    return error;
}
