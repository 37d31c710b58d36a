// Wide registers where the machine has them.
#ifndef TF_BASIS_CORE_WIDE_H_
#define TF_BASIS_CORE_WIDE_H_

// Compiles a function with all it calls twice, for the registers of AVX2 too;
// the machine that runs it decides. The bits are the same: see columns.h.
// (Sanitizers do not bear such functions.)
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && \
    !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) &&          \
    !defined(__SANITIZE_THREAD__)
#define TF_BASIS_WIDE __attribute__((target_clones("avx2", "default"), flatten))
#else
#define TF_BASIS_WIDE
#endif

#endif  // TF_BASIS_CORE_WIDE_H_
