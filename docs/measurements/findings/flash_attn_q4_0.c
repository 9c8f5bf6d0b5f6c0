/* Runs flash_attn_f32_q4_0_q1 of ggml-opencl alone, one token of 8 heads over Q4_0, and compares it with doubles.
   cc flash_attn_q4_0.c -o flash_attn_q4_0 -lOpenCL -lm, then
   ./flash_attn_q4_0 flash_attn_f32_q4_0.cl "-cl-std=CL3.0 -DDK=192 -DDV=128 -DBLOCK_M=16 -DBLOCK_N=16 -DFA_SG=32",
   and again with -cl-opt-disable added to the options. A third argument is the number of KV cells. */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef DK
#define DK 192
#define DV 128
#endif
#define H 8
static float half_(unsigned short h) { _Float16 f; memcpy(&f, &h, 2); return (float) f; }
static float value(const unsigned char * row, int i) { const unsigned char * b = row + i / 32 * 18; unsigned short d; memcpy(&d, b, 2); int j = i % 32;
    return half_(d) * ((j < 16 ? b[2 + j] & 15 : b[2 + j - 16] >> 4) - 8); }
int main(int n, char ** a) {
    int kv = n > 3 ? atoi(a[3]) : 32;
    FILE * f = fopen(a[1], "r"); static char text[200000]; size_t len = fread(text, 1, sizeof text - 1, f); text[len] = 0;
    char * cut = strstr(text, "#ifdef cl_intel_subgroups"); if (cut) *cut = 0;
    const char * source = text;
    cl_platform_id p; cl_device_id d; cl_int e;
    clGetPlatformIDs(1, &p, NULL); clGetDeviceIDs(p, CL_DEVICE_TYPE_ALL, 1, &d, NULL);
    cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    cl_command_queue q = clCreateCommandQueueWithProperties(c, d, NULL, &e);
    cl_program g = clCreateProgramWithSource(c, 1, &source, NULL, &e);
    if (clBuildProgram(g, 1, &d, a[2], NULL, NULL)) { static char log[9999]; clGetProgramBuildInfo(g, d, CL_PROGRAM_BUILD_LOG, sizeof log, log, NULL); puts(log); return 1; }
    cl_kernel k = clCreateKernel(g, "flash_attn_f32_q4_0_q1", &e);
    static float Q[DK * H], O[DV * H]; static unsigned char K[4096 * DK / 32 * 18], V[4096 * DV / 32 * 18]; static unsigned short M[4096];
    for (int i = 0; i < DK * H; i++) Q[i] = rand() / (float) RAND_MAX * 2 - 1;
    for (int i = 0; i < kv * DK / 32; i++) for (int j = 0; j < 18; j++) K[i * 18 + j] = j == 1 ? 0x2c : rand();
    for (int i = 0; i < kv * DV / 32; i++) for (int j = 0; j < 18; j++) V[i * 18 + j] = j == 1 ? 0x2c : rand();
    cl_mem mq = clCreateBuffer(c, CL_MEM_COPY_HOST_PTR, sizeof Q, Q, &e), mk = clCreateBuffer(c, CL_MEM_COPY_HOST_PTR, sizeof K, K, &e), mv = clCreateBuffer(c, CL_MEM_COPY_HOST_PTR, sizeof V, V, &e),
           mo = clCreateBuffer(c, CL_MEM_COPY_HOST_PTR, sizeof O, O, &e), mm = clCreateBuffer(c, CL_MEM_COPY_HOST_PTR, sizeof M, M, &e), none = NULL;
    cl_ulong z = 0, qn[3] = {DK * 4 * H, DK * 4, DK * 4 * H}, kn = DK / 32 * 18, kall = kn * kv, vn = DV / 32 * 18, vall = vn * kv, on = DV * 4, oall = on * H, mn = 2 * kv;
    float scale = 1 / sqrtf(DK), zero = 0, one = 1; int i1 = 1, i0 = 0, h = H;
    int i = 0;
#define A(x) if ((e = clSetKernelArg(k, i++, sizeof x, &x))) printf("argument %d: %d\n", i - 1, e)
    A(mq); A(z); A(mk); A(z); A(mv); A(z); A(mo); A(z); A(scale); A(i1); A(kv); A(i0); A(h); A(qn[0]); A(qn[1]); A(qn[2]);
    A(kn); A(kall); A(kall); A(vn); A(vall); A(vall); A(on); A(oall); A(oall); A(zero); A(one); A(one); A(h); A(zero); A(i1);
    A(mm); A(z); A(mn); A(mn); A(mn); A(i1); A(i1); A(none); A(z);
    size_t l[2] = {32, 1}, w[2] = {32, H};
    e = clEnqueueNDRangeKernel(q, k, 2, NULL, w, l, 0, NULL, NULL); if (e) printf("start: %d\n", e);
    e = clEnqueueReadBuffer(q, mo, CL_TRUE, 0, sizeof O, O, 0, NULL, NULL); if (e) printf("read: %d\n", e);
    double worst = 0, size = 0, sq = 0, se = 0;
    for (int t = 0; t < H; t++) {
        double s[4096], top = -1e30, sum = 0;
        for (int x = 0; x < kv; x++) { s[x] = 0; for (int y = 0; y < DK; y++) s[x] += (double) Q[t * DK + y] * value(K + x * kn, y); s[x] *= scale; if (s[x] > top) top = s[x]; }
        for (int x = 0; x < kv; x++) sum += s[x] = exp(s[x] - top);
        for (int y = 0; y < DV; y++) { double o = 0; for (int x = 0; x < kv; x++) o += s[x] / sum * value(V + x * vn, y); double r = fabs(o - O[t * DV + y]); if (r > worst) worst = r; if (fabs(o) > size) size = fabs(o); sq += o * o; se += r * r; }
    }
    printf("%s: largest error %g of %g, NMSE %g; first %g %g %g %g\n", a[2], worst, size, se / sq, O[0], O[1], O[2], O[3]);
}
