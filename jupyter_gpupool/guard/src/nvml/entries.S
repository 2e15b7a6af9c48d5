/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * NVML's functions (x86-64, System V ABI). The generated list of functions includes this file. Each
 * function jumps to the driver's function of the same name. If the driver is not loaded yet, or if
 * the guard must decide whether the call has to wait, the function first calls facade.c.
 */
    .hidden nvml_enter, nvml_leave, nvml_real, nvml_slow
    .text

.macro NVML_ENTRY name, index
    .globl \name
    .type \name, @function
    .balign 16
\name:
    endbr64
    movl $\index, %r11d
    cmpb $0, nvml_slow(%rip)
    jne nvml_through
    jmp *(nvml_real + 8 * \index)(%rip)
    .size \name, . - \name
.endm

/* This macro does not read nvml_real: only the C function does. */
.macro NVML_WRAP name, index
    .globl \name
    .type \name, @function
    .balign 16
    .hidden wrap_\name
\name:
    endbr64
    jmp wrap_\name
    .size \name, . - \name
.endm

    .type nvml_through, @function
nvml_through:
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
    movl %r11d, %edi
    call nvml_enter
    movl %eax, %r10d
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
    .cfi_remember_state
    cmpl $-1, %r10d
    je 1f
    jg 2f
    /* The call is not counted: jump, as if the caller had called the driver. */
    leave
    .cfi_def_cfa %rsp, 8
    leaq nvml_real(%rip), %r10
    jmp *(%r10, %r11, 8)
1:  /* The call is counted. No function of NVML has more than six arguments. The code copies two
     * more, for a later function that may have eight. */
    .cfi_restore_state
    .cfi_remember_state
    pushq 24(%rbp)
    pushq 16(%rbp)
    leaq nvml_real(%rip), %r10
    call *(%r10, %r11, 8)
    movq %rax, 0(%rsp)
    call nvml_leave
    movq 0(%rsp), %rax
    leave
    .cfi_def_cfa %rsp, 8
    ret
2:  /* Do not call the driver: this is the result of the call. */
    .cfi_restore_state
    movl %r10d, %eax
    leave
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc
    .size nvml_through, . - nvml_through
