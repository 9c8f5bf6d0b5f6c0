/* A graph whose SET_ROWS writes, in place, into the result of FILL; OpenCL takes FILL of F32 and refuses that of F16.
   cc set_rows_split.c -o set_rows_split -lggml -lggml-base && ./set_rows_split; a device as an argument, GPUOpenCL otherwise */
#include <ggml-backend.h>
#include <ggml-alloc.h>
#include <ggml.h>
#include <stdio.h>
int main(int n, char ** a) {
    ggml_backend_t gpu = ggml_backend_init_by_name(n > 1 ? a[1] : "GPUOpenCL", NULL), cpu = ggml_backend_init_by_name("CPU", NULL);
    ggml_backend_t both[] = {gpu, cpu};
    for (int t = 0; t < 2; t++) {
        enum ggml_type type = t ? GGML_TYPE_F16 : GGML_TYPE_F32;
        struct ggml_init_params p = {1 << 20, NULL, true};
        struct ggml_context * weights = ggml_init(p), * c = ggml_init(p);
        struct ggml_tensor * w = ggml_new_tensor_2d(weights, GGML_TYPE_F32, 32, 4);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(weights, gpu);
        ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_buffer_clear(buffer, 0);
        struct ggml_tensor * x = ggml_new_tensor_2d(c, GGML_TYPE_F32, 32, 2), * m = ggml_new_tensor_2d(c, type, 4, 8), * ids = ggml_new_tensor_1d(c, GGML_TYPE_I64, 2);
        ggml_set_input(x); ggml_set_input(m); ggml_set_input(ids);
        struct ggml_tensor * rows = ggml_mul_mat(c, w, x);
        struct ggml_tensor * f = ggml_fill(c, m, 1.0f);
        struct ggml_tensor * s = ggml_set_rows(c, f, rows, ids);
        struct ggml_tensor * out = ggml_mul_mat(c, w, ggml_cont(c, ggml_reshape_2d(c, ggml_cast(c, s, GGML_TYPE_F32), 32, 1)));
        ggml_set_output(out);
        struct ggml_cgraph * g = ggml_new_graph(c);
        ggml_build_forward_expand(g, out);
        ggml_backend_sched_t sched = ggml_backend_sched_new(both, NULL, 2, 64, false, true);
        ggml_backend_sched_alloc_graph(sched, g);
        printf("%s: FILL on %s, its result in %s; SET_ROWS on %s, its result in %s\n", ggml_type_name(type), ggml_backend_name(ggml_backend_sched_get_tensor_backend(sched, f)), f->buffer ? ggml_backend_buffer_name(f->buffer) : "none", ggml_backend_name(ggml_backend_sched_get_tensor_backend(sched, s)), s->buffer ? ggml_backend_buffer_name(s->buffer) : "none");
        fflush(stdout);
        long long i[2] = {3, 5}; ggml_backend_tensor_set(ids, i, 0, sizeof i);
        printf("status %d\n", ggml_backend_sched_graph_compute(sched, g)); fflush(stdout);
    }
}
