/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The entry points, one macro for each kind (x86-64, System V ABI). The generated list of entry
 * points includes this file. See entries.txt for the meaning of the kinds.
 *
 * While the gate is open, a gated call tests one byte. It stores nothing, and of the caller's
 * registers it changes only r11, in which no calling convention passes a value.
 */

/* Before the first call both pointers point to a byte that is not zero. So the entry points do not
 * use guard_real, which is still empty, and take the slow path, which loads the driver. */
    .hidden guard_gate, guard_free_gate, guard_unloaded, guard_real
    .hidden guard_slow_gate, guard_slow_free, guard_slow_never, guard_slow_refuse
    .hidden guard_enter_entry, guard_enter_back, guard_slow_note, guard_leave

    .text

.macro BEGIN name, index
    .globl \name
    .type \name, @function
    .balign 16
\name:
.Lentry\index:
    .cfi_startproc
    endbr64
.endm

.macro END name
    .cfi_endproc
    .size \name, . - \name
.endm

.macro BEHIND pointer, slow, index
    movq \pointer(%rip), %r11
    cmpb $0, (%r11)
    jne 1f
    jmp *(guard_real + 8 * \index)(%rip)
1:
    movl $\index, %r11d
    jmp .Lsave_\slow
.endm

.macro ENTRY_GATE name, index
    BEGIN \name, \index
    BEHIND guard_gate, gate, \index
    END \name
.endm

.macro ENTRY_FREE name, index
    BEGIN \name, \index
    BEHIND guard_free_gate, free, \index
    END \name
.endm

.macro ENTRY_NEVER name, index
    BEGIN \name, \index
    cmpb $0, guard_unloaded(%rip)
    jne 1f
    jmp *(guard_real + 8 * \index)(%rip)
1:
    movl $\index, %r11d
    jmp .Lsave_never
    END \name
.endm

.macro ENTRY_REFUSE name, index
    BEGIN \name, \index
    movl $\index, %r11d
    jmp .Lsave_refuse
    END \name
.endm

.macro ENTRY_WRAP name, index, target
    .hidden wrap_\target
    BEGIN \name, \index
    jmp wrap_\target
    END \name
.endm

.macro ENTRY_PEEK name, index
    .hidden wrap_\name
    BEGIN \name, \index
    movq guard_free_gate(%rip), %r11
    cmpb $0, (%r11)
    jne wrap_\name
    jmp *(guard_real + 8 * \index)(%rip)
    END \name
.endm

/* Tests two bytes of one word: the gate, and whether the slice is contended (little-endian). */
.macro ENTRY_LAUNCH name, index
    .hidden wrap_\name
    BEGIN \name, \index
    movq guard_gate(%rip), %r11
    testl $0xff0000ff, (%r11)
    jne wrap_\name
    jmp *(guard_real + 8 * \index)(%rip)
    END \name
.endm

.macro ENTRY_NOTE name, index
    BEGIN \name, \index
    BEHIND guard_gate, note, \index
    END \name
.endm

.macro ENTRY_BACK name, index
    BEGIN \name, \index
    movl $\index, %r11d
    jmp .Lback
    END \name
.endm

.macro ENTRY_WAIT name, index, words
    BEGIN \name, \index
    movl $\index, %r11d
    jmp .Lwait\words
    END \name
.endm

.macro ENTRY_SPARE index
    .balign 16
.Lentry\index:
    .cfi_startproc
    endbr64
    BEHIND guard_gate, gate, \index
    .cfi_endproc
.endm

/* Make a stack frame with all registers that may carry an argument. The index of the entry is in
 * r11. */
.macro SAVE
    pushq %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    movq %rsp, %rbp
    .cfi_def_cfa_register %rbp
    subq $192, %rsp
    movq %rdi, -8(%rbp)
    movq %rsi, -16(%rbp)
    movq %rdx, -24(%rbp)
    movq %rcx, -32(%rbp)
    movq %r8, -40(%rbp)
    movq %r9, -48(%rbp)
    movq %rax, -56(%rbp)
    movq %r11, -64(%rbp)
    movups %xmm0, -80(%rbp)
    movups %xmm1, -96(%rbp)
    movups %xmm2, -112(%rbp)
    movups %xmm3, -128(%rbp)
    movups %xmm4, -144(%rbp)
    movups %xmm5, -160(%rbp)
    movups %xmm6, -176(%rbp)
    movups %xmm7, -192(%rbp)
.endm

.macro RESTORE
    movq -8(%rbp), %rdi
    movq -16(%rbp), %rsi
    movq -24(%rbp), %rdx
    movq -32(%rbp), %rcx
    movq -40(%rbp), %r8
    movq -48(%rbp), %r9
    movq -56(%rbp), %rax
    movq -64(%rbp), %r11
    movups -80(%rbp), %xmm0
    movups -96(%rbp), %xmm1
    movups -112(%rbp), %xmm2
    movups -128(%rbp), %xmm3
    movups -144(%rbp), %xmm4
    movups -160(%rbp), %xmm5
    movups -176(%rbp), %xmm6
    movups -192(%rbp), %xmm7
.endm

/* Call `slow`. If it returns 0, go on to the driver with all arguments unchanged; otherwise return
 * its result. */
.macro SLOW kind
    .balign 16
.Lsave_\kind:
    .cfi_startproc
    SAVE
    movl %r11d, %edi
    call guard_slow_\kind
    testl %eax, %eax
    jne 2f
    RESTORE
    leave
    .cfi_remember_state
    .cfi_def_cfa %rsp, 8
    .cfi_restore %rbp
    leaq guard_real(%rip), %r10
    jmp *(%r10, %r11, 8)
2:
    .cfi_restore_state
    leave
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc
.endm

    SLOW gate
    SLOW free
    SLOW never
    SLOW refuse

/* A counted call: enter, call the driver with `words` arguments from the caller's stack, leave. */
.macro WAIT_CORE words
    .balign 16
.Lwait\words:
    .cfi_startproc
    SAVE
    movl %r11d, %edi
    call guard_enter_entry
    testl %eax, %eax
    jne 3f
    RESTORE
    .if \words
    .if \words & 1
    subq $8, %rsp
    .endif
    .set copied, \words
    .rept \words
    pushq (8 + 8 * copied)(%rbp)
    .set copied, copied - 1
    .endr
    .endif
    leaq guard_real(%rip), %r10
    call *(%r10, %r11, 8)
    .if \words
    leaq -192(%rbp), %rsp
    .endif
    movq %rax, -56(%rbp)
    call guard_leave
    movq -56(%rbp), %rax
3:
    leave
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc
.endm

/* Push the arguments that may be noted onto the stack (32 bytes). */
.macro NOTABLE
    pushq %rax
    pushq %rdx
    pushq %rsi
    pushq -8(%rbp)
    movq %rsp, %rsi
.endm

/* Call the driver without counting the call, or note the call and return success. */
    .balign 16
.Lsave_note:
    .cfi_startproc
    SAVE
    movl %r11d, %edi
    NOTABLE
    call guard_slow_note
    addq $32, %rsp
    testl %eax, %eax
    jne 6f
    RESTORE
    leave
    .cfi_remember_state
    .cfi_def_cfa %rsp, 8
    .cfi_restore %rbp
    leaq guard_real(%rip), %r10
    jmp *(%r10, %r11, 8)
6:
    .cfi_restore_state
    cmpl $-1, %eax
    jne 7f
    xorl %eax, %eax
7:
    leave
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc

/* A call that frees or destroys, with at most three arguments: enter, call the driver, leave. If
 * the guard notes the call, return success. */
    .balign 16
.Lback:
    .cfi_startproc
    SAVE
    movl %r11d, %edi
    NOTABLE
    call guard_enter_back
    addq $32, %rsp
    testl %eax, %eax
    jne 4f
    RESTORE
    leaq guard_real(%rip), %r10
    call *(%r10, %r11, 8)
    movq %rax, -56(%rbp)
    call guard_leave
    movq -56(%rbp), %rax
    jmp 5f
4:
    cmpl $-1, %eax
    jne 5f
    xorl %eax, %eax
5:
    leave
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc

    .section .note.GNU-stack, "", @progbits
    .text
