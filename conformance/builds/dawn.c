/* libwebgpu_dawn.so, whose functions are those of Dawn in dawn.node, the add-on for Node.js of npm's package webgpu.

   The add-on exports none of WebGPU's functions, so dawn.inc has their places in it, relative to ANCHOR:
   F(name, index, offset) for each function of WebGPU, NODE(name) for each that the add-on expects of Node.js, and the
   places of dawnProcSetProcs and dawn::native::GetProcs, which choose Dawn's own implementation. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__x86_64__)
#error "x86-64 expected: write the jump of another processor here"
#endif

#define NODE(name)
#define F(name, index, offset) offset,
static const long offsets[] = {
#include "dawn.inc"
};
#undef F

/* Places of the functions, for the jumps below. */
void * conform_dawn[sizeof offsets / sizeof *offsets];
#define F(name, index, offset)                                                                     \
    __asm__(".globl " #name "\n.type " #name ",@function\n" #name ":\n"                           \
            "movq conform_dawn@GOTPCREL(%rip), %r11\njmp *(8*" #index ")(%r11)\n");
#include "dawn.inc"
#undef F
#undef NODE

#define F(name, index, offset)
#define NODE(name) void name(void) { abort(); }
#include "dawn.inc"

__attribute__((constructor)) static void load(void) {
    Dl_info self;
    char path[4096];
    if (!dladdr((void *) load, &self) || !strrchr(self.dli_fname, '/')) return;
    /* the add-on looks for the functions of Node.js among global ones */
    dlopen(self.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
    int above = (int) (strrchr(self.dli_fname, '/') - self.dli_fname);
    snprintf(path, sizeof path, "%.*s/dawn.node", above, self.dli_fname);
    void * addon = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    char * anchor = addon ? dlsym(addon, ANCHOR) : NULL;
    if (!anchor) fprintf(stderr, "dawn.c: dawn.node with " ANCHOR " expected: %s\n", dlerror()), abort();
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) conform_dawn[i] = anchor + offsets[i];
    const void * (*get)(void) = (const void * (*) (void) )(anchor + GET_PROCS);
    ((void (*)(const void *)) (anchor + SET_PROCS))(get());
}
