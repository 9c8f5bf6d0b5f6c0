/* Stands between ggml-opencl and libOpenCL, so that ggml-opencl runs on an OpenCL device that is a CPU.

   A device of another type is left as it is. Of a CPU it changes
   - the name, if it lacks "Intel": ggml-opencl refuses a device whose name has neither that nor Adreno or Qualcomm;
   - its extensions, if its OpenCL C 3.0 has sub-groups: ggml-opencl asks for the extension, which also promises that
     sub-groups make progress independently;
   - the options of a program: DROPPED, as Intel's runtime lacks functions that they lead to, such as exp_rm(half);
     and ADDED, as a current Clang refuses an assignment in ggml's rope.cl;
   - local memory, which is undefined when a kernel starts: each byte is 0xff then, so NaN in each float type. A CPU
     keeps what earlier kernels left, and a kernel that reads what it did not write would pass or fail after them.
   CONFORM_OPENCL_DROP and CONFORM_OPENCL_ADD replace these, for experiments with a cache of kernels of their own.
   It keeps what a CPU's driver compiled in the folder of GGML_OPENCL_KERNEL_CACHE_DIR: ggml-opencl uses that, too, but
   not for FLASH_ATTN_EXT, which takes minutes. A kept program is another one to OpenCL: `actual` finds it. */
#define _GNU_SOURCE
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAME "%s, a CPU called Intel"
#define SUBGROUPS "cl_khr_subgroups"
#define DROPPED "-cl-unsafe-math-optimizations -cl-fast-relaxed-math"
#define ADDED "-Wno-incompatible-pointer-types"
#define FILL "kernel void fill(volatile local int * l, int n) { for (int i = 0; i < n; i++) l[i] = -1; }"
#define GROUPS 16  /* for each thread of the device: no group says on which thread it runs */

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
typedef cl_int (*program_fn)(cl_program, cl_program_info, size_t, void *, size_t *);
typedef struct swap { cl_program asked, kept; struct swap * next; } swap;
static swap * swaps;

static cl_program actual(cl_program asked) {
    for (swap * s = swaps; s; s = s->next)
        if (s->asked == asked) return s->kept;
    return asked;
}

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

static uint64_t digest(uint64_t found, const char * text) {
    do found = (found ^ (unsigned char) *text) * 1099511628211u;  /* FNV-1a, with the zero at the end */
    while (*text++);
    return found;
}

/* The file of a program: by its source, its options, the device and the driver. 0 if there is no folder or source. */
static int file_of(char * path, size_t size, cl_program program, cl_device_id device, const char * options) {
    const char * folder = getenv("GGML_OPENCL_KERNEL_CACHE_DIR");
    program_fn ask = (program_fn) real("clGetProgramInfo");
    char name[512] = "", version[512] = "", * source;
    size_t length = 0;
    if (!folder || ask(program, CL_PROGRAM_SOURCE, 0, NULL, &length) != CL_SUCCESS || length < 2) return 0;
    if (ask(program, CL_PROGRAM_SOURCE, length, source = malloc(length), NULL) != CL_SUCCESS) *source = 0;
    ((info_fn) real("clGetDeviceInfo"))(device, CL_DEVICE_NAME, sizeof name, name, NULL);
    ((info_fn) real("clGetDeviceInfo"))(device, CL_DRIVER_VERSION, sizeof version, version, NULL);
    uint64_t found = digest(digest(digest(digest(14695981039346656037u, source), options), name), version);
    free(source);
    return snprintf(path, size, "%s/%016llx-%zu.kept", folder, (unsigned long long) found, length) < (int) size;
}

static cl_program kept_in(const char * path, cl_program asked, cl_device_id device, const char * options) {
    cl_context context = NULL;
    cl_program found = NULL;
    cl_int error;
    FILE * file = fopen(path, "rb");
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    size_t size = (size_t) ftell(file);
    unsigned char * bytes = malloc(size + 1);
    rewind(file);
    if (fread(bytes, 1, size, file) == size) {
        ((program_fn) real("clGetProgramInfo"))(asked, CL_PROGRAM_CONTEXT, sizeof context, &context, NULL);
        found = clCreateProgramWithBinary(context, 1, &device, &size, (const unsigned char **) &bytes, NULL, &error);
        if (found && ((build_fn) real("clBuildProgram"))(found, 1, &device, options, NULL, NULL) != CL_SUCCESS) {
            clReleaseProgram(found);
            found = NULL;
        }
    }
    fclose(file);
    free(bytes);
    return found;
}

static void keep(const char * path, cl_program program) {
    program_fn ask = (program_fn) real("clGetProgramInfo");
    char own[4200];
    size_t size = 0;
    snprintf(own, sizeof own, "%s.%d", path, (int) getpid());
    ask(program, CL_PROGRAM_BINARY_SIZES, sizeof size, &size, NULL);
    unsigned char * bytes = malloc(size + 1);
    FILE * file = size && !ask(program, CL_PROGRAM_BINARIES, sizeof bytes, &bytes, NULL) ? fopen(own, "wb") : NULL;
    if (file) {
        int written = fwrite(bytes, 1, size, file) == size;
        if (fclose(file) || !written || rename(own, path)) remove(own);
    }
    free(bytes);
}

cl_int clBuildProgram(cl_program program, cl_uint n, const cl_device_id * devices, const char * options,
                      void(CL_CALLBACK * notify)(cl_program, void *), void * data) {
    build_fn build = (build_fn) real("clBuildProgram");
    cl_device_id device = NULL;
    char path[4096];
    clGetProgramInfo(program, CL_PROGRAM_DEVICES, sizeof device, &device, NULL);
    if (!options || !device || !is_cpu(device)) return build(program, n, devices, options, notify, data);
    const char * dropped = chosen("CONFORM_OPENCL_DROP", DROPPED);
    const char * added = chosen("CONFORM_OPENCL_ADD", ADDED);
    char * words = strdup(options), * rest = NULL;
    char * used = calloc(strlen(options) + strlen(added) + 3, 1);
    for (char * word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        if (!strstr(dropped, word)) strcat(strcat(used, word), " ");
    strcat(used, added);
    int keeps = !notify && file_of(path, sizeof path, program, device, used);
    cl_program kept = keeps ? kept_in(path, program, device, used) : NULL;
    cl_int error = kept ? CL_SUCCESS : build(program, n, devices, used, notify, data);
    if (kept) {
        swap * new = malloc(sizeof *new);
        *new = (swap) {program, kept, swaps};
        swaps = new;
    } else if (keeps && error == CL_SUCCESS) {
        keep(path, program);
    }
    free(words);
    free(used);
    return error;
}

cl_int clGetProgramInfo(cl_program program, cl_program_info what, size_t size, void * value, size_t * needed) {
    return ((program_fn) real("clGetProgramInfo"))(actual(program), what, size, value, needed);
}

cl_kernel clCreateKernel(cl_program program, const char * name, cl_int * error) {
    return ((cl_kernel(*)(cl_program, const char *, cl_int *)) real("clCreateKernel"))(actual(program), name, error);
}

cl_int clReleaseProgram(cl_program program) {
    cl_int (*release)(cl_program) = (cl_int(*)(cl_program)) real("clReleaseProgram");
    for (swap ** s = &swaps; *s; s = &(*s)->next)
        if ((*s)->asked == program) {
            swap * old = *s;
            *s = old->next;
            release(old->kept);
            free(old);
            break;
        }
    return release(program);
}

/* The kernel that fills local memory in this context; NULL if it does not compile. */
static cl_kernel filler(cl_context context, cl_device_id device) {
    static cl_context known;
    static cl_kernel found;
    const char * source = FILL;
    cl_ulong size = 0;
    if (known == context) return found;
    ((info_fn) real("clGetDeviceInfo"))(device, CL_DEVICE_LOCAL_MEM_SIZE, sizeof size, &size, NULL);
    cl_int error, words = (cl_int) (size / sizeof words);
    cl_program program = clCreateProgramWithSource(context, 1, &source, NULL, &error);
    int fits = program && !((build_fn) real("clBuildProgram"))(program, 1, &device, "", NULL, NULL);
    known = context;
    found = fits ? clCreateKernel(program, "fill", &error) : NULL;
    if (found) {
        clSetKernelArg(found, 0, (size_t) words * sizeof words, NULL);
        clSetKernelArg(found, 1, sizeof words, &words);
    }
    return found;
}

cl_int clEnqueueNDRangeKernel(cl_command_queue queue, cl_kernel kernel, cl_uint n, const size_t * offset,
                              const size_t * items, const size_t * group, cl_uint waits, const cl_event * events,
                              cl_event * event) {
    cl_int (*start)(cl_command_queue, cl_kernel, cl_uint, const size_t *, const size_t *, const size_t *, cl_uint,
                    const cl_event *, cl_event *) = real("clEnqueueNDRangeKernel");
    cl_device_id device = NULL;
    cl_context context = NULL;
    cl_ulong used = 0;
    cl_uint threads = 1;
    clGetCommandQueueInfo(queue, CL_QUEUE_DEVICE, sizeof device, &device, NULL);
    clGetKernelWorkGroupInfo(kernel, device, CL_KERNEL_LOCAL_MEM_SIZE, sizeof used, &used, NULL);
    if (used && is_cpu(device)) {
        clGetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof context, &context, NULL);
        ((info_fn) real("clGetDeviceInfo"))(device, CL_DEVICE_MAX_COMPUTE_UNITS, sizeof threads, &threads, NULL);
        cl_kernel fill = filler(context, device);
        size_t one = 1, groups = (size_t) threads * GROUPS;
        /* the queue is in order */
        cl_int error = fill ? start(queue, fill, 1, NULL, &groups, &one, waits, events, NULL) : CL_INVALID_VALUE;
        if (error != CL_SUCCESS) fprintf(stderr, "opencl.c: local memory was not filled: error %d\n", (int) error);
    }
    return start(queue, kernel, n, offset, items, group, waits, events, event);
}
