// A block of IQ2_XS whose first group is entry 1 of its grid, 0x080808080808082b: first 0x2b = 43, then seven times 8.
// to_float gives 5.375 as element 0 on little-endian processors, and as element 7 on s390x.
//   cc -I ggml/include iq_grid.c -L build/bin -lggml-base -o iq_grid
#include "ggml.h"
#include <stdio.h>
#include <string.h>

int main(void) {
    float values[256];
    unsigned short d = 0x3c00, index = 1;  // 1.0 in F16, in the processor's own order as quantize_row writes them
    unsigned char block[74] = {0};
    memcpy(block, &d, 2);
    memcpy(block + 2, &index, 2);
    ggml_get_type_traits(GGML_TYPE_IQ2_XS)->to_float(block, values, 256);
    for (int i = 0; i < 8; i++) {
        printf("%g ", values[i]);
    }
    printf("\n");
    return values[0] == 5.375f ? 0 : 1;
}
