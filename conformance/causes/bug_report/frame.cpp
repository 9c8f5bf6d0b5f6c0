#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

using Bytes = std::vector<uint8_t>;

// A tensor that lives across steps, and where it lies.
struct Persistent {
    ggml_tensor ** tensor;
    const Bytes & data;
    int place;     // index into the device's buffer types, -1: WEIGHTS
    bool must;     // no other buffer type will do
    bool weights;  // usage of its buffer
    bool cache;    // a step writes it
    bool rows;     // only GET_ROWS reads it
};

struct Input {
    ggml_tensor * tensor;
    const Bytes & data;
};

// A value to check, and what it may be off by.
struct Wanted {
    ggml_tensor * tensor;
    const char * label;
    const Bytes & expected;
    double nmse;     // energy of the error / energy of the expected values; 0: equal to the bit
    double element;  // |error| of one element / (|expected| + root mean square of the expected values)
    bool unordered;  // the order within a row does not count
};

struct Step {
    ggml_cgraph * graph;
    std::vector<Input> inputs;
    std::vector<Wanted> wanted;
};

[[maybe_unused]] static Bytes in_hex(const char * text) {
    auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
    Bytes out;
    for (; *text; text += 2) {
        out.push_back((uint8_t) (16 * digit(text[0]) + digit(text[1])));
    }
    return out;
}

//CASE//

// Byte that fills results first: NaN in every float type, so that a node which is skipped cannot be right.
static const uint8_t UNWRITTEN = 0xFF;

// Inputs and nodes of a step, each made in the memory of the step before, as llama.cpp does.
struct Arena {
    std::vector<char> memory;

    ggml_context * context() {
        const size_t size = ggml_tensor_overhead() * TENSORS + ggml_graph_overhead_custom(TENSORS, false);
        memory.resize(size);
        return ggml_init({ size, FRESH ? nullptr : memory.data(), true });
    }

    static void free(ggml_context * ctx) {
        if (!FRESH) {
            ggml_free(ctx);  // where each graph has memory of its own, no later one may get it
        }
    }
};

static Arena arenas[2];

static int untried(const char * why, const char * what) {
    fprintf(stderr, "not tried: %s %s\n", why, what);
    return 2;
}

static std::vector<ggml_backend_buffer_type_t> buffer_types(ggml_backend_dev_t dev) {
    std::vector<ggml_backend_buffer_type_t> found = { ggml_backend_dev_buffer_type(dev) };
    if (ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(dev)) {
        found.push_back(host);
    }
    auto extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * bufts = extra ? extra(dev) : nullptr; bufts && *bufts; bufts++) {
        found.push_back(*bufts);
    }
    return found;
}

static ggml_backend_t start(ggml_backend_dev_t dev) {
    ggml_backend_t backend = ggml_backend_dev_init(dev, nullptr);
    auto set_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_set_n_threads");
    if (backend && set_threads) {
        set_threads(backend, THREADS);
    }
    return backend;
}

// Whether `dev`, or else `cpu`, takes every node; and every node that reads or writes `leaf` while that lies in `buft`.
static bool takes(ggml_backend_dev_t dev, ggml_backend_dev_t cpu, ggml_tensor * leaf, ggml_backend_buffer_type_t buft) {
    const bool other = leaf && buft != ggml_backend_dev_buffer_type(dev);
    ggml_backend_buffer_t empty = leaf ? ggml_backend_buft_alloc_buffer(buft, 0) : nullptr;
    bool all = true;
    for (auto step : STEPS) {
        ggml_context * in = arenas[0].context();
        ggml_context * ctx = arenas[1].context();
        ggml_cgraph * graph = step(in, ctx).graph;
        if (leaf) {
            leaf->buffer = empty;
        }
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            ggml_tensor * node = ggml_graph_node(graph, i);
            bool concerned = !leaf || node->view_src == leaf;
            for (int j = 0; j < GGML_MAX_SRC; j++) {
                concerned = concerned || node->src[j] == leaf;
                all = all && !(other && node->src[j] == leaf && j >= 4);  // the CPU device looks at four sources
            }
            all = all && (!concerned || ggml_backend_dev_supports_op(dev, node) ||
                          (cpu && ggml_backend_dev_supports_op(cpu, node)));
        }
        if (leaf) {
            leaf->buffer = nullptr;
        }
        Arena::free(ctx);
        Arena::free(in);
    }
    if (empty) {
        ggml_backend_buffer_free(empty);
    }
    return all;
}

// Where a persistent tensor lies, by llama.cpp's rules; `cpu` is null without a scheduler.
static ggml_backend_buffer_type_t home(const Persistent & leaf, ggml_backend_dev_t dev, ggml_backend_dev_t cpu) {
    const auto types = buffer_types(dev);
    ggml_backend_buffer_type_t weights = types[0];
    for (auto buft : types) {
        weights = strcmp(ggml_backend_buft_name(buft), WEIGHTS) == 0 ? buft : weights;
    }
    ggml_backend_buffer_type_t buft = leaf.place >= 0 ? types[leaf.place % types.size()] : weights;
    if (leaf.must) {
        return buft;
    }
    if (!cpu) {
        return !leaf.cache && (buft == types[0] || takes(dev, nullptr, *leaf.tensor, buft)) ? buft : types[0];
    }
    buft = leaf.cache ? types[0] : weights;
    const bool stays = leaf.cache && STEPS.size() > 1;
    return stays || (!leaf.rows && takes(dev, nullptr, *leaf.tensor, buft)) ? buft : ggml_backend_dev_buffer_type(cpu);
}

// Its elements without gaps.
static Bytes packed(const ggml_tensor * t) {
    Bytes raw(ggml_nbytes(t));
    ggml_backend_tensor_get(t, raw.data(), 0, raw.size());
    if (ggml_is_contiguous(t)) {
        return raw;
    }
    Bytes out;
    const size_t unit = ggml_type_size(t->type);
    for (int64_t i3 = 0; i3 < t->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < t->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < t->ne[1]; i1++) {
                for (int64_t i0 = 0; i0 < t->ne[0] / ggml_blck_size(t->type); i0++) {
                    const uint8_t * at = raw.data() + i0 * t->nb[0] + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
                    out.insert(out.end(), at, at + unit);
                }
            }
        }
    }
    return out;
}

template <typename T> static std::vector<double> as(const Bytes & data) {
    std::vector<T> values(data.size() / sizeof(T));
    memcpy(values.data(), data.data(), values.size() * sizeof(T));
    return { values.begin(), values.end() };
}

static std::vector<double> numbers(ggml_type type, const Bytes & data) {
    switch (type) {
        case GGML_TYPE_F32: return as<float>(data);
        case GGML_TYPE_F64: return as<double>(data);
        case GGML_TYPE_I8:  return as<int8_t>(data);
        case GGML_TYPE_I16: return as<int16_t>(data);
        case GGML_TYPE_I32: return as<int32_t>(data);
        case GGML_TYPE_I64: return as<int64_t>(data);
        default: break;
    }
    std::vector<float> values(data.size() / ggml_type_size(type) * ggml_blck_size(type));
    ggml_get_type_traits(type)->to_float(data.data(), values.data(), values.size());
    return { values.begin(), values.end() };
}

static bool alike(double a, double b) {
    return a == b || (std::isnan(a) && std::isnan(b));
}

// Whether a value is right; a sentence where it is not.
static bool right(size_t step, const Wanted & wanted) {
    const ggml_tensor * t = wanted.tensor;
    const Bytes bytes = packed(t);
    if (bytes == wanted.expected) {
        return true;
    }
    std::vector<double> want = numbers(t->type, wanted.expected), got = numbers(t->type, bytes);
    if (wanted.unordered) {
        for (size_t row = 0; row < want.size(); row += t->ne[0]) {
            std::sort(want.begin() + row, want.begin() + row + t->ne[0]);
            std::sort(got.begin() + row, got.begin() + row + t->ne[0]);
        }
        if (want == got) {
            return true;
        }
    }
    double energy = 0, error = 0, filled = 0;
    bool special = false;
    for (size_t i = 0; i < want.size(); i++) {
        const bool finite = std::isfinite(want[i]);
        energy += finite ? want[i] * want[i] : 0;
        filled += finite && want[i] != 0;
        if (finite && std::isfinite(got[i])) {
            error += (got[i] - want[i]) * (got[i] - want[i]);
        } else {
            special = special || !alike(want[i], got[i]);
        }
    }
    const double nmse = special || (error > 0 && !(energy > 0)) ? INFINITY : error > 0 ? error / energy : 0;
    const double rms = std::sqrt(energy / std::max(1.0, filled));
    size_t worst = 0;
    double most = -1;
    for (size_t i = 0; i < want.size(); i++) {
        const double off = alike(want[i], got[i]) ? 0 : std::fabs(got[i] - want[i]) / (std::fabs(want[i]) + rms);
        const double seen = std::isnan(off) ? INFINITY : off;
        if (seen > most) {
            most = seen;
            worst = i;
        }
    }
    if (wanted.nmse > 0 && nmse <= wanted.nmse && most <= wanted.element) {
        return true;
    }
    printf("wrong: step %zu, %s, element %zu of %zu: %.9g expected, %.9g found; NMSE %.3g, allowed %.3g\n", step,
           wanted.label, worst, want.size(), want.empty() ? 0 : want[worst], got.empty() ? 0 : got[worst], nmse,
           wanted.nmse);
    return false;
}

struct Run {
    std::vector<ggml_backend_t> backends;
    ggml_gallocr_t gallocr = nullptr;
    ggml_backend_sched_t sched = nullptr;
    ggml_context * none = nullptr;

    // Whether all is computed and right; a sentence where it is not.
    bool step(size_t k) {
        ggml_context * in = arenas[0].context();
        ggml_context * ctx = arenas[1].context();
        Step now = STEPS[k](sched ? ctx : in, ctx);
        ggml_backend_buffer_t inputs = nullptr;
        if (sched) {
            // A graph of equal sizes would be laid out as the last one was, whatever its flags and sources are.
            ggml_backend_sched_reset(sched);
            ggml_backend_sched_reserve(sched, ggml_new_graph_custom(none, 1, false));
        } else {
            inputs = ggml_backend_alloc_ctx_tensors_from_buft(in, ggml_backend_get_default_buffer_type(backends[0]));
        }
        bool good = sched ? ggml_backend_sched_alloc_graph(sched, now.graph)
                          : ggml_gallocr_reserve(gallocr, now.graph) && ggml_gallocr_alloc_graph(gallocr, now.graph);
        if (!good) {
            printf("wrong: step %zu: no memory for its graph\n", k);
        }
        good = good && compute(k, now);
        for (const Wanted & wanted : now.wanted) {
            good = good && right(k, wanted);
        }
        ggml_backend_buffer_free(inputs);
        Arena::free(ctx);
        Arena::free(in);
        return good;
    }

    bool compute(size_t k, const Step & now) {
        for (int i = 0; i < ggml_graph_n_nodes(now.graph); i++) {
            ggml_tensor * node = ggml_graph_node(now.graph, i);
            if (!node->view_src && node->buffer && ggml_nbytes(node)) {
                ggml_backend_tensor_memset(node, UNWRITTEN, 0, ggml_nbytes(node));
            }
        }
        for (const Input & input : now.inputs) {
            if (input.tensor->buffer) {
                ggml_backend_tensor_set(input.tensor, input.data.data(), 0, input.data.size());
            }
        }
        const ggml_status status = sched ? ggml_backend_sched_graph_compute(sched, now.graph)
                                         : ggml_backend_graph_compute(backends[0], now.graph);
        if (status != GGML_STATUS_SUCCESS) {
            printf("wrong: step %zu: computing its graph returned %s\n", k, ggml_status_to_string(status));
        }
        return status == GGML_STATUS_SUCCESS;
    }
};

int main(int argc, char ** argv) {
    setvbuf(stdout, nullptr, _IONBF, 0);  // an abort must not lose what was said
    if (argc > 2) {
        ggml_backend_load_all_from_path(argv[2]);
    } else if (!ggml_backend_dev_count()) {
        ggml_backend_load_all();
    }
    const char * name = argc > 1 ? argv[1] : DEVICE;
    ggml_backend_dev_t dev = ggml_backend_dev_by_name(name);
    ggml_backend_dev_t cpu = SCHED ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : nullptr;
    if (!dev || (SCHED && !cpu)) {
        return untried("this ggml has no device", dev ? "CPU" : name);
    }

    ggml_context * ctx_kept = ggml_init({ ggml_tensor_overhead() * TENSORS, nullptr, true });
    keep(ctx_kept);
    if (!takes(dev, cpu, nullptr, nullptr)) {
        return untried("supports_op refuses a node on device", name);
    }
    Run run;
    run.backends.push_back(start(dev));
    if (cpu && cpu != dev) {
        run.backends.push_back(start(cpu));
    }
    for (ggml_backend_t backend : run.backends) {
        if (!backend) {
            return untried("a device cannot be initialised beside or as", name);
        }
    }

    std::vector<ggml_backend_buffer_type_t> homes;
    for (const Persistent & leaf : PERSISTENT) {
        homes.push_back(home(leaf, dev, cpu));
    }
    for (size_t i = 0; i < PERSISTENT.size(); i++) {
        ggml_tensor * t = *PERSISTENT[i].tensor;
        const size_t size = ggml_backend_buft_get_alloc_size(homes[i], t);
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(homes[i], std::max(size, (size_t) 1));
        if (!buffer) {
            return untried("no memory for a weight or cache on", name);
        }
        ggml_backend_buffer_set_usage(
            buffer, PERSISTENT[i].weights ? GGML_BACKEND_BUFFER_USAGE_WEIGHTS : GGML_BACKEND_BUFFER_USAGE_ANY);
        ggml_backend_tensor_alloc(buffer, t, ggml_backend_buffer_get_base(buffer));
        ggml_backend_tensor_set(t, PERSISTENT[i].data.data(), 0, PERSISTENT[i].data.size());
    }

    if (SCHED) {
        std::vector<ggml_backend_buffer_type_t> own = { ggml_backend_dev_buffer_type(dev) };
        if (cpu != dev) {
            ggml_backend_buffer_type_t host = ggml_backend_dev_host_buffer_type(dev);
            own.push_back(host ? host : ggml_backend_dev_buffer_type(cpu));
        }
        run.none = ggml_init({ ggml_graph_overhead_custom(1, false) * (STEPS.size() + 1), nullptr, true });
        run.sched = ggml_backend_sched_new(run.backends.data(), own.data(), (int) own.size(),
                                           std::max((size_t) 1024, 8 * TENSORS), false, true);
    } else {
        run.gallocr = ggml_gallocr_new(ggml_backend_dev_buffer_type(dev));
    }
    for (size_t k = 0; k < STEPS.size(); k++) {
        if (!run.step(k)) {
            return 1;
        }
    }
    printf("right: %zu step(s) on %s\n", STEPS.size(), name);
    return 0;
}
