// Presents a device of this library as the device MUTANT, as test-backend-ops loads one by GGML_BACKEND_PATH. It tests it
// against the CPU of its own, clean ggml.
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <cstdlib>
#include <cstring>

static ggml_backend_device device;
static ggml_backend_reg    registry;

static const char * name_of_device(ggml_backend_dev_t) {
    return "MUTANT";
}

static enum ggml_backend_dev_type type_of_device(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static const char * name_of_registry(ggml_backend_reg_t) {
    return "MUTANT";
}

static size_t count(ggml_backend_reg_t) {
    return 1;
}

static ggml_backend_dev_t first(ggml_backend_reg_t, size_t) {
    return &device;
}

extern "C" ggml_backend_reg_t ggml_backend_init(void) {
    const char *       name   = getenv("MUTANT_DEVICE");
    ggml_backend_dev_t wanted = ggml_backend_dev_by_name(name ? name : "CPU");
    if (!wanted) {
        return nullptr;
    }
    device                         = *wanted;
    device.iface.get_name          = name_of_device;
    device.iface.get_type          = type_of_device;
    registry                       = *wanted->reg;
    registry.iface.get_name        = name_of_registry;
    registry.iface.get_device_count = count;
    registry.iface.get_device      = first;
    device.reg                     = &registry;
    return &registry;
}
