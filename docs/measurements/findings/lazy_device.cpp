// Three races in ggml 0.26.0, shown by a device that works as late as it may. Needs ggml alone.
//
// A device has a queue. `eager` performs work as it is queued; `last` when the host waits for it, or another queue that
// has to go on does. ggml-backend.h permits both: graph_compute is "always async if supported", so nothing says when it
// starts. A copy between devices "is performed after all the currently queued operations in backend_src", and
// "backend_dst will wait for the copy to complete before performing other operations": it lies in the source's queue,
// the target waits for it there, and it does not wait for what the target has queued before. An event holds up those
// who wait for it.
#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

static bool last;  // otherwise eager
static ggml_backend_t cpu;
static ggml_backend_reg registry{GGML_BACKEND_API_VERSION, {}, nullptr};

struct Queue {
    std::vector<std::function<void()>> todo;
    size_t done = 0;
    void run(size_t end) {
        while (done < end) {
            todo[done++]();
        }
    }
    void push(std::function<void()> work) {
        todo.push_back(work);
        run(last ? 0 : todo.size());
    }
};

struct Event {  // what a queue holds so far
    Queue * queue;
    size_t end;
    Event(Queue * q = nullptr) : queue(q), end(q ? q->todo.size() : 0) {}
    void finish() const {
        if (queue) {
            queue->run(end);
        }
    }
};

struct Device : ggml_backend_device {
    const char * name;
    ggml_backend_buffer_type memory;  // of the CPU, but not for the host to read
    Device(const char * name);
};

static Queue * queue(ggml_backend_t backend) { return (Queue *) backend->context; }
static Event & event(ggml_backend_event_t e) { return *(Event *) e->context; }
static const char * name_of(ggml_backend_dev_t dev) { return ((Device *) dev)->name; }

static void get_async(ggml_backend_t b, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    queue(b)->push([=, from = (const char *) t->data + offset] { memcpy(data, from, size); });
}

static bool copy_async(ggml_backend_t src, ggml_backend_t dst, const ggml_tensor * from, ggml_tensor * to) {
    // The CPU has no queue. As Vulkan does with pinned memory, the target reads its memory when the copy's turn comes.
    Queue * by = queue(src == cpu ? dst : src);
    by->push([d = to->data, s = from->data, n = ggml_nbytes(from)] { memcpy(d, s, n); });
    queue(dst)->push([copied = Event(by)] { copied.finish(); });
    return true;
}

// Addresses and shapes are those of the call, as in launched kernels: the host may build its next graph in their place.
static ggml_status compute(ggml_backend_t b, ggml_cgraph * graph) {
    const int n = ggml_graph_n_nodes(graph);
    ggml_context * ctx = ggml_init(
        {ggml_tensor_overhead() * n * (1 + GGML_MAX_SRC) + ggml_graph_overhead_custom(n, false), nullptr, true});
    auto copy = [&](const ggml_tensor * t) { return (ggml_tensor *) memcpy(ggml_dup_tensor(ctx, t), t, sizeof(*t)); };
    ggml_cgraph * mine = ggml_new_graph_custom(ctx, n, false);
    for (int i = 0; i < n; i++) {
        ggml_tensor * node = copy(ggml_graph_node(graph, i));
        for (ggml_tensor *& src : node->src) {
            src = src ? copy(src) : nullptr;
        }
        ggml_graph_add_node(mine, node);
    }
    queue(b)->push([=] {
        ggml_backend_graph_compute(cpu, mine);
        ggml_free(ctx);
    });
    return GGML_STATUS_SUCCESS;
}

static ggml_backend_t init(ggml_backend_dev_t dev, const char *) {
    static uint8_t guid[16] = "lazy device";
    ggml_backend_i i{};
    i.get_name = [](ggml_backend_t b) { return name_of(b->device); };
    i.free = [](ggml_backend_t b) { delete queue(b), delete b; };
    i.get_tensor_async = get_async;
    i.cpy_tensor_async = copy_async;
    i.synchronize = [](ggml_backend_t b) { Event(queue(b)).finish(); };
    i.graph_compute = compute;
    i.event_record = [](ggml_backend_t b, ggml_backend_event_t e) { event(e) = Event(queue(b)); };
    i.event_wait = [](ggml_backend_t b, ggml_backend_event_t e) { queue(b)->push([e = event(e)] { e.finish(); }); };
    return new ggml_backend{&guid, i, dev, new Queue};
}

Device::Device(const char * name) : ggml_backend_device{{}, &registry, nullptr}, name(name) {
    memory = {{}, this, nullptr};
    memory.iface.get_name = [](ggml_backend_buffer_type_t t) { return name_of(t->device); };
    memory.iface.get_alignment = ggml_backend_cpu_buffer_type()->iface.get_alignment;
    memory.iface.alloc_buffer = [](ggml_backend_buffer_type_t t, size_t size) {
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
        buffer->buft = t;
        return buffer;
    };
    iface.get_name = name_of;
    iface.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    iface.init_backend = init;
    iface.get_buffer_type = [](ggml_backend_dev_t dev) { return &((Device *) dev)->memory; };
    iface.supports_op = [](ggml_backend_dev_t, const ggml_tensor *) { return true; };
    iface.supports_buft = [](ggml_backend_dev_t dev, ggml_backend_buffer_type_t t) { return t->device == dev; };
    iface.event_new = [](ggml_backend_dev_t dev) { return new ggml_backend_event{dev, new Event}; };
    iface.event_free = [](ggml_backend_dev_t, ggml_backend_event_t e) { delete &event(e), delete e; };
    iface.event_synchronize = [](ggml_backend_dev_t, ggml_backend_event_t e) { event(e).finish(); };
}

// Batches of x * 2 on one backend and * 10 on another, and no wait between them: 20, 40, 60, ...
static std::vector<float> pipeline(std::vector<ggml_backend_t> on, int first, int second, bool copies, int n) {
    std::vector<float> out(n);
    ggml_backend_sched_t sched = ggml_backend_sched_new(on.data(), nullptr, (int) on.size(), 64, copies, false);
    for (int i = -1; i < n; i++) {  // -1 reserves the memory
        ggml_context * ctx = ggml_init({1 << 20, nullptr, true});
        ggml_tensor * x = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
        ggml_tensor * a = ggml_scale(ctx, x, 2);
        ggml_tensor * y = ggml_scale(ctx, a, 10);
        ggml_cgraph * graph = ggml_new_graph_custom(ctx, 64, false);
        ggml_set_input(x);
        ggml_set_output(x);  // so `a` is not computed in its memory
        ggml_set_output(y);
        ggml_build_forward_expand(graph, y);
        ggml_backend_sched_reset(sched);
        ggml_backend_sched_set_tensor_backend(sched, x, cpu);
        ggml_backend_sched_set_tensor_backend(sched, a, on[first]);
        ggml_backend_sched_set_tensor_backend(sched, y, on[second]);
        if (i < 0) {
            ggml_backend_sched_reserve(sched, graph);
        } else {
            const float value = i + 1;
            ggml_backend_sched_alloc_graph(sched, graph);
            ggml_backend_tensor_set(x, &value, 0, sizeof value);
            ggml_backend_sched_graph_compute_async(sched, graph);
            ggml_backend_tensor_get_async(on[second], y, &out[i], 0, sizeof value);
        }
        ggml_free(ctx);
    }
    ggml_backend_sched_synchronize(sched);
    ggml_backend_sched_free(sched);
    return out;
}

// Two layers of 4 -> 2 -> 4 with weights of 1, split as -sm tensor does: ones become 4 * 2 = 8, then 8 * 4 * 2 = 64.
static std::vector<float> tensor_split(Device & a, Device & b) {
    auto split = [](const ggml_tensor * t, void *) {
        ggml_backend_meta_split_state s{};
        s.axis = *t->name == 'U'   ? GGML_BACKEND_SPLIT_AXIS_1
                 : *t->name == 'V' ? GGML_BACKEND_SPLIT_AXIS_0
                                   : GGML_BACKEND_SPLIT_AXIS_MIRRORED;
        s.ne[0] = s.ne[1] = s.nr[0] = s.n_segments = 1;
        return s;
    };
    ggml_backend_dev_t devices[] = {&a, &b};
    ggml_backend_t meta = ggml_backend_dev_init(ggml_backend_meta_device(devices, 2, split, nullptr), nullptr);
    ggml_context * fixed = ggml_init({1 << 20, nullptr, true});
    ggml_context * ctx = ggml_init({1 << 20, nullptr, true});
    ggml_tensor * x = ggml_set_name(ggml_new_tensor_1d(fixed, GGML_TYPE_F32, 4), "x");
    ggml_tensor * u = ggml_set_name(ggml_new_tensor_2d(fixed, GGML_TYPE_F32, 4, 2), "U");
    ggml_tensor * v = ggml_set_name(ggml_new_tensor_2d(fixed, GGML_TYPE_F32, 2, 4), "V");
    ggml_tensor * y = x;
    for (int layer = 0; layer < 2; layer++) {
        y = ggml_mul_mat(ctx, v, ggml_mul_mat(ctx, u, y));  // a part of the sum per device
    }
    y = ggml_scale(ctx, y, 1);  // of the whole sum
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 64, false);
    ggml_build_forward_expand(graph, y);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(fixed, meta);
    const std::vector<float> ones(8, 1);
    for (ggml_tensor * t : {x, u, v}) {
        ggml_backend_tensor_set(t, ones.data(), 0, ggml_nbytes(t));
    }
    ggml_gallocr_t memory = ggml_gallocr_new(ggml_backend_get_default_buffer_type(meta));
    ggml_gallocr_alloc_graph(memory, graph);
    ggml_backend_graph_compute(meta, graph);
    std::vector<float> out(4);
    ggml_backend_tensor_get(y, out.data(), 0, ggml_nbytes(y));
    ggml_gallocr_free(memory);
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(meta);
    ggml_free(ctx);
    ggml_free(fixed);
    return out;
}

static int wrong;

static void show(const char * what, std::vector<float> expected, const std::vector<float> & computed) {
    printf("%-36s %-5s", what, last ? "last" : "eager");
    for (size_t i = 0; i < expected.size(); i++) {
        printf(" %g", computed[i]);
        if (computed[i] != expected[i]) {
            printf(" (not %g)", expected[i]);
            wrong++;
        }
    }
    printf("\n");
}

int main() {
    Device a("A"), b("B");
    cpu = ggml_backend_cpu_init();
    for (bool moment : {false, true}) {
        last = moment;
        ggml_backend_t qa = init(&a, nullptr), qb = init(&b, nullptr);
        // The copy of batch 4 takes the slot of batch 0. B waits for the event of that slot, which B itself recorded;
        // A, whose queue does the copy, waits for nothing.
        show("1 copies of a pipeline, A to B", {20, 40, 60, 80, 100}, pipeline({qa, qb, cpu}, 0, 1, true, 5));
        // A copies its part of layer 1 to where B's ADD of layer 0 has yet to read: A waited for B's copy alone.
        show("2 sum over the devices A and B", {64, 64, 64, 64}, tensor_split(a, b));
        // The CPU starts batch 1, and writes over what the queued copy of batch 0 has yet to read.
        show("3 memory of the CPU, read late by A", {20, 40}, pipeline({qa, cpu}, 1, 0, false, 2));
        ggml_backend_free(qa);
        ggml_backend_free(qb);
    }
    ggml_backend_free(cpu);
    return wrong > 0;
}
