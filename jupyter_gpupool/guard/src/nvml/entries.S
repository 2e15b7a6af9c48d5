/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * NVML's functions (x86-64, System V ABI), for the generated list of them. Until the first call
 * each jump leads to ENTRY's lazy half, which loads the driver's library and jumps again.
 */
    .hidden nvml_load, nvml_real
    .text

.macro NVML_ENTRY name, index
    .globl \name
    .type \name, @function
    .balign 16
\name:
    endbr64
    jmp *(nvml_real + 8 * \index)(%rip)
    .size \name, . - \name
.Llazy\index:
    endbr64
    movl $\index, %r11d
    jmp nvml_lazy
.endm

/* Only the C function uses its place in nvml_real. */
.macro NVML_WRAP name, index
    .globl \name
    .type \name, @function
    .balign 16
    .hidden wrap_\name
\name:
.Llazy\index:
    endbr64
    jmp wrap_\name
    .size \name, . - \name
.endm

    .type nvml_lazy, @function
nvml_lazy:
    .cfi_startproc
    pushq %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    movq %rsp, %rbp
    .cfi_def_cfa_register %rbp
    subq $192, %rsp
    andq $-16, %rsp
    movq %rdi, 0(%rsp)
    movq %rsi, 8(%rsp)
    movq %rdx, 16(%rsp)
    movq %rcx, 24(%rsp)
    movq %r8, 32(%rsp)
    movq %r9, 40(%rsp)
    movq %rax, 48(%rsp)
    movq %r11, 56(%rsp)
    movups %xmm0, 64(%rsp)
    movups %xmm1, 80(%rsp)
    movups %xmm2, 96(%rsp)
    movups %xmm3, 112(%rsp)
    movups %xmm4, 128(%rsp)
    movups %xmm5, 144(%rsp)
    movups %xmm6, 160(%rsp)
    movups %xmm7, 176(%rsp)
    call nvml_load
    movq 0(%rsp), %rdi
    movq 8(%rsp), %rsi
    movq 16(%rsp), %rdx
    movq 24(%rsp), %rcx
    movq 32(%rsp), %r8
    movq 40(%rsp), %r9
    movq 48(%rsp), %rax
    movq 56(%rsp), %r11
    movups 64(%rsp), %xmm0
    movups 80(%rsp), %xmm1
    movups 96(%rsp), %xmm2
    movups 112(%rsp), %xmm3
    movups 128(%rsp), %xmm4
    movups 144(%rsp), %xmm5
    movups 160(%rsp), %xmm6
    movups 176(%rsp), %xmm7
    leave
    .cfi_def_cfa %rsp, 8
    leaq nvml_real(%rip), %r10
    jmp *(%r10, %r11, 8)
    .cfi_endproc
    .size nvml_lazy, . - nvml_lazy
