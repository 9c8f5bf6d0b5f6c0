/* Eight F16 numbers are loaded and stored as ggml-cpu does on POWER9 (GGML_F16_VEC_LOAD, GGML_F16_VEC_STORE).
   cc -mcpu=power9 -O2 f16_pack.c -o f16_pack */
#include <altivec.h>
#include <stdio.h>

int main(void) {
    unsigned short x[8] = {0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700, 0x4800}, y[8];
    vector float r[2] = {vec_extract_fp32_from_shortl(vec_xl(0, x)), vec_extract_fp32_from_shorth(vec_xl(0, x))};
    vec_xst(vec_pack_to_short_fp32(r[1], r[0]), 0, y);
    for (int i = 0; i < 8; i++) printf("%04x%c", y[i], i < 7 ? ' ' : '\n');
}
