/* Sums 1 over a sub-group in work groups of 32, without and with a required size of sub-groups: a sum of 32 is what
   ggml-opencl's softmax_*.cl takes for granted. cc sub_group.c -o sub_group -lOpenCL && ./sub_group */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>

static const char * source =
    "kernel void plain(global float * o) { o[get_local_id(0)] = sub_group_reduce_add(1.0f); }\n"
    "__attribute__((intel_reqd_sub_group_size(32))) kernel void required(global float * o) {"
    "    o[get_local_id(0)] = sub_group_reduce_add(1.0f); }\n";

int main(void) {
    cl_platform_id platform;
    cl_device_id device;
    char name[256];
    cl_int error;
    size_t local = 32, size = 0;
    float sum[32];
    const char * kernels[] = {"plain", "required"};
    clGetPlatformIDs(1, &platform, NULL);
    clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
    clGetDeviceInfo(device, CL_DEVICE_NAME, sizeof name, name, NULL);
    cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, &error);
    cl_command_queue queue = clCreateCommandQueueWithProperties(context, device, NULL, &error);
    cl_program program = clCreateProgramWithSource(context, 1, &source, NULL, &error);
    if (clBuildProgram(program, 1, &device, "-cl-std=CL3.0", NULL, NULL) != CL_SUCCESS) return 1;
    cl_mem memory = clCreateBuffer(context, CL_MEM_READ_WRITE, sizeof sum, NULL, &error);
    for (int i = 0; i < 2; i++) {
        cl_kernel kernel = clCreateKernel(program, kernels[i], &error);
        clSetKernelArg(kernel, 0, sizeof memory, &memory);
        clGetKernelSubGroupInfo(kernel, device, CL_KERNEL_MAX_SUB_GROUP_SIZE_FOR_NDRANGE, sizeof local, &local,
                                sizeof size, &size, NULL);
        clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &local, &local, 0, NULL, NULL);
        clEnqueueReadBuffer(queue, memory, CL_TRUE, 0, sizeof sum, sum, 0, NULL, NULL);
        printf("%s, %s: sub-groups of %zu, sum %g\n", name, kernels[i], size, sum[0]);
    }
}
