//! Each kind of special instruction once. Its bytes are in the test's own memory.

use super::*;
use crate::testing::{context_and_system, in_child};

/// Runs the instruction `code` on a context prepared by `prepare`; returns context and outcome.
fn run(code: &[u8], prepare: impl FnOnce(&mut ThreadContext)) -> (Box<ThreadContext>, Outcome) {
    let (mut context, mut system) = context_and_system();
    prepare(&mut context);
    let outcome = system.special(&mut context, code.as_ptr() as u64);
    (context, outcome)
}

fn next(code: &[u8]) -> u64 {
    code.as_ptr() as u64 + code.len() as u64
}

#[test]
fn segment_bases() {
    let code = [0xf3, 0x48, 0x0f, 0xae, 0xd0]; // wrfsbase rax
    let (context, _) = run(&code, |c| c.gpr[0] = 0x1234_5678_9abc);
    assert_eq!((context.fs_base, context.rip), (0x1234_5678_9abc, next(&code)));
    let code = [0xf3, 0x0f, 0xae, 0xcb]; // rdgsbase ebx
    let (context, _) = run(&code, |c| (c.gs_base, c.gpr[3]) = (0x1_0000_0005, u64::MAX));
    assert_eq!(context.gpr[3], 5);
    // `wrfsbase` of a non-canonical address: SIGSEGV with its default action.
    let code = [0xf3, 0x48, 0x0f, 0xae, 0xd0];
    let (_, outcome) = run(&code, |c| c.gpr[0] = 1 << 63);
    assert_eq!(outcome, Outcome::Killed(libc::SIGSEGV));
}

#[test]
fn selectors_are_remembered() {
    let (mut context, mut system) = context_and_system();
    let mut step =
        |context: &mut ThreadContext, code: &[u8]| system.special(context, code.as_ptr() as u64);
    (context.gpr[0], context.fs_base) = (0x2b, 77);
    assert_eq!(step(&mut context, &[0x8e, 0xe0]), Outcome::Continue); // mov fs, eax
    assert_eq!(context.fs_base, 0);
    context.gpr[1] = u64::MAX;
    assert_eq!(step(&mut context, &[0x8c, 0xe1]), Outcome::Continue); // mov ecx, fs
    assert_eq!(context.gpr[1], 0x2b);
    assert_eq!(step(&mut context, &[0x8c, 0xd1]), Outcome::Continue); // mov ecx, ss
    assert_eq!(context.gpr[1], 0x2b);
    context.gpr[0] = 0x5b;
    assert_eq!(step(&mut context, &[0x8e, 0xd8]), Outcome::Killed(libc::SIGSEGV)); // mov ds, eax
}

#[test]
fn flags_on_the_stack() {
    let mut stack = vec![0u64; 4];
    let top = stack.as_mut_ptr() as u64 + 32;
    let (context, _) = run(&[0x9c], |c| (c.gpr[4], c.rflags) = (top, 0x10a47)); // pushfq
    assert_eq!((context.gpr[4], stack[3]), (top - 8, 0xa47));
    stack[3] = u64::MAX;
    let (context, _) = run(&[0x9d], |c| c.gpr[4] = top - 8); // popfq
    assert_eq!((context.gpr[4], context.rflags), (top, 0x202 | POPPED));
    let (context, _) = run(&[0x66, 0x9d], |c| c.gpr[4] = top - 8); // popfw
    assert_eq!((context.gpr[4], context.rflags), (top - 6, 0x202 | POPPED & 0xffff));
}

/// The flags that a `popf` of all ones sets.
const POPPED: u64 = 0x8d5 | 0x100 | 0x400 | 0x4000 | 0x40000 | 0x200000;

#[test]
fn frames_and_returns() {
    let mut stack = vec![0u64; 8];
    let base = stack.as_mut_ptr() as u64;
    let code = [0xc8, 0x10, 0, 0]; // enter 16, 0
    let (context, _) = run(&code, |c| (c.gpr[4], c.gpr[5]) = (base + 64, 0x77));
    assert_eq!((context.gpr[4], context.gpr[5], stack[7]), (base + 40, base + 56, 0x77));
    stack[..5].copy_from_slice(&[0x1000, 0x33, 0xad7, 0x2000, 0x2b]);
    let (context, _) = run(&[0x48, 0xcf], |c| c.gpr[4] = base); // iretq
    assert_eq!((context.rip, context.gpr[4], context.rflags), (0x1000, 0x2000, 0xad7 | 0x202));
    stack[1] = 0x23;
    let (_, outcome) = run(&[0x48, 0xcb], |c| c.gpr[4] = base); // retfq to 32-bit code
    assert_eq!(outcome, Outcome::Killed(libc::SIGSEGV));
}

#[test]
fn interrupts_and_unknown_instructions() {
    for (code, signo) in [
        (&[0xcd, 0x03][..], libc::SIGTRAP),  // int 3
        (&[0xf1], libc::SIGTRAP),            // icebp
        (&[0xcd, 0x04], libc::SIGSEGV),      // int 4
        (&[0x0f, 0x01, 0xc1], libc::SIGILL), // vmcall
        (&[0x06], libc::SIGILL),             // no instruction
    ] {
        assert_eq!(run(code, |_| {}).1, Outcome::Killed(signo), "{code:x?}");
    }
}

#[test]
fn transactions_never_start() {
    let code = [0xc7, 0xf8, 0x10, 0, 0, 0]; // xbegin +16
    let (context, outcome) = run(&code, |c| c.gpr[0] = 9);
    if std::arch::is_x86_feature_detected!("rtm") {
        assert_eq!(
            (outcome, context.rip, context.gpr[0]),
            (Outcome::Continue, next(&code) + 16, 0)
        );
    } else {
        assert_eq!(outcome, Outcome::Killed(libc::SIGILL));
    }
}

#[test]
fn extended_state_goes_to_memory_and_back() {
    #[repr(align(64))]
    struct Area([u8; 16384]);
    let mut area = Box::new(Area([0; 16384]));
    let place = area.0.as_mut_ptr() as u64;
    let all = |c: &mut ThreadContext| (c.gpr[0], c.gpr[2], c.gpr[7]) = (u64::MAX, u64::MAX, place);
    let save = [0x48, 0x0f, 0xc7, 0x27]; // xsavec64 [rdi]
    let (_, outcome) = run(&save, |c| {
        all(c);
        c.xstate.0[160..176].fill(0x5a);
        c.xstate.0[24..28].copy_from_slice(&0x9fc0u32.to_le_bytes());
        c.xstate.0[512] |= 3;
    });
    assert_eq!(outcome, Outcome::Continue);
    assert_eq!(area.0[160..176], [0x5a; 16]);
    assert_eq!(area.0[527] & 0x80, 0x80, "compacted");
    let restore = [0x48, 0x0f, 0xae, 0x2f]; // xrstor64 [rdi]
    let (context, outcome) = run(&restore, all);
    assert_eq!(outcome, Outcome::Continue);
    assert_eq!(context.xstate.0[160..176], [0x5a; 16]);
    assert_eq!(context.xstate.0[24..28], 0x9fc0u32.to_le_bytes());
    // The host's MXCSR still has the value of the calling convention.
    let mut mxcsr = 0u32;
    // SAFETY: stores a register into a local.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut mxcsr) };
    assert_eq!(mxcsr & !0x3f, 0x1f80);
}

#[test]
fn extended_state_that_cannot_be_stored_is_a_guest_fault() {
    let status = in_child(|| {
        let (mut context, mut system) = context_and_system();
        crate::testing::start(&mut system, &mut context);
        (context.gpr[0], context.gpr[2]) = (7, 0);
        let mut area = [0u8; 4096];
        let aligned = (area.as_mut_ptr() as u64 + 63) & !63;
        for (address, killed) in [(0x10, libc::SIGSEGV), (aligned + 1, libc::SIGSEGV)] {
            context.gpr[7] = address;
            let code = [0x0fu8, 0xae, 0x27]; // xsave [rdi]
            if system.special(&mut context, code.as_ptr() as u64) != Outcome::Killed(killed) {
                return 1;
            }
        }
        // A misaligned address is a protection fault, not a page fault.
        assert_eq!(system.fault.1, 13, "a protection fault");
        0
    });
    assert_eq!(status, 0);
}
