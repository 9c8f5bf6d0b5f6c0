/* Sets the second half of a tensor through a view, as llama.cpp does when it restores the state of a sequence.
   cc set_view.c -o set_view -lggml -lggml-base && ./set_view; a device's name as an argument, GPUOpenCL otherwise */
#include <ggml-backend.h>
#include <ggml.h>
#include <stdio.h>
int main(int n, char ** a) {
    const char * name = n > 1 ? a[1] : "GPUOpenCL";
    enum ggml_type types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16};
    ggml_backend_t backend = ggml_backend_init_by_name(name, NULL);
    if (!backend) return printf("no device %s\n", name), 2;
    int wrong = 0;
    for (int t = 0; t < 3; t++) {
        struct ggml_init_params p = {4096, NULL, true};
        struct ggml_context * c = ggml_init(p);
        struct ggml_tensor * whole = ggml_new_tensor_1d(c, types[t], 8);
        size_t half = ggml_nbytes(whole) / 2;
        struct ggml_tensor * second = ggml_view_1d(c, whole, 4, half);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(c, backend);
        unsigned char bytes[32] = {0}, found[32];
        ggml_backend_tensor_set(whole, bytes, 0, 2 * half);
        for (size_t i = 0; i < half; i++) bytes[i] = 0x3c;
        ggml_backend_tensor_set(second, bytes, 0, half);
        ggml_backend_tensor_get(whole, found, 0, 2 * half);
        wrong += found[0] != 0 || found[half] != 0x3c;
        printf("%s %s: first half %02x, second half %02x; 00 and 3c expected\n", name, ggml_type_name(types[t]), found[0], found[half]);
        ggml_backend_buffer_free(buffer);
        ggml_free(c);
    }
    return wrong != 0;
}
