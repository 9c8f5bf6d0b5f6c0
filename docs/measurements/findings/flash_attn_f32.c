/* Runs flash_attn_f32 and flash_attn_f32_q1 of ggml-opencl alone, 4 heads, and compares them with doubles.
   cc flash_attn_f32.c -o flash_attn_f32 -lOpenCL -lm && ./flash_attn_f32 flash_attn_f32.cl
   1. After a kernel that fills local memory: a tile has 32 rows of K and V, those behind the last cell are not written.
   2. Work groups of 16 with the barrier between two tiles (it is compiled if they are larger than FA_SG) and without.
   3. One token that does not see the last 8 cells, which hold zeros or NaN. */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#define H 4
#define CELLS 96
static const char * filling =
    "kernel void fill(global float * o, float x) { local float l[8192]; for (int i = get_local_id(0); i < 8192; i += 64) l[i] = x;"
    "    barrier(CLK_LOCAL_MEM_FENCE); o[get_global_id(0)] = l[(get_global_id(0) * 7) % 8192]; }";
static cl_context c;
static cl_device_id d;
static cl_command_queue q;
static const char * more = "";
static char text[100000];
static cl_kernel built(const char * source, const char * options, const char * name) {
    cl_int e;
    cl_program g = clCreateProgramWithSource(c, 1, &source, NULL, &e);
    if (clBuildProgram(g, 1, &d, options, NULL, NULL)) { static char log[9999]; clGetProgramBuildInfo(g, d, CL_PROGRAM_BUILD_LOG, sizeof log, log, NULL); puts(log); exit(1); }
    return clCreateKernel(g, name, &e);
}
static cl_mem memory(size_t size, void * from) { cl_int e; return clCreateBuffer(c, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, size, from, &e); }
static void run(int dk, int dv, int bm, int bn, int sg, int n, int kv, int hidden, float fill) {
    static float Q[256 * 65 * H], K[256 * CELLS * H], V[256 * CELLS * H], O[256 * 65 * H], F[4096]; static unsigned short M[CELLS];
    char options[256]; cl_int e;
    snprintf(options, sizeof options, "-cl-std=CL3.0 -DDK=%d -DDV=%d -DBLOCK_M=%d -DBLOCK_N=%d -DFA_SG=%d %s", dk, dv, bm, bn, sg, more);
    for (int i = 0; i < dk * n * H; i++) Q[i] = rand() / (float) RAND_MAX * 2 - 1;
    for (int h = 0; h < H; h++) for (int x = 0; x < kv; x++) {
        for (int y = 0; y < dk; y++) K[(h * kv + x) * dk + y] = x >= kv - hidden ? fill : rand() / (float) RAND_MAX * 2 - 1;
        for (int y = 0; y < dv; y++) V[(h * kv + x) * dv + y] = x >= kv - hidden ? fill : rand() / (float) RAND_MAX * 2 - 1;
        M[x] = x >= kv - hidden ? 0xfc00 : 0;
    }
    cl_mem mq = memory(sizeof Q, Q), mk = memory(sizeof K, K), mv = memory(sizeof V, V), mo = memory(sizeof O, O), mm = memory(sizeof M, M), mf = memory(sizeof F, F), none = NULL;
    cl_kernel k = built(text, options, n == 1 ? "flash_attn_f32_q1" : "flash_attn_f32"), kf = built(filling, "", "fill");
    if (!hidden) {
        size_t l = 64, w = 4096;
        clSetKernelArg(kf, 0, sizeof mf, &mf); clSetKernelArg(kf, 1, sizeof fill, &fill);
        e = clEnqueueNDRangeKernel(q, kf, 1, NULL, &w, &l, 0, NULL, NULL); if (e) printf("fill: %d\n", e);
        clFinish(q);
    }
    cl_ulong z = 0, q1 = dk * 4, q2 = q1 * n, q3 = q2 * H, k2 = q1 * kv, k3 = k2 * H, v1 = dv * 4, v2 = v1 * kv, v3 = v2 * H, o2 = v1 * H, o3 = o2 * n;
    float scale = 1 / sqrtf(dk), zero = 0, one = 1; int i0 = 0, i1 = 1, h = H, i = 0;
#define A(v) if ((e = clSetKernelArg(k, i++, sizeof v, &v))) printf("argument %d: %d\n", i - 1, e)
    A(mq); A(z); A(mk); A(z); A(mv); A(z); A(mo); A(z); A(scale); A(n); A(kv); A(i0); A(h);
    A(q1); A(q2); A(q3); A(q1); A(k2); A(k3); A(v1); A(v2); A(v3); A(v1); A(o2); A(o3); A(zero); A(one); A(one); A(h); A(zero); A(h);
    if (hidden) { A(mm); } else { A(none); }
    A(z); A(z); A(z); A(z); A(i1); A(i1); A(none); A(z);
    size_t l[2] = {n == 1 ? sg : bm, 1}, w[2] = {n == 1 ? (size_t) sg : (n + bm - 1) / bm * (size_t) bm, H};
    e = clEnqueueNDRangeKernel(q, k, 2, NULL, w, l, 0, NULL, NULL); if (e) printf("start: %d\n", e);
    clEnqueueReadBuffer(q, mo, CL_TRUE, 0, sizeof O, O, 0, NULL, NULL);
    double sq = 0, se = 0;
    for (int t = 0; t < H; t++) for (int r = 0; r < n; r++) {
        double s[CELLS], top = -1e30, sum = 0;
        for (int x = 0; x < kv - hidden; x++) { s[x] = 0; for (int y = 0; y < dk; y++) s[x] += (double) Q[(t * n + r) * dk + y] * K[(t * kv + x) * dk + y]; s[x] *= scale; if (s[x] > top) top = s[x]; }
        for (int x = 0; x < kv - hidden; x++) sum += s[x] = exp(s[x] - top);
        for (int y = 0; y < dv; y++) { double o = 0; for (int x = 0; x < kv - hidden; x++) o += s[x] / sum * V[(t * kv + x) * dv + y]; double diff = o - O[(r * H + t) * dv + y]; sq += o * o; se += diff * diff; }
    }
    printf("%s: %d tokens, %d cells, %d hidden, %s %g: NMSE %.2g\n", options + 14, n, kv, hidden, hidden ? "which hold" : "local memory of", fill, se / sq);
}
int main(int n, char ** a) {
    FILE * f = fopen(n > 1 ? a[1] : "flash_attn_f32.cl", "r"); text[fread(text, 1, sizeof text - 1, f)] = 0;
    if (n > 2) more = a[2];
    cl_platform_id p; cl_int e; char name[256];
    clGetPlatformIDs(1, &p, NULL); clGetDeviceIDs(p, CL_DEVICE_TYPE_ALL, 1, &d, NULL);
    clGetDeviceInfo(d, CL_DEVICE_NAME, sizeof name, name, NULL); puts(name);
    c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    q = clCreateCommandQueueWithProperties(c, d, NULL, &e);
    for (int kv = 16; kv <= 40; kv += 8) for (int t = 0; t < 3; t++) run(80, 80, 64, 32, 32, 19, kv, 0, (float[]) {0, 1, NAN}[t]);
    for (int kv = 16; kv <= 96; kv += 80) for (int sg = 32; sg >= 8; sg -= 24) { run(192, 128, 16, 16, sg, 65, kv, 0, 0); run(256, 256, 16, 16, sg, 65, kv, 0, 0); }
    for (int t = 0; t < 2; t++) run(64, 64, 64, 32, 32, 1, 40, 8, (float[]) {0, NAN}[t]);
}
