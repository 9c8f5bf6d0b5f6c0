/* A kernel of ours that Intel's OpenCL compiler makes wrong: 32 private sums, added up over a work group one by one.
   cc private_sum.c -o private_sum -lOpenCL && ./private_sum
   It has no sub-groups, and a barrier between each write of local memory and each read by another work-item. */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>
static const char * source =
    "kernel void k(global float4 * o, global const float * mask, int n_kv, float slope) {\n"
    "    int tid = get_local_id(0);\n"
    "    float4 acc[32];\n"
    "    for (int i = 0; i < 32; i++) acc[i] = 0;\n"
    "    for (int k = tid; k < n_kv; k += 32) {\n"
    "        float p = k;\n"
    "        p += slope * mask[k];\n"
    "        for (int i = 0; i < 32; i++) acc[i] = mad(p, (float4)(k % 7 + i), acc[i]);\n"
    "    }\n"
    "    local float4 lo[32];\n"
    "    for (int i = 0; i < 32; i++) {\n"
    "        lo[tid] = acc[i];\n"
    "        barrier(CLK_LOCAL_MEM_FENCE);\n"
    "        for (int s = 16; s > 0; s >>= 1) { if (tid < s) lo[tid] += lo[tid + s]; barrier(CLK_LOCAL_MEM_FENCE); }\n"
    "        if (tid == 0) o[i] = lo[0];\n"
    "    }\n"
    "}\n";
int main(void) {
    cl_platform_id p; cl_device_id d; cl_int e;
    char name[256], version[256];
    clGetPlatformIDs(1, &p, NULL); clGetDeviceIDs(p, CL_DEVICE_TYPE_ALL, 1, &d, NULL);
    clGetDeviceInfo(d, CL_DEVICE_NAME, sizeof name, name, NULL); clGetDeviceInfo(d, CL_DRIVER_VERSION, sizeof version, version, NULL);
    printf("%s, %s\n", name, version);
    cl_context c = clCreateContext(NULL, 1, &d, NULL, NULL, &e);
    cl_command_queue q = clCreateCommandQueueWithProperties(c, d, NULL, &e);
    for (int t = 0; t < 2; t++) {
        float o[128] = {0}, mask[32] = {0}, slope = 1;
        int n_kv = 32;
        size_t l = 32;
        cl_program g = clCreateProgramWithSource(c, 1, &source, NULL, &e);
        if (clBuildProgram(g, 1, &d, t ? "-cl-std=CL3.0 -cl-opt-disable" : "-cl-std=CL3.0", NULL, NULL)) return puts("does not compile"), 1;
        cl_kernel k = clCreateKernel(g, "k", &e);
        cl_mem mo = clCreateBuffer(c, CL_MEM_COPY_HOST_PTR, sizeof o, o, &e), mm = clCreateBuffer(c, CL_MEM_COPY_HOST_PTR, sizeof mask, mask, &e);
        clSetKernelArg(k, 0, sizeof mo, &mo); clSetKernelArg(k, 1, sizeof mm, &mm); clSetKernelArg(k, 2, sizeof n_kv, &n_kv); clSetKernelArg(k, 3, sizeof slope, &slope);
        clEnqueueNDRangeKernel(q, k, 1, NULL, &l, &l, 0, NULL, NULL);
        clEnqueueReadBuffer(q, mo, CL_TRUE, 0, sizeof o, o, 0, NULL, NULL);
        printf("%s: %g %g %g %g, expected 1428 1924 2420 2916\n", t ? "-cl-opt-disable" : "optimised", o[0], o[4], o[8], o[12]);
    }
}
