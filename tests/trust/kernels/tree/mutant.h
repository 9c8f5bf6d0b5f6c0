// Included by the compiler before each source of the mutated ggml.
#ifndef MUTANT_H
#define MUTANT_H
#ifdef __cplusplus
extern "C" {
#endif
extern int mutant_active;            // number of the active mutant, from MUTANT; 0 for none
extern unsigned char * mutant_seen;  // a byte per mutant, the mapped file MUTANT_SEEN; null without
#ifdef __cplusplus
}
#endif
static inline int mutant(int number) {
    if (mutant_seen) {
        mutant_seen[number] = 1;
    }
    return mutant_active == number;
}
#endif
